"""Source and dataset may both lie in stores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers.s3 import bucket_at, options_of

from lightning_stream.convert import convert
from lightning_stream.counters import NAMES
from lightning_stream.errors import StoreError
from lightning_stream.sources.files import find_files
from lightning_stream.stores import RetryingStore, open_store

pytest.importorskip("fsspec", reason="needs fsspec: uv sync --group test")


def test_a_source_in_a_store_gives_the_same_shards_in_a_store(rows_file: Path, tmp_path: Path, files_of: Any) -> None:
    source, out = "memory://convert-source", "memory://convert-out"
    data = rows_file.read_bytes()
    open_store(source).put("folder/rows.jsonl", data)
    open_store(source).put("folder/notes.txt", b"not rows")
    settings: dict[str, Any] = {"num_workers": 1, "partition_bytes": "40kb"}
    convert(f"{source}/folder", out, **settings)
    convert(rows_file, tmp_path / "local", **settings)
    stored = {entry.name: open_store(out).read(entry.name) for entry in open_store(out).list("")}
    local = files_of(tmp_path / "local")
    assert {name: data for name, data in stored.items() if name != "manifest.json"} == {
        name: data for name, data in local.items() if name != "manifest.json"
    }
    assert not convert(f"{source}/folder", out, **settings).is_new
    for one in (f"{source}/folder/rows.jsonl", f"{source}/folder/*.jsonl", [f"{source}/folder/rows.jsonl"]):
        assert convert(one, tmp_path / "again", **settings, exist_ok=True).total == 3000


def test_files_of_a_store_are_listed_without_a_request_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://convert-listed")
    for k in range(20):
        store.put(f"{k:02}.jsonl", b'{"k": 1}')
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "open", None)
        before = find_files("memory://convert-listed").files
    assert len({file.stamp for file in before}) == 20
    store.put("07.jsonl", b'{"k": 2}')
    after = find_files("memory://convert-listed").files
    assert [one.name for one, two in zip(before, after, strict=True) if one != two] == ["07.jsonl"]


def test_a_whole_file_of_a_store_is_read_in_few_requests() -> None:
    store = open_store("memory://convert-whole")
    text = "a line of text\n" * 100_000
    store.put("one.txt", text.encode())
    (file,) = find_files("memory://convert-whole").files
    assert isinstance(store, RetryingStore)
    requests = store.counters.values[NAMES.index("requests") :]
    before = requests[0]
    with replace(file, store=store).unpacked() as plain:
        assert plain.read().decode() == text
    assert requests[0] - before <= 2


def test_a_file_url_means_the_same_folder_to_convert_and_to_readers(rows_file: Path, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    source = rows_file.rename(tmp_path / "a b" / rows_file.name)
    url = f"file://{tmp_path}/a%20b"
    assert convert(f"{url}/{source.name}", f"{url}/out", num_workers=1).total == 3000
    assert open_store(f"{url}/out").exists("index.json")
    with pytest.raises(ValueError, match="file:///FOLDER"):
        convert(source, "file://host/out", num_workers=1)
    with pytest.raises(ValueError, match="out must name a folder or a URL; got None"):
        convert(source, None, num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=r"must be a folder.*Use another folder"):
        convert(source, source, num_workers=1, overwrite=True)


def test_a_shuffle_into_a_store_leaves_nothing_on_this_machine(
    rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    done = convert(rows_file, "memory://convert-shuffled", num_workers=1, shuffle=True)
    assert done.total == 3000
    assert not list((tmp_path / "scratch").glob("*"))
    assert json.loads(open_store("memory://convert-shuffled").read("manifest.json"))["num_samples"] == 3000


def test_a_pair_keeps_local_copies_only_if_asked(rows_file: Path, tmp_path: Path, files_of: Any) -> None:
    pair = (tmp_path / "local", tmp_path / "remote")
    convert(rows_file, pair, num_workers=1)
    assert not (tmp_path / "local").exists()
    convert(rows_file, (tmp_path / "local", tmp_path / "both"), num_workers=1, keep_local=True)
    assert files_of(tmp_path / "local") == files_of(tmp_path / "both") == files_of(tmp_path / "remote")


@pytest.mark.nightly
def test_several_processes_read_from_and_write_to_s3(
    rows_file: Path, tmp_path: Path, files_of: Any, moto_endpoint: str
) -> None:
    client, options = bucket_at(moto_endpoint, "convert"), options_of(moto_endpoint)
    client.put_object(Bucket="convert", Key="in/rows.jsonl", Body=rows_file.read_bytes())
    given: dict[str, Any] = {"partition_bytes": "40kb", "source_store_options": options, "store_options": options}
    assert convert("s3://convert/in", "s3://convert/out", num_workers=2, **given).total == 3000
    assert not convert("s3://convert/in", "s3://convert/out", **given).is_new
    client.put_object(Bucket="convert", Key="in/rows.jsonl", Body=rows_file.read_bytes().replace(b"rt 0", b"rt 1"))
    with pytest.raises(FileExistsError, match=r"Changed files: rows\.jsonl"):
        convert("s3://convert/in", "s3://convert/out", **given)
    store = open_store("s3://convert/out", options)
    stored = {entry.name: store.read(entry.name) for entry in store.list("") if entry.name != "manifest.json"}
    convert(rows_file, tmp_path / "local", num_workers=1, partition_bytes="40kb")
    local = files_of(tmp_path / "local")
    assert stored == {name: data for name, data in local.items() if name != "manifest.json"}
