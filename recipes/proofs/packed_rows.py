"""Proof: a GPT trained on packed rows is no worse than one trained on blocks, after as many tokens.

    python -m recipes.proofs.packed_rows                                                       # synthetic stories
    python -m recipes.proofs.packed_rows --source tinyshakespeare.txt --separator '\\n\\n'

*Blocks* are the usual way without packing: documents are joined and cut after every S tokens, so that attention reaches
into other documents, and a document's beginning may be in another block. Both models have the same size, seeds and
rows a step. Each is validated on packed rows, where each token sees only its own document, and on blocks.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_stream import StreamingDataLoader
from recipes.data.text import TextData, Tokenize
from recipes.models.gpt import LanguageModel

_ROWS = 16  # of a step


@dataclass(frozen=True)
class Blocks(Tokenize):
    """Joins the documents of a partition, and cuts them into blocks."""

    length: int = 128

    def __call__(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        tokens = np.concatenate([sample["tokens"] for sample in super().__call__(rows)])
        return ({"tokens": tokens[begin : begin + self.length]} for begin in range(0, len(tokens), self.length))


class BlockData(TextData):
    """A row is a block: for `Packing`, a document that fills it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.tokenize = Blocks(**vars(self.tokenize), length=self.pack.row_length)


def train(data: TextData, total: int, seed: int) -> tuple[LanguageModel, int]:
    """Train a small GPT on about so many tokens; returns it, and how many they were."""
    model = LanguageModel(d_model=64, n_layers=2, learning_rate=0.003, seed=seed)
    model.build(data)
    dataset, num_tokens = data.train_dataset, 0
    rows = StreamingDataLoader(dataset, 1).num_batches(0)
    steps = round(total / (_ROWS * dataset.lengths("tokens").sum() / rows))
    optimizer = model.optimizer()
    schedule = model.schedule(optimizer, steps)
    loader = StreamingDataLoader(dataset, _ROWS, tail="drop")
    for batch in islice(chain.from_iterable(repeat(loader)), steps):  # epoch after epoch
        num_tokens += int(batch["num_tokens"].sum())
        keep = torch.ones(len(batch["input_ids"]), dtype=torch.bool)
        optimizer.zero_grad()
        model.training_loss(batch, keep, len(keep)).backward()
        optimizer.step()
        schedule.step()
    return model, num_tokens


def validate(model: LanguageModel, data: TextData) -> float:
    """The mean loss of a validation token."""
    with torch.inference_mode():
        for batch in StreamingDataLoader(data.val_dataset, 32, evaluation=True):
            model.evaluate(batch)
    return model.end_pass("val", 0)["val/loss"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python -m recipes.proofs.packed_rows")
    parser.add_argument("--out", type=Path, default=Path("runs/packed_rows"), help="folder of the shards")
    parser.add_argument("--source", default="synthetic", help="text; see configs/data/text.yaml")
    parser.add_argument("--separator", help="what divides the text into documents")
    parser.add_argument("--row-length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of 16 full rows")
    parser.add_argument("--seeds", type=int, default=3, help="training runs on each kind of rows")
    parser.add_argument("--tolerance", type=float, default=0.0, help="by how much packed rows may be worse")
    given = parser.parse_args(argv)
    losses: dict[str, list[list[float]]] = {"packed rows": [], "blocks": []}
    for seed in range(1, given.seeds + 1):
        data = {}
        for name, kind in (("packed rows", TextData), ("blocks", BlockData)):
            settings: dict[str, Any] = {part: str(given.out / name / part) for part in ("remote", "local")}
            settings |= {"source": given.source, "separator": given.separator, "seq_len": given.row_length}
            data[name] = kind(**settings, size_limit="64kb", num_canonical_nodes=1, seed=seed)
            data[name].prepare_data()
        for name, own in data.items():
            model, num_tokens = train(own, given.steps * _ROWS * given.row_length, seed)
            losses[name].append([validate(model, each) for each in data.values()])
            print(f"seed {seed}, {name}: {num_tokens:,} tokens, losses {losses[name][-1]}", flush=True)
    print("trained on      validated on packed rows    validated on blocks")
    for name, found in losses.items():
        means = [f"{mean:.3f} ({low:.3f} to {high:.3f})" for mean, low, high in _spread(found)]
        print(f"{name:<16}{means[0]:<28}{means[1]}")
    packed, blocks = (_spread(losses[name])[number][0] for number, name in enumerate(losses))
    return int(packed > blocks + given.tolerance)


def _spread(found: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """The mean, the least and the greatest of each column."""
    return [(sum(column) / len(column), min(column), max(column)) for column in zip(*found, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
