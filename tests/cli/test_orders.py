"""``explain`` and ``simulate``: what they say is what a loader does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers.web import WebServer

torch = pytest.importorskip("torch", reason="checkpoints need torch: uv sync")

from lightning_stream import Stream, StreamingDataLoader, StreamingDataset  # noqa: E402
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
    assert "by a filter, exclude_ids or subset" in capsys.readouterr().out
    assert main(["explain", str(run)]) == 0
    assert ["samples", "trained", "on", "24"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_explain_reads_a_checkpoint_in_a_store(shards: Path, tmp_path: Path, answer: Answer) -> None:
    trained(StreamingDataset(remote=str(shards / "train"), shuffle=True), tmp_path / "last.ckpt")
    with WebServer() as server:
        server.objects["/runs/flowers/checkpoints/last.ckpt"] = (tmp_path / "last.ckpt").read_bytes()
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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shuffle_algo": "py1e", "shuffle_block_size": 16, "shuffle_seed": 3},
        {"shuffle_algo": "naive", "partition_algo": "orig", "num_canonical_nodes": 4},
        {"batching_method": "stratified", "window": 2, "num_canonical_nodes": 2},
        {"epoch_size": 40, "sampling_method": "fixed", "sampling_granularity": 2},
        {"shuffle": False},
    ],
)
def test_simulate_takes_the_dataset_s_settings_to_the_same_order(
    settings: dict[str, Any], shards: Path, answer: Answer
) -> None:
    dataset = StreamingDataset(remote=str(shards / "train"), **{"shuffle": True, **settings})
    loader = StreamingDataLoader(dataset, global_batch_size=16)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if name != "shuffle"]
    flags += [] if settings.get("shuffle", True) else ["--no-shuffle"]
    code, about = answer("simulate", str(shards / "train"), "--global-batch-size", "16", *flags)
    assert code == 0
    next(iter(loader))
    expected = loader.state_dict()["order"]
    assert {name: value for name, value in expected.items() if value is not None} == about["order"]


def test_simulate_prints_nothing_before_all_is_checked(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(shards), "--global-batch-size", "63", "--nodes", "2", "--devices", "8"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "63 samples over 16 replicas" in err


def test_simulate_reports_downloads_quality_and_cache(shards: Path, answer: Answer) -> None:
    arguments = ["--global-batch-size", "16", "--nodes", "2", "--devices", "2"]
    code, about = answer("simulate", str(shards / "train"), *arguments, "--cache-limit", "1kb", "--predownload", "8")
    assert code == 0
    (one,) = about["datasets"]
    assert len(one["download_per_node_bytes"]) == 2
    assert one["download_factor"] > 1
    assert one["shuffle_quality"]["active_shards"] == 5
    assert "--num-canonical-nodes=16" in one["warning"]
    assert "num_canonical_nodes" not in one["warning"]
    assert one["cache_needed_per_node_bytes"] > 1024
    assert "--cache-limit 1kb is below" in one["cache_warning"]


def test_simulate_knows_mixtures(shards: Path, answer: Answer) -> None:
    flags = [f"--stream={shards / 'train'}=repeat:2", f"--stream={shards / 'val'}=choose:8"]
    code, about = answer("simulate", "--global-batch-size", "8", *flags)
    assert code == 0
    assert about["datasets"][0]["epoch_samples"] == 2 * 64 + 8
    code, about = answer("simulate", "--global-batch-size", "8", f"--stream={shards}=0.5", flags[1])
    assert code == 2
    assert "is a folder of splits" in about["error"]
