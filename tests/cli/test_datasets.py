"""``inspect``, ``verify``, ``merge`` and ``convert``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import MDSWriter
from lightning_stream.cli import main

Answer = Callable[..., tuple[int, Any]]


def test_inspect_describes_every_split(shards: Path, capsys: pytest.CaptureFixture[str], answer: Answer) -> None:
    assert main(["inspect", str(shards / "train"), "--samples", "1"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for pair in (["samples", "64"], ["compression", "zstd"], ["hashes", "sha1, xxh3_64"], ["x", "ndarray:int32:8"]):
        assert pair in lines
    assert ["name", "n0"] in lines
    code, about = answer("inspect", str(shards), "--samples", "1")
    assert code == 0
    assert [(one["url"], one["samples"]) for one in about["datasets"]] == [
        (str(shards / "train"), 64),
        (str(shards / "val"), 16),
    ]
    assert about["datasets"][0]["columns"] == {"label": "int", "name": "str", "x": "ndarray:int32:8"}
    assert about["datasets"][0]["sample_0"] == {"label": 0, "name": "n0", "x": list(range(8))}


def test_inspect_shows_images_and_class_names(tmp_path: Path, answer: Answer) -> None:
    images = pytest.importorskip("PIL.Image", reason="images need Pillow: uv sync --extra images")
    for name in ("rose", "daisy"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.full((6, 8, 3), 40 * number, dtype=np.uint8)
            images.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
    out = str(tmp_path / "out")
    arguments = [str(tmp_path / "photos"), out, "--num-workers", "1"]
    code, done = answer("convert", *arguments)
    assert (code, done["num_samples"], done["is_new"]) == (0, {"": 8}, True)
    _, about = answer("inspect", out, "--samples", "2")
    assert about["datasets"][0]["classes"] == {"label": ["daisy", "rose"]}
    assert about["datasets"][0]["sample_1"]["image"] == "JPEG 8x6"


def test_converting_names_flags_not_python_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"a": {number}}}\n' for number in range(20)))
    arguments = ["convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "out"), "--num-workers", "1"]
    assert main([*arguments, "--val-fraction", "0.2"]) == 0
    assert "val in 2 shards" in capsys.readouterr().out
    assert main([*arguments, "--val-fraction", "0.2"]) == 0
    assert capsys.readouterr().out.startswith("Reusing the existing dataset at ")
    assert main([*arguments, "--val-fraction", "0.3"]) == 2
    text = capsys.readouterr().err
    assert "--val-fraction was " in text
    assert "--overwrite" in text
    assert "overwrite=True" not in text


def test_a_column_may_have_the_name_of_a_secret(tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "rows.jsonl").write_text('{"token_ids": 1, "b": 2}\n')
    arguments = [str(tmp_path / "rows.jsonl"), str(tmp_path / "out"), "--num-workers", "1"]
    code, done = answer("convert", *arguments, "--columns", "token_ids=int32")
    assert (code, done["columns"]) == (0, {"token_ids": "int32"})


def test_verify_lists_every_corrupt_file_and_ends_with_the_verdict(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Answer
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(shards / "train", copied)
    assert main(["verify", str(copied)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"OK: {copied}: 5 of 5 shards, ")
    assert text.endswith(", verified by sha1, xxh3_64 and size\n")
    files = sorted(copied.glob("*.zstd"))
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    files[2].write_bytes(files[2].read_bytes()[:-1])
    files[3].unlink()
    assert main(["verify", str(copied), "--num-workers", "2"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.partition(":")[0] for line in out.splitlines()] == [
        "shard 1",
        "shard 2",
        "shard 3",
        "CORRUPT (3 files)",
    ]
    code, about = answer("verify", str(copied), "--shards", "0:2")
    assert code == 1
    assert [one["shard"] for one in about["datasets"][0]["corrupt"]] == [1]
    assert main(["verify", str(copied), "--shards", "0"]) == 0


def test_verify_of_no_shards_is_an_error(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(shards / "train"), "--shards", "100:200"]) == 2
    assert "--shards 100:200 selects no shard" in capsys.readouterr().err


def test_verify_without_hashes_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(out=str(tmp_path / "plain"), columns={"a": "int"}, hashes=[]) as writer:
        writer.write({"a": 1})
    assert main(["verify", str(tmp_path / "plain")]) == 0
    assert capsys.readouterr().out.endswith("verified by size only, since the index has no hashes\n")


def test_merge_writes_one_index(tmp_path: Path, answer: Answer) -> None:
    for part in ("0", "1"):
        with MDSWriter(out=str(tmp_path / "parts" / part), columns={"a": "int"}) as writer:
            writer.write({"a": 1})
    code, about = answer("merge", str(tmp_path / "parts"))
    assert (code, about["samples"], about["shards"]) == (0, 2, 2)
    assert answer("verify", str(tmp_path / "parts"))[0] == 0


def test_a_missing_bucket_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    moto = pytest.importorskip("moto.server", reason="a local S3 needs moto: uv sync --group test")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        assert main(["inspect", "s3://nowhere/x", "--store-options", f"endpoint_url={endpoint}"]) == 2
    finally:
        server.stop()
    assert "there is no bucket 'nowhere'" in capsys.readouterr().err
