"""A small GPT: it predicts the next token of packed documents, which may begin with images."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.nn.utils.rnn import pad_sequence

from recipes.models.task import Batch, Task


@cache
def compiled_attention() -> Any:
    """FlexAttention compiled, for a GPU. To import the compiler takes seconds, so this waits for its first use."""
    return torch.compile(flex_attention)


class Block(nn.TransformerEncoderLayer):
    """A layer whose tokens attend to what a mask lets them see, a `BlockMask` or bool[n, 1, t, t]."""

    def forward(self, hidden: Tensor, sees: Any) -> Tensor:  # type: ignore[override]
        weight = self.self_attn.in_proj_weight
        bias = self.self_attn.in_proj_bias
        projected = functional.linear(self.norm1(hidden), weight, bias).unflatten(2, (3, self.self_attn.num_heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended: Any
        if isinstance(sees, BlockMask):
            attention = compiled_attention() if hidden.is_cuda else flex_attention
            attended = attention(query, key, value, block_mask=sees)
        else:
            attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)
        hidden = hidden + self.self_attn.out_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.linear2(functional.gelu(self.linear1(self.norm2(hidden))))


class GPT(nn.Module):
    """Decoder-only transformer; `flex` attends by FlexAttention, which trains on a GPU, else by a mask of all pairs."""

    def __init__(
        self, vocab_size: int, seq_len: int, d_model: int, n_layers: int, n_heads: int, flex: bool = False,
        patch_size: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.flex = flex
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(seq_len, d_model)
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)
        self.layers = nn.ModuleList([Block(d_model, n_heads, 4 * d_model) for _ in range(n_layers)])
        self.norm = nn.LayerNorm(d_model)
        self.patches = nn.Conv2d(3, d_model, patch_size, patch_size) if patch_size else None

    def forward(
        self, tokens: Tensor, documents: Tensor, positions: Tensor, pixels: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Predict the token after each one: logits, float[n, t, vocab_size], of int64[n, t].

        A token sees those before it in its document; `documents`, int[n, t], has their numbers, and `positions` the
        places in them. Where tokens are -1 are the patches of the images, uint8[images, 3, h, w].
        """

        def is_seen(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (documents[row, query] == documents[row, key]) & (query >= key)

        count, length = tokens.shape
        if length > (most := self.position_embedding.num_embeddings):
            raise ValueError(
                f"a row of the data fits into the model; found rows of {length} tokens, and seq_len={most}. Set "
                "model.seq_len to data.seq_len, or omit it"
            )
        make: Any = create_block_mask if self.flex else create_mask
        sees = make(is_seen, count, None if self.flex else 1, length, length, device=tokens.device)
        hidden = self.token_embedding(tokens.clamp(min=0))
        if self.patches is not None and pixels is not None:
            patches = self.patches(pixels / 127.5 - 1).flatten(2).transpose(1, 2).flatten(0, 1)
            is_patch = tokens < 0
            if len(patches) != (places := int(is_patch.sum())):
                raise ValueError(
                    "each patch of an image must have its place in a row, so model.patch_size must be data.patch_size; "
                    f"found {len(patches)} patches and {places} places"
                )
            hidden = hidden.masked_scatter(is_patch[..., None], patches.to(hidden.dtype))
        hidden = hidden + self.position_embedding(positions)
        for layer in self.layers:
            hidden = layer(hidden, sees)
        return functional.linear(self.norm(hidden), self.token_embedding.weight)


def as_rows(batch: Batch) -> Batch:
    """A batch of whole samples, which are packed one after the other, as padded rows [n, t]."""
    sizes = batch["num_tokens"].tolist()
    names = ("input_ids", "document_ids", "position_ids", "loss_mask")
    return {**batch, **{name: pad_sequence(batch[name].split(sizes), batch_first=True) for name in names}}


class LanguageModel(Task):
    """Learns to predict the next token inside rows of packed documents.

    The loss is the mean over rows of each row's mean over its tokens: so each row weighs the same on any number of
    devices. Padding, and the first token of a document, are not predicted; nor is what a ``loss_mask`` leaves out.

    Args:
        seq_len: Tokens of a row.
        vocab_size: None: that of the datamodule's `tokenizer`.
        d_model, n_layers, n_heads, flex, patch_size: Of the transformer, see `GPT`.
        optimizer: Arguments of `Task`.
    """

    def __init__(
        self, seq_len: int = 128, vocab_size: int | None = None, d_model: int = 128, n_layers: int = 4,
        n_heads: int = 4, flex: bool = False, patch_size: int = 0, **optimizer: float,
    ) -> None:  # fmt: skip
        super().__init__(**optimizer)
        if d_model % n_heads:
            raise ValueError(f"d_model is a multiple of n_heads; found d_model={d_model}, n_heads={n_heads}")
        self.vocab_size = vocab_size
        self.sizes = (seq_len, d_model, n_layers, n_heads, flex, patch_size)
        self.network: Any = None

    def configure_model(self) -> None:
        """Make the network."""
        if self.network is not None:
            return
        trainer: Any = self.trainer
        tokenizer = getattr(trainer.datamodule, "tokenizer", None)
        of_data = 1 if tokenizer is None else tokenizer.vocab_size
        vocab_size = of_data if self.vocab_size is None else self.vocab_size
        if vocab_size < of_data or tokenizer is self.vocab_size is None:
            raise ValueError(
                f"a model needs a place for each token of the data's tokenizer; found model.vocab_size="
                f"{self.vocab_size}, and {of_data} tokens. Omit it where the data has a tokenizer"
            )
        self.network = GPT(vocab_size, *self.sizes)

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        if "row_splits" in batch:
            batch = as_rows(batch)
        tokens = batch["input_ids"].long()
        documents = batch["document_ids"]
        logits = self.network(tokens, documents, batch["position_ids"], batch.get("pixels"))[:, :-1]
        losses = functional.cross_entropy(
            logits.transpose(1, 2).float(), tokens[:, 1:], reduction="none", ignore_index=-1
        )
        is_real = torch.arange(1, tokens.shape[1], device=tokens.device) < batch["num_tokens"][:, None]
        counts = (documents[:, 1:] == documents[:, :-1]) & is_real
        if "loss_mask" in batch:
            counts &= batch["loss_mask"][:, 1:].bool()
        return {"loss": ((losses * counts).sum(1) / counts.sum(1).clamp(min=1)).mean()}
