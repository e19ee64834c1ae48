"""A filtered dataset is the dataset of the samples that are kept: in every world, after every resume."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.filter_runs import Noting  # noqa: E402

from lightning_stream import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, World  # noqa: E402
from lightning_stream.errors import FormatError, LightningStreamError, SnapshotMismatch  # noqa: E402
from lightning_stream.reading import filters  # noqa: E402
from lightning_stream.reading.reader import SampleReader  # noqa: E402

NUM_SAMPLES = 167
LENGTHS = 1 + np.arange(NUM_SAMPLES) * 7 % 50

Make = Callable[..., StreamingDataset]


def write(folder: Path, first: int = 0) -> Path:
    with MDSWriter(
        out=str(folder), columns={"id": "int", "tokens": "ndarray:uint16"}, size_limit=2000, lengths={"tokens": len}
    ) as writer:
        for number in range(first, first + NUM_SAMPLES):
            writer.write({"id": number, "tokens": np.zeros(LENGTHS[number % NUM_SAMPLES], np.uint16)})
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def make(shards: Path, tmp_path: Path) -> Make:
    return lambda **given: StreamingDataset(**{"remote": shards, "local": tmp_path / "cache", "shuffle": True, **given})


def kept(dataset: StreamingDataset) -> list[int]:
    return [int(sample["id"]) for sample in dataset[:]]


def is_odd(sample: dict[str, Any]) -> bool:
    return bool(sample["id"] % 2)


def only_id(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": sample["id"]}


def steps_of(ranks: list[list[Any]]) -> list[list[int]]:
    return [sorted(number for batch in step for number in batch["id"].tolist()) for step in zip(*ranks, strict=True)]


RULES: dict[str, dict[str, Any]] = {
    "function": {"filter": is_odd},
    "lengths": {"filter": {"lengths": {"tokens": (10, 40)}}},
    "all": {"filter": {"sample": is_odd, "lengths": {"tokens": (5, None)}, "exclude_ids": range(0, NUM_SAMPLES, 11)}},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_no_sample_is_lost_or_repeated_in_any_world_after_any_stop(rules: dict[str, Any], make: Make) -> None:
    draw = random.Random(17)
    rules = {**rules, "num_canonical_nodes": 2}
    rest = [number for batch in StreamingDataLoader(make(**rules), 1) for number in batch["id"].tolist()]
    state, total = None, len(rest)
    while rest:
        num_ranks, workers, size = draw.choice((1, 2, 3, 4)), draw.choice((0, 0, 1)), draw.choice((1, 2, 5))
        stop, ranks = draw.randint(1, 4), []
        for rank in range(num_ranks):
            world = World(rank, num_ranks, num_ranks)
            loader = StreamingDataLoader(make(**rules), size, world=world, num_workers=workers, tail="exact")
            if state is not None:
                loader.load_state_dict(state)
            batches = [batch for _, batch in zip(range(stop), loader, strict=False)]
            ranks.append(batches)
        state = loader.state_dict()
        for step in steps_of(ranks):
            assert step == sorted(rest[: len(step)])
            rest = rest[len(step) :]
        assert state["epoch"] == 1 or state["position"] == total - len(rest)


def test_rules_keep_the_samples_that_pass_all_of_them(make: Make, tmp_path: Path) -> None:
    numbers = np.arange(NUM_SAMPLES)
    assert kept(make(filter=lambda sample: sample["id"] > 160)) == [161, 162, 163, 164, 165, 166]
    assert kept(make(filter={"lengths": {"tokens": (10, 40)}})) == numbers[(LENGTHS >= 10) & (LENGTHS <= 40)].tolist()
    assert kept(make(filter={"lengths": {"tokens": (None, 7)}})) == numbers[LENGTHS <= 7].tolist()
    odd = {"tokens": lambda tokens: tokens % 2 == 1}
    assert kept(make(filter={"lengths": odd})) == numbers[LENGTHS % 2 == 1].tolist()
    both = {("tokens", "tokens"): lambda first, second: first + second < 21}
    assert kept(make(filter={"lengths": both})) == numbers[LENGTHS <= 10].tolist()
    wanted = numbers[(numbers % 2 == 1) & (LENGTHS >= 25) & (numbers != 47)].tolist()
    chosen = make(filter={"sample": is_odd, "lengths": {"tokens": (25, None)}, "exclude_ids": [47]})
    assert kept(chosen) == wanted
    assert chosen.lengths("tokens").tolist() == LENGTHS[wanted].tolist()
    assert kept(chosen.subset([1, 3])) == [wanted[1], wanted[3]]
    assert chosen.subset([1, 3]).original_ids([1]).tolist() == [wanted[3]]
    (tmp_path / "ids").write_text("1\n3\n3\n")
    np.save(tmp_path / "ids.npy", np.array([1, 3]))
    for ids in ([1, 3], np.array([1, 3]), iter([3, 1]), tmp_path / "ids", str(tmp_path / "ids.npy")):
        assert kept(make(filter={"exclude_ids": ids})) == numbers[(numbers != 1) & (numbers != 3)].tolist()
    assert kept(make(filter={"exclude_ids": []})) == numbers.tolist()


def test_ids_count_over_all_streams_of_a_mixture(make: Make, tmp_path: Path) -> None:
    other = write(tmp_path / "other", first=1000)
    streams = [Stream(make().streams[0].remote, local=tmp_path / "a"), Stream(other, local=tmp_path / "b", repeat=2)]
    rules = {"sample": is_odd, "exclude_ids": [NUM_SAMPLES + 1]}
    dataset = make(remote=None, local=None, streams=streams, filter=rules)
    wanted = [*range(1, NUM_SAMPLES, 2), *range(1003, 1000 + NUM_SAMPLES, 2)]
    assert kept(dataset) == wanted
    assert dataset.original_ids([83, 84]).tolist() == [NUM_SAMPLES + 3, NUM_SAMPLES + 5]
    seen = Counter(number for batch in StreamingDataLoader(dataset, 10) for number in batch["id"].tolist())
    assert seen == {number: 1 + (number >= 1000) for number in wanted}


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"filter": 3}, TypeError, "filter is a function of a sample.*or a mapping.*; found 3"),
        ({"filter": {"sample": 3}}, TypeError, "filter is a function of a sample.*or a mapping.*; found 3"),
        ({"filter": {"tokens": (1, 2)}}, ValueError, "filter has the parts sample, lengths, exclude_ids; found"),
        ({"filter": {"lengths": [("tokens", 3)]}}, TypeError, "the lengths of filter are a dict"),
        ({"filter": {"lengths": {"tokens": 64}}}, TypeError, "the least and the greatest .* found 'tokens': 64"),
        ({"filter": {"lengths": {"tokens": (64, 2)}}}, ValueError, "have the least first"),
        (
            {"filter": {"lengths": {"tokens": ("64", None)}}},
            TypeError,
            "a limit in the lengths of filter is None or a number",
        ),
        ({"filter": {"lengths": {"tokens": (None, float("nan"))}}}, TypeError, "a limit in the lengths of filter"),
        ({"filter": {"lengths": {"tokens": len}}}, ValueError, r"returns bool\[167\].*returned int64\[\]"),
        ({"filter": {"lengths": {"pixels": (1, 2)}}}, LightningStreamError, "lengths 'pixels'"),
        ({"filter": {"exclude_ids": [3, 167]}}, ValueError, r"0 to 166; found 1 others, e.g. \[167\]"),
        ({"filter": {"exclude_ids": [-1]}}, ValueError, "found 1 others"),
        ({"filter": {"exclude_ids": [0.5]}}, TypeError, "whole numbers; found float64"),
        (
            {"filter": {"exclude_ids": range(160), "sample": lambda _: False}},
            ValueError,
            "of 167, exclude_ids left 7, filter=<lambda> left 0",
        ),
        ({"filter": lambda _: None}, TypeError, "returns True or False; found None"),
    ],
)
def test_a_wrong_rule_is_refused(rules: dict[str, Any], error: Any, message: str, make: Make) -> None:
    with pytest.raises(error, match=message):
        len(make(**rules))


def test_a_file_of_ids_names_its_wrong_line(make: Make, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("5\nx7\n")
    with pytest.raises(ValueError, match="found 'x7' in line 2"):
        len(make(filter={"exclude_ids": tmp_path / "ids"}))


def test_an_error_of_the_function_names_the_sample_and_its_columns(make: Make) -> None:
    with pytest.raises(KeyError) as caught:
        len(make(filter=lambda sample: sample["id"] < 20 or sample["absent"]))
    assert caught.value.__notes__ == ["While filtering sample 20.", "The sample has id, tokens."]


def test_a_function_that_ends_an_iterator_of_its_own_is_an_error_and_drops_no_samples(make: Make) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        len(make(filter=lambda sample: sample["id"] < 20 or next(iter(()))))


def test_a_run_is_not_resumed_under_another_filter(make: Make) -> None:
    loader = StreamingDataLoader(make(filter=is_odd), 10)
    next(iter(loader))
    state = loader.state_dict()
    for others in ({}, {"filter": {"exclude_ids": [1]}}):
        with pytest.raises(SnapshotMismatch, match="their filter or subset is not"):
            StreamingDataLoader(make(**others), 10).load_state_dict(state)
    keeping_the_same = {"exclude_ids": range(0, NUM_SAMPLES, 2)}
    again = StreamingDataLoader(make(filter=keeping_the_same), 10)
    again.load_state_dict(state)


def test_a_filter_is_evaluated_once_and_again_when_it_changes(make: Make, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    def calls(**rules: Any) -> int:
        notes.unlink(missing_ok=True)
        divisor = rules.pop("divisor", 3)
        excluded = rules.pop("exclude_ids", ())
        assert kept(make(filter={"sample": Noting(str(notes), divisor), "exclude_ids": excluded}, **rules)) == [
            number for number in range(NUM_SAMPLES) if number % divisor and number not in excluded
        ]
        return len(notes.read_text().split()) if notes.exists() else 0

    assert [calls(), calls()] == [NUM_SAMPLES, 0]
    assert [calls(divisor=5), calls(divisor=5), calls()] == [NUM_SAMPLES, 0, 0]
    assert calls(exclude_ids=[1, 2]) == NUM_SAMPLES - 2
    assert calls(decoders={"tokens": bytes}) == NUM_SAMPLES
    for damaged in (tmp_path / "cache").rglob("*.result"):
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert [calls(), calls()] == [NUM_SAMPLES, 0]


def lacks_tokens(sample: dict[str, Any]) -> bool:
    return "tokens" not in sample


def test_a_filter_is_evaluated_again_where_other_columns_are_read(shards: Path, tmp_path: Path) -> None:
    def kept_of(*columns: list[str] | None) -> int:
        streams = [Stream(shards, local=tmp_path / str(k), columns=names) for k, names in enumerate(columns)]
        return len(StreamingDataset(streams=streams, filter=lacks_tokens))

    assert kept_of(["id"]) == NUM_SAMPLES
    assert kept_of(["id"], None) == NUM_SAMPLES
    with pytest.raises(ValueError, match="filters must keep some samples"):
        kept_of(None)
    assert kept_of(None, ["id"]) == NUM_SAMPLES
    assert kept_of(["id"], ["id"]) == 2 * NUM_SAMPLES


def test_a_filter_of_a_table_is_evaluated_again_where_a_column_is_read_in_another_encoding(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "table").mkdir()
    pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / "table" / "rows.parquet")

    def is_late(sample: dict[str, Any]) -> bool:
        return isinstance(sample["id"], float) or sample["id"] > 1

    def kept_of(encoding: str) -> int:
        stream = Stream(tmp_path / "table", local=tmp_path / "cache", columns={"id": encoding})
        return len(StreamingDataset(streams=[stream], filter=is_late))

    assert kept_of("int") == 2
    assert kept_of("float64") == 3


def test_a_dataset_is_pickled_without_the_function_that_was_evaluated(make: Make) -> None:
    dataset = make(filter=lambda sample: sample["id"] < 5)
    assert "filter" not in repr(dataset)
    assert len(dataset) == 5
    assert kept(pickle.loads(pickle.dumps(dataset))) == [0, 1, 2, 3, 4]
    assert "5 samples in" in repr(dataset)


def test_workers_of_a_plain_loader_evaluate_once_together(make: Make, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    dataset = make(filter=Noting(str(notes)), batch_size=4, transform=only_id)
    seen = [
        number for batch in torch.utils.data.DataLoader(dataset, 4, num_workers=2) for number in batch["id"].tolist()
    ]
    assert sorted(seen) == [number for number in range(NUM_SAMPLES) if number % 3]
    assert len(notes.read_text().split()) == NUM_SAMPLES


class Runs:
    """Processes that read the same filtered dataset."""

    def __init__(self, shards: Path, folder: Path) -> None:
        self.notes = folder / "notes"
        self._given = [str(shards), str(folder / "cache"), str(self.notes)]

    def start(self, killed: str = "") -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "support.filter_runs", *self._given, killed]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def calls(self) -> Counter[int]:
        return Counter(map(int, self.notes.read_text().split()))


WANTED = [number for number in range(NUM_SAMPLES) if number % 3]


def test_processes_of_a_machine_evaluate_once_together(shards: Path, tmp_path: Path) -> None:
    runs = Runs(shards, tmp_path)
    started = [runs.start() for _ in range(2)]
    assert [json.loads(process.communicate(timeout=300)[0]) for process in started] == [WANTED, WANTED]
    assert runs.calls() == dict.fromkeys(range(NUM_SAMPLES), 1)


def test_a_killed_worker_is_replaced(shards: Path, tmp_path: Path) -> None:
    runs = Runs(shards, tmp_path)
    assert json.loads(runs.start("self").communicate(timeout=300)[0]) == WANTED
    assert (runs.calls()[150], runs.calls()[0]) == (2, 1)


def test_an_evaluation_that_was_killed_continues_from_its_last_part(shards: Path, tmp_path: Path) -> None:
    runs = Runs(shards, tmp_path)
    process = runs.start("parent")
    process.communicate(timeout=300)
    assert process.returncode == -9
    assert not [path for path in tmp_path.rglob("*.result") if path.name.count(".") == 1]
    assert json.loads(runs.start("parent").communicate(timeout=300)[0]) == WANTED
    calls = runs.calls()
    assert {calls[number] for number in range(80)} == {1}  # their parts of about 20 samples were kept
    assert calls[150] <= 2
    assert len(list(tmp_path.rglob("*.result"))) == 1


def test_a_filter_keeps_what_cannot_be_read_only_where_it_will_be_substituted(make: Make, tmp_path: Path) -> None:
    remote = write(tmp_path / "bad")
    shard = remote / "shard.00001.mds"
    content = bytearray(shard.read_bytes())
    offsets = np.frombuffer(content, np.uint32, 3, 4)
    content[offsets[1] : offsets[1] + 4] = b"\xff\xff\xff\xff"  # the second sample's first size
    shard.write_bytes(content)
    bad = int(make().samples_per_shard[0]) + 1
    with pytest.raises(FormatError, match=f"sample {bad},"):
        len(make(remote=remote, local=None, filter=lambda _: True))
    with pytest.raises(FormatError, match=f"sample {bad},"):
        kept(make(remote=remote, local=None, filter={"exclude_ids": [0]}))
    assert bad not in kept(make(remote=remote, local=None, filter={"sample": lambda _: True, "exclude_ids": [bad]}))
    quarantine = tmp_path / "quarantine"
    dataset = make(
        remote=remote,
        local=None,
        filter={"sample": lambda _: True, "exclude_ids": [0]},
        on_bad={"sample": "substitute", "quarantine": quarantine},
    )
    assert dataset.size == NUM_SAMPLES - 1
    assert sum(len(batch["id"]) for batch in StreamingDataLoader(dataset, 16)) == NUM_SAMPLES - 1
    assert [json.loads(line)["sample"] for line in quarantine.read_text().splitlines()] == [bad]


def test_a_sample_that_is_readable_at_the_second_attempt_is_filtered_as_any_other(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failed = SampleReader.sample, set()

    def flaky(reader: SampleReader, sample_id: int) -> dict[str, Any]:
        if sample_id in (4, 5) and sample_id not in failed:
            failed.add(sample_id)
            raise FormatError("a network gave half of it")
        return read(reader, sample_id)

    monkeypatch.setattr(SampleReader, "sample", flaky)
    assert kept(make(filter=is_odd)) == list(range(1, NUM_SAMPLES, 2))
    assert failed == {4, 5}


def test_a_function_that_cannot_be_sent_is_evaluated_in_this_process(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(filters, "_MIN_SAMPLES", 40)
    monkeypatch.setattr(filters, "_ALONE_S", 0)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert kept(make(filter=lambda sample: sample["id"] % 2 == 1)) == list(range(1, NUM_SAMPLES, 2))
    assert "The filter is evaluated in one process" in caplog.text


def test_a_script_that_runs_again_in_a_worker_is_refused_and_does_not_wait(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_PARENT", "1")
    with pytest.raises(RuntimeError, match=r"the filter ran there again.*__main__"):
        len(make(filter=is_odd))


def test_parts_that_take_a_moment_are_evaluated_in_this_process(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(filters, "_MIN_SAMPLES", 40)
    monkeypatch.setattr(filters, "run_partitions", lambda _, missing, *__: dict.fromkeys(missing))
    assert kept(make(filter=Noting(str(tmp_path / "notes")))) == WANTED
    assert "filtering: 4 of 4 partitions, 167 rows" in capsys.readouterr().err


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "/mine"), OSError(28, "No space left")])
def test_an_error_of_the_function_is_not_taken_for_one_of_the_cache(tmp_path: Path, error: OSError) -> None:
    def refuse(sample: dict[str, Any]) -> bool:
        raise error

    write(tmp_path / "d")
    with pytest.raises(type(error), match=str(error.strerror)) as caught:
        len(StreamingDataset(remote=str(tmp_path / "d"), local=str(tmp_path / "c"), filter=refuse, batch_size=4))
    assert caught.value is error
