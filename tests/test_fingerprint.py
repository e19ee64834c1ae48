"""Functions differ by their source and by the values that they carry, equally in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property, partial, update_wrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream.fingerprint import function_text


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


def test_lambdas_of_one_line_differ() -> None:
    above, below = lambda row: row > 1, lambda row: row < 1
    assert function_text(above) != function_text(below)


def test_the_attributes_of_a_class_count() -> None:
    def keeps(least: int) -> Any:
        class Keep:
            _LEAST = least

            def __call__(self, row: int) -> bool:
                return row > self._LEAST

        return Keep()

    assert function_text(keeps(1)) != function_text(keeps(2))
    assert function_text(keeps(1)) == function_text(keeps(1))


def test_what_an_object_cached_makes_no_difference_nor_does_where_it_lies() -> None:
    scale, held = Scale(2), object()
    before = function_text(scale.apply)
    assert scale.double == 4
    assert function_text(scale.apply) == before
    assert function_text(partial(scaled, held)) == function_text(partial(scaled, object()))


def test_a_class_without_a_source_counts_by_its_methods() -> None:
    """As those of a notebook."""
    texts = []
    for factor in (2, 2, 3):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(f"class Times:\n    def row(self, row):\n        return row * {factor}\n", names)
        texts.append(function_text(names["Times"]().row))
    assert texts[0] == texts[1] != texts[2]


def test_a_tensor_counts_by_its_values() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: uv sync")

    def text_of(value: float, factor: int) -> str:
        held = torch.nn.ParameterList([torch.tensor([1.0, value])])
        several = np.vectorize(lambda row: row * factor)
        return function_text(lambda row: (held, several))

    assert text_of(2.0, 1) == text_of(2.0, 1)
    assert len({text_of(2.0, 1), text_of(3.0, 1), text_of(2.0, 2)}) == 3


def test_tensors_that_numpy_lacks_count_by_their_values() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: uv sync")
    for convert in (torch.Tensor.bfloat16, lambda tensor: tensor.to(torch.float8_e4m3fn), torch.Tensor.to_sparse):
        limits = [convert(torch.tensor([1.0, value])) for value in (2.0, 2.0, 3.0)]
        texts = [function_text(lambda row, limit=limit: row < limit) for limit in limits]
        assert texts[0] == texts[1] != texts[2]


class Wrapping:
    def __init__(self, function: Any, factor: int) -> None:
        update_wrapper(self, function)
        self.factor = factor

    def __call__(self, row: int) -> int:
        return row * self.factor


def test_an_object_that_wraps_a_function_counts_by_its_own_values_too() -> None:
    assert function_text(Wrapping(scaled, 2)) == function_text(Wrapping(scaled, 2))
    assert function_text(Wrapping(scaled, 2)) != function_text(Wrapping(scaled, 3))


def test_what_a_decorator_does_counts(tmp_path: Path) -> None:
    decorated = "from decorators import decorate\n@decorate\ndef keep(row):\n    return row > 1\n"
    command = "import sys; sys.path.insert(0, sys.argv[1]); import decorated\n"
    command += "from lightning_stream.fingerprint import function_text; print(function_text(decorated.keep))"
    texts = []
    for at, result in enumerate(["function(row)", "function(row)", "not function(row)"]):
        text = "from functools import wraps\ndef decorate(function):\n    @wraps(function)\n    def checked(row):\n"
        made(tmp_path / str(at), {"decorators.py": f"{text}        return {result}\n    return checked\n"})
        made(tmp_path / str(at), {"decorated.py": decorated})
        arguments = [sys.executable, "-c", command, str(tmp_path / str(at))]
        texts.append(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    assert texts[0] == texts[1] != texts[2]


def test_a_set_may_hold_the_object_that_holds_it() -> None:
    node = Called(3)
    node.factor = {node}  # type: ignore[assignment]
    assert function_text(node) == function_text(node) != function_text(Called(3))


def test_a_function_that_names_itself_has_a_digest() -> None:
    def countdown(k: int) -> int:
        return countdown(k - 1) if k else 0

    assert "countdown" in function_text(countdown)


HELPERS = """
import functools
import re
from datetime import timedelta
RATE = 2
TABLE = {"a": {1, 2, 3}}
PATTERN = re.compile("a+")
SPANS = [timedelta(1)]

def double(value):
    return 2 * value

WAYS = {"double": double}

class Base:
    def shift(self, value):
        return value + 1

class Scaler(Base):
    def scale(self, value):
        return value * RATE

@functools.cache
def cached(value):
    return value

def step(value):
    return value * 5

STEPS = [step]

def helper(value):
    from late import parts
    import late.parts as named
    ways = WAYS["double"](1) + len(PATTERN.findall("aa")) + SPANS[0].days + parts.first(1) + named.second(1)
    return Scaler().scale(value) + cached(1) + len(TABLE) + STEPS[0](value) + ways
"""
LATE = """
def first(value):
    return 50 * value

def second(value):
    return 7 * value
"""
MAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import helpers
from helpers import helper
from lightning_stream.fingerprint import function_text, value_digest

def row(sample):
    return {"a": helper(sample["a"])}

def by_module(sample):
    return {"a": helpers.helper(sample["a"])}

print(function_text(row), function_text(by_module), value_digest([{"a": {"x", "y", "z"}}, range(3), helpers.Scaler()]))
"""


def digests(folder: Path, helpers: str, seed: str = "0") -> list[str]:
    folder.mkdir()
    (folder / "late").mkdir()  # a package without a file of its own
    helpers, _, late = helpers.partition("# late")
    (folder / "helpers.py").write_text(helpers)
    (folder / "late" / "parts.py").write_text(late)
    (folder / "main.py").write_text(MAIN)
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(folder / "main.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_what_a_function_calls_counts_and_processes_do_not(tmp_path: Path) -> None:
    code = f"{HELPERS}# late{LATE}"
    before = digests(tmp_path / "0", code)
    assert digests(tmp_path / "1", code, seed="7") == before
    changes = [
        ("RATE = 2", "RATE = 3"),
        ("value + 1", "value + 2"),
        ("2, 3}", "2, 4}"),
        ("return value\n", "return -value\n"),
        ('"a+"', '"b+"'),
        ("timedelta(1)", "timedelta(2)"),
        ("2 * value", "3 * value"),
        ("50 * value", "60 * value"),
        ("7 * value", "8 * value"),
        ("value * 5", "value * 6"),
    ]
    for k, (old, new) in enumerate(changes):
        after = digests(tmp_path / f"changed{k}", code.replace(old, new))
        assert after[1] != before[1], new
        assert after[3] != before[3], new


def made(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def sometimes(sample: dict[str, Any]) -> bool:
    if sample.get("never"):
        import heavy.inner
        from heavy import other
        from heavy.inner import missing  # noqa: F401

        return bool(heavy, other)
    return True


HEAVY = {
    "heavy/__init__.py": "raise RuntimeError('no GPU here')",
    "heavy/inner.py": "from . import deep\nraise SystemExit(1)",
    "heavy/other.py": "import nowhere_at_all",
    "heavy/deep.py": "import heavy.inner\nX = 1",
}


@pytest.mark.parametrize("changed", list(HEAVY))
def test_what_a_function_would_import_is_not_imported_and_its_files_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    made(tmp_path, HEAVY)
    before = function_text(sometimes)
    assert function_text(sometimes) == before
    assert not [name for name in sys.modules if name.startswith("heavy")]
    made(tmp_path, {changed: HEAVY[changed] + "\n# changed"})
    assert function_text(sometimes) != before


def test_a_digest_is_the_same_before_and_after_the_function_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    made(tmp_path, {"lazily_used.py": "COUNT = 0\ndef double(x): return 2 * x"})

    def doubled(sample: dict[str, int]) -> int:
        from lazily_used import double

        found: int = double(sample["x"])
        return found

    before = function_text(doubled)
    assert doubled({"x": 2}) == 4
    assert function_text(doubled) == before
    monkeypatch.delitem(sys.modules, "lazily_used")


@pytest.mark.parametrize("name", ["keep", "Rule", "late"])
def test_a_function_whose_file_was_edited_since_is_not_taken_for_the_edited_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text = "def keep(x):\n    return x < 100\nclass Rule:\n    def keep(self, x):\n        return x < 100\n"
    text += "def late(x):\n    import edited_rule\n    return edited_rule.keep(x)\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    made(tmp_path, {"edited_rule.py": text})
    import edited_rule

    before = function_text(getattr(edited_rule, name))
    for new in (text.replace("100", "10"), "\n" + text, "def keep(x):\n    return 1\n" + text):
        made(tmp_path, {"edited_rule.py": new})
        running = function_text(getattr(edited_rule, name))
        made(tmp_path / "fresh", {"edited_rule.py": new})
        command = f"import sys; sys.path.insert(0, {str(tmp_path / 'fresh')!r}); import edited_rule\n"
        command += f"from lightning_stream.fingerprint import function_text; print(function_text(edited_rule.{name}))"
        fresh = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
        assert running != fresh.strip()
        assert name == "late" or ("100" in new) == (fresh.strip() == before)


def test_a_process_imports_again_what_a_user_may_have_edited_and_no_library(tmp_path: Path) -> None:
    """Spark's own package lies in an archive of its installation, and Debian's packages in dist-packages."""
    for name in ("mine", "py4j", "dist-packages/installed"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    script = """
import mine, py4j, installed
from lightning_stream.fingerprint import import_again, modules_digest
digest = modules_digest()
open(installed.__file__, "a").write("edited = 1")
assert modules_digest() == digest
open(mine.__file__, "a").write("edited = 1")
assert modules_digest() != digest
import_again("another")
print(*[name in __import__("sys").modules for name in ("mine", "py4j", "installed")])
"""
    paths = f"{tmp_path}:{tmp_path / 'dist-packages'}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.stdout.split() == ["False", "True", "True"], done.stderr
