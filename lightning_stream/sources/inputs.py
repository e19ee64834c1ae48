"""A source of the user's own: a function that returns the samples of each of some inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from lightning_stream.fingerprint import function_text, value_digest
from lightning_stream.sources.base import Asked, Batches, Columns, Pieces, Reader, SourceSchema, batched
from lightning_stream.sources.files import Files, SourceFile
from lightning_stream.writer.infer import infer_columns

Samples: TypeAlias = "Mapping[str, Any] | Iterable[Mapping[str, Any]]"


@dataclass(frozen=True)
class Inputs:
    """A source of your own, for `convert`: ``function(each)`` returns the samples of an input, or one: dicts.

    Example::

        convert(Inputs(paths, samples_of_path), "out")

    Attributes:
        inputs: E.g. paths, or ranges of numbers. Each is a partition of its own, which one process writes, unless
            ``partition_bytes=n`` joins n of them. An input counts by its whole value.
        function: Returns an input's samples: always the same for the same input. With several processes, it must be a
            function of a module, or cloudpickle must be installed.
        stamp: Change it when the inputs' files change, which `convert` does not see: then the dataset is another one.
    """

    inputs: Sequence[Any]
    function: Callable[[Any], Samples]
    stamp: str = ""


@dataclass
class FunctionReader(Reader):
    """Reads `Inputs`."""

    kind = "inputs"
    min_bytes = 1
    function: Callable[[Any], Samples]

    @property
    def settings(self) -> dict[str, Any]:
        """The function, and all that it uses."""
        return {"kind": self.kind, "function": function_text(self.function)}

    def readable(self, where: str) -> AbstractContextManager[None]:
        """Errors of a function of the user's are the user's."""
        return nullcontext()

    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        if asked is not None:
            return SourceSchema({name: encoding for name, encoding in asked.items() if encoding is not None})
        for file in files:
            for sample in islice(self._samples(file), 1):
                return SourceSchema(infer_columns(sample))
        raise ValueError("the function returned no sample for any input: there is nothing to write.")

    def read(self, splits: Pieces, columns: Columns) -> Batches:
        return batched((sample, split.file.uri) for split in splits for sample in self._samples(split.file))

    def _samples(self, file: SourceFile) -> Iterator[Mapping[str, Any]]:
        try:
            returned = self.function(file.value)
            for sample in [returned] if isinstance(returned, Mapping) else returned:
                if not isinstance(sample, Mapping):
                    raise TypeError(
                        "the function of Inputs returns a sample, which is a dict, or several; found one that is a "
                        f"{type(sample).__name__}. Return {{column: value, ...}}"
                    )
                yield sample
        except Exception as error:
            error.add_note(f"While the function of Inputs was called for {file.uri}.")
            raise


def input_items(source: Inputs) -> tuple[SourceFile, ...]:
    """Return the inputs as if they were files of one byte, each with a digest of its whole value."""
    return tuple(
        SourceFile("", f"{k:05}", 1, f"{source.stamp} {value_digest(value)}", value=value)
        for k, value in enumerate(source.inputs)
    )
