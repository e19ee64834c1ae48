"""A DataFrame goes straight into PyTorch: by number, in batches, through a DataLoader, and as a user's own class."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stream import MDSWriter
from lightning_stream.cli import main
from lightning_stream.loader import StreamingDataLoader

for package in ("pyspark", "pyarrow"):
    pytest.importorskip(package, reason="needs pyspark and Java: uv sync --extra spark")

from lightning_stream.spark import register  # noqa: E402
from lightning_stream.spark.torch_dataset import StreamToTorchDataset, dataset_from_spark  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wine(spark: Any, shared_data: Path) -> Any:
    return spark.read.csv(str(shared_data / "winequality.csv"), header=True, inferSchema=True)


@pytest.fixture
def table(shared_data: Path) -> np.ndarray:
    return np.loadtxt(shared_data / "winequality.csv", delimiter=",", skiprows=1)


def test_rows_and_batches_are_the_tables(wine: Any, table: np.ndarray) -> None:
    *features, label = wine.columns
    dataset = StreamToTorchDataset(wine, features, label)
    assert len(dataset) == len(table)
    x, y = dataset[7]
    assert x.dtype == y.dtype == torch.float32
    np.testing.assert_allclose(x.numpy(), table[7, :-1], rtol=1e-6)
    assert y.item() == table[7, -1]
    x, y = dataset[[3, -1, 3]]
    np.testing.assert_allclose(x.numpy(), table[[3, -1, 3], :-1], rtol=1e-6)
    np.testing.assert_array_equal(dataset[10:14][1].numpy(), table[10:14, -1])
    with pytest.raises(IndexError, match="4898 rows"):
        dataset[len(table)]
    joined = torch.cat([x for x, _ in dataset.batches(1000)])
    np.testing.assert_allclose(joined.numpy(), table[:, :-1], rtol=1e-6)


def test_a_dataloader_shuffles_it_with_workers(wine: Any, table: np.ndarray) -> None:
    *features, label = wine.columns
    dataset = StreamToTorchDataset(wine, features, label)
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2, multiprocessing_context="spawn")
    batches = list(loader)
    assert batches[0][0].shape == (32, 11)
    quality = torch.cat([y for _, y in batches]).numpy()
    assert not np.array_equal(quality, table[:, -1])
    np.testing.assert_array_equal(np.sort(quality), np.sort(table[:, -1]))


class CsvToDataset(StreamToTorchDataset):
    """As users write it who know the name: nothing of the base class is called."""

    def __init__(self, spark_df: Any, feature_cols: list[str], label_col: str) -> None:
        self.spark_df = spark_df
        self.feature_cols = feature_cols
        self.label_col = label_col

    def __getitem__(self, idx: int) -> Any:
        row = self.spark_df[idx]
        features = torch.tensor([row[col] for col in self.feature_cols], dtype=torch.float32)
        return features, torch.tensor(row[self.label_col], dtype=torch.float32) * 10

    def __len__(self) -> int:
        return self.spark_df.count()


def test_a_users_own_class_trains_a_regression(wine: Any, table: np.ndarray) -> None:
    *features, label = wine.columns
    dataset = CsvToDataset(wine, features, label)
    assert dataset.spark_df.columns == wine.columns
    assert dataset[5][1].item() == 10 * table[5, -1]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(11), torch.nn.Linear(11, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    errors = []
    for inputs, labels in itertools.chain.from_iterable(
        DataLoader(dataset, batch_size=256, shuffle=True) for _ in range(3)
    ):
        loss = torch.nn.functional.mse_loss(model(inputs)[:, 0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    assert np.mean(errors[-5:]) < errors[0] / 4


def test_the_first_batches_come_while_later_partitions_are_converted(spark: Any, tmp_path: Path) -> None:
    marker = tmp_path / "go on"

    def held_back(frames: Any) -> Any:
        """All partitions but the first two wait until the first batch was seen."""
        for frame in frames:
            deadline = time.monotonic() + 60
            while frame["id"].iloc[0] >= 1000 and not marker.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            yield frame

    source = spark.range(0, 4000, 1, 8).mapInPandas(held_back, "id long")
    dataset = StreamToTorchDataset(source, ["id"])
    batches = dataset.batches(100)
    first = next(batches)
    assert not dataset.spark_df.cache.is_complete
    marker.touch()
    rest = list(batches)
    assert torch.cat([first, *rest])[:, 0].tolist() == [float(k) for k in range(4000)]
    assert len(dataset) == 4000


def test_it_is_converted_once_and_read_by_other_processes(spark: Any, wine: Any, cache: Path) -> None:
    *features, label = wine.columns
    dataset = StreamToTorchDataset(wine, features, label)
    expected = dataset[100]
    folder = Path(dataset.spark_df.cache.uri)
    changed = (folder / "index.json").stat().st_mtime_ns
    elsewhere = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(elsewhere[100][0], expected[0])
    again = StreamToTorchDataset(wine, features, label)
    assert torch.equal(again[100][0], expected[0])
    assert sum(len(x) for x, _ in again.batches(64, shuffle=True)) == len(again)
    assert (folder / "index.json").stat().st_mtime_ns == changed


def test_a_file_that_is_not_local_and_is_written_again_is_converted_again(spark: Any, tmp_path: Path) -> None:
    # Spark reads it by a file system of its own, so that this process cannot ask for its time of change.
    name = f"fs.viewfs.mounttable.{tmp_path.name}.link./d"
    (tmp_path / "d").mkdir()
    spark.conf.set(name, f"file://{tmp_path}/d")

    def table(value: int) -> Any:
        (tmp_path / "d" / "a[1], {b} é*.csv").write_text(f"x\n{value}\n")
        frame = spark.read.csv(f"viewfs://{tmp_path.name}/d", header=True, inferSchema=True)
        assert all(url.startswith("viewfs:") for url in frame.inputFiles())
        return frame

    first = dataset_from_spark(table(1))
    assert first[0]["x"] == 1
    assert dataset_from_spark(spark.read.csv(f"viewfs://{tmp_path.name}/d", header=True, inferSchema=True)).num_samples
    assert len(list((tmp_path / "cache").glob("spark-frame-*"))) == 1  # the same file is converted once
    assert dataset_from_spark(table(2))[0]["x"] == 2


def test_rows_that_come_from_no_file_are_read_anew(spark: Any, tmp_path: Path) -> None:
    def of_a_data_source() -> Any:
        return spark.read.format("mds").load(str(tmp_path / "shards"))

    with MDSWriter(out=str(tmp_path / "shards"), columns={"x": "int"}) as writer:
        writer.write({"x": 1})
    if not spark.version.startswith("3."):
        register(spark)
        assert dataset_from_spark(of_a_data_source()).num_samples == 1
        with MDSWriter(out=str(tmp_path / "shards"), columns={"x": "int"}, append=True) as writer:
            writer.write({"x": 2})
        assert dataset_from_spark(of_a_data_source()).num_samples == 2
    for value in range(20):  # freed, so that the next frame may have the same address
        assert dataset_from_spark(spark.createDataFrame([(value,)], "x int"))[0]["x"] == value


def test_the_cache_command_lists_and_prunes_the_rows_of_a_dataframe_but_not_while_they_are_read(
    spark: Any, wine: Any, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = dataset_from_spark(wine)
    main(["cache", "list", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert [each["url"] for each in listed["caches"]] == ["rows of a Spark DataFrame"]
    assert listed["size_bytes"] > 100_000
    main(["cache", "prune", "--to", "0", "--json"])
    assert json.loads(capsys.readouterr().out)["deleted_bytes"] == 0
    assert dataset[4000]["quality"] > 0
    del dataset
    gc.collect()
    main(["cache", "prune", "--to", "0", "--json"])
    assert json.loads(capsys.readouterr().out)["deleted_bytes"] == listed["size_bytes"]
    assert not list(cache.glob("spark-frame-*/**/*.mds"))
    assert dataset_from_spark(wine).num_samples == wine.count()


def test_batches_arrive_on_the_device_asked_for(spark: Any) -> None:
    frame = spark.range(0, 50, 1, 2).selectExpr("id", "id * 2 as twice")
    dataset = StreamToTorchDataset(frame, ["id"], "twice", device="meta", label_dtype=torch.float64)
    for features, label in (next(dataset.batches(8)), dataset[[3, 1, 2]], dataset[5]):
        assert features.device.type == label.device.type == "meta"
        assert (features.dtype, label.dtype) == (torch.float32, torch.float64)
    assert [len(features) for features, _ in dataset.batches(20)] == [20, 20, 10]
    assert [len(features) for features, _ in dataset.batches(20, drop_last=True)] == [20, 20]


def test_columns_that_are_not_numbers_or_names_are_refused(spark: Any) -> None:
    frame = spark.createDataFrame([("7", 1.0)], ["text", "y"])
    with pytest.raises(TypeError, match=r"is a list of names; found the text 'text': pass \['text'\]"):
        StreamToTorchDataset(frame, "text", "y")  # a text is a sequence of letters
    dataset = StreamToTorchDataset(frame, ["text"], "y")
    with pytest.raises(ValueError, match=r"column 'text' must hold numbers.*found '7'"):
        dataset[0]
    with pytest.raises(TypeError, match="by number, slice or a sequence"):
        dataset["y"]


def test_arrays_and_vectors_are_joined_as_features(spark: Any) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(k, [float(k), 1.0], Vectors.dense([k, 2.0]), k % 2 == 0) for k in range(10)]
    frame = spark.createDataFrame(rows, ["a", "b", "c", "label"])
    x, y = StreamToTorchDataset(frame, ["a", "b", "c"], "label")[[9, 2]]
    assert x.tolist() == [[9, 9, 1, 9, 2], [2, 2, 1, 2, 2]]
    assert y.tolist() == [0, 1]
    with pytest.raises(ValueError, match="found nothing"):
        StreamToTorchDataset(frame, ["nothing"], "label")


def test_values_that_cannot_be_written_are_an_error_in_every_reader(spark: Any) -> None:
    frame = spark.createDataFrame([(1.0, 2.0), (None, 1.0)], ["x", "y"])
    dataset = StreamToTorchDataset(frame, ["x"], "y")
    for _ in range(2):
        with pytest.raises(ValueError, match="x: 1"):
            len(dataset)
    with pytest.raises(ValueError, match="x: 1"):
        list(dataset.batches(2))


def test_a_streaming_dataset_over_a_dataframe_resumes(wine: Any, table: np.ndarray) -> None:
    dataset = dataset_from_spark(wine, ["alcohol", "quality"], shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=100)
    batches = iter(loader)
    seen = [next(batches) for _ in range(20)]
    state = loader.state_dict()
    rest = [batch["alcohol"] for batch in batches]
    other = StreamingDataLoader(dataset_from_spark(wine, ["alcohol", "quality"], shuffle=True), batch_size=100)
    other.load_state_dict(state)
    assert all(torch.equal(a, b["alcohol"]) for a, b in zip(rest, other, strict=True))
    everything = torch.cat([*(batch["alcohol"] for batch in seen), *rest])[: len(table)]
    np.testing.assert_allclose(np.sort(everything.numpy()), np.sort(table[:, wine.columns.index("alcohol")]))
