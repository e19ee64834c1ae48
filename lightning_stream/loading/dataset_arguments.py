"""Checks of a dataset's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from lightning_stream.formats.sizes import whole
from lightning_stream.loading.packing import Bucketing, Packing
from lightning_stream.order import MosaicConfig, OrderConfig, Schedule, StreamWeights
from lightning_stream.order.buckets import LengthBuckets
from lightning_stream.order.config import MOSAIC_ALGORITHMS
from lightning_stream.order.mosaic.partitions import PARTITIONS
from lightning_stream.order.rules import count, violations
from lightning_stream.order.run import check_weights
from lightning_stream.reading.stream import Stream, labels_of, name_of, weights_of, with_split


def whole_numbers(**given: float | None) -> list[int | None]:
    """Numbers that may be floats (``1e9``) or None, as whole numbers; raise ValueError for others."""
    numbers = {name: whole(value) for name, value in given.items()}
    rules = {name: count(int(name != "predownload"), optional=True) for name in numbers}
    if problems := violations(numbers, rules):
        raise ValueError(" ".join(problems))
    return list(numbers.values())


def bound_schedule(given: Any, streams: Sequence[Stream]) -> Schedule | None:
    """The schedule of a mixture, given as itself or by its points, for streams in this order."""
    if given is None:
        return None
    return (given if isinstance(given, Schedule) else Schedule(given)).of_streams(labels_of(streams))


def bucketing(by: str | None, window: float | None, tokens: float | None, multiple: float | None) -> Bucketing | None:
    """How samples of similar lengths come together; None if they do not. ValueError for settings that lack another."""
    numbers = whole_numbers(bucket_window=window, batch_tokens=tokens, batch_multiple=multiple)
    by = "tokens" if by is None and tokens is not None else by
    if window is not None and by is None:
        raise ValueError(f"bucket_window needs bucket_by; found bucket_window={window} alone. Pass bucket_by too")
    if multiple is not None and tokens is None:
        raise ValueError(f"batch_multiple needs batch_tokens; found batch_multiple={multiple} alone. Pass both")
    return None if by is None else Bucketing(by, *numbers)


def mosaic_settings(algorithm: str | None, partition: str, block_size: int | None) -> MosaicConfig | None:
    """The settings of the orders of mosaicml-streaming; None for the native one. ValueError for a wrong partition."""
    if partition not in PARTITIONS:
        raise ValueError(f"partition_algo is one of {', '.join(PARTITIONS)}; found {partition!r}. Correct it")
    return MosaicConfig(partition, block_size) if algorithm in MOSAIC_ALGORITHMS else None


def check_order(
    arguments: Mapping[str, Any],
    streams: Sequence[Stream],
    batch_size: int,
    pack: Packing | None,
    balance: object,
    buckets: Bucketing | None,
    forget: object,
) -> None:
    """Raise ValueError for settings of an order that are wrong, or contradict each other or the streams' weights."""
    rows = None if pack is None else pack.rows("")
    sorted_by = None if buckets is None else LengthBuckets(1, 1, buckets.batch_tokens)
    given = {**arguments, "packing": rows, "buckets": sorted_by, "forgotten": None if forget is None else ""}
    order = OrderConfig.resolve(batch_size=1, device_batch_size=1, **given)
    weights = tuple(map(weights_of, streams))
    if order.schedule is not None or any(one != StreamWeights() for one in weights):
        check_weights(order, [*map(name_of, streams)], weights)
    check_blocks(arguments, batch_size, batch_size)
    if not (balance is None or isinstance(balance, str) or callable(balance)):
        raise TypeError(f"balance is the name of lengths or a function of them; found {balance!r}. Pass e.g. 'tokens'")
    if balance is not None and not order.batching.can_be_balanced:
        raise ValueError(
            f"this order assigns samples to ranks itself; found balance={balance!r} with batching_method="
            f"{order.batching_method!r} and shuffle_algo={order.algorithm!r}. Omit balance, or choose another order"
        )


def check_blocks(arguments: Mapping[str, Any], batch_size: int, block: int) -> None:
    """Raise ValueError for a schedule whose epochs cannot be cut into batches of one stream.

    ``batch_size`` divides the global batch; ``block`` is the batch per device. A state may bring another block, which
    divides the epochs.
    """
    if arguments["schedule"] is not None:
        shared = gcd(block, arguments["epoch_size"] or 0)
        block = 1 if 1 < shared < block else block
        OrderConfig.resolve(batch_size=batch_size, device_batch_size=block, **arguments)


def chosen_streams(
    streams: Sequence[Stream] | None, name: str, given: Mapping[str, Any], config: Mapping[str, Any] | None
) -> tuple[Stream, ...]:
    """The streams of a dataset, given themselves or by the arguments of a single one."""
    if name != "stream":
        raise ValueError(
            f"a stream of another class is passed itself; found stream_name={name!r}. Pass streams=[YourStream(...)]"
        )
    if not streams:
        return (Stream(**{**(config or {}), **{name: value for name, value in given.items() if value is not None}}),)
    if config or any(given[name] is not None for name in given if name != "split"):
        raise ValueError("pass either streams=, or remote=, local=... of a single one, not both")
    relative = [stream for stream in streams if stream.proportion is not None]
    if relative and len(relative) < len(streams):
        others = [stream for stream in streams if stream.proportion is None]
        raise ValueError(
            "the streams of a mix are weighted all by proportion, or all by repeat or choose; found a proportion for "
            f"{relative} and none for {others}. Give every stream a proportion, or none"
        )
    return tuple(with_split(stream, given["split"] or "") for stream in streams)
