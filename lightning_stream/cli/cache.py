"""``cache``: what the caches of this machine hold, and how to make them smaller."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_stream.cache.fetch import verify
from lightning_stream.cache.folder import CONTROL, CacheFolder, cache_root, default_folder
from lightning_stream.cache.space import Space
from lightning_stream.cli.arguments import add_flags, add_store_options
from lightning_stream.cli.output import ExitCode, Facts, Output
from lightning_stream.errors import DigestError, FormatError, redact
from lightning_stream.formats.index import Index
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.questions.describe import readable
from lightning_stream.stores import LocalStore, open_store

EXAMPLES = """examples:
  lightning-stream cache list
  lightning-stream cache check
  lightning-stream cache prune --to 50gb
  lightning-stream cache prune s3://bucket/train --unused-days 7
"""
_DAY_S = 86400
_INDEXES = "index*.json"  # of the newest version, and of those that were asked for


class _Cache:
    """A cache folder of this machine: the URL of its dataset without secrets, its shards, and when one was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        folder = CacheFolder(path)
        self.space = Space(folder)
        self.url = (folder.source() or "").partition(" ")[2]
        self.shards = {entry.names[0]: entry for entry in self.space.entries()}
        self.num_bytes = sum(entry.num_bytes for entry in self.shards.values())
        self.last_used = max(map(self.space.last_used, self.shards.values()), default=0.0)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``cache``."""
    parser.add_argument("action", choices=("list", "check", "prune"), nargs="?", default="list", help="default: list")
    text = "only the cache of this URL, or in this folder"
    parser.add_argument("dataset", metavar="URL|FOLDER", nargs="?", help=text)
    add_flags(parser, {
        "--to BYTES": "prune the least recently read shards until the caches hold at most this, e.g. 50gb",
        "--unused-days F": "prune shards that were not read for so many days",
    })  # fmt: skip
    add_store_options(parser)


def run(options: Namespace, out: Output) -> int:
    """Do what the user asks with the caches that are here."""
    if (options.action == "prune") != (options.to is not None or options.unused_days is not None):
        raise ValueError("prune takes --to BYTES, e.g. --to 50gb or --to 0, or --unused-days N; no other action does")
    caches = [_Cache(path) for path in _folders(options)]
    if options.action == "prune":
        return _prune(caches, options, out)
    return _check(caches, out) if options.action == "check" else _list(caches, out)


def _folders(options: Namespace) -> list[Path]:
    if options.dataset is None:
        return [path.parent for path in sorted(cache_root().glob(f"*/{CONTROL}"))]
    store = open_store(options.dataset, options.store_options)
    is_cache = isinstance(store, LocalStore) and (store.folder / CONTROL).is_dir()
    path = Path(store.url) if is_cache else default_folder(store.identity)
    if not (path / CONTROL).is_dir():
        raise ValueError(f"this machine keeps no cache of {redact(options.dataset)}. See `cache list`")
    return [path]


def _list(caches: list[_Cache], out: Output) -> int:
    rows = []
    for cache in sorted(caches, key=lambda cache: -cache.num_bytes):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(cache.last_used)) if cache.last_used else "never"
        row = {"size_bytes": cache.num_bytes, "shards": len(cache.shards), "last_read": when}
        if cache.shards or cache.url:  # a path without a dataset leaves an empty folder
            rows.append({**row, "url": cache.url or "unknown", "folder": str(cache.path)})
    out.table("caches", rows)
    out.data["size_bytes"] = sum(cache.num_bytes for cache in caches)
    out.line(f"{readable(out.data['size_bytes'])} in {len(rows):,} caches below {cache_root()}")
    return ExitCode.OK


def _check(caches: list[_Cache], out: Output) -> int:
    """Compare the shards with the hashes of their index; a damaged one is deleted, so that it is fetched again."""
    damaged: list[Facts] = []
    num_shards = 0
    for cache in caches:
        indexes = map(Index.from_file, cache.path.glob(_INDEXES))
        entries = {entry.raw.basename: entry for index in indexes for entry in index}
        for name in [name for name in entries if name in cache.shards]:
            num_shards += 1
            out.progress(f"{num_shards:,} shards")
            try:
                for raw, _ in entries[name].files:
                    verify(cache.path / raw.basename, raw, None, str(cache.path / raw.basename))
            except (DigestError, FormatError) as error:
                is_deleted = cache.space.remove(cache.shards[name])
                damaged.append({"url": cache.url, "error": str(error), "deleted": is_deleted})
                out.line(f"{error} {'It is deleted.' if is_deleted else 'It is in use.'}")
    out.data = {"shards": num_shards, "damaged": damaged}
    verdict = f"DAMAGED ({len(damaged):,} shards)" if damaged else "OK"
    out.line(f"{verdict}: {num_shards:,} shards in {len(caches):,} caches")
    return ExitCode.NO if damaged else ExitCode.OK


def _prune(caches: list[_Cache], options: Namespace, out: Output) -> int:
    since = None if options.unused_days is None else time.time() - options.unused_days * _DAY_S
    target = 0 if options.to is None else parse_bytes(options.to, "--to")
    deleted = 0
    total = sum(cache.num_bytes for cache in caches)
    for cache in sorted(caches, key=lambda cache: cache.last_used):
        others = total - cache.num_bytes
        freed, left = cache.space.prune(max(0, target - others), since)
        deleted = deleted + freed
        total = others + left
    out.data = {"deleted_bytes": deleted, "left_bytes": total}
    in_use = f"; more than {options.to}, since the others are in use" if since is None and total > target else ""
    out.line(f"{readable(deleted)} deleted, {readable(total)} left{in_use}")
    return ExitCode.OK
