"""Arguments that are parts of another one now warn, name it, and do what they did."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_stream import MapDataset, StatefulDataLoader, StreamingDataset
from lightning_stream.order import World

MESH = SimpleNamespace(mesh_dim_names=("fsdp",))
LENGTHS = {"tokens": (64, None)}


def is_short(sample: dict[str, Any]) -> bool:
    return len(sample) < 3


def settings(dataset: StreamingDataset) -> list[object]:
    """What the arguments of a dataset become."""
    source = dataset._streaming_source
    rules = getattr(source.reader._choose, "__self__", None)  # the filters
    starts = source.reader.shards.config.start_by_range
    return [
        rules,
        starts,
        source.bad_data.policy,
        source.world,
        source.predownload,
        source.buckets,
        source.order_arguments,
    ]


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ({"on_bad_sample": "substitute"}, {"on_bad": {"sample": "substitute"}}),
        ({"on_bad_sample": "substitute", "on_bad_shard": "substitute"}, {"on_bad": "substitute"}),
        ({"on_bad_shard": "substitute", "quarantine": "a"}, {"on_bad": {"shard": "substitute", "quarantine": "a"}}),
        ({"on_bad_sample": "raise", "quarantine": None}, {}),
        ({"filter_lengths": LENGTHS}, {"filter": {"lengths": LENGTHS}}),
        ({"filter_lengths": LENGTHS, "exclude_ids": [3]}, {"filter": {"lengths": LENGTHS, "exclude_ids": [3]}}),
        ({"exclude_ids": "ids.npy", "filter": is_short}, {"filter": {"sample": is_short, "exclude_ids": "ids.npy"}}),
        ({"exclude_ids": [3], "filter": {"sample": is_short}}, {"filter": {"sample": is_short, "exclude_ids": [3]}}),
        ({"filter_lengths": None, "exclude_ids": None}, {}),
        ({"data_dimension": "fsdp", "world": MESH}, {"world": (MESH, "fsdp")}),
        ({"data_dimension": "fsdp", "world": World(1, 4)}, {"world": World(1, 4)}),
        ({"data_dimension": "fsdp", "world": (1, 4)}, {"world": (1, 4)}),
        ({"quick_start": False}, {"window": {"quick_start": False}}),
        ({"quick_start": True, "window": 8}, {"window": {"shards": 8, "quick_start": True}}),
        ({"start_by_range": True, "predownload": 64}, {"predownload": {"samples": 64, "by_range": True}}),
        ({"start_by_range": None}, {}),
        ({"bucket_window": 64, "bucket_by": "tokens"}, {"bucket_by": {"lengths": "tokens", "window": 64}}),
        ({"bucket_window": 64, "batch_tokens": 800}, {"bucket_by": {"window": 64}, "batch_tokens": 800}),
        ({"batch_multiple": 12, "batch_tokens": 1e4}, {"batch_tokens": {"tokens": 10_000, "multiple": 12}}),
    ],
)
def test_former_arguments_do_what_they_did(tmp_path: Path, former: dict[str, Any], now: dict[str, Any]) -> None:
    with pytest.warns(FutureWarning, match=r"now parts of (\w+). Pass e.g. \1=[({]") as warned:
        before = StreamingDataset(local=tmp_path, shuffle=True, **former)
    assert [Path(one.filename) for one in warned] == [Path(__file__)]  # where the user wrote it
    assert settings(before) == settings(StreamingDataset(local=tmp_path, shuffle=True, **now))


def test_subclasses_and_datasets_of_the_user_s_own_take_former_arguments_too(tmp_path: Path) -> None:
    class Excluding(StreamingDataset):
        def __init__(self, folder: Path) -> None:
            super().__init__(local=folder, exclude_ids=[3])

    lengths: dict[str, Any] = {"lengths": [1, 2, 3, 4], "bucket_by": "tokens"}
    with pytest.warns(FutureWarning, match=r'now parts of filter. Pass e.g. filter={"exclude_ids": ...}'):
        assert (
            settings(Excluding(tmp_path))[0]
            == settings(StreamingDataset(local=tmp_path, filter={"exclude_ids": [3]}))[0]
        )
    with pytest.warns(FutureWarning, match=r'bucket_by={"lengths": ..., "window": ...}'):
        dataset = MapDataset(range(4), **lengths, bucket_window=4)
    bucketing: dict[str, Any] = {**lengths, "bucket_by": {"lengths": "tokens", "window": 4}}
    assert settings(dataset)[-2:] == settings(MapDataset(range(4), **bucketing))[-2:]
    with pytest.warns(FutureWarning, match=r"world=\(mesh, NAMES\)"):
        loader = StatefulDataLoader(range(4), world=MESH, data_dimension="fsdp")  # type: ignore[arg-type]
    assert loader.world == (MESH, "fsdp")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_bad": "raise", "on_bad_sample": "substitute"}, "pass on_bad alone: found on_bad_sample beside it"),
        ({"filter": {"exclude_ids": [3]}, "exclude_ids": [4]}, "pass filter alone: found exclude_ids beside it"),
    ],
)
def test_a_former_argument_beside_one_that_says_the_same_is_refused(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=text):
        StreamingDataset(local=tmp_path, **options)


@pytest.mark.parametrize("on_bad", [{"samples": "raise"}, {"seed": 3}])
def test_an_unknown_part_is_refused(tmp_path: Path, on_bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="on_bad has the parts sample, shard, quarantine"):
        StreamingDataset(local=tmp_path, on_bad=on_bad)
