"""Random calls of a loader, beside what docs/concepts.md says: where an iteration begins, and what a state resumes."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset, World
from lightning_stream.order.micro_batches import MicroBatch

pytestmark = pytest.mark.filterwarnings("ignore:an iteration of one batch is a look")
SAMPLES = 61
Place = tuple[int, int]  # an epoch and a position in it
Step = tuple[Place, list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    with MDSWriter(out=folder, columns={"id": "int"}, size_limit=100) as writer:
        for k in range(SAMPLES):
            writer.write({"id": k})
    return folder


class Calls:
    """One loader, the calls of it, and a model of where it stands.

    Attributes:
        begins: Where the next iteration begins.
        stands: What a state has while no iteration trains.
        looked: What a state has that counts the last look as trained on; None where the last iteration was none.
        batches, last: The iteration that trains, and the batch that it handed out last.
        chosen: The epoch that was set while it trains.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice((4, 8, 12, 60))
        self.accumulate = self.random.choice((1, 1, 2))
        self.tail = self.random.choice(("pad", "drop"))
        self.dataset = StreamingDataset(folder, shuffle=True, shuffle_seed=seed, num_canonical_nodes=4)
        workers = self.random.choice(({}, {}, {"num_workers": 2, "workers": "threads"}))
        self.loader = self.new_loader(**workers)
        self.whole: dict[int, list[Step]] = {}
        self.begins = self.stands = (0, 0)
        self.looked: Place | None = None
        self.batches: Any = None
        self.last: MicroBatch | None = None
        self.chosen: int | None = None
        self.states: list[tuple[dict[str, Any], Place]] = []

    def new_loader(self, ranks: int = 1, rank: int = 0, **options: Any) -> StreamingDataLoader:
        world = World(rank=rank, num_ranks=ranks, ranks_per_node=ranks)
        accumulate = self.accumulate if ranks == 1 else 1
        sizes: dict[str, Any] = {"global_batch_size": self.size, "accumulate": accumulate, "tail": self.tail}
        return StreamingDataLoader(copy.deepcopy(self.dataset), world=world, **sizes, **options)

    # The model

    def steps(self, loaders: list[StreamingDataLoader]) -> list[Step]:
        """The samples of each optimizer step over all ranks, to the end of the epoch."""
        steps: dict[Place, list[int]] = {}
        for loader in loaders:
            for batch in loader:
                info = loader.last_batch
                assert info is not None
                ids = batch["id"][~info.filler].tolist()
                steps.setdefault((info.epoch, info.begin), []).extend(ids)
        return [(place, sorted(ids)) for place, ids in sorted(steps.items())]

    def epoch(self, epoch: int) -> list[Step]:
        """The steps of a whole epoch."""
        if epoch not in self.whole:
            loader = self.new_loader()
            loader.set_epoch(epoch)
            self.whole[epoch] = self.steps([loader])
        return self.whole[epoch]

    def settled(self, place: Place) -> Place:
        """A place, or the next epoch's start where nothing is left of its epoch."""
        return place if any(begin >= place for begin, _ in self.epoch(place[0])) else (place[0] + 1, 0)

    def check(self, state: dict[str, Any], place: Place) -> None:
        """A new loader, in any world, continues from this state at this place, to the end of the epoch."""
        place = self.settled(place)
        ranks = self.random.choice((1, 1, 2, 4))
        loaders = [self.new_loader(ranks, rank) for rank in range(ranks)]
        for loader in loaders:
            loader.load_state_dict(state)
        assert self.steps(loaders) == [step for step in self.epoch(place[0]) if step[0] >= place]
        self.states.append((state, place))

    def reached(self) -> Place:
        assert self.last is not None
        return self.settled((self.last.epoch, self.last.end if self.last.completes_step else self.last.begin))

    def trained(self, stands: Place, begins: Place) -> None:
        """The iteration that trained is over."""
        if self.chosen is not None:
            stands = begins = (self.chosen, 0)
        self.stands = stands
        self.begins = begins
        self.batches = self.last = self.chosen = None

    # The calls

    def look(self) -> None:
        if self.batches is None:
            next(iter(self.loader))
            looked = self.loader.last_batch
            assert looked is not None
            assert (looked.epoch, looked.begin) == self.begins
            self.stands = self.begins
            self.looked = (looked.epoch, looked.end if looked.completes_step else looked.begin)

    def train(self) -> None:
        """One batch more, or two of a new iteration."""
        count = 1
        if self.batches is None:
            self.batches = iter(self.loader)
            self.looked = None
            count = 2
        for _ in range(count):
            if next(self.batches, None) is None:
                self.trained((self.begins[0] + 1, 0), (self.begins[0] + 1, 0))
                return
            last = self.last
            self.last = self.loader.last_batch
            begin = self.begins if last is None else (last.epoch, last.end if last.completes_step else last.begin)
            assert self.last is not None
            assert (self.last.epoch, self.last.begin) == begin

    def drop(self) -> None:
        if self.batches is not None:
            reached = self.reached()
            epoch = self.begins[0]
            self.trained(reached, (epoch + 1, 0))
            gc.collect()

    def finish(self) -> None:
        if self.batches is not None:
            list(self.batches)
            self.trained((self.begins[0] + 1, 0), (self.begins[0] + 1, 0))

    def state(self) -> None:
        if self.batches is not None:
            owner = self.random.choice((self.loader, self.batches))
            self.check(owner.state_dict(), self.reached())
            return
        if self.looked is not None:
            self.stands = self.settled(self.looked)
            self.begins = (self.looked[0] + 1, 0)
            self.looked = None
        self.check(self.loader.state_dict(), self.stands)

    def load(self) -> None:
        if self.states:
            state, self.stands = self.random.choice(self.states)
            self.loader.load_state_dict(state)
            self.batches = self.last = self.chosen = self.looked = None
            self.begins = self.stands

    def set_epoch(self) -> None:
        epoch = self.random.choice((0, 2, self.begins[0], self.begins[0]))
        self.loader.set_epoch(epoch)
        if self.last is not None and self.last.ends_epoch:
            self.trained((epoch, 0), (epoch, 0))
        elif self.batches is not None:
            self.chosen = epoch
        elif self.stands != self.begins or epoch != self.begins[0]:
            self.stands = self.begins = (epoch, 0)
        self.looked = None

    def copy(self) -> None:
        copied = self.random.choice((copy.deepcopy, _pickled))(self.loader)
        place = self.reached() if self.batches is not None else self.looked or self.stands
        self.check(copied.state_dict(), place)

    def look_at_all(self) -> None:
        for _ in self.loader.look():
            if self.random.random() < 0.3:
                break

    def use_another_loader(self) -> None:
        other = StreamingDataLoader(self.dataset, self.size)
        for _ in zip(range(self.random.randrange(4)), other, strict=False):
            pass
        other.state_dict()

    def ask(self) -> None:
        loader = self.loader
        questions: list[Callable[[], Any]] = [
            *(loader.__len__, loader.describe, loader.explain, loader.stats, loader.settings),
            *(lambda: loader.position, lambda: loader.begins_at, lambda: loader.where(0, [0, 1])),
            *(lambda: loader.warm(2), lambda: loader.trace(0), lambda: loader.num_batches(2), lambda: self.dataset[5]),
        ]
        self.random.choice(questions)()


def _pickled(loader: StreamingDataLoader) -> StreamingDataLoader:
    copied: StreamingDataLoader = pickle.loads(pickle.dumps(loader))
    return copied


CALLS = ["look"] * 2 + ["train"] * 3 + ["drop", "finish", "load", "copy", "ask", "look_at_all", "use_another_loader"]
CALLS += ["state", "set_epoch"] * 2


@pytest.mark.parametrize("seed", range(30))
def test_iterations_begin_and_states_resume_where_the_rules_say_after_any_calls(folder: Path, seed: int) -> None:
    calls = Calls(folder, seed)
    for _ in range(14):
        getattr(calls, calls.random.choice(CALLS))()
    calls.loader.close()
