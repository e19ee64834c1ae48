"""``report``: the page of a run, and its numbers, from its log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.run_logs import MadeLaunch

from lightning_stream.cli import main
from lightning_stream.run_log import LOG_NAME, PAGE_NAME, read_run

Answer = Callable[..., tuple[int, Any]]


def test_the_page_and_the_numbers_come_from_the_log(tmp_path: Path, answer: Answer) -> None:
    log = MadeLaunch({"wait_s": 0.1, "waits.fetching": 0.1}, verdict="Input-bound 10%: why.").write(tmp_path / "run")
    code, about = answer("report", str(tmp_path / "run"))
    page = tmp_path / "run" / PAGE_NAME
    assert (code, about) == (0, {**read_run(log).summary(), "page": str(page)})
    assert (about["wait_share"], about["samples"], about["verdict"]) == (
        pytest.approx(0.1), 200, "Input-bound 10%: why."
    )  # fmt: skip
    assert "Input-bound 10%: why." in page.read_text()
    code, about = answer("report", str(log), "--out", str(tmp_path / "mine.html"))
    assert (tmp_path / "mine.html").read_bytes() == page.read_bytes()


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_no_run_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    flags = ["--json"] if as_json else []
    assert main(["report", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / LOG_NAME}: No such file or directory. Check the path\n"
    (tmp_path / LOG_NAME).write_text("a note\n")
    assert main(["report", str(tmp_path), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / LOG_NAME} is no log of a run: line 1: ")
