"""Every row of a DataFrame is in the dataset exactly once, as its type is documented."""

from __future__ import annotations

import datetime as dt
import importlib
import io
import json
import threading
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest

from lightning_stream import spark as room
from lightning_stream.errors import FormatError
from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import open_shard
from lightning_stream.spark import convert, partition
from lightning_stream.spark.convert import Conversion, ordered, plan_text, selected, small_batches, with_local_times
from lightning_stream.spark.partition import SparkJob

WHEN = dt.datetime(2024, 2, 29, 12, 30, 0, 250, tzinfo=dt.UTC)


def samples_of(place: Path) -> list[dict[str, Any]]:
    index = Index.from_bytes((place / "index.json").read_bytes(), str(place))
    found = []
    for number in range(len(index)):
        shard = open_shard(index.entry(number), place)
        found += [shard.sample(k) for k in range(shard.num_samples)]
    return found


def files_of(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def shards_of(place: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(place).items() if name != "manifest.json"}


def plain(out: Path, **others: Any) -> dict[str, Any]:
    return {"out": str(out), "compression": None, **others}


def test_every_type_comes_back_as_documented(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import types as t

    columns: list[tuple[str, Any, Any]] = [
        ("byte", t.ByteType(), -3),
        ("short", t.ShortType(), -300),
        ("integer", t.IntegerType(), -70_000),
        ("long", t.LongType(), -(2**40)),
        ("real", t.FloatType(), 1.5),
        ("double", t.DoubleType(), 0.1),
        ("flag", t.BooleanType(), True),
        ("price", t.DecimalType(10, 2), Decimal("12.50")),
        ("text", t.StringType(), "naïve"),
        ("blob", t.BinaryType(), bytearray(b"\0\xff")),
        ("day", t.DateType(), WHEN.date()),
        ("moment", t.TimestampType(), WHEN.replace(tzinfo=None)),
        ("wall", t.TimestampNTZType(), WHEN.replace(tzinfo=None)),
        ("span", t.DayTimeIntervalType(), dt.timedelta(seconds=90)),
        ("tokens", t.ArrayType(t.IntegerType()), [1, 2, 3]),
        ("marks", t.ArrayType(t.BooleanType()), [True, False]),
        ("grid", t.ArrayType(t.ArrayType(t.FloatType())), [[1.0, 2.0], [3.0, 4.0]]),
        ("words", t.ArrayType(t.StringType()), ["a", None]),
        ("nested", t.StructType([t.StructField("d", t.DateType()), t.StructField("p", t.DecimalType(3, 1))]), None),
        ("counts", t.MapType(t.StringType(), t.LongType()), {"a": 1}),
        ("vector", VectorUDT(), Vectors.sparse(3, {1: 5.0})),
    ]
    schema = t.StructType([t.StructField(name, kind) for name, kind, _ in columns])
    row = tuple((WHEN.date(), Decimal("1.5")) if name == "nested" else value for name, _, value in columns)
    dataframe = spark.createDataFrame([row] * 3, schema).coalesce(1)
    spark.conf.set("spark.sql.session.timeZone", "UTC")

    room.dataframe_to_mds(dataframe, mds_kwargs=plain(tmp_path / "out"))

    sample = samples_of(tmp_path / "out")[2]
    micros = int(WHEN.timestamp()) * 10**6 + WHEN.microsecond
    expected = {
        "byte": np.int8(-3), "short": np.int16(-300), "integer": np.int32(-70_000), "long": np.int64(-(2**40)),
        "real": np.float32(1.5), "double": np.float64(0.1), "flag": np.uint8(1), "price": Decimal("12.50"),
        "text": "naïve", "blob": b"\0\xff", "day": np.int32(WHEN.date().toordinal() - 719163),
        "wall": np.int64(micros), "span": np.int64(90 * 10**6), "words": ["a", None],
        "nested": {"d": "2024-02-29", "p": "1.5"}, "counts": {"a": 1},
    }  # fmt: skip
    for name, value in expected.items():
        assert sample[name] == value, name
        assert type(sample[name]) is type(value), name
    assert isinstance(sample["moment"], np.int64)
    for name, array in {
        "tokens": np.array([1, 2, 3], np.int32),
        "marks": np.array([1, 0], np.uint8),
        "grid": np.array([[1, 2], [3, 4]], np.float32),
        "vector": np.array([0.0, 5.0, 0.0]),
    }.items():
        np.testing.assert_array_equal(sample[name], array, strict=True)


def test_result_compression_and_manifest_are_what_users_of_the_call_know(spark: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kwargs = {"out": str(out), "hashes": ["xxh3_64"]}

    assert room.dataframe_to_mds(spark.range(100), mds_kwargs=kwargs) == (str(out), "")

    assert kwargs == {"out": str(out), "hashes": ["xxh3_64"]}
    index = Index.from_bytes((out / "index.json").read_bytes(), "")
    assert {index.entry(k).schema.compression for k in range(len(index))} == {"zstd"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["num_samples"] == 100
    assert manifest["columns"] == {"id": "int64"}
    assert all(name.startswith("part-") or name in ("index.json", "manifest.json") for name in files_of(out))


def test_a_relative_folder_is_the_drivers_although_executors_work_elsewhere(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_stream.spark import dataframe_to_mds

    monkeypatch.chdir(tmp_path)  # the executors' processes were started in another folder
    dataframe_to_mds(spark.range(5), mds_kwargs={"out": "here"})
    assert (tmp_path / "here" / "index.json").is_file()


def test_order_and_count_of_rows_are_the_dataframes(spark: Any, tmp_path: Path) -> None:
    dataframe = spark.range(0, 5000, 1, 5)
    room.dataframe_to_mds(dataframe, mds_kwargs=plain(tmp_path / "out", size_limit="4kb"))
    assert [sample["id"] for sample in samples_of(tmp_path / "out")] == list(range(5000))


def test_rows_can_be_sorted_or_mixed_the_same_way_each_time(spark: Any, tmp_path: Path) -> None:
    dataframe = spark.range(0, 400, 1, 3)
    room.dataframe_to_mds(dataframe.orderBy("id", ascending=False), mds_kwargs=plain(tmp_path / "a"), order_by="id")
    assert [sample["id"] for sample in samples_of(tmp_path / "a")] == list(range(400))
    for name, seed in (("b", 1), ("c", 1), ("d", 2)):
        room.dataframe_to_mds(dataframe, mds_kwargs=plain(tmp_path / name), shuffle_seed=seed)
    mixed = [sample["id"] for sample in samples_of(tmp_path / "b")]
    assert sorted(mixed) == list(range(400))
    assert mixed != list(range(400))
    assert shards_of(tmp_path / "b") == shards_of(tmp_path / "c") != shards_of(tmp_path / "d")


def test_columns_have_any_names(spark: Any, tmp_path: Path) -> None:
    names = ["a.b", "c`d", "id", "ID", "e f", "e, f"]
    frame = spark.createDataFrame([tuple(range(6))], [f"c{number}" for number in range(6)]).toDF(*names)
    room.dataframe_to_mds(frame, mds_kwargs=plain(tmp_path / "out"))
    assert samples_of(tmp_path / "out") == [dict(zip(names, range(6), strict=True))]

    def doubled(rows: Any) -> Any:
        yield {"sum": 2 * int(rows["a.b"].sum() + rows["ID"].sum())}

    room.dataframe_to_mds(frame, mds_kwargs=plain(tmp_path / "sum", columns={"sum": "int"}), udf_iterable=doubled)
    assert samples_of(tmp_path / "sum") == [{"sum": 6}]


def test_a_null_is_none_in_the_frame_of_a_function_whichever_the_version_of_pandas() -> None:
    """pandas 3 makes NaN of a text's null: a number, which is true and has a text."""
    values = ["a", None, ""]
    frame = partition._as_pandas(
        pa.record_batch({"text": values, "lists": [["a"], None, []], "bytes": [b"a", None, b""]})
    )
    assert frame["text"].tolist() == values
    assert frame["text"].dtype == object
    assert [frame[name][1] for name in frame.columns] == [None, None, None]


def test_whole_numbers_stay_exact_beside_nulls_in_the_frame_of_a_function() -> None:
    """A float holds 53 bits of them."""
    large = 2**53 + 1
    lists = pa.array([[large, None], None], pa.list_(pa.int64()))
    maps = pa.array([[("k", large)], None], pa.map_(pa.string(), pa.int64()))
    frame = partition._as_pandas(pa.record_batch({"number": [large, None], "list": lists, "map": maps, "id": [1, 2]}))
    assert str(frame["number"].dtype) == "Int64"
    assert int(frame["number"][0]) == large
    assert frame["list"][0].tolist() == [large, None]
    assert frame["map"][0] == {"k": large}
    assert frame["id"].dtype == np.int64


def test_times_have_the_zone_of_the_session_at_any_depth_in_the_frame_of_a_function(spark: Any) -> None:
    time = "timestamp '2020-01-01 00:00:00Z'"
    frame = spark.sql(f"select 1 as timestamp, {time} as t, array({time}) as a, map('k', {time}) as m")
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        row = with_local_times(frame).first()
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    evening = dt.datetime(2019, 12, 31, 19)
    assert row.asDict() == {"timestamp": 1, "t": evening, "a": [evening], "m": {"k": evening}}


def test_columns_are_taken_by_name_where_a_view_has_them_in_another_order_now(spark: Any) -> None:
    """A client of Spark Connect keeps the columns that it asked for; a query looks the view up again."""
    former = spark.range(1).selectExpr("id as a", "id + 1 as b")
    now = former.select("b", "a")
    client = SimpleNamespace(schema=former.schema, columns=former.columns, select=now.select)
    assert selected(client, ["a", "b"]).first().asDict() == {"a": 0, "b": 1}


def test_columns_that_differ_in_case_only_can_be_chosen(spark: Any, tmp_path: Path) -> None:
    rows = spark.sql("select 1 as a, 2 as A, 3 as b")
    room.dataframe_to_mds(rows, mds_kwargs=plain(tmp_path / "out", columns={"A": "int32", "b": "int32"}))
    assert samples_of(tmp_path / "out") == [{"A": 2, "b": 3}]


def test_a_file_that_was_replaced_is_named(spark: Any, table: str, tmp_path: Path) -> None:
    rows = spark.read.parquet(table)
    spark.range(3).write.mode("overwrite").parquet(table)
    with pytest.raises(
        FormatError, match=r"reads is gone, perhaps replaced: file:.*parquet\. Load the DataFrame again"
    ):
        room.dataframe_to_mds(rows, mds_kwargs=plain(tmp_path / "out"))


def test_rows_are_mixed_by_their_maps_too(spark: Any) -> None:
    rows = spark.range(40).selectExpr("map('k', id) as m").coalesce(1)
    mixed = [row.m["k"] for row in ordered(rows, None, 7).collect()]
    assert sorted(mixed) == list(range(40))
    assert mixed != sorted(mixed)


def test_a_session_that_refuses_to_tell_its_settings_keeps_them() -> None:
    class Refusing:
        def get(self, name: str, *_: Any) -> str:
            raise RuntimeError(f"[CONFIG_NOT_AVAILABLE] {name}")

    with small_batches(SimpleNamespace(conf=Refusing()), 256):
        pass


def test_what_other_threads_print_is_no_part_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    class Frame:
        sparkSession = SimpleNamespace(conf=SimpleNamespace(get=lambda *_: None))  # noqa: N815 - Spark's name

        def explain(self, mode: str) -> None:
            other = threading.Thread(target=print, args=("epoch 3",))
            other.start()
            other.join()
            print(f"{mode} plan")

    assert plan_text(Frame()) == "extended plan\n"
    assert capsys.readouterr().out == "epoch 3\n"


@pytest.fixture
def table(spark: Any, tmp_path: Path) -> str:
    path = f"{tmp_path}/table"
    spark.range(9).selectExpr("id", "id * 2 as k", "array(id) as l", "concat('r#', id) as t").write.parquet(path)
    return path


def key_of(frame: Any, **udf_kwargs: Any) -> str:
    job = replace(SparkJob.read({"out": "."}), udf_kwargs=udf_kwargs)
    return Conversion.plan(frame, job).job.fingerprint


def test_rows_of_files_have_one_fingerprint_whatever_a_session_did_before(
    spark: Any, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java's hash of a plan over Parquet files is another one in each process."""
    from pyspark.sql import functions

    def key() -> str:
        rows = spark.read.parquet(table)
        rows = rows.select("id", functions.aggregate("l", functions.col("id"), lambda x, y: x + y).alias("a"))
        return key_of(rows.where(functions.col("id").isin(list(range(40)))))

    first = key()
    monkeypatch.setattr(type(spark.range(1)), "semanticHash", lambda _: uuid4().int)
    assert key() == first


def test_frames_of_other_rows_have_other_fingerprints(spark: Any, table: str) -> None:
    from pyspark.sql import functions

    left = spark.read.parquet(table)
    right = spark.read.parquet(table)
    joined = left.join(right, left.id == right.k)
    text = functions.col("t")
    frames = [
        joined.select(left.t),
        joined.select(right.t),
        left.where("t = 'r#1'"),
        left.where("t = 'r#2'"),
        left.where("t = 'r@beef'"),
        left.where("t = 'r@cafe'"),
        left.where(text.isin([f"r#{k}" for k in range(50)])),
        left.where(text.isin([f"r#{k}" for k in range(1, 51)])),
        spark.read.option("sep", ",").csv(table, schema="t string"),
        spark.read.option("sep", ";").csv(table, schema="t string"),
    ]
    assert len(set(map(key_of, frames))) == len(frames)


def test_all_of_a_function_s_arguments_is_in_the_fingerprint_and_no_address(spark: Any, table: str) -> None:
    class Rule:
        pass

    rows = spark.read.parquet(table)
    weights = np.zeros(3000)
    first = key_of(rows, weights=weights, rule=Rule())
    assert key_of(rows, rule=Rule(), weights=weights.copy()) == first
    weights[1500] = 1
    assert key_of(rows, weights=weights, rule=Rule()) != first


def test_a_frame_with_a_function_of_a_module_that_was_edited_has_another_fingerprint(
    spark: Any, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan has the function by name alone."""
    from pyspark.sql import functions

    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_rule_of_a_frame.py"
    file.write_text("def more(x):\n    return x + 1\n")
    module = importlib.import_module(file.stem)

    def key() -> str:
        return key_of(spark.read.parquet(table).select(functions.udf(module.more, "long")("id").alias("id")))

    before = key()
    assert key() == before
    file.write_text("def more(x):\n    return x + 100\n")
    importlib.reload(module)
    assert key() != before


def test_a_preprocessing_function_gives_the_samples(spark: Any, tmp_path: Path) -> None:
    def halves(frame: Any, count: int) -> Any:
        for number in frame["id"]:
            for part in range(count):
                yield {"number": int(number), "part": part}

    with pytest.raises(ValueError, match="needs columns"):
        room.dataframe_to_mds(spark.range(3), mds_kwargs=plain(tmp_path / "out"), udf_iterable=halves)
    room.dataframe_to_mds(
        spark.range(3),
        mds_kwargs=plain(tmp_path / "out", columns={"number": "int", "part": "uint8"}),
        udf_iterable=halves,
        udf_kwargs={"count": 2},
    )
    with pytest.raises(ValueError, match="columns= has no 'part', a key of a sample"):
        room.dataframe_to_mds(
            spark.range(3),
            mds_kwargs=plain(tmp_path / "other", columns={"number": "int"}),
            udf_iterable=halves,
            udf_kwargs={"count": 2},
        )
    assert [(s["number"], s["part"]) for s in samples_of(tmp_path / "out")] == [
        (n, p) for n in range(3) for p in (0, 1)
    ]


def test_without_merging_each_partition_is_a_dataset(spark: Any, tmp_path: Path) -> None:
    from lightning_stream.writer import merge_index

    room.dataframe_to_mds(spark.range(0, 100, 1, 4), False, plain(tmp_path / "out"))
    assert not (tmp_path / "out" / "index.json").exists()
    assert [sample["id"] for sample in samples_of(tmp_path / "out" / "part-00001")] == list(range(25, 50))
    merge_index(str(tmp_path / "out"))
    assert [sample["id"] for sample in samples_of(tmp_path / "out")] == list(range(100))


def test_a_pair_keeps_local_copies_only_if_asked(spark: Any, tmp_path: Path) -> None:
    pair = (str(tmp_path / "local"), str(tmp_path / "remote"))
    assert room.dataframe_to_mds(spark.range(10), mds_kwargs={"out": pair}) == pair
    assert not (tmp_path / "local").exists()
    pair = (str(tmp_path / "local"), str(tmp_path / "remote2"))
    room.dataframe_to_mds(spark.range(10), mds_kwargs={"out": pair, "keep_local": True})
    assert files_of(tmp_path / "local") == files_of(tmp_path / "remote2")


def test_null_is_an_error_that_names_columns_and_counts(spark: Any, tmp_path: Path) -> None:
    rows = [(k, None if k % 3 == 0 else "x", [1.0, None] if k == 5 else [1.0]) for k in range(30)]
    dataframe = spark.createDataFrame(rows, "k int, t string, a array<float>").repartition(3)
    with pytest.raises(ValueError, match=r"a \(elements of arrays\): 1, t: 10\. .*fillna"):
        room.dataframe_to_mds(dataframe, mds_kwargs=plain(tmp_path / "out"))
    assert not (tmp_path / "out" / "index.json").exists()
    room.dataframe_to_mds(dataframe.select("k"), mds_kwargs=plain(tmp_path / "out"))  # other rows may follow there
    assert len(samples_of(tmp_path / "out")) == 30


def test_types_and_settings_that_do_not_fit_are_reported_together(spark: Any, tmp_path: Path) -> None:
    dataframe = spark.createDataFrame([(1, "a")], "n int, t string")
    columns = {"n": "jpeg", "t": "int32", "x": "int"}
    with pytest.raises(ValueError, match=r"(?s)'n'.*'t'.*'x' is not a column"):
        room.dataframe_to_mds(dataframe, mds_kwargs=plain(tmp_path / "out", columns=columns))
    with pytest.raises(ValueError, match="needs out"):
        room.dataframe_to_mds(dataframe)
    with pytest.raises(ValueError, match="no sizelimit"):
        room.dataframe_to_mds(dataframe, mds_kwargs=plain(tmp_path / "out", sizelimit=3))
    with pytest.raises(ValueError, match="empty"):
        room.dataframe_to_mds(dataframe.where("n > 1"), mds_kwargs=plain(tmp_path / "out"))
    with pytest.raises(ValueError, match="'n': values are out of range for uint8"):
        room.dataframe_to_mds(
            dataframe.selectExpr("n * 1000 as n"),
            mds_kwargs=plain(tmp_path / "out", exist_ok=True, columns={"n": "uint8"}),
        )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"columns": ["id"]}, r"columns must be a dict of encodings by name.*found \['id'\]"),
        ({"hashes": "sha1"}, r"hashes must be a list of names, such as \['sha1'\]"),
        ({"exist_ok": "false"}, "exist_ok must be True or False; found 'false'"),
        ({"hashes": ["md6"], "compression": "zip"}, "(?s)md6.*zip"),
        ({"size_limit": "64 mega"}, "64 mega"),
        ({"columns": {"id": "integer"}}, "no encoding 'integer'"),
    ],
)
def test_wrong_settings_are_refused_before_any_task_runs(
    spark: Any, tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        room.dataframe_to_mds(spark.range(3), mds_kwargs={"out": str(tmp_path / "out"), **wrong})
    assert not (tmp_path / "out").exists()


def test_other_objects_than_dataframes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be a Spark DataFrame; found list"):
        room.dataframe_to_mds([{"a": 1}], mds_kwargs={"out": str(tmp_path)})  # type: ignore[arg-type]


def test_settings_that_are_not_a_mapping_are_refused(spark: Any) -> None:
    with pytest.raises(TypeError, match="mds_kwargs must be a dict"):
        room.dataframe_to_mds(spark.range(3), mds_kwargs="out")  # type: ignore[arg-type]


def test_a_dataset_is_replaced_only_if_that_was_asked_for(spark: Any, tmp_path: Path) -> None:
    room.dataframe_to_mds(spark.range(10), mds_kwargs=plain(tmp_path / "out"))
    before = files_of(tmp_path / "out")
    with pytest.raises(FileExistsError, match=r"overwrite=True \(to dataframe_to_mds in mds_kwargs\)"):
        room.dataframe_to_mds(spark.range(20), mds_kwargs=plain(tmp_path / "out"))
    assert files_of(tmp_path / "out") == before
    (tmp_path / "out" / "notes.txt").write_text("mine")
    room.dataframe_to_mds(spark.range(20), mds_kwargs=plain(tmp_path / "out", exist_ok=True))
    room.dataframe_to_mds(spark.range(20), mds_kwargs=plain(tmp_path / "again"))
    assert shards_of(tmp_path / "out") == {**shards_of(tmp_path / "again"), "notes.txt": b"mine"}


def test_files_come_in_smaller_batches_where_spark_does_not_count_their_bytes(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = spark.range(3).selectExpr("cast('x' as binary) as content")

    def rows_of_a_batch() -> int | None:
        return convert.Conversion.plan(files, SparkJob.read({"out": "out"})).batch_rows

    counts = spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch", None) is not None
    assert rows_of_a_batch() == (1000 if counts else 256)
    monkeypatch.setattr(convert, "_BATCH_BYTES", "spark.sql.execution.arrow.noSuchName")
    assert rows_of_a_batch() == 256


def test_files_keep_their_bytes(spark: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "in").mkdir()
    for k in range(6):
        image.new("RGB", (8 + k, 5), (250, 10 * k, 3)).save(tmp_path / "in" / f"{k}.jpg")
    files = spark.read.format("binaryFile").load(str(tmp_path / "in")).select("path", "content")
    room.dataframe_to_mds(files, mds_kwargs=plain(tmp_path / "out", columns={"path": "str", "content": "jpeg"}))
    for sample in samples_of(tmp_path / "out"):
        original = image.open(tmp_path / "in" / sample["path"].rpartition("/")[2])
        assert sample["content"].tobytes() == original.tobytes()
    raw = {entry for name, data in shards_of(tmp_path / "out").items() for entry in [data] if name.endswith(".mds")}
    assert all(any(path.read_bytes() in data for data in raw) for path in (tmp_path / "in").iterdir())


def test_images_of_the_image_source_come_back_pixel_by_pixel(spark: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(1)
    for k, mode in enumerate(("RGB", "L", "RGBA")):
        shape = (4, 6) if mode == "L" else (4, 6, len(mode))
        image.fromarray(rng.integers(0, 255, shape, np.uint8)).save(tmp_path / "in" / f"{k}.png")
    images = spark.read.format("image").load(str(tmp_path / "in")).selectExpr("image", "image.origin as origin")
    room.dataframe_to_mds(images, mds_kwargs=plain(tmp_path / "out"))
    for sample in samples_of(tmp_path / "out"):
        original = image.open(io.BytesIO((tmp_path / "in" / sample["origin"].rpartition("/")[2]).read_bytes()))
        assert sample["image"].mode == original.mode
        assert sample["image"].tobytes() == original.tobytes()


def test_lengths_of_all_rows_are_in_the_index(spark: Any, tmp_path: Path) -> None:
    rows = [(k, "ä" * (k % 7), list(range(k % 5 + 1))) for k in range(200)]
    frame = spark.createDataFrame(rows, "id int, text string, tokens array<int>").repartition(3)
    lengths = {"text": len, "tokens": len, "all": lambda sample: sample["id"] + len(sample["tokens"])}
    for merged in (True, False):
        out = tmp_path / str(merged)
        room.dataframe_to_mds(frame, merged, plain(out, lengths=lengths))
        folders = [out] if merged else sorted(path.parent for path in out.glob("part-*/index.json"))
        for folder in folders:
            files = Index.from_file(folder / "index.json").lengths
            found = {name: [np.fromfile(folder / one.basename, "<u4") for one in each] for name, each in files.items()}
            samples = samples_of(folder)
            assert {name: np.concatenate(each).tolist() for name, each in found.items()} == {
                "text": [len(one["text"]) for one in samples],
                "tokens": [len(one["tokens"]) for one in samples],
                "all": [one["id"] + len(one["tokens"]) for one in samples],
            }
    room.dataframe_to_mds(
        frame,
        mds_kwargs=plain(tmp_path / "made", columns={"text": "str"}, lengths={"text": len}),
        udf_iterable=lambda rows: ({"text": text * 2} for text in rows["text"]),
    )
    (file,) = set(map(len, Index.from_file(tmp_path / "made" / "index.json").lengths.values()))
    assert file == 3


@pytest.mark.parametrize(
    ("lengths", "message"),
    [({"text": 3}, "lengths must be functions by name"), ({"txt": len}, "needs a column of that name")],
)
def test_lengths_that_cannot_be_measured_are_refused_before_any_task(
    spark: Any, tmp_path: Path, lengths: Any, message: str
) -> None:
    frame = spark.createDataFrame([("a",)], "text string")
    with pytest.raises(ValueError, match=message):
        room.dataframe_to_mds(frame, mds_kwargs=plain(tmp_path / "out", lengths=lengths))
    assert not (tmp_path / "out").exists()
