"""Several texts as one stream of blocks, in given proportions; and each held-out block counted once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.reading.stream import Stream
from lightning_stream.recipes.converted_set import TRAIN, VAL, Made
from lightning_stream.recipes.documents import GENERATED, text_source
from lightning_stream.recipes.text import TextData
from lightning_stream.recipes.text_conversion import TextConfig, TextConversion, TextDescription
from lightning_stream.recipes.tokens import BYTES, Tokenizer, make_tokenizer


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """One text of a mixture.

    Attributes:
        proportion: Its share of the blocks trained on, relative to the others'.
        source, separator, text_key, train_files, val_files, generated_count, generated_seed: See `text_data`.
    """

    proportion: float = 1.0
    source: str = GENERATED
    separator: str | None = None
    text_key: str = "text"
    train_files: str | None = None
    val_files: str | None = None
    generated_count: int = 1000
    generated_seed: int = 1

    def __post_init__(self) -> None:
        if not (self.proportion > 0 and math.isfinite(self.proportion)):
            raise ValueError(f"a proportion is a number above 0; found {self.proportion}. Leave a part out to skip it.")

    def conversion(
        self, tokenizer: Tokenizer, remote: str, config: TextConfig, num_workers: int | None = None
    ) -> TextConversion:
        """How this text becomes shards in a place of its own under `remote`."""
        documents = text_source(
            self.source,
            count=self.generated_count,
            seed=self.generated_seed,
            separator=self.separator,
            key=self.text_key,
            train_files=self.train_files,
            val_files=self.val_files,
        )
        return TextConversion.plan(documents, tokenizer, remote, config, num_workers)


@dataclass(frozen=True)
class TextMixture:
    """Several texts that one tokenizer makes blocks of.

    Attributes:
        conversions: How each becomes shards, by name.
    """

    conversions: Mapping[str, TextConversion]

    @property
    def tokenizer(self) -> Tokenizer:
        """Of all parts."""
        return next(iter(self.conversions.values())).tokenizer

    @property
    def place(self) -> str:
        """Where the shards are, part by part."""
        return ", ".join(conversion.place for conversion in self.conversions.values())

    def describe(self) -> TextDescription | None:
        """What the converted parts hold together; None where one was not converted yet."""
        found = {name: conversion.describe() for name, conversion in self.conversions.items()}
        known = {name: one for name, one in found.items() if one is not None}
        return _together(known) if len(known) == len(found) else None

    def run(self) -> Made[TextDescription]:
        """Convert what was not converted yet."""
        done = {name: conversion.run() for name, conversion in self.conversions.items()}
        held = _together({name: one.description for name, one in done.items()})
        return Made(held, is_new=any(one.is_new for one in done.values()))


def _together(parts: Mapping[str, TextDescription]) -> TextDescription:
    first = next(iter(parts.values()))
    counts = {
        counted: {split: sum(getattr(one, counted)[split] for one in parts.values()) for split in (TRAIN, VAL)}
        for counted in ("documents", "tokens", "blocks")
    }
    title = "a mixture: " + "; ".join(f"{name}, {one.title}" for name, one in parts.items())
    return TextDescription(title, first.tokenizer, first.vocabulary, first.block, **counts)


def mixed_text_data(
    *,
    parts: Mapping[str, TextPart],
    batching_method: str = "stratified",
    epoch_size: int | str | None = None,
    tokenizer: str = BYTES,
    boundary: str | None = None,
    block: int = 128,
    held_out: float = 0.1,
    conversion_workers: int | None = None,
    remote: str = "runs/shards/mix",
    local: str | None = "runs/cache/mix",
    compression: str | None = "zstd",
    hashes: Sequence[str] | None = None,
    size_limit: int | str = "512kb",
    cache_limit: int | str | None = None,
    num_canonical_nodes: int | None = None,
    seed: int = 1,
    global_batch_size: int = 16,
    eval_batch_size: int = 32,
    num_workers: int = 1,
    persistent_workers: bool = True,
) -> TextData:
    """Streamed text of several sources: trained on in proportion, evaluated on all that is held out, each block once.

    Args:
        parts: The texts, by name.
        batching_method: ``stratified`` (each batch has each part's share), ``random``, ``per_stream`` (each batch is
            from one part) or ``device_per_stream``.
        epoch_size: Blocks of an epoch; None for as many as there are, in these proportions.
        tokenizer, boundary, block, held_out: See `text_data`; the same for all parts.
        conversion_workers: Processes that tokenise, each a file at a time; None for one per processor.
        remote: Folder or URL for the shards.
        local: Folder for the cache; None for the default one.
        compression, hashes, size_limit: Of the shards.
        cache_limit: Bytes that each part's cache may hold, e.g. ``"10gb"``.
        num_canonical_nodes: See `StreamingDataset`; None derives it from the global batch.
        seed: Of the order, and of what is drawn of each part in each epoch.
        global_batch_size: Blocks of an optimizer step over all devices.
        eval_batch_size: Blocks per device in validation.
        num_workers: Processes per device that read; 0 does so between steps.
        persistent_workers: Whether they live on from epoch to epoch.

    Raises:
        ValueError: There are no parts.
    """
    if not parts:
        raise ValueError("a mixture has at least one part; found none. Add one: +data.parts.mine.source=<text>")
    made_by = make_tokenizer(tokenizer, boundary)
    config = TextConfig(block, held_out, compression, hashes_to_write(hashes), size_limit)
    conversions = {
        name: part.conversion(made_by, f"{remote}/{name}", config, conversion_workers) for name, part in parts.items()
    }

    def streams(split: str, weights: Mapping[str, float | None]) -> list[Stream]:
        return [
            Stream(
                remote=f"{conversion.place}/{split}",
                local=f"{local}/{name}/{conversion.place.rpartition('/')[2]}/{split}" if local else None,
                proportion=weights[name],
            )
            for name, conversion in conversions.items()
        ]

    train: dict[str, Any] = {
        "streams": streams(TRAIN, {name: part.proportion for name, part in parts.items()}),
        "shuffle": True,
        "shuffle_seed": seed,
        "batching_method": batching_method,
        "epoch_size": epoch_size,
        "cache_limit": cache_limit,
        "num_canonical_nodes": num_canonical_nodes,
    }
    val = {"streams": streams(VAL, dict.fromkeys(parts)), "cache_limit": cache_limit}
    return TextData(
        TextMixture(conversions),
        {TRAIN: train, VAL: val},
        global_batch_size=global_batch_size,
        eval_batch_size=eval_batch_size,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        seed=seed,
    )
