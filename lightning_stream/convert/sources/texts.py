"""Text files: each a sample, or each of their lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, Reader, Span
from lightning_stream.convert.sources.lines import DAMAGED, line_blocks, line_spans
from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings import get_encoding


@dataclass(frozen=True)
class TextReader(Reader):
    """Samples of text.

    Attributes:
        lines: Each line that is not blank is a sample, with the column ``text``; else each file is one, with ``text``
            and ``name``.
    """

    kind = "text"
    lines: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a sample is."""
        return {"kind": self.kind, "lines": self.lines}

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:  # noqa: ARG002
        """``text``, and ``name`` of whole files."""
        known = {"text": "str"} if self.lines else {"text": "str", "name": "str"}
        wrong = sorted((asked or {}).keys() - known.keys())
        if wrong:
            raise ValueError(f"text files have the columns {', '.join(known)}; not {', '.join(wrong)}.")
        for encoding in (asked or {}).values():
            get_encoding(encoding)
        return Found(dict(asked or known), {})

    def spans(self, file: SourceFile, partition_bytes: int) -> list[Span]:
        """Between lines, if those are the samples."""
        return line_spans(file, partition_bytes) if self.lines else super().spans(file, partition_bytes)

    def read(self, span: Span, columns: Mapping[str, str]) -> Iterator[Batch]:
        """A few MiB of lines at a time, or the file."""
        for texts, where in self._texts(span):
            values = {"text": texts, "name": [span.file.name] * len(texts)}
            yield Batch({name: values[name] for name in columns}, where)

    def _texts(self, span: Span) -> Iterator[tuple[list[str], str]]:
        where = span.file.place
        try:
            if not self.lines:
                with span.file.unpacked() as file:
                    yield [file.read().decode()], where
                return
            for at, lines in line_blocks(span):
                texts = [line.decode().rstrip("\r") for line in lines if line and not line.isspace()]
                if texts:
                    yield texts, f"{where}, lines from byte {at:,}"
        except (*DAMAGED, UnicodeDecodeError) as error:
            raise FormatError(f"{where} cannot be read as text (UTF-8): {error}.") from error
