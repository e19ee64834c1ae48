"""A small GPT: it learns to predict the next token of packed documents."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.models.task import Batch, Task


class GPT(nn.Module):
    """Decoder-only transformer."""

    def __init__(self, vocab_size: int, seq_len: int, d_model: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(seq_len, d_model)
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)
        options: Any = {"activation": "gelu", "dropout": 0.0, "batch_first": True, "norm_first": True}
        layers = [nn.TransformerEncoderLayer(d_model, n_heads, 4 * d_model, **options) for _ in range(n_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """Predict the token after each one: logits, float[n, t, vocab_size], of int64[n, t].

        Positions and attention restart with each of `documents`, int[n, t], the document of each token.
        """
        same = documents[:, :, None] == documents[:, None, :]
        sees = same.tril()
        positions = sees.sum(2) - 1  # in the document, since it sees all of it up to itself
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        hidden_from = (~sees).repeat_interleave(self.n_heads, 0)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=hidden_from)
        return functional.linear(self.norm(hidden), self.token_embedding.weight)


class LanguageModel(Task):
    """Learns to predict the next token inside rows of packed documents.

    The loss is the mean over rows of each row's mean over its tokens: so each row weighs the same on any number of
    devices. Padding, and the first token of a document, are not predicted.

    Args:
        seq_len: Tokens of a row.
        vocab_size: None: that of the datamodule's `tokenizer`.
        d_model, n_layers, n_heads: Of the transformer.
        optimizer: Arguments of `Task`.
    """

    def __init__(
        self, seq_len: int = 128, vocab_size: int | None = None, d_model: int = 128, n_layers: int = 4,
        n_heads: int = 4, **optimizer: float,
    ) -> None:  # fmt: skip
        super().__init__(**optimizer)
        self.vocab_size, self.sizes = vocab_size, (seq_len, d_model, n_layers, n_heads)
        self.network: Any = None

    def configure_model(self) -> None:
        """Make the network."""
        if self.network is None:
            trainer: Any = self.trainer
            self.network = GPT(self.vocab_size or trainer.datamodule.tokenizer.vocab_size, *self.sizes)

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        tokens, documents = batch["input_ids"].long(), batch["document_ids"]
        logits = self.network(tokens, documents)[:, :-1]
        losses = functional.cross_entropy(logits.transpose(1, 2).float(), tokens[:, 1:], reduction="none")
        is_real = torch.arange(1, tokens.shape[1], device=tokens.device) < batch["num_tokens"][:, None]
        counts = (documents[:, 1:] == documents[:, :-1]) & is_real
        return {"loss": ((losses * counts).sum(1) / counts.sum(1).clamp(min=1)).mean()}
