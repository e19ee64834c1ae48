"""Turn a batch's columns, or a list of samples, into what the training loop gets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_stream.formats.shard import Ragged
from lightning_stream.loading.torch_private import collating_with

Memory: TypeAlias = "Callable[[int], Any] | None"  # returns memory of so many bytes, or None; None for no such
# Array kinds that torch.from_numpy takes: integers, unsigned integers, floats, booleans. Others stay numpy arrays.
_TORCH_KINDS = frozenset("iufb")
_SIGNED: dict[str, type[np.signedinteger[Any]]] = {"u2": np.int32, "u4": np.int64}
_NUMBERS = (bool, int, float, np.number, np.bool_)
_DTYPES: dict[type, type] = {bool: np.bool_, int: np.int64, float: np.float64}


def collate_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Turn gathered columns into a batch: numbers and arrays of fixed shape become tensors, the rest stays a list.

    Columns of arrays of any shape (``ndarray``, ``ndarray:int32``, ``tensors``) are a list in every batch, also in one
    whose arrays have the same shape. What the user's decoders return is stacked if it has one shape. All else is as
    `torch.utils.data.default_collate` makes it of the same samples, but what that refuses (images, None) is a list.
    """
    return {name: (_tensor if isinstance(values, np.ndarray) else _column)(values) for name, values in columns.items()}


def collate_samples(samples: Sequence[Any], out: Memory = None) -> Any:
    """Collate samples: mappings key by key into one of the same type, anything else as torch does.

    Arrays and tensors of one shape are stacked, others stay a list, and so do values that are lists. `out` returns
    memory of so many bytes to stack them in, or None.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        _check_keys(samples)
        return _like(first, {name: _column([sample[name] for sample in samples], out) for name in first})
    return default_collate(list(samples))


def collating_as_torch(out: Memory) -> Callable[[list[Any]], Any]:
    """What collates samples to what `torch.utils.data.default_collate` makes; `out` is as for `collate_samples`."""
    return collating_with(partial(_alike_tensors, out=out), partial(_alike_arrays, out=out), _alike_numbers)


def join_samples(samples: Sequence[Any]) -> dict[str, Any]:
    """Collate samples of different sizes: arrays and tensors are joined along their first axis.

    ``splits`` has for each of these columns where the samples begin in it, int32[n + 1]. The rest is as
    `collate_samples` makes it.
    """
    first = samples[0]
    if not isinstance(first, Mapping):
        raise TypeError(f"samples of a packed row are dicts, or collated by a collate_fn; found {type(first).__name__}")
    _check_keys(samples)
    batch: dict[str, Any] = {}
    splits: dict[str, torch.Tensor] = {}
    for name, value in first.items():
        values = [sample[name] for sample in samples]
        if not isinstance(value, (np.ndarray, torch.Tensor)) or not value.ndim:
            batch[name] = _column(values)
            continue
        kinds = {(type(array), getattr(array, "dtype", None), getattr(array, "shape", ())[1:]) for array in values}
        if len(kinds) > 1:
            raise ValueError(
                f"the arrays of column {name!r} must have one dtype, and one shape behind their first axis, to be "
                f"joined; found {sorted(map(str, kinds))}. Make them alike in a transform, or pass a collate_fn"
            )
        batch[name] = torch.cat(values) if isinstance(value, torch.Tensor) else _tensor(signed(np.concatenate(values)))
        splits[name] = torch.tensor(np.cumsum([0, *map(len, values)]), dtype=torch.int32)
    return {**batch, "splits": splits}


def signed(values: NDArray[Any]) -> NDArray[Any]:
    """Unsigned numbers that torch lacks most operations for, as wider signed ones; others as they are."""
    wider = _SIGNED.get(values.dtype.str[1:])
    return values if wider is None else values.astype(wider)


def _check_keys(samples: Sequence[Mapping[str, Any]]) -> None:
    for sample in samples:
        if sample.keys() != samples[0].keys():
            raise ValueError(
                f"samples of one batch must have the same keys; found {sorted(samples[0])} and {sorted(sample)}. "
                f"Make the transform return the same keys for every sample, or pass a collate_fn."
            )


def _like(sample: Mapping[str, Any], batch: dict[str, Any]) -> Any:
    """Return a batch in the type of its samples (OrderedDict, BatchEncoding), as torch does; a dict if that cannot."""
    if type(sample) is dict:
        return batch
    try:
        if not isinstance(sample, MutableMapping):
            return type(sample)(batch)  # type: ignore[call-arg]
        clone = copy.copy(sample)
        clone.update(batch)
    except TypeError:
        return batch
    return clone


def _column(values: Any, out: Memory = None) -> Any:
    if isinstance(values, Ragged):
        return list(values)
    first = values[0]
    if isinstance(first, torch.Tensor):
        if not all(isinstance(v, torch.Tensor) and v.shape == first.shape for v in values):
            return values
        # In a worker torch's own collate stacks into shared memory, which costs several times as much.
        return _stacked_tensors(values, out) if first.layout is torch.strided else default_collate(values)
    if isinstance(first, np.ndarray):
        if not _are_alike(values):
            return values
        return _tensor(_copied_arrays(values, out) if _are_plain(values) else np.stack(values))
    if isinstance(first, _NUMBERS):
        tensor = _alike_numbers(values)
        if tensor is None and all(isinstance(value, _NUMBERS) for value in values):
            tensor = default_collate(values)
        return values if tensor is None else tensor
    if isinstance(first, (Mapping, tuple)):
        with suppress(TypeError, KeyError, RuntimeError):  # those that differ inside stay a list
            return default_collate(values)
    return values


def _stacked_tensors(values: list[torch.Tensor], out: Memory) -> torch.Tensor:
    first = values[0]
    memory = None
    if out is not None and all(
        type(tensor) is torch.Tensor
        and tensor.dtype == first.dtype
        and tensor.is_contiguous()
        and not tensor.requires_grad
        for tensor in values
    ):
        memory = out(first.nbytes * len(values)) if first.nbytes and first.device.type == "cpu" else None
    if memory is None:
        return torch.stack(values)
    target = torch.frombuffer(memory, dtype=first.dtype).view(len(values), *first.shape)
    return torch.stack(values, out=target)


def _are_alike(values: list[Any]) -> bool:
    """Whether all are arrays of one shape and type."""
    first = values[0]
    return all(isinstance(v, np.ndarray) and v.shape == first.shape and v.dtype == first.dtype for v in values)


def _are_plain(arrays: list[NDArray[Any]]) -> bool:
    """Whether arrays that are alike can be copied as they lie in memory, to a tensor."""
    first = arrays[0]
    return first.dtype.kind in _TORCH_KINDS and first.size > 0 and all(array.flags.c_contiguous for array in arrays)


def _copied_arrays(values: list[NDArray[Any]], out: Memory) -> NDArray[Any]:
    """Plain arrays together, in half of np.stack's time."""
    first = values[0]
    memory = None if out is None else out(first.nbytes * len(values))
    if memory is None:
        return np.array(values)
    copied = np.frombuffer(memory, first.dtype).reshape(len(values), *first.shape)
    copied[...] = values
    return copied


def _alike_tensors(values: list[Any], out: Memory) -> torch.Tensor | None:
    """Tensors of one shape, stacked in memory of `out`; None where torch's own way is as good, or needed."""
    first = values[0]
    if out is None or first.is_nested or not all(isinstance(value, torch.Tensor) for value in values):
        return None
    if any(value.layout is not torch.strided or value.shape != first.shape for value in values):
        return None
    return _stacked_tensors(values, out)


def _alike_arrays(values: list[Any], out: Memory) -> torch.Tensor | None:
    """Plain arrays of one shape and type as a tensor, in a fifth of torch's time; None for others."""
    is_fast = _are_alike(values) and _are_plain(values)
    return torch.from_numpy(_copied_arrays(values, out)) if is_fast else None


def _alike_numbers(values: list[Any]) -> torch.Tensor | None:
    """Numbers of one type as the tensor that torch makes of them, in a fifth of its time; None for others."""
    kind = type(values[0])
    if set(map(type, values)) != {kind}:
        return None
    try:
        return torch.from_numpy(np.array(values, _DTYPES.get(kind, kind)))
    except (OverflowError, TypeError):  # not in 64 bits; or of a type that torch lacks
        return None


def _tensor(values: NDArray[Any]) -> Any:
    return torch.from_numpy(values) if values.dtype.kind in _TORCH_KINDS else values
