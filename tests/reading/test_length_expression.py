"""Lengths as expressions of other lengths: exact, and nothing but arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stream import MDSWriter, StreamingDataset
from lightning_stream.dataset import source_of
from lightning_stream.errors import NotFoundError
from lightning_stream.reading.length_expression import LengthExpression, is_expression

LEAVES = st.one_of(st.sampled_from(["tokens", "images"]), st.integers(0, 3000).map(str))


def _joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.builds("({} {} {})".format, parts, st.sampled_from(["+", "*", "-"]), parts)
    divided = st.builds("({} // {})".format, parts, st.integers(1, 9))
    called = st.builds("{}({}, {}, 7)".format, st.sampled_from(["max", "min"]), parts, parts)
    return st.one_of(binary, divided, called, st.builds("({}) ** 2".format, parts))


TEXTS = st.recursive(LEAVES, _joined, max_leaves=6)
LENGTHS = {"tokens": np.array([0, 1, 17, 4096], np.uint32), "images": np.array([0, 3, 0, 8], np.uint32)}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXTS)
def test_an_expression_gives_what_python_gives_or_says_why_not(text: str) -> None:
    text = f"tokens + {text}"
    rows = [dict(zip(LENGTHS, map(int, row), strict=True)) for row in zip(*LENGTHS.values(), strict=True)]
    wanted = [eval(text, {"max": max, "min": min}, row) for row in rows]  # noqa: S307 - the test's own text
    try:
        found = LengthExpression(text)(LENGTHS).tolist()
    except ValueError as error:
        found = wanted if min(wanted) < 0 or "64 bits" in str(error) else error
    assert found == wanted


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("__import__('os')", "__import__"),
        ("tokens.real + 1", "tokens.real"),
        ("tokens[0] * 2", r"tokens\[0\]"),
        ("tokens * 1.5", "1.5"),
        ("tokens + True", "True"),
        ("tokens + -1", "-1"),
        ("tokens // 2 // (lambda: 2)", "lambda"),
        ("tokens ** images", "tokens"),
        ("tokens ** 99", "power of 99"),
        ("max(tokens)", "max"),
        ("max(*tokens, 2)", "tokens"),
        ("(x := tokens) + 1", "x := tokens"),
        ("sum(tokens, 2)", "sum"),
        ("2 * 3", "no name"),
        ("tokens + ", "cannot be read"),
        ("tokens + \x00", "cannot be read"),
        ("+".join(["tokens"] * 5000), "too long"),
    ],
)
def test_anything_but_arithmetic_is_refused(text: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        LengthExpression(text)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("tokens - images", "gives -2 for .*'tokens': 1, 'images': 3"),
        ("tokens // images", "divides by 0"),
        ("(tokens + 4000000000) ** 2 * 4096", "64 bits"),
    ],
)
def test_numbers_that_are_no_lengths_are_refused(text: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        LengthExpression(text)(LENGTHS)


def test_a_name_is_no_expression() -> None:
    assert not any(map(is_expression, ["tokens", "input-ids", "a/b.txt", "n tokens"]))
    assert all(map(is_expression, ["tokens+1", "a - b", "a // 2", "a / 2", "a/2", "a % 2", "max(a, b)", "a*2"]))


def test_a_dataset_has_lengths_by_an_expression(tmp_path: Path) -> None:
    columns = {"tokens": "ndarray:int32", "images": "int"}
    with MDSWriter(out=str(tmp_path), columns=columns, lengths={"tokens": len, "images": int}) as writer:
        for number in range(50):
            writer.write({"tokens": np.zeros(number, np.int32), "images": number % 3})
    wanted = [number + 576 * (number % 3) for number in range(50)]
    dataset = StreamingDataset(local=tmp_path)
    reader = source_of(dataset).reader
    lengths = reader.lengths("tokens + 576 * images")
    assert (lengths.dtype, lengths.tolist()) == (np.uint32, wanted)
    assert reader.amounts("tokens ** 2 + 40 * images", np.array([7, 2])).tolist() == [89, 84]
    kept = StreamingDataset(local=tmp_path, filter={"lengths": {"tokens + 576 * images": (600, None)}})
    assert source_of(kept).reader.lengths("tokens + 576 * images").tolist() == [one for one in wanted if one >= 600]
    with pytest.raises(NotFoundError, match="'sounds'"):
        reader.lengths("tokens + sounds")
    with pytest.raises(ValueError, match="at most 4,294,967,295"):
        reader.lengths("tokens + 4294967296")
