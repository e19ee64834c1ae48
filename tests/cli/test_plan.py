"""``plan``: it says what `lightning_stream.plan` says of the loader that its flags describe, and refuses mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from lightning_stream import (
    MDSWriter,
    Packing,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    World,
)
from lightning_stream.cli import main
from lightning_stream.plan import Rates, plan

Answer = Callable[..., tuple[int, Any]]
IMAGINED = ["--shards", "1000", "--shard-bytes", "64mb", "--samples-per-shard", "50", "--batch-size", "32"]


def plans_of(answer: Answer, *flags: str) -> list[dict[str, Any]]:
    code, about = answer("plan", *flags)
    assert code == 0, about
    return about["datasets"][0]["plans"]  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents, with their lengths in tokens."""
    folder, rng = tmp_path_factory.mktemp("documents") / "web", np.random.default_rng(0)
    columns = {"tokens": "ndarray:int32"}
    with MDSWriter(out=folder, columns=columns, size_limit=1 << 12, lengths={"tokens": len}) as writer:
        for size in rng.integers(1, 100, 300):
            writer.write({"tokens": rng.integers(1, 1000, size).astype(np.int32)})
    (folder.parent / "ids").write_text("3\n5\n")
    return folder


@pytest.mark.parametrize(
    ("dataset", "loader"),
    [
        ({}, {"global_batch_size": 16}),
        ({"shuffle": False}, {"batch_size": 8, "accumulate": 2, "tail": "drop"}),
        ({"shuffle_algo": "py1e", "shuffle_block_size": 16}, {"batch_size": 2}),
        ({"batching_method": "stratified", "window": 2, "num_canonical_nodes": 2}, {"batch_size": 4, "num_workers": 2}),
        ({"epoch_size": "40", "cache_limit": "1kb", "predownload": 8}, {"batch_size": 4}),
        ({"replication": 2}, {"batch_size": 4}),
        ({"bucket_by": "tokens", "balance": "tokens", "filter": {"lengths": {"tokens": (8, None)}}}, {"batch_size": 4}),
        ({"batch_tokens": 800, "forget": [3, 5]}, {}),
        ({"pack": Packing("tokens", row_length=64)}, {"batch_size": 4}),
    ],
)
def test_a_flag_is_the_argument_of_its_name(
    dataset: dict[str, Any], loader: dict[str, Any], documents: Path, tmp_path: Path, answer: Answer
) -> None:
    own = StreamingDataset(str(documents), local=tmp_path, **{"shuffle": True, **dataset})
    world = World(0, 4, 2, dataset.get("replication", 1))
    found = plan(StreamingDataLoader(own, world=world, **loader), Rates(step_s=0.02, sample_s=0.001))
    texts = {"filter_lengths": "tokens=8:", "forget": str(documents.parent / "ids"), "pack": "tokens=64"}
    passed = {"filter_lengths" if name == "filter" else name: value for name, value in {**dataset, **loader}.items()}
    given = {name: texts.get(name, value) for name, value in passed.items() if name != "shuffle"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    flags += [] if dataset.get("shuffle", True) else ["--no-shuffle"]
    machine = ["--nodes", "2", "--devices", "2", "--step-ms", "20", "--sample-ms", "1"]
    (shown,) = plans_of(answer, str(documents), *machine, *flags)
    expected = json.loads(json.dumps(found.to_json()))
    for measured in ("planning_s",):
        assert min(shown.pop(measured), expected.pop(measured)) > 0
    assert shown == expected


def test_a_mixture_and_a_folder_of_splits_are_planned(shards: Path, answer: Answer) -> None:
    flags = [f"--stream={shards / 'train'}=repeat:2", f"--stream={shards / 'val'}=choose:8"]
    assert plans_of(answer, "--batch-size", "8", *flags)[0]["num_samples"] == 2 * 64 + 8
    code, about = answer("plan", str(shards), "--batch-size", "8")
    assert (code, [one["plans"][0]["num_samples"] for one in about["datasets"]]) == (0, [64, 16])
    code, about = answer("plan", "--batch-size", "8", f"--stream={shards}=0.5", flags[1])
    assert (code, "is a folder of splits" in about["error"]) == (2, True)


def test_rows_and_weights_are_those_that_a_loader_delivers(documents: Path, tmp_path: Path, answer: Answer) -> None:
    dataset = StreamingDataset(streams=[Stream(documents)], shuffle=True, pack=Packing("tokens", row_length=64))
    rows = sum(len(batch["num_tokens"]) for batch in StreamingDataLoader(dataset, 4, tail="exact"))
    (found,) = plans_of(answer, str(documents), "--batch-size", "4", "--pack", "tokens=64")
    assert found["num_samples"] == rows
    pack = Packing(lengths="tokens + 2", row_length=200)
    dataset = StreamingDataset(streams=[Stream(documents)], shuffle=True, pack=pack)
    rows = sum(len(batch["num_tokens"]) for batch in StreamingDataLoader(dataset, 4, tail="exact"))
    (found,) = plans_of(answer, str(documents), "--batch-size", "4", "--pack", "tokens + 2=200")
    assert found["num_samples"] == rows


def test_rates_are_decimal_and_prices_are_those_of_the_list(answer: Answer) -> None:
    flags = [
        "--link",
        "latency=30ms,connection=60MB,node=10gbit,bucket=1.5gb",
        "--disk",
        "2gb",
        "--price",
        "s3-internet",
    ]
    (found,) = plans_of(answer, *IMAGINED, *flags)
    bounds = {bound["resource"]: bound["samples_per_s"] for bound in found["bounds"]}
    size = 1000 * (64 << 20)
    assert bounds["link of a node"] == pytest.approx(50_000 / (size / 1.25e9))
    assert bounds["bucket"] == pytest.approx(50_000 / (size / 1.5e9))
    assert bounds["disk"] == pytest.approx(50_000 / (size / 2e9))
    assert bounds["training process"] is None
    assert found["price_usd"] == pytest.approx(size / 1e9 * 0.09 + 1002 / 1000 * 0.0004)
    assert found["limit"]["samples_per_s"] == min(rate for rate in bounds.values() if rate is not None)


def test_several_numbers_of_nodes_are_compared(answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    found = plans_of(answer, *IMAGINED, "--nodes", "1000,1,8", "--step-ms", "100")
    assert [one["num_nodes"] for one in found] == [1, 8, 1000]
    assert [one["global_batch_size"] for one in found] == [32, 256, 32_000]
    assert main(["plan", *IMAGINED, "--nodes", "1,8,1000", "--step-ms", "100", "--price", "gb=0.1,requests=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1,000 shards of 67.1 MB, 50 samples each"
    assert [line.split()[0] for line in lines[-4:]] == ["nodes", "1", "8", "1,000"]
    assert all(line.endswith("training process") for line in lines[-3:])


def test_the_text_names_flags_and_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *IMAGINED, "--cache-limit", "20mb", "--step-ms", "5"]) == 0
    out = capsys.readouterr().out
    assert "The loader would not start: " in out
    assert "Pass --cache-limit=" in out
    assert "not given" in out
    assert "/tmp" not in out
    assert not any(name in out for name in ("cache_limit", "bytes_per_s", "step_s"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--link", "latency=20"], "takes a number with a unit (ms, s), e.g. 20ms"),
        (["--link", "latency=20mb"], "takes a number with a unit (ms, s), e.g. 20ms"),
        (["--link", "node=0mb"], "e.g. 60mb or 10gbit; found '0mb'"),
        (["--link", "node=5"], "found '5'"),
        (["--link", "speed=5mb"], "takes latency, connection, node, bucket"),
        (["--disk", "fast"], "e.g. 60mb or 10gbit; found 'fast'"),
        (["--price", "aws"], "takes s3, s3-internet"),
        (["--price", "gb=-1"], "takes a number above 0; found '-1'"),
        (["--step-ms", "nan"], "--step-ms: takes a number above 0; found 'nan'"),
        (["--nodes", "1,x"], "--nodes: takes a whole number, 1 or more; found 'x'"),
        (["--devices", "0"], "--devices: takes a whole number, 1 or more; found '0'"),
        (["--num-workers", "-1"], "--num-workers: takes a whole number, 0 or more"),
        (["--global-batch-size", "8"], "not both"),
        (["--cache-limit", "huge"], "must be a whole number or a text"),
        (["--replication", "3"], "replication must divide num_ranks"),
        (["--pack", "tokens=many"], "pack must be a whole number"),
        (["--batch-sise", "8"], "unrecognized arguments: --batch-sise"),
        (["--tail", "drop", "--shards", "1", "--samples-per-shard", "5"], "an epoch must have a batch"),
        (["nowhere"], "plan takes one of PATH|URL"),
    ],
)
def test_a_mistake_is_one_line(flags: list[str], message: str, answer: Answer) -> None:
    code, about = answer("plan", *IMAGINED, *flags)
    assert code == 2
    assert message in about["error"]


@pytest.mark.parametrize("size", [["--shard-bytes", "1mb", "--shards", "0"], ["--shards", "5"]])
def test_a_dataset_that_does_not_exist_has_shards_with_a_size(size: list[str], answer: Answer) -> None:
    code, about = answer("plan", "--batch-size", "8", *size)
    assert (code, "--shard" in about["error"]) == (2, True)


def test_nothing_is_printed_before_all_is_checked(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(shards), "--global-batch-size", "63", "--nodes", "2", "--devices", "8"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "63 samples do not divide by 16 replicas" in err


def test_an_empty_dataset_is_refused(tmp_path: Path, answer: Answer) -> None:
    with MDSWriter(out=tmp_path, columns={"x": "bytes"}):
        pass
    code, about = answer("plan", str(tmp_path), "--batch-size", "8")
    assert (code, "there must be samples to iterate over" in about["error"]) == (2, True)
