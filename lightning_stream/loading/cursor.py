"""Where the training run over a loader stands: one owner of its position, without torch, threads or files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet, ref

from lightning_stream.errors import StateError
from lightning_stream.loading.source import BatchSettings
from lightning_stream.order import OrderConfig, Position, RunOrder, ledger
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.order.rows import CountedWindows

State: TypeAlias = "Mapping[str, Any]"  # a position as plain values
_LOOKS_BEFORE_WARNING = 3
_ALONE = -1  # of an iteration that ended before another loader was asked for a batch


class _LoaderChanges:
    """Counts how often another loader of this process is asked for a batch than the one before."""

    count = 0
    asked_last = 0  # the id of its cursor


@dataclass(eq=False)
class Walk:
    """How far one iteration over an epoch has come.

    Attributes:
        moves: Whether its batches are those of the training run.
        start: Where it began; None before its first batch.
        last_batch: The samples of the batch that it handed out last.
        num_batches: How many it handed out.
        is_exhausted: Whether it came to the end of its epoch.
        failure: The name of the error that ended it; empty if none did.
        limit: How many it hands out at most; None for all of the epoch.
        one_ahead: Whether each batch is taken from it before the one before is trained on.
        before_last: The samples of the batch that it handed out before the last.
    """

    moves: bool = True
    start: Position | None = None
    last_batch: MicroBatch | None = None
    num_batches: int = 0
    is_exhausted: bool = False
    failure: str = ""
    limit: int | None = None
    one_ahead: bool = False
    before_last: MicroBatch | None = None
    is_outdated: bool = field(default=False, init=False)  # whether its batches are those of another order by now
    asked_at: int = 0  # how many changes of the loader there were when it was asked last
    asked_in: int = 0  # the thread

    @property
    def trained(self) -> MicroBatch | None:
        """The samples of the last batch that is in training or was; None before any."""
        return self.before_last if self._has_next else self.last_batch

    @property
    def num_trained(self) -> int:
        """How many batches that are."""
        return self.num_batches - self._has_next

    @property
    def _has_next(self) -> bool:
        return self.one_ahead and not self.is_exhausted

    @property
    def reached(self) -> Position | None:
        """Everything before it was trained on; inside an accumulation, the last whole optimizer step."""
        start = self.start
        last = self.trained
        if start is None or (last is None and not self.is_exhausted):
            return start
        if last is None or last.ends_epoch:  # an epoch may have no batch, and is over then
            return start.next_epoch()
        return replace(start, position=last.end if last.completes_step else last.begin)

    @property
    def upcoming(self) -> Position | None:
        """Where the first global batch begins of which nothing was handed out; None before the first batch."""
        if self.start is None or self.last_batch is None:
            return self.start
        return replace(self.start, position=self.last_batch.end)

    @property
    def is_inside_epoch(self) -> bool:
        """Whether some, but not all of the epoch was handed out."""
        return self.trained is not None and not self.trained.ends_epoch

    def reorder(self, order: OrderConfig, counted: CountedWindows | None) -> None:
        """Continue in another order, which is the same up to `upcoming`; a global batch in progress is completed.

        ``counted`` is what is known of both orders here.
        """
        if self.start is not None:
            self.start = replace(self.start, order=order, landmark=counted)
            self.is_outdated = True

    def continue_at(self, start: Position) -> None:
        """Hand out the batches of another epoch from the next one on."""
        self.start = start
        self.last_batch = None
        self.is_outdated = True

    def ended(self) -> Walk:
        """What remains of it after its end."""
        walk = Walk(self.moves, self.start, self.last_batch, self.num_batches, self.is_exhausted, self.failure)
        walk.one_ahead = self.one_ahead
        walk.before_last = self.before_last
        walk.asked_at = _ALONE if self.asked_at == _LoaderChanges.count else self.asked_at
        return walk


class TrainerClock(Protocol):
    """A trainer, as its run asks it. The defaults are those of a loop of one's own.

    Attributes:
        counts: Whether it counts what is trained on: not before it joins the run.
        padding: Whether a rank gets padding beside samples of its own: not where losses are weighted by samples.
        takes_states: Whether it gives the loader its state, and takes it from there. Such a trainer ends an epoch
            itself, later than the data ends.
        reads_states: Whether it finds its state in its checkpoints itself: the loader is given none then.
        how_to_step: The remedy where an optimizer stepped elsewhere than at the end of a global batch.
    """

    counts: bool = True
    padding: bool = True
    takes_states: bool = False
    reads_states: bool = False
    how_to_step: str = (
        "Step wherever `current.completes_step`; call stepped() there too if a step is left out on purpose"
    )

    @property
    def takes_whole_batches(self) -> bool:
        """Whether each optimizer step must use up whole global batches."""
        return True

    def micro_batch(self) -> int:
        """The number in its epoch of the micro-batch in training."""
        ...

    def step(self) -> int:
        """How many optimizer steps there were."""
        ...

    def ends_epoch(self) -> bool:
        """Whether the trainer ends the epoch with the micro-batch in training, at a limit of its own."""
        return False

    def settle(self) -> None:
        """Bring the run up to the clock before its state is taken, where nothing else does that first."""
        return

    def owns(self, iterator: Any) -> bool:
        """Whether this iteration, which begins, is the one that the trainer takes its batches from."""
        ...

    def follow_length(self, epoch: int) -> None:  # noqa: ARG002 - a trainer's
        """Expect as many batches as this epoch has, which a state or a change of the mixture may have changed."""
        return


class Driver(Protocol):
    """The run of a trainer that drives a loader: it has the position, and recognises its own iteration.

    `PositionTracker` documents its methods.
    """

    clock: TrainerClock

    @property
    def known(self) -> Position | None: ...
    @property
    def current(self) -> MicroBatch | None: ...
    @property
    def iteration(self) -> Walk | None: ...
    def reorder(self, order: OrderConfig) -> None: ...
    def set_epoch(self, epoch: int) -> None: ...
    def begin(self, iterator: Any) -> Position | None: ...
    def note_batch(self, iterator: Any) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: State | None) -> None: ...


class Cursor:
    """The position of a loader, and the ledger's sum up to there.

    Where a trainer drives the loader, the trainer knows the position: a loader only knows what it hands out. Else one
    iteration leads, and its batches move the position; others look on and move nothing while the leader lives. An
    iteration that handed out a single batch, and was not asked for another, was a look, as in ``next(iter(loader))``,
    unless a state was taken then: the next iteration begins where it began. It was none where it came to the epoch's
    last batch in step with other loaders, as in ``zip(one, other)``: only one of them is asked for the end there.

    Attributes:
        driver: The trainer that reports what was trained on; None where no trainer does.
        begins_at: Where a state, or `set_epoch`, made the next training run begin.
    """

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.begins_at: Position | None = None
        self._last: MicroBatch | None = None
        self._walk: Walk | None = None  # of the iteration that led last
        self._leader: ref[Walk] | None = None
        self._live: WeakSet[Walk] = WeakSet()
        self._was_asked = False  # whether a state was taken since the leader's last start
        self._num_looks = 0  # how many iterations in a row handed out one batch, and no more
        self._chosen: Position | None = None  # where the iteration after the leading one begins; None: behind it
        self.short_epoch = math.inf  # the first that ended with a global batch of fewer micro-batches than others
        self._summed = (0, 0, 0)  # the ledger's expected sum: of this epoch, up to this position, so much

    def __getstate__(self) -> dict[str, object]:
        """A copy stands where this one does, and follows no iteration and no trainer."""
        walk = self.now and self.now.ended()
        if self.driver is not None and self.position is not None:
            walk = Walk(start=self.position)
        was_asked = self._was_asked or self.leading is not None
        state = {"begins_at": self.begins_at, "_walk": walk, "_was_asked": was_asked, "_summed": self._summed}
        return {**state, "_last": self._last, "_chosen": self._chosen}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)

    @property
    def leading(self) -> Walk | None:
        """The iteration whose batches move the position; None if none is in progress."""
        if self.driver is not None:
            return self.driver.iteration
        return None if self._leader is None else self._leader()

    @property
    def now(self) -> Walk | None:
        """The iteration in progress, or else the last one; None before any."""
        leader = None if self._leader is None else self._leader()
        return self._walk if leader is None or leader.start is None else leader

    @property
    def position(self) -> Position | None:
        """Where the training run is; None before anything began. A look whose iteration is over has not moved it."""
        if self.driver is not None:
            return self.driver.known
        now = self.now
        if now is None:
            return None
        return now.start if self.leading is None and self._only_looked(now) else now.reached

    @property
    def last_batch(self) -> MicroBatch | None:
        """The batch in training, or else handed out last; None before any was."""
        current = None if self.driver is None else self.driver.current
        return self._last if current is None else current

    # What iterations report

    def begin(self, walk: Walk, run: RunOrder, settings: BatchSettings) -> Position:
        """Where a new iteration begins: where the last one began if it was a look, else after it or its epoch.

        One that an error ended is continued: its epoch is not over.
        """
        self._seek_chosen()
        now = self.now
        if now is None or now.start is None or now.reached is None:
            here = settings.start(run)
        elif self._only_looked(now):
            here = now.start
            self._note_single(here)
        else:
            is_cut = now.is_inside_epoch and not now.failure
            here = now.reached.next_epoch() if is_cut else now.reached
            if is_cut and now.num_trained == 1:
                self._note_single(now.start)
            else:
                self._num_looks = 0
            size = settings.global_batch_size
            here = here.rebased_on(run, batch_size=size, tail=settings.tail, world=settings.world)
        self._live.add(walk)
        if self._leader is None:
            self._walk = Walk(start=here)
            self._leader = ref(walk)
            self._was_asked = False
        return here

    def _note_single(self, here: Position) -> None:
        """Warn of a loop that takes each batch from a new iteration."""
        self._num_looks += 1
        if self._num_looks == _LOOKS_BEFORE_WARNING:
            warnings.warn(
                "an iteration of one batch is a look, and the next iteration begins with the same batch, or with the "
                f"next epoch where a state was taken in between: found {self._num_looks} of these in a row, this one "
                f"at epoch {here.epoch}, position {here.position}. To train, keep one iterator, batches = "
                "iter(loader), and call next(batches)",
                stacklevel=3,
            )

    def asked(self, walk: Walk) -> None:
        """Note that a batch is requested."""
        if _LoaderChanges.asked_last != id(self):
            _LoaderChanges.asked_last = id(self)
            _LoaderChanges.count += 1
        walk.asked_at = _LoaderChanges.count
        walk.asked_in = get_ident()

    def handed_out(self, walk: Walk) -> None:
        """Note a batch that is about to be handed out: a second one makes its iteration lead where that only looked."""
        self._last = walk.trained
        if self.driver is not None:
            self.driver.note_batch(walk)
        elif walk.num_trained == 2 and walk in self._live and (self.now is None or self._only_looked(self.now)):
            self._leader = ref(walk)

    def ended(self, walk: Walk) -> None:
        """Note that an iteration was closed, dropped or exhausted."""
        self._live.discard(walk)
        if walk.one_ahead:
            self._last = walk.trained
        if walk.moves and self._leader is not None and self._leader() in (walk, None):
            if walk.num_batches or walk.is_exhausted:
                self._walk = walk.ended()
                self._walk.asked_in = walk.asked_in
            self._leader = None
            self._seek_chosen()

    def _only_looked(self, walk: Walk) -> bool:
        if walk.num_trained != 1 or walk.is_exhausted or walk.failure or self._was_asked:
            return False
        is_alone = walk.asked_at in (_LoaderChanges.count, _ALONE)
        return walk.trained is None or not walk.trained.ends_epoch or is_alone

    # States

    def count_all(self) -> None:
        """Note that a state counts all batches that were handed out, which may be too many."""
        self.warn_inside_step(None if self.now is None else self.now.trained)
        if self.now is not None and self.now.asked_in not in (0, get_ident()):
            warnings.warn(
                "a state counts the batches that were handed out, but another thread takes them here: where it takes "
                "some ahead of the training, a resume loses these. Pass the number of those trained on in this "
                "iteration, state_dict(num_batches=...), or take the state in that thread",
                stacklevel=3,
            )

    def warn_inside_step(self, last: MicroBatch | None, stacklevel: int = 4) -> None:
        """Warn of a state after this micro-batch where the loop may have stepped in the middle of a global batch."""
        if last is not None and last.epoch > self.short_epoch and not last.completes_step:
            warnings.warn(
                "a state continues at a whole global batch, so a resume trains again on what was handed out of the one "
                f"at {last.label}. Epoch {self.short_epoch} ended with a global batch of fewer micro-batches than "
                "others: a loop that counts micro-batches through all epochs has stepped in the middle of global "
                'batches since then. Step where loader.last_batch.completes_step, or pass tail="drop" from the start '
                "of the run",
                stacklevel=stacklevel,
            )

    def refuse_two(self) -> None:
        """Note that a state is taken here.

        Raises:
            StateError: Two iterations are in progress, and either of them may be the one that trains.
        """
        going = [walk.num_trained for walk in self._live if walk.num_trained > 1]
        if len(going) > 1:
            raise StateError(
                "a loader's state is that of the iteration that trains, but several iterations over this loader are in "
                f"progress, after {' and '.join(map(str, going))} batches. Take iterator.state_dict() of the one that "
                "trains, or close() the others"
            )
        self._was_asked = True

    def took(self, position: Position) -> None:
        """Note that a state of this position was taken, which decides whether the last batch was only a look."""
        now = self.now
        if now is not None and position == now.reached:
            self._was_asked = True
        elif now is not None and position == self.position:
            self._walk = Walk(start=position)

    def seek(self, position: Position) -> None:
        """Let the next iteration begin here; those in progress no longer move the position."""
        self.begins_at = position
        self._walk = Walk(start=position)
        self._leader = None
        self._live = WeakSet()
        self._was_asked = False
        self._num_looks = 0
        self._chosen = None

    def choose(self, position: Position) -> None:
        """Let the next iteration begin here; until then, one in progress moves the position."""
        now = self.now
        if self.leading and now is not None and now.is_inside_epoch and not self._only_looked(now):
            self.begins_at = self._chosen = position
        else:
            self.seek(position)

    def _seek_chosen(self) -> None:
        if self._chosen is not None:
            self.seek(self._chosen)

    def release(self, position: Position) -> None:
        """End the run of a trainer, which stands at a position."""
        if self.driver is not None:
            self.seek(position)
        self.driver = self.begins_at = None

    def keep(self, epoch: int) -> bool:
        """Let the next iteration read this epoch from wherever in it was set; False where it reads another one.

        A look that is over is none of the batches trained on then, also where a state is taken before that iteration.
        """
        if self.driver is not None:
            self.driver.set_epoch(epoch)
            return True
        if self._chosen is not None:
            return epoch == self._chosen.epoch
        now = self.now
        if now is None or now.start is None:
            return epoch == 0
        if not self._only_looked(now):
            return not now.is_inside_epoch and now.reached is not None and epoch == now.reached.epoch
        is_kept = epoch == now.start.epoch
        if is_kept and self.leading is None:
            self._walk = Walk(start=now.start)
        return is_kept

    def proven(self, run: RunOrder, position: Position) -> Position:
        """A position with the ledger's expected sum up to it. Costs the samples since it was last asked."""
        epoch, begin, total = self._summed
        if epoch != position.epoch or begin > position.position:
            begin = 0
            total = 0
        order = position.order_in(run)
        grown = ledger.expected(order, begin, position.position)
        counted = order.counted_windows(position.position)
        return self.builds_on(replace(position, ledger=(total + grown) % ledger.MODULUS, landmark=counted))

    def builds_on(self, proven: Position) -> Position:
        """Continue with the ledger's sum of this position, instead of summing again what came before."""
        self._summed = (proven.epoch, proven.position, proven.ledger)
        return proven
