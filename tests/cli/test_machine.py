"""``pull``, ``cache`` and ``doctor``: what a machine keeps, and what is wrong with it."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_stream import LocalDataset, MDSWriter, StreamingDataset
from lightning_stream.cli import main

Answer = Callable[..., tuple[int, Any]]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The datasets at a web server, with an empty cache."""
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    serve = functools.partial(_Quiet, directory=str(shards))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_pulled_dataset_needs_no_store(url: str, shards: Path, tmp_path: Path, answer: Answer) -> None:
    code, found = answer("pull", url, str(tmp_path / "here"))
    assert code == 0
    assert [(Path(one["folder"]).name, one["new_shards"]) for one in found["datasets"]] == [("train", 5), ("val", 2)]
    _, again = answer("pull", url, str(tmp_path / "here"))
    assert [one["new_shards"] for one in again["datasets"]] == [0, 0]
    pulled, original = LocalDataset(str(tmp_path / "here" / "train")), LocalDataset(str(shards / "train"))
    assert [sample["name"] for sample in pulled] == [sample["name"] for sample in original]


def test_a_folder_of_this_machine_is_not_pulled(shards: Path, answer: Answer) -> None:
    code, found = answer("pull", str(shards))
    assert code == 2
    assert "is a folder of this machine" in found["error"]


def test_caches_are_listed_and_pruned(url: str, answer: Answer) -> None:
    assert answer("cache") == (0, {"caches": [], "size_bytes": 0})
    answer("pull", url)
    _, listed = answer("cache")
    assert sorted((one["url"].removeprefix(url), one["shards"]) for one in listed["caches"]) == [
        ("/train", 5),
        ("/val", 2),
    ]
    assert answer("cache", "list", f"{url}/train")[1]["caches"] == [
        one for one in listed["caches"] if one["shards"] == 5
    ]
    _, pruned = answer("cache", "prune", "--to", str(listed["size_bytes"] - 1))
    assert 0 < pruned["deleted_bytes"] < listed["size_bytes"]
    assert pruned["left_bytes"] == listed["size_bytes"] - pruned["deleted_bytes"]
    assert answer("cache", "prune", "--unused-days", "1")[1]["deleted_bytes"] == 0
    assert answer("cache", "prune", f"{url}/val", "--to", "0")[0] == 0
    left = {each["url"].removeprefix(url): each["size_bytes"] for each in answer("cache")[1]["caches"]}
    assert left["/val"] == 0
    assert left["/train"] > 0


def test_a_shard_in_use_is_not_pruned(url: str, answer: Answer) -> None:
    samples = iter(StreamingDataset(f"{url}/val", cache_limit="1mb", batch_size=1))
    assert next(samples)["name"] == "n0"
    _, pruned = answer("cache", "prune", "--to", "0")
    assert pruned["left_bytes"] > 0
    assert [sample["name"] for sample in samples] == [f"n{number}" for number in range(1, 16)]


def test_a_damaged_shard_in_a_cache_is_deleted(url: str, tmp_path: Path, answer: Answer) -> None:
    answer("pull", url)
    assert answer("cache", "check") == (0, {"shards": 7, "damaged": []})
    damaged = next((tmp_path / "cache").glob("*train*/shard.00001.mds"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    code, found = answer("cache", "check")
    assert (code, found["shards"], [each["deleted"] for each in found["damaged"]]) == (1, 7, [True])
    assert not damaged.exists()
    assert answer("cache", "check") == (0, {"shards": 6, "damaged": []})


def test_the_cache_of_one_version_is_verified(url: str, tmp_path: Path, answer: Answer) -> None:
    digest = answer("show", f"{url}/val")[1]["datasets"][0]["digest"]
    assert answer("pull", f"{url}/val", "--version", digest[:12])[0] == 0
    damaged = next((tmp_path / "cache").glob("*val*/shard.00000.mds"))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert len(answer("cache", "check")[1]["damaged"]) == 1


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (["prune"], "prune takes --to BYTES"),
        (["list", "--to", "1gb"], "no other action does"),
        (["prune", "--unused-days", "soon"], "--unused-days: takes a number above 0"),
        (["check", "/no/such/folder"], "keeps no cache of /no/such/folder"),
    ],
)
def test_wrong_arguments_of_cache_are_refused(answer: Answer, given: list[str], rule: str) -> None:
    code, found = answer("cache", *given)
    assert code == 2
    assert rule in found["error"]


def test_a_healthy_machine_has_nothing_wrong(shards: Path, tmp_path: Path, monkeypatch: Any, answer: Answer) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    code, found = answer("doctor", str(shards / "train"))
    assert (code, [one["what"] for one in found["findings"] if one["is_wrong"]]) == (0, [])
    assert "hidden" not in str(found)
    assert "64 samples" in found["findings"][-1]["found"]


def test_the_doctor_finds_what_is_wrong(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", str(tmp_path / "nothing")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("wrong")] == ["cache", "launcher", "dataset"]
    assert lines[-1].startswith("3 wrong, ")


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "sum": sum(range(20_000))}


def test_reading_is_measured_with_its_bottleneck_and_the_rates_of_a_plan(
    url: str, shards: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = answer("doctor", f"{url}/val", "--read", "--batch-size", "4", "--num-workers", "0")
    (read,) = found["reading"]
    assert (code, read["url"]) == (0, f"{url}/val")
    assert read["samples_per_s"] > 0
    assert {"sample_s", "unpack_s_per_mb", "latency_s"} <= set(read["rates"])
    given = [
        "doctor",
        str(shards / "train"),
        "--read",
        "--batch-size",
        "8",
        "--transform",
        f"{__name__}:slow",
        "--seconds",
        "1",
    ]
    code, found = answer(*given, "--num-workers", "0")
    assert (code, set(found["reading"][0]["verdict"]) >= {"cause", "finding", "remedy"}) == (0, True)
    assert main([*given, "--num-workers", "0"]) == 0
    assert "for plan: --sample-ms " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (["--num-workers", "two"], "--num-workers: takes a whole number, 0 or more"),
        (["--transform", "nothing:here"], "nothing:here cannot be imported"),
        (["--transform", "nothing"], "--transform takes MODULE:FUNCTION"),
        (["--batch-size", "0"], "--batch-size: takes a whole number, 1 or more"),
    ],
)
def test_wrong_arguments_of_reading_are_refused(shards: Path, answer: Answer, given: list[str], rule: str) -> None:
    code, found = answer("doctor", str(shards / "val"), "--read", *given)
    assert code == 2
    assert rule in found["error"]


def test_a_dataset_without_samples_is_not_measured(tmp_path: Path, answer: Answer) -> None:
    with MDSWriter(out=str(tmp_path), columns={"x": "int"}):
        pass
    code, found = answer("doctor", str(tmp_path), "--read")
    assert (code, "there must be samples" in found["error"]) == (2, True)


def test_the_doctor_names_the_splits_of_a_folder(shards: Path, answer: Answer) -> None:
    stores = [one["found"] for one in answer("doctor", str(shards))[1]["findings"] if one["what"] == "dataset"]
    assert ["train: 64 samples" in stores[0], "val: 16 samples" in stores[1]] == [True, True]
