"""What all commands print with: text or JSON on stdout, errors and progress on stderr, one table of exit codes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    OK = 0
    NO = 1
    WRONG_USE = 2
    INTERRUPTED = 130
    PIPE_CLOSED = 141

    @classmethod
    def table(cls) -> str:
        """The exit codes and their meaning, for the help."""
        return "exit codes:\n" + "\n".join(f"  {code.value:<4} {meaning}" for code, meaning in _MEANINGS.items())


_MEANINGS = {
    ExitCode.OK: "done; the answer is yes",
    ExitCode.NO: "the answer is no: files are corrupt, or the dataset is not that of the checkpoint",
    ExitCode.WRONG_USE: "wrong arguments, input that cannot be read, or a missing package",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C",
    ExitCode.PIPE_CLOSED: "the reader of the output closed the pipe, e.g. `| head`",
}


class Output:
    """Prints a command's answer: lines of text as they come, or one JSON object at the end.

    Args:
        as_json: Whether to print ``data`` instead of the lines.

    Attributes:
        data: The answer as JSON values, which the command fills.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.data: dict[str, Any] = {}
        self._progress_shown = False

    def line(self, text: str = "") -> None:
        """Print a line of the answer; nothing under ``--json``."""
        self._clear()
        if not self.as_json:
            print(text)

    def table(self, rows: dict[str, str], indent: int = 2, width: int = 13) -> None:
        """Print names and values, one pair a line."""
        for name, text in rows.items():
            self.line(f"{'':{indent}}{name:<{width}} {text}")

    def progress(self, text: str) -> None:
        """Replace the line of progress; only on a terminal."""
        if sys.stderr.isatty():
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
            self._progress_shown = True

    def error(self, text: str, prefix: str = "error: ") -> ExitCode:
        """Print an error in one line on stderr and, under ``--json``, as ``{"error": ...}`` on stdout."""
        self._clear()
        text = " ".join(text.split())
        print(f"{prefix}{text}", file=sys.stderr)
        self.data = {"error": text}
        return ExitCode.WRONG_USE

    def close(self, code: int) -> None:
        """Print the JSON object, with the exit code."""
        self._clear()
        if self.as_json:
            print(json.dumps({**self.data, "exit_code": int(code)}, indent=1, default=str))
        sys.stdout.flush()

    def _clear(self) -> None:
        if self._progress_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._progress_shown = False


def in_flags(message: str, parser: argparse.ArgumentParser | None) -> str:
    """A message of the library with the names of Python arguments replaced by a command's flags.

    ``pass overwrite=True`` becomes ``pass --overwrite``.
    """
    for action in parser._actions if parser is not None else ():  # noqa: SLF001 - argparse has no public list of flags
        if not action.option_strings:
            continue
        flag = action.option_strings[0]
        for name in sorted({action.dest, flag.strip("-").replace("-", "_")}, key=len):
            message = re.sub(rf"(?<![\w/.-]){name}=True\b", flag, message)
            message = re.sub(rf"(?<![\w/.-]){name}=", f"{flag}=", message)
            if "_" in name:
                message = re.sub(rf"(?<![\w/.-]){name}(?![\w/.])", flag, message)
    return message


def readable(num_bytes: float) -> str:
    """A number of bytes as text, e.g. ``"12.3 MB"``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
