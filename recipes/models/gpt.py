"""A small GPT: it learns to predict the next token of packed documents, and writes a sample of text at the end."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from recipes.data.text import TextData
from recipes.models.base import Batch, ExactMean, LossOutput, RecipeModule

_SHOWN_CHARACTERS = 300


class GPT(nn.Module):
    """Decoder-only transformer."""

    def __init__(
        self, vocab_size: int, seq_len: int, d_model: int, n_layers: int, n_heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(seq_len, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(d_model, n_heads, dropout) for _ in range(n_layers)])
        self.norm = nn.LayerNorm(d_model)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:  # GPT-2's initialization: residual projections shrink with the depth
                nn.init.normal_(weight, std=0.02 / (2 * n_layers) ** 0.5 if name.endswith("_out.weight") else 0.02)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Predict the token after each one: logits, float[n, t, vocab_size], of int64[n, t].

        Positions and attention restart with each of `documents`, int[n, t], the document of each token.
        """
        length = tokens.shape[1]
        positions, mask = torch.arange(length, device=tokens.device), None
        if documents is not None:
            is_first = torch.ones_like(documents, dtype=torch.bool)
            is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
            positions = positions - torch.where(is_first, positions, 0).cummax(1).values
            causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
            mask = (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
        hidden = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            hidden = block(hidden, mask)
        return functional.linear(self.norm(hidden), self.token_embedding.weight)


class Block(nn.Module):
    """Pre-norm self-attention and a perceptron, each with a residual connection."""

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.attention_out = nn.Linear(d_model, d_model, bias=False)
        self.mlp_in = nn.Linear(d_model, 4 * d_model, bias=False)
        self.mlp_out = nn.Linear(4 * d_model, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Transform float[n, t, d_model]; `mask` is bool[n, 1, t, t], or None for plain causal attention."""
        n, length, width = hidden.shape
        q, k, v = self.qkv(self.attention_norm(hidden)).reshape(n, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        hidden = hidden + self.dropout(self.attention_out(attended.transpose(1, 2).reshape(n, length, width)))
        return hidden + self.dropout(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden)))))


class Perplexity(ExactMean):
    """e to the mean loss; inf where that is too large for a float."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class LanguageModel(RecipeModule):
    """Learns to predict the next token inside rows of packed documents.

    The bos token is predicted too: so the model learns where a document ends. Padding is neither attended to nor
    predicted. With `mask_documents` positions and attention restart with each document.
    """

    data_type = TextData
    shown = ("train/loss", "val/loss", "val/perplexity", "val/accuracy")
    betas = (0.9, 0.95)

    def __init__(
        self, *, d_model: int = 128, n_layers: int = 4, n_heads: int = 4, dropout: float = 0.0,
        mask_documents: bool = True, sample_tokens: int = 300, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(**shared)
        self.sizes = (d_model, n_layers, n_heads, dropout)
        self.mask_documents, self.sample_tokens, self.bos_token = mask_documents, sample_tokens, -1

    def make_metrics(self) -> dict[str, Metric]:
        return {"loss": ExactMean(), "accuracy": ExactMean(), "perplexity": Perplexity()}

    def make_network(self, data: TextData) -> nn.Module:
        self.bos_token = data.tokenizer.bos_token
        return GPT(data.tokenizer.vocab_size, data.pack.row_length, *self.sizes)

    def compute_loss(self, batch: Batch) -> LossOutput:
        """The mean cross-entropy of each row; the metrics count tokens."""
        tokens, documents = batch["input_ids"].long(), batch["document_ids"]
        logits = self.network(tokens, documents if self.mask_documents else None)[:, :-1]
        targets = tokens[:, 1:]
        losses = functional.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none")
        is_real = torch.arange(1, tokens.shape[1], device=tokens.device) < batch["num_tokens"][:, None]
        counts = ((documents[:, 1:] == documents[:, :-1]) | (targets == self.bos_token)) & is_real
        means = (losses * counts).sum(1) / counts.sum(1).clamp(min=1)
        right = (logits.argmax(2) == targets).float()
        return LossOutput(
            means, {"loss": (losses, counts), "accuracy": (right, counts), "perplexity": (losses, counts)}
        )

    def show(self, data: TextData, folder: Path) -> dict[str, Path]:
        """Write a sample of text."""
        if not self.sample_tokens:
            return {}
        text = data.tokenizer.decode(self.generate(self.sample_tokens))
        (folder / "sample.txt").write_text(text, encoding="utf-8")
        print("\nSample:", *text[:_SHOWN_CHARACTERS].strip().splitlines(), sep="\n    ")
        return {"sample": folder / "sample.txt"}

    @torch.inference_mode()
    def generate(self, count: int, temperature: float = 0.8) -> list[int]:
        """Draw `count` tokens of one document; the same for the same weights."""
        self.eval()
        rng = torch.Generator().manual_seed(self.seed)
        tokens = [self.bos_token]
        for _ in range(count):
            context = torch.tensor([tokens[-self.network.seq_len :]], device=self.device)
            logits = self.network(context)[0, -1].float().cpu()
            logits[self.bos_token] = -torch.inf
            tokens.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=rng)))
        return tokens
