"""Work in jobs of Spark: it runs on the machines of a cluster, and what a machine loses is done again by another."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_stream import errors
from lightning_stream.errors import FormatError, LightningStreamError, MissingExtraError, redact
from lightning_stream.fingerprint import import_again, modules_digest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The driver holds the results of a job; a task has several pieces
_PIECES_OF_A_JOB = 4096
_MOST_TASKS = 1024
_OURS = re.compile(r"^\s*lightning_stream\.errors\.(\w+): (.+)$", re.MULTILINE)
_GONE = re.compile(r"FILE_NOT_EXIST\W.*?(\w+:/\S+?)\.? File does not exist", re.DOTALL)
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def run_in_spark(
    session: SparkSession, task: Callable[[Any], Any], pieces: Sequence[Any], report: Callable[[Any, Any], None]
) -> None:
    """Do a picklable task for all pieces in the executors; report each piece with its result, in their order.

    Raises:
        LightningStreamError: A task ended with it in the executors, as often as Spark tries.
    """
    if not hasattr(session, "createDataFrame"):
        raise TypeError(f"spark must be a Spark session, such as local_session('local[2]'); got {session!r:.80}.")
    from pyspark import cloudpickle

    work = _worker(sent(task))
    for begin in range(0, len(pieces), _PIECES_OF_A_JOB):
        some = pieces[begin : begin + _PIECES_OF_A_JOB]
        rows = [(index, cloudpickle.dumps(piece)) for index, piece in enumerate(some)]
        frame = session.createDataFrame(rows, "number long, piece binary")
        spread = frame.repartitionByRange(min(len(rows), _MOST_TASKS), "number")
        for index, result in sorted(collected(spread.mapInArrow(work, "number long, result binary"))):
            report(some[index], pickle.loads(result))  # noqa: S301 - our own


def sent(task: Any) -> Callable[[], Any]:
    """What gives a task to Spark's workers; these import the user's modules as they are now, edited ones again."""
    from pyspark import cloudpickle

    data = cloudpickle.dumps(task)
    digest = modules_digest()

    def received() -> Any:
        import_again(digest)
        return pickle.loads(data)  # noqa: S301 - our own

    return received


def _worker(received: Callable[[], Any]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What each of Spark's tasks does with its pieces."""

    def work(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        task = received()
        for batch in batches:
            for index, piece in zip(*batch.to_pydict().values(), strict=True):
                result = pickle.dumps(task(pickle.loads(piece)))  # noqa: S301 - our own
                yield pa.RecordBatch.from_pydict({"number": [index], "result": [result]})

    return work


def collected(dataframe: DataFrame) -> Sequence[Any]:
    """The rows of a DataFrame that functions in the executors make.

    Raises:
        LightningStreamError, MissingExtraError: A task ended with it. Other failures there are Spark's own errors.
    """
    try:
        rows: Sequence[Any] = dataframe.collect()
    except Exception as error:
        if (cause := _explained(error)) is None:
            raise
        raise cause from error
    return rows


def _explained(failure: Exception) -> Exception | None:
    """The package's error that a task ended with, or what a missing module means; None for any other failure.

    A driver gets only the text of an executor's error.
    """
    text = str(failure)
    if (ours := _OURS.search(text)) is not None:
        kind = getattr(errors, ours[1], None)
        if isinstance(kind, type) and issubclass(kind, (LightningStreamError, MissingExtraError)):
            return kind(f"{ours[2].strip()} (In one of Spark's executors.)")
    if (gone := _GONE.search(text)) is not None:
        return FormatError(
            f"a file that a DataFrame reads is gone, perhaps replaced: {redact(gone[1])}. Load the DataFrame again."
        )
    if (missing := _MISSING.search(text)) is not None:
        return MissingExtraError(
            f"the Python of Spark's executors has no module {missing[1]!r}. Install it on every machine of the cluster "
            "(a cluster library, or %pip in a notebook; with Spark Connect, your own file by spark.addArtifacts(file, "
            "pyfile=True)), or set PYSPARK_PYTHON, before the session starts, to a Python that has it on every machine."
        )
    return None
