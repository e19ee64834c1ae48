"""The fingerprint of a DataFrame's plan and sources, and the order of its rows."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from lightning_stream.convert.fingerprint import function_text

# Settings that decide how rows fall into partitions.
_SETTINGS = (
    "spark.sql.files.maxPartitionBytes",
    "spark.sql.files.openCostInBytes",
    "spark.sql.files.minPartitionNum",
    "spark.sql.shuffle.partitions",
    "spark.sql.adaptive.enabled",
    "spark.sql.adaptive.coalescePartitions.enabled",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes",
    "spark.sql.session.timeZone",
    "spark.default.parallelism",
    "spark.master",
)
# Values that only differ between two sessions: ids of expressions, plans and objects.
_PASSING = re.compile(r"#\d+L?|\[?plan_id=\d+\]?|@[0-9a-f]{4,}|\[id=#?\d+\]|RelationV2\[[^]]*\]")
# Plans that name their rows only by objects of this session.
_IN_MEMORY = ("LogicalRDD", "ExternalRDD", "ExistingRDD", "LocalRelation", "LocalTableScan", "InMemoryRelation")
_BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def ordered(dataframe: Any, order_by: Sequence[str] | str | None, shuffle_seed: int | None) -> Any:
    """The rows in the order asked for.

    Args:
        dataframe: A Spark DataFrame.
        order_by: Columns to sort all rows by.
        shuffle_seed: Spread rows over partitions, and sort them within, by a hash of their values and this seed: the
            same mixture on every run.
    """
    if order_by is None and shuffle_seed is None:
        return dataframe
    from pyspark.sql import functions

    if order_by is not None:
        return dataframe.orderBy(*([order_by] if isinstance(order_by, str) else order_by))
    hashable = [_quoted(field.name) for field in dataframe.schema.fields if "map<" not in field.dataType.simpleString()]
    key = functions.xxhash64(functions.lit(shuffle_seed), *map(functions.col, hashable))
    return dataframe.repartition(key).sortWithinPartitions(key)


def selected(dataframe: Any, columns: Sequence[str], vectors: Sequence[str]) -> Any:
    """Only these columns, vectors as arrays."""
    from pyspark.sql import functions

    if not vectors and list(columns) == list(dataframe.columns):
        return dataframe
    chosen = []
    for name in columns:
        column = functions.col(_quoted(name))
        if name in vectors:
            from pyspark.ml.functions import vector_to_array

            column = vector_to_array(column).alias(name)
        chosen.append(column)
    return dataframe.select(*chosen)


def plan_text(dataframe: Any) -> str:
    """The plan as Spark explains it, without what differs from session to session."""
    out = io.StringIO()
    with redirect_stdout(out):
        dataframe.explain("extended")
    return _PASSING.sub("", out.getvalue())


def fingerprint(dataframe: Any, settings: Mapping[str, Any], udf: Callable[..., Any] | None = None) -> str:
    """Hex digest of a conversion: the plan, its source files, how it is partitioned, and how it is written.

    Equal in another session if all rows come from files; rows made in a session are of that session only.
    """
    text = plan_text(dataframe)
    try:
        semantic = dataframe.semanticHash()
    except Exception:  # noqa: BLE001 - a plan that Spark cannot hash; its text stays
        semantic = 0
    about = {
        "plan": text,
        "semantic": semantic,
        "sources": [_stamped(name) for name in sorted(dataframe.inputFiles())],
        "settings": settings,
        "spark": _settings_of(dataframe.sparkSession),
        "udf": function_text(udf),
    }
    if any(word in text for word in _IN_MEMORY):
        about["session"] = [_session_id(dataframe.sparkSession), id(dataframe)]
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]


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


def _settings_of(session: Any) -> dict[str, Any]:
    return {name: _setting(session, name) for name in _SETTINGS}


def _setting(session: Any, name: str) -> str | None:
    try:
        value: str | None = session.conf.get(name, None)
    except Exception:  # noqa: BLE001 - Spark Connect refuses some names
        return None
    return value


def _session_id(session: Any) -> str:
    """The id of this session, on the server if it is a client of one."""
    try:
        return str(session.sparkContext.applicationId)
    except Exception:  # noqa: BLE001 - Spark Connect has no context, and raises an error of its own
        return str(session.session_id)


def _stamped(url: str) -> tuple[str, int, int]:
    """A source file with size and time of change, where this machine sees it."""
    parts = urlparse(url)
    path = Path(unquote(parts.path))
    if parts.scheme not in ("", "file") or not path.exists():
        return url, 0, 0
    known = path.stat()
    return url, known.st_size, known.st_mtime_ns


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
