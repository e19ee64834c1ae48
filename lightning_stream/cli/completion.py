"""``completion``: a script with which a shell completes commands, flags and paths."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import missing_extra

HELP = "print a script that completes commands, flags and paths in a shell"
EXAMPLES = """examples:
  lightning-stream completion bash > ~/.local/share/bash-completion/completions/lightning-stream
  lightning-stream completion zsh > ~/.zfunc/_lightning-stream   # where fpath has ~/.zfunc
"""
_PATHS = ("PATH", "FILE", "FOLDER", "SOURCE", "OUT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``completion``."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")


def run(options: argparse.Namespace, out: Output) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise missing_extra("shtab", "completion", "making a script for a shell") from error
    from lightning_stream.cli import build_parser

    parser = build_parser()
    _complete_paths(parser, shtab.FILE)
    script = shtab.complete(parser, shell=options.shell)
    out.data = {"shell": options.shell, "script": script}
    out.line(script)
    return ExitCode.OK


def _complete_paths(parser: argparse.ArgumentParser, how: Any) -> None:
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of arguments
        if any(word in str(action.metavar or "") for word in _PATHS):
            action.complete = how  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - nor a public name for these
            for inner in action.choices.values():
                _complete_paths(inner, how)
