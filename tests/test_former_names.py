"""Arguments that have another name now warn, name it, and do what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_stream import StreamingDataset


def _policy(dataset: StreamingDataset) -> tuple[object, ...]:
    policy = dataset._streaming_source.bad_data.policy
    return policy.sample, policy.shard, policy.quarantine


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ({"on_bad_sample": "substitute"}, {"on_bad": {"sample": "substitute"}}),
        ({"on_bad_sample": "substitute", "on_bad_shard": "substitute"}, {"on_bad": "substitute"}),
        ({"on_bad_shard": "substitute", "quarantine": "a"}, {"on_bad": {"shard": "substitute", "quarantine": "a"}}),
        ({"on_bad_sample": "raise", "quarantine": None}, {}),
    ],
)
def test_former_arguments_of_bad_data_do_what_they_did(
    tmp_path: Path, former: dict[str, Any], now: dict[str, Any]
) -> None:
    with pytest.warns(FutureWarning, match=r"now parts of on_bad. Pass e.g. on_bad=") as warned:
        before = StreamingDataset(local=tmp_path, **former)
    assert [Path(one.filename) for one in warned] == [Path(__file__)]  # where the user wrote it
    assert _policy(before) == _policy(StreamingDataset(local=tmp_path, **now))


def test_a_former_argument_beside_the_new_one_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"on_bad": "raise", "on_bad_sample": "substitute"}
    with (
        pytest.warns(FutureWarning, match="on_bad_sample"),
        pytest.raises(TypeError, match="pass on_bad alone: found on_bad_sample beside it"),
    ):
        StreamingDataset(local=tmp_path, **options)


@pytest.mark.parametrize("on_bad", [{"samples": "raise"}, {"seed": 3}])
def test_an_unknown_part_is_refused(tmp_path: Path, on_bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the parts of on_bad are sample, shard and quarantine"):
        StreamingDataset(local=tmp_path, on_bad=on_bad)
