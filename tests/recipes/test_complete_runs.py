"""The complete runs in recipes/ do what they say, on data small enough for a test."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def test_the_maps_name_every_file_and_no_other() -> None:
    import lightning_stream.recipes as package

    folder = Path(str(package.__file__)).parent
    named = set(re.findall(r"`(\w+)[`.]", str(package.__doc__)))
    there = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
    assert {name for name in there if not name.startswith("_")} <= named
    listed = set(re.findall(r"`(\w+\.(?:py|ipynb))`", (RECIPES / "README.md").read_text()))
    assert listed == {path.name for path in RECIPES.iterdir() if path.suffix in (".py", ".ipynb")}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_training_from_shards_equals_training_from_local_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load("local_files")
    monkeypatch.setattr(recipe.torch, "use_deterministic_algorithms", lambda _: None)  # it would outlive this test
    tiny = ["--drawn", "60", "--size", "32", "--epochs", "2", "--batch", "16", "--workers", "0"]
    assert recipe.main([*tiny, "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "6 losses and 2 accuracies: equal bit for bit" in told
    with Image.open(tmp_path / "losses.png") as picture:
        assert picture.size[0] > 600


@pytest.mark.slow
def test_other_pixels_make_other_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load("local_files")
    monkeypatch.setattr(recipe.torch, "use_deterministic_algorithms", lambda _: None)
    monkeypatch.setattr(recipe, "seed_sample", lambda *_: None)  # the files' augmentation is left to chance
    tiny = ["--drawn", "60", "--size", "32", "--epochs", "1", "--batch", "16", "--workers", "0"]
    assert recipe.main([*tiny, "--out", str(tmp_path)]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.distributed
def test_an_accuracy_is_the_same_on_one_two_and_three_processes() -> None:
    script = RECIPES / "exact_evaluation.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "The accuracies are the same to the last digit." in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()[1:4]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert {tuple(row[1:4]) for row in rows} == {("88", "of", "103")}
    assert len({row[4] for row in rows}) == 1  # counted exactly
    assert len({row[5] for row in rows}) == 3  # a mean of means
