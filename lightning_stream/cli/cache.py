"""``cache``: what the caches of this machine hold, and how to make them smaller."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_stream.cache.eviction import Evictor
from lightning_stream.cache.fetch import verify
from lightning_stream.cache.folder import CONTROL, CacheFolder, cache_root, default_folder
from lightning_stream.cli.arguments import add_store_options
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import DigestError, FormatError, redact
from lightning_stream.formats.index import Index
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.order.chain import readable
from lightning_stream.stores import LocalStore, open_store

EXAMPLES = """examples:
  lightning-stream cache ls
  lightning-stream cache check
  lightning-stream cache prune --to 50gb
  lightning-stream cache prune s3://bucket/train --unused 7d
"""
_UNKNOWN = "unknown"
_INDEXES = "index*.json"  # of the newest version, and of those that were asked for
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class _Cache:
    """A cache folder of this machine, with the URL of its dataset, without secrets."""

    def __init__(self, path: Path) -> None:
        self.path, folder = path, CacheFolder(path)
        self.evictor = Evictor(folder)
        self.url = (folder.source() or f" {_UNKNOWN}").partition(" ")[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``cache``."""
    parser.add_argument("action", choices=tuple(_ACTIONS), help="what to do")
    parser.add_argument(
        "dataset", metavar="URL|FOLDER", nargs="?", help="only the cache of this URL, or in this folder"
    )
    parser.add_argument("--to", metavar="BYTES", help="prune until the caches hold at most this, e.g. 50gb")
    parser.add_argument(
        "--unused", metavar="TIME", help="prune shards that were not read for this time, e.g. 12h or 7d"
    )
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Do what the user asks with the caches that are here."""
    if options.action != "prune" and (options.to or options.unused):
        raise ValueError("--to and --unused belong to `cache prune`")
    return _ACTIONS[options.action](options, out)


def _caches(options: argparse.Namespace) -> list[_Cache]:
    if options.dataset is not None:
        path = _folder(options)
        if not (path / CONTROL).is_dir():
            raise ValueError(f"this machine keeps no cache of {redact(options.dataset)}. See `cache ls`")
        return [_Cache(path)]
    root = cache_root()
    return [_Cache(path.parent) for path in sorted(root.glob(f"*/{CONTROL}"))] if root.is_dir() else []


def _folder(options: argparse.Namespace) -> Path:
    store = open_store(options.dataset, options.store_options)
    if isinstance(store, LocalStore) and (Path(store.folder) / CONTROL).is_dir():
        return Path(store.folder)
    return default_folder(store.identity)


def _ls(options: argparse.Namespace, out: Output) -> int:
    found: list[dict[str, Any]] = []
    for cache in _caches(options):
        count, held, used = _held(cache)
        if count or cache.url != _UNKNOWN:  # a path without a dataset leaves an empty folder
            found.append({"url": cache.url, "folder": str(cache.path), "shards": count, "bytes": held, "used": used})
    out.data = {"caches": found, "bytes": sum(one["bytes"] for one in found)}
    out.line(f"{'size':>10}  {'shards':>8}  {'last read':16}  dataset")
    for one in sorted(found, key=lambda one: -one["bytes"]):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["used"])) if one["used"] else "never"
        out.line(f"{readable(one['bytes']):>10}  {one['shards']:>8,}  {when:16}  {one['url']}")
    out.line(f"{readable(out.data['bytes']):>10}  in {len(found):,} caches below {cache_root()}")
    return ExitCode.OK


def _check(options: argparse.Namespace, out: Output) -> int:
    """Compare the shards with the hashes of their index; a damaged one is deleted, so that it is fetched again."""
    damaged: list[dict[str, Any]] = []
    num_shards, caches = 0, _caches(options)
    for cache in caches:
        evictor = cache.evictor
        held = {entry.names[0]: entry for entry in evictor.log.entries()}
        indexes = [Index.from_file(path) for path in cache.path.glob(_INDEXES)]
        entries = (index.entry(number) for index in indexes for number in range(index.num_shards))
        for entry in {entry.raw.basename: entry for entry in entries if entry.raw.basename in held}.values():
            num_shards += 1
            out.progress(f"{num_shards:,} shards")
            try:
                for raw, _ in entry.files:
                    verify(cache.path / raw.basename, raw, None, str(cache.path / raw.basename))
            except (DigestError, FormatError) as error:
                is_deleted = evictor.remove(held[entry.raw.basename])
                if is_deleted:
                    evictor.log.forget(entry.raw.basename)
                damaged.append({"url": cache.url, "error": str(error), "deleted": is_deleted})
                out.line(f"{error} {'It is deleted.' if is_deleted else 'It is in use.'}")
    out.data = {"shards": num_shards, "damaged": damaged}
    verdict = f"DAMAGED ({len(damaged):,} shards)" if damaged else "OK"
    out.line(f"{verdict}: {num_shards:,} shards in {len(caches):,} caches")
    return ExitCode.NO if damaged else ExitCode.OK


def _prune(options: argparse.Namespace, out: Output) -> int:
    if options.to is None and options.unused is None:
        raise ValueError("prune needs --to BYTES, e.g. --to 50gb or --to 0, or --unused TIME, e.g. --unused 7d")
    since = None if options.unused is None else time.time() - _seconds(options.unused)
    target = 0 if options.to is None else parse_bytes(options.to, "--to")
    caches = _caches(options)
    held = {cache: _held(cache) for cache in caches}
    deleted, total = 0, sum(num_bytes for _, num_bytes, _ in held.values())
    for cache in sorted(caches, key=lambda cache: held[cache][2]):
        others = total - held[cache][1]
        freed, left = cache.evictor.prune(max(0, target - others), since)
        deleted, total = deleted + freed, others + left
    out.data = {"deleted_bytes": deleted, "left_bytes": total}
    in_use = f"; more than {options.to}, since the others are in use" if since is None and total > target else ""
    out.line(f"{readable(deleted)} deleted, {readable(total)} left{in_use}")
    return ExitCode.OK


def _held(cache: _Cache) -> tuple[int, int, float]:
    """The shards of a cache, their bytes, and when one was last read: 0.0 for never."""
    entries = cache.evictor.log.entries()
    last_used = max(map(cache.evictor.last_used, entries), default=0.0)
    return len(entries), sum(entry.num_bytes for entry in entries), last_used


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text)
    if match is None:
        raise ValueError(f"--unused is a time such as 90s, 30m, 12h, 7d or 2w; found {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


_ACTIONS: dict[str, Callable[[argparse.Namespace, Output], int]] = {
    "ls": _ls,
    "list": _ls,
    "check": _check,
    "prune": _prune,
}
