"""A small GPT: it learns to predict the next token of streamed blocks, and writes a sample of text at the end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.data.text import PADDING, TextData
from recipes.models.base import Artifacts, LossOutput, RecipeModule

_SHOWN_CHARACTERS = 300


class GPT(nn.Module):
    """Decoder-only transformer without dropout.

    Args:
        vocab_size: Number of tokens.
        seq_len: Longest sequence.
        d_model: Embedding dimension.
        n_layers: Number of blocks.
        n_heads: Attention heads; they divide `d_model`.
    """

    def __init__(self, vocab_size: int, seq_len: int, d_model: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"n_heads must divide d_model; found d_model={d_model}, n_heads={n_heads}.")
        self.seq_len = seq_len
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(seq_len, d_model)
        self.blocks = nn.ModuleList([Block(d_model, n_heads) for _ in range(n_layers)])
        self.norm = nn.LayerNorm(d_model)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:  # GPT-2's initialization: residual projections shrink with the depth
                nn.init.normal_(weight, std=0.02 / (2 * n_layers) ** 0.5 if name.endswith("_out.weight") else 0.02)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Predict the token after each one.

        Args:
            tokens: int64[n, t].
            documents: int[n, t], the document of each token; positions and attention restart with each document. None
                treats a block as one document.

        Returns:
            Logits, float[n, t, vocab_size].
        """
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        mask = None
        if documents is not None:
            is_first = torch.ones_like(documents, dtype=torch.bool)
            is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
            positions = positions - torch.where(is_first, positions, 0).cummax(1).values
            causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
            mask = (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return functional.linear(self.norm(hidden), self.token_embedding.weight)


class Block(nn.Module):
    """Pre-norm self-attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.attention_out = nn.Linear(d_model, d_model, bias=False)
        self.mlp_in = nn.Linear(d_model, 4 * d_model, bias=False)
        self.mlp_out = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Transform float[n, t, d_model]; `mask` is bool[n, 1, t, t], or None for plain causal attention."""
        n, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).reshape(n, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=mask is None)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(n, length, width))
        out: Tensor = hidden + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return out


class LanguageModel(RecipeModule):
    """Learns to predict the next token inside blocks of packed documents.

    A document begins with the bos token, which is predicted too: it is how the model learns where a document ends.
    Padding is neither attended to nor predicted.

    Args:
        d_model, n_layers, n_heads: See `GPT`.
        document_mask: Whether positions and attention restart with each document of a block.
        sample_tokens: Tokens of the text sample that is written at the end; 0 for none.
        seed: Random seed of the first weights and of the text sample.
        **optimizer: Learning rate, weight decay and warmup, see `RecipeModule`.
    """

    data_type = TextData
    betas = (0.9, 0.95)

    def __init__(
        self,
        *,
        d_model: int = 128,
        n_layers: int = 4,
        n_heads: int = 4,
        document_mask: bool = True,
        sample_tokens: int = 300,
        seed: int = 1,
        **optimizer: Any,
    ) -> None:
        super().__init__(**optimizer)
        self.d_model, self.n_layers, self.n_heads = d_model, n_layers, n_heads
        self.document_mask = document_mask
        self.sample_tokens = sample_tokens
        self.seed = seed
        self.bos_token = -1
        self.network: GPT | None = None
