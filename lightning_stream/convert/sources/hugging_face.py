"""What Hugging Face's `datasets` notes in an Arrow schema: images, sounds, videos and class labels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from lightning_stream.convert.arrow_schema import arrow_columns
from lightning_stream.convert.sources.base import Found
from lightning_stream.convert.sources.images import image_encoding

_FILES = ("Image", "Audio", "Video")  # features that are a struct of a file's bytes and its path


def features_of(schema: pa.Schema, first: Any, asked: Mapping[str, str] | None) -> Found:
    """Return the columns of a schema, with images and class labels as ``datasets`` notes them.

    Args:
        schema: Of Arrow or Parquet.
        first: A batch with at least one row, if there is any.
        asked: Encodings by column name; None for all, inferred.
    """
    features = _noted(schema)
    images = [name for name, kind in features.items() if kind.get("_type") in _FILES and name in schema.names]
    for name in images:
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.binary()))
    columns = arrow_columns(schema, asked)
    for name in images if asked is None else ():
        value = None if first is None or not first.num_rows else image_bytes(first.column(name))[0].as_py()
        columns[name] = image_encoding(value or b"")
    for name, shape in _shapes(features).items() if asked is None else ():
        if columns.get(name, "").count(":") == 1:
            columns[name] += f":{shape}"
    classes = {name: kind["names"] for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
    about: dict[str, Any] = {"schema": {field.name: str(field.type) for field in schema}}
    if classes:
        about["classes"] = {name: names for name, names in classes.items() if name in columns}
    return Found(columns, about, media=tuple(images))


def _shapes(features: Mapping[str, Any]) -> dict[str, str]:
    """Return the shapes of array features that have one shape for all rows, as encodings write them."""
    arrays = {name: kind["shape"] for name, kind in features.items() if str(kind.get("_type")).startswith("Array")}
    return {name: ",".join(map(str, shape)) for name, shape in arrays.items() if all(shape)}


def image_bytes(column: pa.Array) -> pa.Array:
    """Return a column of structs of bytes and path, or of plain bytes, as bytes; null where there is neither."""
    if not pa.types.is_struct(column.type):
        return column
    data = pa.compute.struct_field(column, "bytes")
    if not data.null_count:
        return data
    paths = pa.compute.struct_field(column, "path").to_pylist()
    return pa.array(
        [
            Path(path).read_bytes() if held is None and path and Path(path).is_file() else held
            for held, path in zip(data.to_pylist(), paths, strict=True)
        ],
        pa.large_binary(),
    )


def with_files(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with its images as their files' bytes."""
    noted = _noted(batch.schema)
    for k, field in enumerate(batch.schema):
        if noted.get(field.name, {}).get("_type") in _FILES and pa.types.is_struct(field.type):
            batch = batch.set_column(k, field.name, image_bytes(batch.column(k)))
    return batch


def _noted(schema: pa.Schema) -> dict[str, Any]:
    noted = (schema.metadata or {}).get(b"huggingface")
    if noted is None:
        return {}
    features = json.loads(noted).get("info", {}).get("features") or {}
    return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
