"""What a dataset came from: its files with sizes and digests, and whether they are still the same."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lightning_stream.convert.files import SourceFile, stamps_digest
from lightning_stream.convert.sources.choose import Source
from lightning_stream.errors import FormatError

if TYPE_CHECKING:
    from typing_extensions import Self

_LISTED_FILES = 10_000


class Digests:
    """Digests of a source's local files, made in a thread while it is converted. Use as a context.

    Args:
        source: The files; of those in stores the version is known. None are made where there are over 10,000.
    """

    def __init__(self, source: Source) -> None:
        local = [file for file in source.files if file.path is not None and source.reader.kind != "inputs"]
        self._files = local if len(local) <= _LISTED_FILES else []
        self._found: dict[str, str] = {}
        self._failure: OSError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._make, name="source-digests", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def wait(self) -> Mapping[str, str]:
        """All of them, by the file's place.

        Raises:
            FormatError: A file cannot be read any more.
        """
        self._thread.join()
        if self._failure is not None:
            raise FormatError(f"a source must stay while it is converted: {self._failure}.") from self._failure
        return self._found

    def _make(self) -> None:
        try:
            for file in self._files:
                if self._over.is_set():
                    return
                self._found[file.place] = file.digest()
        except OSError as error:
            self._failure = error


def noted_source(source: Source) -> dict[str, Any]:
    """What tells this source from others: part of a conversion's fingerprint."""
    return {
        "kind": source.reader.kind,
        "reader": dict(source.reader.settings),
        "num_files": len(source.files),
        "num_bytes": sum(file.num_bytes for file in source.files),
        "stamps": stamps_digest(source.files),
    }


def told_source(source: Source, digests: Mapping[str, str]) -> dict[str, Any]:
    """What a manifest tells of it."""
    told = {**noted_source(source), "place": source.place}
    if len(source.files) <= _LISTED_FILES:
        told["files"] = [_told_file(file, digests.get(file.place)) for file in source.files]
    return told


def _told_file(file: SourceFile, digest: str | None) -> dict[str, Any]:
    told: dict[str, Any] = {"name": file.name, "bytes": file.num_bytes, "stamp": file.stamp}
    return told if digest is None else {**told, "xxh3_128": digest}


def same_content(source: Source, told: Mapping[str, Any]) -> bool:
    """Whether files that were only touched, or copied, are by their digests those that a manifest tells of."""
    before: Sequence[Mapping[str, Any]] = told.get("files", ())
    if [(file["name"], file["bytes"]) for file in before] != [(file.name, file.num_bytes) for file in source.files]:
        return False
    changed = [(file, old) for file, old in zip(source.files, before, strict=True) if file.stamp != old["stamp"]]
    if any(file.path is None or "xxh3_128" not in old for file, old in changed):
        return False
    return all(file.digest() == old["xxh3_128"] for file, old in changed)


def source_difference(source: Source, told: Mapping[str, Any]) -> str:
    """How the source differs from what a manifest tells of; empty if it does not."""
    now = told_source(source, {})
    if told["stamps"] == now["stamps"]:
        return ""
    before = {file["name"]: (file["bytes"], file["stamp"]) for file in told.get("files", ())}
    after = {file["name"]: (file["bytes"], file["stamp"]) for file in now.get("files", ())}
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    names = f"; changed: {', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''}" if changed else ""
    return (
        f"the source had {told['num_files']:,} files of {told['num_bytes']:,} bytes, has {now['num_files']:,} of "
        f"{now['num_bytes']:,}{names}"
    )


def check_unchanged(source: Source) -> None:
    """Raise FormatError if a file of this machine changed since the source was listed."""
    for file in source.files:
        if file.path is None or source.reader.kind == "inputs":
            continue
        try:
            known = file.path.stat()
        except FileNotFoundError as error:
            raise FormatError(f"a source must stay while it is converted; {file.place} is gone.") from error
        if (known.st_size, str(known.st_mtime_ns)) != (file.num_bytes, file.stamp):
            raise FormatError(
                f"a source must stay as it is while it is converted; {file.place} was changed meanwhile. Nothing was "
                "published. Convert again once it is whole."
            )
