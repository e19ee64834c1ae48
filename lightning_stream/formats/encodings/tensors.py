"""Named arrays in one value (``tensors``), as the bytes of a safetensors file, which cannot hold code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from lightning_stream.formats.encodings.arrays import as_array
from lightning_stream.formats.encodings.base import FamilyMember, ViewEncoding, describe

_DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "complex64",
)  # fmt: skip
_METADATA = "__metadata__"


class _Tensors(ViewEncoding):
    """A dict of arrays, of any shape, 0-d and empty ones included."""

    ragged = True

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value) or _METADATA in value:
            raise TypeError(f"tensors takes a dict of names and arrays; got {describe(value)}.")
        arrays = {name: as_array(one, "tensors") for name, one in value.items()}
        for name, array in arrays.items():
            if array.dtype.name not in _DTYPES:
                raise ValueError(f"tensors takes arrays of {', '.join(_DTYPES)}; {name!r} is of {array.dtype}.")
        try:
            # safetensors calls tobytes(), which needs C order; asarray keeps it for 0-d arrays too
            return save({name: np.asarray(array, order="C") for name, array in sorted(arrays.items())})
        except SafetensorError as error:
            raise ValueError(f"tensors cannot be stored: {error}") from error

    def decode(self, data: bytes | memoryview) -> dict[str, NDArray[Any]]:
        return load(bytes(data))


ENCODINGS = (FamilyMember(("tensors",), lambda _: _Tensors()),)
