"""CSV and JSON lines: every row is read, and identifiers stay what they are."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from lightning_stream import StreamingDataset
from lightning_stream.convert import convert
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.sources.base import partitions_of
from lightning_stream.sources.choose import open_source

PLAIN: dict[str, Any] = {"compression": None, "num_workers": 1}


def csv_samples(tmp_path: Path, samples_of: Any, text: str, **settings: Any) -> tuple[dict[str, str], list[Any]]:
    (tmp_path / "in.csv").write_text(text)
    done = convert(tmp_path / "in.csv", tmp_path / "out", **PLAIN, overwrite=True, **settings)
    return done.columns, samples_of(tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        (["2021_03", "2022_11"], "str"),
        (["01234", "99999"], "str"),
        (["nan", "inf"], "str"),
        (["1", "nan"], "str"),
        (["0x10", "12"], "str"),
        (["1e5", "-2"], "float64"),
        (["0", "-7"], "int64"),
        (["12345678901234567890", "1"], "str"),
        (["1234567890123456789012.5", "1"], "str"),
        (["1e-250", "1e99"], "float64"),
        (["1e999", "12e3456"], "str"),
        (["1e-999", "1"], "str"),
        (["+4930123", "1"], "str"),
        (["true", "False"], "uint8"),
        (["", ""], "str"),
    ],
)
def test_only_numbers_become_numbers(tmp_path: Path, samples_of: Any, values: list[str], encoding: str) -> None:
    columns, samples = csv_samples(tmp_path, samples_of, "id,k\n" + "".join(f"{value},1\n" for value in values))
    assert columns["id"] == encoding
    if encoding == "str":
        assert [sample["id"] for sample in samples] == values


def test_a_later_identifier_in_a_column_of_numbers_is_refused_unless_numbers_are_asked_for(
    tmp_path: Path, samples_of: Any
) -> None:
    text = "zip\n" + "10000\n" * 20_000 + "01234\n"
    with pytest.raises(ValueError, match=r"'zip': '01234' .*columns="):
        csv_samples(tmp_path, samples_of, text)
    assert csv_samples(tmp_path, samples_of, text, columns={"zip": "int64"})[1][-1] == {"zip": 1234}
    assert csv_samples(tmp_path, samples_of, text, columns={"zip": "str"})[1][-1] == {"zip": "01234"}


def test_a_number_that_no_float_holds_is_refused_and_infinity_is_read(tmp_path: Path, samples_of: Any) -> None:
    columns = {"x": "float64"}
    with pytest.raises(ValueError, match=r"column 'x': -1e999 is beyond the largest float64"):
        csv_samples(tmp_path, samples_of, "x\ninf\n1e308\n-1e999\n", columns=columns)
    samples = csv_samples(tmp_path, samples_of, "x\ninf\n1e308\n-Infinity\n", columns=columns)[1]
    assert [sample["x"] for sample in samples] == [math.inf, 1e308, -math.inf]


def test_blank_lines_lose_no_row(tmp_path: Path, samples_of: Any) -> None:
    text = "\n\r\na,b\n\n1,x\n" + "\n" * 20_000 + "2,y\n" + "\r\n" * 9000 + "3,z"
    assert [sample["a"] for sample in csv_samples(tmp_path, samples_of, text)[1]] == [1, 2, 3]
    text = "a,b\n1,x\n" + "\n" * (9 << 20) + "2,y\n"
    assert [sample["a"] for sample in csv_samples(tmp_path, samples_of, text)[1]] == [1, 2]


@pytest.mark.parametrize("partition_bytes", [None, 100])
@pytest.mark.parametrize("blank", ["\n", "\r\n" * 300, "\ufeff\n"], ids=["one", "many", "after a byte order mark"])
def test_blank_lines_above_the_names_do_not_make_them_a_row(
    tmp_path: Path, samples_of: Any, blank: str, partition_bytes: int | None
) -> None:
    text = f"{blank}a,b\n" + "".join(f"{k},x\n" for k in range(50))
    columns, samples = csv_samples(tmp_path, samples_of, text, partition_bytes=partition_bytes)
    assert columns["a"] == "int64"
    assert [sample["a"] for sample in samples] == list(range(50))


def test_a_csv_file_of_names_alone_adds_no_row(tmp_path: Path, samples_of: Any) -> None:
    (tmp_path / "in").mkdir()
    for name, text in (("a", "k,t\n1,x\n"), ("b", "k,t"), ("c", "k,t\n"), ("d", ""), ("e", "k,t\n2,y")):
        (tmp_path / "in" / f"{name}.csv").write_text(text)
    convert(tmp_path / "in", tmp_path / "out", **PLAIN, partition_bytes=3)
    assert [sample["k"] for sample in samples_of(tmp_path / "out")] == [1, 2]


def test_a_transform_gets_no_identifier_that_lost_its_zeros(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("zip\n" + "10000\n" * 20_000 + "01234\n")
    with pytest.raises(ValueError, match=r"'zip': '01234' .*columns="):
        convert(tmp_path / "in.csv", tmp_path / "out", **PLAIN, transform=dict, columns={"zip": "int64"})


def test_json_columns_keep_their_numbers_as_they_are(tmp_path: Path, samples_of: Any) -> None:
    values = [1, 2.5, 2**65, True, None]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    convert(tmp_path / "in.jsonl", tmp_path / "out", **PLAIN, columns={"v": "json"}, partition_bytes=12)
    found = [sample["v"] for sample in samples_of(tmp_path / "out")]
    assert [(value, type(value)) for value in found] == [(value, type(value)) for value in values]


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl", "in.json", "in.txt"])
def test_a_byte_order_mark_is_no_part_of_the_first_value(tmp_path: Path, samples_of: Any, name: str) -> None:
    texts = {"in.csv": "text,k\nx,1\n", "in.jsonl": '{"text": "x"}\n', "in.json": '[{"text": "x"}]', "in.txt": "x"}
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + texts[name].encode())
    convert(tmp_path / name, tmp_path / "out", **PLAIN)
    assert samples_of(tmp_path / "out")[0]["text"] == "x"


@pytest.mark.parametrize("quoted", [False, True])
def test_a_csv_file_is_cut_between_lines_unless_values_are_quoted(
    tmp_path: Path, samples_of: Any, quoted: bool
) -> None:
    rows = "".join(f'{k},"x\n{k}"\n' if quoted else f"{k},x{k}\n" for k in range(5000))
    _, samples = csv_samples(tmp_path, samples_of, f"k,text\n{rows}", partition_bytes=10_000)
    assert [sample["k"] for sample in samples] == list(range(5000))
    assert samples[7]["text"] == ("x\n7" if quoted else "x7")
    partitions = partitions_of(open_source(tmp_path / "in.csv", None, None, None).cut({}, 10_000), 10_000)
    assert (len(partitions) == 1) == quoted
    with pytest.raises(FormatError, match="columns"):
        csv_samples(tmp_path, samples_of, f"k,text\n{rows}1,2,3\n", partition_bytes=10_000)


@pytest.mark.parametrize("name", ["set*", "set?", "set{0..1}"])
def test_a_folder_that_exists_is_no_pattern(tmp_path: Path, samples_of: Any, name: str) -> None:
    for number, folder in enumerate((name, "set0", "setA")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(f'{{"k": {number}}}\n')
    convert(tmp_path / name, tmp_path / "out", **PLAIN)
    assert samples_of(tmp_path / "out") == [{"k": 0}]
    assert [sample["k"] for sample in StreamingDataset(str(tmp_path / name), local=str(tmp_path / "cache"))] == [0]


@pytest.mark.parametrize("size_limit", ["auto", "64mb"])
@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "npz"])
def test_a_column_that_only_a_later_file_has_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, size_limit: str
) -> None:
    (tmp_path / "in").mkdir()
    for number in range(20):
        columns = {"k": [number], **({"late": [1]} if number == 7 else {})}
        _write_table(tmp_path / "in" / f"{number:02}.{kind}", columns)
    done = convert(tmp_path / "in", tmp_path / "out", **PLAIN, size_limit=size_limit)
    assert (done.total, list(done.columns)) == (20, ["k"])
    (warning,) = [record.message for record in caplog.records if "late" in record.message]
    assert "07." in warning
    assert "columns=" in warning
    caplog.clear()
    convert(tmp_path / "in", tmp_path / "asked", **PLAIN, columns={"k": "int64"}, size_limit=size_limit)
    assert not caplog.records


def _write_table(path: Path, columns: dict[str, Any]) -> None:
    table = pa.table(columns)
    if path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    else:
        np.savez(path, **columns)


def test_a_dataset_below_its_source_is_no_part_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("first\nsecond\n")
    settings: dict[str, Any] = {**PLAIN, "source_options": {"lines": True}}
    assert convert(folder, folder / "mds", **settings).total == 2
    again = convert(folder, folder / "mds", **settings)
    assert (again.total, again.is_new) == (2, False)
    assert convert(folder, (tmp_path / "here", folder / "mds"), **settings).is_new is False


def test_a_link_to_nothing_and_a_name_that_is_no_text_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"k": 1}\n')
    (folder / ".#a.jsonl").symlink_to("editor@host")  # of an editor; hidden files are no data
    assert convert(folder, tmp_path / "out", **PLAIN).total == 1
    (folder / "b.jsonl").symlink_to(tmp_path / "blob")
    for source in (folder, folder / "b.jsonl"):
        with pytest.raises(NotFoundError, match=r"b\.jsonl is a link to a file that is gone"):
            convert(source, tmp_path / "other", **PLAIN)
    with pytest.raises(NotFoundError, match=r"b\.jsonl is a link to a file that is gone"):
        StreamingDataset(str(folder), local=str(tmp_path / "cache"))[0]
    (folder / "b.jsonl").unlink()
    try:
        Path(os.fsdecode(os.fsencode(folder) + b"/\xff.jsonl")).write_text('{"k": 2}\n')
    except OSError:
        return  # a file system whose names are text
    with pytest.raises(ValueError, match=r"names of files must be UTF-8; rename '\\udcff.jsonl'"):
        convert(folder, tmp_path / "third", **PLAIN)


def test_a_folder_name_with_brackets_is_a_name(tmp_path: Path, samples_of: Any) -> None:
    folder = tmp_path / "set[1]"
    folder.mkdir()
    (folder / "a[b].jsonl").write_text('{"k": 1}\n')
    for source in (folder, folder / "*.jsonl", folder / "a[b].jsonl", folder / "a[?].jsonl"):
        convert(source, tmp_path / "out", **PLAIN, overwrite=True)
        assert samples_of(tmp_path / "out") == [{"k": 1}]


def test_no_file_of_a_source_is_lost_or_read_twice(tmp_path: Path, samples_of: Any) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for k, name in enumerate(["a.jsonl", "new\nline.jsonl", "%41 \u00e9.jsonl"]):
        (folder / name).write_text(json.dumps({"k": k}) + "\n")
    convert(folder, tmp_path / "out", **PLAIN)
    assert sorted(sample["k"] for sample in samples_of(tmp_path / "out")) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"each file once; it names .*a\.jsonl twice"):
        convert([folder, folder / "a.jsonl"], tmp_path / "twice", **PLAIN)
    (folder / "a.jsonl").rename(folder / "_a.jsonl")
    assert convert(folder / "_a.jsonl", tmp_path / "hidden", **PLAIN).total == 1


def test_a_dataset_object_of_hugging_face_is_read_in_its_order(tmp_path: Path, samples_of: Any) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    features = datasets.Features({"k": datasets.Value("int32"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = {"k": list(range(3000)), "label": [k % 2 for k in range(3000)]}
    dataset = datasets.Dataset.from_dict(rows, features).shuffle(seed=1)
    done = convert(dataset, tmp_path / "out", num_workers=2, compression=None, partition_bytes=5000)
    assert done.classes == {"label": ["no", "yes"]}
    assert [sample["k"] for sample in samples_of(tmp_path / "out")] == dataset["k"][:]
    assert done.num_shards[""] > 1
    assert not convert(dataset, tmp_path / "out", compression=None, partition_bytes=5000).is_new
    with pytest.raises(ValueError, match="without its own transform"):
        convert(dataset.with_transform(lambda batch: {"k": batch["k"]}), tmp_path / "transformed")


def test_no_process_gets_the_list_of_all_files_or_inputs(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for k in range(200):
        (tmp_path / "in" / f"{k}.jsonl").write_text(json.dumps({"k": k}))
    source = open_source(tmp_path / "in", None, None, None)
    assert len(pickle.dumps(source.reader)) < 1000 < len(pickle.dumps(source.files))
