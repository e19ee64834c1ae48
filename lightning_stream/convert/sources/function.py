"""A source of the user's own: a function that gives the samples of each of some inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning_stream.convert.code import source_text
from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, Reader, Span, refuse_others
from lightning_stream.convert.sources.rows import columns_of
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.writer.infer import infer_columns

_BATCH_SAMPLES = 256


@dataclass(frozen=True)
class Inputs:
    """A source of your own, for `convert`: ``function(each)`` gives the samples (dicts) of each input, in order.

    Attributes:
        inputs: What is read, e.g. paths, or ranges of numbers. Each is a part by itself, written by one process.
        function: Gives its samples. With several processes, a function of a module. The same input must give the same
            samples each time.
        stamp: Changes when what is read changes: then the dataset is another. Inputs tell by their ``repr``.
    """

    inputs: Sequence[Any]
    function: Callable[[Any], Iterable[Mapping[str, Any]]]
    stamp: str = ""


@dataclass(frozen=True)
class FunctionReader(Reader):
    """Reads `Inputs`.

    Attributes:
        given: Them.
        strict: See `Reader.tuned`.
        as_rows: See there.
    """

    kind = "inputs"
    given: Inputs
    strict: bool = False
    as_rows: bool = False

    def tuned(self, *, strict: bool, as_rows: bool) -> FunctionReader:
        """The reader for one conversion."""
        return FunctionReader(self.given, strict, as_rows)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The function's source."""
        return {"kind": self.kind, "read": source_text(self.given.function)}

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The inputs as if they were files of one byte."""
        stamp = self.given.stamp
        return tuple(SourceFile("input", f"{k:05} {each!r:.200}", 1, stamp) for k, each in enumerate(self.given.inputs))

    def spans(self, file: SourceFile, partition_bytes: int) -> list[Span]:  # noqa: ARG002 - an input stays whole
        """Its number is where it begins."""
        return [Span(file, int(file.name.split(" ")[0]), None, 1)]

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:  # noqa: ARG002
        """From the first sample."""
        for encoding in (asked or {}).values():
            get_encoding(encoding)
        if asked is not None:
            return Found(dict(asked), {})
        for each in self.given.inputs:
            for sample in islice(self.given.function(each), 1):
                return Found(infer_columns(sample), {})
        raise ValueError("the inputs give no sample: there is nothing to write.")

    def read(self, span: Span, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Some hundred samples at a time."""
        samples = iter(self.given.function(self.given.inputs[span.begin]))
        where = f"input {span.file.name}"
        while rows := list(islice(samples, _BATCH_SAMPLES)):
            if self.strict and not self.as_rows:
                refuse_others(rows, columns, where)
            yield Batch(rows if self.as_rows else columns_of(rows, columns), where)
