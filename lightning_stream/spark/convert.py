"""`dataframe_to_mds`: a Spark DataFrame to MDS shards, each row exactly once, also where Spark repeats tasks.

The fingerprint of the DataFrame's plan and sources tells whether these are the rows of an earlier conversion.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias
from urllib.parse import unquote, urlparse
from weakref import WeakKeyDictionary

from lightning_stream.convert.partition import Receipt, check
from lightning_stream.convert.publish import Publication, cancel, finished, sweep_rest
from lightning_stream.errors import FormatError, checking, redact
from lightning_stream.fingerprint import function_text, modules_digest
from lightning_stream.spark.partition import SparkJob, continued
from lightning_stream.spark.schema import is_image, kind_of, mds_columns
from lightning_stream.spark_jobs import collected, sent
from lightning_stream.threads import Lock
from lightning_stream.writer.lengths import check_measurable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Stamps: TypeAlias = "list[tuple[str, int, int]] | None"

# Settings that decide how rows fall into partitions.
_SETTINGS = (
    "spark.sql.files.maxPartitionBytes", "spark.sql.files.openCostInBytes", "spark.sql.files.minPartitionNum",
    "spark.sql.shuffle.partitions", "spark.sql.adaptive.enabled", "spark.sql.adaptive.coalescePartitions.enabled",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes", "spark.sql.session.timeZone", "spark.default.parallelism",
    "spark.master",
)  # fmt: skip
# Settings with which Spark explains a plan without omissions.
_IN_FULL = dict.fromkeys(
    ("spark.sql.debug.maxToStringFields", "spark.sql.maxMetadataStringLength", "spark.sql.maxPlanStringLength"),
    str(2**31 - 16),
)
_EXPLAINING = Lock()
# Values that only differ between two sessions: ids of plans and objects, and counts in the names of lambdas.
_PASSING = re.compile(r"\[?plan_id=\d+\]?|@[0-9a-f]{4,}|\[id=#?\d+\]|RelationV2\[[^]]*\]|(?<=lambda [xyz])_\d+")
_ID = re.compile(r"#\d+")  # of an expression, e.g. of a column: sides of a join may have columns of one name
# In a plan as JSON: names and literals, which may look as such values do; and classes of functions from outside Spark.
_TEXTS = re.compile(r'"(?:name|value)":"(?![xyz]_\d+"|\[B@)((?:[^"\\]|\\.)*)"')
_FUNCTIONS = re.compile(
    r'"class":"(?!org\.apache\.spark\.)|UD[AT]?F"|Aggregator"|TypedFilter"|Map(Elements|Partitions)"'
)
_PYTHON = re.compile("Python|InPandas|InArrow")  # nodes that call functions of Python, of the user's modules by name
# A node of a physical plan that reads rows. Only rows of files can be found again: their files have a size and a time.
_SCAN = re.compile(r"^[ :+*()\d-]*(\w*)Scan\b", re.MULTILINE)
_FILE_SCANS = ("File", "Photon")
_GLOB = re.compile(r"([\\{}\[\]*?,^])")
_ZONED = re.compile(r'((?:t|T)ype":)"timestamp"')  # in the JSON of a schema
_BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_OWN_KEYS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of DataFrames whose rows nobody can find again
_BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"  # of Spark 4.1 and later
_FILE_BATCH_ROWS = 256  # where rows may be photos, and Spark does not count their bytes
_ARRAY_BATCH_ROWS = 1000  # few enough to stay in a processor's cache: a third less work on blocks of tokens


@checking
def dataframe_to_mds(
    dataframe: DataFrame,
    merge_index: bool = True,
    mds_kwargs: Mapping[str, Any] | None = None,
    udf_iterable: Callable[..., Iterable[Mapping[str, Any]]] | None = None,
    udf_kwargs: Mapping[str, Any] | None = None,
    *,
    order_by: Sequence[str] | str | None = None,
    shuffle_seed: int | None = None,
) -> tuple[str, str]:
    """Write a DataFrame as an MDS dataset, with the executors writing its shards and the driver its index.

    Every row is in the dataset exactly once, also where tasks fail, run twice, or outlive their executors. index.json
    comes last: without it there is no dataset, and then the same call again redoes only what is missing. The same
    partitions give the same files. ``manifest.json`` beside it holds schema, row counts and source.

    Example::

        dataframe_to_mds(spark.table("photos"), mds_kwargs={"out": "s3://bucket/train", "size_limit": "64mb"})

    Args:
        dataframe: The rows. docs/spark.md lists how each type is written.
        merge_index: One index over all partitions; else one in the folder of each.
        mds_kwargs: The writer's settings: ``out`` (a folder that all machines share, a URL, or (local folder, URL)),
            and, if wanted, ``columns``, ``compression`` (default ``"zstd"``), ``hashes`` (default
            ``["xxh3_64"]``; ``[]`` for none), ``size_limit``, ``keep_local``, ``overwrite`` (or ``exist_ok``),
            ``max_workers``, ``progress_bar`` (in the executors' logs), ``retry``, ``store_options``, ``lengths``.
        udf_iterable: Called in the executors with a pandas frame of some rows, gives samples (dicts) to write
            instead. Needs ``columns``. For repeatable files it must be deterministic.
        udf_kwargs: More arguments for it.
        order_by: Columns to sort all rows by.
        shuffle_seed: Mix rows over all partitions by a hash of their values instead.

    Returns:
        (local, remote): where it was written; the one that was not used is ``""``.

    Raises:
        ValueError: Settings, types or values that cannot be written; null values, with column and count; no rows.
        FileExistsError: ``out`` holds something else than the remains of this very call.
        StoreError: What executors wrote is not where the driver looks for it.
    """
    if not hasattr(dataframe, "mapInArrow"):
        raise TypeError(
            f"dataframe must be a Spark DataFrame; found {type(dataframe).__name__}. Use spark.createDataFrame(...), "
            "or lightning_stream.convert, which needs no Spark."
        )
    settings = SparkJob.read(mds_kwargs, with_udf=udf_iterable is not None)
    if order_by is not None and shuffle_seed is not None:
        raise ValueError("pass order_by= or shuffle_seed=, not both.")
    rows = ordered(dataframe, order_by, shuffle_seed)
    settings = replace(settings, udf=udf_iterable, udf_kwargs=dict(udf_kwargs or {}))
    conversion = Conversion.plan(rows, settings, dataframe)
    conversion.write(merge_index)
    return settings.place.local or "", settings.place.remote or ""


@dataclass(frozen=True)
class Conversion:
    """The conversion of one DataFrame into one dataset.

    Attributes:
        dataframe: What is written, in its order and with its columns.
        job: The work that every task gets.
        batch_rows: Rows of an Arrow batch where a row may be large; None for Spark's default.
        stamps: The source files as they were when this was planned; None if Spark cannot tell.
        analyzed: The plan as Spark understood it then.
    """

    dataframe: Any
    job: SparkJob
    batch_rows: int | None
    stamps: Stamps
    analyzed: str

    @classmethod
    def plan(cls, dataframe: Any, settings: SparkJob, user_frame: Any = None) -> Conversion:
        """Choose columns, and compute the fingerprint of this conversion. Reads no rows.

        `user_frame` is that of the user, if `dataframe` was made of it: the same call again makes another one.
        """
        user_frame = dataframe if user_frame is None else user_frame
        if settings.udf is None:
            columns = mds_columns(dataframe.schema, settings.columns)
            rows = selected(dataframe, list(columns))
        else:
            columns = dict(settings.columns)
            rows = with_local_times(selected(dataframe, dataframe.columns))
        udf_kwargs = dict(sorted(settings.udf_kwargs.items()))
        fingerprinted = {**settings.writer, "columns": columns, "udf_kwargs": function_text(udf_kwargs)}
        if lengths := settings.writer.get("lengths"):
            check_measurable(lengths, columns)
            fingerprinted["lengths"] = {name: function_text(function) for name, function in lengths.items()}
        stamps = stamps_of(rows)
        text = plan_text(rows)
        key = fingerprint(rows, text, fingerprinted, stamps, settings.udf, user_frame)
        job = replace(settings, columns=columns, fingerprint=key)
        batch_rows = None
        types = [field.dataType for field in rows.schema.fields]
        if any(kind_of(type_) == "BinaryType" or is_image(type_) for type_ in types):
            counts_bytes = _asked(partial(rows.sparkSession.conf.get, _BATCH_BYTES, None), None)
            batch_rows = _ARRAY_BATCH_ROWS if counts_bytes else _FILE_BATCH_ROWS
        elif any(encoding.startswith("ndarray") for encoding in columns.values()):
            batch_rows = _ARRAY_BATCH_ROWS
        return cls(rows, job, batch_rows, stamps, text.partition("== Optimized")[0])

    def write(self, merge_index: bool = True) -> None:
        """Let Spark write the partitions that are not written, and publish all.

        Raises:
            ValueError: Values that cannot be written.
            FormatError: A source file changed meanwhile.
            StoreError: A store failed in an executor. Other failures there are Spark's own errors.
            MissingExtraError: Executors lack a package.
        """
        place = self.job.place
        if finished(place, self.job.fingerprint) and sweep_rest(place, self.job.fingerprint):
            return
        publication = Publication.begin(self.job, self.job.overwrite)
        job = replace(self.job, done=publication.done)
        with small_batches(self.dataframe.sparkSession, self.batch_rows):
            # Numbers as names of columns: Spark's own may hold dots, or differ in their case only.
            numbered = self.dataframe.toDF(*map(str, range(len(self.dataframe.columns))))
            rows = collected(numbered.mapInArrow(_task(sent(job), self.dataframe.columns), "receipt binary"))
        receipts = sorted((Receipt.from_bytes(bytes(row[0])) for row in rows), key=lambda receipt: receipt.partition)
        try:
            check(receipts, "the DataFrame")
            check_unchanged(self.dataframe, self.stamps)
        except (ValueError, FormatError):
            cancel(publication.place)  # other rows or settings will write other partitions
            raise
        notes = {
            "schema": json.loads(self.dataframe.schema.json()),
            "plan": plan_text(self.dataframe).splitlines(),
            "num_source_files": len(_asked(self.dataframe.inputFiles, [])),
        }
        publication.publish(receipts, merge_index, notes)


def _task(received: Callable[[], SparkJob], names: Sequence[str]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What each task does with its rows, whose columns have these names: it yields a receipt, as Spark wants it."""

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        receipt = continued(received(), context.partitionId(), (batch.rename_columns(names) for batch in batches))
        yield pa.RecordBatch.from_pydict({"receipt": [receipt.to_bytes()]})

    return write


def ordered(dataframe: Any, order_by: Sequence[str] | str | None, shuffle_seed: int | None) -> Any:
    """Sort all rows by columns, or mix them by a hash of their values and a seed: the same mixture on every run."""
    if order_by is not None:
        return dataframe.orderBy(*([order_by] if isinstance(order_by, str) else order_by))
    if shuffle_seed is None:
        return dataframe
    from pyspark.sql import functions

    values = [functions.lit(shuffle_seed)]
    for field in dataframe.schema.fields:
        value = functions.col(quoted(field.name))
        has_map = "map<" in field.dataType.simpleString()  # of which Spark takes no hash
        values.append(functions.to_json(value) if has_map else value)
    key = functions.xxhash64(*values)
    return dataframe.repartition(key).sortWithinPartitions(key)


def selected(dataframe: Any, columns: Sequence[str]) -> Any:
    """Only these columns, ML vectors as arrays.

    Always by their names: with Spark Connect, a view may have them in another order now.
    """
    from pyspark.sql import functions

    vectors = {field.name for field in dataframe.schema.fields if kind_of(field.dataType) == "VectorUDT"}
    names = dict(zip(dataframe.columns, dataframe.columns, strict=True))
    if len({name.lower() for name in names}) < len(names):  # Spark finds no name that another column has in capitals
        names = {name: str(k) for k, name in enumerate(dataframe.columns)}
        dataframe = dataframe.toDF(*names.values())
    chosen = {name: functions.col(quoted(names[name])).alias(name) for name in columns}
    for name in vectors.intersection(columns):
        from pyspark.ml.functions import vector_to_array

        chosen[name] = vector_to_array(chosen[name]).alias(name)
    return dataframe.select(*chosen.values())


def with_local_times(dataframe: Any) -> Any:
    """Times without a zone, in the session's, at any depth: as in the pandas frames that Spark makes."""
    from pyspark.sql import functions
    from pyspark.sql.types import StructType

    text, count = _ZONED.subn(r'\1"timestamp_ntz"', dataframe.schema.json())
    if not count:
        return dataframe
    schema = StructType.fromJson(json.loads(text))
    return dataframe.select(*(functions.col(quoted(field.name)).cast(field.dataType) for field in schema.fields))


def plan_text(dataframe: Any) -> str:
    """The plan as Spark explains it, in full, without what differs from session to session."""
    with _EXPLAINING, _settings(dataframe.sparkSession, _IN_FULL), redirect_stdout(_OfThread(sys.stdout)) as out:
        dataframe.explain("extended")
    ids: dict[str, str] = {}
    text = _PASSING.sub("", out.text.getvalue())
    return _ID.sub(lambda match: ids.setdefault(match[0], f"#{len(ids)}"), text)


class _OfThread(io.TextIOBase):
    """Takes what this thread prints; what others print meanwhile goes to where it was printed before."""

    def __init__(self, others: TextIO) -> None:
        self.text = io.StringIO()
        self._others = others
        self._thread = get_ident()

    def write(self, text: str) -> int:
        return (self.text if get_ident() == self._thread else self._others).write(text)


def fingerprint(
    dataframe: Any,
    text: str,
    settings: Mapping[str, Any],
    stamps: Stamps,
    udf: Callable[..., Any] | None,
    user_frame: Any,
) -> str:
    """Hex digest of a conversion: the plan, its source files, how it is partitioned, and how it is written.

    Equal in another session if all rows come from files that have not changed since; rows from elsewhere (made in a
    session, of a database, of a data source) are of the `user_frame` DataFrame only.
    """
    session = dataframe.sparkSession
    content = {
        "plan": text[max(text.find("== Optimized"), 0) :],
        "unsaid": _unsaid(dataframe),
        "modules": modules_digest() if _PYTHON.search(text) else "",
        "sources": stamps,
        "settings": settings,
        "spark": {name: _asked(partial(session.conf.get, name, None), None) for name in _SETTINGS},
        "udf": function_text(udf),
    }
    is_found_again = stamps is not None and set(_SCAN.findall(text)) <= set(_FILE_SCANS)
    if not is_found_again or "scalar-subquery" in text:  # whose files `inputFiles` does not list
        content["only"] = _OWN_KEYS.setdefault(user_frame, uuid.uuid4().hex)
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _unsaid(dataframe: Any) -> Any:
    """What the text of a plan lacks: options of sources, versions of tables, texts that look like ids, functions.

    Java's hash of a plan covers all of it. It differs in each process, for Parquet and ORC too, so that it counts only
    where there are functions, or where Spark Connect shows no more.
    """
    try:
        query = dataframe._jdf.queryExecution()  # noqa: SLF001 - Spark has no public name for it
        shown = query.analyzed().toJSON()
        leaves = query.optimizedPlan().collectLeaves()
        relations = [leaves.apply(k).relation() for k in range(leaves.size())]
        sources = [[relation.options().toString(), relation.location().toString()] for relation in relations]
        if not _FUNCTIONS.search(shown):
            return _TEXTS.findall(shown), sources
    except Exception:  # noqa: BLE001 - Spark Connect has no plan in Java, and some relations are not of files
        pass
    return _asked(dataframe.semanticHash, 0)


def small_batches(session: Any, rows: int | None) -> AbstractContextManager[None]:
    """Use Arrow batches of fewer rows, if the session has the default of 10,000."""
    is_default = rows is not None and _asked(partial(session.conf.get, _BATCH_ROWS), None) == "10000"
    return _settings(session, {_BATCH_ROWS: str(rows)} if is_default else {})


@contextmanager
def _settings(session: Any, values: Mapping[str, str]) -> Iterator[None]:
    """Give a session other settings for a while; one that does not tell a setting keeps it."""
    before = {name: _asked(partial(session.conf.get, name), None) for name in values}
    known = {name: value for name, value in before.items() if value is not None}
    for name in known:
        session.conf.set(name, values[name])
    try:
        yield
    finally:
        for name, value in known.items():
            session.conf.set(name, value)


def _asked(question: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return question()
    except Exception:  # noqa: BLE001 - Spark Connect has no context, refuses some names, and raises errors of its own
        return otherwise


def local_path(url: str) -> Path | None:
    """The path of a source file; None if it is in no file system of the machine."""
    parts = urlparse(url)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


def stamps_of(dataframe: Any) -> Stamps:
    """The source files with size and time of change; None if Spark cannot tell these of all."""
    urls = _asked(dataframe.inputFiles, None)
    if urls is None:
        return None
    stamps = _stamps_now(dataframe.sparkSession, urls)
    return stamps if len(stamps) == len(urls) else None


def _stamps_now(session: Any, urls: Sequence[str]) -> list[tuple[str, int, int]]:
    """Those of these files that are there, with size and time of change."""
    stamps = []
    elsewhere = []
    for url in sorted(urls):
        path = local_path(url)
        if path is None or not path.exists():
            elsewhere.append(url)
            continue
        known = path.stat()
        stamps.append((url, known.st_size, known.st_mtime_ns))
    if elsewhere:
        stamps += sorted(map(tuple, _asked(partial(_listed, session, elsewhere), [])))
    return stamps


def check_unchanged(dataframe: Any, before: Stamps) -> None:
    """Raise FormatError if a source file is another one now. One that is gone was read before."""
    now = _stamps_now(dataframe.sparkSession, _asked(dataframe.inputFiles, []))
    stamps = {url: stamp for url, *stamp in now}
    changed = [url for url, *stamp in before or () if stamps.get(url, stamp) != stamp]
    if changed:
        raise FormatError(
            f"the files of a DataFrame must stay as they are until it is written; {redact(changed[0])} was changed "
            "meanwhile. Nothing was published. Load the DataFrame and write it again once its files stay as they are."
        )


def _listed(session: Any, urls: Sequence[str]) -> list[Any]:
    """Path, size and time of change of files, as Spark's own listing has them; their content is not read."""
    files = session.read.format("binaryFile").load([_GLOB.sub(r"\\\1", unquote(url)) for url in urls])
    return list(files.selectExpr("path", "length", "unix_micros(modificationTime)").collect())


def quoted(name: str) -> str:
    """A column's name as Spark parses it: dots and spaces belong to the name."""
    return "`" + name.replace("`", "``") + "`"
