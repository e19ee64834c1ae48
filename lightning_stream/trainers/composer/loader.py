"""The loader that Composer iterates, and the dataset that keeps its position in Composer's protocol."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Any, Protocol

from torch.utils.data import Dataset, IterableDataset

from lightning_stream.dataset import StreamingDataset
from lightning_stream.errors import StateError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.order import Position, is_mosaic_state
from lightning_stream.order.micro_batches import BatchInfo

STATE_KEY = "lightning_stream"


class Follower(Protocol):
    """Who knows what a running trainer has trained on."""

    def joins(self, caller: FrameType | None) -> bool:
        """Whether the frame that iterates the loader is a trainer's training loop; begins to follow it if so."""

    def upcoming(self) -> int | None:
        """Let the loader begin where the trainer stands; at most how many batches of this epoch are to come."""

    def handed_out(self, info: BatchInfo) -> object:
        """Note a batch that is about to be handed to the trainer."""

    def trained(self) -> Position | None:
        """The position of the last step; None while no trainer is followed."""

    def resume(self, position: Position | None, of_mosaic: bool) -> None:
        """Take up what a checkpoint holds; None if it holds nothing."""


class ComposerLoader(StreamingDataLoader):
    """A `StreamingDataLoader` whose dataset speaks Composer's state protocol; see `data_spec`, which makes it."""

    def __init__(self, dataset: StreamingDataset, follower: Follower | None, **options: Any) -> None:
        self.follower = follower
        super().__init__(dataset, **options)

    # Composer asks `loader.dataset` for the state, and the state is the loader's.
    @property
    def dataset(self) -> Dataset[Any]:
        """What is loaded, with the position in it."""
        return self._positioned

    @dataset.setter
    def dataset(self, dataset: Dataset[Any]) -> None:
        assert isinstance(dataset, StreamingDataset)
        self._positioned = PositionedDataset(dataset, self)

    @property
    def _streaming(self) -> StreamingDataset:
        return self._positioned.streaming

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        """Yield the batches; to a running trainer, from where it stands."""
        if self.evaluation:
            self._refuse_empty_ranks()
        joined = self.follower is not None and self.follower.joins(_caller_of_caller())
        limit = self.follower.upcoming() if self.follower is not None and joined else None
        if limit != 0:
            yield from islice(super().__iter__(), limit)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch over all replicas."""
        return self._run(self.settings()).epoch(0).num_samples

    def _refuse_empty_ranks(self) -> None:
        world = self.detect_world()
        if self.num_samples < world.num_replicas:
            raise ValueError(
                f"an evaluation has at least one sample for each device, since Composer's metrics cannot leave filler "
                f"out; {self.num_samples} samples do not suffice for {world.num_replicas} devices. Evaluate "
                "on fewer devices, or on more samples"
            )

    def proven_state(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """The position as plain values: what the trainer trained on, or what Composer's count says without one."""
        trained = self.follower.trained() if self.follower is not None else None
        return self.proven(trained or self._counted(num_samples, from_beginning)).to_state()

    def _counted(self, num_samples: int, from_beginning: bool) -> Position:
        info = self.last_batch
        if info is None:
            return self.position
        if not from_beginning:
            raise ValueError("samples are counted from the epoch's beginning, as Composer does: from_beginning=True")
        here = replace(self.position, epoch=info.epoch, position=num_samples)
        # Between epochs Composer counts 0 samples while the loader still stands in the epoch before.
        return here if num_samples else here.next_epoch()

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state, ours or one of mosaicml-streaming.

        Raises:
            StateError: It cannot be continued over this data under these settings; says what differs.
        """
        position = None
        if state is not None:
            here = self.accept(state)
            self.continue_from(here)
            # Where the epoch's data is over, Composer may have yet to end that epoch: keep which it was.
            at = state["sample_in_epoch"] if is_mosaic_state(state) else state["position"]
            position = replace(here, epoch=state["epoch"], position=at)
        if self.follower is not None:
            self.follower.resume(position, of_mosaic=is_mosaic_state(state))


class PositionedDataset(IterableDataset[Any]):
    """A streamed dataset as Composer keeps it in checkpoints: one constant key with the position as JSON.

    Sharded checkpoints are loaded into the state of the run that loads, key by key: so the keys never change, and a
    state exists before the first batch. Everything else is asked of the dataset itself.

    Args:
        streaming: The dataset.
        loader: Whose position it is.
    """

    def __init__(self, streaming: StreamingDataset, loader: ComposerLoader) -> None:
        self.streaming = streaming
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.streaming)

    def __len__(self) -> int:
        return len(self.streaming)

    def __getitem__(self, index: Any) -> Any:
        """As the dataset's."""
        return self.streaming[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "streaming":
            raise AttributeError(name)
        return getattr(self.streaming, name)

    def state_dict(self, num_samples: int, from_beginning: bool = True) -> dict[str, Any]:
        """The position, as Composer saves it.

        Args:
            num_samples: Samples of this epoch that were trained on, over all ranks. Used only where no trainer runs:
                a running one is followed step by step.
            from_beginning: Whether they count from the epoch's beginning; Composer always says so.
        """
        return {STATE_KEY: json.dumps(self._loader.proven_state(num_samples, from_beginning))}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from what a checkpoint holds: the next iteration starts there.

        Args:
            state: What `state_dict` gave here or in mosaicml-streaming; None if the checkpoint holds none.

        Raises:
            StateError: It cannot be continued over this data under these settings; says what differs.
        """
        self._loader.resume(unpacked(state))


def _caller_of_caller() -> FrameType | None:
    """The frame that resumed the generator which calls this: Composer gives a loader no other way to know it."""
    frame = inspect.currentframe()
    generator = frame.f_back if frame is not None else None
    return generator.f_back if generator is not None else None


def unpacked(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A data state as saved by Composer, taken out of its JSON.

    Raises:
        StateError: It is damaged.
    """
    if state is None or STATE_KEY not in state:
        return state
    try:
        found: Mapping[str, Any] = json.loads(state[STATE_KEY])
    except (TypeError, ValueError) as error:
        raise StateError(
            f"the data state in a checkpoint is JSON under {STATE_KEY!r}; found {str(state[STATE_KEY])[:60]!r}. "
            "It is damaged: load another checkpoint"
        ) from error
    return found
