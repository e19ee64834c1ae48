"""``completion``: what a real bash completes with the script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_stream.cli import main

SHELL = """
source "$1"
shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_TYPE=9; COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p lightning-stream | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" lightning-stream "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    pytest.importorskip("shtab", reason="scripts for shells need shtab: uv sync --extra completion")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here: install it")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    return tmp_path / "script"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["conv"], ["convert"]),
        (["resh"], ["reshard"]),
        (["ver"], ["verify"]),
        (["convert", "a", "b", "--val"], ["--val-fraction"]),
        (["checkpoint", "con"], ["convert"]),
        (["checkpoint", "convert", "--to", "mos"], ["mosaicml-streaming"]),
        (["doctor", "--js"], ["--json"]),
        (["inspect", "some-f"], ["some-folder"]),
    ],
)
def test_bash_completes_commands_flags_values_and_paths(
    bash: Path, tmp_path: Path, words: list[str], expected: list[str]
) -> None:
    (tmp_path / "some-folder").mkdir()
    command = ["bash", "--norc", "-c", SHELL, "bash", str(bash), "lightning-stream", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert [one.strip() for one in done.stdout.split()] == expected, done.stderr


def test_completion_names_the_package_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert main(["completion", "zsh"]) == 2
    assert "lightning-stream[completion]" in capsys.readouterr().err
