"""A client is made quickly: nothing is collected meanwhile, and no folder of a hundred services is looked into."""

from __future__ import annotations

import gc
from typing import Any

import botocore.loaders
import pytest

from lightning_stream.stores import open_store
from lightning_stream.stores.base import PerProcess
from lightning_stream.stores.retry import RetryingStore
from lightning_stream.stores.s3 import S3Store, _core_session


def test_nothing_is_collected_while_a_client_is_made_and_all_is_as_before_afterwards() -> None:
    def make() -> bool:
        return gc.isenabled()

    def fail() -> None:
        raise OSError("no client")

    assert gc.isenabled()
    assert PerProcess(make)() is False
    assert gc.isenabled()
    with pytest.raises(OSError, match="no client"):
        PerProcess(fail)()
    assert gc.isenabled()
    gc.disable()
    try:
        PerProcess(make)()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_services_that_are_found_quickly_are_those_that_botocore_finds() -> None:
    loader: Any = _core_session().get_component("data_loader")
    slowly = botocore.loaders.Loader(extra_search_paths=loader.search_paths)
    found = set(loader.list_available_services("service-2"))
    assert found >= set(slowly.list_available_services("service-2"))
    assert {"s3", "sts", "sso"} <= found


def test_making_an_s3_client_collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = open_store("s3://bucket/data", {"region": "us-east-1"})
    assert isinstance(store, RetryingStore)
    assert isinstance(store.store, S3Store)
    seen: list[int] = []

    def collected(phase: str, details: dict[str, int]) -> None:
        seen.append(details["generation"])

    gc.collect()
    gc.callbacks.append(collected)
    try:
        client = store.store._signed()
    finally:
        gc.callbacks.remove(collected)
    assert client.meta.service_model.service_name == "s3"
    assert 2 not in seen
