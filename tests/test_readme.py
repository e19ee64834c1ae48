"""The README's code runs as it stands, block after block, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")
def test_the_readmes_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README block {number}", "exec"), names)
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_the_readme_names_the_two_commands_of_a_fresh_machine() -> None:
    assert "uv run python train.py +data=flowers" in README
    assert "uv run pytest" in README
