"""The page on Databricks, step by step, against a catalog server: a notebook's code, its commands, and a killed run."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from servers.catalog import TOKEN, CatalogServer
from support.pages import blocks_of

from lightning_stream.cli import main

PAGE, NUM_ROWS = "docs/databricks.md", 1000
KILLED = """
def killed(num_steps):
    import os, signal, threading, time
    from pathlib import Path

    def watch():
        while not any(int(path.stem.split("step=")[1]) >= 40 for path in Path(RUN).glob("epoch*.ckpt")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return train(num_steps)
"""


@pytest.fixture
def catalog(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CatalogServer]:
    """A table and a volume; the variables of the cluster, which the executors have, too."""
    delta = pytest.importorskip("deltalake", reason="deltalake is not installed: uv sync --extra delta")
    table = pa.table({"id": range(NUM_ROWS), "text": [f"document {number} " * 9 for number in range(NUM_ROWS)]})
    delta.write_deltalake(str(tmp_path / "table"), table)
    with CatalogServer(lifetime_s=30.0) as server:
        server.add("main.ml.documents", "s3://bucket/tables/documents", "DELTA")
        server.add("main.ml.shards", "s3://bucket/volumes/shards")
        server.store(tmp_path / "table", "bucket/tables/documents")
        variables = {
            "DATABRICKS_HOST": server.url,
            "DATABRICKS_TOKEN": TOKEN,
            "S3_ENDPOINT_URL": server.url,
            "LIGHTNING_STREAM_CACHE": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        environment = dict(spark.sparkContext.environment)
        spark.sparkContext.environment.update(variables)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield server
        spark.sparkContext.environment.clear()
        spark.sparkContext.environment.update(environment)


class Notebook:
    """Runs the blocks of a page in one namespace; the folders that a workspace mounts are below another one."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self._folder = folder
        rows = [(number, f"document {number} " * 9) for number in range(NUM_ROWS)]
        frame = spark.createDataFrame(rows, "id long, text string")
        tables = {"main.ml.documents": frame}
        self.names: dict[str, Any] = {"__name__": "__main__", "spark": SimpleNamespace(table=tables.__getitem__)}

    def run(self, language: str, text: str) -> str:
        """Run a block; what it prints."""
        for mounted in ("/Volumes/", "/local_disk0/"):
            text = text.replace(mounted, f"{self._folder}{mounted}")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if language == "python":
                exec(compile(text, PAGE, "exec"), self.names)
            else:
                for line in text.replace("\\\n", " ").splitlines():
                    assert main(line.split()[1:]) == 0
        return printed.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
def test_the_page_from_the_table_to_a_killed_run_that_continues(
    spark: Any, catalog: CatalogServer, tmp_path: Path
) -> None:
    pytest.importorskip("lightning.pytorch")
    java = pytest.importorskip("py4j.protocol")
    notebook, printed = Notebook(spark, tmp_path), ""
    for block in blocks_of(PAGE):
        if block.language == "text" and not block.title:
            assert block.text.strip() in printed
        if block.language == "python" and "num_processes=1" in block.text:
            notebook.run("python", KILLED)
            with pytest.raises(java.Py4JJavaError):
                notebook.run("python", "distributor.run(with_env(killed), 10**6)")
        if block.language == "python" or block.text.startswith("lightning-stream "):
            printed = notebook.run(block.language, block.text)
    assert re.search(r"lost +0\n +repeated +0\n", printed)
    assert (tmp_path / "Volumes/main/ml/runs/documents/log/data_report.html").exists()
    assert {"READ", "READ_VOLUME", "WRITE_VOLUME"} <= set(catalog.asked_for)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert {path.parent.name for path in catalog.left_in(tmp_path)} <= {".lightning_stream"}
