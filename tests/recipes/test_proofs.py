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

from recipes.proofs import exact_evaluation, local_files
from recipes.proofs.device_counts import Record, Step, compare, read_record


def record(steps: dict[int, tuple[list[int], float]]) -> Record:
    return {number: Step(0, tuple(ids), loss) for number, (ids, loss) in steps.items()}


WHOLE = record({1: ([1, 2], 2.0), 2: ([3, 4], 1.0), 3: ([5, 6], 0.5)})


def test_a_chain_with_the_same_samples_is_exact() -> None:
    found = compare(WHOLE, [record({1: ([1, 2], 2.0)}), record({2: ([3, 4], 1.0 + 1e-6), 3: ([5, 6], 0.5)})])
    assert found.is_exact
    assert found.largest == pytest.approx(1e-6)


def test_lost_repeated_and_swapped_samples_are_found() -> None:
    missing = compare(WHOLE, [record({1: ([1, 2], 2.0)}), record({3: ([5, 6], 0.5)})])
    assert (missing.missing, missing.lost, missing.extra) == ([2], 2, 0)
    swapped = compare(WHOLE, [record({1: ([1, 3], 2.0), 2: ([2, 4], 1.0), 3: ([5, 6], 0.5)})])
    assert (swapped.wrong, swapped.lost, swapped.extra) == ([1, 2], 0, 0)
    twice = compare(WHOLE, [WHOLE, record({3: ([5, 6], 0.5)})])
    assert (twice.repeated, twice.extra) == ([3], 2)
    assert not any(found.is_exact for found in (missing, swapped, twice))


def test_a_record_without_a_ranks_line_is_refused(tmp_path: Path) -> None:
    line = {"step": 1, "epoch": 0, "ids": [2, 1], "loss": 2.0, "ranks": 2}
    (tmp_path / "rank-0.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"step 1 in .* has 1 of 2"):
        read_record(tmp_path)
    (tmp_path / "rank-1.jsonl").write_text(json.dumps({**line, "ids": [3], "loss": 1.0}) + "\n")
    assert read_record(tmp_path) == {1: Step(0, (1, 2, 3), 1.5)}


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
    assert "Samples lost: 0, repeated: 0; steps missing: 0, repeated: 0, with other samples: 0." in done.stdout
    assert re.search(r"part-2: 2 device\(s\), 1 worker\(s\), steps \d+-\d+", done.stdout)
    assert (tmp_path / "device_counts.png").read_bytes().startswith(b"\x89PNG")


def test_training_from_shards_equals_training_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--count", "60", "--size", "32", "--epochs", "2", "--batch", "16", "--workers", "0"]
    assert local_files.main([*tiny, "--out", str(tmp_path)]) == 0
    assert "8 losses: equal bit for bit" in capsys.readouterr().out


def test_other_pixels_make_other_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = local_files.Files.__getitem__

    def darker(files: local_files.Files, index: int) -> dict[str, object]:
        sample = read(files, index)
        return {**sample, "image": sample["image"] * 0.99}

    monkeypatch.setattr(local_files.Files, "__getitem__", darker)
    tiny = ["--count", "40", "--size", "32", "--epochs", "1", "--batch", "16", "--workers", "0"]
    assert local_files.main([*tiny, "--out", str(tmp_path)]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.distributed
def test_an_accuracy_is_the_same_on_one_two_and_three_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert exact_evaluation.main([]) == 0
    printed = capsys.readouterr().out
    assert "The accuracies are equal to the last digit." in printed
    rows = [line.split() for line in printed.splitlines()[1:4]]
    assert {tuple(row[1:5]) for row in rows} == {("94", "of", "103", "0.912621359223301")}
    assert len({row[5] for row in rows}) == 3  # the mean of the processes' accuracies
