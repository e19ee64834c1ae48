"""The proofs in recipes/proofs hold on small data, and find what they look for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")
from support.recipe_runs import ROOT

from recipes.proofs import exact_evaluation, packed_rows
from recipes.proofs.device_counts import Step, compare, read_steps

ONE, TWO, THREE = Step(1, 0, (1, 2), 2.0), Step(2, 0, (3, 4), 1.0), Step(3, 0, (5, 6), 0.5)
WHOLE = [ONE, TWO, THREE]


def test_a_chain_with_the_same_samples_is_exact() -> None:
    wrong, largest = compare(WHOLE, [ONE, TWO._replace(loss=1.0 + 1e-6), THREE])
    assert wrong == ""
    assert largest == pytest.approx(1e-6)


def test_lost_repeated_and_swapped_samples_are_found() -> None:
    swapped = [ONE._replace(ids=(1, 3)), TWO._replace(ids=(2, 4)), THREE]
    assert compare(WHOLE, [ONE, THREE])[0] == "Samples lost: 2, repeated: 0; steps with other samples: []."
    assert compare(WHOLE, swapped)[0] == "Samples lost: 0, repeated: 0; steps with other samples: [1, 2]."
    assert compare(WHOLE, [*WHOLE, THREE])[0] == "Samples lost: 0, repeated: 2; steps with other samples: []."
    assert compare(WHOLE, [TWO, ONE, THREE])[0]


def test_the_samples_of_a_step_are_those_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "log" / "version_0").mkdir(parents=True)
    (tmp_path / "log" / "version_0" / "metrics.csv").write_text("step,train/loss\n0,1.5\n")
    for rank, ids in enumerate(([2, 1], [3])):
        line = {"step": 1, "epoch": 0, "ids": ids}
        (tmp_path / "samples" / f"rank-{rank}.jsonl").write_text(json.dumps(line) + "\n")
    assert read_steps(tmp_path) == [Step(1, 0, (1, 2, 3), 1.5)]
    (tmp_path / "samples" / "rank-1.jsonl").write_text("")
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        read_steps(tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_a_chain_over_1_2_and_1_devices_is_exact(tmp_path: Path) -> None:
    small = ["data=text", "data.synthetic_count=60", "data.seq_len=64", "data.size_limit=8kb", "model.d_model=32"]
    small += ["model.n_layers=1", "model.sample_tokens=0", "trainer.max_epochs=2"]
    command = [sys.executable, "-m", "recipes.proofs.device_counts", "--out", str(tmp_path), "--tolerance", "1e-4"]
    command += ["--devices", "1", "2", "1", "--workers", "0", "1", "2", "--", *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert re.search(r"All \d+ steps have the same samples, each once.", done.stdout)
    assert re.search(r"part-2: 2 device\(s\), 1 worker\(s\), steps \d+-\d+", done.stdout)
    assert (tmp_path / "device_counts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.distributed
def test_an_accuracy_is_the_same_on_one_two_and_three_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert exact_evaluation.main([]) == 0
    printed = capsys.readouterr().out
    assert "The accuracies are equal to the last digit." in printed
    rows = [line.split() for line in printed.splitlines()[1:4]]
    assert {tuple(row[1:5]) for row in rows} == {("94", "of", "103", "0.912621359223301")}
    assert len({row[5] for row in rows}) == 3  # the mean of the processes' accuracies


@pytest.mark.slow
def test_packed_rows_and_blocks_are_compared_after_as_many_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--out", str(tmp_path), "--steps", "3", "--seeds", "1"]
    assert packed_rows.main([*small, "--tolerance", "9"]) == 0
    printed = capsys.readouterr().out
    tokens = [int(one.replace(",", "")) for one in re.findall(r"seed \d, .*: ([\d,]+) tokens", printed)]
    assert len(tokens) == 2
    assert max(tokens) == 3 * 16 * 128
    assert min(tokens) > 0.98 * max(tokens)
    assert packed_rows.main([*small, "--tolerance", "-9"]) == 1
    assert re.search(r"\nblocks +\d\.\d+ \(\d\.\d+ to \d\.\d+\) +\d\.\d+", capsys.readouterr().out)
