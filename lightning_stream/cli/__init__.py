"""The command line ``lightning-stream COMMAND``; docs/cli.md shows every command with its output.

A command is a module of this folder with ``HELP``, ``add_arguments(parser)`` and ``run(options, out)``, which returns
an exit code; its name in `_COMMANDS` registers it. Modules are imported within `main`, so that Ctrl-C prints one line
from the first moment on; what needs torch or another extra is imported in ``run``.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import lightning_stream
from lightning_stream.cli.output import EXIT_CODES, ExitCode, Output, in_flags
from lightning_stream.errors import LightningStreamError, MissingExtraError, redact

_COMMANDS = (
    "convert", "inspect", "head", "preview", "stats", "verify", "lint", "diff",
    "pull", "cache", "merge", "lengths", "log", "checkpoint", "explain", "report", "bench", "doctor",
)  # fmt: skip
_ALIASES = {"convert": ["reshard"]}
_ELSEWHERE = {
    "train": "training recipes live in the repository, not in the package; there, run: python train.py +data=flowers",
    "completion": "shtab makes it: pip install shtab; shtab --shell bash lightning_stream.cli.build_parser",
}


class _UsageError(Exception):
    """The arguments are wrong."""


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but without the values of unknown flags, which may be secrets."""
        options, unknown = self.parse_known_args(args, namespace)
        flags = [one.partition("=")[0] for one in unknown if one.startswith("-")]
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(flags) or redact(' '.join(unknown))}")
        return options

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message.rstrip('.')}. See: {self.prog} --help")


def main(arguments: Sequence[str] | None = None, prog: str = "lightning-stream") -> int:
    """Run a command and return its exit code.

    Example: ``main(["inspect", "s3://bucket/train", "--json"])``.

    Args:
        arguments: The command and its arguments; None for those of this process.
        prog: The program's name in help and messages.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal may know fewer characters than the data
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    out = Output(as_json="--json" in given)
    try:
        try:
            code = _run(given, prog, out)
        except KeyboardInterrupt:
            code = out.error("interrupted", ExitCode.INTERRUPTED)
        out.close()
        return code
    except OSError as error:
        # The interpreter flushes stdout once more at its exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PIPE_CLOSED if isinstance(error, BrokenPipeError) else out.error(f"the output: {error}")


def _run(given: list[str], prog: str, out: Output) -> int:
    parser: argparse.ArgumentParser | None = None
    try:
        if given and given[0] in _ELSEWHERE:
            raise _UsageError(_ELSEWHERE[given[0]])
        parser = build_parser(prog)
        if not given:
            parser.print_help(sys.stderr)
            return ExitCode.WRONG_USE
        options = parser.parse_args(given)
        parser = options.parser
        return int(options.run(options, out))
    except (_UsageError, MissingExtraError) as error:
        dashed = [one for one in given if one.startswith("-") and Path(one).exists()]
        return out.error(". ".join([str(error), *(f"Pass the path {one} as ./{one}" for one in dashed)]))
    except BrokenPipeError:
        raise
    except OSError as error:
        named = (
            f"{error.filename}: {error.strerror}. Check the path" if error.filename and error.strerror else str(error)
        )
        return out.error(in_flags(named, parser))
    except (LightningStreamError, ValueError) as error:
        return out.error(in_flags(str(error), parser))


def build_parser(prog: str = "lightning-stream") -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = _Parser(
        prog,
        description="Convert, inspect and verify datasets; explain checkpoints; simulate training; check this machine.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning-stream {lightning_stream.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in _COMMANDS:
        module = import_module(f"lightning_stream.cli.{name}")
        command = commands.add_parser(
            name,
            aliases=_ALIASES.get(name, []),
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=getattr(module, "EXAMPLES", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        command.set_defaults(run=module.run, parser=command)
    return parser
