"""What `spark.read.format("mds")` reads, in this process: types, columns, versions. No session is started."""

from __future__ import annotations

import io
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import CSVWriter, JSONWriter, MDSWriter, versions
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.formats.encodings import text

pytest.importorskip("pyspark", minversion="4.1", reason="needs pyspark 4.1: pip install 'pyspark>=4.1'")
pa = pytest.importorskip("pyarrow")

from pyspark.sql import datasource as api  # noqa: E402
from pyspark.sql.types import _parse_datatype_json_string  # noqa: E402

from lightning_stream.spark.datasource import MDSDataSource  # noqa: E402


def source_of(place: Path, **options: str) -> MDSDataSource:
    given = {name.replace("__", "."): value for name, value in options.items()}
    return MDSDataSource(options=api.CaseInsensitiveDict({"path": str(place), **given}))


def schema_of(source: MDSDataSource) -> Any:
    return _parse_datatype_json_string(source.schema().json())  # as Spark sends it back


def rows_of(source: MDSDataSource, schema: Any = None) -> list[dict[str, Any]]:
    reader = pickle.loads(pickle.dumps(source.reader(schema or schema_of(source))))
    spans = [pickle.loads(pickle.dumps(span)) for span in reader.partitions()]
    return [row for span in spans for batch in reader.read(span) for row in batch.to_pylist()]


def test_every_encoding_has_a_type(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    photo = image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    png = io.BytesIO()
    photo.save(png, "PNG")
    values: list[tuple[str, Any, str, Any]] = [
        ("int", -5, "bigint", -5), ("uint8", 255, "smallint", 255), ("uint16", 65535, "int", 65535),
        ("uint32", 2**32 - 1, "bigint", 2**32 - 1), ("uint64", 2**64 - 1, "decimal(20,0)", Decimal(2**64 - 1)),
        ("int8", -128, "tinyint", -128), ("int16", -3, "smallint", -3), ("int32", -3, "int", -3),
        ("int64", -3, "bigint", -3), ("float16", 1.5, "float", 1.5), ("float32", 1.5, "float", 1.5),
        ("float64", 0.1, "double", 0.1), ("str", "naïve", "string", "naïve"), ("bytes", b"\0\xff", "binary", b"\0\xff"),
        ("str_int", 10**30, "decimal(38,0)", Decimal(10**30)), ("str_float", 0.1, "double", 0.1),
        ("str_decimal", Decimal("12.50"), "string", "12.50"), ("json", {"a": [1]}, "string", '{"a": [1]}'),
        ("ndarray", np.ones((2, 0), np.int16), "array<array<smallint>>", [[], []]),
        ("ndarray:float16", np.array([1.5], np.float16), "array<float>", [1.5]),
        ("ndarray:uint8:2,1", np.full((2, 1), 255, np.uint8), "array<array<smallint>>", [[255], [255]]),
        ("ndarray:uint64:1", np.array([2**64 - 1], np.uint64), "array<decimal(20,0)>", [Decimal(2**64 - 1)]),
        ("png", png.getvalue(), "binary", png.getvalue()),
        ("list[png]", [png.getvalue()] * 2, "array<binary>", [png.getvalue()] * 2),
        ("jpeg_array", [png.getvalue()], "array<binary>", [png.getvalue()]),
        ("pkl", {1}, "binary", pickle.dumps({1}, protocol=4)), ("video", b"film", "binary", b"film"),
    ]  # fmt: skip
    columns = {f"c{k:02}": encoding for k, (encoding, *_) in enumerate(values)} | {"pil": "pil", "pils": "list[pil]"}
    sample = {f"c{k:02}": value for k, (_, value, *_) in enumerate(values)} | {"pil": photo, "pils": [photo, photo]}
    with MDSWriter(out=tmp_path, columns=columns, compression="zstd", size_limit=2000) as writer:
        for _ in range(3):
            writer.write(sample)
    schema = schema_of(source_of(tmp_path))
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    assert [kinds[f"c{k:02}"] for k in range(len(values))] == [kind for _, _, kind, _ in values]
    rows = rows_of(source_of(tmp_path))
    assert len(rows) == 3
    for row in rows:
        assert [row[f"c{k:02}"] for k in range(len(values))] == [expected for *_, expected in values]
        for data in (row["pil"], *row["pils"]):
            assert np.array_equal(np.asarray(image.open(io.BytesIO(data))), np.asarray(photo))


def test_columns_that_are_not_read_are_not_decoded(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path, columns={"id": "int64", "text": "bytes"}, compression=None) as writer:
        for number in range(10):
            writer.write({"id": number, "text": b"\xff not UTF-8"})
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace('["int64", "bytes"]', '["int64", "str"]'))
    assert [row["id"] for row in rows_of(source_of(tmp_path, columns="id"))] == list(range(10))
    from pyspark.sql.types import StructType

    chosen = rows_of(source_of(tmp_path), StructType().add("id", "string"))
    assert chosen == [{"id": str(number)} for number in range(10)]
    with pytest.raises(FormatError, match="column 'text'"):
        rows_of(source_of(tmp_path))


def test_a_query_reads_one_version_without_deleted_rows(tmp_path: Path) -> None:
    for begin in (0, 10):
        with MDSWriter(out=tmp_path, columns={"id": "int32"}, append=begin > 0, size_limit=60) as writer:
            for number in range(begin, begin + 10):
                writer.write({"id": number})
    versions.delete_rows(tmp_path, [0, 3, 19])
    reader = source_of(tmp_path).reader(schema_of(source_of(tmp_path)))
    spans = reader.partitions()
    versions.compact(tmp_path)
    kept = [n for n in range(20) if n not in (0, 3, 19)]
    assert [row["id"] for span in spans for batch in reader.read(span) for row in batch.to_pylist()] == kept
    assert [row["id"] for row in rows_of(source_of(tmp_path))] == kept
    assert [row["id"] for row in rows_of(source_of(tmp_path, version="0"))] == list(range(10))
    digest = versions.log(tmp_path)[1].digest
    small = source_of(tmp_path, version=digest[:12], partition_size="1")
    assert [row["id"] for row in rows_of(small)] == list(range(20))
    assert len(small.reader(schema_of(small)).partitions()) > 4
    with pytest.raises(NotFoundError, match="numbers 3 to 0"):
        source_of(tmp_path, version="9").schema()


def test_rows_of_text_are_read_and_of_their_columns_those_alone_that_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"word": "str", "count": "int", "share": "float"}
    decode, decoded = text.RowText.decode, []
    monkeypatch.setattr(
        text.RowText, "decode", staticmethod(lambda data: [decoded.append(bytes(data)), decode(data)][1])
    )
    for kind in (JSONWriter, CSVWriter):
        with kind(out=tmp_path / kind.__name__, columns=columns, compression="gz") as writer:  # type: ignore[operator]
            writer.write({"word": "one", "count": 1, "share": 0.5})
        assert rows_of(source_of(tmp_path / kind.__name__, columns="share,count")) == [{"share": 0.5, "count": 1}]
        assert decoded == []
        assert rows_of(source_of(tmp_path / kind.__name__)) == [{"word": "one", "count": 1, "share": 0.5}]
        assert decoded.pop() == b"one"


def test_shards_of_different_columns_have_nulls(tmp_path: Path) -> None:
    import json

    shards = []
    for name, columns in (("a", {"id": "int32"}), ("b", {"id": "int32", "text": "str"})):
        with MDSWriter(out=tmp_path / name, columns=columns) as writer:
            writer.write({"id": 1, "text": "x"} if name == "b" else {"id": 0})
        (entry,) = json.loads((tmp_path / name / "index.json").read_text())["shards"]
        entry["raw_data"]["basename"] = f"{name}/{entry['raw_data']['basename']}"
        shards.append(entry)
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    assert rows_of(source_of(tmp_path)) == [{"id": 0, "text": None}, {"id": 1, "text": "x"}]


@pytest.mark.parametrize("value", [np.zeros((1, 1), np.int32), np.zeros(1, np.float64)])
def test_arrays_without_one_type_are_refused(tmp_path: Path, value: Any) -> None:
    with MDSWriter(out=tmp_path, columns={"a": "ndarray"}) as writer:
        writer.write({"a": np.array([7], np.int32)})
        writer.write({"a": value + (0.5 if value.dtype == np.float64 else 0)})
    with pytest.raises(FormatError, match="column 'a', stored as 'ndarray', cannot be read as"):
        rows_of(source_of(tmp_path))


def test_wrong_options_are_named_and_known_ones_listed(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path, columns={"id": "int64"}) as writer:
        writer.write({"id": 1})
    schema = schema_of(source_of(tmp_path))
    known = "columns, compression, hashes, if_exists, key, lengths, message, retry, size_limit, and those of the store"
    with pytest.raises(ValueError, match=f"no option sizelimit for writing. Its options are {known}"):
        source_of(tmp_path, SizeLimit="1").writer(schema, overwrite=False)
    with pytest.raises(ValueError, match="no option if_exists, key for mode"):
        source_of(tmp_path, key="a", if_exists="error").writer(schema, overwrite=True)
    with pytest.raises(ValueError, match="no option key for writing a stream"):
        source_of(tmp_path, key="a").streamWriter(schema, overwrite=False)
    with pytest.raises(ValueError, match="Its options are columns, partition_size, retry, version, and"):
        source_of(tmp_path, versoin="1").schema()
    for options, message in (
        ({"columns": "id"}, "must be encodings by name as JSON"), ({"if_exists": "no"}, "one of append, error, ignore"),
        ({"compression": "zap"}, "zap"), ({"hashes": "md0"}, "md0"), ({"size_limit": "big"}, "big"),
        ({"lengths": "text"}, "text"), ({"retry": "often"}, "retry must be a whole number; found 'often'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            source_of(tmp_path, **options).writer(schema, overwrite=False)
    with pytest.raises(ValueError, match="columns must name columns of the dataset, which has id; found idd"):
        source_of(tmp_path, columns="idd").schema()
    with pytest.raises(ValueError, match="needs the folder or URL of one dataset"):
        MDSDataSource(options=api.CaseInsensitiveDict({})).schema()


def test_no_text_shows_credentials(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path, columns={"id": "int64"}) as writer:
        writer.write({"id": 1})
    secrets = {"store__aws_secret_access_key": "hush-1", "store__aws_access_key_id": "4711"}
    source, schema = source_of(tmp_path, **secrets), schema_of(source_of(tmp_path))
    assert source._store_options() == {"aws_secret_access_key": "hush-1", "aws_access_key_id": "4711"}
    reader, writer = source.reader(schema), source.writer(schema, overwrite=False)
    shown = [source, reader, writer, source._dataset()]
    shown.append(writer.write(iter(())))
    assert not any(secret in f"{each!r}{each!s}" for each in shown for secret in ("hush-1", "4711"))
    for wrong in ({"nonsense": "hush-1"}, {}):  # a local folder has no options of a store
        with pytest.raises(ValueError, match="option") as caught:
            source_of(tmp_path, **wrong, **secrets).schema()
        assert "hush" not in str(caught.value)


def test_an_older_pyspark_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import lightning_stream.spark as room
    from lightning_stream.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "pyspark.sql.datasource", None)
    monkeypatch.delitem(sys.modules, "lightning_stream.spark.datasource")
    monkeypatch.delitem(vars(room), "register", raising=False)
    with pytest.raises(MissingExtraError, match=r"pyspark 4.0 for batches.*pip install 'pyspark>=4.1'.*run on 3.5"):
        room.register  # noqa: B018


def test_columns_that_were_added_are_read(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"id": "int64"}, size_limit=400) as writer:
        for number in range(100):
            writer.write({"id": number})
    versions.add_column(tmp_path, "score", "float64", [number / 2 for number in range(100)])
    with MDSWriter(out=str(tmp_path), columns={"id": "int64", "score": "float64"}, append=True) as writer:
        writer.write({"id": 100, "score": 50.0})
    versions.delete_rows(tmp_path, [99])
    source = source_of(tmp_path, partition_size="1kb")
    every = [{"id": number, "score": number / 2} for number in range(101) if number != 99]
    assert rows_of(source) == every
    assert rows_of(source_of(tmp_path, columns="score")) == [{"score": row["score"]} for row in every]
    assert rows_of(source_of(tmp_path, version="0"))[-1] == {"id": 99}
