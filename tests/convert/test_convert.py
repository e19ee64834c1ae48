"""Every row of a source is in the dataset exactly once, and any number of processes writes the same files."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from lightning_stream.convert import convert
from lightning_stream.errors import FormatError, NotFoundError

PLAIN: dict[str, Any] = {"compression": None, "num_workers": 1}


def test_json_lines_come_back_in_order_and_with_inferred_columns(
    rows_file: Path, tmp_path: Path, samples_of: Any
) -> None:
    done = convert(rows_file, tmp_path / "out", **PLAIN, partition_bytes="20kb")
    assert done.columns == {"k": "int64", "x": "float64", "text": "str", "tokens": "ndarray:int64"}
    assert done.num_samples == {"": 3000}
    samples = samples_of(tmp_path / "out")
    assert [sample["k"] for sample in samples] == list(range(3000))
    assert samples[7]["text"] == "wört 7"
    np.testing.assert_array_equal(samples[8]["tokens"], np.arange(4))
    assert len(list((tmp_path / "out").glob("part-*"))) == done.num_shards[""] > 3


def test_the_files_do_not_depend_on_the_number_of_processes(rows_file: Path, tmp_path: Path, files_of: Any) -> None:
    for count in (1, 2):
        convert(rows_file, tmp_path / str(count), partition_bytes="30kb", num_workers=count)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (1, True), (1.5, False), ([1, 2], [True]), ([1, 2], [5, True]), ([1.5], [True]),
        ([1], ["1"]), ([1], [None]), ([1], [2**70]), ([1], [[1], [2, 3]]), ([1], [1.5]), (1, 1.5), (1, "1"), ("1", 1),
    ],
)  # fmt: skip
def test_a_later_value_of_another_kind_is_refused_with_a_remedy_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples_of: Any, first: Any, later: Any
) -> None:
    monkeypatch.setattr("lightning_stream.sources.lines.SAMPLED_ROWS", 2)
    rows = [{"v": first}, {"v": first}, {"v": later}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"column 'v'.*columns="):
        convert(tmp_path / "in.jsonl", tmp_path / "out", **PLAIN)
    convert(tmp_path / "in.jsonl", tmp_path / "out", **PLAIN, columns={"v": "json"})
    assert [repr(sample["v"]) for sample in samples_of(tmp_path / "out")] == [repr(row["v"]) for row in rows]


def test_truth_values_are_numbers_where_the_user_says_so(tmp_path: Path, samples_of: Any) -> None:
    (tmp_path / "in.jsonl").write_text('{"v": 1, "w": [1]}\n{"v": true, "w": [true, 0.5]}\n')
    convert(tmp_path / "in.jsonl", tmp_path / "out", **PLAIN, columns={"v": "int64", "w": "ndarray:float32"})
    assert [(sample["v"], sample["w"].tolist()) for sample in samples_of(tmp_path / "out")] == [(1, [1]), (1, [1, 0.5])]


@pytest.mark.parametrize("partition_bytes", [5, 60, 1000])
def test_lines_fall_to_one_part_each_wherever_a_file_is_cut(
    tmp_path: Path, samples_of: Any, partition_bytes: int
) -> None:
    texts = ["", "a", "bb" * 30, "\u20ac", "c", "", "d" * 100]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"t": text}) for text in texts))  # no newline at the end
    convert(tmp_path / "in.jsonl", tmp_path / "out", **PLAIN, partition_bytes=partition_bytes)
    assert [sample["t"] for sample in samples_of(tmp_path / "out")] == texts


def test_compressed_lines_are_read_and_damaged_ones_refused(tmp_path: Path, samples_of: Any) -> None:
    data = b'{"a": 1}\n{"a": 2}\n'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "in" / "2.jsonl.zst").write_bytes(zstandard.compress(data) + zstandard.compress(data))
    convert(tmp_path / "in", tmp_path / "out", **PLAIN)
    assert [sample["a"] for sample in samples_of(tmp_path / "out")] == [1, 2] * 3
    (tmp_path / "in" / "1.jsonl.gz").write_bytes(gzip.compress(data)[:-9])
    with pytest.raises(FormatError, match=r"1\.jsonl\.gz"):
        convert(tmp_path / "in", tmp_path / "out2", **PLAIN)
    assert not (tmp_path / "out2" / "index.json").exists()


def test_csv_is_read_with_quotes_numbers_and_truth_values(tmp_path: Path, samples_of: Any) -> None:
    (tmp_path / "in.csv").write_text('id,ratio,name,flag\n1,0.5,"a, ""b""\nc",True\n-2,3,,false\n')
    done = convert(tmp_path / "in.csv", tmp_path / "out", **PLAIN)
    assert done.columns == {"id": "int64", "ratio": "float64", "name": "str", "flag": "uint8"}
    assert [
        tuple(sample[name] for name in ("id", "ratio", "name", "flag")) for sample in samples_of(tmp_path / "out")
    ] == [
        (1, 0.5, 'a, "b"\nc', 1),
        (-2, 3.0, "", 0),
    ]


def test_csv_with_long_values_is_read_and_with_odd_rows_or_doubled_names_refused(
    tmp_path: Path, samples_of: Any
) -> None:
    (tmp_path / "in.csv").write_text(f"a;b\n1;{'x' * 200_000}\n")
    convert(tmp_path / "in.csv", tmp_path / "out", **PLAIN, source_options={"delimiter": ";"})
    assert len(samples_of(tmp_path / "out")[0]["b"]) == 200_000
    for text, match in (("a,a\n1,2\n", "differ in name"), ("a,b\n1,2\n3\n", "got 1"), ("a\n\xff\n", "UTF8")):
        (tmp_path / "in.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(FormatError, match=match):
            convert(tmp_path / "in.csv", tmp_path / "out2", **PLAIN)


def test_an_image_folder_keeps_bytes_and_numbers_its_classes(tmp_path: Path, files_of: Any) -> None:
    image = pytest.importorskip("PIL.Image")
    for k in range(12):
        path = tmp_path / "in" / ("cat", "dog", "emu")[k % 3] / f"{k}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (9 + k, 5), (20 * k, 3, 9)).save(path)
    (tmp_path / "in" / "LICENSE.txt").write_text("free")
    done = convert(tmp_path / "in", tmp_path / "out", **PLAIN)
    assert done.columns == {"image": "jpeg", "label": "int", "name": "str"}
    shards = b"".join(data for name, data in files_of(tmp_path / "out").items() if name.endswith(".mds"))
    assert all(path.read_bytes() in shards for path in (tmp_path / "in").rglob("*.jpg"))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["classes"] == {"label": ["cat", "dog", "emu"]}


def test_nulls_are_refused_with_counts_or_filled_or_dropped(tmp_path: Path, samples_of: Any) -> None:
    rows = [{"a": k, "b": None if k % 4 == 0 else "x"} if k % 5 else {"b": "y", "a": None} for k in range(20)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = tmp_path / "in.jsonl"
    with pytest.raises(ValueError, match=r"a: 4, b: 4\. .*fill_nulls"):
        convert(source, tmp_path / "out", **PLAIN)
    assert not list((tmp_path / "out").iterdir())
    convert(source, tmp_path / "out", **PLAIN, drop_nulls=True)
    with pytest.raises(ValueError, match="fill_nulls names columns; c is none of b, a"):
        convert(source, tmp_path / "filled", **PLAIN, fill_nulls={"a": -1, "c": "?"})
    convert(source, tmp_path / "filled", **PLAIN, fill_nulls={"a": -1, "b": "?"})
    assert [s["a"] for s in samples_of(tmp_path / "filled")] == [k if k % 5 else -1 for k in range(20)]
    convert(source, tmp_path / "dropped", **PLAIN, drop_nulls=True)
    assert [s["a"] for s in samples_of(tmp_path / "dropped")] == [k for k in range(20) if k % 5 and k % 4]


def test_nulls_of_json_columns_are_filled_too(tmp_path: Path, samples_of: Any) -> None:
    (tmp_path / "in.jsonl").write_text('{"k": {"a": 1}}\n{"k": null}\n')
    convert(tmp_path / "in.jsonl", tmp_path / "out", **PLAIN, fill_nulls={"k": {}})
    assert [sample["k"] for sample in samples_of(tmp_path / "out")] == [{"a": 1}, {}]


def test_a_transform_gives_one_sample_none_or_several(rows_file: Path, tmp_path: Path, samples_of: Any) -> None:
    def halves(row: dict[str, Any]) -> Any:
        if row["k"] % 2:
            return None
        return [{"n": row["k"]}, {"n": -row["k"]}] if row["k"] % 4 else {"n": row["k"]}

    convert(rows_file, tmp_path / "out", **PLAIN, transform=halves)
    expected = [n for k in range(0, 3000, 2) for n in ((k, -k) if k % 4 else (k,))]
    assert [sample["n"] for sample in samples_of(tmp_path / "out")] == expected


def test_a_transform_of_rows_sees_all_of_a_part_in_order(rows_file: Path, tmp_path: Path, samples_of: Any) -> None:
    def blocks(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        held = [token for row in rows for token in row["tokens"]]
        for begin in range(0, len(held) - 63, 64):
            yield {"tokens": np.array(held[begin : begin + 64], np.int32)}

    convert(rows_file, tmp_path / "out", **PLAIN, transform_partition=blocks, columns={"tokens": "ndarray:int32:64"})
    tokens = [token for k in range(3000) for token in range(k % 5 + 1)]
    found = np.concatenate([sample["tokens"] for sample in samples_of(tmp_path / "out")])
    assert found.tolist() == tokens[: len(found)]
    assert len(tokens) - len(found) < 64
    with pytest.raises(ValueError, match="not both"):
        convert(rows_file, tmp_path / "out2", **PLAIN, transform_partition=blocks, transform=dict)
    with pytest.raises(TypeError, match="one of them is int"):
        convert(rows_file, tmp_path / "out2", **PLAIN, transform_partition=lambda rows: [row["k"] for row in rows])


def test_values_beyond_inferred_columns_are_refused_and_seen_by_a_transform(tmp_path: Path, samples_of: Any) -> None:
    lines = [json.dumps({"a": k} if k < 10_000 else {"a": k, "late": k}) + "\n" for k in range(10_001)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match="a row has late"):
        convert(tmp_path / "in.jsonl", tmp_path / "out", **PLAIN)
    convert(tmp_path / "in.jsonl", tmp_path / "chosen", **PLAIN, columns={"a": "int32"})
    assert len(samples_of(tmp_path / "chosen")) == 10_001

    def latest(row: dict[str, Any]) -> dict[str, Any]:
        return {"n": row.get("late", -1)}

    convert(tmp_path / "in.jsonl", tmp_path / "late", **PLAIN, transform=latest)
    assert samples_of(tmp_path / "late")[-1] == {"n": 10_000}


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_a_transform_returns_beyond_its_first_sample_is_never_lost(
    rows_file: Path, tmp_path: Path, samples_of: Any, shuffle: bool
) -> None:
    def late(row: dict[str, Any]) -> dict[str, Any]:
        return {"k": row["k"], "late": 1} if row["k"] == 2000 else {"k": row["k"]}

    def gaps(row: dict[str, Any]) -> dict[str, Any]:
        return {"k": row["k"] if row["k"] != 2000 else None}

    settings: dict[str, Any] = {**PLAIN, "shuffle": shuffle}
    with pytest.raises(ValueError, match="a row has late"):
        convert(rows_file, tmp_path / "out", **settings, transform=late)
    with pytest.raises(ValueError, match="k: 1"):
        convert(rows_file, tmp_path / "out", **settings, transform=gaps)
    convert(rows_file, tmp_path / "out", **settings, transform=gaps, fill_nulls={"k": 2000})
    assert sorted(sample["k"] for sample in samples_of(tmp_path / "out")) == list(range(3000))


def test_a_transform_that_carries_other_values_makes_another_dataset(rows_file: Path, tmp_path: Path) -> None:
    def times(factor: int) -> Any:
        return lambda row: {"n": row["k"] * factor}

    convert(rows_file, tmp_path / "out", **PLAIN, transform=times(2))
    assert not convert(rows_file, tmp_path / "out", **PLAIN, transform=times(2)).is_new
    with pytest.raises(FileExistsError, match="transform was"):
        convert(rows_file, tmp_path / "out", **PLAIN, transform=times(3))


def test_validation_rows_are_a_share_and_the_others_are_for_training(
    rows_file: Path, tmp_path: Path, samples_of: Any
) -> None:
    done = convert(rows_file, tmp_path / "out", **PLAIN, val_fraction=0.1, partition_bytes="40kb")
    train, val = ([s["k"] for s in samples_of(tmp_path / "out" / name)] for name in ("train", "val"))
    assert sorted(train + val) == list(range(3000))
    assert done.num_samples == {"train": len(train), "val": len(val)}
    assert 200 < len(val) < 400
    convert(rows_file, tmp_path / "whole", **PLAIN)
    with pytest.raises(FileExistsError, match="without splits"):
        convert(rows_file, tmp_path / "whole", **PLAIN, val_fraction=0.1, exist_ok=True)


def test_rows_of_one_key_are_in_one_split_also_when_the_source_grows(tmp_path: Path, samples_of: Any) -> None:
    lines = [json.dumps({"author": f"a{k % 40}", "k": k}) + "\n" for k in range(400)]
    held = []
    for count in (200, 400):
        (tmp_path / "in.jsonl").write_text("".join(lines[:count]))
        out = tmp_path / f"out{count}"
        convert(tmp_path / "in.jsonl", out, **PLAIN, val_fraction=0.3, group_by="author")
        authors = [{s["author"] for s in samples_of(out / split)} for split in ("train", "val")]
        assert not authors[0] & authors[1]
        held.append(authors[1])
    assert held[0] == held[1]


def test_a_finished_conversion_is_found_and_a_changed_one_refused_by_name(
    rows_file: Path, tmp_path: Path, files_of: Any
) -> None:
    out = tmp_path / "out"
    assert convert(rows_file, out, **PLAIN).is_new
    before = files_of(out)
    again = convert(rows_file, out, **PLAIN)
    assert not again.is_new
    assert again.total == 3000
    assert files_of(out) == before
    with pytest.raises(FileExistsError, match='compression was None, now "auto"'):
        convert(rows_file, out, num_workers=1)
    rows_file.write_text(rows_file.read_text() + '{"k": 3000, "x": 0.0, "text": "", "tokens": [1]}\n')
    with pytest.raises(FileExistsError, match=r"Changed files: rows\.jsonl"):
        convert(rows_file, out, **PLAIN)
    assert files_of(out) == before
    assert convert(rows_file, out, **PLAIN, exist_ok=True).total == 3001
    convert(rows_file, tmp_path / "again", **PLAIN)
    assert files_of(out) == files_of(tmp_path / "again")


def test_a_source_that_changes_while_it_is_read_gives_no_dataset(rows_file: Path, tmp_path: Path) -> None:
    def meddling(row: dict[str, Any]) -> dict[str, Any]:
        if row["k"] == 1000:
            rows_file.touch()
        return row

    with pytest.raises(FormatError, match="was modified or removed during the conversion"):
        convert(rows_file, tmp_path / "out", **PLAIN, transform=meddling)
    assert not (tmp_path / "out" / "index.json").exists()
    assert convert(rows_file, tmp_path / "out", **PLAIN).total == 3000  # nothing is in its way


def test_a_folder_in_use_is_left_alone(rows_file: Path, tmp_path: Path, files_of: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        convert(rows_file, tmp_path / "out", **PLAIN)
    convert(rows_file, tmp_path / "out", **PLAIN, exist_ok=True)
    assert files_of(tmp_path / "out")["notes.txt"] == b"mine"


def test_what_cannot_be_written_says_where_and_leaves_no_dataset(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"a": k if k < 30_000 else "x", "b": "-" * 200}) + "\n" for k in range(30_001)))
    with pytest.raises(ValueError, match=r"in\.jsonl.*'a'"):
        convert(path, tmp_path / "out", **PLAIN)
    assert not (tmp_path / "out" / "index.json").exists()
    with pytest.raises(ValueError, match="has no column c"):
        convert(path, tmp_path / "out2", **PLAIN, columns={"c": "str"})
    with pytest.raises(NotFoundError, match="names none"):
        convert(tmp_path / "absent", tmp_path / "out3")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="empty"):
        convert(tmp_path / "empty.jsonl", tmp_path / "out4")


def test_a_script_without_a_guard_may_use_processes(rows_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from lightning_stream.convert import convert\n"
        f"print(convert({str(rows_file)!r}, {str(tmp_path / 'out')!r}, num_workers=2, partition_bytes=50_000))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.count("3,000 samples") == 1


@pytest.mark.nightly
def test_a_transform_of_a_script_needs_the_guard_and_says_so(rows_file: Path, tmp_path: Path) -> None:
    function = "from lightning_stream.convert import convert\ndef only_k(row):\n    return {'k': row['k']}\n"
    call = f"convert({str(rows_file)!r}, 'out', num_workers=2, partition_bytes=50_000, transform=only_k)"
    (tmp_path / "script.py").write_text(f"{function}print({call})\n")
    command = [sys.executable, "script.py"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "if __name__ == '__main__'" in failed.stderr
    (tmp_path / "script.py").write_text(f"{function}if __name__ == '__main__':\n    print({call})\n")
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "3,000 samples" in done.stdout
