"""The fingerprint of a DataFrame's plan and sources, and the order of its rows."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, TextIO
from urllib.parse import unquote, urlparse
from weakref import WeakKeyDictionary

from lightning_stream.fingerprint import function_text
from lightning_stream.spark.schema import kind_of

# Settings that decide how rows fall into partitions.
_SETTINGS = (
    "spark.sql.files.maxPartitionBytes", "spark.sql.files.openCostInBytes", "spark.sql.files.minPartitionNum",
    "spark.sql.shuffle.partitions", "spark.sql.adaptive.enabled", "spark.sql.adaptive.coalescePartitions.enabled",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes", "spark.sql.session.timeZone", "spark.default.parallelism",
    "spark.master",
)  # fmt: skip
# Values that only differ between two sessions: ids of expressions, plans and objects.
_PASSING = re.compile(r"#\d+L?|\[?plan_id=\d+\]?|@[0-9a-f]{4,}|\[id=#?\d+\]|RelationV2\[[^]]*\]")
# A node of a physical plan that reads rows. Only rows of files can be found again: their files have a size and a time.
_SCAN = re.compile(r"^[ :+*()\d-]*(\w*)Scan\b", re.MULTILINE)
_FILE_SCANS = ("File", "Photon")
_GLOB = re.compile(r"([\\{}\[\]*?,^])")
_BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_OWN_KEYS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of DataFrames whose rows nobody can find again


def ordered(dataframe: Any, order_by: Sequence[str] | str | None, shuffle_seed: int | None) -> Any:
    """Sort all rows by columns, or mix them by a hash of their values and a seed: the same mixture on every run."""
    if order_by is not None:
        return dataframe.orderBy(*([order_by] if isinstance(order_by, str) else order_by))
    if shuffle_seed is None:
        return dataframe
    from pyspark.sql import functions

    hashable = [quoted(field.name) for field in dataframe.schema.fields if "map<" not in field.dataType.simpleString()]
    key = functions.xxhash64(functions.lit(shuffle_seed), *map(functions.col, hashable))
    return dataframe.repartition(key).sortWithinPartitions(key)


def selected(dataframe: Any, columns: Sequence[str]) -> Any:
    """Only these columns, ML vectors as arrays."""
    from pyspark.sql import functions

    vectors = {field.name for field in dataframe.schema.fields if kind_of(field.dataType) == "VectorUDT"}
    if vectors.isdisjoint(columns) and list(columns) == list(dataframe.columns):
        return dataframe
    chosen = {name: functions.col(quoted(name)) for name in columns}
    for name in vectors.intersection(columns):
        from pyspark.ml.functions import vector_to_array

        chosen[name] = vector_to_array(chosen[name]).alias(name)
    return dataframe.select(*chosen.values())


def plan_text(dataframe: Any) -> str:
    """The plan as Spark explains it, without what differs from session to session."""
    with redirect_stdout(_OfThread(sys.stdout)) as out:
        dataframe.explain("extended")
    return _PASSING.sub("", out.text.getvalue())


class _OfThread(io.TextIOBase):
    """Takes what this thread prints; what others print meanwhile goes to where it was printed before."""

    def __init__(self, others: TextIO) -> None:
        self.text = io.StringIO()
        self._others = others
        self._thread = get_ident()

    def write(self, text: str) -> int:
        return (self.text if get_ident() == self._thread else self._others).write(text)


def fingerprint(dataframe: Any, settings: Mapping[str, Any], udf: Callable[..., Any] | None = None) -> str:
    """Hex digest of a conversion: the plan, its source files, how it is partitioned, and how it is written.

    Equal in another session if all rows come from files that have not changed since; rows from elsewhere (made in a
    session, of a database, of a data source) are of this DataFrame only.
    """
    text = plan_text(dataframe)
    session = dataframe.sparkSession
    stamps = _stamps(session, sorted(dataframe.inputFiles()))
    content = {
        "plan": text,
        "semantic": _asked(dataframe.semanticHash, 0),
        "sources": stamps,
        "settings": settings,
        "spark": {name: _asked(partial(session.conf.get, name, None), None) for name in _SETTINGS},
        "udf": function_text(udf),
    }
    if stamps is None or not set(_SCAN.findall(text)) <= set(_FILE_SCANS):
        content["only"] = _OWN_KEYS.setdefault(dataframe, uuid.uuid4().hex)
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


@contextmanager
def small_batches(session: Any, rows: int | None) -> Iterator[None]:
    """Use Arrow batches of fewer rows, if the session has the default of 10,000."""
    before = session.conf.get(_BATCH_ROWS)
    if rows is None or before != "10000":
        yield
        return
    session.conf.set(_BATCH_ROWS, str(rows))
    try:
        yield
    finally:
        session.conf.set(_BATCH_ROWS, before)


def _asked(question: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return question()
    except Exception:  # noqa: BLE001 - Spark Connect has no context, refuses some names, and raises errors of its own
        return otherwise


def local_path(url: str) -> Path | None:
    """The path of a source file; None if it is in no file system of the machine."""
    parts = urlparse(url)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


def _stamps(session: Any, urls: Sequence[str]) -> list[tuple[str, int, int]] | None:
    """The source files with size and time of change; None if Spark cannot tell these of files elsewhere."""
    stamps = []
    elsewhere = []
    for url in urls:
        path = local_path(url)
        if path is None or not path.exists():
            elsewhere.append(url)
            continue
        known = path.stat()
        stamps.append((url, known.st_size, known.st_mtime_ns))
    if elsewhere:
        rows = _asked(partial(_listed, session, elsewhere), [])
        if len(rows) != len(elsewhere):
            return None
        stamps += sorted(map(tuple, rows))
    return stamps


def _listed(session: Any, urls: Sequence[str]) -> list[Any]:
    """Path, size and time of change of files, as Spark's own listing has them; their content is not read."""
    files = session.read.format("binaryFile").load([_GLOB.sub(r"\\\1", unquote(url)) for url in urls])
    return list(files.selectExpr("path", "length", "unix_micros(modificationTime)").collect())


def quoted(name: str) -> str:
    """A column's name as Spark parses it: dots and spaces belong to the name."""
    return "`" + name.replace("`", "``") + "`"
