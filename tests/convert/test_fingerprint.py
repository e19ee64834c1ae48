"""Two functions are told apart by their source and by the values that they carry, in every process alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from lightning_stream.convert.fingerprint import function_text


def scaled(row: int, factor: int = 1) -> int:
    return row * factor


def times(factor: int) -> Any:
    return lambda row: row * factor


@dataclass(frozen=True)
class Scale:
    factor: int

    @cached_property
    def double(self) -> int:
        return 2 * self.factor

    def apply(self, row: int) -> int:
        return row * self.double


class Called:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, row: int) -> int:
        return row * self.factor


def test_carried_values_tell_functions_apart() -> None:
    for make in (times, Called, lambda k: Scale(k).apply, lambda k: partial(scaled, factor=k)):
        assert function_text(make(2)) == function_text(make(2)) != function_text(make(3))
    assert function_text(scaled) != function_text(times)
    assert function_text(None) == ""
    assert len({function_text(each) for each in (dict, list, len, Called)}) == 4


def test_what_an_object_cached_makes_no_difference_nor_does_where_it_lies() -> None:
    scale, held = Scale(2), object()
    before = function_text(scale.apply)
    assert scale.double == 4
    assert function_text(scale.apply) == before
    assert function_text(partial(scaled, held)) == function_text(partial(scaled, object()))


def test_a_function_that_names_itself_is_told() -> None:
    def countdown(k: int) -> int:
        return countdown(k - 1) if k else 0

    assert "countdown" in function_text(countdown)
