"""Digests of functions and values that are the same in every process, so that a changed one makes another dataset."""

from __future__ import annotations

import ast
import contextlib
import copyreg
import dis
import functools
import importlib.util
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import xxhash

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_CONTAINERS = (list, tuple, dict, set, frozenset, ModuleType, CodeType)
_DEFINED = (FunctionType, type)
_imported_for = ""  # the `modules_digest` for which `import_again` was called last
_NOT_USERS = ("lightning_stream", "pyspark", "py4j")  # wherever they are: Spark brings its own as archives
_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")})


def function_text(function: Any) -> str:
    """Name a function and everything that decides what it does: ``"tokenize 2f0c..."``; empty for None.

    The digest covers the function's source, its defaults, the values that it closes over, the global values that it
    reads, and the functions and classes of the user's modules that it calls, and those that they call in turn, also if
    it imports them when it is called. Of several lambdas in one line each counts by its code, and a class also by its
    attributes. An object counts by its class and by what pickle would store of it, and one of a library that cannot be
    stored, e.g. an open file, by its class alone. Libraries count by the names used.
    """
    if function is None:
        return ""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} {_Walk(strict=False).digest(function)}"


def value_digest(value: Any) -> str:
    """Return 32 hex digits that depend on all of a value, and on nothing else.

    Raises:
        ValueError: The value has a part without a stable description, e.g. an open file.
    """
    return _Walk(strict=True).digest(value)


def modules_digest() -> str:
    """Digest of the files of all modules of the user that are imported here."""
    total = xxhash.xxh3_128()
    for name, file in sorted(_users_files().items()):
        with contextlib.suppress(OSError):
            total.update(f"{name} {xxhash.xxh3_128_hexdigest(Path(file).read_bytes())} ".encode())
    return total.hexdigest()


def import_again(digest: str) -> None:
    """Forget the user's modules, so that they are imported again, unless that was done for this `modules_digest`.

    For processes that outlive an edit of the modules, as Spark's workers do.
    """
    global _imported_for
    if digest != _imported_for:
        for name in _users_files():
            del sys.modules[name]
        importlib.invalidate_caches()
        _imported_for = digest


def _users_files() -> dict[str, str]:
    """Names and files of the user's modules in Python that are imported, but for the program itself."""
    modules = {name: value for name, value in list(sys.modules.items()) if isinstance(value, ModuleType)}
    del modules["__main__"]
    files = {name: getattr(module, "__file__", None) or "" for name, module in modules.items() if _is_users(module)}
    return {name: file for name, file in files.items() if file.endswith(".py")}


class _Walk:
    """Visits a value and all of its parts, always in the same order."""

    def __init__(self, strict: bool) -> None:
        self._total = xxhash.xxh3_128()
        self._strict = strict
        self._open: set[int] = set()  # values that contain the current one
        self._seen: dict[Any, Any] = {}  # functions and classes by their id: each is visited once
        self._objects: dict[int, tuple[Any, bytes]] = {}  # objects of libraries by their id, with their digests
        self._in_object = False

    def digest(self, value: Any) -> str:
        """A digest of a value alone, which no value visited before or after changes."""
        before = self._total
        seen = dict(self._seen)
        self._total = xxhash.xxh3_128()
        self._add(value)
        hasher = self._total
        self._total = before
        self._seen = seen
        return str(hasher.hexdigest())

    def _add(self, value: Any) -> None:
        if type(value) in _PLAIN:
            data = value if type(value) is bytes else repr(value).encode("utf-8", "surrogatepass")
            self._total.update(b"%s %d:" % (type(value).__name__.encode(), len(data)) + data)
        elif id(value) in self._open:
            self._add("a value that contains this one")
        elif isinstance(value, _DEFINED):
            self._visit(value, self._definition(value))
        elif self._strict or self._in_object or isinstance(value, _CONTAINERS) or _is_users(type(value)):
            self._visit(value, self._parts(value))
        else:
            self._total.update(self._object(value))

    def _visit(self, value: Any, parts: Iterable[Any]) -> None:
        self._open.add(id(value))
        try:
            self._add(type(value).__qualname__)
            for part in parts:
                self._add(part)
        finally:
            self._open.discard(id(value))

    def _object(self, value: Any) -> bytes:
        """The digest of a library's object: by its class alone where a part of it cannot be stored."""
        if id(value) not in self._objects:
            before = self._total
            self._in_object = True
            self._total = xxhash.xxh3_128()
            try:
                self._visit(value, self._parts(value))
            except (ValueError, RecursionError):
                self._total = xxhash.xxh3_128(type(value).__qualname__.encode())
            self._objects[id(value)] = value, self._total.digest()
            self._total = before
            self._in_object = False
        return self._objects[id(value)][1]

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, ModuleType):
            return [value.__name__]
        if isinstance(value, CodeType):
            return [value.co_code, value.co_names, value.co_consts]
        if isinstance(value, (list, tuple)):
            return [len(value), *value]
        if isinstance(value, dict):
            return [list(value.items())]
        if isinstance(value, (set, frozenset)):
            return sorted(map(self.digest, value))
        if callable(value) and hasattr(value, "__wrapped__") and not _is_users(type(value)):  # functools.cache
            return [value.__wrapped__]
        try:
            if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor: without its address
                return _numbers_of(value.detach().cpu().to_dense())
            reducer = copyreg.dispatch_table.get(type(value))  # what pickle would store
            reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
        except Exception as error:
            if not self._strict and not self._in_object:
                return []
            raise ValueError(
                f"each input must have a stable description; a {type(value).__qualname__} has none ({error}). Pass "
                "paths, numbers or other plain values, and open what they name in the function."
            ) from error
        if isinstance(reduced, str):
            return [reduced]
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        if isinstance(state, dict):
            cached = {
                name
                for name, attribute in vars(type(value)).items()
                if isinstance(attribute, functools.cached_property)
            }
            state = {name: attribute for name, attribute in state.items() if name not in cached}
        return [make, arguments, state, list(items or ()), list(pairs or ())]

    def _definition(self, value: Any) -> Iterator[Any]:
        """A function or class: by name, and of the user's own also by source and by what it uses."""
        yield f"definition {value.__qualname__}"
        if not _is_users(value):
            yield str(value.__module__)
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            yield _source(value)
            if isinstance(value, FunctionType):
                yield from self._used(value)
                return
            yield from value.__bases__
            for name, member in vars(value).items():
                inner = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
                if isinstance(inner, FunctionType):
                    yield _source(inner)  # a notebook has the source of functions, but not of classes
                    yield from self._used(inner)
                elif not name.startswith(("__", "_abc_")) and (type(member) in _PLAIN or not self._strict):
                    yield [name, member]

    def _used(self, function: FunctionType) -> Iterator[Any]:
        """The values that a function carries, and the globals that it names."""
        yield [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell is empty so far
                yield cell.cell_contents
        names = set(_names(function.__code__))
        yield from self._named(function.__globals__, names)
        yield from _files_of(_imported(function.__code__, function.__globals__))

    def _named(self, variables: dict[str, Any], names: set[str]) -> Iterator[Any]:
        for name in sorted(names & variables.keys()):
            value = variables[name]
            yield name
            if isinstance(value, ModuleType):
                key = (id(value), frozenset(names))
                if _is_users(value) and key not in self._seen:
                    self._seen[key] = value
                    yield from self._named(vars(value), names)
            elif value is not os.environ:  # it differs from one terminal to the next
                yield value


def _numbers_of(tensor: Any) -> list[Any]:
    """The numbers of a tensor; numpy lacks bfloat16 and float8, which float32 has exactly."""
    try:
        return [tensor.numpy()]
    except TypeError:
        return [str(tensor.dtype), tensor.float().numpy()]


def _is_users(value: Any) -> bool:
    """Whether a module, class or function is the user's own, and no library's."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    if name == "__main__" or name is None:
        return True
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None) or _path_of(getattr(module, "__spec__", None))
    return name.partition(".")[0] not in _NOT_USERS and _is_users_path(path)


def _is_users_path(path: str | None) -> bool:
    if path is None:
        return False
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)
    return not is_installed and not os.path.realpath(path).startswith(_LIBRARIES)


def _path_of(spec: ModuleSpec | None) -> str | None:
    """Where a module is; of a package without a file, its folder."""
    if spec is None:
        return None
    if spec.has_location:
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), None)


def _imported(code: CodeType, variables: dict[str, Any]) -> Iterator[str]:
    """The modules that a function imports when it is called, and perhaps what it takes from them, as in `_imports`."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, wanted, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            yield from _absolute(step.argval, level.argval, variables.get("__package__"), wanted.argval or ())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imported(constant, variables)


def _imports(text: bytes, package: str) -> Iterator[str]:
    """The modules that a file imports anywhere; a name that it takes from a module may be a module too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _absolute(node.module or "", node.level, package, [alias.name for alias in node.names])


def _absolute(name: str, level: int, package: str | None, wanted: Iterable[str]) -> Iterator[str]:
    with contextlib.suppress(ImportError, ValueError):  # beyond the top: Python would raise, if it comes so far
        module = importlib.util.resolve_name("." * level + name, package) if level else name
        yield module
        yield from (f"{module}.{part}" for part in wanted)


def _files_of(names: Iterable[str]) -> Iterator[Any]:
    """The user's modules among these, with those that they import in turn: names, and digests of their files.

    Nothing is imported: a function may import under a condition that never holds here, and modules have side effects.
    """
    waiting = sorted(set(names), reverse=True)
    seen = set(names)
    while waiting:
        name = waiting.pop()
        spec = _spec_of(name)
        if not _is_users_path(_path_of(spec)) or name.partition(".")[0] == "lightning_stream":
            continue
        text = b""
        package = name
        if spec is not None and spec.has_location and spec.origin:
            with contextlib.suppress(OSError):
                text = Path(spec.origin).read_bytes()
            package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        yield [name, xxhash.xxh3_128_hexdigest(text)]
        if name in sys.modules and _is_edited(vars(sys.modules[name]).values(), sys.modules[name].__file__ or ""):
            yield "imported before its file was edited"
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # a compiled module, or not of this Python
            new = set(_imports(text, package)) - seen
            seen |= new
            waiting += sorted(new, reverse=True)


def _spec_of(name: str) -> ModuleSpec | None:
    """Where a module is; unlike `importlib.util.find_spec`, this does not import the packages that it is in."""
    path = None
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        wanted = ".".join(parts[:end])
        specs = (finder.find_spec(wanted, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        path = None if spec is None else spec.submodule_search_locations
        if path is None:
            return spec if end == len(parts) else None
    return spec


def _source(value: Any) -> Any:
    """The text of a function or class; a function's code where the text is not known, or not of what runs."""
    code = getattr(value, "__code__", None)
    if code is None or not _is_users_path(code.co_filename):  # a library's wrapper
        value = inspect.unwrap(value)
        code = getattr(value, "__code__", None)
    try:
        text = inspect.getsource(code or value)  # of a function it would be that of the one that it wraps
        file = inspect.getsourcefile(code or value) or ""
    except (OSError, TypeError):
        return code
    is_shared = value.__name__ == "<lambda>" and text.count("lambda") > 1  # the lines of one are those of others, too
    return code if is_shared or _is_edited([value], file) else text


def _is_edited(definitions: Iterable[Any], file: str) -> bool:
    """Whether a file was edited since it was imported: then it has the text of others than these, which run."""
    linecache.checkcache(file)
    codes = _codes_in("".join(linecache.getlines(file)))
    parts = chain.from_iterable((part, *vars(part).values()) for part in definitions if isinstance(part, _DEFINED))
    running = [part.__code__ for part in parts if isinstance(part, FunctionType)]
    return codes is not None and any(code.co_filename == file and code not in codes for code in running)


@functools.lru_cache(64)
def _codes_in(text: str) -> frozenset[CodeType] | None:
    """The code of all functions in a file; None where it cannot be compiled alone, as a notebook's cell."""
    codes = set()
    try:
        waiting = [compile(text, "", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return None
    while waiting:
        codes.add(code := waiting.pop())
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(codes)


def _names(code: CodeType) -> Iterator[str]:
    """The names of all globals and attributes that a function reads, in functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
