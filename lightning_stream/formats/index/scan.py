"""One pass over the text of an index, shard by shard: memory stays that of the text and a few numbers a shard."""

from __future__ import annotations

import json
from array import array
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.formats.index.schema import FORMATS, SEPARATORS, FileEntry, Schema, ShardEntry, check_basename

_WINDOW = 1 << 20
_FIELDS = 6  # begin, end, samples, raw bytes, stored bytes, schema
_MAX_SAMPLES = 1 << 48
_DECODER = json.JSONDecoder()


class IndexScan:
    """What one pass finds: ``data`` (ASCII), ``schemas``, ``digest``, and per shard the numbers of `array`."""

    def __init__(self, data: bytes, where: str) -> None:
        self.where = where
        self.data = data if data.isascii() else self._escaped(data)
        self.schemas: list[Schema] = []
        self._schema_ids: dict[Any, int] = {}
        self._numbers = array("q")
        self._digest = blake2b(b"lightning-stream index 1", digest_size=32)
        self._text, self._text_at, self._at = "", 0, 0
        self._told: dict[str, int] = {}  # what was said of a file, by its name
        self._scan()
        self._told.clear()
        self.digest = self._digest.hexdigest()

    def array(self, begin: int, end: int) -> NDArray[np.int64]:
        """Fields begin to end of every shard: int64[num_shards, end - begin]."""
        numbers: NDArray[np.int64] = np.frombuffer(self._numbers, np.int64).reshape(-1, _FIELDS)[:, begin:end].copy()
        return numbers

    def _escaped(self, data: bytes) -> bytes:
        try:
            return json.dumps(json.loads(data)).encode()
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self.where}: an index must be JSON text ({error}). Fetch it again.") from error

    def _scan(self) -> None:
        version: object = None
        has_shards = False
        self._expect("{")
        while self._peek() != "}":
            key = self._value()
            self._expect(":")
            if key == "shards" and not has_shards:
                has_shards = True
                self._shards()
            elif key == "version":
                version = self._value()
            else:
                self._value()
            if self._peek() == ",":
                self._expect(",")
        if version != 2 or isinstance(version, bool) or not has_shards:
            raise FormatError(
                f"{self.where}: an index must have the keys 'shards' and 'version', and be of version 2; "
                f"found version {version!r}."
            )

    def _shards(self) -> None:
        self._expect("[")
        number = 0
        while self._peek() != "]":
            begin = self._at
            value = self._value()
            self._take(value, number, begin)
            number += 1
            if self._peek() == ",":
                self._expect(",")
        self._expect("]")

    def _take(self, value: Any, number: int, begin: int) -> None:
        try:
            key = schema_key(value)
            schema_id = self._schema_ids.get(key)
            if schema_id is None:
                schema_id = self._schema_ids[key] = len(self.schemas)
                self.schemas.append(parse_schema(value, self.where))
                self._digest.update(repr(key[:4]).encode())
            samples = value["samples"]
            raw, stored, named = _sizes(value, self.schemas[schema_id].compression, self.where)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _bad_entry(self.where, number, error) from error
        told = hash((samples, named))
        name = value["raw_data"]["basename"]
        if self._told.setdefault(name, told) != told:
            raise FormatError(
                f"{self.where}, shard {number}: {name} is another shard's file too, with other samples or bytes. Name "
                "files by the folders they are in, as merge_index does."
            )
        if type(samples) is not int or not 0 <= samples < _MAX_SAMPLES:
            raise FormatError(f"{self.where}, shard {number}: 'samples' must be a count; found {samples!r}.")
        self._digest.update(f"{schema_id} {samples} {named}\n".encode())
        self._numbers.extend((begin, self._at, samples, raw, stored, schema_id))

    # The cursor: `_at` counts bytes of the data; `_text` is the window of it that begins at `_text_at`.

    def _value(self) -> Any:
        self._peek()
        window = _WINDOW
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at - self._text_at)
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError) or self._text_at + len(self._text) >= len(self.data):
                    raise FormatError(
                        f"{self.where}: an index must be JSON text; near byte {self._at}: {error}. Fetch it again."
                    ) from error
            else:
                # A number at the window's end may go on behind it.
                if end < len(self._text) or self._text_at + end >= len(self.data):
                    self._at = self._text_at + end
                    return value
            window *= 2
            self._fill(window)

    def _fill(self, window: int) -> None:
        self._text = self.data[self._at : self._at + window].decode("ascii")
        self._text_at = self._at

    def _peek(self) -> str:
        while True:
            if self._at - self._text_at >= len(self._text):
                self._fill(_WINDOW)
            if not self._text:
                raise FormatError(f"{self.where}: the index ends early, after {len(self.data)} bytes. Fetch it again.")
            character = self._text[self._at - self._text_at]
            if character not in " \t\r\n":
                return character
            self._at += 1

    def _expect(self, character: str) -> None:
        found = self._peek()
        if found != character:
            raise FormatError(
                f"{self.where}: an index must be a JSON object; at byte {self._at} found {found!r} "
                f"in place of {character!r}. Look whether it is another file, or a web page that asks to log in."
            )
        self._at += 1


def _bad_entry(where: str, number: int, error: Exception) -> FormatError:
    kind = f"no {error}" if isinstance(error, KeyError) else str(error)
    return FormatError(f"{where}, shard {number}: not a shard entry of an index of version 2 ({kind}).")


def schema_key(value: Any) -> tuple[Any, ...]:
    """What tells the schemas of two entries apart; the first four tell the samples apart."""
    if value["format"] == "json":
        columns = value["columns"]
        names, encodings = tuple(columns), tuple(columns.values())
    else:
        names, encodings = tuple(value["column_names"]), tuple(value["column_encodings"])
    sizes = tuple(value["column_sizes"]) if value["format"] == "mds" else ()
    about = (value.get("newline"), value.get("separator"), value.get("size_limit"), tuple(value["hashes"]))
    return (value["format"], names, encodings, sizes, value["compression"], about)


def parse_schema(value: Any, where: str) -> Schema:
    """The schema of one entry.

    Raises:
        FormatError: A format we do not know, or columns that do not fit together.
    """
    form, names, encodings, sizes, compression, (newline, separator, size_limit, hashes) = schema_key(value)
    if form not in FORMATS or value["version"] != 2:
        raise FormatError(f"{where}: shards must be of a format among {FORMATS}, version 2; found {form!r}.")
    sizes = sizes if form == "mds" else (None,) * len(names)
    texts = (*names, *encodings, *hashes, *([] if compression is None else [compression]))
    if not all(type(text) is str for text in texts):
        raise FormatError(f"{where}: names of columns, encodings, hashes and compression must be text.")
    numbers = [size for size in (*sizes, size_limit) if size is not None]
    if not len(names) == len(encodings) == len(sizes) or any(type(n) is not int or n < 0 for n in numbers):
        raise FormatError(f"{where}: columns must have a name, an encoding and a size (or null) each; found {sizes!r}.")
    if len(set(names)) != len(names):
        raise FormatError(f"{where}: column names must differ; found {names!r}.")
    if form != "mds" and not (isinstance(newline, str) and newline):
        raise FormatError(f"{where}: row formats must have a newline; found {newline!r}.")
    separator = SEPARATORS.get(form, separator) if form != "json" else None
    if form == "xsv" and not (isinstance(separator, str) and separator):
        raise FormatError(f"{where}: xsv must have a separator; found {separator!r}.")
    return Schema(form, names, encodings, sizes, compression, hashes, size_limit, newline, separator)


def parse_entry(value: Any, where: str, schema: Schema) -> ShardEntry:
    """One shard's entry as a frozen value.

    Raises:
        FormatError: A field is missing or of the wrong kind.
    """
    try:
        files = [_file(value[key], where) if value.get(key) is not None else None for key in _file_keys(schema.format)]
    except (KeyError, TypeError, AttributeError) as error:
        raise _bad_entry(where, 0, error) from error
    raw = files[0]
    if raw is None:
        raise FormatError(f"{where}: must have 'raw_data'.")
    return ShardEntry(schema, value["samples"], raw, *files[1:])


def _file_keys(form: str) -> tuple[str, ...]:
    return ("raw_data", "zip_data") if form == "mds" else ("raw_data", "zip_data", "raw_meta", "zip_meta")


def _file(value: Any, where: str) -> FileEntry:
    return FileEntry(check_basename(value["basename"], where), value["bytes"], dict(value["hashes"]))


def _sizes(value: Any, compression: str | None, where: str) -> tuple[int, int, str]:
    """Bytes of the shard's files raw and as stored, and a text naming the raw files; all checked."""
    raw_total = stored_total = 0
    named = ""
    for part in ("data",) if value["format"] == "mds" else ("data", "meta"):
        raw, packed = value[f"raw_{part}"], value.get(f"zip_{part}")
        if (packed is None) != (compression is None):
            raise ValueError(f"zip_{part} must be null exactly if compression is")
        for file in (raw,) if packed is None else (raw, packed):
            check_basename(file["basename"], where)
            if type(file["bytes"]) is not int or not 0 <= file["bytes"] < 1 << 62:
                raise ValueError(f"'bytes' must be a size, found {file['bytes']!r}")
            if file["hashes"] and not all(type(text) is str for pair in file["hashes"].items() for text in pair):
                raise ValueError("'hashes' must map names to hex digests")
        raw_total += raw["bytes"]
        stored_total += (raw if packed is None else packed)["bytes"]
        named += f"{raw['basename']} {raw['bytes']} {sorted(raw['hashes'].items())} "
    return raw_total, stored_total, named
