"""Things that users do with a training loader that are not training, under any trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

KINDS = ("look", "look", "three", "kept", "pass", "statistics", "state")
SECOND_LOADERS = ("second", "kept second", "second of torch")


@dataclass(frozen=True)
class Look:
    """Something done with the training loader in a hook of the trainer's, from an optimizer step on."""

    hook: str
    step: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.hook} {self.step}"


def use(loader: Any, kind: str) -> list[Any]:
    """Do something with a training loader that is not training; gives the iterations that are kept open."""
    if kind in ("look", "three", "kept"):
        batches = iter(loader)
        for _ in range(1 if kind == "look" else 3):
            next(batches, None)
        return [batches] if kind == "kept" else []
    if kind == "pass":
        assert len(list(loader)) > 0
    elif kind == "statistics":
        assert len(list(loader.look())) == len(loader)
    elif kind in ("second", "kept second"):
        dataset, size = loader.streaming, {} if loader.streaming.batch_tokens else {"batch_size": 5}
        batches = iter(type(loader)(dataset, collate_fn=len, world=loader.world, **size))
        next(batches, None), next(batches, None)
        return [batches] if kind == "kept second" else []
    elif kind == "second of torch":
        next(iter(DataLoader(loader.dataset, 16)))
    elif kind == "state":
        assert loader.state_dict() == loader.state_dict()
    else:
        raise ValueError(f"there is no way {kind!r} to use a loader")
    return []
