"""Two writers at one place at once: one wins, the other gets an error, and the dataset is whole."""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from servers.s3 import bucket_at, options_of
from support import races


@pytest.fixture
def bucket(moto_endpoint: str) -> tuple[str, dict[str, Any]]:
    bucket_at(moto_endpoint, "races")
    return "s3://races", options_of(moto_endpoint)


@pytest.mark.parametrize("same", [False, True], ids=["own values", "same values"])
@pytest.mark.parametrize("kind", races.KINDS)
def test_of_two_writers_that_have_both_begun_one_wins_in_a_folder(tmp_path: Path, kind: str, same: bool) -> None:
    for number in range(3):
        races.race(kind, str(tmp_path / str(number)), None, same=same)


@pytest.mark.parametrize("kind", races.KINDS)
def test_of_two_writers_that_have_both_begun_one_wins_on_s3(bucket: Any, kind: str) -> None:
    races.race(kind, f"{bucket[0]}/{kind.replace(' ', '-')}", bucket[1])


def _run(kind: str, number: int, place: tuple[str, Any], meet: Any, answers: Any, count: int) -> None:
    draw = random.Random(number)
    for k in range(count):
        together = k % 2 == 0
        meet.wait(60)
        if not together:
            time.sleep(draw.uniform(0, 0.03))
        how, url = races.KINDS[kind][number], f"{place[0]}/{k}"
        result = races.write(url, place[1], races.values_of(number, k % 3 == 0), how, meet.wait if together else int)
        answers.put((k, number, result))


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["folder", "s3"])
@pytest.mark.parametrize("kind", races.KINDS)
def test_100_races_of_two_processes_damage_nothing(bucket: Any, tmp_path: Path, kind: str, where: str) -> None:
    place = (str(tmp_path), None) if where == "folder" else (f"{bucket[0]}/many-{kind.replace(' ', '-')}", bucket[1])
    count, context = 100, multiprocessing.get_context("spawn")
    bases = [races.prepare(kind, f"{place[0]}/{k}", place[1]) for k in range(count)]
    meet, answers = context.Barrier(2), context.Queue()
    writers = [context.Process(target=_run, args=(kind, k, place, meet, answers, count)) for k in range(2)]
    for writer in writers:
        writer.start()
    results: dict[int, dict[int, str]] = {}
    for _ in range(2 * count):
        k, number, result = answers.get(timeout=120)
        results.setdefault(k, {})[number] = result
    for writer in writers:
        writer.join()
    seen: Counter[str] = Counter()
    for k, both in results.items():
        races.judge(
            kind, f"{place[0]}/{k}", place[1], bases[k], [both[0], both[1]], same=k % 3 == 0, together=k % 2 == 0
        )
        seen[" / ".join(sorted(one.split(":")[0] for one in both.values()))] += 1
    sys.stderr.write(f"\n{kind}, {where}: {dict(seen)}\n")
