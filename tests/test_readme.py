"""The README's code runs as it stands, block after block, in an empty folder."""

from __future__ import annotations

import ast
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def _can_run(block: str) -> bool:
    """Whether the optional packages that a block imports are here; CI runs each block in one environment or another."""
    imported = {node.module for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom) and node.module}
    needs_spark = "lightning_stream.spark" in imported
    if needs_spark and not (find_spec("pyspark") and shutil.which("java")):
        return False
    return all(find_spec(name.split(".")[0]) for name in imported)


@pytest.mark.filterwarnings("ignore")  # of the trainers, about this machine
def test_the_readmes_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        if not _can_run(block):
            continue
        exec(compile(block, f"README block {number}", "exec"), names)
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_the_readme_names_the_two_commands_of_a_fresh_machine() -> None:
    assert "uv run python train.py +data=flowers" in README
    assert "uv run pytest" in README
