"""``checkpoint convert``: the position of a training run in another file continues with the rest of the epoch."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="checkpoints need torch: uv sync")

from lightning_stream import (  # noqa: E402
    MDSWriter,
    StreamingDataLoader,
    StreamingDataset,
    read_position,
)
from lightning_stream.cli import main  # noqa: E402
from lightning_stream.errors import StateError  # noqa: E402

Answer = Callable[..., tuple[int, Any]]
GOLDEN = Path(__file__).parents[1] / "trainers" / "golden"
PEER = """
import json, sys
from streaming import StreamingDataLoader, StreamingDataset
state, settings = json.loads(sys.argv[2]), json.loads(sys.argv[3])
loader = StreamingDataLoader(StreamingDataset(local=sys.argv[1], **settings), batch_size=settings["batch_size"])
loader.load_state_dict(state)
print(json.dumps([[batch["id"].tolist() for batch in loader] for _ in range(2)]))
"""


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    """167 samples in 7 shards: the last batches of an epoch are not full."""
    with MDSWriter(out=tmp_path / "numbers", columns={"id": "int"}, size_limit=512) as writer:
        for number in range(167):
            writer.write({"id": number})
    return str(tmp_path / "numbers")


def loader_of(remote: str, **settings: Any) -> StreamingDataLoader:
    return StreamingDataLoader(StreamingDataset(remote=remote, shuffle=True, **settings), global_batch_size=16)


def after(steps: int, remote: str, **settings: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """The state after some steps, and the ids of the rest of that epoch and of the next one."""
    loader = loader_of(remote, **settings)
    batches = (batch for _ in range(2) for batch in loader)
    for _ in range(steps):
        next(batches)
    state = loader.state_dict()
    return state, rest(loader_of(remote, **settings), state)


def rest(loader: StreamingDataLoader, state: Any) -> list[list[int]]:
    loader.load_state_dict(state)
    return [batch["id"].tolist() for _ in range(2) for batch in loader]


@pytest.mark.parametrize("name", ["position.pt", "position.json"])
def test_a_position_of_lightning_continues_in_a_plain_loop(numbers: str, tmp_path: Path, name: str) -> None:
    state, expected = after(5, numbers)
    torch.save({"callbacks": {"lightning_stream": {"position": state}}}, tmp_path / "last.ckpt")
    assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / name)]) == 0
    assert rest(loader_of(numbers), read_position(tmp_path / name)) == expected


def test_a_plain_loop_may_keep_its_state_under_any_key_but_only_one(tmp_path: Path, numbers: str) -> None:
    state, _ = after(3, numbers)
    torch.save({"model": {"w": torch.zeros(2)}, "run": {"data": state, "step": 3}}, tmp_path / "run.pt")
    assert read_position(tmp_path / "run.pt") == state
    trainer_state = {"stateful_callbacks": {"StreamingTrainerCallback": {"attributes": {"position": state}}}}
    (tmp_path / "trainer_state.json").write_text(json.dumps(trainer_state))
    assert read_position(tmp_path / "trainer_state.json") == state
    torch.save({"train": state, "val": state}, tmp_path / "two.pt")
    with pytest.raises(StateError, match="holds some at train, val"):
        read_position(tmp_path / "two.pt")


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*")
@pytest.mark.parametrize(("steps", "at"), [(5, 8), (11, 3), (14, 11)])
def test_a_position_in_a_checkpoint_of_lightning_is_where_its_run_continues(
    tmp_path: Path, steps: int, at: int
) -> None:
    """Also where Lightning's own counters, those of the checkpoint that is copied, are in another epoch."""
    pytest.importorskip("lightning", reason="Lightning is not installed: uv sync")
    from support import lightning_runs

    shards = lightning_runs.write_shards(tmp_path / "shards")
    whole = lightning_runs.Run(shards, tmp_path, every_n_train_steps=1, val=False)
    saved = dict(lightning_runs.checkpoints(tmp_path))
    plain, moved = str(tmp_path / "position.pt"), tmp_path / "moved.ckpt"
    before = saved[at].read_bytes()
    assert main(["checkpoint", "convert", str(saved[steps]), plain]) == 0
    flags = ["--to", "lightning", "--into", str(saved[at])]
    assert main(["checkpoint", "convert", plain, str(moved), *flags]) == 0
    assert saved[at].read_bytes() == before
    assert read_position(moved) == read_position(saved[steps])
    resumed = lightning_runs.Run(shards, tmp_path / "again", moved, val=False)
    assert resumed.steps == {step - steps + at: ids for step, ids in whole.steps.items() if step >= steps}


def test_convert_refuses_what_would_not_continue(
    numbers: str, tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(after(3, numbers)[0], "run.pt")
    torch.save({"callbacks": {}, "pytorch-lightning_version": "2.6", "state_dict": {}}, "weights.ckpt")
    (tmp_path / "sharded").mkdir()
    torch.save({}, tmp_path / "sharded" / "meta.pt")
    (tmp_path / "there.pt").write_bytes(b"kept")
    refused = {
        ("out.pt", "--to", "lightning"): "pass --into CHECKPOINT",
        ("there.pt",): "there.pt exists",
        ("s3://bucket/out.pt",): "a file of this machine",
        ("out.pt", "--into", "weights.ckpt"): "has weights alone",
        ("out.pt", "--into", "sharded"): "is a sharded one",
        ("out.pt", "--into", "run.pt"): "run.pt is none",
        ("out.pt", "--into", "weights.ckpt", "--to", "plain"): "omit it for a plain file",
        ("out.pt", "--into", "there.pt"): "is not a checkpoint that torch reads",
        ("out.pt", "--to", "mosaicml-streaming"): "pass --stream URL",
        ("out.pt", "--to", "mosaicml-streaming", "--stream", numbers): "shuffle_algo='window'",
        ("out.pt", "--stream", numbers): "is for --to mosaicml-streaming",
        ("missing/out.pt",): "folder that exists",
    }
    for flags, reason in refused.items():
        code, about = answer("checkpoint", "convert", "run.pt", *flags)
        assert code == 2, flags
        assert reason in about["error"]
    assert (tmp_path / "there.pt").read_bytes() == b"kept"
    assert "is one of lightning" in _of_another_trainer(answer, tmp_path)
    assert "belong to `checkpoint convert`" in answer("checkpoint", "show", "run.pt", "out.pt")[1]["error"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "out"))) == []


def _of_another_trainer(answer: Answer, tmp_path: Path) -> str:
    torch.save({"callbacks": {}, "pytorch-lightning_version": "2.6", "loops": {"fit_loop": {}}}, "whole.ckpt")
    return str(
        answer("checkpoint", "convert", "run.pt", "out.pt", "--into", "whole.ckpt", "--to", "composer")[1]["error"]
    )


def test_show_prints_what_a_checkpoint_records(
    numbers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Answer
) -> None:
    torch.save({"data": after(3, numbers)[0]}, tmp_path / "run.pt")
    code, about = answer("checkpoint", "show", str(tmp_path / "run.pt"))
    assert (code, about["samples_trained_on"], about["global_batches"], about["order"]["seed"]) == (0, 48, 3, 9176)
    assert main(["checkpoint", "show", str(GOLDEN / "mosaic_14ba.pt")]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:4]] == ["mosaicml-streaming", "1", "48"]
    code, about = answer("explain", str(GOLDEN / "mosaic_14ba.pt"), "--stream", numbers)
    assert code == 2
    assert "does not record its order" in about["error"]


def test_mosaicml_streamings_state_at_an_epochs_end_is_that_of_the_next_one() -> None:
    """That library saves the epoch that is over, so its numbers alone would repeat that epoch."""
    state = read_position(GOLDEN / "mosaic_1ep.pt")
    assert (state["epoch"], state["sample_in_epoch"]) == (1, 0)


@pytest.mark.parametrize(("algorithm", "steps"), [("py1e", 5), ("py1br", 10), ("py1s", 11), ("py2s", 13), ("naive", 1)])
def test_mosaicml_streaming_continues_from_a_converted_state(
    numbers: str, tmp_path: Path, answer: Answer, mosaic_python: str, algorithm: str, steps: int
) -> None:
    settings = {"shuffle_algo": algorithm, "num_canonical_nodes": 2, "shuffle_block_size": 64, "batch_size": 16}
    state, expected = after(steps, numbers, **settings)
    torch.save(state, tmp_path / "run.pt")
    flags = ["--to", "mosaicml-streaming", "--stream", numbers]
    code, about = answer("checkpoint", "convert", str(tmp_path / "run.pt"), str(tmp_path / "state.json"), *flags)
    assert (code, about["state"]) == (0, json.loads((tmp_path / "state.json").read_text()))
    given = [json.dumps(about["state"]), json.dumps({**settings, "shuffle": True})]
    command = [mosaic_python, "-W", "ignore", "-c", PEER, numbers, *given]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    found = [sorted(set(ids)) for epoch in json.loads(read) for ids in epoch]
    assert found == [sorted(set(ids)) for ids in expected]


def test_a_run_over_some_samples_cannot_move_to_mosaicml_streaming(
    numbers: str, tmp_path: Path, answer: Answer
) -> None:
    settings = {"shuffle_algo": "py1e", "batch_size": 16, "exclude_ids": [3]}
    torch.save(after(3, numbers, **settings)[0], tmp_path / "run.pt")
    (tmp_path / "ids.txt").write_text("3\n")
    flags = ["--to", "mosaicml-streaming", "--stream", numbers, "--exclude-ids", str(tmp_path / "ids.txt")]
    code, about = answer("checkpoint", "convert", str(tmp_path / "run.pt"), str(tmp_path / "out.pt"), *flags)
    assert (code, "omits some" in about["error"]) == (2, True)


class Evil:
    """A value whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["pickle", "torch", "sharded", "sharded value", "text", "empty"])
def test_a_file_that_is_no_checkpoint_is_refused_and_runs_no_code(tmp_path: Path, kind: str, capsys: Any) -> None:
    path, evil = tmp_path / "last.ckpt", Evil(tmp_path / "made")
    if kind == "sharded value":
        from torch.distributed import checkpoint as dcp

        path = tmp_path / "sharded"
        content = {"state": {"dataset_state": {"train": {"lightning_stream": evil}}}}
        dcp.save(content, checkpoint_id=path, no_dist=True)
    elif kind == "sharded":
        path = tmp_path / "sharded"
        path.mkdir()
        (path / ".metadata").write_bytes(pickle.dumps(evil))
    elif kind == "torch":
        torch.save({"x": evil}, path)
    else:
        path.write_bytes({"pickle": pickle.dumps(evil), "text": b"junk", "empty": b""}[kind])
    for arguments in (["show"], ["convert", str(tmp_path / "out.pt")]):
        assert main(["checkpoint", arguments[0], str(path), *arguments[1:]]) == 2
        assert re.fullmatch(r"error: .*is not a checkpoint that torch reads.*\n", capsys.readouterr().err)
    assert not evil.path.exists()
    with pytest.raises(StateError, match="trusted=True"):
        read_position(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_metadata_of_a_sharded_checkpoint_names_files_of_its_folder(tmp_path: Path, numbers: str) -> None:
    from torch.distributed import checkpoint as dcp

    from lightning_stream.trainers.sharded import held_position

    state = json.dumps(after(3, numbers)[0])
    model = {"w": torch.zeros(3, dtype=torch.bfloat16), "steps": [1, 2]}
    content = {"state": {"model": model, "dataset_state": {"train": {"lightning_stream": state}}}}
    dcp.save(content, checkpoint_id=tmp_path / "sharded", no_dist=True)
    assert read_position(tmp_path / "sharded") == read_position(tmp_path / "sharded", trusted=True) == json.loads(state)
    name = held_position(tmp_path / "sharded").relative_path
    found = (tmp_path / "sharded" / ".metadata").read_bytes()
    (tmp_path / "sharded" / ".metadata").write_bytes(found.replace(name.encode(), b"/" + name.encode()[1:]))
    with pytest.raises(StateError, match="holds its files in one folder"):
        read_position(tmp_path / "sharded")
