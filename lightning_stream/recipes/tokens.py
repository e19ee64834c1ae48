"""Text to tokens, and documents of any length to blocks of one length, with nothing lost."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import missing_extra

BYTES = "bytes"
PADDING = -1
"""The document of a token that only fills the last block up."""
_BOUNDARIES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Turns text into token ids below `vocabulary`, and back."""

    vocabulary: int
    boundary: int
    """The token that begins each document."""
    fingerprint: str
    """Equal for equal tokenizers."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """The tokens of a text, without a boundary."""

    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens, boundaries left out."""


class ByteTokenizer:
    """Each byte of the text's UTF-8 is a token; needs no file."""

    vocabulary = 257
    boundary = 256
    fingerprint = BYTES

    def encode(self, text: str) -> NDArray[np.int64]:
        """The bytes."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: list[int]) -> str:
        """The text; bytes that are no UTF-8 become replacement characters."""
        return bytes(token for token in tokens if token < self.boundary).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``, read by their `tokenizers`.

    Args:
        path: The file.
        boundary: The token that begins each document; None for a usual one that the file has.

    Raises:
        MissingExtraError: `tokenizers` is not installed.
        ValueError: The file has no such token.
    """

    def __init__(self, path: str, boundary: str | None = None) -> None:
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ModuleNotFoundError as error:
            raise missing_extra("tokenizers", "text", f"the tokenizer in {path}") from error
        self._tokenizer: Any = tokenizers.Tokenizer.from_file(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary = int(self._tokenizer.get_vocab_size())
        names = (boundary,) if boundary else _BOUNDARIES
        found = [token for name in names if (token := self._tokenizer.token_to_id(name)) is not None]
        if not found:
            raise ValueError(
                f"each document begins with a token of its own; {path} has none of {', '.join(names)}. "
                "Set boundary= to one of the tokenizer's."
            )
        self.boundary = int(found[0])
        self.fingerprint = f"{hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}-{self.boundary}"

    def encode(self, text: str) -> NDArray[np.int64]:
        """The tokens, without the special ones that a tokenizer may add."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: list[int]) -> str:
        """The text."""
        text: str = self._tokenizer.decode([token for token in tokens if token != self.boundary])
        return text


def make_tokenizer(name: str, boundary: str | None = None) -> Tokenizer:
    """The tokenizer that a config names: ``"bytes"``, or a Hugging Face ``tokenizer.json``."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(str(Path(name).expanduser()), boundary)


class Block(NamedTuple):
    """A sample: some tokens in a row.

    Attributes:
        tokens: uint16 or uint32 [block].
        documents: int32[block]: the number of each token's document; -1 for padding.
    """

    tokens: NDArray[Any]
    documents: NDArray[np.int32]


class Packer:
    """Lays documents end to end, each after a boundary, and cuts that into blocks of one length.

    Args:
        block: Tokens of a block.
        boundary: The token that begins each document.
        dtype: Of the blocks' tokens.
    """

    def __init__(self, block: int, boundary: int, dtype: str) -> None:
        self._block = block
        self._boundary = boundary
        self._dtype = dtype
        self._tokens = np.empty(0, np.int64)
        self._documents = np.empty(0, np.int32)

    def add(self, tokens: NDArray[np.int64], document: int) -> Iterator[Block]:
        """Take a document; give the blocks that are full now."""
        self._tokens = np.concatenate([self._tokens, [self._boundary], tokens])
        self._documents = np.concatenate([self._documents, np.full(len(tokens) + 1, document, np.int32)])
        whole = len(self._tokens) // self._block * self._block
        for begin in range(0, whole, self._block):
            yield self._cut(begin)
        self._tokens, self._documents = self._tokens[whole:], self._documents[whole:]

    def rest(self) -> Iterator[Block]:
        """Fill up and give the block that is begun, if one is."""
        if missing := -len(self._tokens) % self._block:
            self._tokens = np.concatenate([self._tokens, np.full(missing, self._boundary, np.int64)])
            self._documents = np.concatenate([self._documents, np.full(missing, PADDING, np.int32)])
            yield self._cut(0)
            self._tokens, self._documents = self._tokens[:0], self._documents[:0]

    def _cut(self, begin: int) -> Block:
        cut = slice(begin, begin + self._block)
        return Block(self._tokens[cut].astype(self._dtype), self._documents[cut])


def token_dtype(vocabulary: int) -> str:
    """The smallest type that holds each token."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"
