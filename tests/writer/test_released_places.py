"""What is left at a place by each writer and each way to write is as commit 9621097 left it: names and bytes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.released_places import PLACES, digest_at

_KINDS = ("mds", "json", "csv", "tsv", "xsv")
_BY_GZIP = {f"{kind} {number}" for kind in _KINDS for number in range(12, 18)}
_GZIP_SYSTEM = 3  # the byte of a header that Python 3.11 writes for the operating system; others write another one
_DIGESTS = json.loads(Path(__file__).with_name("golden_places.json").read_text())


def test_all_places_are_frozen() -> None:
    assert _DIGESTS.keys() == PLACES.keys()


@pytest.mark.filterwarnings("ignore")  # of lengths that a merge drops
@pytest.mark.parametrize("name", PLACES)
def test_the_files_at_a_place_are_those_of_the_release(tmp_path: Path, name: str) -> None:
    if name in _BY_GZIP and gzip.compress(b"", mtime=0)[9] != _GZIP_SYSTEM:
        pytest.skip("gzip of this Python writes another header; run it on Python 3.11")
    assert digest_at(name, tmp_path / "out") == _DIGESTS[name]
