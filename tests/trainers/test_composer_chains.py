"""Chains of stops under Composer drawn from a seed, with what ordinary users do beside training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from support.composer_chains import draw_chain, made, run_drawn_chain
from support.composer_runs import Run
from support.looks import KINDS, SECOND_LOADERS

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning:composer"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*save_interval.*"),
]


def expect_chain_exact(shards: Path, tmp_path: Path, seed: int, kinds: Sequence[str] = KINDS) -> None:
    links, shared = draw_chain(seed, kinds=kinds)
    data = made(shards, "spec", 0, shared)
    whole = Run(shards, tmp_path / "whole", spec=data, train_subset_num_batches=shared["limit"])
    steps, losses = run_drawn_chain(shards, tmp_path, links, shared, random.Random(seed))
    wrong = [step for step in sorted({*whole.steps, *steps}) if whole.steps.get(step) != steps.get(step)]
    assert not wrong, f"steps {wrong} differ; seed {seed}: " + "; ".join(map(str, links)) + f"; {shared}"
    assert losses == pytest.approx(whole.losses, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_chain_of_ordinary_users_is_exact(shards: Path, tmp_path: Path, seed: int) -> None:
    expect_chain_exact(shards, tmp_path, seed)


@pytest.mark.parametrize("seed", range(70_100, 70_103))
def test_a_random_chain_with_second_loaders_over_the_training_dataset_is_exact(
    shards: Path, tmp_path: Path, seed: int
) -> None:
    expect_chain_exact(shards, tmp_path, seed, (*KINDS, *SECOND_LOADERS, *SECOND_LOADERS))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 160))
def test_more_random_chains_of_ordinary_users_are_exact(shards: Path, tmp_path: Path, seed: int) -> None:
    expect_chain_exact(shards, tmp_path, seed)
