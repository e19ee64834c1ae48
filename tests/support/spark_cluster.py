"""A small cluster whose executors are killed in the middle of a write, and one whose slow tasks are run twice."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
from servers.ports import free_port

from lightning_stream.spark import dataframe_to_mds, local_session, register

COLUMNS = {"id": "int64", "twice": "int64"}


def make_killing(root: str) -> Any:
    def killing(frame: Any) -> Iterator[dict[str, int]]:
        for number in frame["id"].tolist():
            if number == 900 and not (Path(root) / "killed").exists():
                (Path(root) / "killed").touch()
                _kill_executor()
            yield {"id": number, "twice": 2 * number}

    def _kill_executor() -> None:
        """End the JVM that this Python worker belongs to: the nearest java among its parents."""
        pid = os.getpid()
        while True:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"CoarseGrainedExecutorBackend" in command:
                os.kill(pid, signal.SIGKILL)
                time.sleep(60)
            if pid <= 1:
                raise RuntimeError("no executor among the parents")

    return killing


def make_lagging(root: str) -> Any:
    def lagging(frame: Any) -> Iterator[dict[str, int]]:
        rows = frame["id"].tolist()
        first = False
        if 900 in rows:
            count = len(list(Path(root).glob("lagging-*")))
            (Path(root) / f"lagging-{count}").touch()
            first = count == 0
        for number in rows:
            if number == 900 and first:
                time.sleep(25)  # long enough to be taken for slow, and to go on when the other has won
            yield {"id": number, "twice": 2 * number}

    return lagging


@contextmanager
def standalone() -> Iterator[str]:
    """A master and two workers, each with an address of its own: Spark runs no task twice on one host."""
    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    commands = [
        ["master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"],
        *(
            ["worker.Worker", "--host", f"127.0.0.{k}", "-c", "1", "-m", "1g", "--webui-port", "0", master]
            for k in (2, 3)
        ),
    ]
    running = []
    try:
        for name, *arguments in commands:
            where = {**os.environ, "SPARK_LOCAL_IP": arguments[1]}
            with tempfile.TemporaryFile() as log:
                command = [spark_class, f"org.apache.spark.deploy.{name}", *arguments]
                running.append(subprocess.Popen(command, env=where, stdout=log, stderr=log, cwd=tempfile.gettempdir()))
            _wait_for_master(port)
        yield master
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(20)


def _wait_for_master(port: int) -> None:
    """Until it listens: an application that finds no master gives up, and workers ask for one only so often."""
    deadline = time.monotonic() + 180
    while not _listens(port):
        if time.monotonic() > deadline:
            raise TimeoutError("Spark's master did not listen within three minutes")
        time.sleep(0.2)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def append(session: Any, out: str, udf: Any) -> None:
    """The same rows by Spark's own verbs."""
    import pandas as pd

    def samples(frames: Iterator[Any]) -> Iterator[Any]:
        for frame in frames:
            yield pd.DataFrame(list(udf(frame)))

    register(session)
    rows = session.range(0, 1000, 1, 2).mapInPandas(samples, "id long, twice long")
    rows.write.format("mds").mode("append").option("size_limit", "2kb").save(out)


def convert(master: str, root: str, name: str, make: Any) -> None:
    conf = {
        "spark.speculation": "true",
        "spark.speculation.interval": "200ms",
        "spark.speculation.multiplier": "1.2",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "500ms",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "spark.executor.memory": "1g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    session = local_session(master, conf=conf)
    try:
        out = {"out": f"{root}/{name}", "compression": None, "columns": COLUMNS, "size_limit": "2kb"}
        dataframe_to_mds(session.range(0, 1000, 1, 2), mds_kwargs=out, udf_iterable=make(root))
        append(session, f"{root}/verbs/{name}", make(f"{root}/verbs"))
    finally:
        session.stop()


def main(root: str) -> None:
    Path(root, "verbs").mkdir()
    convert("local-cluster[2,1,1024]", root, "out-kill", make_killing)
    with standalone() as master:
        convert(master, root, "out-lag", make_lagging)


if __name__ == "__main__":
    main(sys.argv[1])
