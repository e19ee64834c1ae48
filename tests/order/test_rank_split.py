"""Shares, tails and micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from support.orders import run_over

from lightning_stream.order import BatchPlan, World, num_micro_batches


def plans(num_samples, batch_size, replicas, tail, start=0):
    run = run_over([[num_samples]], batch_size=batch_size)
    worlds = [World(rank, replicas, 1) for rank in range(replicas)]
    return [BatchPlan(run.epoch(0), batch_size=batch_size, world=w, tail=tail, start=start) for w in worlds]


def parts(num_samples, batch_size, replicas, tail, k, start=0):
    shares = [plan.share(k) for plan in plans(num_samples, batch_size, replicas, tail, start)]
    return [share.ids[~share.filler].tolist() for share in shares], [
        share.ids[share.filler].tolist() for share in shares
    ]


def test_pad_splits_the_rest_evenly_and_fills_with_samples_of_the_same_batch():
    own, filler = parts(18, 8, 4, "pad", 2)
    assert own == [[], [16], [], [17]]
    assert filler == [[16], [], [17], []]


def test_drop_leaves_the_rest_out():
    plan = plans(18, 8, 4, "drop")[0]
    assert (plan.num_batches, plan.end) == (2, 16)


def test_exact_gives_a_rest_smaller_than_the_ranks_what_they_lack_from_the_batch_before():
    plan = plans(18, 8, 4, "exact")[0]
    assert [plan.bounds(k) for k in range(plan.num_batches)] == [(0, 8), (8, 14), (14, 18)]
    own, filler = parts(18, 8, 4, "exact", 1)
    assert [len(one) for one in own] == [1, 2, 1, 2]
    assert not any(filler)


def test_exact_keeps_a_rest_that_reaches_every_rank():
    own, filler = parts(21, 8, 4, "exact", 2)
    assert [len(one) for one in own] == [1, 1, 1, 2]
    assert not any(filler)


def test_with_fewer_samples_than_ranks_the_empty_ranks_get_one_flagged_filler():
    own, filler = parts(2, 8, 4, "exact", 0)
    assert own == [[], [0], [], [1]]
    assert [len(one) for one in filler] == [1, 0, 1, 0]


def test_a_rest_left_alone_by_a_resume_is_a_batch_of_its_own():
    own, filler = parts(18, 8, 4, "exact", 0, start=16)
    assert own == [[], [16], [], [17]]
    assert [len(one) for one in filler] == [1, 0, 1, 0]


def test_exact_takes_the_same_number_of_steps_on_any_number_of_ranks():
    for num_samples in range(1, 40):
        assert len({plans(num_samples, 12, replicas, "exact")[0].num_batches for replicas in (1, 2, 3, 4, 6, 12)}) == 1


def test_a_share_of_fewer_samples_than_micro_batches_gets_flagged_filler():
    share = plans(9, 12, 4, "exact")[0].share(0)
    assert [(len(one), one.num_samples) for one in share.micro_batches(3)] == [(1, 1), (1, 1), (1, 0)]


@pytest.mark.parametrize(("num_samples", "batch", "replicas", "count"), [(64, 4, 4, 4), (63, 4, 4, 4), (1, 4, 4, 1)])
def test_a_share_is_cut_into_the_same_number_of_micro_batches_on_every_rank(num_samples, batch, replicas, count):
    assert num_micro_batches(num_samples, batch, replicas) == count


def test_a_full_share_is_cut_into_whole_micro_batches():
    share = plans(48, 48, 2, "pad")[1].share(0)
    assert [len(piece) for piece in share.micro_batches(3)] == [8, 8, 8]


def test_a_plan_may_start_anywhere():
    plan = plans(50, 8, 2, "pad", start=13)[0]
    assert [plan.bounds(k) for k in range(plan.num_batches)] == [(13, 21), (21, 29), (29, 37), (37, 45), (45, 50)]
    assert plan.num_whole_batches == 4


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused_with_what_would_fit():
    with pytest.raises(ValueError, match=r"10 samples over 4 replicas leave 2: use 8 or 12 samples"):
        plans(50, 10, 4, "pad")


def test_everything_wrong_with_a_plan_is_named_at_once():
    with pytest.raises(ValueError, match=r"tail must be one of pad, drop, exact, not 'keep'.*start.*10 samples over 4"):
        plans(50, 10, 4, "keep", start=51)


def test_batches_beyond_the_plan_are_refused():
    with pytest.raises(ValueError, match="0 to 6 here; found 7"):
        plans(50, 8, 2, "pad")[0].bounds(7)


def test_shares_of_an_even_epoch_have_no_filler():
    for plan in plans(48, 8, 4, "pad"):
        assert not np.concatenate([plan.share(k).filler for k in range(plan.num_batches)]).any()
