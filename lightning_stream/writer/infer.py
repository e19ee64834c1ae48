"""Columns for a writer that got none, inferred from the first sample or batch; and whether columns fit a dataset."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.formats.index import Index


def infer_columns(sample: Mapping[str, Any]) -> dict[str, str]:
    """Return the encoding by column name for samples like this one.

    Whole numbers become ``int``, floats ``float64``, truth values ``uint8``, numpy numbers their own dtype, arrays and
    tensors ``ndarray:<dtype>`` (any shape), text ``str``, bytes ``bytes``, decimals ``str_decimal``, images ``jpeg``
    or ``png`` if they were opened from such files, else ``pil``; lists, dicts and None ``json``. TypeError for others.
    """
    return {name: infer_encoding(name, value) for name, value in sample.items()}


def infer_column(name: str, values: Any) -> str:
    """As `infer_columns`, for one column of a batch; an array of several dimensions gets a fixed shape."""
    if isinstance(values, BinaryColumn):
        return values.encoding
    if isinstance(values, np.ndarray) and values.dtype.kind in "iufb" and values.ndim:
        if values.ndim > 1:
            return f"ndarray:{values.dtype.name}:{','.join(map(str, values.shape[1:]))}"
        return "uint8" if values.dtype.kind == "b" else values.dtype.name
    encodings = {infer_encoding(name, value) for value in values}
    if len(encodings) != 1:
        raise TypeError(
            f"column {name!r}: its values have several types ({', '.join(sorted(encodings))}). Pass columns=."
        )
    return encodings.pop()


def infer_encoding(name: str, value: Any) -> str:
    """Return the encoding for a column from one value."""
    if isinstance(value, (bool, np.bool_)):
        return "uint8"
    if type(value) is float:
        return "float64"
    for kind, encoding in _BY_TYPE:
        if isinstance(value, kind):
            return encoding
    if isinstance(value, np.generic) or hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind in "iuf" and array.dtype.itemsize <= 8:
            return f"ndarray:{array.dtype.name}" if array.ndim else array.dtype.name
    if type(value).__module__.startswith("PIL."):
        return {"JPEG": "jpeg", "PNG": "png"}.get(value.format, "pil")
    type_name = type(value).__name__
    raise TypeError(
        f"column {name!r}: no encoding can be inferred for {type_name}. Pass columns= with an encoding for it."
    )


_BY_TYPE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((bytes, bytearray, memoryview), "bytes"),
    (str, "str"),
    (int, "int"),
    (Decimal, "str_decimal"),
    ((list, tuple, dict, type(None)), "json"),
)


def check_appendable(base: Index, form: str, columns: Mapping[str, str], lengths: Collection[str]) -> None:
    """Raise ValueError unless shards of this format, with these columns and lengths, can be appended to a dataset."""
    for old in base.schemas[:1]:
        if (old.format, base.columns) != (form, columns):
            raise ValueError(
                f"appended shards must have the dataset's format and columns; {base.where} has {old.format} "
                f"{base.columns}, got {form} {dict(columns)}. Write another dataset, and mix or merge them."
            )
    if (base.num_samples or base.lengths) and base.lengths.keys() != set(lengths):
        raise ValueError(
            f"appended samples must have the lengths that the dataset has; {base.where} has "
            f"{', '.join(base.lengths) or 'none'}, got {', '.join(lengths) or 'none'}. Pass lengths= with a "
            "function for each of them; lightning-stream convert PATH --lengths NAME adds others to the dataset."
        )
