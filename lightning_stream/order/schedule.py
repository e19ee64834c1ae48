"""A mixture's weights over a training run: a schedule of points, and the changes made while training."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct, structs

from lightning_stream.errors import by_name

from .rules import AMOUNT, MAX_NUMBER, Rule, count, is_count, one_of, plain, short, violations

Numbers = Mapping[str, int | float]
Exhausted = Literal["repeat", "stop"]
Unit = Literal["samples", "tokens", "steps"]
Interpolation = Literal["step", "linear"]


class MixtureChange(Struct, frozen=True, array_like=True):
    """A decision made while training, which takes effect at global sample ``at`` (counted through all epochs).

    ``weights`` replace all that the schedule had from there on; ``skip`` omits the next samples of some streams.
    """

    at: int
    weights: Numbers | None = None
    skip: Mapping[str, int] = {}

    def __post_init__(self) -> None:
        structs.force_setattr(self, "weights", None if self.weights is None else _named(self.weights))
        structs.force_setattr(self, "skip", _named(self.skip))


class Schedule(Struct, frozen=True, omit_defaults=True):
    """The weights of a mixture as a function of training progress, exact at every sample.

    Args:
        points: ``(when, {stream name: weight})`` pairs, the first at 0. Weights are relative to their sum at each
            point; a stream that a point does not name has weight 0 there.
        unit: What ``when`` counts, and what the weights are shares of: ``"samples"`` (documents, where these are packed
            into rows), ``"tokens"``, or optimizer ``"steps"`` of the batch size that the run began with. Weights over
            steps are shares of samples; where documents are packed into rows they are shares of tokens, and a step
            counts as all tokens of its rows.
        interpolation: ``"step"`` keeps weights until the next point, ``"linear"`` moves evenly to the next one's.
        exhausted: ``"repeat"`` starts a stream's next own epoch after all its samples came; ``"stop"`` ends the stream,
            and the others share its weight. One for all streams, or a mapping from names (the others repeat).
        mean_lengths: For shares of tokens: mean tokens per sample of each stream. By default they follow from the
            lengths of the dataset: those that `Packing` uses, or else ``"tokens"``. Shares of tokens are kept in
            expectation; their exact number up to a step would take a sum over the lengths of all samples before it.
        changes: Made while training, see `StreamingDataLoader.change_mixture`. With those of a run's last state, a
            new run repeats its batches from the start.
        streams: Names in the order of the dataset's streams; the dataset fills them in.

    Raises:
        ValueError: Points, weights or settings that are wrong; every problem is named.

    Example::

        Schedule([(0, {"web": 0.7, "code": 0.3}), (20e9, {"web": 0.4, "code": 0.6})], interpolation="linear")
    """

    points: Sequence[tuple[int | float, Numbers]]
    unit: Unit = "samples"
    interpolation: Interpolation = "step"
    exhausted: Exhausted | Mapping[str, Exhausted] = "repeat"
    mean_lengths: Numbers = {}
    changes: Sequence[MixtureChange] = ()
    streams: Sequence[str] = ()

    def __post_init__(self) -> None:
        try:
            points = [(_whole_number(at), dict(weights)) for at, weights in self.points]
        except (TypeError, ValueError) as error:
            raise ValueError(
                "A mixture's schedule must be valid. Its points are pairs of a number and weights by name, e.g. "
                f"[(0, {{'web': 0.7, 'code': 0.3}})], not {short(self.points)}."
            ) from error
        names = dict.fromkeys(name for _, weights in points for name in weights)
        values = {  # copies: callers may change their own mappings
            "points": tuple((at, _named(weights)) for at, weights in points),
            "unit": _interned(self.unit),
            "interpolation": _interned(self.interpolation),
            "exhausted": _interned(self.exhausted) if isinstance(self.exhausted, str) else _named(self.exhausted),
            "mean_lengths": _named(self.mean_lengths),
            "changes": tuple(map(structs.replace, self.changes)),
            "streams": tuple(self.streams or names),
        }
        for name, value in values.items():
            structs.force_setattr(self, name, value)
        if problems := " ".join(self._problems()):
            raise ValueError(f"A mixture's schedule must be valid. {problems}")

    def __hash__(self) -> int:
        return hash((self.streams, len(self.changes)))  # a mapping has none

    def of_streams(self, names: Sequence[str]) -> Schedule:
        """The schedule for streams of these names, in this order. Raises ValueError for names that are not there."""
        return structs.replace(self, streams=tuple(names))

    def shares(self, weights: Numbers) -> tuple[Fraction, ...]:
        """The exact share of each stream: a float counts as the decimal that it prints as."""
        exact = self._of_streams(weights, default=0)
        total = sum(exact)
        return tuple(weight / total for weight in exact)

    @property
    def lengths(self) -> tuple[Fraction, ...]:
        """What a sample of each stream counts in the unit of the weights."""
        return self._of_streams({} if self.unit == "samples" else self.mean_lengths, default=1)

    @property
    def stops(self) -> tuple[bool, ...]:
        """Whether each stream ends after its samples came once."""
        ends = self._ends
        return tuple(ends.get(name) == "stop" for name in self.streams)

    @property
    def _ends(self) -> Mapping[str, Exhausted]:
        """What happens to streams, by their names, after their samples came once."""
        return dict.fromkeys(self.streams, self.exhausted) if isinstance(self.exhausted, str) else self.exhausted

    def _of_streams(self, values: Numbers, default: int) -> tuple[Fraction, ...]:
        return tuple(Fraction(str(values.get(name, default))) for name in self.streams)

    def counts_tokens(self, *, is_packed: bool) -> bool:
        """Whether the weights are shares of tokens, so that `mean_lengths` are needed."""
        return self.unit == "tokens" or (self.unit == "steps" and is_packed)

    def changed(self, at: int, weights: Numbers | None = None, skip: Mapping[str, int] | None = None) -> Schedule:
        """The schedule with one change more, from global sample ``at`` on.

        Raises:
            ValueError: A change that is wrong, or that lies before one made already.
        """
        last = (*self.changes[-1:], MixtureChange(at, weights, skip or {}))
        changed = structs.replace(self, changes=last)  # the others were checked when they were made
        structs.force_setattr(changed, "changes", (*self.changes[:-1], *changed.changes))
        return changed

    def resumed(self, former: Schedule | None) -> Schedule:
        """``former``, with its changes, if it is this schedule and began with this one's changes; else this one."""
        return self if former is None or not former.extends(self, 0) else former

    def extends(self, former: Schedule, at: int) -> bool:
        """Whether this is ``former`` with more changes, all from global sample ``at`` on."""
        begun = len(former.changes)
        is_same = (
            structs.replace(self, changes=()) == structs.replace(former, changes=())
            and self.changes[:begun] == former.changes
        )
        return is_same and all(change.at >= at for change in self.changes[begun:])

    def to_state(self) -> dict[str, Any]:
        """The schedule as a dict of plain values, without those that the constructor has by default."""
        return plain(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Schedule:
        """Read the result of :meth:`to_state`. Raises TypeError or ValueError for anything else."""
        return msgspec.convert(state, cls)

    def _problems(self) -> Iterator[str]:
        """One sentence for everything that is wrong."""
        yield from violations(structs.asdict(self), _RULES)
        starts = [at for at, _ in self.points]
        if starts[:1] != [0] or not all(is_count(at, 0) for at in starts) or starts != sorted(set(starts)):
            yield f"The points must be whole numbers that rise from 0, not {short(starts)}."
        for at, weights in self.points:
            yield from self._weight_problems(f"The point at {at}", weights)
        yield from self._value_problems("exhausted", self._ends, "each", _EXHAUSTED)
        yield from self._value_problems("mean_lengths", self.mean_lengths, "a mean length", _LENGTH)
        missing = [name for name in self.streams if name not in self.mean_lengths]
        if self.mean_lengths and missing:
            yield f"mean_lengths must name all streams or none, but {', '.join(missing)} have none."
        for change in self.changes:
            yield from self._change_problems(change)
        changed = [change.at for change in self.changes]
        if changed != sorted(changed):
            yield "A change must not take effect before one that was made already."

    def _change_problems(self, change: MixtureChange) -> Iterator[str]:
        where = f"The change at {change.at}"
        if not is_count(change.at, 0):
            yield f"A change needs a sample number, not {short(change.at)}."
        if change.weights is not None:
            yield from self._weight_problems(where, change.weights)
        yield from self._value_problems(f"{where} (skip)", change.skip, "a number to skip", _SKIP)
        for name in change.skip:
            if self._ends.get(name) == "stop":
                yield f"Stream {name!r} ends when exhausted: skip needs one that repeats."

    def _weight_problems(self, where: str, weights: Numbers) -> Iterator[str]:
        problems = [*self._value_problems(where, weights, "a weight", AMOUNT)]
        yield from problems
        positive = [] if problems else [weight for weight in weights.values() if weight]
        if positive and min(positive) < _LEAST * sum(positive):
            yield f"{where} has the weight {min(positive)}, less than {_LEAST} of all: use 0."
        elif not positive and not problems:
            yield f"{where} must have a weight above 0."

    def _value_problems(self, where: str, values: Mapping[str, object], noun: str, rule: Rule) -> Iterator[str]:
        """Values of streams that break a rule, and names of no stream."""
        bad = [f"{name}={short(value)}" for name, value in values.items() if not rule.accepts(value)]
        if bad:
            yield f"{where} has {', '.join(bad)}, but {noun} must be {rule.text}."
        unknown = [repr(name) for name in values if name not in self.streams]
        if unknown:
            yield f"{where} names {', '.join(unknown)}, but the streams are {', '.join(self.streams)}."


def _whole_number(value: Any) -> Any:
    """A whole number that may be written as a float (20e9); others stay, for the message."""
    is_whole = isinstance(value, float | np.integer | np.floating) and float(value).is_integer()
    return int(value) if is_whole else value


def _interned(value: Any) -> Any:
    """A text as the object that equal constants are: a state omits a default only where it is the same object."""
    return sys.intern(value) if isinstance(value, str) else value


def _named(values: Any) -> dict[str, Any]:
    """Sorted by name, with plain numbers, so that a state has them always alike."""
    pairs = sorted(by_name("what a schedule has of streams must be given", values, "{'web': 0.7}").items())
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in pairs}


_LEAST = 1e-9  # of the sum of the weights
_EXHAUSTED = one_of("repeat", "stop")
_LENGTH = Rule("a number above 0", lambda value: value != 0 and AMOUNT.accepts(value))
_SKIP = count(1, MAX_NUMBER - 1)
_RULES = {"unit": one_of("samples", "tokens", "steps"), "interpolation": one_of("step", "linear")}
