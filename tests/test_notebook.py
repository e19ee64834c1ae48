"""The quickstart notebook: its cells run, and its stored outputs are those that they give."""

from __future__ import annotations

import ast
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")
pyplot = pytest.importorskip(
    "matplotlib.pyplot", reason="the notebook draws: uv sync --extra recipes brings matplotlib"
)
NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "quickstart.ipynb"
OUR_LOG = logging.getLogger("lightning_stream")


def _run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as Jupyter does; returns the value of its last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None  # noqa: S307  # our cells


@pytest.fixture
def _quiet_matplotlib(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(pyplot, "show", lambda: None)
    yield
    pyplot.close("all")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the notebook ignores Lightning's warnings too
@pytest.mark.usefixtures("_quiet_matplotlib")
def test_each_cell_runs_and_gives_the_stored_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # what Lightning's seed_everything sets ends with this test
    names: dict[str, Any] = {"__name__": "__main__"}
    log = io.StringIO()
    num_pictures = 0
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        value = _run("".join(cell["source"]), names)
        if cell["id"] == "cell-log":  # its handler writes to the output of a cell that is over
            OUR_LOG.handlers[-1].setStream(log)  # type: ignore[attr-defined]
        assert cell["execution_count"], "the outputs are stored"
        num_pictures += sum("image/png" in output.get("data", {}) for output in cell["outputs"])
        stored = [output for output in cell["outputs"] if output["output_type"] == "execute_result"]
        assert [repr(value)] * (value is not None) == ["".join(one["data"]["text/plain"]) for one in stored]
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                assert "".join(output["text"]) in log.getvalue()
    assert num_pictures == 2
