"""The index: parsed into arrays, exact, refused when hostile, and cheap at 100,000 shards."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stream.errors import FormatError
from lightning_stream.formats.index import Index


def entry(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "column_encodings": ["int", "str"], "column_names": ["id", "t"], "column_sizes": [8, None], "compression": None,
        "format": "mds", "hashes": [], "raw_data": {"basename": "shard.00000.mds", "bytes": 56, "hashes": {}},
        "samples": 3, "size_limit": 100, "version": 2, "zip_data": None,
    }  # fmt: skip
    return {**base, **changes}


def parse(*entries: Any, **top: Any) -> Index:
    return Index.from_bytes(json.dumps({"shards": list(entries), "version": 2, **top}).encode(), "here/index.json")


def test_arrays_and_entries_say_the_same() -> None:
    packed = {"basename": "shard.00001.mds.zstd", "bytes": 4, "hashes": {"sha1": "aa"}}
    raw = {"basename": "shard.00001.mds", "bytes": 20, "hashes": {"sha1": "bb"}}
    index = parse(entry(), entry(samples=0, compression="zstd", hashes=["sha1"], raw_data=raw, zip_data=packed))
    assert (len(index), index.num_samples, index.shard_sizes.tolist()) == (2, 3, [3, 0])
    assert (index.raw_bytes.tolist(), index.stored_bytes.tolist()) == ([56, 20], [56, 4])
    one = index.entry(1)
    assert one.files == ((one.raw, one.compressed),)
    assert (one.format, one.schema.compression, one.raw.num_bytes, one.raw.hashes) == (
        "mds",
        "zstd",
        20,
        {"sha1": "bb"},
    )
    assert index.columns == {"id": "int", "t": "str"}
    assert index.entry(0).schema == index.schemas[0]
    assert pickle.loads(pickle.dumps(index)).entry(1) == one
    for wrong in (-1, 2):
        with pytest.raises(IndexError):
            index.entry(wrong)


def test_the_digest_is_of_the_samples_not_of_their_packing() -> None:
    plain = parse(entry()).digest
    packed = {"basename": "shard.00000.mds.br", "bytes": 4, "hashes": {}}
    assert parse(entry(compression="br", zip_data=packed, size_limit=None)).digest == plain
    assert parse(entry(), note="ours").digest == plain
    raw = entry()["raw_data"]
    for other in (
        entry(samples=4), entry(raw_data={**raw, "bytes": 57}), entry(raw_data={**raw, "basename": "other.mds"}),
        entry(raw_data={**raw, "hashes": {"md5": "a"}}), entry(column_encodings=["int", "bytes"]),
    ):  # fmt: skip
        assert parse(other).digest != plain
    assert parse(entry(), entry()).digest != plain


@pytest.mark.parametrize("layout", [{"indent": 3}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_any_json_layout_is_read(layout: dict[str, Any]) -> None:
    name = "pärt/shard.00000.mds"
    value = {
        "extra": [{"deep": 1}],
        "shards": [entry(raw_data={"basename": name, "bytes": 56, "hashes": {}})] * 3,
        "version": 2,
    }
    index = Index.from_bytes(f"\n {json.dumps(value, **layout)} \n".encode(), "x")
    assert [index.entry(k).raw.basename for k in range(3)] == [name] * 3
    assert Index.from_bytes(json.dumps(dict(reversed(value.items()))).encode(), "x").digest == index.digest


@pytest.mark.parametrize(
    "name",
    [
        "../shard.mds",
        "/etc/passwd",
        "a/../../b",
        "a//b",
        "./a",
        "",
        "a\\b",
        "C:/x",
        "c:x",
        "a\0b",
        "a/..",
        "..",
        ".",
        ".lightning_stream/lock",
        "index.json",
        "a\nb",
        "x" * 2000,
        5,
        None,
    ],
)
@pytest.mark.parametrize("which", ["raw_data", "zip_data"])
def test_names_that_leave_the_folder_are_refused(name: Any, which: str) -> None:
    files = {
        "raw_data": {"basename": "a", "bytes": 1, "hashes": {}},
        "zip_data": {"basename": "b", "bytes": 1, "hashes": {}},
    }
    files[which]["basename"] = name
    with pytest.raises(FormatError, match="names of files must "):
        parse(entry(compression="zstd", **files))


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": -1}, {"samples": 1.5}, {"samples": True}, {"samples": None}, {"samples": 10**30}, {"format": "exe"},
        {"version": 1}, {"column_names": ["id"]}, {"column_names": ["id", "id"]}, {"column_sizes": [8, -1]},
        {"column_sizes": [8, "x"]}, {"column_encodings": [1, 2]}, {"compression": "zstd"}, {"compression": 5},
        {"hashes": None},
        {"raw_data": None}, {"raw_data": []},
        {"raw_data": {"basename": "a", "bytes": -1, "hashes": {}}},
        {"raw_data": {"basename": "a", "bytes": 1 << 70, "hashes": {}}},
        {"raw_data": {"basename": "a", "bytes": "1", "hashes": {}}},
        {"raw_data": {"basename": "a", "bytes": 1, "hashes": {"md5": 5}}},
        {"raw_data": {"basename": "a", "bytes": 1, "hashes": [1]}},
        {"zip_data": {"basename": "a", "bytes": 1, "hashes": {}}}, {"column_names": 5}, {"column_names": [["x"], "y"]},
        {"format": "json", "columns": {"a": "str"}, "newline": ""},
        {"format": "xsv", "newline": "\n", "separator": None},
    ],
)  # fmt: skip
def test_a_wrong_entry_is_a_format_error_that_says_where(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"here/index\.json"):
        parse(entry(**changes))
    lacking = entry(**changes)
    del lacking[next(iter(changes))]
    with pytest.raises(FormatError, match=r"here/index\.json"):
        parse(lacking) if next(iter(changes)) != "zip_data" else parse({})


@pytest.mark.parametrize(
    "text",
    ["", "{", "{]", "[]", "null", "\xff", '{"shards": []}', '{"version": 2}', '{"shards": [], "version": 3}',
     '{"shards": [1], "version": 2}', '{"shards": {}, "version": 2}', '{"shards": [' + "[" * 100_000, '{"shards": [{}',
     '{"version": ' + "9" * 6000 + "}"],
)  # fmt: skip
def test_what_is_no_index_is_a_format_error(text: str) -> None:
    with pytest.raises(FormatError):
        Index.from_bytes(text.encode("latin-1"), "x")


@given(st.data())
def test_cut_and_altered_indexes_never_crash(data: st.DataObject) -> None:
    text = bytearray(json.dumps({"shards": [entry(), entry(samples=0)], "version": 2}).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(text[: data.draw(st.integers(0, len(text)))])
    try:
        index = Index.from_bytes(cut, "x")
    except FormatError:
        return
    for shard in range(len(index)):
        assert index.entry(shard).num_samples == index.shard_sizes[shard]


def test_a_hundred_thousand_shards_take_little_time_and_memory(tmp_path: Path) -> None:
    raw = {"basename": "part0/shard.00000.mds", "bytes": 689, "hashes": {"sha1": "a" * 40}}
    one = json.dumps(entry(raw_data=raw, hashes=["sha1"]))
    path = tmp_path / "index.json"
    path.write_text(
        '{"shards": [' + ", ".join(one.replace("00000", f"{k:05}") for k in range(100_000)) + '], "version": 2}'
    )
    code = (
        "import resource, sys, time; from lightning_stream.formats.index import Index;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; begin = time.process_time();"
        "index = Index.from_bytes(open(sys.argv[1], 'rb').read(), 'x'); took = time.process_time() - begin;"
        "assert index.entry(99_999).raw.basename == 'part0/shard.99999.mds';"
        "print(took, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    took_s, mebibytes = map(float, result.stdout.split())
    assert took_s < 10  # 0.8 s where it was written; other machines are slower and busy
    assert mebibytes < 150


@pytest.mark.parametrize(
    "changes",
    [{"bytes": 8 << 50, "samples": 1 << 50}, {"bytes": 32, "samples": 4}, {"bytes": 8}, {"hashes": {}}, {"samples": 2}],
)
def test_no_more_rows_are_deleted_than_there_are(changes: dict[str, Any]) -> None:
    deleted = {"basename": "deleted.bin", "bytes": 24, "samples": 3, "hashes": {"md5": "a"}}
    assert parse(entry(), deleted=deleted).num_deleted == parse(entry()).num_samples == 3
    with pytest.raises(FormatError, match="deleted rows must be rows of the dataset"):
        parse(entry(), deleted=deleted | changes)


def test_one_file_is_not_two_shards_unless_they_are_the_same() -> None:
    assert parse(entry(), entry()).num_samples == 2 * parse(entry()).num_samples
    for other in ({"samples": 7}, {"raw_data": {**entry()["raw_data"], "bytes": 57}}):
        with pytest.raises(FormatError, match=r"shard 1: .*shard\.00000\.mds is also the file of a shard"):
            parse(entry(), entry(**other))


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": []}, {"samples": {}}, {"samples": 1 << 47}, {"samples": 13}, {"column_encodings": ["nope", "str"]},
        {"column_encodings": ["ndarray:int32:-1", "str"]}, {"column_encodings": ["ndarray:nope:3", "str"]},
        {"column_sizes": [4, None]}, {"column_sizes": [None, None]}, {"column_encodings": [[], {}]},
        {"compression": "nope", "zip_data": {"basename": "b", "bytes": 9, "hashes": {}}},
        {"compression": "zstd:23", "zip_data": {"basename": "b", "bytes": 9, "hashes": {}}},
        {"format": "json", "columns": {"a": "int"}, "newline": "\n", "raw_meta": None},
        {"format": "json", "columns": {"a": "nope"}, "newline": "\n", "raw_meta": entry()["raw_data"]},
        {
            "format": "json", "columns": {"a": "int"}, "newline": "\n", "samples": 3,
            "raw_meta": {"basename": "m", "bytes": 19, "hashes": {}},
        },
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_while_the_index_is_parsed(changes: dict[str, Any]) -> None:
    good = entry(raw_data={"basename": "other.mds", "bytes": 99, "hashes": {}})
    with pytest.raises(FormatError, match=r"here/index\.json, shard 1: "):
        parse(good, entry(**changes))


def test_a_web_page_in_place_of_an_index_is_called_one() -> None:
    page = b"<!doctype html><html><title>An app</title></html>"
    with pytest.raises(FormatError, match=r"a web page, .* for a file that is absent, .* check the address\.$"):
        Index.from_bytes(page, "https://host/data/index.json")
