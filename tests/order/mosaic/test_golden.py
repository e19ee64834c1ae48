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
from support.mosaic_work import epoch_partition, epoch_work, samples, stream_weights

from lightning_stream.order import Snapshot, choose_per_stream
from lightning_stream.order.mosaic.shuffles import shuffle
from lightning_stream.order.mosaic.work import chosen, sampling

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
        with pytest.raises(ValueError, match=r"found|must"):
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
        arguments = {**line["in"], "shard_sizes": np.array(sizes(line["in"]["shard_sizes"]), np.int64)}
        assert_equal(lambda: shuffle(**arguments), line)  # noqa: B023


def test_every_partition_equals_the_original(shared_golden: Path) -> None:
    for line in lines(shared_golden / "order/partitions.jsonl.gz"):
        assert_equal(lambda: epoch_partition(**line["in"]), line)  # noqa: B023


def test_every_sampling_equals_the_original(shared_golden: Path) -> None:
    for line in lines(shared_golden / "order/samplings.jsonl.gz"):
        arguments = dict(line["in"])
        arguments["sizes"] = np.array(sizes(arguments.pop("samples_per_shard")), np.int64)
        assert_equal(lambda: sampling(**arguments), line)  # noqa: B023


def test_every_epoch_equals_the_original(shared_golden: Path) -> None:
    for line in lines(shared_golden / "order/work.jsonl.gz"):
        arguments = {**line["in"], **streams(shared_golden, line["in"]["weights"])}
        assert_equal(lambda: epoch_work(**arguments), line)  # noqa: B023


def test_every_weight_equals_the_original(shared_golden: Path) -> None:
    for line in lines(shared_golden / "order/weights.jsonl"):
        given = streams(shared_golden, line["weights"])
        snapshot, epoch_size = Snapshot.of(given["shard_sizes"]), samples(given.get("epoch_size"))
        weights = stream_weights(given["weights"], snapshot.num_streams)
        choose, proportions = chosen(snapshot, weights, epoch_size, 9176)
        assert sum(choose) == sum(choose_per_stream(snapshot, weights, epoch_size, 9176))
        assert sum(choose) == line["epoch_size"] == line["len"]
        repeats = [take / size for take, size in zip(choose, snapshot.stream_samples.tolist(), strict=True)]
        found = zip(proportions, repeats, choose, strict=True)
        assert [list(stream) for stream in found] == line["streams"], line["weights"]
