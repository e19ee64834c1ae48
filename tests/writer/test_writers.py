"""What writers promise: the index last, nothing after a failure, shards within their limits, in every format."""

from __future__ import annotations

import logging
import re
import threading
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream.formats.index import Index, version_name
from lightning_stream.formats.shard import open_shard
from lightning_stream.stores import local
from lightning_stream.stores.local import publish_new
from lightning_stream.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter, base, local_file
from lightning_stream.writer.base import ShardWriter

ROWS = [{"id": i, "name": f"row-{i:04d}", "x": i * 0.5} for i in range(64)]
ROW_COLUMNS = {"id": "int", "name": "str", "x": "float"}
WRITERS: dict[str, type[ShardWriter]] = {"json": JSONWriter, "csv": CSVWriter, "tsv": TSVWriter, "xsv": XSVWriter}


def read_all(folder: Path) -> list[dict[str, Any]]:
    index = Index.from_file(folder / "index.json")
    shards = [open_shard(index.entry(k), folder) for k in range(len(index))]
    return [shard.sample(i) for shard in shards for i in range(shard.num_samples)]


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_row_formats_are_written_as_mosaicml_streaming_writes_them(
    shared_golden: Path, tmp_path: Path, form: str
) -> None:
    for path in sorted(shared_golden.glob(f"{form}/*/index.json")):
        want = Index.from_file(path)
        schema, out = want.schemas[0], tmp_path / path.parent.name
        options: dict[str, Any] = {"separator": schema.separator} if form == "xsv" else {}
        with WRITERS[form](
            out=out, columns=schema.columns, newline=schema.newline, compression=schema.compression,
            hashes=schema.hashes, size_limit=schema.size_limit, **options,
        ) as writer:  # fmt: skip
            for row in ROWS:
                writer.write(row)
        got = Index.from_file(out / "index.json")
        assert [got.entry(k).raw for k in range(len(got))] == [want.entry(k).raw for k in range(len(want))]
        assert [got.entry(k).raw_meta for k in range(len(got))] == [want.entry(k).raw_meta for k in range(len(want))]
        if schema.compression is None:
            assert all((out / name).read_bytes() == (path.parent / name).read_bytes() for name in names(out))


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_row_formats_take_batches_and_infer_columns(tmp_path: Path, form: str) -> None:
    options: dict[str, Any] = {"separator": "|"} if form == "xsv" else {}
    batch = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    with WRITERS[form](out=tmp_path / "a", **options) as writer:
        writer.write_batch({**batch, "id": np.arange(64)})
    with WRITERS[form](out=tmp_path / "b", **options) as writer:
        for row in ROWS:
            writer.write(row)
    assert read_all(tmp_path / "a") == read_all(tmp_path / "b") == ROWS
    assert (tmp_path / "a" / "index.json").read_bytes() == (tmp_path / "b" / "index.json").read_bytes()


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_row_formats_take_tables_of_arrow(tmp_path: Path, form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    options: dict[str, Any] = {"separator": "|"} if form == "xsv" else {}
    with WRITERS[form](out=tmp_path, **options) as writer:
        writer.write_batch(pa.Table.from_pylist(ROWS))
    assert read_all(tmp_path) == ROWS


@pytest.mark.parametrize("form", ["csv", "tsv", "xsv"])
@pytest.mark.parametrize("inside", ["newline", "separator"])
def test_a_value_that_would_break_its_row_is_refused(tmp_path: Path, form: str, inside: str) -> None:
    separator = {"csv": ",", "tsv": "\t", "xsv": " :: "}[form]
    options: dict[str, Any] = {"separator": separator} if form == "xsv" else {}
    writer = WRITERS[form](out=tmp_path / "out", columns={"a": "str", "b": "str"}, **options)
    text = {"newline": "x\ny", "separator": f"x{separator}y"}[inside]
    with pytest.raises(ValueError, match=f"column 'b'.*{inside}"):
        writer.write({"a": "fine", "b": text})
    with pytest.raises(ValueError, match="not quoted"):
        WRITERS[form](out=tmp_path / "out", columns={f"a{separator}": "str"}, **options)


@pytest.mark.parametrize("texts", [("x|", "y"), ("x", "|", "y"), ("x|", "|y", "")])
def test_a_value_that_ends_or_begins_as_the_separator_is_refused_where_it_would_be_cut(
    tmp_path: Path, texts: tuple[str, ...]
) -> None:
    row = dict(zip("abc", texts, strict=False))
    writer = XSVWriter(out=tmp_path, columns=dict.fromkeys(row, "str"), separator="||")
    with pytest.raises(ValueError, match="separator only between its values"):
        writer.write(row)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("3", "int"),
        (1.5, "int"),
        (1 << 63, "int"),
        (-(10**30), "int"),
        (3, "str"),
        ("x", "float"),
        (None, "float"),
        (np.complex64(1 + 2j), "float"),
        (memoryview(b"1"), "float"),
    ],
)
def test_row_values_of_a_wrong_type_are_refused_by_name(tmp_path: Path, value: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"column 'c': {kind} takes {kind}; got"):
        JSONWriter(out=tmp_path / "out", columns={"c": kind}).write({"c": value})


def test_row_columns_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="have columns of str, int, float"):
        CSVWriter(out=tmp_path / "out", columns={"c": "jpeg"})


@pytest.mark.parametrize("form", ["mds", *WRITERS])
def test_a_column_whose_name_no_index_can_hold_is_refused_before_anything_is_written(tmp_path: Path, form: str) -> None:
    options: dict[str, Any] = {"separator": "|"} if form == "xsv" else {}
    kind = WRITERS.get(form, MDSWriter)
    refused = pytest.raises(ValueError, match=r"valid Unicode; found '\\ud800a'\. Rename that column")
    with refused:
        kind(out=tmp_path / "out", columns={"\ud800a": "int"}, **options)
    with refused, kind(out=tmp_path / "out", **options) as writer:
        writer.write({"\ud800a": 1})
    assert not any(tmp_path.rglob("*.*"))


def test_no_dataset_is_written_with_a_length_that_its_index_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="valid Unicode"):
        MDSWriter(out=tmp_path / "out", columns={"a": "int"}, lengths={"\ud800": lambda sample: 1})


@pytest.mark.parametrize("workers", [0, 3])
def test_the_index_is_put_last_and_shards_are_in_order(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def spied(put: Any) -> Any:
        def spy(draft: Path, final: Path) -> None:
            put(draft, final)
            order.append(final.name)

        return spy

    for module in (local, local_file):
        monkeypatch.setattr(module, "publish_new", spied(publish_new))
    with MDSWriter(
        out=tmp_path / "out", columns={"x": "int"}, size_limit=300, compression="zstd", max_workers=workers
    ) as writer:
        for k in range(200):
            writer.write({"x": k})
    assert order[-1] == "index.json"
    assert len(order) > 3
    index = Index.from_file(tmp_path / "out" / "index.json")
    assert [index.entry(k).raw.basename for k in range(len(index))] == [f"shard.{k:05}.mds" for k in range(len(index))]


def test_an_error_names_a_place_that_cannot_be_opened(caplog: pytest.LogCaptureFixture) -> None:
    with (
        pytest.raises(ValueError, match="reties"),
        MDSWriter(out="s3://bucket/bad", columns={"x": "int"}, store_options={"reties": 1}) as writer,
    ):
        writer.write({"x": 1})
    assert "writing to s3://bucket/bad ended with ValueError" in caplog.text


def test_a_context_that_raises_leaves_no_index_and_says_what_it_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write() -> None:
        with MDSWriter(out=tmp_path / "out", columns={"x": "int"}, size_limit=300) as writer:
            for k in range(200):
                writer.write({"x": k if k < 150 else "no number"})

    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(TypeError, match="column 'x': int takes a whole number; got str"),
    ):
        write()
    assert not (tmp_path / "out" / "index.json").exists()
    assert "before the index was put, so no dataset was written" in caplog.text
    assert "shard.00000.mds" in caplog.text


def test_a_shard_that_cannot_be_put_fails_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(base, "finalize_shard", broken)
    writer = MDSWriter(out=tmp_path / "out", columns={"x": "int"}, size_limit=200)

    def write() -> None:
        for k in range(10_000):
            writer.write({"x": k})

    with pytest.raises(OSError, match="disk full"):
        write()
    with pytest.raises(OSError, match="disk full"):
        writer.finish()
    assert not (tmp_path / "out" / "index.json").exists()


def test_memory_is_bounded_by_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    landing = threading.Semaphore(0)
    waiting = []
    land = base.finalize_shard

    def slow(*args: Any) -> Any:
        waiting.append(1)
        assert landing.acquire(timeout=60)
        return land(*args)

    monkeypatch.setattr(base, "finalize_shard", slow)
    writer = MDSWriter(out=tmp_path / "out", columns={"x": "int"}, size_limit=200, max_workers=2)
    sent: list[int] = []

    def write() -> None:
        for k in range(100):
            writer.write({"x": k})
            sent.append(k)
        writer.finish()

    thread = threading.Thread(target=write)
    thread.start()
    while len(waiting) < 2:
        thread.join(timeout=0.01)
    thread.join(timeout=0.3)  # it would send more, if it could
    assert thread.is_alive()
    assert len(waiting) == 2
    assert len(sent) < 20
    for _ in range(100):
        landing.release()
    thread.join(timeout=60)
    assert [row["x"] for row in read_all(tmp_path / "out")] == list(range(100))


def test_a_first_sample_beyond_the_limit_gets_a_shard_of_its_own_and_no_empty_one(tmp_path: Path) -> None:
    for batch in (False, True):
        out = tmp_path / str(batch)
        with MDSWriter(out=out, columns={"b": "bytes"}, size_limit=400) as writer:
            values = [b"x" * 1000, b"y", b"z" * 1000, b"w" * 1000, b"v"]
            if batch:
                writer.write_batch({"b": values})
            else:
                for value in values:
                    writer.write({"b": value})
        assert Index.from_file(out / "index.json").shard_sizes.tolist() == [1, 1, 1, 1, 1]


def test_a_shard_may_equal_its_limit(tmp_path: Path) -> None:
    sizes = []
    for limit in range(238, 250):
        out = tmp_path / str(limit)
        with MDSWriter(out=out, columns={"x": "int"}, size_limit=limit) as writer:
            for k in range(20):
                writer.write({"x": k})
        index = Index.from_file(out / "index.json")
        sizes += [index.entry(k).raw.num_bytes - limit for k in range(len(index))]
    assert max(sizes) == 0


def test_a_shard_over_4_gib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="size_limit must stay under 4 GiB"):
        MDSWriter(out=tmp_path / "out", columns={"x": "int"}, size_limit="4gb")
    monkeypatch.setattr("lightning_stream.writer.base.MAX_FILE_BYTES", 1000)
    writer = MDSWriter(out=tmp_path / "out", columns={"b": "bytes"}, size_limit=None)
    writer.write({"b": b"x" * 500})
    with pytest.raises(ValueError, match="without size_limit all samples go to one shard"):
        writer.write({"b": b"x" * 500})
    with pytest.raises(ValueError, match="one sample has 1,004 bytes"):
        writer.write({"b": b"x" * 1000})
    with pytest.raises(ValueError, match="one sample has 1,004 bytes"):
        MDSWriter(out=tmp_path / "two", columns={"b": "bytes"}, size_limit=500).write_batch({"b": [b"x" * 1000]})


def test_a_place_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        MDSWriter(out=tmp_path / "out", columns={"x": "int"}).write({"x": 1})
    with MDSWriter(out=tmp_path / "out", columns={"x": "int"}, exist_ok=True) as writer:
        writer.write({"x": 1})
    index = Index.from_file(tmp_path / "out" / "index.json")
    assert names(tmp_path / "out") == ["index.json", "notes.txt", index.entry(0).raw.basename]


def test_a_pair_of_places(tmp_path: Path) -> None:
    for keep in (False, True):
        local, remote = tmp_path / f"local{keep}", tmp_path / f"remote{keep}"
        with MDSWriter(out=(local, f"file://{remote}"), columns={"x": "int"}, keep_local=keep) as writer:
            writer.write({"x": 1})
        assert names(remote) == ["index.json", "shard.00000.mds"]
        assert names(local) == (names(remote) if keep else [])


def test_an_empty_dataset_is_written_and_read(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "out", columns={"x": "int"}):
        pass
    assert read_all(tmp_path / "out") == []
    with pytest.raises(ValueError, match="no columns were given"):
        MDSWriter(out=tmp_path / "two").finish()


def test_a_finished_writer_takes_no_more(tmp_path: Path) -> None:
    writer = MDSWriter(out=tmp_path / "out", columns={"x": "int"})
    writer.write({"x": 1})
    writer.finish()
    writer.finish()
    with pytest.raises(ValueError, match="the writer is finished"):
        writer.write({"x": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"x": "ints"}}, "no encoding 'ints'; use register_encoding.* one of audio, bytes, float16"),
        ({"columns": {}}, "at least one column"),
        ({"compression": "zip"}, "compression must be one of"),
        ({"compression": "zstd:99"}, "compression level out of range"),
        ({"hashes": ["crc"]}, "hashes must be among"),
        ({"size_limit": "big"}, "size_limit must be a whole number or a text"),
        ({"max_workers": -1}, "max_workers must be 0 or more"),
        ({"out": 5}, "out must be a path"),
    ],
)
def test_a_wrong_setting_says_what_there_is(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MDSWriter(**{"out": tmp_path / "out", "columns": {"x": "int"}, **options}).write({"x": 1})


def test_appending_keeps_the_index_that_runs_began_with(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with MDSWriter(out=out, columns={"x": "int", "t": "str"}, size_limit=300) as writer:
        for k in range(40):
            writer.write({"x": k, "t": "a"})
    first = (out / "index.json").read_bytes()
    old = Index.from_bytes(first, "old")
    shards = {name: (out / name).read_bytes() for name in names(out) if name.endswith(".mds")}
    with MDSWriter(out=out, append=True, hashes=["xxh64"], compression="zstd") as writer:
        writer.write({"x": 40, "t": "b"})
    index = Index.from_file(out / "index.json")
    assert index.num_samples == 41
    assert re.fullmatch(rf"shard\.{len(old):05}\.[0-9a-f]{{16}}\.mds", index.entry(len(index) - 1).raw.basename)
    assert [index.text(k) for k in range(len(old))] == [old.text(k) for k in range(len(old))]
    assert (out / version_name(old.digest)).read_bytes() == first
    assert all((out / name).read_bytes() == data for name, data in shards.items())


def test_appending_other_columns_or_to_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="append=True needs a dataset"):
        MDSWriter(out=tmp_path / "out", columns={"x": "int"}, append=True).write({"x": 1})
    with MDSWriter(out=tmp_path / "out", columns={"x": "int"}) as writer:
        writer.write({"x": 1})
    with pytest.raises(ValueError, match="must have the dataset's format and columns"):
        MDSWriter(out=tmp_path / "out", columns={"x": "str"}, append=True).write({"x": "1"})


def test_of_two_writers_that_append_at_once_both_win(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with MDSWriter(out=out, columns={"x": "int"}) as writer:
        writer.write({"x": 0})
    first = (out / "index.json").read_bytes()
    one, two = MDSWriter(out=out, append=True, max_workers=0), MDSWriter(out=out, append=True, max_workers=0)
    one.write({"x": 1})
    two.write({"x": 2})
    one.finish()
    two.finish()
    assert [row["x"] for row in read_all(out)] == [0, 1, 2]
    kept = version_name(Index.from_bytes(first, "").digest)
    index = Index.from_file(out / "index.json")
    log = [f"versions/{kept[6:22]}/{number:08}.json" for number in (1, 2)]
    assert names(out) == sorted(["index.json", kept, *log, *(index.entry(k).raw.basename for k in range(3))])


def test_columns_are_inferred_from_the_first_sample(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    sample = {
        "i": 3, "f": 0.5, "b": True, "t": "x", "raw": b"x", "j": {"a": [1]}, "n": None,
        "np": np.float32(2), "arr": np.zeros((2, 2), np.int16), "img": image.new("RGB", (2, 2)),
    }  # fmt: skip
    with MDSWriter(out=tmp_path / "out") as writer:
        writer.write(sample)
        writer.write({**sample, "arr": np.zeros(7, np.int16)})
    index = Index.from_file(tmp_path / "out" / "index.json")
    assert index.columns == {
        "arr": "ndarray:int16", "b": "uint8", "f": "float64", "i": "int", "img": "pil", "j": "json", "n": "json",
        "np": "float32", "raw": "bytes", "t": "str",
    }  # fmt: skip
    with pytest.raises(TypeError, match="column 'o': no encoding can be inferred for object"):
        MDSWriter(out=tmp_path / "two").write({"o": object()})


@pytest.mark.parametrize("form", [MDSWriter, JSONWriter])
def test_values_beyond_the_columns_are_reported_once_or_refused_and_never_dropped_silently(
    tmp_path: Path, form: type[MDSWriter]
) -> None:
    row, more = {"a": 1, "b": "x"}, {"a": 1, "b": "x", "label": 7, "id": 8}
    with form(out=tmp_path / "chosen", columns={"a": "int", "b": "str"}) as writer:
        writer.write(row)
        with pytest.warns(UserWarning, match="not written: 'id', 'label'; the columns are a, b") as caught:
            writer.write(more)
        assert (len(caught), caught[0].filename) == (1, __file__)
        writer.write_batch({name: [value] for name, value in more.items()})
    assert read_all(tmp_path / "chosen") == [row] * 3
    with form(out=tmp_path / "inferred") as writer:
        writer.write(row)
        for action in (
            lambda: writer.write(more),
            lambda: writer.write_batch({name: [value] for name, value in more.items()}),
        ):
            with pytest.raises(ValueError, match="'id', 'label'; the columns are a, b, as inferred from the first sa"):
                action()
    assert read_all(tmp_path / "inferred") == [row]
    with form(out=tmp_path / "inferred", append=True) as writer:
        with pytest.raises(ValueError, match="as the dataset appended to has them"):
            writer.write(more)
        writer.write(row)
    assert read_all(tmp_path / "inferred") == [row] * 2


@pytest.mark.parametrize("form", [MDSWriter, JSONWriter])
def test_settings_as_mosaicml_streaming_takes_them(tmp_path: Path, form: type[MDSWriter]) -> None:
    options: dict[str, Any] = {"compression": "", "hashes": [], "retry": 3, "size_limit": 0}
    with form(out=tmp_path / "out", columns={"a": "int"}, **options) as writer:
        writer.write({"a": 1})
        writer.write({"a": -(1 << 63)})
    assert read_all(tmp_path / "out") == [{"a": 1}, {"a": -(1 << 63)}]
    assert len(writer.shards) == 1  # a limit of 0 means no limit
    with pytest.raises(TypeError, match=r"columns must be encodings by name, .* got dict {3: .str.}"):
        form(out=tmp_path / "two", columns={3: "str"}).write({3: "x"})  # type: ignore[dict-item]


def test_a_photo_column_takes_no_other_bytes(tmp_path: Path) -> None:
    image, jpeg = pytest.importorskip("PIL.Image").new("RGB", (4, 3)), BytesIO()
    image.save(jpeg, "jpeg")
    with MDSWriter(out=tmp_path / "out", columns={"image": "jpeg"}) as writer:
        for wrong in ([b"GIF89a"], [jpeg.getvalue(), b""]):
            with pytest.raises(ValueError, match="column 'image': jpeg takes the bytes of a JPEG or PNG file"):
                writer.write_batch({"image": wrong})
        with pytest.raises(ValueError, match="column 'image': jpeg takes the bytes of a JPEG or PNG file"):
            writer.write({"image": b"GIF89a"})
        writer.write({"image": jpeg.getvalue()})
        writer.write_batch({"image": [image, jpeg.getvalue()]})
    assert [one["image"].size for one in read_all(tmp_path / "out")] == [(4, 3)] * 3


def test_a_writer_has_the_attributes_that_mds_users_read(tmp_path: Path) -> None:
    out = (str(tmp_path / "local"), str(tmp_path / "remote"))
    with MDSWriter(out=out, columns={"b": "str", "a": "int"}, size_limit=1e6, hashes=["sha1"]) as writer:
        assert (writer.columns, writer.column_names) == ({"b": "str", "a": "int"}, ["a", "b"])
        assert (writer.column_encodings, writer.size_limit, writer.hashes) == (["int", "str"], 1_000_000, ["sha1"])
        assert (writer.compression, writer.local, writer.remote) == (None, *out)
        config = writer.get_config()
        writer.write({"a": 1, "b": "x"})
        writer.flush_shard()
        writer.write({"a": 2, "b": "y"})
    assert config.items() <= writer.shards[0].items()
    assert [shard["samples"] for shard in writer.shards] == [1, 1]


@pytest.mark.parametrize("calls_super", [True, False])
def test_a_subclass_ends_every_shard_by_its_own_method(tmp_path: Path, calls_super: bool) -> None:
    class Counting(MDSWriter):
        num_ended = 0

        def flush_shard(self) -> None:
            self.num_ended += 1
            if calls_super:
                super().flush_shard()

    with Counting(out=str(tmp_path / "out"), columns={"a": "int"}, size_limit=300) as writer:
        for i in range(30):
            writer.write({"a": i})
        writer.write_batch({"a": range(30, 60)})
    assert writer.num_ended == len(writer.shards) > 3
    assert [sample["a"] for sample in read_all(tmp_path / "out")] == list(range(60))


@pytest.mark.parametrize("name", ["encode_sample", "encode_joint_shard", "encode_split_shard", "get_config"])
def test_a_method_of_a_subclass_that_is_never_called_is_refused(tmp_path: Path, name: str) -> None:
    kind = type("Doubling", (MDSWriter,), {name: lambda self, *_: b""})
    with pytest.raises(TypeError, match=f"found Doubling.{name}, which would never be called"):
        kind(out=str(tmp_path / "out"), columns={"a": "int"})
    assert not (tmp_path / "out").exists()


def test_a_writer_knows_inferred_columns_after_its_first_sample(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "out")) as writer:
        assert (writer.columns, writer.local, writer.remote) == (None, str(tmp_path / "out"), None)
        with pytest.raises(ValueError, match="columns"):
            writer.get_config()
        writer.write({"a": 1})
        assert writer.columns == {"a": "int"}


@pytest.mark.parametrize("wrong", [1.5, float("inf"), float("nan"), True])
def test_a_size_that_is_no_whole_number_is_refused_by_its_name(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match="size_limit"):
        MDSWriter(out=str(tmp_path), columns={"a": "int"}, size_limit=wrong)


@pytest.mark.parametrize("kind", [MDSWriter, JSONWriter])
def test_a_mistyped_argument_of_a_writer_names_the_one_that_was_meant(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}.*'colums'. Did you mean 'columns'\?"):
        kind(out=str(tmp_path), colums={"a": "int"})
