"""What is left at a place by each writer and each way to write is as commit 9621097 left it: names and bytes."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from support.released_places import PLACES, digest_at

_KINDS = ("mds", "json", "csv", "tsv", "xsv")
_COMPRESSED_BY_CRAMJAM = {f"{kind} {number}" for kind in _KINDS for number in range(12, 18)}
_DIGESTS = json.loads(Path(__file__).with_name("golden_places.json").read_text())


def test_all_places_are_frozen() -> None:
    assert _DIGESTS.keys() == PLACES.keys()


@pytest.mark.filterwarnings("ignore")  # of lengths that a merge drops
@pytest.mark.parametrize("name", PLACES)
def test_the_files_at_a_place_are_those_of_the_release(tmp_path: Path, name: str) -> None:
    if name in _COMPRESSED_BY_CRAMJAM and version("cramjam") != "2.14.0":
        pytest.skip("another release of cramjam compresses to other bytes: pip install cramjam==2.14.0")
    assert digest_at(name, tmp_path / "out") == _DIGESTS[name]
