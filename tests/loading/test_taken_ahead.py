"""Batches that something takes ahead of the training: a state is that of what was trained on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

from lightning_stream import PositionTracker, StatefulDataLoader, StreamingDataLoader
from lightning_stream.errors import StateError

SIZE, BATCH, EPOCHS = 22, 4, 3
_ONE_AHEAD = """
def one_ahead(loader):
    batches = iter(loader)
    ready = next(batches, None)
    while ready is not None:
        batch = ready
        ready = next(batches, None)
        yield batch
"""


def _loader(accumulate: int = 1) -> StreamingDataLoader:
    return StatefulDataLoader(range(SIZE), BATCH // accumulate, shuffle=True, accumulate=accumulate)


def _prefetcher(module: str) -> Callable[[Any], Iterator[Any]]:
    """A function that takes one batch ahead, of a module of this name."""
    names: dict[str, Any] = {"__name__": module}
    exec(_ONE_AHEAD, names)
    prefetcher: Callable[[Any], Iterator[Any]] = names["one_ahead"]
    return prefetcher


def _ids(batch: Any, loader: StreamingDataLoader) -> list[int]:
    assert loader.last_batch is not None
    return [int(number) for number, is_filler in zip(batch, loader.last_batch.filler, strict=True) if not is_filler]


def _train(
    loader: StreamingDataLoader, through: Callable[[Any], Iterator[Any]], stop: int
) -> tuple[list[list[int]], dict[str, Any] | None]:
    """The ids of each step, and the state after so many steps."""
    trained: list[list[int]] = []
    step: list[int] = []
    while loader.position.epoch < EPOCHS:
        for batch in through(loader):
            step += _ids(batch, loader)
            assert loader.last_batch is not None
            if loader.last_batch.completes_step:
                trained.append(step)
                step = []
            if len(trained) == stop:
                return trained, loader.state_dict()
    return trained, None


@pytest.mark.parametrize(
    ("accumulate", "module"),
    [(1, "ray.train.torch.train_loop_utils"), (2, "ray.train.torch.train_loop_utils"), (1, "timm.data.loader")],
)
def test_a_state_under_a_known_prefetcher_is_that_of_what_was_trained_on(accumulate: int, module: str) -> None:
    one_ahead = _prefetcher(module)
    whole, _ = _train(_loader(accumulate), iter, 1000)
    assert _train(_loader(accumulate), one_ahead, 1000) == (whole, None)
    for stop in range(1, len(whole) + 1):
        before, state = _train(_loader(accumulate), one_ahead, stop)
        resumed = _loader(accumulate)
        resumed.load_state_dict(state)
        assert before + _train(resumed, one_ahead, 1000)[0] == whole


def test_a_look_through_a_known_prefetcher_moves_nothing() -> None:
    one_ahead = _prefetcher("ray.train.torch.train_loop_utils")
    loader = _loader()
    first = next(one_ahead(loader)).tolist()
    assert loader.position.position == 0
    assert next(one_ahead(loader)).tolist() == first


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_state_after_a_number_of_batches_is_that_of_a_loop_that_took_no_more(accumulate: int) -> None:
    taken = _loader(accumulate)
    list(taken)
    counted = [_loader(accumulate) for _ in range(2)]
    for first, loader in enumerate(counted):  # one begins the epoch, one continues inside it
        loader.load_state_dict(taken.state_dict(num_batches=first * 2))
        states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
        assert [loader.state_dict(num_batches=number) for number in range(len(states))] == states


def test_a_number_of_batches_that_were_not_handed_out_is_an_error() -> None:
    loader = _loader()
    next(iter(loader))
    for number in (-1, 2):
        with pytest.raises(StateError, match="1 were handed out"):
            loader.state_dict(num_batches=number)


def test_a_trainer_counts_itself() -> None:
    loader = _loader()
    PositionTracker(loader)
    with pytest.raises(StateError, match="counts the batches"):
        loader.state_dict(num_batches=0)


def test_a_state_warns_where_another_thread_takes_the_batches() -> None:
    loader = _loader()
    batches = iter(loader)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(next, batches).result()
        with pytest.warns(UserWarning, match="another thread"):
            loader.state_dict()
        assert pool.submit(loader.state_dict).result() == loader.state_dict(num_batches=3)
        assert len(list(pool.submit(list, batches).result())) == 3
        with pytest.warns(UserWarning, match="another thread"):  # it may have come to the end before the training
            loader.state_dict()
    pickle.loads(pickle.dumps(loader)).state_dict()  # a copy has no such thread, and does not warn


def test_a_state_warns_where_a_loop_counts_micro_batches_across_a_short_end_of_an_epoch() -> None:
    loader = _loader(accumulate=2)
    for number, _ in enumerate(loader):  # 11 micro-batches
        if number < 10:
            loader.state_dict()
    batches = iter(loader)
    next(batches)
    for state in (loader.state_dict, lambda: loader.state_dict(num_batches=1), batches.state_dict):
        with pytest.warns(UserWarning, match=r"Epoch 0 ended with a global batch of fewer.*completes_step.*tail="):
            state()
    next(batches)
    loader.load_state_dict(loader.state_dict())  # a loop counts from here
    next(iter(loader))
    loader.state_dict()
