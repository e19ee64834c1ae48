"""The rules of docs/architecture.md, whose table of layers is read here, and what importing may pull in."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_stream"
FILES = sorted(PACKAGE.rglob("*.py"))
TORCH_FROM_LAYER = 5
OPTIONAL = {
    "botocore", "google", "azure", "databricks", "fsspec", "urllib3", "cramjam", "pyspark", "composer", "pyarrow",
    "pandas",
}  # fmt: skip
HEAVY_ON_IMPORT = {
    "torch", "lightning", "pytorch_lightning", "composer", "pyspark", "pyarrow", "botocore", "google", "azure", "PIL"
}  # fmt: skip
NOT_COUNTED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip
NAMES_OF_ANYTHING = {
    "about", "aside", "each", "early", "found", "given", "held", "kept", "number", "one", "own", "spent",
    "turn", "whole",
}  # fmt: skip
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_NESTING = 4
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Row:
    """A row of the table of layers."""

    layer: float
    rooms: tuple[str, ...]  # names of folders, and of modules of the root
    tokens: int  # of code, at most


def _layers() -> list[Row]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (-?[\d.]+) \| (.+?) \| ([\d,]+) \| .+ \|$", page, flags=re.MULTILINE)
    return [
        Row(float(layer), tuple(re.findall(r"`(\w+)(?:/|\.py)`", rooms)), int(tokens.replace(",", "")))
        for layer, rooms, tokens in rows
    ]


LAYERS = _layers()
LAYER_OF = {room: row.layer for row in LAYERS for room in row.rooms}


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> frozenset[tuple[str, bool]]:
    """All (module, is_top_level) that a file imports; relative imports made absolute."""
    top = {id(node) for node in _tree(path).body}
    package = ["lightning_stream", *path.relative_to(PACKAGE).parent.parts]
    found: set[tuple[str, bool]] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, id(node) in top) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module or ""]).strip(".")
            found.add((module, id(node) in top))
            if module == "lightning_stream":
                found |= {(f"{module}.{alias.name}", id(node) in top) for alias in node.names}
    return frozenset(found)


def _imports_between_rooms() -> Iterator[tuple[Path, str, str]]:
    """Each (file, module that it imports, room of that module) where the room is another one."""
    for path in FILES:
        if _room(path) in ("__init__", "__main__"):
            continue
        for module, _ in _imports(path):
            parts = module.split(".")
            if parts[0] == "lightning_stream" and len(parts) > 1 and parts[1] not in ("__init__", _room(path)):
                yield path, module, parts[1]


def test_the_table_of_layers_has_every_folder_and_module_once() -> None:
    rooms = {_room(path) for path in FILES} - {"__init__", "__main__"}
    assert sorted(room for row in LAYERS for room in row.rooms) == sorted(rooms)


def test_a_module_imports_only_from_lower_layers_or_its_own_folder() -> None:
    imports = list(_imports_between_rooms())
    assert len(imports) > 500
    assert [(_name(path), module) for path, module, room in imports if LAYER_OF[room] >= LAYER_OF[_room(path)]] == []


def test_torch_is_imported_from_its_layer_on() -> None:
    users = {_room(path) for path in FILES for module, _ in _imports(path) if module.split(".")[0] == "torch"}
    assert "loading" in users
    assert {room for room in users if LAYER_OF[room] < TORCH_FROM_LAYER} == set()


def test_a_module_imports_only_public_names_of_another_folder() -> None:
    for path in FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_stream."):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                is_own = (node.module or "").split(".")[1] == _room(path)
                assert is_own or not private, f"{_name(path)}:{node.lineno}"


def test_the_package_does_not_import_the_recipes() -> None:
    assert [path for path in FILES for module, _ in _imports(path) if module.split(".")[0] == "recipes"] == []


def test_an_optional_client_library_is_imported_in_one_file_of_the_stores() -> None:
    users = defaultdict(set)
    for path in FILES:
        for module, _ in _imports(path):
            if _room(path) == "stores" and module.split(".")[0] in OPTIONAL:
                users[module.split(".")[0]].add(path.name)
    assert users
    assert {name: files for name, files in users.items() if len(files) > 1} == {}


def test_files_and_functions_stay_small() -> None:
    for path in FILES:
        assert path.read_text().count("\n") <= MAX_FILE_LINES, _name(path)
        for node in ast.walk(_tree(path)):
            if isinstance(node, FUNCTIONS):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                assert (node.end_lineno or 0) - first.lineno < MAX_FUNCTION_LINES, f"{_name(path)}: {node.name}"
                assert _depth(node) <= MAX_NESTING, f"{_name(path)}: {node.name} nests {_depth(node)} deep"


def test_a_statement_gives_one_name_its_value() -> None:
    """But for values that are exchanged: `a, b = b, a`."""
    for path in FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                names, *others = node.targets
                if isinstance(names, ast.Tuple) and not others and len(names.elts) == len(node.value.elts):
                    written = {ast.unparse(name) for name in names.elts if isinstance(name, (ast.Name, ast.Attribute))}
                    read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}
                    assert written & read or not written, f"{_name(path)}, line {node.lineno}: {ast.unparse(node)}"


def test_names_tell_what_a_value_is() -> None:
    """A pronoun, or a word for any value, tells nothing. Fields keep their names, which states and records have."""
    for path in FILES:
        classes = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)]
        fields = {line.target for each in classes for line in each.body if isinstance(line, ast.AnnAssign)}
        for node in ast.walk(_tree(path)):
            name = None
            if isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
                name = node.id
            assert name not in NAMES_OF_ANYTHING, f"{_name(path)}, line {node.lineno}: {name}"


def test_each_row_of_the_table_keeps_its_budget() -> None:
    tokens: Counter[str] = Counter()
    for path in FILES:
        tokens[_room(path)] += _count_tokens(path)
    used = [(row, sum(tokens[room] for room in row.rooms)) for row in LAYERS]
    assert [(row.rooms, count) for row, count in used if count > row.tokens] == []


def _count_tokens(path: Path) -> int:
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(_tree(path))
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None
    }
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return sum(token.type not in NOT_COUNTED and token.start not in docstrings for token in tokens)


def _depth(node: ast.AST) -> int:
    blocks = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith)
    deepest = 0
    for child in ast.iter_child_nodes(node):
        elif_chain = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, _depth(child) + (isinstance(child, blocks) and not elif_chain))
    return deepest


def test_no_interrupt_passes_a_guard_of_locks_or_of_a_writer_by() -> None:
    """Python 3.12 and 3.13 jump back to a `while` with a condition outside of the `with` or `try` around it.

    A Ctrl-C at that instruction skips what closes them. `while True:` and `break` do not.
    """
    files = [path for path in FILES if _room(path) in ("writer", "cache", "shared_files", "threads")]
    guards = [node for path in files for node in ast.walk(_tree(path)) if isinstance(node, (ast.With, ast.Try))]
    loops = [node for guard in guards for node in ast.walk(guard) if isinstance(node, ast.While)]
    assert len(guards) > 50
    assert [ast.unparse(loop) for loop in loops if not isinstance(loop.test, ast.Constant)] == []


def test_no_one_draws_from_the_global_generators() -> None:
    # A sample's transform draws from them, seeded by its place in the run: a thread of ours must not come between.
    for path in FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                is_own = node.attr in ("Random", "SystemRandom") or path.name == "randomness.py"
                assert is_own, f"{_name(path)}:{node.lineno}: random.{node.attr}"


@pytest.mark.parametrize(
    "modules",
    ["lightning_stream, lightning_stream.errors", "lightning_stream.writer, lightning_stream.reading.reader"],
)
def test_importing_the_package_its_writer_and_its_reader_pulls_in_nothing_heavy(modules: str) -> None:
    code = f"import sys, {modules}; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "lightning_stream" in printed.split()
    assert not set(printed.split()) & HEAVY_ON_IMPORT


def test_no_module_imports_another_in_a_circle_not_even_for_types_or_inside_a_function() -> None:
    names = {
        ".".join(["lightning_stream", *p.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): p
        for p in FILES
    }
    graph = {
        name: {module for module, _ in _imports(path) if module in names and module != name}
        for name, path in names.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in graph[name]:
                # a package's __init__ re-exports its own modules: that is no cycle of ideas
                if not name.startswith(other + "."):
                    visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
