"""A mixture's weights over a training run: a schedule of points, and the changes made while training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from lightning_stream.order.rules import AMOUNT, MAX_NUMBER, count, is_count, one_of, short, violations

Numbers = tuple[tuple[str, float], ...]  # a name and a number each
Counts = tuple[tuple[str, int], ...]
Exhausted = Literal["repeat", "stop"]
Unit = Literal["samples", "tokens", "steps"]
Interpolation = Literal["step", "linear"]


@dataclass(frozen=True)
class MixtureChange:
    """A decision made while training, which takes effect at global sample ``at`` (counted through all epochs).

    ``weights`` replace all that the schedule had from there on; ``skip`` omits the next samples of some streams.
    """

    at: int
    weights: Numbers | None = None
    skip: Counts = ()


@dataclass(frozen=True, init=False)
class Schedule:
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

    points: tuple[tuple[int, Numbers], ...]
    unit: Unit
    interpolation: Interpolation
    exhausted: Exhausted | tuple[tuple[str, Exhausted], ...]
    mean_lengths: Numbers
    changes: tuple[MixtureChange, ...]
    streams: tuple[str, ...]

    def __init__(
        self,
        points: Iterable[tuple[float, Mapping[str, float] | Numbers]],
        unit: Unit = "samples",
        interpolation: Interpolation = "step",
        exhausted: Exhausted | Mapping[str, Exhausted] | tuple[tuple[str, Exhausted], ...] = "repeat",
        mean_lengths: Mapping[str, float] | Numbers = (),
        changes: Iterable[MixtureChange] = (),
        streams: Sequence[str] = (),
    ) -> None:
        given = [(_whole(at), dict(weights)) for at, weights in points]
        named = dict.fromkeys(name for _, weights in given for name in weights)
        vars(self).update(  # a frozen value is filled in through its dict
            points=tuple((at, _pairs(weights)) for at, weights in given),
            unit=unit,
            interpolation=interpolation,
            exhausted=exhausted if isinstance(exhausted, str) else _pairs(exhausted),
            mean_lengths=_pairs(mean_lengths),
            changes=tuple(changes),
            streams=tuple(streams) or tuple(named),
        )
        if problems := self._problems():
            raise ValueError("A mixture's schedule must be valid. " + " ".join(problems))

    def of_streams(self, names: Sequence[str]) -> Schedule:
        """The schedule for streams of these names, in this order. Raises ValueError for names that are not there."""
        return replace(self, streams=tuple(names))

    def shares(self, weights: Mapping[str, float] | Numbers) -> tuple[Fraction, ...]:
        """The exact share of each stream: a float counts as the decimal that it prints as."""
        given = dict(weights)
        exact = [Fraction(str(given.get(name, 0))) for name in self.streams]
        whole = sum(exact)
        return tuple(one / whole for one in exact)

    @property
    def stops(self) -> tuple[bool, ...]:
        """Whether each stream ends after its samples came once."""
        if isinstance(self.exhausted, str):
            return (self.exhausted == "stop",) * len(self.streams)
        given = dict(self.exhausted)
        return tuple(given.get(name) == "stop" for name in self.streams)

    @property
    def lengths(self) -> tuple[Fraction, ...]:
        """What a sample of each stream counts in the unit of the weights."""
        given = {} if self.unit == "samples" else dict(self.mean_lengths)
        return tuple(Fraction(str(given.get(name, 1))) for name in self.streams)

    def counts_tokens(self, *, is_packed: bool) -> bool:
        """Whether the weights are shares of tokens, so that `mean_lengths` are needed."""
        return self.unit == "tokens" or (self.unit == "steps" and is_packed)

    def changed(
        self, at: int, weights: Mapping[str, float] | None = None, skip: Mapping[str, int] | None = None
    ) -> Schedule:
        """The schedule with one change more, from global sample ``at`` on.

        Raises:
            ValueError: A change that is wrong, or that lies before one made already.
        """
        change = MixtureChange(at, None if weights is None else _pairs(weights), _pairs(skip or {}))
        return replace(self, changes=(*self.changes, change))

    def resumed(self, former: Schedule | None) -> Schedule:
        """``former``, with its changes, if it is this schedule and began with this one's changes; else this one."""
        if former is None or replace(former, changes=()) != replace(self, changes=()):
            return self
        return former if former.changes[: len(self.changes)] == self.changes else self

    def extends(self, former: Schedule, at: int) -> bool:
        """Whether this is ``former`` with more changes, all from global sample ``at`` on."""
        more = self.changes[len(former.changes) :]
        begins = replace(self, changes=former.changes) == former and self.changes == (*former.changes, *more)
        return begins and all(change.at >= at for change in more)

    def to_state(self) -> dict[str, Any]:
        """The schedule as a dict of plain values, without those that the constructor has by default."""
        state = {
            "points": [[at, dict(weights)] for at, weights in self.points],
            "unit": self.unit,
            "interpolation": self.interpolation,
            "exhausted": self.exhausted if isinstance(self.exhausted, str) else dict(self.exhausted),
            "mean_lengths": dict(self.mean_lengths),
            "streams": list(self.streams),
            "changes": [[one.at, one.weights and dict(one.weights), dict(one.skip)] for one in self.changes],
        }
        return {name: value for name, value in state.items() if value and value not in ("samples", "step", "repeat")}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Schedule:
        """Read the result of :meth:`to_state`. Raises TypeError or ValueError for anything else."""
        changes = [
            MixtureChange(at, None if weights is None else _pairs(weights), _pairs(skip))
            for at, weights, skip in state.get("changes", ())
        ]
        return cls(**{"points": (), **state, "changes": changes})

    def _problems(self) -> list[str]:
        problems = violations(vars(self), _RULES)
        starts = [at for at, _ in self.points]
        if not starts or starts[0] != 0 or not all(is_count(at, 0) for at in starts) or starts != sorted(set(starts)):
            problems.append(f"The points must be whole numbers that rise from 0, not {short(starts)}.")
        weights = [(f"The point at {at}", given) for at, given in self.points]
        weights += [(f"The change at {one.at}", one.weights) for one in self.changes if one.weights is not None]
        problems += [text for where, given in weights for text in self._weight_problems(where, given)]
        problems += self._unknown("exhausted", () if isinstance(self.exhausted, str) else self.exhausted)
        if not isinstance(self.exhausted, str) and any(how not in _EXHAUSTED for _, how in self.exhausted):
            problems.append(f"exhausted must be one of {', '.join(_EXHAUSTED)} for each stream.")
        problems += self._length_problems()
        for one in self.changes:
            problems += self._change_problems(one)
        if [one.at for one in self.changes] != sorted(one.at for one in self.changes):
            problems.append("A change must not take effect before one that was made already.")
        return problems

    def _weight_problems(self, where: str, given: Numbers) -> list[str]:
        bad = [f"{name}={short(weight)}" for name, weight in given if not AMOUNT.accepts(weight)]
        problems = [f"{where} has {', '.join(bad)}, but a weight must be {AMOUNT.text}."] if bad else []
        positive = [] if bad else [weight for _, weight in given if weight]
        if not bad and not positive:
            problems.append(f"{where} must have a weight above 0.")
        elif positive and min(positive) < _LEAST * sum(positive):
            problems.append(f"{where} has the weight {min(positive)}, less than {_LEAST} of all: use 0.")
        return problems + self._unknown(where, given)

    def _length_problems(self) -> list[str]:
        lengths = dict(self.mean_lengths)
        problems = self._unknown("mean_lengths", self.mean_lengths)
        bad = [name for name, length in lengths.items() if not (AMOUNT.accepts(length) and length > 0)]
        if bad:
            problems.append(f"mean_lengths must be above 0, but those of {', '.join(bad)} are not.")
        if lengths and (missing := [name for name in self.streams if name not in lengths]):
            problems.append(f"mean_lengths must name all streams or none, but {', '.join(missing)} have none.")
        return problems

    def _change_problems(self, change: MixtureChange) -> list[str]:
        problems = [] if is_count(change.at, 0) else [f"A change needs a sample number, not {short(change.at)}."]
        problems += [f"skip[{name!r}] must be {_SKIP.text}." for name, n in change.skip if not _SKIP.accepts(n)]
        problems += self._unknown("skip", change.skip)
        stops = dict(zip(self.streams, self.stops, strict=True))
        problems += [f"Stream {name!r} ends when exhausted: skip needs one that repeats." for name, _ in change.skip
                     if stops.get(name)]  # fmt: skip
        return problems

    def _unknown(self, where: str, given: Iterable[tuple[str, Any]]) -> list[str]:
        unknown = [name for name, _ in given if name not in self.streams]
        known = ", ".join(self.streams)
        return [f"{where} names {', '.join(map(repr, unknown))}, but the streams are {known}."] if unknown else []


def _whole(number: float) -> int:
    """A whole number that may be written as a float (20e9); others stay, for the message."""
    number = number.item() if isinstance(number, np.generic) else number
    return int(number) if isinstance(number, float) and math.isfinite(number) and number == int(number) else number  # type: ignore[return-value]


def _pairs(given: Any) -> Any:
    """Sorted by name, so that the order in which names are given makes no other schedule."""
    pairs = sorted(dict(given).items())
    return tuple((name, value.item() if isinstance(value, np.generic) else value) for name, value in pairs)


_LEAST = 1e-9  # of the sum of the weights
_EXHAUSTED = ("repeat", "stop")
_SKIP = count(1, MAX_NUMBER - 1)
_RULES = {"unit": one_of("samples", "tokens", "steps"), "interpolation": one_of("step", "linear")}
