"""The benchmarks run: each program with tiny data, and the frame that they share with its cases in fresh processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from support.warm import python

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PROGRAMS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "\n    main(__doc__" in path.read_text())
# Of many groups of runs, or cases that differ by a number.
SHORTER = {
    "cold_start": ["--only", "in process|many shards|text"],
    "pack_plan": ["--only", "rows of 2|documents|16 canonical nodes: ours, 2|images|beside|first batch.*many"],
    "resume_peers": ["--only", "in the middle of an epoch"],
}
LONG = {"cold_start", "plan_runs", "resume_peers", "order_scale", "read_photos"}
NEEDS = {"spark_rows": ("pyspark", "spark"), "resume_peers": ("lightning",) * 2, "trainer_overhead": ("lightning",) * 2}


def run(program: str, *arguments: str) -> str:
    command = [python(), str(BENCHMARKS / f"{program}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=pytest.mark.nightly if name in LONG else ()) for name in PROGRAMS]
)
def test_a_benchmark_runs_with_tiny_data(program: str) -> None:
    pytest.importorskip("torch", reason="most benchmarks need torch: uv sync")
    module, extra = NEEDS.get(program, ("numpy", ""))
    pytest.importorskip(module, reason=f"{module} is not here: uv sync --extra {extra}")
    assert "per CPU-s" in run(program, "--smoke", *SHORTER.get(program, []))


@pytest.mark.slow
def test_a_verdict_is_judged_by_what_its_remedy_does() -> None:
    pytest.importorskip("torch", reason="loaders need torch: uv sync")
    printed = run("verdicts", "--only", "^transform sleeps, one worker$")
    assert re.search(r"transform sleeps, one worker .* was \d", printed), printed
    assert " of 1: the cause is named" in printed


def test_cases_run_in_turn_and_beside_another_checkout(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--rounds", "2", "--rows", "256", "--only", "token rows: ours, in batches"]
    table = run("write", *arguments, "--against", str(ROOT), "--json", str(report))
    assert "ours, in batches (against)" in table
    measured = json.loads(report.read_text())["token rows"]
    assert [len(rounds) for rounds in measured.values()] == [2, 2]
    assert {result["samples"] for rounds in measured.values() for result in rounds} == {256}
    assert all(result["cpu_s"] > 0 and result["peak_mib"] > 1 for rounds in measured.values() for result in rounds)


def test_the_pages_name_benchmarks_that_are_there() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    named = set(re.findall(r"benchmarks/\w+\.py", pages))
    assert named
    assert all((ROOT / name).is_file() for name in named)
