"""The work that every task gets, from `mds_kwargs`, which are checked before Spark does anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_stream.convert.partition import OutputSpec
from lightning_stream.stores import absolute, is_remote
from lightning_stream.writer.base import WriterConfig
from lightning_stream.writer.lengths import check_functions

if TYPE_CHECKING:
    from typing import Self

_WRITER_KEYS = ("compression", "hashes", "size_limit", "max_workers", "progress_bar", "lengths")
_OWN_KEYS = ("out", "columns", "keep_local", "overwrite", "exist_ok", "retry", "store_options")


@dataclass(frozen=True)
class SparkJob(OutputSpec):
    """The description of the work that every task gets.

    Attributes:
        columns: Before the work is planned, those that the user chose; empty for all, inferred.
        overwrite: Whether what is there is replaced.
        done: Partitions that an earlier run of it has receipts for.
        udf: From a pandas frame to an iterable of samples; None to write the rows as they are.
        udf_kwargs: Its arguments.
    """

    overwrite: bool = False
    done: frozenset[int] = frozenset()
    udf: Callable[..., Iterable[Mapping[str, Any]]] | None = None
    udf_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, mds_kwargs: Mapping[str, Any] | None, *, with_udf: bool = False) -> Self:
        """Check `mds_kwargs`; the work is not planned yet.

        Raises:
            ValueError: Settings that are wrong; all are named.
            TypeError: It is not a mapping.
        """
        if mds_kwargs is not None and not isinstance(mds_kwargs, Mapping):
            raise TypeError(f"mds_kwargs must be a dict such as {{'out': ...}}; found {mds_kwargs!r:.60}.")
        mds_kwargs = mds_kwargs or {}
        passed = {name: value for name, value in mds_kwargs.items() if value is not None}
        if problems := _problems(passed, with_udf):
            raise ValueError(" ".join(problems))
        writer = {"compression": "zstd", **{key: mds_kwargs[key] for key in _WRITER_KEYS if key in mds_kwargs}}
        if "hashes" in passed:
            writer["hashes"] = list(passed["hashes"])
        retry = {"retries": passed["retry"]} if "retry" in passed else {}
        return cls(
            absolute(passed["out"]),
            bool(passed.get("keep_local")),
            {**retry, **passed.get("store_options", {})} or None,
            passed.get("columns", {}),
            writer,
            "",
            bool(passed.get("overwrite") or passed.get("exist_ok")),
        )

    def result(self) -> tuple[str, str]:
        """The return value of `dataframe_to_mds`."""
        if isinstance(self.out, tuple):
            return (self.out[0], self.out[-1])
        return ("", self.out) if is_remote(self.out) else (self.out, "")


def _problems(passed: Mapping[str, Any], with_udf: bool) -> list[str]:
    problems = []
    if "out" not in passed:
        problems.append("mds_kwargs needs out: a folder that all machines share, a URL, or (local folder, URL).")
    columns = passed.get("columns")
    if columns is not None and not (isinstance(columns, Mapping) and columns):
        problems.append(f"columns must be a dict of encodings by name, {{'id': 'int64'}}; found {columns!r:.60}.")
    elif with_udf and columns is None:
        problems.append("with udf_iterable, mds_kwargs needs columns: the encoding of each value of its samples.")
    if unknown := sorted(passed.keys() - {*_WRITER_KEYS, *_OWN_KEYS}):
        problems.append(f"mds_kwargs has no {', '.join(unknown)}; it takes {', '.join(_OWN_KEYS + _WRITER_KEYS)}.")
    if isinstance(passed.get("hashes"), str):
        problems.append(f"hashes must be a list of names, such as [{passed['hashes']!r}]; found {passed['hashes']!r}.")
    checked = (("hashes", "hashes"), ("compression", "compression"), ("limit", "size_limit"), ("lengths", "lengths"))
    return problems + [problem for name, key in checked for problem in _refused(name, passed.get(key))]


def _refused(name: str, value: Any) -> list[str]:
    """What the writer in an executor would refuse, without a task's long error around it."""
    try:
        if name == "lengths":
            check_functions(value)
        else:
            WriterConfig.make(**{"compression": None, "hashes": None, "limit": None, name: value})
    except (ValueError, TypeError) as error:
        return [str(error)]
    return []
