"""Numbers that follow from the lengths of samples, such as ``tokens + 576 * images``: parsed, never run as Python."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.FloorDiv: np.floor_divide,
    ast.Pow: np.power,
}
_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {"max": np.maximum, "min": np.minimum}
_SIGNS = re.compile(r"[+*()]|//|/\d| [-/%] ")  # a name of lengths has none of them
_MOST_POWER = 8
_MOST_CHARACTERS = 1000  # so that Python's limit of nested calls is far
_LIMIT = 2**63
_RULE = (
    "lengths are a name, or whole numbers and names joined by + - * // max() min(), or ** and a number from 1 to "
    f"{_MOST_POWER}"
)

_Term = tuple[Any, int]
"""Values (int64), and a number that none of them, nor what led to them, exceeds in size."""


def is_expression(text: str) -> bool:
    """Whether a text is more than the name of lengths. A minus between names needs spaces: ``a-b`` is a name."""
    return bool(_SIGNS.search(text))


class LengthExpression:
    """An expression over lengths, evaluated in whole numbers of 64 bits.

    Args:
        text: Whole numbers and names, joined by ``+ - * //``, ``max(a, b, ...)``, ``min(a, b, ...)`` and ``a ** 2``.

    Attributes:
        names: The lengths that it needs.

    Raises:
        ValueError: It has anything else.

    Example::

        expression = LengthExpression("tokens + 576 * images")
        expression({"tokens": np.array([10, 20]), "images": np.array([0, 2])})  # [10, 1172]
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _MOST_CHARACTERS:
            raise self._error("it is too long")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise self._error(f"it cannot be read: {error}") from None
        used = defaultdict[str, NDArray[np.integer]](lambda: np.empty(0, np.int64))
        self._value(self._tree, used)  # of no samples: raises what is wrong whatever the lengths are
        self.names = tuple(used)
        if not self.names:
            raise self._error("it has no name of lengths")

    def __call__(self, lengths: Mapping[str, NDArray[np.integer]]) -> NDArray[np.int64]:
        """The numbers that these lengths give: int64[n] from n of each name.

        Raises:
            ValueError: One is below 0, divides by 0, or may not fit into 64 bits.
        """
        values: NDArray[np.int64] = self._value(self._tree, lengths)[0]
        if (values < 0).any():
            at = int(np.argmax(values < 0))
            raise self._error(f"it gives {values[at]} for { ({name: int(lengths[name][at]) for name in self.names}) }")
        return values

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"{_RULE}, and never below 0; found {self.text!r}, but {problem}. Correct it")

    def _value(self, node: ast.expr, lengths: Mapping[str, NDArray[np.integer]]) -> _Term:
        """The values of a part; ValueError for what it must not have."""
        match node:
            case ast.Name(id=name):
                values = lengths[name].astype(np.int64)
                return values, int(values.max(initial=0))
            case ast.Constant(value=int() as number) if type(number) is int and number < _LIMIT:
                return np.int64(number), number
            case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=int() as power)) if not 1 <= power <= _MOST_POWER:
                raise self._error(f"it has a power of {power}")
            case ast.BinOp(op=ast.Pow(), right=right) if not isinstance(right, ast.Constant):
                pass
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                return self._joined(operator, self._value(left, lengths), self._value(right, lengths))
            case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as parts, keywords=[]) if name in _FUNCTIONS:
                terms = [self._value(part, lengths) for part in parts]
                return reduce(_FUNCTIONS[name], [values for values, _ in terms]), max(most for _, most in terms)
        raise self._error(f"it has {ast.unparse(node)!r}")

    def _joined(self, operator: ast.operator, left: _Term, right: _Term) -> _Term:
        (values, most), (others, most_other) = left, right
        if isinstance(operator, ast.FloorDiv) and (least := np.min(others, initial=1)) <= 0:
            raise self._error(f"it divides by {least}")
        if isinstance(operator, ast.Pow):
            most = most**most_other
        elif isinstance(operator, ast.Mult):
            most *= most_other
        elif isinstance(operator, (ast.Add, ast.Sub)):
            most += most_other
        if most >= _LIMIT:
            raise self._error(f"it may reach {most:.3g}, which is more than 64 bits hold")
        return _OPERATORS[type(operator)](values, others), most
