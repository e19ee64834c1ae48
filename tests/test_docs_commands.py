"""Every command of the README and of the pages is one that exists, with arguments that it takes."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
from support.pages import PAGES, ROOT, Block, blocks_of

from lightning_stream.cli import build_parser

OTHERS = {"cd", "echo", "export", "git", "head", "mkdocs", "mypy", "pytest", "ruff", "tail"}
HYDRA_FLAGS = {"--cfg": 1, "--resolve": 0, "--help": 0, "-m": 0, "--multirun": 0, "--info": 0}


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command of a block; output is skipped, and so are variables that are set for one command."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    commands = [shlex.split(part, comments=True) for line in lines for part in re.split(r" && | \| ", line)]
    return [words[_variables(words) :] for words in commands if words[_variables(words) :]]


def _variables(words: Sequence[str]) -> int:
    return next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))


def check(words: list[str], scripts: set[str]) -> None:
    """Check a command; one that starts another one is checked with it.

    Raises:
        AssertionError: No such command, file or extra.
        Exception: The command line or Hydra refuses the arguments.
    """
    name, rest = words[0], words[1:]
    if name in ("uv", "srun", "composer", "torchrun") and any(word.endswith(".py") for word in rest):
        script = next(i for i, word in enumerate(rest) if word.endswith(".py"))
        check(["python", *rest[script:]], scripts)
    elif name == "uv":
        tool = next((word for word in rest if word in OTHERS), None)
        assert rest[0] == "sync" or tool, words
    elif name == "pip":
        _check_install(rest)
    elif name == "lightning-stream" or rest[:2] == ["-m", "lightning_stream"]:
        with contextlib.suppress(SystemExit) if rest[-1] in ("--help", "--version") else contextlib.nullcontext():
            build_parser().parse_args(rest if name == "lightning-stream" else rest[2:])
    elif name == "python" and rest[0] == "train.py":
        _check_training(rest[1:])
    elif name in ("python", "bash"):
        assert rest[0] in scripts or (ROOT / rest[0]).is_file() or (rest[0] == "-m" and find_spec(rest[1])), words
    else:
        assert name in OTHERS, words


def _check_install(words: Sequence[str]) -> None:
    """Extras of ours that a page installs must be declared."""
    assert words[0] == "install"
    project = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    declared = set(re.findall(r"^([\w-]+) = ", project, flags=re.MULTILINE))
    for extras in re.findall(r"lightning-stream\[([\w,-]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= declared, extras


def _check_training(words: list[str]) -> None:
    """Hydra composes the config."""
    pytest.importorskip("hydra", reason="uv sync --extra hydra brings Hydra")
    from hydra import compose, initialize_config_dir

    pytest.importorskip("train", reason="train.py needs Lightning: uv sync")

    overrides = []
    is_sweep = "-m" in words or "--multirun" in words
    while words:
        word = words.pop(0)
        if word in HYDRA_FLAGS:
            del words[: HYDRA_FLAGS[word]]
        elif word in ("--config-dir", "-cd"):
            return  # the folder is the reader's own
        else:
            overrides.append(word.split(",")[0] if is_sweep else word)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        compose("train", overrides)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist_and_take_their_arguments(page: str) -> None:
    blocks = blocks_of(page)
    scripts = {block.title for block in blocks if block.title.endswith(".py")} | {"script.py"}
    for block in blocks:
        if block.language in ("bash", "console"):
            for words in commands_of(block):
                check(words, scripts)
