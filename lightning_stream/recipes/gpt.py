"""A small GPT: a decoder-only transformer over blocks in which several documents may lie, none seeing another."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class GPT(nn.Module):
    """Foretells each next token. Deterministic: no dropout.

    Args:
        vocabulary: Number of tokens.
        block: Longest sequence.
        width: Size of each token's vector.
        depth: Number of layers.
        heads: Attention heads; they divide `width`.
    """

    def __init__(self, vocabulary: int, block: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"the heads share the width evenly; found width={width}, heads={heads}.")
        self.block = block
        self.of_token = nn.Embedding(vocabulary, width)
        self.of_place = nn.Embedding(block, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:  # what is added to the stream is kept small, the more layers there are
                nn.init.normal_(weight, std=0.02 / (2 * depth) ** 0.5 if name.endswith("out.weight") else 0.02)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits float[n, t, vocabulary] of the tokens after each one.

        Args:
            tokens: int64[n, t].
            documents: int[n, t]: the document of each; places and attention begin anew with it. None for one document.
        """
        length = tokens.shape[1]
        place = torch.arange(length, device=tokens.device)
        sees = None
        if documents is not None:
            first = torch.ones_like(documents, dtype=torch.bool)
            first[:, 1:] = documents[:, 1:] != documents[:, :-1]
            place = place - torch.where(first, place, 0).cummax(1).values
            causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
            sees = (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
        stream = self.of_token(tokens) + self.of_place(place)
        for layer in self.layers:
            stream = layer(stream, sees)
        return functional.linear(self.norm(stream), self.of_token.weight)


class Layer(nn.Module):
    """Attention, then a perceptron; each adds to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.perceptron_in = nn.Linear(width, 4 * width, bias=False)
        self.perceptron_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, stream: Tensor, sees: Tensor | None) -> Tensor:
        """The stream, float[n, t, width], after this layer; `sees`: bool[n, 1, t, t], None for all that was before."""
        n, length, width = stream.shape
        parts = self.query_key_value(self.norm_attention(stream)).reshape(n, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees, is_causal=sees is None)
        stream = stream + self.attention_out(seen.transpose(1, 2).reshape(n, length, width))
        added: Tensor = self.perceptron_out(functional.gelu(self.perceptron_in(self.norm_perceptron(stream))))
        return stream + added
