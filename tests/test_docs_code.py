"""Every code block of the README and of the pages: Python runs, commands are parsed, output is what the code prints."""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.pages import PAGES, ROOT, blocks_of
from support.warm import python

# What a block's title may give as the reason why no test runs it.
REASONS = {"needs 4 GPUs", "needs a GPU", "needs a cluster", "it ends with Ctrl-C"}
SLOW = {"docs/hosts.md", "docs/multi_node.md"}
OF_A_WORKSPACE = "docs/databricks.md"  # tests/spark/test_databricks.py runs it
ELSEWHERE = {"ray", "train_ddp"}  # of a script that tests/trainers/test_elastic.py runs
WIDTH = 82  # longer lines are cut off in a browser window of 1280 pixels
WRAPPED = {"console", "text"}  # docs/wide.css
LANGUAGES = {"python", "bash", "console", "text", "yaml", "toml", "nginx"}
LOGGERS = ("lightning_stream", "lightning.pytorch", "composer")


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_narrow_and_say_why_they_are_not_run(page: str) -> None:
    for block in blocks_of(page):
        where = f"{page}:{block.line}"
        assert block.language in LANGUAGES, where
        assert block.language in WRAPPED or max(map(len, block.text.splitlines())) <= WIDTH, where
        if block.is_skipped:
            assert block.title.removeprefix("Not run by the tests: ") in REASONS, where


@pytest.mark.parametrize("page", PAGES)
def test_configs_can_be_parsed(page: str) -> None:
    for block in blocks_of(page):
        if block.language == "yaml":
            assert pytest.importorskip("yaml").safe_load(block.text), f"{page}:{block.line}"
        if block.language == "toml":
            import tomllib

            assert tomllib.loads(block.text), f"{page}:{block.line}"


def _missing_packages(block: str) -> set[str]:
    """The optional packages that a block imports and that are not installed."""
    imported = {node.module for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom) and node.module}
    imported |= {
        alias.name for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Import) for alias in node.names
    }
    missing = {name.split(".")[0] for name in imported if not find_spec(name.split(".")[0])}
    if "lightning_stream.spark" in imported:
        missing |= set() if find_spec("pyspark") else {"pyspark"}
        missing |= set() if shutil.which("java") else {"java"}
    return missing


def _filled_lines(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())


def _pattern_of(shown: str) -> re.Pattern[str]:
    """What the whole output matches: a line of ``...`` is any lines; behind two spaces, it is the rest of its line."""
    lines = []
    for line in _filled_lines(shown).splitlines():
        text = line.removesuffix("  ...")
        rest = "" if text == line else ".*"
        lines.append(r"(?:.*\n)*" if line == "..." else rf"{re.escape(text)}{rest}\n")
    return re.compile("".join(lines))


class _Capture(logging.Handler):
    """Collect what is printed and logged."""

    def __init__(self) -> None:
        super().__init__()
        self.text = io.StringIO()

    def emit(self, record: logging.LogRecord) -> None:
        self.text.write(f"{record.getMessage()}\n")

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        loggers = [logging.getLogger(name) for name in LOGGERS]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.addHandler(self)
        loggers[1].setLevel(logging.INFO)
        try:
            with contextlib.redirect_stdout(self.text):
                yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.removeHandler(self)
                logger.setLevel(level)


def _runs(page: str) -> list[object]:
    return [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])]


def _run_command(line: str) -> str:
    """Run a script that the page wrote; its output."""
    launcher = [python(), "-m", "torch.distributed.run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [*launcher, *shlex.split(line)[1:]]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


PYTHON_PAGES = [
    page for page in PAGES if page != OF_A_WORKSPACE and any(block.language == "python" for block in blocks_of(page))
]


@pytest.mark.filterwarnings("ignore")  # the trainers warn about this machine
@pytest.mark.parametrize("page", [mark for page in PYTHON_PAGES for mark in _runs(page)])
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    printed, ran_before = "", False
    for block in blocks_of(page):
        if block.language == "text" and ran_before and not block.title:
            lines = _filled_lines(printed)
            assert _pattern_of(block.text).fullmatch(lines), f"{page}:{block.line}: the code before prints:\n{lines}"
        ran_before = False
        if block.is_skipped or block.language not in ("python", "bash"):
            continue
        if block.language == "bash":
            scripts = [line for line in block.text.splitlines() if line.startswith("torchrun --standalone ")]
            ran_before = bool(scripts)
            printed = "".join(_run_command(line) for line in scripts)
            continue
        if missing := _missing_packages(block.text) - ELSEWHERE:
            if page == "README.md":  # its blocks are of several trainers; CI runs each in one environment or another
                continue
            pytest.skip(f"{page} needs {', '.join(sorted(missing))}; uv sync --extra composer --extra spark brings it")
        if block.title.endswith(".py"):
            (tmp_path / block.title).write_text(block.text)
            continue
        capture, ran_before = _Capture(), True
        with capture.capturing():
            exec(compile("\n" * block.line + block.text, page, "exec"), names)
        printed = capture.text.getvalue()
    names.clear()  # an iteration that a page leaves ends its workers
    if page == "README.md" and find_spec("lightning"):
        assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_the_readme_is_short_and_names_the_two_commands_of_a_fresh_machine() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 100
    assert "uv run python train.py +data=flowers" in readme
    assert "uv run pytest" in readme
