"""The code of the page on Spark runs, in its order, where pyspark and Java are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def test_the_code_of_the_page_runs(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) > 4
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert (tmp_path / "shards" / "index.json").exists()
