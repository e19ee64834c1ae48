"""Files of lines read in place: compressed or not, each line once, and nothing that fails in the middle of an epoch."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from lightning_stream import StreamingDataset
from lightning_stream.convert import convert
from lightning_stream.errors import FormatError
from lightning_stream.sources import delimited, lines

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


def text(numbers: range) -> bytes:
    return "".join(json.dumps({"x": k, "s": "ab" * 40}) + "\n" for k in numbers).encode()


def values(uri: Path | str, name: str = "x") -> list[Any]:
    dataset = StreamingDataset(remote=str(uri))
    return [dataset[k][name] for k in range(dataset.size)]


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("num_rows", [1, 5, 3000])
def test_compressed_lines_are_read_in_place(ending: str, num_rows: int, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / f"a.jsonl{ending}").write_bytes(PACKERS[ending](text(range(num_rows))))
    (folder / f"b.jsonl{ending}").write_bytes(PACKERS[ending](text(range(num_rows, 2 * num_rows)).rstrip()))
    (folder / f"c.jsonl{ending}").write_bytes(PACKERS[ending](b""))
    assert values(folder) == list(range(2 * num_rows))
    done = convert(folder, tmp_path / "out", num_workers=1)
    assert done.keeps_order
    assert values(done.uri) == list(range(2 * num_rows))


def test_parts_that_are_compressed_one_after_another_are_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for ending in (".gz", ".zst", ".bz2", ".xz"):
        parts = [PACKERS[ending](text(range(k, k + 10))) for k in range(0, 30, 10)]
        (folder / f"{ending[1:]}.jsonl{ending}").write_bytes(b"".join(parts))
    assert values(folder) == 4 * list(range(30))


@pytest.mark.parametrize("ending", [ending for ending in PACKERS if ending])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_compressed_file_that_is_cut_off_is_an_error(ending: str, num_parts: int, tmp_path: Path) -> None:
    """Texts that are cut off look like texts."""
    part = PACKERS[ending](random.Random(0).randbytes(300_000).hex().encode())
    for num_bytes in (1, 100, len(part) // 2, len(part) - 1):
        folder = tmp_path / str(num_bytes)
        folder.mkdir()
        (folder / f"a.txt{ending}").write_bytes(part * (num_parts - 1) + part[:num_bytes])
        with pytest.raises(FormatError, match=rf"a\.txt{ending} cannot be read: .*fetch it again"):
            convert(folder, tmp_path / "out", num_workers=1)


@pytest.mark.parametrize("ending", PACKERS)
def test_a_compressed_array_of_objects_is_read_in_place(ending: str, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / f"a.json{ending}").write_bytes(PACKERS[ending](json.dumps([{"x": k} for k in range(100)]).encode()))
    assert values(folder) == list(range(100))


def test_a_bad_line_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, rows = tmp_path / "a.jsonl", text(range(10)).splitlines(keepends=True)
    path.write_bytes(b"".join([*rows[:3], b'{"x": 1\n', b"[1]\n", *rows[3:]]))
    with pytest.raises(ValueError, match="on_bad must be 'raise' or 'skip'; got 'drop'"):
        convert(path, tmp_path / "out", num_workers=1, source_options={"on_bad": "drop"})
    with pytest.raises(FormatError, match=r"line 4 of them is not JSON.*source_options={'on_bad': 'skip'}"):
        convert(path, tmp_path / "out", num_workers=1)
    done = convert(path, tmp_path / "out", num_workers=1, source_options={"on_bad": "skip"})
    assert values(done.uri) == list(range(10))
    assert "line 5 of them" in caplog.text


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_that_no_float_holds_is_an_error_and_never_infinite(tmp_path: Path, name: str) -> None:
    rows = [b'{"x": 1.5}', b'{"x": -Infinity}', b'{"x": 1e400}']

    def written(num_rows: int) -> Path:
        array = b"[" + b",".join(rows[:num_rows]) + b"]"
        folder = tmp_path / str(num_rows)
        folder.mkdir()
        (folder / name).write_bytes(array if name == "a.json" else b"\n".join(rows[:num_rows]))
        return folder

    assert values(written(2)) == [1.5, float("-inf")]
    with pytest.raises(FormatError, match="1e400 is beyond the largest float64"):
        values(written(3))


def test_a_bad_row_of_a_table_of_texts_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3\n5,6\n")
    with pytest.raises(FormatError, match=r"a\.csv cannot be read: .*Expected 2 columns, got 1"):
        convert(tmp_path / "a.csv", tmp_path / "out", num_workers=1)
    done = convert(tmp_path / "a.csv", tmp_path / "out", num_workers=1, source_options={"on_bad": "skip"})
    assert values(done.uri) == [1, 5]
    assert "it has 1 values, not 2" in caplog.text


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_a_quote_that_is_not_closed_takes_no_rows_with_it(tmp_path: Path, on_bad: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,a\n2,"b\n3,c\n')
    with pytest.raises(FormatError, match=r"a.csv ends within a quoted value. Close the quote"):
        convert(path, tmp_path / "out", num_workers=1, source_options={"on_bad": on_bad})


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_rows_of_any_line_ends_are_read(tmp_path: Path, end: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.csv").write_text("x,y\n0,a\n")
    (folder / "b.csv").write_bytes(f"\ufeff{end}x,y{end}1,b{end}{end}2,c{end}".encode())
    assert values(convert(folder, tmp_path / "out", num_workers=1).uri) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_rows_over_many_blocks_are_those_of_pythons_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for module in (delimited, lines):
        monkeypatch.setattr(module, "_BLOCK_BYTES", 300)
    draw = random.Random(seed)
    cells = ["\ufeffa", "b,c", 'd"e', "f\ng", "h\r\ni", "", " ", '"', "j" * draw.randrange(50)]
    rows = [[str(k), draw.choice(cells)] for k in range(100)]
    end = draw.choice(["\n", "\r\n"])
    with (tmp_path / "a.csv").open("w", newline="", encoding=draw.choice(["utf-8", "utf-8-sig"])) as file:
        csv.writer(file, lineterminator=end).writerows([["k", "a\ntext"], *rows])
    done = convert(tmp_path / "a.csv", tmp_path / "out", num_workers=1, partition_bytes=draw.choice([500, 1 << 20]))
    assert values(done.uri, "k") == list(range(100))
    assert values(done.uri, "a\ntext") == [text for _, text in rows]


def test_an_unknown_option_of_a_source_is_named_with_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(
        ValueError, match=r"source_options of kind 'csv' are delimiter, names, on_bad, and hidden; found a"
    ):
        convert(tmp_path / "a.csv", tmp_path / "out", num_workers=1, source_options={"a": 1})


LARGE = 9007199254740993


def test_a_whole_number_that_no_float_equals_is_not_rounded(tmp_path: Path) -> None:
    rows = [{"x": 0.5, "l": [0.5, 1]}, {"x": LARGE, "l": [LARGE, 0.5]}, {"x": 2, "l": [1.5]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert values(tmp_path / "a.jsonl") == [0.5, LARGE, 2]
    assert values(tmp_path / "a.jsonl", "l") == [row["l"] for row in rows]
    assert values(convert(tmp_path / "a.jsonl", tmp_path / "out", num_workers=1).uri) == [0.5, LARGE, 2]
    for columns in ({"x": "float64"}, {"l": "ndarray:float64"}):
        with pytest.raises(ValueError, match=f"{LARGE} is no float64"):
            convert(tmp_path / "a.jsonl", tmp_path / "floats", num_workers=1, columns=columns)
    for number, nested in enumerate(([[LARGE, 0.5]], [[LARGE, 1], [2, 3]])):
        (tmp_path / f"nested{number}.jsonl").write_text(json.dumps({"l": nested}))
        with pytest.raises(FormatError, match=f"{LARGE} is no float64"):
            StreamingDataset(remote=str(tmp_path / f"nested{number}.jsonl"), columns={"l": "ndarray:float64"})[0]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"x": k}) + "\n" for k in (1, LARGE, -(2**63))))
    assert values(tmp_path / "b.jsonl") == [1, LARGE, -(2**63)]


def tar(path: Path, *names: str) -> None:
    with tarfile.open(path, "w") as out:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            out.addfile(member, io.BytesIO(b"7"))


@pytest.mark.parametrize(("encoding", "numbers"), [("uint64", [5, 2**63 + 1]), ("int", [1.0, 2**53 + 1])])
def test_large_whole_numbers_are_exact_beside_others(tmp_path: Path, encoding: str, numbers: list[Any]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"x": number}) + "\n" for number in numbers))
    dataset = StreamingDataset(remote=str(tmp_path / "a.jsonl"), columns={"x": encoding})
    assert [int(dataset[k]["x"]) for k in range(2)] == numbers


def test_a_file_that_a_sample_lacks_is_known_when_a_tar_is_opened(tmp_path: Path) -> None:
    names = [f"{k:03}.{ending}" for k in range(200) for ending in ("cls", "json", "txt")]
    for name, lacking in (("whole", ""), ("cls", "150.cls"), ("txt", "150.txt"), ("json", "150.json")):
        (tmp_path / name).mkdir()
        tar(tmp_path / name / "a.tar", *(one for one in names if one != lacking))
    assert values(tmp_path / "whole", "cls") == [7] * 200
    assert values(tmp_path / "json", "json")[149:152] == [7, None, 7]
    for name in ("txt", "cls"):
        with pytest.raises(
            FormatError, match=rf"a\.tar: only json columns may have nulls; found {name}: 1 of 1 shards"
        ):
            len(StreamingDataset(remote=str(tmp_path / name)))
    assert len(StreamingDataset(remote=str(tmp_path / "txt"), columns=["cls"])) == 200
    dataset = StreamingDataset(remote=str(tmp_path / "cls"), columns={"cls": "json"})
    assert [dataset[k]["cls"] for k in range(149, 152)] == [7, None, 7]
    with pytest.raises(ValueError, match="null values found, by column: txt: 1"):
        convert(tmp_path / "txt", tmp_path / "out2", num_workers=1)
    assert convert(tmp_path / "txt", tmp_path / "out2", num_workers=1, drop_nulls=True).total == 199
