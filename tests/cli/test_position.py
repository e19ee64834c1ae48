"""``position``: what it says of a checkpoint is what a loader does, and where two runs differ."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers.web import WebServer

torch = pytest.importorskip("torch", reason="checkpoints need torch: uv sync")

from lightning_stream import (  # noqa: E402
    MDSWriter,
    Packing,
    RunReport,
    StatefulDataLoader,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    add_lengths,
    read_position,
)
from lightning_stream.cli import main  # noqa: E402
from lightning_stream.errors import StateError  # noqa: E402

Answer = Callable[..., tuple[int, Any]]
GOLDEN = Path(__file__).parents[1] / "trainers" / "golden"
PEER = """
import json, sys
from streaming import StreamingDataLoader, StreamingDataset
runs = []
for state, settings in json.loads(sys.argv[2]):
    loader = StreamingDataLoader(StreamingDataset(local=sys.argv[1], **settings), batch_size=settings["batch_size"])
    loader.load_state_dict(state)
    runs.append([[batch["id"].tolist() for batch in loader] for _ in range(2)])
    del loader
print(json.dumps(runs))
"""


def trained(dataset: StreamingDataset, checkpoint: Path, batches: int = 3) -> list[int]:
    """Train some batches, save a checkpoint as Lightning does, and return the ids of the batch that comes next."""
    loader = StreamingDataLoader(dataset, global_batch_size=8)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"callbacks": {"lightning_stream": {"position": loader.state_dict()}}}, checkpoint)
    next(iterator)
    assert loader.last_batch is not None
    return loader.last_batch.ids.tolist()


def test_position_names_the_samples_that_come_next(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Answer
) -> None:
    run = tmp_path / "run"
    ids = trained(StreamingDataset(remote=str(shards / "train"), shuffle=True), run / "checkpoints" / "last.ckpt")
    code, about = answer("position", str(run), "--stream", str(shards))
    assert code == 0
    assert (about["epoch"], about["samples_trained_on"], about["global_batches"]) == (0, 24, 3)
    assert about["order"]["seed"] == 9176
    assert about["batches"][0]["ids"] == ids
    assert about["global_batches_left"] == 5
    assert main(["position", str(run), "--stream", str(shards / "val")]) == 1
    assert "The data of --stream is not that of the checkpoint." in capsys.readouterr().out
    trained(
        StreamingDataset(remote=str(shards / "train"), filter={"exclude_ids": [3]}),
        run / "checkpoints" / "last.ckpt",
    )
    assert main(["position", str(run), "--stream", str(shards / "train")]) == 1
    assert "read other samples of --stream: pass its --filter-lengths and --exclude-ids" in capsys.readouterr().out
    assert main(["position", str(run)]) == 0
    assert ["samples", "trained", "on", "24"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_position_shows_what_any_step_saw(shards: Path, tmp_path: Path, answer: Answer) -> None:
    run, data = tmp_path / "run", str(shards / "train")
    trained(StreamingDataset(remote=data, shuffle=True), run / "checkpoints" / "last.ckpt")
    loader = StreamingDataLoader(StreamingDataset(remote=data, shuffle=True), global_batch_size=8)
    steps = []
    for _ in loader:
        assert loader.last_batch is not None
        steps.append(loader.last_batch.ids.tolist())
    page = tmp_path / "step.html"
    for step in (1, 3, 7):  # done, the next one, and the last one
        code, about = answer("position", str(run), "--stream", data, "--step", str(step), "--page", str(page))
        assert (code, about["batches"][0]["ids"]) == (0, steps[step])
        assert all(f"<h2>sample {number}</h2>" in page.read_text() for number in steps[step])
    assert "epoch 0 has 8 of them" in answer("position", str(run), "--stream", data, "--step", "8")[1]["error"]
    assert "pass --stream" in answer("position", str(run), "--step", "1")[1]["error"]
    assert "pass --step" in answer("position", str(run), "--stream", data, "--page", str(page))[1]["error"]
    _, about = answer("position", str(run), "--stream", data, "--next", "9", "--step", "0")
    assert [batch["ids"] for batch in about["batches"]] == [steps[0], *steps[3:]]


def test_position_reads_a_checkpoint_in_a_store(shards: Path, tmp_path: Path, answer: Answer) -> None:
    trained(StreamingDataset(remote=str(shards / "train"), shuffle=True), tmp_path / "last.ckpt")
    with WebServer() as server:
        server.objects["/runs/flowers/checkpoints/last.ckpt"] = (tmp_path / "last.ckpt").read_bytes()
        server.objects["/runs/flowers"] = b"<html>a server may list a folder</html>"
        for url in ("runs/flowers/checkpoints/last.ckpt", "runs/flowers"):
            code, about = answer("position", f"{server.url}/{url}")
            assert (code, about["samples_trained_on"]) == (0, 24)
            assert about["checkpoint"] == f"{server.url}/runs/flowers/checkpoints/last.ckpt"
        code, about = answer("position", f"{server.url}/runs/other")
        assert code == 2
        assert f"there is no checkpoint at {server.url}/runs/other" in about["error"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_position_downloads_only_the_position_of_a_sharded_checkpoint(
    shards: Path, tmp_path: Path, answer: Answer
) -> None:
    from torch.distributed import checkpoint as dcp

    from lightning_stream.loading.plain import STATE_KEY

    loader = StreamingDataLoader(StreamingDataset(remote=str(shards / "train"), shuffle=True), global_batch_size=8)
    next(iter(loader))
    state = {
        "state": {
            "dataset_state": {"train": {STATE_KEY: json.dumps(loader.state_dict())}},
            "model": {"w": torch.zeros(4)},
        }
    }
    dcp.save(state, checkpoint_id=tmp_path / "ep0", no_dist=True)
    with WebServer() as server:
        for file in (tmp_path / "ep0").iterdir():
            server.objects[f"/run/ep0/{file.name}"] = file.read_bytes()
        server.objects["/run/ep0/weights.distcp"] = b"never asked for"
        server.objects["/run/ep0"] = b"<html>a server may list a folder</html>"
        code, about = answer("position", f"{server.url}/run/ep0")
        assert server.count("GET", "weights") == 0
    assert (code, about["samples_trained_on"]) == (0, 8)


def test_the_streams_that_a_run_recorded_need_not_be_passed(shards: Path, tmp_path: Path, answer: Answer) -> None:
    run = tmp_path / "run"
    parts = {"train": {"proportion": 0.25}, "val": {"proportion": 0.75}}
    streams = [Stream(str(shards / name), **weight) for name, weight in parts.items()]
    ids = trained(StreamingDataset(streams=streams, shuffle=True), run / "checkpoints" / "last.ckpt")
    assert "pass --stream" in answer("position", str(run), "--next", "1")[1]["error"]
    loader = StreamingDataLoader(StreamingDataset(streams=streams, shuffle=True), global_batch_size=8)
    with RunReport(run, loader):
        next(iter(loader))
    with (run / "data_log.jsonl").open("a") as log:
        log.write('{"kind": "cut')
    for checkpoint in (run, run / "checkpoints" / "last.ckpt"):
        code, about = answer("position", str(checkpoint), "--next", "1")
        assert (code, about["batches"][0]["ids"]) == (0, ids)
    assert "batches" in answer("position", str(run))[1]


def test_a_run_over_a_map_style_dataset_has_no_url_whose_samples_could_be_shown(tmp_path: Path, answer: Answer) -> None:
    loader = StatefulDataLoader(list(range(20)), batch_size=4)
    with RunReport(tmp_path, loader):
        next(iter(loader))
    torch.save({"data": loader.state_dict()}, tmp_path / "last.pt")
    assert "loader.trace(step) in its script" in answer("position", str(tmp_path), "--next", "1")[1]["error"]


@pytest.mark.parametrize("place", ["remote", "local"])
def test_a_run_recorded_its_split_and_folder_for_a_reader_elsewhere(
    shards: Path, tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(shards.parent)
    dataset = StreamingDataset(**{place: shards.name}, split="train", shuffle=True)
    ids = trained(dataset, tmp_path / "run" / "last.ckpt")
    loader = StreamingDataLoader(dataset, global_batch_size=8)
    with RunReport(tmp_path / "run", loader):
        next(iter(loader))
    monkeypatch.chdir(tmp_path)
    code, about = answer("position", "run", "--next", "1")
    assert (code, about["batches"][0]["ids"]) == (0, ids)


def test_position_knows_mixtures(shards: Path, tmp_path: Path, answer: Answer) -> None:
    parts = (("train", 0.25), ("val", 0.75))
    streams = [Stream(str(shards / name), proportion=part) for name, part in parts]
    ids = trained(StreamingDataset(streams=streams, shuffle=True), tmp_path / "last.ckpt")
    flags = [f"--stream={shards / name}={part}" for name, part in parts]
    code, about = answer("position", str(tmp_path / "last.ckpt"), *flags)
    assert (code, about["batches"][0]["ids"]) == (0, ids)
    code, about = answer("position", str(tmp_path / "last.ckpt"), *reversed(flags))
    assert (code, about["matches_stream"]) == (1, False)
    code, about = answer("position", str(tmp_path / "last.ckpt"), *(flag.rpartition("=")[0] for flag in flags))
    assert code == 2
    assert "URL=WEIGHT" in about["error"]


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\3\4"])
def test_position_refuses_what_is_not_a_checkpoint(content: bytes, tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    code, about = answer("position", str(tmp_path / "last.ckpt"))
    assert code == 2
    assert "is not a checkpoint that torch reads" in about["error"]


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of two streams, with their lengths in tokens."""
    root, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    for name in ("web", "code"):
        columns = {"tokens": "ndarray:int32"}
        with MDSWriter(out=str(root / name), columns=columns, size_limit=1 << 12, lengths={"tokens": len}) as writer:
            for size in rng.integers(1, 100, 300):
                writer.write({"tokens": rng.integers(1, 1000, size).astype(np.int32)})
    (root / "ids").write_text("3\n5\n")
    return root


PACK = Packing(row_length=64, window=50)


def half(sample: dict[str, Any]) -> int:
    return len(sample["tokens"]) // 2


def test_position_counts_documents_and_tokens_of_packed_rows(
    documents: Path, tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    web, checkpoint = str(documents / "web"), str(tmp_path / "last.ckpt")
    trained(StreamingDataset(web, shuffle=True, pack=PACK), tmp_path / "last.ckpt")
    loader = StreamingDataLoader(StreamingDataset(web, shuffle=True, pack=PACK), global_batch_size=8, tail="exact")
    batches = iter(loader)
    tokens = sum(int(next(batches)["num_tokens"].sum()) for _ in range(3))
    upcoming = next(batches)
    code, about = answer("position", checkpoint, "--stream", web)
    assert code == 0
    assert (about["rows_trained_on"], about["tokens"]) == (24, tokens)
    assert about["batches"][0]["ids"] == loader.trace(3).ids.tolist()
    assert (about["batches"][0]["rows"], about["batches"][0]["tokens"]) == (8, int(upcoming["num_tokens"].sum()))
    assert about["epoch_rows"] == 24 + 8 + sum(len(batch["input_ids"]) for batch in batches)
    assert main(["position", checkpoint]) == 0
    out = capsys.readouterr().out
    assert "rows trained on        24" in out
    assert "pack      row_length=64, window=50, long_documents=split" in out
    assert "{" not in out


def test_position_refuses_documents_of_other_lengths(
    documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web = str(tmp_path / "web")
    shutil.copytree(documents / "web", web)
    add_lengths(web, {"half": half}, num_workers=1)
    pack = Packing(row_length=64, window=50, lengths="half")
    dataset = StreamingDataset(web, shuffle=True, pack=pack)
    position = StreamingDataLoader(dataset, global_batch_size=8).state_dict()
    torch.save({"callbacks": {"lightning_stream": {"position": position}}}, tmp_path / "last.ckpt")
    flags = ["position", str(tmp_path / "last.ckpt"), "--stream"]
    assert main([*flags, web]) == 0
    assert main([*flags, str(documents / "web")]) == 2
    assert "were planned by lengths with digest" in capsys.readouterr().err


def test_position_takes_the_expression_that_samples_were_packed_by(
    documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web = str(documents / "web")
    dataset = StreamingDataset(web, shuffle=True, pack=Packing(lengths="2 * tokens + 1", row_length=300, window=50))
    position = StreamingDataLoader(dataset, global_batch_size=8).state_dict()
    torch.save({"callbacks": {"lightning_stream": {"position": position}}}, tmp_path / "last.ckpt")
    flags = ["position", str(tmp_path / "last.ckpt"), "--stream", web]
    assert main([*flags, "--lengths", "2 * tokens + 1"]) == 0
    assert main(flags) == 2
    assert "--lengths EXPRESSION" in capsys.readouterr().err


def test_position_knows_filters_and_forgotten_samples(
    documents: Path, tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    web, ids = str(documents / "web"), str(documents / "ids")
    chosen = StreamingDataset(
        web, shuffle=True, pack=PACK, filter={"lengths": {"tokens": (8, 90)}, "exclude_ids": ids}, forget=[3, 5]
    )
    trained(chosen, tmp_path / "last.ckpt")
    loader = StreamingDataLoader(chosen, global_batch_size=8)
    flags = ["position", str(tmp_path / "last.ckpt"), "--stream", web]
    rules = ["--filter-lengths", "tokens=8:90", "--exclude-ids", ids]
    code, about = answer(*flags, *rules, "--forget", ids)
    assert code == 0
    assert about["batches"][0]["ids"] == loader.trace(3).ids.tolist()
    assert main([*flags, *rules[:2], "--forget", ids]) == 1
    assert main([*flags, *rules]) == 2
    assert "found none. Pass the file of their ids" in capsys.readouterr().err
    (tmp_path / "other").write_text("7\n")
    assert main([*flags, *rules, "--forget", str(tmp_path / "other")]) == 2
    assert "found 1 other ones" in capsys.readouterr().err
    assert main([*flags, *rules, "--forget", ids]) == 0
    out = capsys.readouterr().out
    assert "filter_lengths['tokens']=(8, 90): " in out
    assert "forget    2 samples" in out


def test_position_shows_changes_of_the_batch_size(
    shards: Path, tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, state = StreamingDataset(str(shards / "train"), shuffle=True, num_canonical_nodes=4), None
    for size in (8, 16):
        loader = StreamingDataLoader(dataset, global_batch_size=size)
        if state is not None:
            loader.load_state_dict(state)
        next(iter(loader))
        state = loader.state_dict()
    torch.save({"callbacks": {"lightning_stream": {"position": state}}}, tmp_path / "last.ckpt")
    code, about = answer("position", str(tmp_path / "last.ckpt"))
    assert (code, about["samples_trained_on"], about["global_batches"]) == (0, 24, 2)
    assert about["batch_size_changes"] == ["8 from 0", "16 from 8"]
    assert main(["position", str(tmp_path / "last.ckpt")]) == 0
    assert "batch size changes     8 from 0, 16 from 8" in capsys.readouterr().out


def test_position_shows_a_schedule_by_its_points(documents: Path, tmp_path: Path, answer: Answer) -> None:
    streams = [Stream(str(documents / name)) for name in ("web", "code")]
    dataset = StreamingDataset(
        streams=streams, shuffle=True, schedule=[(0, {"web": 0.7, "code": 0.3}), (40, {"web": 1})]
    )
    ids = trained(dataset, tmp_path / "last.ckpt")
    code, about = answer("position", str(tmp_path / "last.ckpt"), *(f"--stream={one.remote}" for one in streams))
    assert (code, sorted(about["batches"][0]["ids"])) == (0, sorted(ids))
    (schedule,) = (stage for stage in about["chain"] if stage["name"] == "schedule")
    assert [part["name"] for part in schedule["parts"]] == ["from 0", "from 40"]
    assert schedule["parts"][0]["settings"] == {"code": 0.3, "web": 0.7}


@pytest.mark.parametrize(
    "size",
    [
        {"bucket_by": {"lengths": "tokens", "window": 64}},
        {"batch_tokens": 800},
        {"batch_tokens": {"tokens": 800, "multiple": 2}},
    ],
)
def test_position_knows_batches_by_length(
    size: dict[str, Any], documents: Path, tmp_path: Path, answer: Answer
) -> None:
    web, batch = str(documents / "web"), {} if "batch_tokens" in size else {"global_batch_size": 8}
    dataset = StreamingDataset(web, shuffle=True, **{"bucket_by": "tokens", **size})
    loader = StreamingDataLoader(dataset, collate_fn=list, **batch)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    torch.save({"callbacks": {"lightning_stream": {"position": loader.state_dict()}}}, tmp_path / "last.ckpt")
    code, about = answer("position", str(tmp_path / "last.ckpt"), "--stream", web)
    assert (code, about["global_batches"], about["batches"][0]["ids"]) == (0, 3, loader.trace(3).ids.tolist())
    code, about = answer("position", str(tmp_path / "last.ckpt"))
    assert ("global_batches" in about) == bool(batch)


def test_commands_read_a_dataset_behind_a_password(documents: Path, answer: Answer) -> None:
    with WebServer() as server:
        for file in (documents / "web").rglob("*.*"):
            server.objects[f"/web/{file.relative_to(documents / 'web')}"] = file.read_bytes()
        server.authorization = f"Basic {base64.b64encode(b'user:HUSH').decode()}"
        url = f"http://user:HUSH@127.0.0.1:{server.port}/web"
        code, about = answer("show", url, "--samples", "1")
        assert code == 0
        assert about["datasets"][0]["lengths"]["tokens"]["sum"] > 0
        assert "HUSH" not in json.dumps(about)


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
    assert answer("position", one, other)[0] == 0
    assert main(["position", one, other]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "EQUAL: the order of both runs is the same"
    assert [line.split()[-1] for line in lines if "samples trained on" in line] == ["16", "40"]


@pytest.mark.parametrize(
    ("settings", "name", "values"),
    [
        ({"shuffle_seed": 7}, "shuffle_seed", [9176, 7]),
        ({"window": 1}, "window", [16, 1]),
        ({"size": 16}, "global_batch_size", [8, 16]),
        ({"shuffle_algo": "py1e", "batch_size": 8}, "shuffle_algo", ["window", "py1e"]),
    ],
)
def test_comparing_names_the_setting_that_differs(
    shards: Path, tmp_path: Path, answer: Answer, settings: dict[str, Any], name: str, values: list[Any]
) -> None:
    one, _ = saved(tmp_path / "a", shards, shuffle=True)
    other, _ = saved(tmp_path / "b", shards, shuffle=True, **settings)
    code, about = answer("position", one, other)
    assert (code, about["differences"][name]) == (1, values)


def test_comparing_runs_over_other_data_says_so(shards: Path, tmp_path: Path, answer: Answer) -> None:
    one, _ = saved(tmp_path / "a", shards)
    loader = StreamingDataLoader(StreamingDataset(remote=str(shards / "val")), global_batch_size=8)
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "b.pt")
    code, about = answer("position", one, str(tmp_path / "b.pt"))
    assert (code, list(about["differences"])) == (1, ["data"])


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


def test_show_prints_what_a_checkpoint_records(
    numbers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Answer
) -> None:
    torch.save({"data": after(3, numbers)[0]}, tmp_path / "run.pt")
    code, about = answer("position", str(tmp_path / "run.pt"))
    assert (code, about["samples_trained_on"], about["global_batches"], about["order"]["seed"]) == (0, 48, 3, 9176)
    assert main(["position", str(GOLDEN / "mosaic_14ba.pt")]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:4]] == ["mosaicml-streaming", "1", "48"]
    code, about = answer("position", str(GOLDEN / "mosaic_14ba.pt"), "--stream", numbers)
    assert code == 2
    assert "does not record its order" in about["error"]


def test_mosaicml_streamings_state_at_an_epochs_end_is_that_of_the_next_one() -> None:
    """That library saves the epoch that is over, so its numbers alone would repeat that epoch."""
    state = read_position(GOLDEN / "mosaic_1ep.pt")
    assert (state["epoch"], state["sample_in_epoch"]) == (1, 0)


def test_mosaicml_streaming_continues_from_converted_states(
    numbers: str, tmp_path: Path, answer: Answer, mosaic_python: str
) -> None:
    states = []
    expected = []
    for algorithm, steps in {"py1e": 5, "py1br": 10, "py1s": 11, "py2s": 13, "naive": 1}.items():
        settings = {"shuffle_algo": algorithm, "num_canonical_nodes": 2, "shuffle_block_size": 64, "batch_size": 16}
        state, batches = after(steps, numbers, **settings)
        torch.save(state, tmp_path / "run.pt")
        code, about = answer("position", str(tmp_path / "run.pt"), "--stream", numbers)
        assert code == 0
        states.append((about["mosaicml_streaming_state"], {**settings, "shuffle": True}))
        expected.append([sorted(set(ids)) for ids in batches])
    command = [mosaic_python, "-W", "ignore", "-c", PEER, numbers, json.dumps(states)]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert [[sorted(set(ids)) for epoch in epochs for ids in epoch] for epochs in json.loads(read)] == expected


def test_a_run_over_some_samples_cannot_move_to_mosaicml_streaming(
    numbers: str, tmp_path: Path, answer: Answer
) -> None:
    settings = {"shuffle_algo": "py1e", "batch_size": 16, "filter": {"exclude_ids": [3]}}
    torch.save(after(3, numbers, **settings)[0], tmp_path / "run.pt")
    (tmp_path / "ids.txt").write_text("3\n")
    flags = ["--stream", numbers, "--exclude-ids", str(tmp_path / "ids.txt")]
    code, about = answer("position", str(tmp_path / "run.pt"), *flags)
    assert (code, "mosaicml_streaming_state" in about) == (0, False)


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
    assert main(["position", str(path)]) == 2
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
