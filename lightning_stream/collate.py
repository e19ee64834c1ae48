"""From a batch's columns, or a list of samples, to what the training loop sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

# Array kinds that torch.from_numpy takes: integers, unsigned integers, floats, booleans. Others stay numpy arrays.
_TORCH_KINDS = frozenset("iufb")


def collate_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Turn gathered columns into a batch: numbers become tensors, equal shapes are stacked, the rest stays a list.

    Equal to `torch.utils.data.default_collate` over the same samples, except that what it refuses (images, arrays
    of different shapes, None) arrives as a list.
    """
    return {name: _column(values) for name, values in columns.items()}


def collate_samples(samples: Sequence[Any]) -> Any:
    """Collate samples: dicts column by column as `collate_columns` does, anything else as torch does."""
    first = samples[0]
    if isinstance(first, Mapping):
        for sample in samples:
            if sample.keys() != first.keys():
                raise ValueError(
                    f"samples of one batch must have the same keys; found {sorted(first)} and {sorted(sample)}. "
                    f"Make the transform return the same keys for every sample, or pass a collate_fn."
                )
        return {name: _column([sample[name] for sample in samples]) for name in first}
    return default_collate(list(samples))


def _column(values: Any) -> Any:
    if isinstance(values, np.ndarray):
        return _tensor(values)
    first = values[0]
    if isinstance(first, torch.Tensor):
        return default_collate(values) if all(v.shape == first.shape for v in values) else values
    if isinstance(first, np.ndarray):
        same = all(v.shape == first.shape and v.dtype == first.dtype for v in values)
        return _tensor(np.stack(values)) if same else values
    if isinstance(first, (bool, int, float, np.number, np.bool_)):
        return default_collate(values)
    if isinstance(first, (Mapping, tuple)):
        return _nested(values)
    return values


def _nested(values: list[Any]) -> Any:
    try:
        return default_collate(values)
    except (TypeError, KeyError, RuntimeError):  # they differ inside: hand them over as they are
        return values


def _tensor(values: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(values) if values.dtype.kind in _TORCH_KINDS else values
