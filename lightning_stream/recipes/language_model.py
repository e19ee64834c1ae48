"""A GPT that learns from streamed blocks of tokens, and shows what it would write."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from lightning_stream.recipes.evaluation import Tally, tally
from lightning_stream.recipes.gpt import GPT
from lightning_stream.recipes.task import Batch, Judged, Shown, TaskData, TaskModel, fitting
from lightning_stream.recipes.text import TextData
from lightning_stream.recipes.tokens import PADDING

_SHOWN_CHARACTERS = 300


class LanguageModel(TaskModel):
    """Learns to foretell the next token, within documents that lie end to end in blocks.

    A document begins with a boundary, which is foretold too: it is where the one before ends. What only fills a block
    up is neither seen nor foretold.

    Args:
        width, depth, heads: See `GPT`.
        reset_at_documents: Whether places and attention begin anew with each document.
        learning_rate, weight_decay, warmup: See `TaskModel`.
        sample_tokens: Length of the text that is written at the end; 0 for none.
        seed: Of the first weights, and of that text.
    """

    shown = ("train/loss", "val/loss", "val/perplexity", "val/accuracy")
    betas = (0.9, 0.95)
    learns_from = TextData

    def __init__(
        self,
        *,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        reset_at_documents: bool = True,
        learning_rate: float = 0.002,
        weight_decay: float = 0.1,
        warmup: float = 0.05,
        sample_tokens: int = 300,
        seed: int = 1,
    ) -> None:
        super().__init__(learning_rate, weight_decay, warmup)
        self.width, self.depth, self.heads = width, depth, heads
        self.reset_at_documents = reset_at_documents
        self.sample_tokens = sample_tokens
        self.seed = seed
        self.boundary = -1
        self.network: GPT | None = None

    def build(self, data: TaskData) -> None:
        """Make the network, unless that was done, for the data's tokenizer and blocks."""
        if self.network is not None:
            return
        text = fitting(data, TextData, "Choose text, e.g. +data=text, or a model for this data.")
        held = text.description
        self.boundary = text.tokenizer.boundary
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.network = GPT(held.vocabulary, held.block, self.width, self.depth, self.heads)

    def judge(self, batch: Batch) -> Judged:
        """Each block's mean cross-entropy; the measures count tokens."""
        assert self.network is not None
        tokens, documents = batch["tokens"].long(), batch["documents"]
        logits = self.network(tokens, documents if self.reset_at_documents else None)[:, :-1]
        targets = tokens[:, 1:]
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        losses = losses.reshape(targets.shape)
        counts = self._counts(tokens, documents)
        means = (losses * counts).sum(1) / counts.sum(1).clamp(min=1)
        return Judged(means, tally(logits.argmax(2) == targets, losses, counts))

    def _counts(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """bool[n, t - 1]: which targets follow from what can be seen before them."""
        goes_on = documents[:, 1:] == documents[:, :-1]
        return (goes_on | (tokens[:, 1:] == self.boundary)) & (documents[:, 1:] != PADDING)

    @staticmethod
    def measures(counted: Tally) -> dict[str, float]:
        """Perplexity too: e to the mean loss."""
        loss = counted.loss
        return {"accuracy": counted.accuracy, "loss": loss, "perplexity": math.exp(loss) if loss < 700 else loss}

    def show(self, data: TaskData, folder: Path) -> Shown:
        """Text that the model writes."""
        assert isinstance(data, TextData)
        if not self.sample_tokens:
            return Shown()
        text = data.tokenizer.decode(self.write(self.sample_tokens))
        path = folder / "sample.txt"
        path.write_text(text, encoding="utf-8")
        shown = text[:_SHOWN_CHARACTERS].strip()
        return Shown({"sample": str(path)}, ("It writes:", *(f"    {line}" for line in shown.splitlines() if line)))

    @torch.inference_mode()
    def write(self, count: int, temperature: float = 0.8) -> list[int]:
        """Tokens that the model draws, one after the other, from a document's beginning; equal for equal weights."""
        network = self.network
        assert network is not None
        chance = torch.Generator().manual_seed(self.seed)
        self.eval()
        written = [self.boundary]
        for _ in range(count):
            begin = (
                max(i for i, token in enumerate(written) if token == self.boundary) if self.reset_at_documents else 0
            )
            seen = torch.tensor([written[max(begin, len(written) - network.block) :]], device=self.device)
            logits = network(seen)[0, -1].float().cpu() / temperature
            written.append(int(torch.multinomial(logits.softmax(0), 1, generator=chance)))
        return written
