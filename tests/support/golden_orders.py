"""What an order promises, as digests, and cases of all that orders are made of: the same from every version's code.

The golden file has the cases and their digests of one commit. To make it from a checkout of that commit:

    cd CHECKOUT && PYTHONPATH=. python REPOSITORY/tests/support/golden_orders.py > orders_COMMIT.jsonl

Where names of the package have changed since, take this file of a commit near that one: only `Code` differs.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from lightning_stream.order import (
    Balance,
    BatchPlan,
    MosaicConfig,
    OrderConfig,
    Position,
    RunOrder,
    Schedule,
    Snapshot,
    StreamWeights,
    World,
)
from lightning_stream.order import ledger as ledgers
from lightning_stream.order.bitmap import Bitmap
from lightning_stream.order.buckets import LengthBuckets
from lightning_stream.order.config import Switch
from lightning_stream.order.forget import Forgotten
from lightning_stream.order.micro_batches import MicroBatches
from lightning_stream.order.packing import RowPacking
from lightning_stream.order.switches import DataVersion, SwitchedRun
from lightning_stream.questions import Delivery, where

Case = Mapping[str, Any]
NAMES = ("web", "code", "math", "books")
METHODS = ("random", "stratified", "per_stream", "device_per_stream")


class Code:
    """The calls of the package whose names may change: nothing else here knows them."""

    @staticmethod
    def ids(order: Any, begin: int, end: int) -> NDArray[np.int64]:
        return order.ids(begin, end)

    @staticmethod
    def nodes(order: Any, begin: int, end: int) -> NDArray[np.int64]:
        return order.canonical(begin, end)

    @staticmethod
    def size(order: Any) -> int:
        return order.num_samples

    @staticmethod
    def plan(run: Any, epoch: int, **settings: Any) -> Any:
        return BatchPlan(run.epoch(epoch), **settings)

    @staticmethod
    def find(run: Any, sample_id: int, epoch: int) -> list[int]:
        return run.where(sample_id, epoch).tolist()

    @staticmethod
    def ledger(run: Any, epoch: int, end: int) -> int:
        return ledgers.expected(run.epoch(epoch), 0, end)

    @staticmethod
    def at(position: Position, run: Any, at: int) -> Position:
        """The position further on in its epoch, as a loader saves it."""
        there = position.advanced(run, at)
        return replace(there, landmark=there.order_in(run).counted_windows(at))

    @staticmethod
    def resumed(position: Position, run: Any, **settings: Any) -> Position:
        there = position.rebased_on(run, **settings)
        there.order_in(run)
        return there


@dataclass(frozen=True)
class Job:
    """A run made from a case, and what its batches are made with."""

    run: Any
    batch_size: int
    device_batch_size: int
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, case: Case, resumed: OrderConfig | None = None) -> Job:
        """The order of a case, as a new process makes it."""
        snapshot = Snapshot.of(case["sizes"], NAMES[: len(case["sizes"])])
        lengths = np.random.default_rng(case["seed"]).integers(0, case["most_length"], snapshot.num_samples)
        if case.get("omit"):
            mask = np.arange(snapshot.num_samples) % case["omit"] != 1
            snapshot, lengths = snapshot.subset(Bitmap.of_mask(mask)), lengths[mask]
        forgotten = Forgotten.of(snapshot, case["forget"]) if case.get("forget") else None
        batch_size, device = case["batch_sizes"][0], case["device_batch_size"]
        packing = RowPacking(**case["packing"]) if case.get("packing") else None
        buckets = _buckets(case, lengths, batch_size, resumed)
        ranks, ranks_per_node, replication = case["worlds"][0]
        config = OrderConfig.resolve(
            batch_size=batch_size, device_batch_size=device, packing=packing, buckets=buckets, resumed=resumed,
            forgotten=None if forgotten is None else forgotten.digest, schedule=_schedule(case),
            mosaic=MosaicConfig(**case["mosaic"]) if case.get("mosaic") else None,
            world=World(0, ranks, ranks_per_node, replication), **case["settings"],
        )  # fmt: skip
        weights = [StreamWeights(**one) for one in case["weights"]]
        if case.get("switches"):
            return cls(_switched(case, snapshot, weights, config), batch_size, device, lengths)
        known = lengths if config.needs_lengths else None
        run = RunOrder(snapshot, weights, config, known, forgotten=forgotten)
        if buckets is not None and buckets.batch_tokens is not None:
            replicas = ranks // replication
            batch_size, device = buckets.batch_size, max(1, -(-buckets.batch_size // replicas))
        return cls(run, batch_size, device, lengths)

    def balance(self, name: str | None) -> Balance | None:
        """What shares are balanced by: the lengths, their squares, or nothing."""
        if name is None:
            return None
        power = {"lengths": 1, "squares": 2}[name]
        return Balance(lambda lengths: lengths**power, self.device_batch_size, lambda: self.lengths)


def _buckets(
    case: Case, lengths: NDArray[np.int64], batch_size: int, resumed: OrderConfig | None
) -> LengthBuckets | None:
    settings = case.get("buckets")
    if not settings:
        return None
    size = settings.get("batch_multiple") if settings.get("batch_tokens") else batch_size
    chosen = {"window": settings.get("window"), "batch_tokens": settings.get("batch_tokens")}
    former = None if resumed is None else resumed.buckets
    return LengthBuckets.resolved(lengths, batch_size=size, resumed=former, **chosen)


def _schedule(case: Case) -> Schedule | None:
    if not case.get("schedule"):
        return None
    schedule = Schedule(**case["schedule"], streams=NAMES[: len(case["sizes"])])
    for at, weights, skip in case.get("changes", ()):
        schedule = schedule.changed(at, weights, skip)
    return schedule


def _switched(case: Case, snapshot: Snapshot, weights: list[StreamWeights], config: OrderConfig) -> SwitchedRun:
    """A run over versions of the data: version v lacks every seventh sample from v on."""
    ids = np.arange(snapshot.num_samples)
    members = [Bitmap.of_mask(ids % 7 != number) for number in range(1 + len(case["switches"]))]
    data = [DataVersion(snapshot.subset(one), one) for one in members]
    switches = [
        Switch(step, epoch, position, version.snapshot.digest)
        for (step, epoch, position), version in zip(case["switches"], data[1:], strict=True)
    ]
    return SwitchedRun(snapshot, weights, structs.replace(config, switches=tuple(switches)), data)


# Digests


def digest(*values: Any) -> str:
    """12 hexadecimal digits of arrays and plain values."""
    total = hashlib.sha256()
    for value in values:
        array = np.asarray(value)
        total.update(f"{array.shape}".encode() + array.astype("<i8").tobytes())
    return total.hexdigest()[:12]


def promises(case: Case) -> dict[str, Any]:
    """All that the order of a case promises; of a case that is refused, the kind of error."""
    try:
        return _promises(case)
    except ValueError as error:
        return {"refused": type(error).__name__}


def _promises(case: Case) -> dict[str, Any]:
    job = Job.of(case)
    found: dict[str, Any] = {"config": job.run.config.digest, "samples": job.run.num_samples, "epochs": {}}
    for epoch in case["epochs"]:
        order = job.run.epoch(epoch)
        size = Code.size(order)
        ids = Code.ids(order, 0, size)
        part = (size // 3, size // 3 + min(5, size - size // 3))
        asked = _asked(case, job)
        found["epochs"][str(epoch)] = {
            "size": size,
            "ids": digest(ids),
            "nodes": digest(Code.nodes(order, 0, size)),
            "part": digest(Code.ids(job.run.epoch(epoch), *part)),
            "where": {str(sample): Code.find(job.run, sample, epoch) for sample in asked},
            "ledger": f"{Code.ledger(job.run, epoch, size):016x}",
        }
    found["plans"] = dict(_refusable(case, job, settings) for settings in _plans(case, job))
    found["resumes"] = [_refusable_resume(case, number) for number in range(case.get("resumes", 2))]
    return found


def _asked(case: Case, job: Job) -> list[int]:
    count = job.run.snapshot.num_samples
    return sorted({case["seed"] % count, count // 2, count - 1})


def _plans(case: Case, job: Job) -> Iterator[dict[str, Any]]:
    """Each tail in the first world, and each world with one tail."""
    tails, epoch = case["tails"], case["epochs"][0]
    for number, world in enumerate(case["worlds"]):
        for tail in tails if number == 0 else tails[number % len(tails) :][:1]:
            yield {"epoch": epoch, "world": world, "tail": tail, "batch_size": job.batch_size, "start": 0}


def _refusable(case: Case, job: Job, settings: dict[str, Any]) -> tuple[str, list[Any]]:
    name = f"{settings['world']}, {settings['tail']}"
    try:
        return name, walked(job, case, **settings)
    except ValueError as error:
        return name, [type(error).__name__]


def walked(
    job: Job, case: Case, *, epoch: int, world: Sequence[int], tail: str, batch_size: int, start: int
) -> list[Any]:
    """The number of batches from a position on; digests of their bounds, of all ranks' shares and micro-batches."""
    bounds: list[tuple[int, int]] = []
    shares: list[Any] = []
    micro: list[Any] = []
    ranks, ranks_per_node, replication = world
    for rank in range(0, ranks, replication):
        plan = Code.plan(
            job.run, epoch, batch_size=batch_size, world=World(rank, ranks, ranks_per_node, replication), tail=tail,
            start=start, balance=job.balance(case.get("balance")),
        )  # fmt: skip
        bounds = [plan.bounds(k) for k in range(plan.num_batches)]
        for k in range(plan.num_batches):
            share = plan.share(k)
            shares += [share.ids, share.positions, share.filler, *_spans(share.rows)]
        batches = MicroBatches(plan, job.device_batch_size, padding=case.get("padding", True))
        planned = list(batches.walk())
        micro.append([len(batches), len(planned)])
        if rank == 0:  # other ways to read the same
            planned += [*batches.walk(1, 3), *(batches[j] for j in range(0, len(planned), 7))]
        for one in planned:
            place = [one.epoch, one.begin, one.end, one.completes_step, one.ends_epoch, one.version]
            micro += [place, one.ids, one.positions, one.filler, *_spans(one.rows)]
    return [len(bounds), digest(*bounds), digest(*shares), digest(*micro)]


def _spans(rows: Any) -> list[Any]:
    return [] if rows is None else [rows.edges, rows.ids, rows.first, rows.num_tokens]


def _refusable_resume(case: Case, number: int) -> dict[str, Any]:
    try:
        state = saved(case, number)
        return {"state": state, **followed(case, number, state)}
    except ValueError as error:
        return {"refused": type(error).__name__}


def saved(case: Case, number: int) -> dict[str, Any]:
    """A state in the middle of an epoch, in the first world."""
    job, epoch = Job.of(case), case["epochs"][number % len(case["epochs"])]
    tail = case["tails"][number % len(case["tails"])]
    world = World(0, *case["worlds"][0])
    plan = Code.plan(job.run, epoch, batch_size=job.batch_size, world=world, tail=tail)
    count = plan.num_batches
    start = Position.start(job.run, batch_size=job.batch_size, tail=tail, epoch=epoch)
    if not count:
        return start.to_state()
    return Code.at(
        start, job.run, plan.bounds(random.Random(f"{case['seed']} {number}").randrange(count))[1]
    ).to_state()


def followed(case: Case, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a new process does that loads the state in the last world, perhaps with another batch size."""
    position = Position.from_state(json.loads(json.dumps(state)))
    job, world = Job.of(case, resumed=position.order), case["worlds"][-1]
    is_fixed = job.batch_size != case["batch_sizes"][0]  # a budget decides the sizes
    batch_size = job.batch_size if is_fixed else case["batch_sizes"][number % len(case["batch_sizes"])]
    differences = position.check(job.run, on_mismatch="warn")
    here = Code.resumed(position, job.run, batch_size=batch_size, tail=position.tail, world=World(0, *world))
    settings = {"epoch": here.epoch, "world": world, "tail": here.tail, "batch_size": batch_size}
    after = walked(job, case, start=here.position, **settings)
    delivery = Delivery(World(0, *world), job.device_batch_size)
    try:
        places = [list(map(list, where(job.run, here, sample, delivery))) for sample in _asked(case, job)]
    except ValueError as error:
        places = [type(error).__name__]
    steps = here.num_steps(job.run)
    text = json.dumps(here.to_state(), sort_keys=True)
    return {
        "differences": len(differences),
        "rebased": hashlib.sha256(text.encode()).hexdigest()[:12],
        "steps": steps,
        "plan": after,
        "places": places,
    }


# Cases


def plain(**changes: Any) -> dict[str, Any]:
    """Three streams of uneven shards, read in two epochs on up to eight devices."""
    case = {
        "seed": 5,
        "sizes": [[31, 20, 9, 17], [12, 10, 1], [15, 0, 6]],
        "most_length": 12,
        "weights": [{}, {}, {}],
        "settings": {"shuffle": True, "seed": 11},
        "batch_sizes": [24, 48],
        "device_batch_size": 3,
        "worlds": [[4, 2, 1], [8, 4, 2], [2, 1, 1]],
        "tails": ["pad", "drop", "exact"],
        "epochs": [0, 2],
    }
    settings = {**case["settings"], **changes.pop("settings", {})}
    return {**case, **changes, "settings": settings}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each batching method with each thing that it can be composed with; then random ones."""
    yield "index order", plain(settings={"shuffle": False})
    for method in METHODS:
        yield from _of_method(method)
    for method in METHODS[:2]:
        yield from _in_windows(method)
    yield from _of_mosaic()
    for seed in range(20):
        yield f"random {seed}", {**random_case(seed), "resumes": 1}


def _of_method(method: str) -> Iterator[tuple[str, dict[str, Any]]]:
    settings = {"batching_method": method}
    points = [[0, {"web": 0.6, "code": 0.3, "math": 0.1}], [96, {"web": 0.2, "code": 0.3, "math": 0.5}]]
    epoch_size = {"epoch_size": 144}
    weighted = {
        "repeat": [{"repeat": 0.5}, {"repeat": 1}, {"repeat": 2.5}],
        "choose": [{"choose": 30}, {"choose": 37}, {"choose": 11}],
        "proportion": [{"proportion": 0.5}, {"proportion": 0.3}, {"proportion": 0.2}],
    }
    yield method, plain(settings=settings)
    yield f"{method}, no quick start", plain(settings={**settings, "quick_start": False})
    yield f"{method}, in index order", plain(settings={**settings, "shuffle": False})
    for nodes, window in ((1, 2), (3, 1), (8, 3)):
        chosen = {**settings, "canonical_nodes": nodes, "window": window}
        yield f"{method}, {nodes} nodes, window {window}", plain(settings=chosen)
    for name, weights in weighted.items():
        yield f"{method}, {name}", plain(settings={**settings, "sampling_granularity": 3}, weights=weights)
        fixed = {**settings, "sampling_method": "fixed"}
        yield f"{method}, {name}, fixed", plain(settings=fixed, weights=weights, epochs=[1])
    yield f"{method}, omitted samples", plain(settings=settings, omit=5)
    yield f"{method}, forget", plain(settings=settings, forget=[3, 40, 77, 100])
    yield f"{method}, balance", plain(settings=settings, balance="lengths")
    yield f"{method}, no padding", plain(settings=settings, padding=False)
    if method == "random":
        yield "switches of versions", plain(settings=settings, switches=[[3, 0, 72], [15, 2, 0]], epochs=[0, 1, 2])
    for interpolation in ("step", "linear"):
        for unit, times in (("samples", 1), ("steps", 1 / 24), ("tokens", 5)):
            if unit != "tokens" and interpolation == "step" and unit == "steps":
                continue
            schedule = {
                "points": [[int(at * times), weights] for at, weights in points],
                "unit": unit,
                "interpolation": interpolation,
                "mean_lengths": {"web": 5.5, "code": 4, "math": 7} if unit == "tokens" else {},
            }
            yield (
                f"{method}, {interpolation} schedule in {unit}",
                plain(settings={**settings, **epoch_size}, schedule=schedule),
            )
    stops = {"points": points, "exhausted": "stop"}
    yield f"{method}, schedule that stops", plain(settings={**settings, **epoch_size}, schedule=stops)
    changes = [[60, {"code": 3, "math": 1}, {}], [200, {"web": 1, "math": 1}, {}]]
    changed = plain(settings={**settings, **epoch_size}, schedule={"points": points}, changes=changes)
    yield f"{method}, schedule, changes", changed
    yield f"{method}, schedule, skip", {**changed, "changes": [[72, None, {"web": 10}]]}


def _in_windows(method: str) -> Iterator[tuple[str, dict[str, Any]]]:
    settings = {"batching_method": method}
    for long_documents in ("split", "truncate", "drop"):
        for row_length, window in ((8, 20), (30, 64)):
            packing = {"row_length": row_length, "window": window, "long_documents": long_documents}
            packed = plain(settings=settings, packing=packing, batch_sizes=[8, 16], device_batch_size=2)
            name = f"{method}, rows of {row_length}, {long_documents}"
            yield name, packed
            if long_documents == "split":
                yield f"{name}, balance", {**packed, "balance": "squares"}
                yield f"{name}, omitted samples, forget", {**packed, "omit": 4, "forget": [2, 50, 80]}
                yield f"{name}, in index order", {**packed, "settings": {**packed["settings"], "shuffle": False}}
    points = [[0, {"web": 3, "code": 1, "math": 1}], [300, {"web": 1, "code": 1, "math": 2}]]
    schedule = {
        "points": points,
        "unit": "tokens",
        "interpolation": "linear",
        "mean_lengths": {"web": 5, "code": 6, "math": 5.5},
    }
    chosen = {**settings, "epoch_size": 144}
    packing = {"row_length": 16, "window": 30}
    scheduled = plain(settings=chosen, packing=packing, schedule=schedule, batch_sizes=[8, 16], device_batch_size=2)
    yield f"{method}, schedule, rows", scheduled
    yield f"{method}, schedule, changes, rows", {**scheduled, "changes": [[90, {"math": 1}, {}]]}
    yield f"{method}, buckets", plain(settings=settings, buckets={"window": 72})
    yield f"{method}, buckets, balance", plain(settings=settings, buckets={"window": 72}, balance="squares")
    yield f"{method}, one window of buckets", plain(settings=settings, buckets={})
    for multiple in (1, 4):
        budget = {"window": 60, "batch_tokens": 120, "batch_multiple": multiple}
        yield f"{method}, budget, multiples of {multiple}", plain(settings=settings, buckets=budget)
    budget = {"window": 60, "batch_tokens": 100}
    yield f"{method}, budget, forget", plain(settings=settings, buckets=budget, forget=[9, 100])


def _of_mosaic() -> Iterator[tuple[str, dict[str, Any]]]:
    for algorithm in ("py1e", "py1br", "py1s", "py2s", "naive"):
        for partition in ("relaxed", "orig"):
            settings = {"algorithm": algorithm, "canonical_nodes": 4}
            mosaic = {"partition": partition, "shuffle_block_size": 30}
            given = {"settings": settings, "mosaic": mosaic, "device_batch_size": 6, "batch_sizes": [24]}
            yield f"mosaic {algorithm}, {partition}", plain(**given, worlds=[[4, 2, 1], [2, 1, 1], [4, 4, 1]])
    for method in METHODS[1:]:
        settings = {"algorithm": "py1e", "batching_method": method}
        given = {"settings": settings, "mosaic": {"partition": "orig"}, "device_batch_size": 6}
        yield f"mosaic {method}", plain(**given, worlds=[[4, 2, 1], [4, 4, 1]])
    settings = {"algorithm": "py1s", "shuffle": False}
    weights = [{"repeat": 1.5}, {"repeat": 0.5}, {}]
    yield "mosaic, weights", plain(settings=settings, mosaic={}, device_batch_size=6, weights=weights)


def random_case(seed: int) -> dict[str, Any]:
    """A case of random data, settings and devices; some are refused."""
    rng = random.Random(seed)
    streams = rng.randint(1, 4)
    names = NAMES[:streams]
    replicas, device, accumulate = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 4]), rng.choice([1, 2])
    batch_size = replicas * device * accumulate
    method = rng.choice(METHODS)
    kind = rng.choice(["none", "none", "repeat", "proportion", "choose"])
    values = {"repeat": [0, 0.5, 1, 2.3], "proportion": [0.1, 0.4, 0.9], "choose": [0, 3, 30, 70]}
    case: dict[str, Any] = {
        "seed": seed,
        "sizes": [[rng.choice([0, 1, 2, 5, 17, 60]) for _ in range(rng.randint(1, 5))] for _ in names],
        "most_length": rng.choice([4, 12, 30]),
        "weights": [{} if kind == "none" else {kind: rng.choice(values[kind])} for _ in names],
        "settings": {
            "shuffle": rng.random() < 0.8,
            "seed": rng.randint(0, 2**40),
            "batching_method": method,
            "canonical_nodes": rng.choice([None, 1, 2, 3, 8]),
            "window": rng.choice([None, 1, 2, 3]),
            "sampling_method": rng.choice(["balanced", "balanced", "fixed"]),
            "sampling_granularity": rng.choice([1, 3]),
            "quick_start": rng.choice([None, True, False]),
            "epoch_size": rng.choice([None, None, 40]) if kind in ("none", "proportion") else None,
        },
        "batch_sizes": [batch_size, batch_size * rng.choice([1, 2, 3])],
        "device_batch_size": device,
        "worlds": _random_worlds(rng, replicas, batch_size),
        "tails": rng.sample(["pad", "drop", "exact"], 2),
        "epochs": sorted(rng.sample(range(4), 2)),
        "omit": rng.choice([None, None, None, 3]),
        "balance": rng.choice([None, None, "lengths", "squares"]),
        "padding": rng.random() < 0.7,
    }
    return {**case, **_random_layers(rng, case, method, names)}


def _random_worlds(rng: random.Random, replicas: int, batch_size: int) -> list[list[int]]:
    others = [count for count in range(1, batch_size + 1) if batch_size % count == 0 and count <= 8]
    worlds = []
    for count in (replicas, rng.choice(others)):
        replication = rng.choice([1, 1, 2])
        ranks = count * replication
        worlds.append([ranks, rng.choice([one for one in range(1, ranks + 1) if ranks % one == 0]), replication])
    return worlds


def _random_layers(rng: random.Random, case: Case, method: str, names: Sequence[str]) -> dict[str, Any]:
    layers: dict[str, Any] = {}
    choice = rng.random()
    if method in METHODS[:2] and choice < 0.35:
        layers["packing"] = {
            "row_length": rng.choice([4, 8, 25]),
            "window": rng.choice([4, 16, 50]),
            "long_documents": rng.choice(["split", "truncate", "drop"]),
        }
    elif method in METHODS[:2] and choice < 0.65:
        layers["buckets"] = {"window": rng.choice([8, 16, 64])}
        if rng.random() < 0.5:
            layers["buckets"] |= {"batch_tokens": rng.choice([60, 200]), "batch_multiple": rng.choice([1, 2])}
    if rng.random() < 0.25:
        layers["forget"] = [0]
    if rng.random() < 0.3:
        layers["schedule"] = {
            "points": [[at, {name: round(rng.random() + 0.1, 2) for name in names}] for at in (0, 30)],
            "interpolation": rng.choice(["step", "linear"]),
            "exhausted": "repeat" if method in METHODS[2:] else rng.choice(["repeat", "stop"]),
        }
        layers["weights"] = [{} for _ in names]
        size = {"per_stream": case["batch_sizes"][0] * 5, "device_per_stream": case["device_batch_size"] * 10}
        layers["settings"] = {**case["settings"], "epoch_size": size.get(method, rng.choice([None, 37]))}
        if rng.random() < 0.4:
            layers["changes"] = [[rng.randint(0, 60), {names[0]: 1}, {}]]
    elif method == "random" and not layers and rng.random() < 0.5:
        layers["switches"] = [[2, 0, 2 * case["batch_sizes"][0]]]
    return layers


def main() -> None:
    """Print one line for each case: its name, its arguments and what its order promises."""
    for name, case in cases():
        line = {"name": name, "case": case, "promises": promises(case)}
        sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
