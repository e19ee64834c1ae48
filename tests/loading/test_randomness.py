"""What a user's function draws depends on the place in the run, and on nothing else."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream.loading.randomness import (  # noqa: E402
    COLLATING,
    PreservedGenerators,
    SeededCall,
    epoch_of_call,
    sample_seed,
    takes_rng,
)


class OwnGenerator:
    """Draws as albumentations does: from a generator of its own, that no global seed reaches."""

    def __init__(self) -> None:
        self.random = np.random.default_rng()

    def set_random_seed(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __call__(self, value: Any) -> Any:
        return [value, self.random.random()]


class Compose:
    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        return [transform(value) for transform in self.transforms]


class Pipeline:
    def __init__(self) -> None:
        self.augment = {"image": OwnGenerator()}

    def transform(self, value: Any) -> Any:
        return self.augment["image"](value)


by_name = OwnGenerator()


def refers_by_name(value: Any) -> Any:
    return by_name(value)


def refers_by_closure() -> Callable[[Any], Any]:
    own = OwnGenerator()
    return lambda value: [own(value)]


def draws_globally(value: Any) -> Any:
    return [value, random.random(), np.random.rand(), torch.rand(1).item()]


def draws_from_rng(value: Any, rng: np.random.Generator) -> Any:
    return [value, rng.random()]


@pytest.mark.parametrize(
    "function",
    [
        draws_globally,
        draws_from_rng,
        partial(draws_from_rng),
        OwnGenerator(),
        Compose(draws_globally, Compose(OwnGenerator())),
        Pipeline().transform,
        refers_by_name,
        refers_by_closure(),
        partial(lambda own, value: own(value), OwnGenerator()),
    ],
    ids=lambda function: type(function).__name__,
)
@pytest.mark.parametrize("collate", [False, True])
def test_what_a_function_draws_depends_on_its_place_alone(function: Callable[..., Any], collate: bool) -> None:
    call = SeededCall(function, 5 ^ (COLLATING * collate))
    places = [(epoch, position) for epoch in range(3) for position in range(4)]
    first = [call("value", *place) for place in places]
    torch.manual_seed(1)
    assert [call("value", *place) for place in reversed(places)] == first[::-1]
    assert len({str(drawn) for drawn in first}) == len(places)
    others = SeededCall(function, 6 ^ (COLLATING * collate)), SeededCall(function, 5 ^ (COLLATING * (not collate)))
    assert all(other("value", *places[0]) != first[0] for other in others)


@pytest.mark.parametrize(
    "function", [refers_by_name, Pipeline().transform, draws_from_rng], ids=["by name", "method", "rng"]
)
def test_a_copy_in_another_process_draws_the_same(function: Callable[..., Any]) -> None:
    call = SeededCall(function, 5 ^ COLLATING)
    assert pickle.loads(pickle.dumps(call))("value", 1, 2) == call("value", 1, 2)


def test_two_generators_of_one_function_draw_differently() -> None:
    (_, one), (_, other) = SeededCall(Compose(OwnGenerator(), OwnGenerator()), 5)(0, 1, 2)
    assert one != other


def test_a_function_that_takes_rng_leaves_the_global_generators_alone() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    SeededCall(draws_from_rng, 5)(0, 1, 2)
    assert random.random() == expected
    assert SeededCall(draws_from_rng, 5)(0, 1, 2) == draws_from_rng(0, np.random.default_rng(sample_seed(5, 1, 2)))


def test_the_global_generators_are_put_back() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draws_globally(0)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError), PreservedGenerators():
        SeededCall(lambda value: 1 // value, 5)(0, 1, 2)
    assert draws_globally(0) == expected


@pytest.mark.parametrize("in_memory", [True, False])
def test_whatever_the_training_draws_between_batches_is_as_without_them(
    in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a normal number that numpy holds back, which changes none of the generator's bytes when it is drawn."""
    monkeypatch.setattr("lightning_stream.loading.randomness._GENERATORS._is_readable", in_memory)
    saved: list[Any] = []
    steps: list[Callable[[], object]] = [
        np.random.randn,
        np.random.random,
        random.random,
        lambda: random.gauss(0, 1),
        lambda: torch.randn(1).item(),
        lambda: saved.append((np.random.get_state(), random.getstate(), torch.get_rng_state())),
        lambda: saved and np.random.set_state(saved[-1][0]),
        lambda: saved and random.setstate(saved.pop()[1]),
        lambda: np.random.seed(7),
    ]
    weights = [8, 3, 3, 3, 3, 2, 2, 2, 1]
    choices = random.Random(5).choices(range(len(steps)), weights, k=400)

    def drawn(num_batches: int) -> list[Any]:
        saved.clear()
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        found = []
        for choice in choices:
            for _ in range(num_batches):
                with PreservedGenerators():
                    SeededCall(draws_globally, 5)(0, 1, 2)
            value = steps[choice]()
            found.append(value if isinstance(value, float) else None)
        return found

    expected = drawn(0)
    assert drawn(1) == expected
    assert drawn(2) == expected


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_normal_number_that_numpy_holds_back_is_put_back(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    np.random.seed(1)
    expected = [np.random.randn() for _ in range(5)]
    monkeypatch.setattr("lightning_stream.loading.randomness._GENERATORS._is_readable", in_memory)
    np.random.seed(1)
    drawn = []
    for _ in range(5):
        with PreservedGenerators():
            np.random.randn()
        drawn.append(np.random.randn())
    assert drawn == expected


def test_a_global_generator_that_cannot_be_seeded_is_refused() -> None:
    twister = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.raises(ValueError, match="found PCG64"), PreservedGenerators():
            pass
    finally:
        np.random.set_bit_generator(twister)


def test_a_parameter_named_rng_takes_a_generator() -> None:
    class WithRng:
        def __call__(self, sample: Any, *, rng: Any = None) -> Any: ...

    for function in (draws_from_rng, WithRng(), WithRng().__call__, partial(draws_from_rng, 1)):
        assert takes_rng(function)
    bound = partial(draws_from_rng, rng=np.random.default_rng(1))
    for function in (draws_globally, bound, lambda value, **rng: value, print, dict, len):
        assert not takes_rng(function)
    assert len(SeededCall(bound, 5)(0, 1, 2)) == 2


def test_a_function_that_reads_another_dataset_is_still_called_for_its_own_epoch() -> None:
    inner = SeededCall(lambda value: epoch_of_call(), 1)
    outer = SeededCall(lambda value: (inner(value, 7, 0), epoch_of_call()), 1)
    with PreservedGenerators():
        assert outer(None, 3, 0) == (7, 3)
    assert epoch_of_call() is None
