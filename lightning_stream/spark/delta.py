"""The version of a Delta table that a DataFrame reads, from the table's own log.

The log is read as its protocol defines it: ``_delta_log/<version>.json`` holds a version's actions, one to a line;
``add`` and ``remove`` name files. A log that begins with a checkpoint is not read: the manifest then has no version.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlparse

_LOG = "_delta_log"


def delta_versions(files: Sequence[str]) -> dict[str, int]:
    """The version that is read, by table; tables that this machine cannot see are omitted.

    It is the newest one whose files are those that are read, or else (a filter may skip some) the newest one
    that has all of them.

    Args:
        files: Source files, as a DataFrame's ``inputFiles`` returns them.
    """
    by_table: dict[Path, set[Path]] = {}
    for path in map(_local, files):
        table = None if path is None else _table_of(path)
        if path is not None and table is not None:
            by_table.setdefault(table, set()).add(path)
    found = {table: _version(table, read) for table, read in by_table.items()}
    return {f"file://{table}": version for table, version in found.items() if version is not None}


def _local(url: str) -> Path | None:
    parts = urlparse(url)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


def _table_of(path: Path) -> Path | None:
    return next((folder for folder in path.parents if (folder / _LOG).is_dir()), None)


def _version(table: Path, read: set[Path]) -> int | None:
    holding = [(active == read, version) for version, active in _versions(table) if read <= active]
    return max(holding)[1] if holding else None


def _versions(table: Path) -> Iterator[tuple[int, set[Path]]]:
    """Each version with its files, from the first on; ends where the log has a gap."""
    active: set[Path] = set()
    version = 0
    while (log := table / _LOG / f"{version:020}.json").is_file():
        for action in _actions(log.read_text().splitlines()):
            if "add" in action:
                active.add(table / unquote(action["add"]["path"]))
            elif "remove" in action:
                active.discard(table / unquote(action["remove"]["path"]))
        yield version, active
        version += 1


def _actions(lines: Iterable[str]) -> Iterator[dict[str, dict[str, str]]]:
    for line in lines:
        if line.strip():
            yield json.loads(line)
