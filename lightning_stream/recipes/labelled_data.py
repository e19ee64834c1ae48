"""Samples of some classes, as streamed training data: what all recipes have in common that tell classes apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lightning_stream.dataset import StreamingDataset
from lightning_stream.recipes.converted_set import VAL, Made, tell
from lightning_stream.recipes.task import TaskData


class Described(Protocol):
    """What a converted set of some classes says of itself."""

    @property
    def title(self) -> str:
        """What it is, for people."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into them."""

    @property
    def num_train(self) -> int:
        """Samples to train on."""

    @property
    def num_val(self) -> int:
        """Samples held out."""


class Convertible(Protocol):
    """A set that is converted once."""

    @property
    def place(self) -> str:
        """Folder or URL of its shards."""

    def run(self) -> Made[Described]:
        """Convert, unless it was done."""


class LabelledData(TaskData):
    """Samples with a ``label``, converted once and streamed.

    Args:
        conversion: Makes the shards that `datasets` read.
        datasets: Arguments of the ``train`` and ``val`` datasets, see `split_datasets`.
        **settings: As in `TaskData`.
    """

    def __init__(self, conversion: Convertible, datasets: Mapping[str, Mapping[str, Any]], **settings: Any) -> None:
        super().__init__(datasets, self._convert, **settings)
        self.conversion = conversion

    @property
    def description(self) -> Described:
        """What the converted set holds; converts it first where that was not done."""
        return self.conversion.run().description

    @property
    def place(self) -> str:
        """Folder or URL of the shards."""
        return self.conversion.place

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into them."""
        return self.description.classes

    @property
    def source(self) -> str:
        """What the samples are, and where they come from, for people."""
        return self.description.title

    @property
    def held_out(self) -> StreamingDataset:
        """The validation samples, to be read by index."""
        dataset = self.datasets[VAL]
        assert dataset is not None
        return dataset

    def notes(self, history: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:
        """How many, how well they are told apart, and what they are."""
        held = self.description
        validated = [values["val/accuracy"] for _, values in sorted(history.items()) if "val/accuracy" in values]
        share = f": {validated[-1]:.1%} of the held-out ones are recognised" if validated else ""
        chance = f"by chance it would be {1 / len(held.classes):.0%}"
        return (f"Learnt from {held.num_train}, held out {held.num_val}{share} ({chance}).", f"It is {held.title}.")

    def told(self, description: Described) -> str:
        """What a set holds, in a line."""
        return f"{description.num_train} to train on and {description.num_val} held out, {description.title}"

    def _convert(self) -> None:
        done = self.conversion.run()
        tell(self.told(done.description), self.place, is_new=done.is_new)
