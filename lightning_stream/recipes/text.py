"""Text as streamed blocks of tokens: tokenised once, documents packed end to end, their numbers kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.recipes.converted_set import TRAIN, VAL, Made, split_datasets, tell
from lightning_stream.recipes.documents import GENERATED, text_source
from lightning_stream.recipes.task import TaskData
from lightning_stream.recipes.text_conversion import TextConfig, TextConversion, TextDescription
from lightning_stream.recipes.tokens import BYTES, Tokenizer, make_tokenizer


class ConvertedText(Protocol):
    """Text that becomes shards: one set, or several."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Makes its tokens."""

    @property
    def place(self) -> str:
        """Where the shards are."""

    def describe(self) -> TextDescription | None:
        """What they hold; None where there are none yet."""

    def run(self) -> Made[TextDescription]:
        """Convert, unless it was done."""


class TextData(TaskData):
    """Blocks of tokens, as batches of ``{"tokens": uint16[n, block], "documents": int32[n, block]}``.

    Args:
        conversion: Makes the shards that `train` and `val` read.
        datasets: Arguments of the ``train`` and ``val`` datasets.
        **settings: As in `TaskData`.
    """

    token_column = "tokens"

    def __init__(self, conversion: ConvertedText, datasets: Mapping[str, Mapping[str, Any]], **settings: Any) -> None:
        super().__init__(datasets, self._convert, **settings)
        self.conversion = conversion

    @property
    def description(self) -> TextDescription:
        """What the converted set holds; converts it first where that was not done."""
        return self.conversion.run().description

    @property
    def tokenizer(self) -> Tokenizer:
        """Of these tokens."""
        return self.conversion.tokenizer

    @property
    def place(self) -> str:
        """Folder or URL of the shards."""
        return self.conversion.place

    def notes(self, history: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:
        """How much text it was, and how well the held-out part is foretold."""
        held = self.description
        size = f"{held.tokens[TRAIN]} tokens of {held.documents[TRAIN]} documents in blocks of {held.block}"
        told = [f"Learnt from {size}, held out {held.tokens[VAL]} tokens. It is {held.title}."]
        measured = [values for _, values in sorted(history.items()) if "val/perplexity" in values]
        if measured:
            told.append(
                f"Of the held-out tokens {measured[-1]['val/accuracy']:.1%} are foretold; perplexity "
                f"{measured[-1]['val/perplexity']:.2f} of {held.vocabulary} tokens."
            )
        return tuple(told)

    def _convert(self) -> None:
        done = self.conversion.run()
        held = done.description
        told = f"{held.tokens[TRAIN]} tokens to train on and {held.tokens[VAL]} held out, {held.title}"
        tell(told, self.place, is_new=done.is_new)


def text_data(
    *,
    source: str | None = GENERATED,
    separator: str | None = None,
    text_key: str = "text",
    train_files: str | None = None,
    val_files: str | None = None,
    generated_count: int = 1000,
    generated_seed: int = 1,
    tokenizer: str = BYTES,
    boundary: str | None = None,
    block: int = 128,
    held_out: float = 0.1,
    conversion_workers: int | None = None,
    remote: str = "runs/shards/text",
    local: str | None = "runs/cache/text",
    compression: str | None = "zstd",
    hashes: Sequence[str] | None = None,
    size_limit: int | str = "512kb",
    cache_limit: int | str | None = None,
    num_canonical_nodes: int | None = None,
    shuffle: bool = True,
    seed: int = 1,
    global_batch_size: int = 16,
    eval_batch_size: int = 32,
    num_workers: int = 1,
    persistent_workers: bool = True,
) -> TextData:
    """Streamed text: tokenised into shards under `remote`, read back through the cache in `local`.

    Args:
        source: ``"generated"`` (stories by this package), a text file, a file of JSON lines (plain, ``.gz`` or
            ``.zst``), or a folder of such; None where `remote` itself holds a converted set.
        separator: What lies between the documents of a text file, e.g. two line ends; None where each file is one.
        text_key: Of each JSON line's text.
        train_files, val_files: Patterns of files in the folder; None trains on all, and holds out a share.
        generated_count, generated_seed: How many stories, and which.
        tokenizer: ``"bytes"``, or a Hugging Face ``tokenizer.json``.
        boundary: The token that begins each document; None for a usual one.
        block: Tokens of a sample.
        held_out: Share of the documents that is never trained on, where `val_files` says nothing.
        conversion_workers: Processes that tokenise, each a file at a time; None for one per processor.
        remote: Folder or URL for the shards.
        local: Folder for the cache; None for the default one.
        compression, hashes, size_limit: Of the shards.
        cache_limit: Bytes that the cache may hold, e.g. ``"10gb"``.
        num_canonical_nodes: See `StreamingDataset`; None derives it from the global batch.
        shuffle: Whether blocks are trained on in a shuffled order.
        seed: Of the order.
        global_batch_size: Blocks of an optimizer step over all devices.
        eval_batch_size: Blocks per device in validation.
        num_workers: Processes per device that read; 0 does so between steps.
        persistent_workers: Whether they live on from epoch to epoch.
    """
    documents = None
    if source is not None:
        documents = text_source(
            source,
            count=generated_count,
            seed=generated_seed,
            separator=separator,
            key=text_key,
            train_files=train_files,
            val_files=val_files,
        )
    config = TextConfig(block, held_out, compression, hashes_to_write(hashes), size_limit)
    conversion = TextConversion.plan(documents, make_tokenizer(tokenizer, boundary), remote, config, conversion_workers)
    datasets = split_datasets(
        conversion.place,
        local,
        shuffle=shuffle,
        seed=seed,
        cache_limit=cache_limit,
        num_canonical_nodes=num_canonical_nodes,
    )
    return TextData(
        conversion,
        datasets,
        global_batch_size=global_batch_size,
        eval_batch_size=eval_batch_size,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        seed=seed,
    )
