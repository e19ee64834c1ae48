"""Chains of stops and worlds drawn from a seed: no sample lost, none repeated, at any of them."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from support.lightning_chains import draw_chain, run_chain
from support.lightning_runs import Run, Steps

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}.*")
    for text in (
        "callbacks used to create the checkpoint",
        "The dirpath has changed",
        "extra step",
        "num_workers",
        "called without a model",
        "no last checkpoint available",
    )
]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@cache
def uninterrupted(shards: Path, folder: Path, shared: str) -> Steps:
    options: dict[str, Any] = eval(shared)  # noqa: S307 - our own repr: a key that a dict is not
    return Run(shards, folder, limit_val_batches=0, **options).steps


def expect_chain_exact(shards: Path, tmp_path: Path, seed: int, **drawing: Any) -> None:
    links, shared = draw_chain(seed, **drawing)
    told = f"seed {seed}: " + "; ".join(map(str, links)) + f"; {shared}"
    whole = uninterrupted(shards, tmp_path / "whole", repr(shared))
    steps = run_chain(shards, tmp_path, links, shared, random.Random(seed))
    wrong = [step for step in sorted({*whole, *steps}) if whole.get(step) != steps.get(step)]
    assert not wrong, f"steps {wrong} differ; {told}"


@pytest.mark.parametrize("seed", range(6))
def test_a_random_chain_is_exact(shards: Path, tmp_path: Path, seed: int) -> None:
    expect_chain_exact(shards, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_more_random_chains_are_exact(shards: Path, tmp_path: Path, seed: int) -> None:
    expect_chain_exact(shards, tmp_path, seed, num_links=6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 220))
def test_random_chains_with_workers_are_exact(shards: Path, tmp_path: Path, seed: int) -> None:
    expect_chain_exact(shards, tmp_path, seed, workers=(0, 1, 2))
