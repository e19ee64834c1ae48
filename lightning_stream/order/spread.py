"""How shards are dealt to canonical nodes, and the order in which a node takes them so that all nodes span the data."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .arrays import Ints, ranges, starts_of
from .permutation import RngStream, argsort_random, permutation, random_u64


def deal_shards(seed: int, num_shards: int, canonical_nodes: int) -> Ints:
    """int64[num_shards]: each shard's place in the run-constant order that is cut into canonical nodes.

    Of every C neighbouring shards each node gets one, another one from group to group, at random. So each node spans
    the data evenly, in index order; neighbouring nodes get shards far apart.
    """
    num_groups = -(-num_shards // canonical_nodes)
    group, inside = np.divmod(np.arange(num_shards), canonical_nodes)
    shifts = (random_u64(RngStream.SHARDS, seed, size=num_groups) % np.uint64(canonical_nodes)).astype(np.int64)
    node = (_far_apart(canonical_nodes)[inside] + shifts[group]) % canonical_nodes
    absent = np.ones(canonical_nodes, np.int64)  # nodes to which the last, incomplete group gives nothing
    absent[node[canonical_nodes * (num_groups - 1) :]] = 0
    places: Ints = node * num_groups + group - starts_of(absent)[node]
    return places


def _far_apart(count: int) -> Ints:
    """A permutation of ``range(count)`` whose neighbouring values lie at indices far apart (van der Corput's order)."""
    bits = max(1, (count - 1).bit_length())
    return np.argsort([int(f"{value:0{bits}b}"[::-1], 2) for value in range(count)])


def spread_parts(
    key: tuple[int, int, int, int], group: Ints, num_groups: int, canonical_nodes: int, window: int
) -> Ints:
    """int64[K]: a node's parts in the order of this epoch: at random, but all nodes' windows together span the data.

    The groups are cut into strata, at most C * w. In each round a node takes up to w parts, one of each of w strata;
    the seed assigns them, other ones to each node. From round to round a node moves to its neighbour's strata;
    after C sweeps over all rounds it has taken every part once. So the C * w active parts come from different strata
    (as long as the nodes' parts are of similar size).

    ``key`` is (seed, epoch, stream, node); ``group`` is int64[K], the group of neighbouring shards of each part (see
    :func:`deal_shards`), one of ``num_groups``; C and w are ``canonical_nodes`` and ``window``.
    """
    seed, epoch, stream, node = key
    num_strata = min(canonical_nodes * window, max(num_groups, 1))
    stratum = group * num_strata // max(num_groups, 1)
    column, row = np.divmod(_stratum_ranks(seed, epoch, stream, num_strata)[stratum], canonical_nodes)
    rounds = _ranks_within(key, stratum)
    num_rounds = int(rounds.max(initial=0)) + 1
    sweep = (row - node - rounds) % canonical_nodes
    return np.argsort((sweep * num_rounds + rounds) * window + column)  # all differ: any sort gives the same


@lru_cache(maxsize=8)
def _stratum_ranks(seed: int, epoch: int, stream: int, num_strata: int) -> Ints:
    """The random order of an epoch's strata, the same for all its nodes."""
    return permutation(RngStream.STRATA, seed, epoch, stream, size=num_strata)


def _ranks_within(key: tuple[int, int, int, int], stratum: Ints) -> Ints:
    """A random rank of each part among those of its stratum."""
    small = stratum.astype(
        np.min_scalar_type(int(stratum.max(initial=0)))
    )  # which is sorted by its digits: 3 times as fast
    order = np.argsort(small, kind="stable")
    order = order[argsort_random(random_u64(RngStream.PARTS, *key, size=len(stratum)) >> np.uint64(1))]
    order = order[np.argsort(small[order], kind="stable")]
    sizes = np.bincount(stratum)
    ranks = np.empty_like(stratum)
    ranks[order] = ranges(np.zeros_like(sizes), sizes)
    return ranks
