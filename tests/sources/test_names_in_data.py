"""No name that is found in data leaves the dataset: neither in an index, a table, nor a log."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
import pyarrow.parquet as pq  # noqa: E402

from lightning_stream import Stream, StreamingDataset  # noqa: E402
from lightning_stream.convert import convert  # noqa: E402
from lightning_stream.errors import FormatError, LightningStreamError  # noqa: E402
from lightning_stream.sources.files import SourceFile  # noqa: E402
from lightning_stream.stores import open_store  # noqa: E402

SECRET = b"\xff\xd8\xffSECRET\xff\xd9"
FEATURES = {b"huggingface": json.dumps({"info": {"features": {"image": {"_type": "Image"}}}}).encode()}
OUTSIDE = ["../secret.jpg", "a/../../secret.jpg", "/etc/hostname", "file:///etc/hostname", "s3://bucket/key", "..",
           "C:\\secret.jpg", "..\\secret.jpg", "a//b.jpg", "a\0.jpg", "https://host/x.jpg"]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "secret.jpg").write_bytes(SECRET)
    return tmp_path / "cache"


def read(uri: Path, **options: Any) -> list[dict[str, Any]]:
    given = {"columns": {"image": "bytes", "name": "str"}} if "photos" in uri.parts or "again" in uri.parts else {}
    dataset = StreamingDataset(streams=[Stream(remote=str(uri), **{**given, **options})])
    return [dataset[k] for k in range(dataset.size)]


def photos(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\xff\xd8\xff" + name.encode() + b"\xff\xd9")
    return folder


def with_index(folder: Path, cache: Path, change: Any) -> Path:
    """Put the index that a folder gets into the folder itself, changed."""
    dataset = StreamingDataset(remote=str(folder), columns={"image": "bytes", "name": "str"})
    assert dataset.size
    index = json.loads(next(cache.rglob("index.json")).read_text())
    shutil.rmtree(cache)
    for shard in index["shards"]:
        change(shard["raw_data"]["origin"])
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def settings(**values: Any) -> Any:
    def change(origin: dict[str, Any]) -> None:
        origin["settings"] = json.dumps({**json.loads(origin["settings"] or "{}"), **values})

    return change


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_names_no_file_outside_its_folder(name: str, tmp_path: Path, cache: Path) -> None:
    listed = settings(listed=[[name, len(SECRET), "", 0]])
    folder = with_index(photos(tmp_path / "photos", "a/x.jpg"), cache, listed)
    with pytest.raises(FormatError, match="stay below"):
        read(folder)
    folder = with_index(photos(tmp_path / "again", "a/x.jpg"), cache, lambda origin: origin.update(name=name))
    with pytest.raises(FormatError, match="stay below"):
        read(folder)


def test_an_index_with_legal_names_is_read_as_before(tmp_path: Path, cache: Path) -> None:
    folder = with_index(photos(tmp_path / "photos", "a/x.jpg", "b/y.jpg"), cache, lambda origin: None)
    assert [sample["name"] for sample in read(folder)] == ["a/x.jpg", "b/y.jpg"]


@pytest.mark.parametrize(
    "values", [{"media_root": "/"}, {"unknown": 1}, {"listed": 3}, {"listed": [[None, 1, "", 0]]}, {"listed": [[1]]}]
)
def test_wrong_settings_in_an_index_are_errors_of_the_index(values: Any, tmp_path: Path, cache: Path) -> None:
    folder = with_index(photos(tmp_path / "photos", "a/x.jpg"), cache, settings(**values))
    with pytest.raises(LightningStreamError):
        read(folder)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_file_has_no_name_that_leaves_its_folder(name: str) -> None:
    if "\\" not in name:  # a plain character of a listed name
        with pytest.raises(FormatError, match="stay below"):
            SourceFile("folder", name, 1, "")


def table(folder: Path, *rows: Any) -> Path:
    folder.mkdir(exist_ok=True)
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": row if isinstance(row, bytes) else None, "path": row if isinstance(row, str) else None}
                       for row in rows], struct)  # fmt: skip
    rows_of = pa.table({"image": images, "id": range(len(rows))}).replace_schema_metadata(FEATURES)
    pq.write_table(rows_of, folder / "a.parquet")
    return folder


def test_a_row_with_a_path_alone_is_an_error_that_names_media_root(tmp_path: Path) -> None:
    folder = table(tmp_path / "rows", SECRET, str(tmp_path / "secret.jpg"))
    with pytest.raises(FormatError, match="media_root"):
        read(folder)
    with pytest.raises(FormatError, match="media_root"):
        convert(folder, tmp_path / "out", num_workers=1)
    assert not any(SECRET in path.read_bytes() for path in (tmp_path / "out").rglob("*.mds*"))


@pytest.mark.parametrize("path", [*OUTSIDE, "link.jpg", "folder/secret.jpg"])
def test_a_path_of_a_row_does_not_leave_media_root(path: str, tmp_path: Path) -> None:
    folder, media = table(tmp_path / "rows", path), photos(tmp_path / "media", "a/b.jpg")
    (media / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (media / "folder").symlink_to(tmp_path)
    with pytest.raises(FormatError, match="stay below"):
        read(folder, media_root=media)
    with pytest.raises(FormatError, match="stay below"):
        convert(folder, tmp_path / "out", num_workers=1, source_options={"media_root": media})


def test_paths_of_rows_are_read_below_media_root(tmp_path: Path) -> None:
    media = photos(tmp_path / "media", "a/b.jpg", "c.jpg", "d.jpg")
    folder = table(tmp_path / "rows", SECRET, "a/b.jpg", "./c.jpg", str(media / "d.jpg"))
    expected = [SECRET, *((media / name).read_bytes() for name in ("a/b.jpg", "c.jpg", "d.jpg"))]
    for options in ({"media_root": media}, {"media_root": f"file://{media}"}):
        assert [bytes(one["image"]) for one in read(folder, **options, columns={"image": "bytes"})] == expected
    dataset = StreamingDataset(remote=str(folder), media_root=media, columns={"image": "bytes"})
    assert [bytes(dataset[k]["image"]) for k in range(4)] == expected
    done = convert(
        folder, tmp_path / "out", columns={"image": "bytes"}, num_workers=1, source_options={"media_root": media}
    )
    assert [bytes(sample["image"]) for sample in read(Path(done.uri))] == expected


def test_one_cache_folder_for_other_media_reads_as_those_are(tmp_path: Path) -> None:
    folder = table(tmp_path / "rows", "a.jpg")
    for number in range(2):
        media = tmp_path / str(number)
        media.mkdir()
        (media / "a.jpg").write_bytes(bytes([number]))
        stream = Stream(remote=str(folder), local=str(tmp_path / "local"), media_root=media, columns={"image": "bytes"})
        assert bytes(StreamingDataset(streams=[stream])[0]["image"]) == bytes([number])


def test_an_absent_file_below_media_root_is_named(tmp_path: Path) -> None:
    folder = table(tmp_path / "rows", "gone.jpg")
    with pytest.raises(LightningStreamError, match=r"gone\.jpg"):
        read(folder, media_root=photos(tmp_path / "media", "a.jpg"))


def test_rows_with_neither_bytes_nor_path_stay_nulls(tmp_path: Path) -> None:
    folder = table(tmp_path / "rows", SECRET, None)
    done = convert(folder, tmp_path / "out", num_workers=1, drop_nulls=True, columns={"image": "bytes"})
    assert done.total == 1


def test_files_whose_names_are_hidden_are_counted_and_can_be_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["cats/_DSC0001.jpg", "cats/a.jpg", "_background_noise_/x.jpg", "cats/.b.jpg"]
    folder = photos(tmp_path / "photos", *names)
    (folder / "_SUCCESS").touch()
    (folder / "cats" / ".a.jpg.crc").touch()
    with caplog.at_level(logging.WARNING):
        assert [sample["name"] for sample in read(folder)] == ["cats/a.jpg"]
    assert "3 files are left out" in caplog.text
    assert "_background_noise_/x.jpg" in caplog.text
    done = convert(folder, tmp_path / "out", num_workers=1)
    assert done.num_left_out == 3
    assert "3 files whose names" in str(done)
    assert sorted(sample["name"] for sample in read(folder, hidden=True)) == sorted(names)
    done = convert(folder, tmp_path / "all", num_workers=1, source_options={"hidden": True})
    assert (done.total, done.num_left_out) == (4, 0)
    assert convert(f"{folder}/**/_*.jpg", tmp_path / "some", num_workers=1).total == 1
    assert [sample["name"] for sample in read(Path(f"{folder}/**/_DSC*.jpg"))] == ["cats/_DSC0001.jpg"]


def test_markers_of_writers_are_left_out_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = photos(tmp_path / "photos", "a/x.jpg", "a/._x.jpg")
    for name in ("_SUCCESS", ".DS_Store", "a/.x.jpg.crc", "_committed_17"):
        (folder / name).write_bytes(b"1")
    with caplog.at_level(logging.WARNING):
        assert len(read(folder)) == convert(folder, tmp_path / "out", num_workers=1).total == 1
        assert len(read(folder, hidden=True)) == 1
    assert "left out" not in caplog.text


def test_a_table_in_a_store_reads_no_file_of_this_machine(tmp_path: Path) -> None:
    folder, bucket = table(tmp_path / "rows", str(tmp_path / "secret.jpg"), "a.jpg"), "memory://names-in-data"
    open_store(f"{bucket}/rows").put("a.parquet", folder / "a.parquet")
    open_store(f"{bucket}/media").put("a.jpg", SECRET)
    for media in (None, f"{bucket}/media"):
        with pytest.raises(FormatError, match="media_root" if media is None else "stay below"):
            StreamingDataset(remote=f"{bucket}/rows", media_root=media, columns={"image": "bytes"})[0]
    open_store(f"{bucket}/good").put("a.parquet", table(tmp_path / "good", "a.jpg") / "a.parquet")
    dataset = StreamingDataset(remote=f"{bucket}/good", media_root=f"{bucket}/media", columns={"image": "bytes"})
    assert bytes(dataset[0]["image"]) == SECRET
