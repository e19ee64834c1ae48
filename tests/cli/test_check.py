"""``check``: files against their index, and every sample decoded."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import MDSWriter
from lightning_stream.cli import main

Answer = Callable[..., tuple[int, Any]]


def test_check_lists_every_corrupt_file_and_ends_with_the_verdict(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Answer
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(shards / "train", copied)
    assert main(["check", str(copied)]) == 0
    text = capsys.readouterr().out
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    assert [["verdict", "OK"] in lines, ["checked", "by             sha1, xxh3_64, size"] in lines] == [True, True]
    files = sorted(copied.glob("*.zstd"))
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    files[2].write_bytes(files[2].read_bytes()[:-1])
    files[3].unlink()
    assert main(["check", str(copied), "--num-workers", "2"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.partition(":")[0] for line in out.splitlines()[:3]] == ["shard 1", "shard 2", "shard 3"]
    assert "CORRUPT (3)" in out
    code, about = answer("check", str(copied), "--decode", "--num-workers", "1")
    assert (code, [one["shard"] for one in about["datasets"][0]["corrupt"]]) == (
        1, [1, 2, 3]
    )  # fmt: skip


def test_check_without_hashes_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(out=str(tmp_path / "plain"), columns={"a": "int"}, hashes=[]) as writer:
        writer.write({"a": 1})
    assert main(["check", str(tmp_path / "plain")]) == 0
    assert re.search("checked by +size\n", capsys.readouterr().out)


def test_check_notes_nothing_in_a_file_of_others(tmp_path: Path, answer: Answer) -> None:
    with MDSWriter(out=str(tmp_path / "plain"), columns={"a": "int"}) as writer:
        writer.write({"a": 1})
    noted = tmp_path / "checked.jsonl"
    for content, code in ((b"PK\x03\x04", 2), (b'{"id": 1}\n', 2), (b'\n{"par', 0), (b"", 0)):
        noted.write_bytes(content)
        assert answer("check", str(tmp_path / "plain"), "--resume", str(noted))[0] == code
        assert (noted.read_bytes() == content) == (code == 2)


@pytest.fixture
def copied(shards: Path, tmp_path: Path) -> Path:
    shutil.copytree(shards, tmp_path / "copied")
    return tmp_path / "copied"


def test_check_reads_the_files_of_lengths(copied: Path, capsys: pytest.CaptureFixture[str], answer: Answer) -> None:
    train = copied / "train"
    assert main(["convert", str(train), "--lengths", "name", "--num-workers", "1"]) == 0
    (path,) = train.glob("*.bin")
    data = path.read_bytes()
    assert main(["check", str(train)]) == 0
    for damage, message in (
        (b"\1" + data[1:], "the index promises xxh3_64"),
        (data[:-4], f"the index promises {len(data)} bytes; there are {len(data) - 4}"),
        (None, "no such file"),
    ):
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        capsys.readouterr()
        code, about = answer("check", str(train))
        (corrupt,) = about["datasets"][0]["corrupt"]
        assert (code, corrupt["lengths"]) == (1, "name")
        assert message in corrupt["error"]
        if damage is None:
            path.write_bytes(data)
    index = train / "index.json"
    index.write_text(index.read_text().replace('"samples": 64}]', '"samples": 65}]'))
    capsys.readouterr()
    assert main(["check", str(train)]) == 1
    assert "of lengths 'name' has 256 bytes for 65 samples" in capsys.readouterr().out


images = pytest.importorskip("PIL.Image", reason="images need Pillow: uv sync --extra images")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """50 images; the bytes of two of them are cut."""
    with MDSWriter(out=str(tmp_path / "damaged"), columns={"image": "jpeg"}, size_limit=8 << 10) as writer:
        for number in range(50):
            data = io.BytesIO()
            images.fromarray(np.full((30, 40, 3), 3 * number, np.uint8)).save(data, "JPEG")
            writer.write({"image": data.getvalue()[: 500 if number in (7, 40) else None]})
    return tmp_path / "damaged"


def corrupt(found: Any) -> list[Any]:
    return [problem.get("id") for problem in found["datasets"][0]["corrupt"]]


def test_decoding_lists_every_sample_that_cannot_be_decoded(damaged: Path, answer: Answer) -> None:
    assert answer("check", str(damaged))[0] == 0
    code, found = answer("check", str(damaged), "--decode", "--num-workers", "2")
    assert (code, sorted(corrupt(found))) == (1, [7, 40])


def test_what_a_file_notes_is_not_checked_again(damaged: Path, tmp_path: Path, answer: Answer) -> None:
    given = ["check", str(damaged), "--num-workers", "1", "--resume", str(tmp_path / "notes.jsonl")]
    first, decoded = answer(*given), answer(*given, "--decode")
    assert (corrupt(first[1]), corrupt(decoded[1])) == ([], [7, 40])
    for path in damaged.glob("*.mds"):
        path.unlink()
    assert (answer(*given), answer(*given, "--decode")) == (first, decoded)


def test_what_a_file_notes_of_a_dataset_says_nothing_of_its_copy(copied: Path, tmp_path: Path, answer: Answer) -> None:
    shutil.copytree(copied, tmp_path / "whole")
    shard = next(copied.glob("train/*.mds*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    noted = ["--resume", str(tmp_path / "notes.jsonl")]
    assert answer("check", str(tmp_path / "whole"), *noted)[0] == 0
    assert answer("check", str(copied), *noted)[0] == 1
    assert answer("check", str(tmp_path / "whole"), *noted)[0] == 0


def test_what_a_file_notes_of_other_columns_does_not_count(tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"x": 1, "y": 1}\n' * 4 + '{"x": 1, "y": "?"}\n')
    given = [str(tmp_path / "rows"), "--num-workers", "1", "--decode", "--resume", str(tmp_path / "notes.jsonl")]
    assert answer("check", *given, "--columns", "x")[0] == 0
    code, found = answer("check", *given, "--columns", "y=int64")
    assert (code, corrupt(found)) == (1, [None])


def test_decoding_names_a_shard_that_is_missing(damaged: Path, answer: Answer) -> None:
    (damaged / "shard.00000.mds").unlink()
    code, found = answer("check", str(damaged), "--decode", "--num-workers", "1")
    first = found["datasets"][0]["corrupt"][0]
    assert (code, first["shard"], "id" in first) == (1, 0, False)
    assert "shard.00000.mds" in first["error"]
