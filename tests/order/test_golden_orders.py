"""Orders, batches, shares and states are those of commit 9621097, for all that orders are made of.

`corrected.json` has what that commit had wrong, by case: each a path into its promises, and the value that is right.
`find` named a position twice that holds a forgotten sample's substitute and the sample itself; batches of a budget were
accumulated in other micro-batches in other worlds; where ranks do not divide them, `where` gave the answers of a run on
one rank; and a state in an epoch that has no batch stayed there.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.golden_orders import cases, promises

GOLDEN = Path(__file__).parent / "golden"
LINES = [json.loads(line) for line in (GOLDEN / "orders_9621097.jsonl").read_text().splitlines()]


@cache
def corrections() -> dict[str, list[tuple[list[Any], Any]]]:
    return json.loads((GOLDEN / "corrected.json").read_text())


def wanted_of(line: dict[str, Any]) -> dict[str, Any]:
    wanted = json.loads(json.dumps(line["promises"]))
    for (*path, last), value in corrections().get(line["name"], ()):
        place = wanted
        for key in path:
            place = place[key]
        assert place[last] != value, "a correction corrects something"
        place[last] = value
    return wanted


@pytest.mark.parametrize("line", LINES, ids=[line["name"] for line in LINES])
def test_an_order_is_what_it_was(line: dict[str, Any]) -> None:
    found, wanted = json.loads(json.dumps(promises(line["case"]))), wanted_of(line)
    for part, value in wanted.items():
        assert found.get(part) == value, f"{part} of {line['name']}"
    assert found == wanted


def test_the_golden_file_has_every_case_and_few_are_refused() -> None:
    assert {line["name"]: line["case"] for line in LINES} == json.loads(json.dumps(dict(cases())))
    assert corrections().keys() <= {line["name"] for line in LINES}
    assert sum("refused" in line["promises"] for line in LINES) < len(LINES) // 10
