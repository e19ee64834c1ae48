"""A DataFrame's cache under fork, with a conversion that needs no Spark."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_stream import MDSWriter
from lightning_stream.spark import frame_cache


class Conversion:
    """Writes ten rows once it may."""

    def __init__(self) -> None:
        self.job = SimpleNamespace(fingerprint="key")
        self.begun, self.go = threading.Event(), threading.Event()

    def writing_to(self, uri: str) -> Conversion:
        self.uri = uri
        return self

    def run(self, _: Any) -> list[Any]:
        self.begun.set()
        assert self.go.wait(30)
        return []

    def about(self) -> dict[str, Any]:
        return {}

    def publish(self, *_: Any) -> None:
        with MDSWriter(out=self.uri, columns={"id": "int"}) as writer:
            writer.write_batch({"id": list(range(10))})


def test_a_child_forked_while_its_parent_converts_waits_for_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = Conversion()
    monkeypatch.setattr(frame_cache, "conversion_of", lambda *_: conversion)
    monkeypatch.setattr(frame_cache.Publication, "begin", lambda *_, **__: conversion)
    cache = frame_cache.FrameCache(None, cache=tmp_path)
    cache.start()
    assert conversion.begun.wait(30)
    with cache._lock:
        child = os.fork()
    if not child:
        signal.alarm(20)
        num_rows = 0
        try:
            num_rows = len(cache)
        finally:
            os._exit(int(num_rows != 10))
    conversion.go.set()
    assert os.waitpid(child, 0)[1] == 0
    assert len(cache) == 10
