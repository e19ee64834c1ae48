"""The resume contract for Lightning, Composer and a plain loop, in one process, so that many ways fit into CI."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import documents
from support.chains import (
    LOOKS,
    SECOND_LOADERS,
    Chain,
    Link,
    Look,
    composed,
    draw_chain,
    expect_chain_exact,
    number_row,
    number_rows,
    without_tokens,
    write_streams,
)
from support.filter_runs import NotDivisible
from support.resume_contract import (
    EPOCHS,
    HOSTS,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    WARNINGS,
    At,
    expect_every_resume_exact,
    expect_exact,
    from_step,
    host_named,
    planned,
    write_shards,
)

from lightning_stream import (
    MDSWriter,
    Packing,
    Schedule,
    Stream,
    StreamingDataLoader,
    World,
    read_position,
    versions,
)

pytestmark = WARNINGS
nightly = pytest.mark.nightly
FEW, ALL = (4, 11, 14), range(1, 33)
TRAINERS = ("Lightning", "Composer")

# Data that all trainers must continue on: arguments of the dataset, and of the loader.
WORKERS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "workers": "threads"},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}
DATA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "samples": ({}, {}),
    "a rest that is dropped": ({}, {"tail": "drop"}),
    "an exact rest": ({}, {"tail": "exact"}),
    "batches of a device": ({}, {"batch_size": 16, "global_batch_size": None}),
    "a filter": ({"filter": {"sample": NotDivisible(5), "exclude_ids": range(7)}}, {}),
    "an order of mosaicml-streaming": ({"shuffle_algo": "py1e"}, {}),
    **{name: ({}, loading) for name, loading in WORKERS.items()},
}
# Options of one trainer alone.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Lightning": [
        {"accumulate_grad_batches": 4},
        {"module": {"manual": True}},
        {"module": {"reads_stepping_batches": True}},
        {"max_steps": 2 * STEPS_PER_EPOCH + 5, "max_epochs": -1},
        {"limit_train_batches": 7},
        {"limit_train_batches": 0.5},
        {"limit_train_batches": 3, "accumulate_grad_batches": 4, "stops": (1, 2)},
        {"limit_train_batches": 7, "accumulate_grad_batches": 4, "stops": range(1, 6)},
        {"val_check_interval": 3},
        {"val_check_interval": 0.5, "accumulate_grad_batches": 2},
        {"check_val_every_n_epoch": None, "val_check_interval": 5},
        {"reload_dataloaders_every_n_epochs": 1},
        {"module": {"dropout": 0.5}, "data": {"seed_steps": 1}},
        {"val": False},
        {"val": False, "accumulate_grad_batches": 2},
    ],
    "Composer": [
        {"dropout": 0.5, "evaluates": "4ba"},
        {"dropout": 0.5, "evaluates": "1ep"},
        {"dropout": 0.5, "data": {"num_workers": 2, "persistent_workers": True}},
        {"dropout": 0.5, "device_train_microbatch_size": 5},
        {"train_subset_num_batches": 6},
        {"train_subset_num_batches": 3, "stops": range(1, 9)},
        {"train_subset_num_batches": 1, "stops": (1, 2)},
        {"max_duration": "400sp"},
    ],
    "plain loop": [],
}
EACH = pytest.mark.parametrize("name", HOSTS)
EACH_TRAINER = pytest.mark.parametrize("name", TRAINERS)
STOPS = pytest.mark.parametrize("stops", [FEW, pytest.param(ALL, marks=nightly)], ids=["few", "many"])


# With a trainer, workers that persist are those that differ most from none.
DATA_OF = [
    pytest.param(kind, name, marks=[nightly] if name in TRAINERS and kind in ("processes", "threads") else [])
    for kind in DATA
    for name in HOSTS
]


@STOPS
@pytest.mark.parametrize(("kind", "name"), DATA_OF)
def test_a_run_over_any_data_is_the_order_and_its_checkpoints_continue_exactly(
    shards: Path, tmp_path: Path, name: str, kind: str, stops: Any
) -> None:
    dataset, data = DATA[kind]
    whole = expect_every_resume_exact(host_named(name), shards, tmp_path, stops, dataset=dataset, data=data)
    assert whole.steps == planned(Chain(0, dataset, data).loader(shards))


@STOPS
@pytest.mark.parametrize(
    ("name", "options"), [(name, one) for name, options in OPTIONS.items() for one in options], ids=str
)
def test_a_run_with_any_options_continues_exactly(
    shards: Path, tmp_path: Path, name: str, options: dict[str, Any], stops: Any
) -> None:
    expect_every_resume_exact(host_named(name), shards, tmp_path, **{"stops": stops, **options})


# Data of other kinds, each with a folder of its own


def mixture(root: Path, method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    streams = [Stream(remote=root / name, proportion=share) for name, share in (("a", 0.3), ("b", 0.7))]
    dataset = {"remote": None, "streams": streams, "epoch_size": 160, "batching_method": method}
    return {**dataset, "transform": without_tokens}, {"tail": "drop"}


SWITCH = [(0, 0), (17, 2)]  # in the second epoch, whose steps are 11 to 25
ROWS = {"pack": Packing(row_length=40, window=50), "transform": number_row}
WHOLE = {"pack": Packing(lengths="tokens + 8", row_length=48, window=50), "transform": without_tokens}
BUDGET = {"batch_tokens": 520, "bucket_by": {"window": 48}, "transform": without_tokens}
MADE: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]] = {
    **{
        f"a mixture, {method}": lambda root, method=method: mixture(root, method)
        for method in ("random", "stratified", "per_stream", "device_per_stream")
    },
    "packed rows": lambda root: ({"remote": root / "a", **ROWS}, {}),
    "packed samples": lambda root: ({"remote": root / "a", **WHOLE}, {"collate_fn": number_rows}),
    "a budget of tokens": lambda root: ({"remote": root / "a", **BUDGET}, {"global_batch_size": None}),
    "a switch of versions": lambda root: ({"remote": root / "versions", "version": SWITCH}, {}),
    "several stages": composed,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Streams of documents; and a dataset to which samples were appended, and from which others were deleted."""
    root = documents.write(write_streams(tmp_path_factory.mktemp("data")))
    folder = write_shards(root / "versions")
    columns, lengths = {"id": "int", "x": "ndarray:float32:4"}, {"tokens": lambda sample: 1}
    with MDSWriter(out=str(folder), columns=columns, lengths=lengths, append=True) as writer:
        writer.write_batch({"id": np.arange(167, 240), "x": np.ones((73, 4), np.float32)})
    versions.delete_rows(folder, range(20, 50))
    return root


ALIKE = ("a mixture, random", "a mixture, stratified", "packed samples")  # of each, another kind is alike
KINDS_MADE = [pytest.param(kind, marks=[nightly] if kind in ALIKE else []) for kind in MADE]


@EACH
@pytest.mark.parametrize("kind", KINDS_MADE)
def test_a_run_over_data_of_other_kinds_is_the_order_and_continues_exactly_around_the_ends_of_epochs(
    root: Path, tmp_path: Path, name: str, kind: str
) -> None:
    host, (dataset, data) = host_named(name), MADE[kind](root)
    loader = Chain(0, dataset, data).loader(root)
    lengths = [loader.num_batches(epoch) for epoch in range(EPOCHS)]
    assert len({*lengths}) > 1 or kind not in ("packed rows", "a budget of tokens"), "the epochs must differ in length"
    first, second, _ = accumulate(lengths)
    stops = {4, first, first + 3, second, second + 1}
    more = {"accumulate_grad_batches": 2} if name == "Lightning" and "mixture" in kind else {}
    whole = expect_every_resume_exact(host, root / "a", tmp_path, stops, dataset=dataset, data=data, **more)
    assert whole.steps == planned(Chain(0, dataset, data).loader(root, accumulate=2 if more else 1))


@EACH
def test_a_run_over_one_version_is_continued_with_a_switch(root: Path, tmp_path: Path, name: str) -> None:
    host, declared = host_named(name), {"dataset": {"version": SWITCH}}
    whole = host.run(root / "versions", tmp_path / "whole", **declared)
    host.run(root / "versions", tmp_path, dataset={"version": 0}, save_at=(4, 12, 16))
    for step, path in host.checkpoints(tmp_path):
        expect_exact(whole, host.run(root / "versions", tmp_path / str(step), path, **declared), step)


@pytest.mark.parametrize("name", ["Lightning", "plain loop"])
def test_data_of_several_stages_continues_on_other_numbers_of_devices(root: Path, tmp_path: Path, name: str) -> None:
    host, (dataset, data) = host_named(name), composed(root)
    ways = {"way": "max_steps", "source": host.sources[0]}
    links = [
        Link(num_ranks=2, accumulate=3, at=At("", 17), **ways),  # an epoch has about 25 steps
        Link(num_ranks=3, accumulate=2, at=At("", 40), **ways),
        Link(num_ranks=1, source=host.sources[0]),
    ]
    expect_chain_exact(host, root / "a", tmp_path, Chain(0, dataset, data, num_steps=60, links=links))


ENDS: list[tuple[str, dict[str, Any]]] = [
    ("Lightning", {}),
    ("Composer", {}),
    ("Composer", {"train_subset_num_batches": 6}),
    ("Composer", {"evaluates": "1ep"}),
]


@pytest.mark.parametrize(("name", "options"), ENDS, ids=str)
def test_a_checkpoint_at_the_end_of_an_epoch_starts_the_next(
    shards: Path, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    host = host_named(name)
    whole = host.run(shards, tmp_path, **host.saves_epochs(tmp_path), **options)
    for step, path in host.checkpoints(tmp_path)[:-1]:
        resumed = host.run(shards, tmp_path / "again", path, **options)
        expect_exact(whole, resumed, step)
        assert resumed.evaluations == [one for one in whole.evaluations if one[0] > step]


# Chains of runs

FIRST, LAST = map(int, os.environ.get("LIGHTNING_STREAM_SEEDS", "100:300").split(":"))
ONCE_WRONG = {7214, 7242}  # a mixture whose last epoch is short; an evaluation over batches of a budget
NIGHTLY = sorted({*ONCE_WRONG, *range(FIRST, LAST)})
SEEDS = [*range(4), *(pytest.param(seed, marks=nightly) for seed in (*range(4, 8), *NIGHTLY))]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Lightning leaves signals as it has set them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@EACH
@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_chain_of_runs_is_exact(shards: Path, root: Path, tmp_path: Path, name: str, seed: int) -> None:
    host, is_long = host_named(name), seed >= 100
    how: dict[str, Any] = [
        {"has_habits": False, "num_links": 6 if is_long else 4},
        {},
        {"folder": root},
        {"kinds": (*LOOKS, *SECOND_LOADERS, *SECOND_LOADERS)},
    ][seed % 4]
    workers = (0, 0, 0, 1, 2) if is_long else (0,)
    chain = draw_chain(host, seed, workers=workers, **how)
    expect_chain_exact(host, shards, tmp_path, chain)


@EACH
def test_every_epoch_trains_on_every_sample_once(shards: Path, tmp_path: Path, name: str) -> None:
    run = host_named(name).run(shards, tmp_path)
    assert len(run.steps) == EPOCHS * STEPS_PER_EPOCH
    for epoch in range(EPOCHS):
        ids = [number for step, ids in run.steps.items() if run.epochs[step] == epoch for number in ids]
        assert sorted(ids) == list(range(NUM_SAMPLES))


# What users do beside training

PLAIN = Chain(0, {"shuffle_seed": 3}, {})
KINDS = ("look", "three", "kept", "pass", "statistics", "second", "kept second")
PARTS_OF_OTHERS = ("look", "kept", "second")
KINDS_OF_LOOKS = [pytest.param(kind, marks=[nightly] if kind in PARTS_OF_OTHERS else []) for kind in KINDS]


def fit(name: str, shards: Path, folder: Path, link: Link, path: Path | None = None, **given: Any) -> Any:
    """One run by a user, in one process."""
    chain, loaders = given.get("chain", PLAIN), given.get("loaders", {})
    return host_named(name).run_link(shards, folder, chain, link, World(), path, loaders)


def sources_of(name: str) -> list[str]:
    return [source for source in host_named(name).sources if source != "torch"]


@pytest.fixture(scope="module")
def quiet(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, dict[int, Any]]]:
    """Of a trainer: a run without any habits, and the states in its checkpoints."""

    @cache
    def of(name: str) -> tuple[Any, dict[int, Any]]:
        folder = tmp_path_factory.mktemp("quiet")
        run = fit(name, shards, folder, Link("bare", options={"save_at": FEW}))
        return run, {step: read_position(path) for step, path in host_named(name).checkpoints(folder)}

    return of


@EACH_TRAINER
@pytest.mark.filterwarnings("ignore:an iteration of one batch is a look")
@pytest.mark.parametrize("shift", [0, *(pytest.param(k, marks=nightly) for k in (1, 2, 3))])
@pytest.mark.parametrize("kind", KINDS_OF_LOOKS)
def test_looks_in_all_hooks_change_no_batch_and_no_checkpoint(
    shards: Path, tmp_path: Path, quiet: Any, name: str, kind: str, shift: int
) -> None:
    host, sources, (whole, states) = host_named(name), sources_of(name), quiet(name)
    looks = tuple(Look(hook, step, kind) for hook in host.hooks for step in (0, 3, 11))
    link = Link(
        sources[(KINDS.index(kind) + shift) % len(sources)], looks=looks, before=(kind,), evaluates_on_train=True,
        looks_first=kind == "pass", options={"save_at": FEW},
    )  # fmt: skip
    run = fit(name, shards, tmp_path, link)
    assert (run.steps, run.losses) == (whole.steps, whole.losses)
    saved = host.checkpoints(tmp_path)
    assert {step: read_position(path) for step, path in saved} == states
    for step, path in saved:
        assert fit(name, shards, tmp_path / str(step), link, path).steps == from_step(whole.steps, step)


@EACH_TRAINER
@pytest.mark.parametrize("number", range(4))
def test_evaluation_over_the_training_loader_before_during_and_after_a_fit_is_no_training(
    shards: Path, tmp_path: Path, quiet: Any, name: str, number: int
) -> None:
    host, sources = host_named(name), sources_of(name)
    if number >= len(sources):
        pytest.skip(f"{name} has {len(sources)} ways to take a loader")
    validates = ("validate",) if "validate" in host.uses else ()
    link = Link(
        sources[number], before=(*validates, "look"), after=validates, evaluates_on_train=True,
        looks=tuple(Look("on_train_batch_end", 4, kind) for kind in validates),
    )  # fmt: skip
    run = fit(name, shards, tmp_path, link)
    assert run.steps == quiet(name)[0].steps
    assert {ids for _, ids in run.evaluations} == {tuple(range(NUM_SAMPLES))}


@EACH_TRAINER
def test_one_loader_serves_several_trainers_and_a_second_one_over_its_dataset_begins_at_the_start(
    shards: Path, tmp_path: Path, quiet: Any, name: str
) -> None:
    whole, loaders = quiet(name)[0].steps, dict[Any, Any]()
    link = Link("bare", keeps_loader=True, options={"save_at": (5, 11)})
    for number, step in enumerate((0, 0, 11, 0, 5)):
        path = dict(host_named(name).checkpoints(tmp_path / "0"))[step] if step else None
        assert fit(name, shards, tmp_path / str(number), link, path, loaders=loaders).steps == from_step(whole, step)
    (loader,) = loaders.values()
    second = StreamingDataLoader(loader.dataset, global_batch_size=16)
    assert second.position == second.first_position()
    assert planned(second) == whole


@pytest.mark.parametrize("name", ["Lightning"])
def test_a_loader_whose_mixture_has_ended_serves_another_trainer_from_the_start(
    root: Path, tmp_path: Path, name: str
) -> None:
    streams = [Stream(remote=root / one, name=one) for one in "ab"]
    schedule = Schedule([(0, {"a": 1, "b": 1})], exhausted="stop")
    dataset = {"remote": None, "streams": streams, "schedule": schedule, "epoch_size": 184, **ROWS}
    chain, loaders = Chain(0, dataset, {"tail": "drop"}), dict[Any, Any]()
    whole = planned(chain.loader(root))
    assert len(whole) < EPOCHS * chain.loader(root).num_batches(0), "the test needs a mixture that ends"
    for number in range(2):
        link = Link("bare", keeps_loader=True)
        assert fit(name, root / "a", tmp_path / str(number), link, chain=chain, loaders=loaders).steps == whole


@EACH_TRAINER
def test_a_limit_holds_in_every_epoch_although_they_differ_in_length(root: Path, tmp_path: Path, name: str) -> None:
    chain = Chain(0, {"remote": root / "a", **ROWS}, {}, limit=5)
    run = fit(name, root / "a", tmp_path, Link("bare"), chain=chain)
    assert run.steps == planned(chain.loader(root), limit=5)


@EACH_TRAINER
def test_an_epoch_that_a_change_of_the_mixture_makes_longer_is_trained_to_its_end_also_after_a_resume(
    root: Path, tmp_path: Path, name: str
) -> None:
    host, hook = host_named(name), {"Lightning": "on_train_batch_end", "Composer": "batch_end"}[name]

    def chain_of(schedule: Schedule) -> Chain:
        streams = [Stream(remote=root / one, name=one) for one in "ab"]
        dataset = {"remote": None, "streams": streams, "epoch_size": 400, "schedule": schedule, **ROWS}
        return Chain(0, dataset, {"global_batch_size": 16})

    plain = chain_of(Schedule([(0, {"a": 1})]))

    def fit_to(step: int, folder: Path, path: Path | None = None) -> tuple[Any, Path]:
        looks = (Look(hook, 5, "change"),) if path is None else ()
        link = Link("bare", looks=looks, options={"save_at": (step,), **host.until(step)})
        run = fit(name, root / "a", folder, link, path, chain=plain)
        return run.steps, dict(host.checkpoints(folder))[step]

    whole, last = fit_to(60, tmp_path / "whole")
    changed = chain_of(Schedule.from_state(read_position(last)["order"]["schedule"]))
    before, end = (chain.loader(root).num_batches(0) for chain in (plain, changed))
    assert 10 < before < end < 60, "the test needs an epoch that becomes longer"
    steps = planned(changed.loader(root))
    assert whole == {step: steps[step] for step in range(60)}
    for stop in (5, before + 1, end):
        first, path = fit_to(stop, tmp_path / str(stop))
        rest, path = fit_to(60, tmp_path / f"{stop} again", path)
        assert first | rest == whole
        assert read_position(path) == read_position(last)


# The contract can fail


def continues_at(shift: int) -> Callable[..., None]:
    load = StreamingDataLoader.load_state_dict

    def broken(self: StreamingDataLoader, state: Any) -> None:
        load(self, state)
        self.cursor.seek(replace(self.position, position=self.position.position + shift, ledger=None))

    return broken


def without_first_batch(self: StreamingDataLoader, iterate: Any = StreamingDataLoader.__iter__) -> Iterator[Any]:
    batches = iterate(self)
    next(batches)
    yield from batches


def with_rank(self: StreamingDataLoader) -> dict[str, Any]:
    return {**self.state_of(self.position), "rank": self.detect_world().rank}


BROKEN: dict[str, tuple[str, Callable[..., Any]] | None] = {
    "nothing": None,
    "continues a step later": ("load_state_dict", continues_at(16)),
    "continues a step earlier": ("load_state_dict", continues_at(-16)),
    "loses an epoch's first batch": ("__iter__", without_first_batch),
    "saves another state on each rank": ("state_dict", with_rank),
}


@pytest.mark.parametrize("how", BROKEN)
def test_the_contract_fails_where_a_loader_is_broken(shards: Path, tmp_path: Path, how: str) -> None:
    class Broken(type(host_named("plain loop"))):  # type: ignore[misc]
        def run_link(self, *arguments: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                if (broken := BROKEN[how]) is not None:
                    patch.setattr(StreamingDataLoader, *broken)
                return super().run_link(*arguments)

    links = [Link("bare", 2, way="max_steps", at=At("", 4)), Link("bare")]
    with nullcontext() if how == "nothing" else pytest.raises(AssertionError):
        expect_chain_exact(Broken(), shards, tmp_path, Chain(0, {}, {}, links=links))
