"""The laws of composed runs: every stage is exact when a run stops anywhere and resumes in another world."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from support.compositions import BATCH, COMPOSITIONS, Composition, Data, balance_of, run_of

from lightning_stream.order import BatchPlan, Position, RunOrder, World, choose_per_stream, ledger
from lightning_stream.order.batches import EpochOrder
from lightning_stream.order.micro_batches import MicroBatch, MicroBatches

Row = Any  # a sample id, or the (sample, first token, tokens) of the spans of a packed row
SEARCHED = 97  # every so many samples are searched for


@cache
def data_of(name: str) -> Data:
    return Data.of(COMPOSITIONS[name], seed=7)


def rows_of(ids: Any, spans: Any) -> list[Row]:
    if spans is None:
        return list(ids.tolist())
    flat = list(zip(spans.ids.tolist(), spans.first.tolist(), spans.num_tokens.tolist(), strict=True))
    return [tuple(flat[a:b]) for a, b in pairwise(spans.edges.tolist())]


def epoch_rows(order: EpochOrder) -> list[Row]:
    size = order.num_samples
    return rows_of(order.ids(0, size), order.rows(0, size))


def counted(batch: MicroBatch) -> dict[int, Row]:
    rows = zip(batch.positions.tolist(), rows_of(batch.ids, batch.rows), batch.filler.tolist(), strict=True)
    return {position: row for position, row, filler in rows if not filler}


@dataclass
class Link:
    """A run from one stop to the next one: in its own world, with its own batches."""

    num_ranks: int
    workers: int
    accumulate: int
    size: int
    steps: int
    padding: bool
    is_one_machine: bool

    @classmethod
    def draw(cls, rng: random.Random, one: Composition, size: int) -> Link:
        block = 3 if one.settings.get("batching_method") == "device_per_stream" else 1
        size = rng.choice(one.batch_sizes) if rng.random() < 0.1 else size
        ranks = rng.choice([ranks for ranks in (1, 2, 3, 4, 6, 8) if size // ranks % block == 0])
        share = size // ranks
        accumulate = rng.choice([a for a in (1, 2, 3, 4) if share % a == 0 and share // a % block == 0])
        workers, steps = rng.choice((0, 1, 2, 4)), rng.randint(1, 3)
        return cls(ranks, workers, accumulate, size, steps, rng.random() < 0.5, rng.random() < 0.5)

    def micro_batches(self, plan: BatchPlan, workers: bool) -> list[list[MicroBatch]]:
        """This rank's micro-batches of each step: planned one by one, or by workers as torch asks them."""
        device = self.size // self.accumulate // plan.world.num_replicas
        batches, many = MicroBatches(plan, device, self.padding), max(1, self.workers)
        walks = [batches.walk(worker, many) for worker in range(many)]
        found: list[list[MicroBatch]] = [[]]
        for number in count():
            try:
                batch = next(walks[number % many]) if workers else batches[number]
            except (StopIteration, IndexError):
                return found[:-1]
            found[-1].append(batch)
            if batch.completes_step:
                if len(found) == self.steps:
                    return found
                found.append([])
        raise AssertionError


@dataclass
class Chain:
    """A training run that is stopped and resumed; ``seen`` has the rows that it was trained on."""

    one: Composition
    data: Data
    tail: Any
    rng: random.Random
    position: Position
    seen: dict[tuple[int, int], Row] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)  # of each epoch that is over, the position that it ended at

    @classmethod
    def start(cls, name: str, seed: int) -> Chain:
        one, data, rng = COMPOSITIONS[name], data_of(name), random.Random(f"{name} {seed}")
        run, tail = run_of(one, data), rng.choice(("pad", "drop", "exact"))
        is_endless = run.config.schedule is None or not any(run.config.schedule.stops)
        epoch = rng.choice((0, 0, 1, 5)) if is_endless else 0
        position = Position.start(run, batch_size=BATCH, tail=tail, epoch=epoch)
        return cls(one, data, tail, rng, position)

    def link(self) -> bool:
        """Resume from the state, train for some steps, and stop; whether there were any."""
        link = Link.draw(self.rng, self.one, self.position.batch_size)
        position = Position.from_state(json.loads(json.dumps(self.position.to_state())))
        run = run_of(self.one, self.data, resumed=position.order)
        assert position.check(run, tail=self.tail) == []
        each, ranks = self.one.replication, link.num_ranks * self.one.replication
        per_node = ranks if link.is_one_machine else 1
        worlds = [World(rank, ranks, per_node, each) for rank in range(0, ranks, each)]
        here = position.rebased_on(run, batch_size=link.size, tail=self.tail, world=worlds[-1])
        order = here.order_in(run)
        balance = balance_of(self.one, self.data, link.size // link.num_ranks // link.accumulate)
        plans = [
            BatchPlan(order, batch_size=link.size, tail=self.tail, start=here.position, world=world, balance=balance)
            for world in worlds
        ]
        workers = self.rng.random() < 0.1
        ranks = [link.micro_batches(plan, workers) for plan in plans]
        assert len({len(steps) for steps in ranks}) == 1
        ended, total = here.position, 0
        for step in zip(*ranks, strict=True):
            ended, total = self.note_step(here.epoch, ended, step, total)
        if ended == here.position:
            assert not plans[0].num_batches
            return False
        after = here.advanced(run, ended)
        assert (after.ledger - here.ledger) % ledger.MODULUS == total % ledger.MODULUS
        self.position = self.stopped(run, after)
        if not plans[0].has(len(ranks[0])):
            self.ends[here.epoch] = ended
        return True

    def note_step(self, epoch: int, begin: int, step: tuple[list[MicroBatch], ...], total: int) -> tuple[int, int]:
        """Check that the ranks have, together, exactly the rows of a global batch."""
        assert len({len(batches) for batches in step}) == 1, "the ranks make other numbers of micro-batches"
        places = {(batch.begin, batch.end) for batches in step for batch in batches}
        assert len(places) == 1
        found: list[tuple[int, Row]] = []
        for batch in (batch for batches in step for batch in batches):
            found += counted(batch).items()
            total += ledger.total(epoch, batch.positions[~batch.filler], batch.ids[~batch.filler])
        end = places.pop()[1]
        assert sorted(position for position, _ in found) == list(range(begin, end)), "lost or repeated"
        self.seen.update({(epoch, position): row for position, row in found})
        return end, total

    def stopped(self, run: RunOrder, after: Position) -> Position:
        """The state of every rank, whatever that has read before."""
        fresh = run_of(self.one, self.data, resumed=after.order)
        states = [
            replace(after, landmark=after.order_in(one).counted_windows(after.position)).to_state()
            for one in (run, fresh)
        ]
        assert states[0] == states[1]
        assert len(json.dumps(states[0])) <= 1024
        return Position.from_state(states[0])

    def change(self, weights: Any) -> None:
        """Change the weights, as `StreamingDataLoader.change_mixture` does."""
        order = self.position.order
        run = run_of(self.one, self.data, resumed=order)
        at = run.settled(self.position.epoch, self.position.position)
        assert order.schedule is not None
        schedule = order.schedule.changed(at, weights)
        self.position = replace(self.position, order=structs.replace(order, schedule=schedule))

    def check(self) -> None:
        """Compare with the run that never stopped, which takes its changes from the last state."""
        run = run_of(self.one, self.data, resumed=self.position.order)
        for epoch in sorted({epoch for epoch, _ in self.seen}):
            rows = epoch_rows(run.epoch(epoch))
            mine = {position: row for (number, position), row in self.seen.items() if number == epoch}
            assert all(rows[position] == row for position, row in mine.items())
            assert sorted(mine) == list(range(len(mine)))
            if epoch in self.ends:
                assert len(mine) == self.ends[epoch]
                left = len(rows) - len(mine)
                assert 0 <= left < max(self.one.batch_sizes) if self.tail == "drop" else left == 0
            expect_epoch(self.one, self.data, run, epoch, rows)
        last = self.position
        assert last.ledger == ledger.expected(run.epoch(last.epoch), 0, last.position)


def expect_epoch(one: Composition, data: Data, run: RunOrder, epoch: int, rows: list[Row]) -> None:
    """What must hold for an epoch, from the definitions alone."""
    documents = run.epoch(epoch).documents
    ids = documents.ids(0, documents.num_samples)
    if one.packed is not None:
        expect_packed(one.packed, data, ids, rows)
    else:
        assert rows == ids.tolist()
    if run.forgotten is not None:
        assert not np.isin(ids, run.forgotten.ids).any()
        return
    times = np.bincount(ids, minlength=data.snapshot.num_samples)
    if run.config.schedule is None:
        chosen = choose_per_stream(data.snapshot, one.weights, run.config.epoch_size, run.config.seed)
        for mine, wanted in zip(np.split(times, np.cumsum(data.snapshot.stream_samples)[:-1]), chosen, strict=True):
            assert mine.sum() == wanted
            assert mine.max() - mine.min() <= 1
    for sample_id in range(epoch, len(times), SEARCHED):
        wanted = [at for at, row in enumerate(rows) for each in ([row] if one.packed is None else row)
                  if sample_id == (each if one.packed is None else each[0])]  # fmt: skip
        if one.packed is not None:
            wanted = sorted(set(wanted))  # a row is listed once, however many copies of the sample it has
        assert run.where(sample_id, epoch).tolist() == wanted


def expect_packed(packed: Any, data: Data, ids: Any, rows: list[Row]) -> None:
    """Each document's tokens once for each time that it is drawn; and rows that are full."""
    row_length, policy = packed["row_length"], packed.get("long_documents", "split")
    wanted: Counter[tuple[int, int, int]] = Counter()
    for number, length in zip(ids.tolist(), data.lengths[ids].tolist(), strict=True):
        if length > row_length and policy != "split":
            length = row_length if policy == "truncate" else 0
        wanted.update((number, at, min(row_length, length - at)) for at in range(0, length, row_length))
    assert Counter(span for row in rows for span in row) == wanted
    tokens = [sum(each[2] for each in row) for row in rows]
    assert max(tokens, default=0) <= row_length
    windows = -(-len(ids) // packed["window"]) + 16  # each of up to 16 sequences has a last one of its own
    assert sum(2 * each <= row_length for each in tokens) <= windows, "of a window, one row at most is half empty"


def expect_chain(name: str, seed: int, stops: int) -> None:
    chain = Chain.start(name, seed)
    at = chain.rng.sample(range(1, stops), len(chain.one.changes))
    changes = dict(zip(sorted(at), chain.one.changes, strict=True))
    for number in range(stops):
        if not chain.link():
            break
        if number in changes:
            chain.change(changes[number])
    assert len(chain.seen) > BATCH * stops / 2 or chain.ends
    chain.check()


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composed_run_is_exact_after_any_stops_in_any_worlds(name: str) -> None:
    expect_chain(name, seed=0, stops=6)


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composed_run_is_exact_after_1000_stops(name: str) -> None:
    for seed in range(1, 21):
        expect_chain(name, seed, stops=50)
