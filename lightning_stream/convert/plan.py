"""How a source falls into parts: by its files and the settings alone, never by who will write them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_stream.convert.sources.base import Span
from lightning_stream.convert.sources.choose import Source
from lightning_stream.convert.sources.function import FunctionReader

_SMALLEST, _LARGEST, _PARTS = 32 << 20, 512 << 20, 32


@dataclass(frozen=True)
class Part:
    """What one process writes at a time.

    Attributes:
        number: Its place in the dataset.
        spans: What it is made from.
    """

    number: int
    spans: tuple[Span, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its spans."""
        return sum(span.num_bytes for span in self.spans)

    def __str__(self) -> str:
        return f"part {self.number} ({self.spans[0].file.place}{' and others' if len(self.spans) > 1 else ''})"


def part_size(source: Source) -> int:
    """Bytes of a part, where the user does not say: a 32nd of the source, but 32 to 512 MiB; an input by itself."""
    if isinstance(source.reader, FunctionReader):
        return 1
    total = sum(file.num_bytes for file in source.files)
    return max(_SMALLEST, min(_LARGEST, total // _PARTS))


def parts_of(source: Source, partition_bytes: int) -> list[Part]:
    """The parts, in the order of the files."""
    parts: list[Part] = []
    gathered: list[Span] = []
    num_bytes = 0
    for file in source.files:
        for span in source.reader.spans(file, partition_bytes):
            gathered.append(span)
            num_bytes += span.num_bytes
            if num_bytes >= partition_bytes:
                parts.append(Part(len(parts), tuple(gathered)))
                gathered, num_bytes = [], 0
    if gathered:
        parts.append(Part(len(parts), tuple(gathered)))
    return parts
