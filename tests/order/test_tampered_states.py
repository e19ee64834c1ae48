"""A state with one value changed, left out or added is refused, or continues the very same training run."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.compositions import COMPOSITIONS, Data, run_of
from support.orders import run_over

from lightning_stream.errors import StateError
from lightning_stream.order import MosaicConfig, Position, RunOrder
from lightning_stream.order.buckets import LengthBuckets

NUMBERS = (-1, 0, 1, 2, 24, 48, 2**40, 2**63, 0.0, 1.5, float("nan"))
VALUES: tuple[Any, ...] = (*NUMBERS, None, True, False, "", "drop", "0" * 16, [], [[0, 24]], {})


def _lengths_run(tokens: int | None) -> RunOrder:
    lengths = np.random.default_rng(2).integers(1, 60, 4000)
    buckets = LengthBuckets.resolved(lengths, batch_size=8, batch_tokens=tokens, window=256)
    return run_over([[2000], [2000]], batch_size=8, shuffle=True, buckets=buckets, lengths=lengths)


def _runs() -> Iterator[tuple[str, RunOrder, int]]:
    """The runs of all kinds, and a batch size that each may change to."""
    for name, composition in COMPOSITIONS.items():
        yield name, run_of(composition, Data.of(composition, 1)), composition.batch_sizes[-1]
    yield "buckets", _lengths_run(None), 8
    yield "budget", _lengths_run(4096), 8
    yield "py1e", run_over([[600, 400]], batch_size=24, device_batch_size=24, shuffle=True, mosaic=MosaicConfig()), 24


def _state(run: RunOrder, size: int) -> dict[str, Any]:
    """The state in the middle of an epoch, after a change of the batch size where there may be one."""
    at = 48 if size == 48 else 0
    here = Position.start(run, batch_size=24 if size == 48 else size, tail="pad").advanced(run, at)
    here = here.rebased_on(run, batch_size=size, tail="pad").advanced(run, at + 2 * size)
    landmark = run.epoch(0).counted_windows(at + 2 * size)
    return json.loads(json.dumps(replace(here, landmark=landmark).to_state()))  # type: ignore[no-any-return]


STATES = {name: _state(run, size) for name, run, size in _runs()}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a state, with each key or index of it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield value, key
        yield from _places(inner)


def _tampered(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The state with each of its values changed in turn, left out, and with one more."""
    for number in range(sum(1 for _ in _places(state))):
        for value in (*VALUES, "left out", "added"):
            changed = copy.deepcopy(state)
            at, key = list(_places(changed))[number]
            if value == "left out":
                del at[key]
            elif value == "added" and isinstance(at, dict):
                at["another"] = at[key]
            elif value == "added":
                at.append(at[key])
            else:
                at[key] = value
            yield changed


def _read(state: dict[str, Any]) -> Position | None:
    """The position of a state; None where it is refused."""
    try:
        return Position.from_state(state)
    except StateError:
        return None


@pytest.mark.parametrize("name", STATES)
def test_every_changed_value_is_refused_or_is_harmless(name: str) -> None:
    state, refused = STATES[name], 0
    wanted = Position.from_state(state)
    assert wanted.to_state() == state
    for changed in _tampered(state):
        position = _read(changed)
        refused += position is None
        if position is not None:
            assert (position, position.landmark) == (wanted, wanted.landmark)
            assert position.to_state() == state
    assert refused > 500
