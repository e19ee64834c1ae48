"""Each kind of source gives its samples, and refuses what is damaged."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream.convert import Inputs, convert
from lightning_stream.errors import FormatError, MissingExtraError

PLAIN: dict[str, Any] = {"compression": None, "num_workers": 1}


def tar_of(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_files_of_one_key_in_a_tar_are_a_sample(tmp_path: Path, samples_of: Any) -> None:
    members: dict[str, bytes] = {}
    for k in range(10):
        members |= {f"a/{k:03}.cls": str(k % 3).encode(), f"a/{k:03}.txt": "naïve".encode()}
        members |= {f"a/{k:03}.json": b'{"k": 1}', f"a/{k:03}.npy": npy(np.arange(k + 1, dtype=np.int16))}
        members |= {f"a/{k:03}.seg.bin": bytes([k])}
    tar_of(tmp_path / "1.tar", members)
    tar_of(tmp_path / "2.tar.gz", {name.replace("a/", "b/"): data for name, data in members.items()}, "w:gz")
    done = convert([tmp_path / "1.tar", tmp_path / "2.tar.gz"], tmp_path / "out", **PLAIN)
    assert done.columns == {
        "__key__": "str", "cls": "int", "txt": "str", "json": "json", "npy": "ndarray:int16", "seg.bin": "bytes",
    }  # fmt: skip
    samples = samples_of(tmp_path / "out")
    assert [sample["__key__"] for sample in samples] == [f"{a}/{k:03}" for a in "ab" for k in range(10)]
    assert (samples[4]["cls"], samples[4]["txt"], samples[4]["json"]) == (1, "naïve", {"k": 1})
    assert samples[14]["npy"].tolist() == [0, 1, 2, 3, 4]


def litdata(folder: Path, texts: list[str]) -> Path:
    """A chunk of LitData, whose items have one text ``txt``."""
    items = [np.uint32(len(text.encode())).tobytes() + text.encode() for text in texts]
    ends = np.cumsum([8 + 4 * len(items), *map(len, items)])
    folder.mkdir()
    data = np.uint32(len(items)).tobytes() + ends.astype("<u4").tobytes() + b"".join(items)
    (folder / "chunk-0-0.bin").write_bytes(data)
    spec = {"type": "builtins.dict", "context": '["txt"]', "children_spec": [{"type": None, "children_spec": []}]}
    config = {"compression": None, "data_format": ["str"], "data_spec": json.dumps([1, spec])}
    chunks = [{"chunk_bytes": len(data), "chunk_size": len(items), "filename": "chunk-0-0.bin"}]
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return folder


def test_a_transform_gets_values_as_samples_have_them(tmp_path: Path, samples_of: Any) -> None:
    def seen(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}

    def written(source: Path, out: str) -> list[str]:
        convert(source, tmp_path / out, **PLAIN, transform=lambda row: {"row": repr(sorted(seen(row).items()))})
        return [sample["row"] for sample in samples_of(tmp_path / out)]

    array = npy(np.arange(2, dtype=np.int16))
    for name, texts in {"equal": ["naïf", "zwei"], "other": ["naïve", "2"]}.items():
        members = {f"{k}.{ending}": data for k, text in enumerate(texts) for ending, data in {
            "txt": text.encode(), "cls": b"7", "bin": b"ab", "json": b'{"a": 1}', "npy": array}.items()}  # fmt: skip
        tar_of(tmp_path / f"{name}.tar", members)
        rows = [{"__key__": str(k), "txt": text, "cls": 7, "bin": b"ab", "json": {"a": 1}, "npy": [0, 1]}
                for k, text in enumerate(texts)]  # fmt: skip
        assert written(tmp_path / f"{name}.tar", f"{name} tar") == [repr(sorted(row.items())) for row in rows]
        wanted = [repr([("txt", text)]) for text in texts]
        assert written(litdata(tmp_path / name, texts), f"{name} litdata") == wanted


def test_names_in_a_tar_are_labels_and_write_nowhere(tmp_path: Path, samples_of: Any) -> None:
    tar_of(tmp_path / "in.tar", {"../../escaped.txt": b"x", "/etc/escaped.txt": b"y"})
    convert(tmp_path / "in.tar", tmp_path / "a" / "b" / "out", **PLAIN)
    assert [s["__key__"] for s in samples_of(tmp_path / "a" / "b" / "out")] == ["../../escaped", "/etc/escaped"]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "in.tar", "index.json", "manifest.json", *(path.name for path in tmp_path.rglob("shard*")),
    }  # fmt: skip


def test_samples_of_a_tar_that_lack_or_add_a_file_are_reported_by_key(tmp_path: Path, samples_of: Any) -> None:
    first = {f"{k}.txt": b"x" for k in range(200)}
    tar_of(tmp_path / "more.tar", {**first, "z.txt": b"x", "z.cls": b"1"})
    with pytest.raises(ValueError, match=r"'z'.*a row has cls"):
        convert(tmp_path / "more.tar", tmp_path / "out", **PLAIN)
    convert(tmp_path / "more.tar", tmp_path / "out", **PLAIN, columns={"txt": "str"})
    assert len(samples_of(tmp_path / "out")) == 201
    tar_of(tmp_path / "less.tar", {"0.cls": b"1", **first})
    with pytest.raises(ValueError, match=r"cls: 199"):
        convert(tmp_path / "less.tar", tmp_path / "out2", **PLAIN)
    tar_of(tmp_path / "twice.tar", {"a.txt": b"1", "a.TXT": b"2"})
    with pytest.raises(FormatError, match="two files"):
        convert(tmp_path / "twice.tar", tmp_path / "out3", **PLAIN)


@pytest.mark.parametrize("damage", [slice(51_000, None), slice(53_000, None), slice(9 * 5632 + 20, 9 * 5632 + 40)])
def test_a_tar_that_ends_early_or_is_damaged_inside_is_refused(tmp_path: Path, damage: slice) -> None:
    tar_of(tmp_path / "in.tar", {f"{k}.bin": bytes(5000) for k in range(20)})
    data = bytearray((tmp_path / "in.tar").read_bytes())
    data[damage] = b"" if damage.stop is None else b"?" * 20
    (tmp_path / "in.tar").write_bytes(data)
    with pytest.raises(FormatError, match=r"in\.tar must be a whole tar"):
        convert(tmp_path / "in.tar", tmp_path / "out", **PLAIN)


def test_texts_are_samples_by_file_or_by_line(tmp_path: Path, samples_of: Any) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("eins\nzwei\n\nd\u00fcr\n")
    (tmp_path / "in" / "b.txt").write_text("vier")
    convert(tmp_path / "in", tmp_path / "files", **PLAIN)
    assert [sample["name"] for sample in samples_of(tmp_path / "files")] == ["a.txt", "b.txt"]
    convert(tmp_path / "in", tmp_path / "lines", **PLAIN, source_options={"lines": True}, partition_bytes=5)
    assert [sample["text"] for sample in samples_of(tmp_path / "lines")] == ["eins", "zwei", "d\u00fcr", "vier"]
    (tmp_path / "in" / "c.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match=r"c\.txt cannot be read: .*utf-8"):
        convert(tmp_path / "in", tmp_path / "out", **PLAIN)


def test_arrays_are_rows_along_their_first_axis(tmp_path: Path, samples_of: Any) -> None:
    array = np.arange(600, dtype=np.int32).reshape(100, 6)
    np.save(tmp_path / "a.npy", array)
    done = convert(
        tmp_path / "a.npy", tmp_path / "a", **PLAIN, partition_bytes=500, source_options={"column": "tokens"}
    )
    assert done.columns == {"tokens": "ndarray:int32:6"}
    np.testing.assert_array_equal(np.stack([s["tokens"] for s in samples_of(tmp_path / "a")]), array)
    np.savez(tmp_path / "b.npz", x=array[:, :2].astype(np.float16), y=np.arange(100) % 2 == 0)
    assert convert(tmp_path / "b.npz", tmp_path / "b", **PLAIN).columns == {"x": "ndarray:float16:2", "y": "uint8"}
    assert samples_of(tmp_path / "b")[2]["y"] == 1
    np.savez(tmp_path / "c.npz", x=array, y=array[:3])
    with pytest.raises(FormatError, match="one number of rows"):
        convert(tmp_path / "c.npz", tmp_path / "c", **PLAIN)
    np.save(tmp_path / "d.npy", np.array([object()]))
    with pytest.raises(FormatError, match=r"d\.npy"):
        convert(tmp_path / "d.npy", tmp_path / "d", **PLAIN)


def squares(numbers: range) -> Iterator[dict[str, Any]]:
    for number in numbers:
        yield {"n": number, "square": float(number) ** 2}


def test_a_function_gives_the_samples_of_inputs(tmp_path: Path, samples_of: Any) -> None:
    inputs = Inputs([range(5), range(5, 5), range(5, 300)], squares)
    done = convert(inputs, tmp_path / "out", **PLAIN)
    assert [s["n"] for s in samples_of(tmp_path / "out")] == list(range(300))
    assert done.columns == {"n": "int", "square": "float64"}
    assert not convert(inputs, tmp_path / "out", **PLAIN).is_new
    with pytest.raises(FileExistsError):
        convert(Inputs(inputs.inputs, squares, stamp="2"), tmp_path / "out", **PLAIN)


def test_a_function_may_give_one_sample_of_an_input_as_that_of_litdatas_optimize_does(
    tmp_path: Path, samples_of: Any
) -> None:
    def square(number: int) -> dict[str, int]:
        return {"n": number, "square": number**2}

    convert(Inputs(range(5), square), tmp_path / "out", partition_bytes=5, **PLAIN)
    assert samples_of(tmp_path / "out") == [square(number) for number in range(5)]
    assert len(list((tmp_path / "out").glob("**/*.mds"))) == 1
    with pytest.raises(TypeError, match="a dict, or several; found one that is a tuple"):
        convert(Inputs(range(5), lambda number: [(number, number)]), tmp_path / "tuples", **PLAIN)


@pytest.mark.parametrize("fails_at", [0, 3])
def test_an_error_of_a_function_of_inputs_stays_what_it_is(tmp_path: Path, fails_at: int) -> None:
    labels = {number: "a" for number in range(5) if number != fails_at}
    with pytest.raises(KeyError, match=rf"^{fails_at}\n.* called for input 0000{fails_at} \({fails_at}\)\.$"):
        convert(Inputs(range(5), lambda number: {"label": labels[number]}), tmp_path / "out", **PLAIN)


def test_a_folder_of_several_kinds_asks_which(tmp_path: Path, samples_of: Any) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("a\n1\n")
    (tmp_path / "in" / "b.jsonl").write_text('{"a": 2}\n')
    (tmp_path / "in" / "README.md").write_text("these are rows")
    with pytest.raises(ValueError, match="1 csv, 1 jsonl"):
        convert(tmp_path / "in", tmp_path / "out", **PLAIN)
    convert(tmp_path / "in", tmp_path / "out", **PLAIN, kind="jsonl")
    assert [s["a"] for s in samples_of(tmp_path / "out")] == [2]
    with pytest.raises(ValueError, match="source_options"):
        convert(tmp_path / "in", tmp_path / "out2", **PLAIN, kind="csv", source_options={"comma": 1})


@pytest.mark.parametrize("line", ["[1]", "{", '{"a": 1} {"a": 2}', '{"a": 1},', "x", "\udcff"])
def test_lines_that_are_no_json_object_are_refused_with_their_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"a": 1}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(FormatError, match=r"in\.jsonl.*line 2"):
        convert(tmp_path / "in.jsonl", tmp_path / "out", **PLAIN)


def test_a_json_array_is_read_as_rows(tmp_path: Path, samples_of: Any) -> None:
    (tmp_path / "in.json").write_text(json.dumps([{"a": k} for k in range(5)], indent=1))
    convert(tmp_path / "in.json", tmp_path / "out", **PLAIN, partition_bytes=10)
    assert [s["a"] for s in samples_of(tmp_path / "out")] == list(range(5))


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "lightning_stream.sources.tables", raising=False)
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"lightning-stream\[parquet\]"):
        convert(tmp_path / "in.parquet", tmp_path / "out", **PLAIN)


def test_only_an_absent_package_is_called_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    monkeypatch.delitem(sys.modules, "lightning_stream.sources.delimited", raising=False)
    monkeypatch.setitem(sys.modules, "lightning_stream.sources.lines", None)
    with pytest.raises(ImportError, match=r"lightning_stream\.sources\.lines") as raised:
        convert(tmp_path / "a.csv", tmp_path / "out")
    assert not isinstance(raised.value, MissingExtraError)
