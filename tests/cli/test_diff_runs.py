"""``diff`` of training runs: what differs, and the first global batch that does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="checkpoints need torch: uv sync")

from lightning_stream import StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.cli import main  # noqa: E402

Answer = Callable[..., tuple[int, Any]]


def saved(folder: Path, shards: Path, steps: int = 2, size: int = 8, **settings: Any) -> tuple[str, list[list[int]]]:
    """The folder of a run that stopped after some steps, and the ids of every batch of its first epoch."""
    loader = StreamingDataLoader(StreamingDataset(remote=str(shards / "train"), **settings), global_batch_size=size)
    found = []
    for _ in loader:
        assert loader.last_batch is not None
        found.append(loader.last_batch.ids.tolist())
        if len(found) == steps:
            folder.mkdir()
            torch.save({"data": loader.state_dict()}, folder / "last.pt")
    return str(folder), found


def test_runs_that_stopped_at_other_steps_have_the_same_order(
    shards: Path, tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    (one, _), (other, _) = (saved(tmp_path / str(steps), shards, steps, shuffle=True) for steps in (2, 5))
    assert answer("diff", one, other)[0] == 0
    assert main(["diff", one, other]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "EQUAL: the order of both runs is the same"
    assert [line.rsplit("epoch ")[-1] for line in lines[1:]] == ["0, position 16", "0, position 40"]


@pytest.mark.parametrize(
    ("settings", "name", "values"),
    [
        ({"shuffle_seed": 7}, "shuffle_seed", [9176, 7]),
        ({"window": 1}, "window", [16, 1]),
        ({"size": 16}, "global_batch_size", [8, 16]),
        ({"shuffle_algo": "py1e", "batch_size": 8}, "shuffle_algo", ["window", "py1e"]),
    ],
)
def test_diff_names_the_setting_and_the_first_batch_that_differ(
    shards: Path, tmp_path: Path, answer: Answer, settings: dict[str, Any], name: str, values: list[Any]
) -> None:
    (one, first), (other, second) = (
        saved(tmp_path / "a", shards, shuffle=True),
        saved(tmp_path / "b", shards, shuffle=True, **settings),
    )
    code, about = answer("diff", one, other, "--stream", str(shards / "train"))
    assert (code, about["differences"][name]) == (1, values)
    sets = zip(map(sorted, first), map(sorted, second), strict=False)
    step = next(k for k, (mine, theirs) in enumerate(sets) if mine != theirs)
    found = about["first_batch"]
    assert (found["epoch"], found["batch"]) == (0, step)
    assert list(map(sorted, found["ids"])) == [sorted(first[step]), sorted(second[step])]


def test_diff_of_runs_over_other_data_says_so(shards: Path, tmp_path: Path, answer: Answer) -> None:
    one, _ = saved(tmp_path / "a", shards)
    loader = StreamingDataLoader(StreamingDataset(remote=str(shards / "val")), global_batch_size=8)
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "b.pt")
    code, about = answer("diff", one, str(tmp_path / "b.pt"), "--stream", str(shards / "train"))
    assert (code, list(about["differences"]), about["first_batch"]) == (1, ["data"], None)


def test_a_setting_without_an_effect_differs_in_no_batch(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one, _), (other, _) = (saved(tmp_path / str(seed), shards, shuffle_seed=seed) for seed in (1, 2))
    assert main(["diff", one, other, "--stream", str(shards / "train")]) == 1
    assert "No global batch differs in epochs 0 to 0." in capsys.readouterr().out


def test_diff_takes_two_training_runs(shards: Path, tmp_path: Path, answer: Answer) -> None:
    run, _ = saved(tmp_path / "run", shards)
    assert "diff compares two training runs" in answer("diff", run, str(shards / "train"))[1]["error"]
