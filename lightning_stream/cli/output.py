"""What all commands print with: text or JSON on stdout, errors and progress on stderr, one table of exit codes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from lightning_stream.errors import has_terminal, write_stderr

Facts = dict[str, Any]  # what a command answers, by name, as JSON has it
_WIDTH = 24
_SHOWN = 12
_MOST_DIGITS = 1e15  # a float has no more
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    OK = 0
    NO = 1
    WRONG_USE = 2
    INTERRUPTED = 130
    PIPE_CLOSED = 141


EXIT_CODES = """exit codes:
  0    done; the answer is yes
  1    the answer is no: files are corrupt, or the data is not that of the checkpoint
  2    wrong arguments, input that cannot be read, or a missing package
  130  interrupted with Ctrl-C
  141  the reader of the output closed the pipe, e.g. `| head`"""


class Output:
    """Prints a command's answer: as text while it is found, or as one JSON object at the end.

    Args:
        as_json: Whether to print `data` instead of text.

    Attributes:
        data: The answer as JSON values, which the command fills.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.data: Facts = {}
        self._has_progress = False

    def line(self, text: str) -> None:
        """Print a line of text."""
        self._end_progress()
        if not self.as_json:
            print(_visible(text))

    def lines(self, text: str) -> None:
        """Print lines of text below a title."""
        for line in text.splitlines():
            self.line(f"  {line}")

    def show(self, facts: Mapping[str, Any], indent: str = "  ") -> None:
        """Print names and values, one pair a line; those of a mapping below its name, as they are."""
        for name, value in facts.items():
            is_inner = len(indent) > 2  # names of columns and settings, and numbers that may be ids
            label = name.removesuffix("_bytes") if is_inner else _label(name)
            if isinstance(value, Mapping) and not is_inner:
                self.line(f"{indent}{label}")
                self.show(value, indent * 2)
            else:
                text = as_text(name, value) if is_inner else _cell(name, value)
                self.line(f"{indent + label:<{_WIDTH}} {text}")

    def add(self, group: str, facts: Mapping[str, Any]) -> None:
        """Add one of several answers, and print it: its first value as a title, and the others below."""
        self.data.setdefault(group, []).append(facts)
        (_, title), *others = facts.items()
        self.line(str(title))
        self.show(dict(others))

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows that have the same names, and print them in columns."""
        self.data[name] = rows
        texts = [list(map(_label, rows[0]))] if rows else []
        texts += [[_cell(inner, value) for inner, value in row.items()] for row in rows]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        for cells in texts:
            self.line("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())

    def progress(self, text: str) -> None:
        """Replace the line of progress; only on a terminal."""
        if has_terminal():
            write_stderr(f"\r{_visible(text)}\x1b[K")
            self._has_progress = True

    def error(self, text: str, code: ExitCode = ExitCode.WRONG_USE) -> ExitCode:
        """Print an error as one line on stderr and, under ``--json``, as ``{"error": ...}`` on stdout."""
        self._end_progress()
        self.data = {"error": " ".join(text.split())}
        write_stderr(f"error: {_visible(self.data['error'])}\n")
        return code

    def close(self) -> None:
        """Print the JSON object."""
        self._end_progress()
        if self.as_json:
            print(json.dumps(_finite(self.data), indent=1, allow_nan=False, default=str))
        print(end="", flush=True)  # there may be no stdout

    def _end_progress(self) -> None:
        if self._has_progress:
            write_stderr("\r\x1b[K")
            self._has_progress = False


def _label(name: str) -> str:
    name = f"{name[:-6]}/s" if name.endswith("_per_s") else name.removesuffix("_bytes").removesuffix("_s")
    return name.replace("_", " ")


def _cell(name: str, value: Any) -> str:
    return f"{value:,}" if type(value) is int and not name.endswith("_bytes") else as_text(name, value)


def as_text(name: str, value: Any) -> str:
    """A value on one line; a number with the unit that its name says, and the first items of a long list."""
    if isinstance(value, Mapping):
        return ", ".join(f"{inner} {as_text(inner, part)}" for inner, part in value.items())
    if isinstance(value, list):
        more = [f"... ({len(value):,})"] if len(value) > _SHOWN else []
        return ", ".join([as_text(name, part) for part in value[:_SHOWN]] + more) or "none"
    if isinstance(value, (int, float)) and name.endswith(("_bytes", "_s")):
        from lightning_stream.questions.describe import duration, readable  # not before Ctrl-C is handled

        if not name.endswith("_per_s"):
            return readable(value) if name.endswith("_bytes") else duration(value)
    if isinstance(value, float) and name.endswith(("_share", "_hit")):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e3 <= abs(value) < _MOST_DIGITS else f"{value:.4g}"
    return "none" if value is None else str(value).replace("\n", "\\n").replace("\r", "\\r")


def _visible(text: str) -> str:
    """A text whose control characters, which would act on the terminal, are escaped."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _finite(value: Any) -> Any:
    """A value as JSON has it: None for a number that is not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
