"""Scheduled mixtures: within a sample of the integral, the same from any position, each sample once per own epoch."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stream.errors import SettingsMismatch, StateError
from lightning_stream.order import (
    BatchPlan,
    OrderConfig,
    Position,
    RunOrder,
    Schedule,
    Snapshot,
    StreamWeights,
    World,
    ledger,
)
from lightning_stream.order import mixture as mixtures
from lightning_stream.order import run as runs
from lightning_stream.order.buckets import LengthBuckets
from lightning_stream.order.mixture import Mixture, Shares, Tree, leaves, plan_tree

NAMES = "abcdefghij"
MANY = 10**9


def integral(schedule: Schedule, stream: int, at: int) -> Fraction:
    """The samples that a stream should have given, of an endless mixture in samples: the trapezoids' exact area."""
    starts = [start for start, _ in schedule.points]
    shares = [schedule.shares(weights)[stream] for _, weights in schedule.points]
    area = Fraction(0)
    for (start, end), (here, then) in zip(pairwise(starts), pairwise(shares), strict=True):
        then = then if schedule.interpolation == "linear" else here
        inside = max(0, min(at, end) - start)
        area += here * inside + (then - here) * Fraction(inside**2, 2 * (end - start))
    return area + shares[-1] * max(0, at - starts[-1])


def deviation(tree: Tree, shares: Shares) -> Fraction:
    """The most that a stream can differ from constant shares of the mixture, in samples."""

    def worst(node: Tree, above: Fraction) -> Fraction:
        if not isinstance(node, tuple):
            return (1 + shares[node] * above) / 2
        own = sum((shares[i] for i in leaves(node)), Fraction(0))
        above += 1 / own if own and node is not tree else 0
        return max(worst(child, above) for child in node)

    return worst(tree, Fraction(0))


@st.composite
def schedules(draw: st.DrawFn, most_streams: int = 4) -> Schedule:
    names = NAMES[: draw(st.integers(2, most_streams))]
    starts = sorted({0, *draw(st.lists(st.integers(1, 5000), max_size=3))})
    weight = st.one_of(st.sampled_from([0, 1e-3, 0.3, 1, 2.5]), st.floats(0, 1, width=16))
    weights = st.lists(weight, min_size=len(names), max_size=len(names)).filter(any)
    points = [(start, dict(zip(names, draw(weights), strict=True))) for start in starts]
    return Schedule(points, interpolation=draw(st.sampled_from(["step", "linear"])), streams=names)


def run_of(schedule: Schedule, sizes: tuple[int, ...] = (60, 40, 20), **settings_: object) -> RunOrder:
    given = {"batch_size": 24, "device_batch_size": 4, "shuffle": True, "epoch_size": 240, **settings_}
    config = OrderConfig.resolve(schedule=schedule, **given)  # type: ignore[arg-type]
    snapshot = Snapshot.of([[size // 2, size - size // 2] for size in sizes])
    return RunOrder(snapshot, [StreamWeights()] * len(sizes), config)


THREE = Schedule([(0, {"a": 0.5, "b": 0.3, "c": 0.2}), (300, {"a": 0.2, "b": 0.2, "c": 0.6})], interpolation="linear")


def test_a_schedule_takes_points_and_weights_in_any_form_and_keeps_its_own_copy() -> None:
    weights = {"b": np.float64(0.3), "a": 1}
    plain = Schedule([(0, {"b": 0.3, "a": 1}), (20, {"a": 1})])
    made = Schedule(((at, given.items()) for at, given in [(0.0, weights), (np.int64(20), {"a": 1})]))
    assert (made, made.streams) == (plain, ("b", "a"))
    assert made.to_state() == plain.to_state()
    weights["a"] = 7
    assert made == plain


@settings(max_examples=20)
@given(schedules(), st.integers(1, 700))
def test_a_stream_is_within_a_sample_of_the_integral_at_every_batch(schedule: Schedule, batch_size: int) -> None:
    at = np.unique(np.append(np.arange(0, 6000, batch_size), np.arange(300)))
    counts = Mixture(schedule, [MANY] * len(schedule.streams)).counts(at)
    assert (counts.sum(axis=1) == at).all()
    assert (np.diff(counts, axis=0) >= 0).all()
    for stream in range(len(schedule.streams)):
        pairs = zip(at.tolist(), counts[:, stream].tolist(), strict=True)
        off = [abs(integral(schedule, stream, k) - number) for k, number in pairs]
        assert max(off) <= 1 + Fraction(1, 16)  # the anchors round by 1/1024, and a linear part is a polyline


@settings(max_examples=30)
@given(schedules(most_streams=10))
def test_constant_weights_keep_to_the_bound_of_the_tree(schedule: Schedule) -> None:
    constant = Schedule(schedule.points[:1], streams=schedule.streams)
    shares = constant.shares(constant.points[0][1])
    tree = plan_tree((shares,))
    at = np.arange(20_000)
    counts = Mixture(constant, [MANY] * len(shares)).counts(at)
    off = np.abs(counts - at[:, None] * np.array(shares, dtype=float)).max()
    assert off <= float(deviation(tree, shares)) + 0.01
    assert len(shares) > 4 or deviation(tree, shares) <= 1
    assert deviation(tree, shares) < 1.25


def test_nearly_all_mixtures_of_many_streams_stay_within_a_sample() -> None:
    draw, bounds = np.random.default_rng(17), []
    for _ in range(40):
        weights = [Fraction(int(one * 10**6) + 1) for one in draw.dirichlet(np.ones(draw.integers(5, 9)))]
        shares = tuple(one / sum(weights) for one in weights)
        bounds.append(deviation(plan_tree((shares,)), shares))
    assert sum(one <= 1 for one in bounds) >= 36
    assert max(bounds) < 1.1


@settings(max_examples=20)
@given(schedules(), st.data())
def test_any_position_is_read_as_in_sequence(schedule: Schedule, data: st.DataObject) -> None:
    sizes = [MANY] * len(schedule.streams)
    stream, number = Mixture(schedule, sizes).read(0, 6000)
    begin = data.draw(st.integers(0, 5999))
    end = data.draw(st.integers(begin, 6000))
    found = Mixture(schedule, sizes).read(begin, end)
    assert (found[0] == stream[begin:end]).all()
    assert (found[1] == number[begin:end]).all()
    for one in range(len(sizes)):
        assert (number[stream == one] == np.arange((stream == one).sum())).all()


def test_what_was_read_before_changes_nothing_near_the_end_of_the_anchors() -> None:
    draw = np.random.default_rng(17)
    for _ in range(300):
        weights = dict(zip(NAMES, (10.0 ** draw.uniform(-6, 0, 5)).tolist(), strict=False))
        near, far = (Mixture(Schedule([(0, weights)]), [MANY] * 5) for _ in range(2))
        near.counts(np.array([0]))
        far.counts(np.array([2**24]))
        at = np.arange(2**21 - 40, 2**21 - 1)
        assert (near.counts(at) == far.counts(at)).all(), weights


def test_the_order_of_a_mixture_never_changes() -> None:
    first = Mixture(Schedule([(0, {"a": 0.7, "b": 0.3})]), [MANY] * 2).read(0, 10)[0]
    assert first.tolist() == [0, 1, 0, 0, 1, 0, 0, 0, 1, 0]
    stream, number = Mixture(THREE, [MANY] * 3).read(10**6, 10**6 + 12)
    assert stream.tolist() == [2, 0, 2, 1, 2, 2, 0, 2, 1, 2, 2, 0]
    assert number[:4].tolist() == [599940, 200045, 599941, 200015]


@pytest.mark.parametrize("interpolation", ["step", "linear"])
def test_a_thousand_million_samples_are_counted_in_64_mb(interpolation: str) -> None:
    points = [
        (0, {"a": 4, "b": 3, "c": 2, "d": 1}),
        (4e8, {"a": 1, "b": 3, "c": 2, "d": 4}),
        (1e9, dict.fromkeys("abcd", 1)),
    ]
    tracemalloc.start()
    mixture = Mixture(Schedule(points, interpolation=interpolation), [MANY] * 4)  # type: ignore[arg-type]
    for first in range(0, 10**9, 2**26):
        mixture.counts(np.arange(first, min(first + 2**26, 10**9), 1024))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64e6


@pytest.mark.parametrize("weights", [{"s7": 1, "s700": 2}, {f"s{i}": 0.9**i for i in range(150)}])
def test_a_mixture_of_a_thousand_streams_is_planned_and_read_in_little_memory(weights: dict[str, float]) -> None:
    schedule = Schedule([(0, weights)], streams=[f"s{i}" for i in range(1200)])
    mixture = Mixture(schedule, [MANY] * 1200)
    mixture.read(0, 1)
    tracemalloc.start()
    stream, number = mixture.read(0, 8_000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100 * 2**20
    shares = [float(one) for one in schedule.shares(weights)]
    assert np.abs(np.bincount(stream, minlength=1200) - np.multiply(shares, 8_000)).max() < 2
    assert number[stream == 7].tolist() == [*range(int((stream == 7).sum()))]


def test_tokens_count_by_the_mean_length_of_each_stream() -> None:
    lengths = {"a": 1000, "b": 250}
    schedule = Schedule([(0, {"a": 1, "b": 1}), (10**6, {"a": 1})], unit="tokens", mean_lengths=lengths)
    counts = Mixture(schedule, [MANY] * 2).counts(np.array([1250, 2500, 3000]))
    assert counts.tolist() == [[250, 1000], [500, 2000], [1000, 2000]]


def test_steps_count_by_the_batch_size_of_the_start() -> None:
    schedule = Schedule([(0, {"a": 1}), (5, {"a": 1, "b": 1})], unit="steps", streams=("a", "b"))
    assert Mixture(schedule, [MANY] * 2, step_length=24).counts(np.array([120, 168])).tolist() == [[120, 0], [144, 24]]
    config = OrderConfig.resolve(batch_size=24, schedule=schedule)
    again = OrderConfig.resolve(batch_size=48, schedule=schedule, resumed=config)
    assert config.batch_size == again.batch_size == 24
    with pytest.raises(ValueError, match="needs a batch size from the start"):
        OrderConfig.resolve(batch_size=None, schedule=schedule)


def test_a_stream_that_stops_gives_each_sample_once_and_leaves_its_weight_to_the_others() -> None:
    mixture = Mixture(Schedule([(0, {"a": 1, "b": 1, "c": 2})], exhausted={"a": "stop"}), [100, 50, 70])
    at = np.array([396, 400, 403, 406, 700])
    counts = mixture.counts(at)
    assert counts[1].tolist() == [100, 100, 200]
    assert counts[2:].tolist() == [[100, 101, 202], [100, 102, 204], [100, 200, 400]]
    assert mixture.end is None


@pytest.mark.parametrize("interpolation", ["step", "linear"])
def test_a_mixture_ends_when_all_streams_have_stopped(interpolation: str) -> None:
    points = [(0, {"a": 1, "b": 1, "c": 1}), (60, {"a": 1}), (90, {"a": 1, "b": 1, "c": 3})]
    schedule = Schedule(points, exhausted="stop", interpolation=interpolation)  # type: ignore[arg-type]
    run = run_of(schedule, epoch_size=50)
    orders = [run.epoch(epoch) for epoch in range(4)]
    assert [order.num_samples for order in orders] == [50, 50, 20, 0]
    ids = np.concatenate([order.ids(0, order.num_samples) for order in orders[:3]])
    assert sorted(ids.tolist()) == list(range(120))


@pytest.mark.parametrize("method", ["random", "stratified", "per_stream", "device_per_stream"])
def test_each_sample_comes_once_in_each_own_epoch_of_its_stream(method: str) -> None:
    run = run_of(THREE, batching_method=method)
    ids = np.concatenate([run.epoch(epoch).ids(0, 240) for epoch in range(6)])
    streams = run.snapshot.streams_of(ids)
    orders = []
    for stream, size in enumerate(run.snapshot.stream_samples.tolist()):
        own = ids[streams == stream]
        epochs = [own[first : first + size].tolist() for first in range(0, len(own), size)]
        assert all(len(set(one)) == len(one) for one in epochs)
        assert epochs[0] != epochs[1]
        orders.append(len(epochs))
    assert orders[2] > orders[0]  # own epochs are counted separately
    wanted = [float(integral(THREE, stream, 1440)) for stream in range(3)]
    most = {"per_stream": 24, "device_per_stream": 4}.get(method, 1)
    assert np.abs(np.bincount(streams) - wanted).max() <= most


@pytest.mark.parametrize("method", ["per_stream", "device_per_stream"])
def test_batches_and_device_blocks_of_one_stream_follow_the_schedule(method: str) -> None:
    run = run_of(THREE, batching_method=method)
    length = 24 if method == "per_stream" else 4
    stretches = run.snapshot.streams_of(run.epoch(1).ids(0, 240)).reshape(-1, length)
    assert (stretches == stretches[:, :1]).all()
    with pytest.raises(ValueError, match=f"epoch_size must be a multiple of that, not {length + 1}"):
        run_of(THREE, batching_method=method, epoch_size=length + 1)
    with pytest.raises(ValueError, match="exhausted='stop' would end a stream within"):
        run_of(Schedule(THREE.points, exhausted="stop"), batching_method=method)


@pytest.mark.parametrize("method", ["random", "per_stream", "device_per_stream"])
def test_a_global_batch_is_the_same_in_every_world(method: str) -> None:
    run = run_of(THREE, batching_method=method)
    for epoch in (0, 3):
        for num_ranks in (1, 2, 3, 6):
            worlds = [World(rank, num_ranks) for rank in range(num_ranks)]
            plans = [BatchPlan(run.epoch(epoch), batch_size=24, world=world) for world in worlds]
            for k in range(plans[0].num_batches):
                ids = np.concatenate([plan.share(k).ids for plan in plans])
                assert sorted(ids.tolist()) == sorted(run.epoch(epoch).ids(24 * k, 24 * k + 24).tolist())


@settings(max_examples=20)
@given(st.integers(0, 3), st.integers(0, 239), st.sampled_from([4, 6, 12, 24]))
def test_a_run_resumes_at_any_position_with_any_batch(epoch: int, position: int, batch_size: int) -> None:
    run = run_of(THREE)
    here = Position.start(run, batch_size=24, tail="pad", epoch=epoch).advanced(run, position)
    assert len(str(here.to_state())) < 1024
    again = Position.from_state(here.to_state())
    assert again == here
    assert again.check(run_of(THREE)) == []
    rest = BatchPlan(run_of(THREE).epoch(epoch), batch_size=batch_size, start=position)
    ids = np.concatenate([rest.ids(k) for k in range(rest.num_batches)])
    assert (ids == run.epoch(epoch).ids(position, 240)).all()
    seen = ledger.total(epoch, np.arange(position, 240), ids)
    assert (here.ledger + seen) % ledger.MODULUS == ledger.expected(run.epoch(epoch), 0, 240)


def test_a_run_does_not_resume_with_another_schedule() -> None:
    run = run_of(THREE)
    here = Position.start(run, batch_size=24, tail="pad").advanced(run, 24)
    for other in (Schedule(THREE.points), Schedule([(0, {"a": 1, "b": 1, "c": 1})]), None):
        with pytest.raises(SettingsMismatch, match="schedule was"):
            here.check(run_of(other))  # type: ignore[arg-type]


def test_a_schedule_names_all_that_is_wrong() -> None:
    points = [(1, {"a": -1, "b": 1}), (1, {"a": 0})]
    with pytest.raises(ValueError, match="rise from 0, not") as error:
        Schedule(points, "tokens", "step", {"d": "never"}, {"a": 7}, streams=("a", "b", "c"))  # type: ignore[dict-item]
    for part in (
        "a=-1",
        "The point at 1 must have a weight above 0",
        "exhausted names 'd'",
        "none, but b, c have none",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="The point at 0 names 'x', but the streams are web, code"):
        Schedule([(0, {"x": 1})]).of_streams(["web", "code"])
    with pytest.raises(ValueError, match="has the weight 1e-12, less than 1e-09 of all: use 0"):
        Schedule([(0, {"a": 1, "b": 1e-12})])
    with pytest.raises(ValueError, match="a=True, but a weight must be a number"):
        Schedule([(0, {"a": True, "b": 1})])
    steps = Schedule([(0, {"a": 1})], unit="steps")
    with pytest.raises(ValueError, match="batches of one size: with batch_tokens, count samples or tokens"):
        OrderConfig.resolve(batch_size=4, buckets=LengthBuckets(8, 4, 100), schedule=steps)
    with pytest.raises(ValueError, match="needs the native order"):
        run_of(THREE, algorithm="py1s")
    with pytest.raises(ValueError, match="It counts tokens, so it needs mean_lengths"):
        run_of(Schedule(THREE.points, "tokens"))


@settings(max_examples=60)
@given(schedules(), st.data())
def test_streams_that_stop_give_their_samples_once_under_any_schedule(schedule: Schedule, data: st.DataObject) -> None:
    names = schedule.streams
    sizes = [data.draw(st.integers(0, 3000)) for _ in names]
    stops: dict[str, Any] = {name: "stop" for name in names if data.draw(st.booleans())}
    points, interpolation = schedule.points, schedule.interpolation
    mixture = Mixture(Schedule(points, "samples", interpolation, stops, streams=names), sizes)
    at = np.arange((20_000 if mixture.end is None else mixture.end) + 1)
    counts = mixture.counts(at)
    assert (counts.sum(axis=1) == at).all()
    steps = np.diff(counts, axis=0)
    assert ((steps == 0) | (steps == 1)).all()
    for name, size, given_ in zip(names, sizes, counts[-1].tolist(), strict=True):
        assert name not in stops or given_ <= size
        lasts = dict(points[-1][1])
        assert name not in stops or not lasts.get(name) or mixture.end is None or given_ == size


def test_the_order_of_names_makes_no_other_schedule() -> None:
    streams = ("a", "b")
    one, other = Schedule([(0, {"b": 1, "a": 2})], streams=streams), Schedule([(0, {"a": 2, "b": 1})], streams=streams)
    assert one == other
    assert Schedule([(np.int64(0), {"b": np.float64(1), "a": 2})]).to_state()["streams"] == ["b", "a"]


def test_a_damaged_schedule_of_a_state_is_refused() -> None:
    state = OrderConfig.resolve(batch_size=24, schedule=THREE.changed(24, {"a": 1})).to_state()
    for name, value in [
        ("points", None), ("points", [[0]]), ("points", [[0, 1]]), ("points", [[5, {"a": 1}]]), ("changes", [[1, 2]]),
        ("changes", [["x", None, {}]]), ("unit", "miles"), ("streams", ["a"]), ("exhausted", 3), ("other", 1),
    ]:  # fmt: skip
        with pytest.raises(StateError):
            OrderConfig.from_state({**state, "schedule": {**state["schedule"], name: value}})
    for schedule in ({}, [], 3):
        with pytest.raises(StateError):
            OrderConfig.from_state({**state, "schedule": schedule})


def test_points_too_far_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="samples apart, but two of them are 4,000,000,000,000 apart"):
        Mixture(Schedule([(0, {"a": 1}), (4e12, {"a": 1})]), [MANY])


# Changes made while training


def test_a_change_takes_effect_at_its_sample_and_leaves_what_came_before() -> None:
    before = run_of(THREE)
    after = run_of(THREE.changed(360, {"c": 1, "a": 1}))
    ids = [np.concatenate([run.epoch(e).ids(0, 240) for e in range(4)]) for run in (before, after)]
    assert (ids[0][:360] == ids[1][:360]).all()
    streams = before.snapshot.streams_of(ids[1][360:])
    assert np.bincount(streams, minlength=3).tolist() == [300, 0, 300]
    assert len(set(ids[1][360:][streams == 2][:20].tolist())) <= 20


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 900), schedules()), max_size=4), st.integers(0, 1400))
def test_a_position_is_read_alike_with_any_changes(made: list[tuple[int, Schedule]], begin: int) -> None:
    schedule = Schedule(THREE.points, streams=tuple(NAMES[:4]))
    for at, other in sorted(made, key=lambda one: one[0]):
        schedule = schedule.changed(at, dict(other.points[0][1]), {"b": 3})
    assert Schedule.from_state(schedule.to_state()) == schedule
    stream, number = Mixture(schedule, [MANY] * 4).read(0, 1500)
    found = Mixture(schedule, [MANY] * 4).read(begin, 1500)
    assert (found[0] == stream[begin:]).all()
    assert (found[1] == number[begin:]).all()
    for one in range(4):
        assert (np.diff(number[stream == one]) >= 1).all()


def test_a_skipped_range_is_omitted_and_nothing_else() -> None:
    plain, skipping = Mixture(THREE, [MANY] * 3), Mixture(THREE.changed(100, skip={"b": 7}), [MANY] * 3)
    (stream, number), found = plain.read(0, 500), skipping.read(0, 500)
    assert (found[0] == stream).all()
    late = (stream == 1) & (np.arange(500) >= 100)
    assert (found[1] - number == 7 * late).all()


def test_a_change_in_the_past_or_of_an_unknown_stream_is_refused() -> None:
    changed = THREE.changed(360, {"a": 1})
    with pytest.raises(ValueError, match="must not take effect before one that was made already"):
        changed.changed(359, {"b": 1})
    with pytest.raises(ValueError, match="The change at 400 names 'x', but the streams are a, b, c"):
        changed.changed(400, {"x": 1})
    with pytest.raises(ValueError, match="skip needs one that repeats"):
        Schedule(THREE.points, exhausted="stop").changed(0, skip={"a": 1})


def test_a_resumed_run_takes_over_the_changes_of_its_state() -> None:
    changed = THREE.changed(240, {"a": 1})
    former = OrderConfig.resolve(batch_size=24, schedule=changed)
    assert OrderConfig.resolve(batch_size=24, schedule=THREE, resumed=former).schedule == changed
    other = THREE.changed(240, {"b": 1})
    assert OrderConfig.resolve(batch_size=24, schedule=other, resumed=former).schedule == other


def test_each_change_of_a_mixture_asks_only_the_weights_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand changes are a thousand questions, not a million."""
    asked = []
    counts = mixtures._Era.counts

    def counted(era: Any, at: Any) -> Any:
        asked.append(era.start)
        return counts(era, at)

    monkeypatch.setattr(mixtures._Era, "counts", counted)
    schedule = Schedule([(0, {"a": 1, "b": 1})])
    for change in range(1, 41):
        schedule = schedule.changed(100 * change, {"a": 1 + change % 3, "b": 1}, {"a": 1} if change % 8 == 0 else None)
    mixture = Mixture(schedule, [MANY] * 2)
    assert len(asked) == 40
    assert mixture.ends(4100).sum() == 4100 + 5
    assert len(asked) == 40 + 1 + 5, "and five skips ask once"


def test_a_further_change_plans_no_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that begin alike and change in different ways count as each does alone."""
    planned = []
    plan = mixtures._Era.__init__

    def counted(era: Any, *args: Any) -> None:
        planned.append(args)
        plan(era, *args)

    monkeypatch.setattr(mixtures._Era, "__init__", counted)
    run = other = Schedule([(0, {"a": 2, "b": 1.5}), (70, {"a": 1, "b": 1})], exhausted={"a": "stop"})
    at = np.arange(0, 4200, 7)
    for change in range(1, 41):
        run = run.changed(100 * change, {"a": 1 + change % 3, "b": 1}, {"b": 1} if change % 8 == 0 else None)
        counts = Mixture(run, [1500, MANY]).counts(at)
        assert len(planned) == change + 1
    for change in range(1, 6):
        other = other.changed(100 * change, {"a": 1 + change % 2, "b": 1})
        apart = Mixture(other, [1500, MANY]).counts(at)
        assert (Mixture(run, [1500, MANY]).counts(at) == counts).all()
        mixtures._first_era.cache_clear()
        assert (Mixture(other, [1500, MANY]).counts(at) == apart).all()


def test_an_own_epoch_of_a_small_stream_is_planned_once_for_all_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred samples that are half of each batch of 1,024: five own epochs a batch, and no more are planned."""
    planned: list[tuple[int, ...]] = []

    class Counted(runs.Window):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            planned.append(self.key)

    monkeypatch.setattr(runs, "Window", Counted)
    schedule = Schedule([(0, {"tiny": 0.5, "web": 0.5})])
    config = OrderConfig.resolve(batch_size=1024, shuffle=True, batching_method="stratified", schedule=schedule)
    snapshot = Snapshot.of([[100], [50_000] * 20], ["tiny", "web"])
    run = RunOrder(snapshot, [StreamWeights()] * 2, config)
    plan = BatchPlan(run.epoch(0), batch_size=1024)
    taken = sum(int((plan.share(k).ids < 100).sum()) for k in range(20))
    own_epochs = [epoch for _, epoch, stream in planned if stream == 0]
    assert sorted(own_epochs) == list(range(-(-taken // 100)))
    assert len({id(run._own_epoch(0, epoch).parts) for epoch in own_epochs}) == 1, "they share what they are cut from"
