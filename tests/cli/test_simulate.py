"""``simulate``: what a training run waits for, as text and as JSON, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_stream import MDSWriter
from lightning_stream.cli import main

Answer = Callable[..., tuple[int, Any]]
DATA = ["--shards", "1000", "--shard-bytes", "64mb", "--samples-per-shard", "50", "--global-batch-size", "256"]


def simulated(answer: Answer, *flags: str) -> dict[str, Any]:
    code, about = answer("simulate", *flags)
    assert code == 0, about
    return about["datasets"][0]  # type: ignore[no-any-return]


def test_a_dataset_that_does_not_exist_is_named_by_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *DATA, "--devices", "8", "--step-ms", "400", "--price", "s3-internet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1,000 shards of 67.1 MB"
    assert not any("/tmp" in line for line in lines)
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1].split()[0] == "1,000"


def test_rates_of_a_link_are_decimal_like_the_defaults(answer: Answer) -> None:
    flags = "latency=30ms,connection=60mb,node=10gbit,bucket=1.5GB"
    link = simulated(answer, *DATA, "--link", flags, "--no-curve")["simulated"]["machine"]["link"]
    expected = {
        "latency_s": 0.03,
        "connection_bytes_per_s": 60e6,
        "node_bytes_per_s": 1.25e9,
        "bucket_bytes_per_s": 1.5e9,
    }
    assert link == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--link", "latency=20"], "a latency is e.g. 20ms or 0.1s, and a rate more than 0, e.g. 60mb or 10gbit"),
        (["--link", "node=0mb"], "found node=0mb"),
        (["--link", "node=5"], "found node=5"),
        (["--link", "connection=10ms"], "found connection=10ms"),
        (["--link", "speed=5mb"], "--link takes latency=20ms,connection=60mb,node=1.25gb; found 'speed=5mb'"),
        (["--price", "aws"], "--price takes gb=0.09,requests=0.0004, or s3"),
        (["--price", "gb=-1"], "prices are dollars, 0 or more"),
        (["--step-ms", "-1"], "--step-ms is 0 or more; found -1"),
        (["--step-ms", "nan"], "--step-ms is 0 or more; found nan"),
        (["--num-workers", "-1"], "--num-workers is 0 or more; found -1"),
        (["--devices", "0"], "argument --devices: takes a whole number, 1 or more; found '0'"),
        (["--cores", "x"], "argument --cores: takes a whole number, 1 or more; found 'x'"),
        (["--probe"], "--shards imagines one: pass its link by --link"),
        (["--shuffle-algo", "py1e", "--curve"], "planned as a whole for each number of nodes. Omit --curve"),
        (["--devices", "512"], "256 samples over 512 replicas"),
    ],
)
def test_wrong_values_are_refused(flags: list[str], message: str, answer: Answer) -> None:
    code, about = answer("simulate", *DATA, *flags)
    assert code == 2
    assert message in about["error"]


@pytest.mark.parametrize("size", [["--shard-bytes", "1mb", "--shards", "0"], ["--shards", "5"]])
def test_an_imagined_dataset_has_shards_with_a_size(size: list[str], answer: Answer) -> None:
    code, about = answer("simulate", "--global-batch-size", "8", *size)
    assert (code, "--shard" in about["error"]) == (2, True)


def written(folder: Path, num_samples: int) -> str:
    with MDSWriter(out=str(folder), columns={"x": "bytes"}, size_limit=1 << 12) as writer:
        for _ in range(num_samples):
            writer.write({"x": bytes(500)})
    return str(folder)


def test_an_empty_dataset_is_refused(tmp_path: Path, answer: Answer) -> None:
    code, about = answer("simulate", written(tmp_path / "empty", 0), "--global-batch-size", "8")
    assert code == 2
    assert "there must be samples to iterate over" in about["error"]


def test_one_sample_is_one_batch_at_a_finite_rate(tmp_path: Path, answer: Answer) -> None:
    about = simulated(answer, written(tmp_path, 1), "--global-batch-size", "16", "--link", "latency=1ms")
    found = about["simulated"]
    assert found["samples_per_s"] == pytest.approx(1 / found["epoch_s"])
    assert (found["wait_share"], found["needed_samples_per_s"], found["resume_s"]) == (1.0, None, None)
    downloads = [one["download_bytes"] for one in about["curve"]]
    assert downloads == sorted(downloads)


def test_an_epoch_without_a_batch_is_a_warning_and_no_report(tmp_path: Path, answer: Answer) -> None:
    flags = [written(tmp_path / "data", 4), "--global-batch-size", "16", "--tail", "drop", "--step-ms", "5"]
    about = simulated(answer, *flags)
    assert "the epoch has fewer samples than a batch" in about["warning"]
    assert "simulated" not in about
    code, about = answer("simulate", *flags, "--report", str(tmp_path / "a.html"))
    assert (code, "an epoch must have a batch to be simulated" in about["error"]) == (2, True)


def test_time_is_simulated_for_local_data_where_a_flag_asks_for_it(tmp_path: Path, answer: Answer) -> None:
    flags = [written(tmp_path, 64), "--global-batch-size", "8"]
    assert "simulated" not in simulated(answer, *flags)
    for asked in (["--step-ms", "5"], ["--num-workers", "2"], ["--curve"], ["--price", "s3"], ["--probe", "0.01"]):
        assert simulated(answer, *flags, *asked)["simulated"]["first_batch_s"] > 0


def test_a_cache_limit_that_is_refused_has_no_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *DATA, "--cache-limit", "20mb"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("  waiting                The loader would refuse --cache-limit=21.0 MB: ")
    assert "throughput" not in out


def test_long_values_are_wrapped_on_a_terminal_and_never_in_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["simulate", *DATA, "--cache-limit", "1gb", "--no-curve"]
    assert main(flags) == 0
    assert any(len(line) > 100 for line in capsys.readouterr().out.splitlines())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines[lines.index("  download factor        1") :])
