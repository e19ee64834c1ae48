"""The command line ``lightning-stream COMMAND``; docs/cli.md shows every command with its output.

A command is a module of this folder with ``add_arguments(parser)`` and ``run(options, out)``, which returns an exit
code; its name in `_COMMANDS` registers it. Modules are imported within `main`, so that Ctrl-C prints one line from the
first moment on; what needs torch or another extra is imported in ``run``.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import lightning_stream
from lightning_stream.cli.output import EXIT_CODES, ExitCode, Output
from lightning_stream.errors import LightningStreamError, MissingExtraError, redact

_COMMANDS = {
    "convert": "convert Parquet, CSV, image folders, shards and others to MDS shards; or add lengths to a dataset",
    "show": "show what a dataset holds: sizes, columns, samples, statistics, a page",
    "check": "check every file of a dataset, and with --decode every sample",
    "pull": "download a dataset, verified; the same command again continues",
    "cache": "list, check or prune the shards that this machine keeps",
    "log": "list the versions of a dataset, or merge its partitions",
    "position": "show where a training run is in its data and which samples come, or compare two runs",
    "plan": "plan a training run: downloads, price, cache and shuffle, and what limits its speed",
    "report": "draw the page of a training run from its log",
    "doctor": "check this machine, and with --read measure how fast it reads a dataset",
}
_OLD = {  # what commands of former releases are now
    "reshard": "convert SOURCE OUT",
    "inspect": "show PATH",
    "head": "show PATH --samples 5",
    "preview": "show PATH --page preview.html",
    "stats": "show PATH --stats",
    "verify": "check PATH",
    "lint": "check PATH --decode",
    "merge": "log PATH --merge",
    "lengths": "convert PATH --lengths COLUMN",
    "explain": "position RUN --next 1",
    "checkpoint": "position RUN",
    "diff": "position RUN OTHER_RUN",
    "simulate": "plan PATH --global-batch-size N",
    "bench": "doctor PATH --read",
    "cache verify": "cache check",
    "cache path": "cache list",
}
_ELSEWHERE = {
    "checkpoint convert": "a position is moved in Python: start_at(read_position(RUN), data) serves any trainer",
    "train": "training recipes live in the repository, not in the package; there, run: python train.py +data=flowers",
    "completion": "shtab makes it: pip install shtab; shtab --shell bash lightning_stream.cli.build_parser",
}


class _UsageError(Exception):
    """The arguments are wrong."""


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but an error is that of the command, and without the values of unknown flags."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            meant = _did_you_mean(flags[0], options.parser.flags()) if flags else ""
            options.parser.error(f"unrecognized arguments: {' '.join(flags) or redact(' '.join(unknown))}{meant}")
        return options

    def flags(self) -> list[str]:
        """The flags of this command."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}{'' if message.endswith(('.', '?')) else '.'} See: {self.prog} --help")


def main(arguments: Sequence[str] | None = None, prog: str = "lightning-stream") -> int:
    """Run a command and return its exit code.

    Example: ``main(["show", "s3://bucket/train", "--json"])``.

    Args:
        arguments: The command and its arguments; None for those of this process.
        prog: The program's name in help and messages.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal may know fewer characters than the data
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    out = Output(as_json="--json" in words)
    try:
        try:
            code = _run(words, prog, out)
        except KeyboardInterrupt:
            code = out.error("interrupted", ExitCode.INTERRUPTED)
        out.close()
        return code
    except OSError as error:
        # The interpreter flushes stdout once more at its exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PIPE_CLOSED if isinstance(error, BrokenPipeError) else out.error(f"the output: {error}")


def _run(words: list[str], prog: str, out: Output) -> int:
    try:
        if not words:
            build_parser(prog).print_help(sys.stderr)
            return ExitCode.WRONG_USE
        _refuse_unknown_command(words, prog)
        options = build_parser(prog, [words[0]] if words[0] in _COMMANDS else _COMMANDS).parse_args(words)
        return int(options.run(options, out))
    except (_UsageError, MissingExtraError) as error:
        dashed = [word for word in words if word.startswith("-") and Path(word).exists()]
        return out.error(". ".join([str(error), *(f"Pass the path {word} as ./{word}" for word in dashed)]))
    except BrokenPipeError:
        raise
    except OSError as error:
        is_named = error.filename and error.strerror
        return out.error(f"{error.filename}: {error.strerror}. Check the path" if is_named else str(error))
    except (LightningStreamError, ValueError) as error:
        return out.error(str(error))


def _refuse_unknown_command(words: list[str], prog: str) -> None:
    name = words[0]
    for old in (" ".join(words[:2]), name):
        if old in _ELSEWHERE:
            raise _UsageError(_ELSEWHERE[old])
        if old in _OLD:
            raise _UsageError(f"`{old}` is now `{prog} {_OLD[old]}`")
    if name not in _COMMANDS and not name.startswith("-"):
        raise _UsageError(f"there is no command {name!r}{_did_you_mean(name, _COMMANDS)} See: {prog} --help")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, list(known), 1)
    return f". Did you mean {near[0]}?" if near else "."


def build_parser(prog: str = "lightning-stream", names: Iterable[str] = tuple(_COMMANDS)) -> argparse.ArgumentParser:
    """Build the parser of all commands, or of some."""
    parser = _Parser(
        prog,
        description="Convert, look at, check and download datasets; plan a training run, and ask where one is.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning-stream {lightning_stream.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in names:
        module = import_module(f"lightning_stream.cli.{name}")
        text = _COMMANDS[name]
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=getattr(module, "EXAMPLES", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        command.set_defaults(run=module.run, parser=command)
    return parser
