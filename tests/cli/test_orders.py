"""``explain``: what it says is what a loader does."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers.web import WebServer

torch = pytest.importorskip("torch", reason="checkpoints need torch: uv sync")

from lightning_stream import MDSWriter, Packing, Stream, StreamingDataLoader, StreamingDataset, add_lengths  # noqa: E402
from lightning_stream.cli import main  # noqa: E402

Answer = Callable[..., tuple[int, Any]]


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


def test_explain_names_the_samples_that_come_next(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Answer
) -> None:
    run = tmp_path / "run"
    ids = trained(StreamingDataset(remote=str(shards / "train"), shuffle=True), run / "checkpoints" / "last.ckpt")
    code, about = answer("explain", str(run), "--stream", str(shards))
    assert code == 0
    assert (about["epoch"], about["samples_trained_on"], about["global_batches"]) == (0, 24, 3)
    assert about["order"]["seed"] == 9176
    assert about["next"]["ids"] == ids
    assert about["next"]["global_batches_left"] == 5
    assert main(["explain", str(run), "--stream", str(shards / "val")]) == 1
    assert "The data of --stream is not that of the checkpoint." in capsys.readouterr().out
    trained(StreamingDataset(remote=str(shards / "train"), exclude_ids=[3]), run / "checkpoints" / "last.ckpt")
    assert main(["explain", str(run), "--stream", str(shards / "train")]) == 1
    assert "read other samples of --stream: pass its --filter-lengths and --exclude-ids" in capsys.readouterr().out
    assert main(["explain", str(run)]) == 0
    assert ["samples", "trained", "on", "24"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_explain_shows_what_any_step_saw(shards: Path, tmp_path: Path, answer: Answer) -> None:
    run, data = tmp_path / "run", str(shards / "train")
    trained(StreamingDataset(remote=data, shuffle=True), run / "checkpoints" / "last.ckpt")
    loader = StreamingDataLoader(StreamingDataset(remote=data, shuffle=True), global_batch_size=8)
    steps = []
    for _ in loader:
        assert loader.last_batch is not None
        steps.append(loader.last_batch.ids.tolist())
    page = tmp_path / "step.html"
    for step in (1, 3, 7):  # done, the next one, and the last one
        code, about = answer("explain", str(run), "--stream", data, "--step", str(step), "--preview", str(page))
        assert (code, about["step"]["ids"]) == (0, steps[step])
        assert all(f"<h2>sample {number}</h2>" in page.read_text() for number in steps[step])
    assert "epoch 0 has 8 of them" in answer("explain", str(run), "--stream", data, "--step", "8")[1]["error"]
    assert "pass --stream" in answer("explain", str(run), "--step", "1")[1]["error"]
    assert "pass --step" in answer("explain", str(run), "--stream", data, "--preview", str(page))[1]["error"]


def test_explain_reads_a_checkpoint_in_a_store(shards: Path, tmp_path: Path, answer: Answer) -> None:
    trained(StreamingDataset(remote=str(shards / "train"), shuffle=True), tmp_path / "last.ckpt")
    with WebServer() as server:
        server.objects["/runs/flowers/checkpoints/last.ckpt"] = (tmp_path / "last.ckpt").read_bytes()
        server.objects["/runs/flowers"] = b"<html>a server may list a folder</html>"
        for url in ("runs/flowers/checkpoints/last.ckpt", "runs/flowers"):
            code, about = answer("explain", f"{server.url}/{url}")
            assert (code, about["samples_trained_on"]) == (0, 24)
            assert about["checkpoint"] == f"{server.url}/runs/flowers/checkpoints/last.ckpt"
        code, about = answer("explain", f"{server.url}/runs/other")
        assert code == 2
        assert f"there is no checkpoint at {server.url}/runs/other" in about["error"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_explain_downloads_only_the_position_of_a_sharded_checkpoint(
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
        code, about = answer("explain", f"{server.url}/run/ep0")
        assert server.count("GET", "weights") == 0
    assert (code, about["samples_trained_on"]) == (0, 8)


def test_explain_knows_mixtures(shards: Path, tmp_path: Path, answer: Answer) -> None:
    parts = (("train", 0.25), ("val", 0.75))
    streams = [Stream(str(shards / name), proportion=part) for name, part in parts]
    ids = trained(StreamingDataset(streams=streams, shuffle=True), tmp_path / "last.ckpt")
    flags = [f"--stream={shards / name}={part}" for name, part in parts]
    code, about = answer("explain", str(tmp_path / "last.ckpt"), *flags)
    assert (code, about["next"]["ids"]) == (0, ids)
    code, about = answer("explain", str(tmp_path / "last.ckpt"), *reversed(flags))
    assert (code, about["data"]["matches_stream"]) == (1, False)
    code, about = answer("explain", str(tmp_path / "last.ckpt"), *(flag.rpartition("=")[0] for flag in flags))
    assert code == 2
    assert "URL=WEIGHT" in about["error"]


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\3\4"])
def test_explain_refuses_what_is_not_a_checkpoint(content: bytes, tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    code, about = answer("explain", str(tmp_path / "last.ckpt"))
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


def test_explain_counts_documents_and_tokens_of_packed_rows(
    documents: Path, tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    web, checkpoint = str(documents / "web"), str(tmp_path / "last.ckpt")
    trained(StreamingDataset(web, shuffle=True, pack=PACK), tmp_path / "last.ckpt")
    loader = StreamingDataLoader(StreamingDataset(web, shuffle=True, pack=PACK), global_batch_size=8, tail="exact")
    batches = iter(loader)
    tokens = sum(int(next(batches)["num_tokens"].sum()) for _ in range(3))
    upcoming = next(batches)
    code, about = answer("explain", checkpoint, "--stream", web)
    assert code == 0
    assert (about["rows_trained_on"], about["tokens_trained_on"]) == (24, tokens)
    assert about["next"]["ids"] == loader.trace(3).ids.tolist()
    assert (about["next"]["rows"], about["next"]["tokens"]) == (8, int(upcoming["num_tokens"].sum()))
    assert about["next"]["epoch_rows"] == 24 + 8 + sum(len(batch["input_ids"]) for batch in batches)
    assert main(["explain", checkpoint]) == 0
    out = capsys.readouterr().out
    assert "rows trained on        24" in out
    assert "pack      row_length=64, window=50, long_documents=split" in out
    assert "{" not in out


def test_explain_refuses_documents_of_other_lengths(
    documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web = str(tmp_path / "web")
    shutil.copytree(documents / "web", web)
    add_lengths(web, {"half": half}, num_workers=1)
    pack = Packing(row_length=64, window=50, lengths="half")
    dataset = StreamingDataset(web, shuffle=True, pack=pack)
    position = StreamingDataLoader(dataset, global_batch_size=8).state_dict()
    torch.save({"callbacks": {"lightning_stream": {"position": position}}}, tmp_path / "last.ckpt")
    flags = ["explain", str(tmp_path / "last.ckpt"), "--stream"]
    assert main([*flags, web]) == 0
    assert main([*flags, str(documents / "web")]) == 2
    assert "were planned by lengths with digest" in capsys.readouterr().err


def test_explain_knows_filters_and_forgotten_samples(
    documents: Path, tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    web, ids = str(documents / "web"), str(documents / "ids")
    chosen = StreamingDataset(
        web, shuffle=True, pack=PACK, filter_lengths={"tokens": (8, 90)}, exclude_ids=ids, forget=[3, 5]
    )
    trained(chosen, tmp_path / "last.ckpt")
    loader = StreamingDataLoader(chosen, global_batch_size=8)
    flags = ["explain", str(tmp_path / "last.ckpt"), "--stream", web]
    rules = ["--filter-lengths", "tokens=8:90", "--exclude-ids", ids]
    code, about = answer(*flags, *rules, "--forget", ids)
    assert code == 0
    assert about["next"]["ids"] == loader.trace(3).ids.tolist()
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


def test_explain_shows_changes_of_the_batch_size(
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
    code, about = answer("explain", str(tmp_path / "last.ckpt"))
    assert (code, about["samples_trained_on"], about["global_batches"]) == (0, 24, 2)
    assert about["batch_size_changes"] == ["8 from 0", "16 from 8"]
    assert main(["explain", str(tmp_path / "last.ckpt")]) == 0
    assert "batch size changes     8 from 0, 16 from 8" in capsys.readouterr().out


def test_explain_shows_a_schedule_by_its_points(documents: Path, tmp_path: Path, answer: Answer) -> None:
    streams = [Stream(str(documents / name)) for name in ("web", "code")]
    dataset = StreamingDataset(
        streams=streams, shuffle=True, schedule=[(0, {"web": 0.7, "code": 0.3}), (40, {"web": 1})]
    )
    ids = trained(dataset, tmp_path / "last.ckpt")
    code, about = answer("explain", str(tmp_path / "last.ckpt"), *(f"--stream={one.remote}" for one in streams))
    assert (code, sorted(about["next"]["ids"])) == (0, sorted(ids))
    (schedule,) = (stage for stage in about["chain"] if stage["name"] == "schedule")
    assert [part["name"] for part in schedule["parts"]] == ["from 0", "from 40"]
    assert schedule["parts"][0]["settings"] == {"code": 0.3, "web": 0.7}


@pytest.mark.parametrize(
    "size", [{"bucket_window": 64}, {"batch_tokens": 800}, {"batch_tokens": 800, "batch_multiple": 2}]
)
def test_explain_knows_batches_by_length(size: dict[str, int], documents: Path, tmp_path: Path, answer: Answer) -> None:
    web, batch = str(documents / "web"), {} if "batch_tokens" in size else {"global_batch_size": 8}
    dataset = StreamingDataset(web, shuffle=True, bucket_by="tokens", **size)
    loader = StreamingDataLoader(dataset, collate_fn=list, **batch)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    torch.save({"callbacks": {"lightning_stream": {"position": loader.state_dict()}}}, tmp_path / "last.ckpt")
    code, about = answer("explain", str(tmp_path / "last.ckpt"), "--stream", web)
    assert (code, about["global_batches"], about["next"]["ids"]) == (0, 3, loader.trace(3).ids.tolist())
    code, about = answer("explain", str(tmp_path / "last.ckpt"))
    assert ("global_batches" in about) == bool(batch)


def test_commands_read_a_dataset_behind_a_password(documents: Path, answer: Answer) -> None:
    with WebServer() as server:
        for file in (documents / "web").rglob("*.*"):
            server.objects[f"/web/{file.relative_to(documents / 'web')}"] = file.read_bytes()
        server.authorization = f"Basic {base64.b64encode(b'user:HUSH').decode()}"
        url = f"http://user:HUSH@127.0.0.1:{server.port}/web"
        code, about = answer("plan", url, "--global-batch-size", "8", "--pack", "tokens")
        assert code == 0
        assert "HUSH" not in json.dumps(about)
        code, about = answer("inspect", url, "--samples", "1")
        assert code == 0
        assert about["datasets"][0]["lengths"]["tokens"]["sum"] > 0
        assert "HUSH" not in json.dumps(about)
