"""`mds_kwargs` of `dataframe_to_mds`, checked before Spark does anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_stream.stores import absolute, is_remote
from lightning_stream.writer.base import WriterConfig
from lightning_stream.writer.lengths import check_functions

_WRITER_KEYS = ("compression", "hashes", "size_limit", "max_workers", "progress_bar", "lengths")
_OWN_KEYS = ("out", "columns", "keep_local", "overwrite", "exist_ok", "retry", "store_options")


@dataclass(frozen=True)
class Settings:
    """`mds_kwargs`, checked."""

    out: Any
    columns: Mapping[str, str] | None
    writer: Mapping[str, Any]
    keep_local: bool
    overwrite: bool
    store_options: Mapping[str, Any] | None

    @classmethod
    def read(cls, mds_kwargs: Mapping[str, Any] | None, *, with_udf: bool = False) -> Settings:
        """Check `mds_kwargs`.

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
        out = passed["out"]
        retry = {"retries": passed["retry"]} if "retry" in passed else {}
        return cls(
            absolute(out),
            passed.get("columns"),
            writer,
            bool(passed.get("keep_local")),
            bool(passed.get("overwrite") or passed.get("exist_ok")),
            {**retry, **passed.get("store_options", {})} or None,
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
    columns = passed.get("columns", {})
    if not isinstance(columns, Mapping):
        problems.append(f"columns must be a dict of encodings by name, {{'id': 'int64'}}; found {columns!r:.60}.")
    elif with_udf and not columns:
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
