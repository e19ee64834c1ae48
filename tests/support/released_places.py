"""Datasets written over, beside and after others, and a digest of the files that are left. Importable, and a command:

    PYTHONPATH=PACKAGE:tests python tests/support/released_places.py > tests/writer/golden_places.json

That file has the digests of commit 9621097.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from lightning_stream import MDSWriter, merge_index
from lightning_stream.convert import add_lengths, convert
from lightning_stream.writer import CSVWriter, JSONWriter, TSVWriter, XSVWriter

_OF_THE_RUN = re.compile(rb'"(time|writer)":\s*"[^"]*"')  # when a change was made, and by which writer
_WRITERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mds": (MDSWriter, {}),
    "json": (JSONWriter, {}),
    "csv": (CSVWriter, {}),
    "tsv": (TSVWriter, {}),
    "xsv": (XSVWriter, {"separator": "::"}),
}


def _put(out: Any, count: int, kind: str = "mds", first: int = 0, **how: Any) -> None:
    writer_of, options = _WRITERS[kind]
    columns = {"name": "str", "x": "int"}
    with writer_of(out=out, columns=columns, **{"size_limit": 120, **options, **how}) as writer:
        for k in range(first, first + count // 2):
            writer.write({"name": "é" * (k % 4), "x": k})
        rest = range(first + count // 2, first + count)
        writer.write_batch({"name": ["é" * (k % 4) for k in rest], "x": np.array(rest, np.int64)})


def _again(how: dict[str, Any], **first: Any) -> Callable[[Path], None]:
    """A dataset, and another writer there, of another format or with other settings."""

    def write(out: Path) -> None:
        _put(out, 20, **first)
        (out / "notes.txt").write_text("mine")
        _put(out, 14, first=20, **{**first, **how})

    return write


def _pair(*calls: dict[str, Any]) -> Callable[[Path], None]:
    def write(out: Path) -> None:
        for number, call in enumerate(calls):
            _put((out / "local", f"file://{out / 'remote'}"), 12, first=12 * number, **call)

    return write


def _only_one_of_a_pair(place: str) -> Callable[[Path], None]:
    def write(out: Path) -> None:
        _put(out / place, 12)
        _put((out / "local", f"file://{out / 'remote'}"), 6, keep_local=True, overwrite=True)

    return write


def _merged(names: list[str], *, listed: bool = False, pair: bool = False, **how: Any) -> Callable[[Path], None]:
    def write(out: Path) -> None:
        root = out / "remote" if pair else out
        for number, name in enumerate(names):
            _put(root / name, 8, first=8 * number, **how)
        place: Any = (out / "local", f"file://{root}") if pair else root
        if listed:
            merge_index([f"{'file://' if pair else ''}{root}/{name}/index.json" for name in names[::-1]], place)
        else:
            merge_index(place)
            merge_index(place, False)

    return write


def _converted(**how: Any) -> Callable[[Path], None]:
    def write(out: Path) -> None:
        rows = out.with_name(f"{out.name}.jsonl")
        rows.write_text("".join(json.dumps({"text": "é" * (k % 5), "x": k}) + "\n" for k in range(300)))
        options: dict[str, Any] = {"num_workers": 1, "compression": None, "size_limit": 700, "partition_bytes": 1500}
        if "val_fraction" not in how:
            convert(rows, out, **options)
        convert(rows, out, **options, overwrite=True, **how)

    return write


def _with_lengths(out: Path) -> None:
    lengths = {"name": len, "both": _of_both}
    _put(out, 20, lengths=lengths)
    _put(out, 9, first=20, append=True, lengths=lengths)
    _put(out, 0, append=True, lengths=lengths)
    add_lengths(out, {"x": _of_x}, num_workers=1)
    add_lengths(out, {"name": len}, num_workers=1, overwrite=True)


def _replaced(out: Path) -> None:
    _put(out, 5, overwrite=True)


def _one_after_another(*writes: Callable[[Path], None]) -> Callable[[Path], None]:
    def write(out: Path) -> None:
        for each in writes:
            each(out)

    return write


def _of_both(sample: dict[str, Any]) -> int:
    return len(sample["name"]) + int(sample["x"])


def _of_x(x: int) -> int:
    return x % 7


_HOW: list[dict[str, Any]] = [
    {"compression": codec, "hashes": hashes, "size_limit": limit, "max_workers": workers}
    for codec, hashes, (limit, workers) in itertools.product(
        (None, "zstd:3", "gz"), (None, [], ["sha1", "md5"]), ((90, 0), (None, 2))
    )
]
PLACES: dict[str, Callable[[Path], None]] = {
    **{
        f"{kind} {number}": _again({"overwrite": True}, kind=kind, **how)
        for kind in _WRITERS
        for number, how in enumerate(_HOW)
    },
    **{f"append {kind}": _again({"append": True, "message": "ö"}, kind=kind) for kind in _WRITERS},
    "append with a key": _again({"append": True, "key": "k-1", "compression": "zstd"}),
    "exist_ok": _again({"exist_ok": True, "kind": "json"}),
    "lengths over none": _again({"overwrite": True, "lengths": {"name": len}}),
    "none over lengths": _one_after_another(_with_lengths, _replaced),
    "lengths": _with_lengths,
    "pair": _pair({}),
    "pair, kept": _pair({"keep_local": True}),
    "pair, kept, twice": _pair({"keep_local": True}, {"keep_local": True, "overwrite": True}),
    "pair, appended": _pair({"keep_local": True}, {"keep_local": True, "append": True}, {"append": True, "key": "a"}),
    "pair of which the folder has a dataset": _only_one_of_a_pair("local"),
    "pair of which the store has a dataset": _only_one_of_a_pair("remote"),
    "merged": _merged(["part2", "part10", "a/b/part1", "a/b/part1/below"]),
    "merged list": _merged(["p/q", "part0"], listed=True, compression="zstd"),
    "merged pair": _merged(["part0", "part1"], pair=True, lengths={"name": len}),
    "merged list of a pair": _merged(["part0", "part1"], listed=True, pair=True),
    "converted": _converted(),
    "converted with a split": _converted(val_fraction=0.25, shuffle=True),
    "converted with lengths": _converted(lengths={"text": len}),
    "converted, then written": _one_after_another(_converted(), _replaced),
}  # fmt: skip


def digest_at(name: str, folder: Path) -> str:
    """Write at a place; return a digest of all files there. The random bytes in their names are zeros."""
    digits = mock.patch("secrets.token_hex", lambda count: os.urandom(count).hex())  # which uses the other one
    with digits, mock.patch("secrets.token_bytes", bytes):
        PLACES[name](folder)
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        file = path.relative_to(folder).as_posix()
        if not path.name.startswith("."):
            found.update(f"{file} ".encode() + _OF_THE_RUN.sub(b"", _portable(path)))
    return found.hexdigest()[:16]


def _portable(path: Path) -> bytes:
    """The bytes of a file; of a manifest, without what tells about the machine and the time."""
    if path.name != "manifest.json":
        return path.read_bytes()
    manifest = json.loads(path.read_text())
    kept = ("columns", "num_samples", "num_bytes", "num_shards", "index", "keeps_order", "partitions", "version")
    return json.dumps({name: manifest[name] for name in kept}).encode()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        digests = {name: digest_at(name, Path(scratch) / str(k)) for k, name in enumerate(PLACES)}
    sys.stdout.write(json.dumps(digests, indent=0) + "\n")
