"""Datasets for tests that only ask which samples come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_stream import MDSWriter


def write_ids(out: Any, ids: Iterable[int], **options: Any) -> None:
    """Samples that are a number, in a column `id`."""
    with MDSWriter(out=out, columns={"id": "int"}, **options) as writer:
        for number in ids:
            writer.write({"id": number})
