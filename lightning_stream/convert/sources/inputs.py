"""A source of the user's own: a function that returns the samples of each of some inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.fingerprint import function_text, value_digest
from lightning_stream.convert.sources.base import Batch, Found, InputSplit, Reader
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.writer.infer import infer_columns

_BATCH_SAMPLES = 256


@dataclass(frozen=True)
class Inputs:
    """A source of your own, for `convert`: ``function(each)`` returns the samples (dicts) of each input, in order.

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
    function: Callable[[Any], Iterable[Mapping[str, Any]]]
    stamp: str = ""


@dataclass(frozen=True)
class FunctionReader(Reader):
    """Reads `Inputs`."""

    kind = "inputs"
    min_bytes = 1
    function: Callable[[Any], Iterable[Mapping[str, Any]]]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The function, and all that it uses."""
        return {"kind": self.kind, "function": function_text(self.function)}

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """Look at the first sample."""
        for encoding in (asked or {}).values():
            get_encoding(encoding)
        if asked is not None:
            return Found(dict(asked))
        for file in files:
            assert isinstance(file, InputItem)
            for sample in islice(self.function(file.value), 1):
                return Found(infer_columns(sample))
        raise ValueError("the function returned no sample for any input: there is nothing to write.")

    def read(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:  # noqa: ARG002
        """Yield some hundred samples at a time."""
        assert isinstance(split.file, InputItem)
        samples, where = iter(self.function(split.file.value)), split.file.uri
        while rows := list(islice(samples, _BATCH_SAMPLES)):
            yield Batch(rows, where)


@dataclass(frozen=True)
class InputItem(SourceFile):
    """An input as if it were a file of one byte."""

    value: Any = None

    @property
    def path(self) -> None:
        """There is no file."""

    @property
    def uri(self) -> str:
        """Number and value, for messages."""
        return f"input {self.name} ({self.value!r:.80})"


def input_items(given: Inputs) -> tuple[InputItem, ...]:
    """Return the inputs, each with a digest of its whole value."""
    return tuple(
        InputItem("input", f"{k:05}", 1, f"{given.stamp} {value_digest(each)}", value=each)
        for k, each in enumerate(given.inputs)
    )
