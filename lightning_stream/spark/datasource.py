"""``format("mds")`` for Spark's own verbs, by its Python Data Source API."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import msgspec

from lightning_stream.errors import MissingExtraError
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.stores import absolute, option_of
from lightning_stream.version_log import version_of

try:
    from pyspark.sql.datasource import DataSource
except ImportError as error:
    if error.name == "pyspark":
        raise
    raise MissingExtraError(
        "format('mds') needs Spark's Python Data Source API: pyspark 4.0 for batches, 4.1 for streams; "
        f"found {version('pyspark')}. pip install 'pyspark>=4.1', or use dataframe_to_mds, "
        "StreamToTorchDataset and dataset_from_spark, which run on 3.5."
    ) from error

_READ = ("columns", "version", "partition_size")
_APPEND = ("key", "message", "if_exists")  # fields of `SinkJob`, too
_ALWAYS = ("path", "retry")
_STREAM = ("checkpointlocation",)  # Spark's own
_STORE = "store."
_IF_EXISTS = ("append", "error", "ignore")
_SECRETS = re.compile("key|secret|token|password")


class MDSDataSource(DataSource):  # type: ignore[misc,unused-ignore]
    """MDS datasets as a format of Spark; `register` makes it known to a session.

    The options are texts, as all options of Spark. Those of the dataset's store begin with ``store.``, e.g.
    ``store.endpoint_url``. docs/spark.md lists all.
    """

    @classmethod
    def name(cls) -> str:
        return "mds"

    def schema(self) -> Any:
        return self._dataset().schema()

    def reader(self, schema: Any) -> Any:
        from lightning_stream.spark.scan import MDSReader

        return MDSReader(self._dataset(), schema)

    def writer(self, schema: Any, overwrite: bool) -> Any:
        purpose = "mode('overwrite')" if overwrite else "writing"
        options = self._checked_options([*_PARSERS, *(() if overwrite else _APPEND)], purpose)
        if options.get("if_exists", "append") not in _IF_EXISTS:
            names = ", ".join(_IF_EXISTS)
            raise ValueError(f"the option if_exists must be one of {names}; found {options['if_exists']!r}.")
        return self._job(schema, options, overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        import pyspark.sql.datasource as api

        from lightning_stream.spark.sink import MDSStreamSink

        if not hasattr(api, "DataSourceStreamArrowWriter"):
            raise MissingExtraError(f"writeStream.format('mds') needs pyspark 4.1; found {version('pyspark')}.")
        options = self._checked_options((*_PARSERS, "message", *_STREAM), "writing a stream")
        return MDSStreamSink(self._job(schema, options, overwrite))

    def _checked_options(self, known: Sequence[str], purpose: str) -> dict[str, str]:
        options = dict(self.options)
        if "paths" in options or not options.get("path"):
            raise ValueError("format('mds') needs the folder or URL of one dataset. Pass it to save, load or start.")
        if unknown := [name for name in options if name not in {*known, *_ALWAYS} and not name.startswith(_STORE)]:
            listed = ", ".join(sorted({*known, "retry"}.difference(_STREAM)))
            raise ValueError(
                f"format('mds') has no option {', '.join(sorted(unknown))} for {purpose}. Its options are {listed}, "
                "and those of the store, such as store.endpoint_url."
            )
        return options

    def _store_options(self) -> dict[str, Any]:
        texts = {name.removeprefix(_STORE): text for name, text in self.options.items() if name.startswith(_STORE)}
        # Credentials stay texts, also those of digits alone.
        options = {name: text if _SECRETS.search(name) else option_of(text) for name, text in texts.items()}
        if (retry := self.options.get("retry")) is None:
            return options
        if not retry.isdecimal():
            raise ValueError(f"the option retry must be a whole number; found {retry!r:.40}.")
        return {**options, "retries": int(retry)}

    def _job(self, schema: Any, options: Mapping[str, str], overwrite: bool) -> Any:
        from lightning_stream.spark.sink import SinkJob

        chosen = {name: parse(options[name]) for name, parse in _PARSERS.items() if name in options}
        place = {"out": options["path"], "store_options": self._store_options() or None, "overwrite": overwrite}
        appending: dict[str, Any] = {name: options[name] for name in _APPEND if name in options}
        return replace(SinkJob.read({**place, **chosen}), **appending).planned(schema)

    def _dataset(self) -> Any:
        from lightning_stream.spark.scan import Dataset

        options = self._checked_options(_READ, "reading")
        return Dataset(
            absolute(options["path"]),
            version_of(options["version"]) if "version" in options else None,
            _names(options["columns"]) if "columns" in options else None,
            parse_bytes(options.get("partition_size", "64mb"), "partition_size"),
            self._store_options(),
        )


def register(spark: Any) -> None:
    """Let a Spark session, also one of Spark Connect, read and write ``format("mds")``.

    Spark looks formats up in the session that is active in a thread: call this in each thread that writes.

    Example::

        register(spark)
        df.write.format("mds").mode("append").save("s3://bucket/train")
        spark.read.format("mds").load("s3://bucket/train").where("label = 3").show()

    Raises:
        MissingExtraError: pyspark is older than 4.0.
    """
    spark.dataSource.register(MDSDataSource)
    spark.createDataFrame([], "id long")  # makes the session the active one of this thread


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _encodings(text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except ValueError as error:
        raise ValueError(
            'the option columns must be encodings by name as JSON, such as \'{"id": "int64", "text": "str"}\'; '
            f"found {text!r:.80}."
        ) from error


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "columns": _encodings,
    "compression": lambda text: None if text.lower() in ("", "none") else text,
    "hashes": _names,
    "lengths": lambda text: dict.fromkeys(_names(text), len),
    "size_limit": lambda text: None if text.lower() == "none" else text,
}
