"""Chains of stops and worlds drawn from a seed: no sample lost, none repeated, at any of them."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from support.lightning_chains import draw_chain, draw_data_chain, draw_ordinary_chain, run_chain
from support.lightning_data import write_streams
from support.lightning_runs import Run

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}.*")
    for text in (
        "callbacks used to create the checkpoint",
        "The dirpath has changed",
        "extra step",
        "num_workers",
        "called without a model",
        "no last checkpoint available",
        "yielded None",
    )
]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def expect_chain_exact(shards: Path, tmp_path: Path, seed: int, draw: Any = draw_chain, **drawing: Any) -> None:
    links, shared = draw(seed, **drawing)
    about = f"seed {seed}: " + "; ".join(map(str, links)) + f"; {shared}"
    options = dict(shared)
    if "limit_train_batches" in options:  # it is counted in optimizer steps
        options["limit_train_batches"] *= options.get("accumulate_grad_batches", 1)
    whole = Run(shards, tmp_path / "whole", limit_val_batches=0, **options).steps
    steps = run_chain(shards, tmp_path, links, shared, random.Random(seed))
    wrong = [step for step in sorted({*whole, *steps}) if whole.get(step) != steps.get(step)]
    assert not wrong, f"steps {wrong} differ; {about}"


@pytest.mark.parametrize("seed", range(6))
def test_a_random_chain_is_exact(shards: Path, tmp_path: Path, seed: int) -> None:
    expect_chain_exact(shards, tmp_path, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 200))
def test_more_random_chains_are_exact(shards: Path, tmp_path: Path, seed: int) -> None:
    expect_chain_exact(shards, tmp_path, seed, num_links=6)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200, 220))
def test_random_chains_with_workers_are_exact(shards: Path, tmp_path: Path, seed: int) -> None:
    expect_chain_exact(shards, tmp_path, seed, workers=(0, 1, 2))


@pytest.mark.parametrize("seed", range(6))
def test_a_random_chain_of_ordinary_users_is_exact(shards: Path, tmp_path: Path, seed: int) -> None:
    expect_chain_exact(shards, tmp_path, seed, draw_ordinary_chain)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(300, 400))
def test_more_random_chains_of_ordinary_users_are_exact(shards: Path, tmp_path: Path, seed: int) -> None:
    expect_chain_exact(shards, tmp_path, seed, draw_ordinary_chain, workers=(0, 0, 0, 1, 2))


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_streams(tmp_path_factory.mktemp("streams"))


@pytest.mark.parametrize("seed", [400, 402, 403, 70035])  # in the last, a loader whose mixture has ended serves again
def test_a_random_chain_over_budgets_rows_and_mixtures_that_end_is_exact(
    streams: Path, tmp_path: Path, seed: int
) -> None:
    expect_chain_exact(streams / "a", tmp_path, seed, draw_data_chain, folder=streams)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(410, 510))
def test_more_random_chains_over_budgets_rows_and_mixtures_that_end_are_exact(
    streams: Path, tmp_path: Path, seed: int
) -> None:
    expect_chain_exact(streams / "a", tmp_path, seed, draw_data_chain, folder=streams)
