"""The file of a run's report: it continues that of an earlier launch, and no other run's page is ever overwritten."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lightning_stream.errors import redact
from lightning_stream.pages import embedded
from lightning_stream.shared_files import Modes, make_folder, publish_bytes
from lightning_stream.trainers.report_page import page_of

NAME = "data_report.html"
FORMAT = 1
_MODES = Modes(0o644, 0o755)  # a report is for others to look at
Row = dict[str, float]
PathLike = str | os.PathLike[str]


def chosen_path(report: bool | PathLike, monitor: bool) -> bool | PathLike:
    """Check what a user has chosen for ``report=``; False where it is left to us and the monitor is off."""
    if isinstance(report, bool):
        return report and monitor
    if not monitor:
        raise ValueError("report= shows what the monitor measures, and monitor=False turns that off: omit one of them")
    return checked_path(report)


def checked_path(path: PathLike) -> Path:
    """The path of a report. Raises ValueError unless it is that of a local file that ends with ``.html``."""
    text = os.fspath(path)
    if "://" in text or not text.endswith(".html"):
        raise ValueError(f"report= takes a local file that ends with .html, e.g. 'run/{NAME}'; found {redact(text)!r}")
    return Path(text).expanduser()


class PageFile:
    """Writes the page of one launch; a failure is reported once, and never stops the run.

    Attributes:
        path: Where the page is; another name than was given where another run writes that one.
    """

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        self.path, self._say, self._has_failed = path.absolute(), say, False  # a run may change its folder
        self._stamp: tuple[int, int] | None = None  # of the page that this launch wrote or continues

    def former(self, *, continues: bool) -> tuple[dict[str, Any], list[Row]] | None:
        """What an earlier launch kept, and its rows, if this one continues it; else its page gets another name."""
        if not self.path.is_file():
            return None
        found, problem = None, ""
        try:
            values = embedded(self.path.read_text(encoding="utf-8"))
            found = values["kept"], _rows_in(values)
            page_of(found[0], values["columns"])  # all that the next page will need is there
            if found[0]["format"] != FORMAT or not found[0]["interval_s"] > 0:
                raise ValueError(f"format {found[0]['format']!r}")
        except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
            found, problem = None, f"{type(error).__name__}: {error}"
        if found is not None and continues:
            self._stamp = _stamp(self.path)
            return found
        other = _free_name(self.path)
        try:
            self.path.rename(other)
        except OSError as error:
            self._failed(error)
        if problem:
            self._say(f"{self.path} holds no report that can be continued ({problem}); it is now {other}.")
        return None

    def write(self, content: bytes) -> None:
        """Write the page, whole or not at all."""
        try:
            if self.path.exists() and _stamp(self.path) != self._stamp:
                former, self.path = self.path, self._own() or _free_name(self.path)
                self._say(f"Another run writes {former}: the report of this one is {self.path}.")
            make_folder(self.path.parent, _MODES)
            publish_bytes(content, self.path, _MODES, durable=False)
            self._stamp = _stamp(self.path)
        except OSError as error:
            self._failed(error)

    def _own(self) -> Path | None:
        """The page that this launch wrote, if another run has given it another name."""
        others = self.path.parent.glob(f"{glob.escape(self.path.stem)}-*{self.path.suffix}")
        return next((path for path in others if _stamp(path) == self._stamp), None)

    def _failed(self, error: OSError) -> None:
        if not self._has_failed:
            self._say(f"The report {self.path} cannot be written now, and training continues: {error}")
        self._has_failed = True


def _free_name(path: Path) -> Path:
    """The first of ``name-1.html``, ``name-2.html``, ... that does not exist."""
    return next(one for n in count(1) if not (one := path.with_name(f"{path.stem}-{n}{path.suffix}")).exists())


def _rows_in(values: Mapping[str, Any]) -> list[Row]:
    names = [name for name in values["columns"] if not name.startswith("=")]  # the others are computed from these
    if odd := [name for name in names if not all(isinstance(one, (int, float)) for one in values["columns"][name])]:
        raise TypeError(f"the column {odd[0]} holds other values than numbers")
    rows = zip(*(values["columns"][name] for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns
