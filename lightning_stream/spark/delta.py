"""The version of a Delta table that a DataFrame reads, from the table's own log.

The log is read as its protocol defines it: ``_delta_log/<version>.json`` holds a version's actions, one to a line;
``add`` and ``remove`` name files. A log that begins with a checkpoint is not read: the manifest then has no version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from lightning_stream.spark.plan import local_path

_LOG = "_delta_log"


def delta_versions(files: Sequence[str]) -> dict[str, int]:
    """The version that is read, by table; tables that this machine cannot see are omitted.

    It is the newest one whose files are those that are read, or else (a filter may skip some) the newest one
    that has all of them.

    Args:
        files: Source files, as a DataFrame's ``inputFiles`` returns them.
    """
    by_table: dict[Path, set[Path]] = {}
    for path in filter(None, map(local_path, files)):
        for table in [folder for folder in path.parents if (folder / _LOG).is_dir()][:1]:
            by_table.setdefault(table, set()).add(path)
    found = {}
    for table, read in by_table.items():
        if holding := [(active == read, version) for version, active in _versions(table) if read <= active]:
            found[f"file://{table}"] = max(holding)[1]
    return found


def _versions(table: Path) -> Iterator[tuple[int, set[Path]]]:
    """Each version with its files, from the first on; ends where the log has a gap."""
    active: set[Path] = set()
    version = 0
    while (log := table / _LOG / f"{version:020}.json").is_file():
        for action in (json.loads(line) for line in log.read_text().splitlines() if line.strip()):
            if "add" in action:
                active.add(table / unquote(action["add"]["path"]))
            elif "remove" in action:
                active.discard(table / unquote(action["remove"]["path"]))
        yield version, active
        version += 1
