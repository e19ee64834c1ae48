"""Chats as rows of tokens: conversations are packed as texts are, with a mask of what the loss counts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from recipes.data.synthetic import chat
from recipes.data.text import TextData, Tokenize, Tokenizer

_LOOKED_AT = 100  # conversations of which some must have what the loss counts


@dataclass(frozen=True)
class TokenizeChats(Tokenize):
    """A conversation is bos, role, bos, content, for each message, and bos at its end.

    ``loss_mask`` is 1 for what one of `roles` said, and for the bos after it.
    """

    roles: tuple[str, ...]
    columns: ClassVar[Mapping[str, str]] = {"loss_mask": "ndarray:uint8"}
    example: ClassVar = staticmethod(chat)

    def __call__(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        tokenizer = Tokenizer(self.tokenizer, self.bos_token)
        end = tokenizer.document("")
        for row in rows:
            messages: Any = row.get(self.text_key)
            if not _are_messages(messages):
                columns = ", ".join(sorted(row))
                raise FormatError(
                    f"each row must have messages in {self.text_key!r}, with texts as role and content; found "
                    f"{str(messages)[:200]}, and it has {columns}. Set data.text_key."
                )
            texts = [text for message in messages for text in (message["role"], message["content"])]
            counted = [is_said and message["role"] in self.roles for message in messages for is_said in (False, True)]
            parts = [*map(tokenizer.document, texts)]
            mask = np.repeat(counted, [*map(len, parts)])
            yield {"tokens": np.concatenate([*parts, end]), "loss_mask": np.append(False, mask).astype("uint8")}


def _are_messages(value: Any) -> bool:
    """Whether these are messages, at least one, of which each has texts as role and content."""
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return False
    texts = [message.get(part) for message in value for part in ("role", "content")]
    return bool(texts) and all(isinstance(text, str) for text in texts)


class ChatData(TextData):
    """Streams rows of packed conversations; ``configs/data/chats.yaml`` describes the settings."""

    def __init__(self, *, roles: Sequence[str] = ("assistant",), **text: Any) -> None:
        self.roles = (roles,) if isinstance(roles, str) else tuple(roles)
        super().__init__(**text)

    def convert_source(self) -> None:
        """Write the conversations. FormatError where the first ones have nothing that the loss counts."""
        super().convert_source()
        dataset: Any = self.datasets["train"]
        ids = range(min(_LOOKED_AT, dataset.size))
        if not any(dataset[sample_id]["loss_mask"].any() for sample_id in ids):
            raise FormatError(
                f"the loss counts what {' and '.join(self.roles)} said, and nobody of these says anything in the first "
                f"{len(ids)} conversations. Set data.roles."
            )

    def rule(self, **of_text: Any) -> TokenizeChats:
        return TokenizeChats(**of_text, roles=self.roles)
