"""Every line that mosaicml-streaming 0.13 wrote, equal bit for bit."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream.order.mosaic import epoch_work, partition, sampling, shuffle, stream_draws

REPEATED = re.compile(r"(\[[\d, ]+\])\*(\d+)")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return map(json.loads, text.splitlines())


def sizes(written: list[int] | str) -> list[int]:
    """Shard sizes, some of which are written as "[4093]*250"."""
    if isinstance(written, str):
        match = REPEATED.fullmatch(written)
        assert match is not None
        return json.loads(match[1]) * int(match[2])
    return written


def assert_equal(call: Callable[[], np.ndarray], line: dict[str, Any]) -> None:
    if "raised" in line:
        with pytest.raises(ValueError, match="found"):
            call()
        return
    ids = call()
    assert ids.dtype == np.int64
    assert list(ids.shape) == line["shape"], line["in"]
    assert hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest() == line["sha256"], line["in"]
    if "ids" in line:
        assert ids.reshape(-1).tolist() == np.asarray(line["ids"]).reshape(-1).tolist()


def streams(golden: Path, name: str) -> dict[str, Any]:
    """The streams of one of the named mixes, as arguments."""
    spec = json.loads((golden / "order/spec.json").read_text())
    mix, options = spec["weights"][name]
    weights = [{kind: value for kind, value in stream.items() if kind != "local"} for stream in mix]
    return {"shard_sizes": [spec["spec"][stream["local"]] for stream in mix], "weights": weights, **options}


def test_every_shuffle_equals_the_original(shared_golden: Path) -> None:
    for line in lines(shared_golden / "order/shuffles.jsonl.gz"):
        arguments = {**line["in"], "shard_sizes": sizes(line["in"]["shard_sizes"])}
        assert_equal(lambda: shuffle(**arguments), line)  # noqa: B023


def test_every_partition_equals_the_original(shared_golden: Path) -> None:
    for line in lines(shared_golden / "order/partitions.jsonl.gz"):
        assert_equal(lambda: partition(**line["in"]), line)  # noqa: B023


def test_every_sampling_equals_the_original(shared_golden: Path) -> None:
    for line in lines(shared_golden / "order/samplings.jsonl.gz"):
        arguments = {**line["in"], "samples_per_shard": sizes(line["in"]["samples_per_shard"])}
        assert_equal(lambda: sampling(**arguments), line)  # noqa: B023


def test_every_epoch_equals_the_original(shared_golden: Path) -> None:
    for line in lines(shared_golden / "order/work.jsonl.gz"):
        arguments = {**line["in"], **streams(shared_golden, line["in"]["weights"])}
        assert_equal(lambda: epoch_work(**arguments), line)  # noqa: B023


def test_every_weight_equals_the_original(shared_golden: Path) -> None:
    for line in lines(shared_golden / "order/weights.jsonl"):
        draws = stream_draws(**streams(shared_golden, line["weights"]))
        assert draws.epoch_size == line["epoch_size"] == line["len"]
        found = zip(draws.proportion, draws.repeat, draws.choose, strict=True)
        assert [list(stream) for stream in found] == line["streams"], line["weights"]
