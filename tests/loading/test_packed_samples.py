"""Whole samples of any columns, packed into rows by an expression of their lengths."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stream import MDSWriter, Packing, StatefulDataLoader, StreamingDataLoader, StreamingDataset
from lightning_stream.dataset import source_of
from lightning_stream.loading.packing import take_rows

LENGTH, COUNT, PATCHES = 128, 400, 20
EXPRESSION = f"tokens + {PATCHES} * images"
PACK = Packing(lengths=EXPRESSION, row_length=LENGTH, window=50)
COLUMNS = {"tokens": "ndarray:uint16", "images": "int", "pixels": "ndarray:uint8", "name": "str"}


def samples() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    found = []
    for number in range(COUNT):
        images = int(rng.integers(0, 4))
        tokens = np.full(rng.integers(1, 60), number, np.uint16)
        pixels = np.full((images, 2, 3), number % 256, np.uint8)
        found.append({"tokens": tokens, "images": images, "pixels": pixels, "name": f"{number}"})
    return found


def length_of(number: int) -> int:
    return len(SAMPLES[number]["tokens"]) + PATCHES * SAMPLES[number]["images"]


SAMPLES = samples()


def write(folder: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    lengths = {"tokens": len, "images": int}
    with MDSWriter(out=str(folder), columns=COLUMNS, lengths=lengths, size_limit=1 << 13) as writer:
        for row in SAMPLES if rows is None else rows:
            writer.write(row)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("samples"))


def loader_of(folder: Path, size: int = 12, pack: Packing = PACK, loader: Any = None, **given: Any) -> Any:
    return StreamingDataLoader(
        StreamingDataset(local=folder, shuffle=True, pack=pack, **given), global_batch_size=size, **(loader or {})
    )


def rows_of(batch: dict[str, Any]) -> list[tuple[str, ...]]:
    edges = batch["row_splits"].tolist()
    return [tuple(batch["name"][a:b]) for a, b in pairwise(edges)]


def test_a_batch_has_the_columns_of_its_samples_and_their_places(folder: Path) -> None:
    loader = loader_of(folder, size=1, loader={"tail": "drop"})
    names: Counter[str] = Counter()
    for batch in loader:
        numbers = [*map(int, batch["name"])]
        names.update(batch["name"])
        lengths = [length_of(number) for number in numbers]
        assert batch["cu_seqlens"].tolist() == [0, *np.cumsum(lengths).tolist()]
        assert batch["max_seqlen"] == max(lengths)
        assert batch["num_tokens"].tolist() == [sum(lengths)]
        assert sum(lengths) <= LENGTH
        assert batch["position_ids"].tolist() == [at for length in lengths for at in range(length)]
        assert batch["document_ids"].tolist() == [k for k, length in enumerate(lengths) for _ in range(length)]
        for name in ("tokens", "pixels"):
            wanted = [SAMPLES[number][name] for number in numbers]
            assert batch[name].numpy().tolist() == np.concatenate(wanted).tolist()
            assert batch["splits"][name].tolist() == [0, *np.cumsum([*map(len, wanted)]).tolist()]
        assert batch["images"].tolist() == [SAMPLES[number]["images"] for number in numbers]
        kinds = {value.dtype for name, value in batch.items() if name not in ("images", "pixels", "name", "splits")}
        assert kinds == {torch.int32}
    assert names == Counter(f"{number}" for number in range(COUNT))


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "workers": "threads"}])
def test_workers_make_the_same_batches(folder: Path, options: dict[str, Any]) -> None:
    wanted = [rows_of(batch) for batch in loader_of(folder)]
    assert [rows_of(batch) for batch in loader_of(folder, loader=options)] == wanted


def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"name": sample["name"], "drawn": float(rng.random())}


def names_and_numbers(rows: list[list[dict[str, Any]]]) -> list[list[tuple[str, float]]]:
    return [[(sample["name"], sample["drawn"]) for sample in row] for row in rows]


def test_a_transform_gets_samples_and_a_collate_function_the_samples_of_each_row(folder: Path) -> None:
    def drawn(rank: int, ranks: int) -> list[tuple[str, float]]:
        options = {"collate_fn": names_and_numbers, "tail": "drop"}
        loader = loader_of(folder, transform=draw, world=(rank, ranks), loader=options)
        return [pair for rows in loader for row in rows for pair in row]

    alone = dict(drawn(0, 1))
    assert len(set(alone.values())) == len(alone) > COUNT // 2, "each sample of a row draws its own numbers"
    assert dict(drawn(0, 2)) | dict(drawn(1, 2)) == alone
    rows = next(iter(loader_of(folder, loader={"collate_fn": lambda rows: rows})))
    assert len(rows) == 12
    assert max(map(len, rows)) > 1


def test_the_plan_decodes_nothing_and_fetches_no_shard(folder: Path, tmp_path: Path) -> None:
    decoded: Counter[str] = Counter()

    def decode(data: bytes) -> str:
        decoded.update("n")
        return data.decode()

    options = {"remote": f"file://{folder}", "decoders": {"name": decode}, "balance": "tokens ** 2 + 40 * images"}
    dataset = StreamingDataset(local=tmp_path, shuffle=True, pack=PACK, **options)
    loader = StreamingDataLoader(dataset, global_batch_size=12)
    loader.check()
    assert len(loader) > 5
    assert "rows" in str(loader.describe(count_rows=True))
    assert len([*loader.micro_batches_from(loader.position).walk()]) == len(loader)
    assert not decoded
    assert not [*tmp_path.rglob("*.mds")]
    names = next(iter(loader))["name"]
    assert decoded["n"] == len(names) > 12


@pytest.mark.parametrize("long_documents", [None, "error"])
def test_samples_that_no_row_can_have_are_an_error(folder: Path, long_documents: Any) -> None:
    longest = max(map(length_of, range(COUNT)))
    fits = Packing(lengths=EXPRESSION, row_length=longest, long_documents=long_documents)
    assert next(iter(loader_of(folder, pack=fits)))
    pack = Packing(lengths=EXPRESSION, row_length=longest - 1, long_documents=long_documents)
    with pytest.raises(ValueError, match=rf"of 400 samples \d+ are longer than a row .row_length={longest - 1}."):
        len(loader_of(folder, pack=pack))


def test_dropped_samples_are_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    num_long = sum(length_of(number) > 80 for number in range(COUNT))
    pack = Packing(lengths=EXPRESSION, row_length=80, long_documents="drop")
    loader = loader_of(folder, size=1, pack=pack, loader={"tail": "drop"})
    with caplog.at_level(logging.WARNING):
        names = sorted(int(name) for batch in loader for name in batch["name"])
    assert f"{num_long} of 400 samples are longer than a row" in caplog.text
    assert names == [number for number in range(COUNT) if length_of(number) <= 80]
    assert f"{num_long} long" in str(loader.describe())


def test_a_sample_without_length_is_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match="length 0, and so in no row"):
        len(loader_of(folder, pack=Packing(lengths="576 * images", row_length=4000)))


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"lengths": EXPRESSION, "long_documents": "split"}, "'split' would cut samples"),
        ({"lengths": EXPRESSION, "long_documents": "truncate"}, "'truncate' would cut samples"),
        ({"lengths": EXPRESSION, "labels": True}, "labels cannot be given for whole samples"),
        ({"lengths": EXPRESSION, "columns": ["mask"], "pad_token": 1}, "columns, pad_token cannot be given"),
        ({"lengths": "tokens + len"}, None),
        ({"lengths": "tokens + open('x')"}, "open"),
        ({"lengths": "tokens / 2"}, "it has 'tokens / 2'"),
        ({"column": None}, "lengths must be a string, not None"),
        ({"long_documents": "cut"}, "one of split, truncate, drop, error"),
    ],
)
def test_mistakes_get_a_clear_error(given: dict[str, Any], cause: str | None) -> None:
    if cause is None:  # a name of lengths, which the data must have
        assert Packing(**given).is_whole
        return
    with pytest.raises(ValueError, match=cause):
        Packing(**given)


def test_columns_that_cannot_be_joined_need_a_collate_function(tmp_path: Path) -> None:
    rows = [{**SAMPLES[0], "pixels": np.zeros((1, 2 + number % 2), np.uint8), "images": 1} for number in range(40)]
    pack = Packing(lengths=EXPRESSION, row_length=1000)
    with pytest.raises(ValueError, match="the arrays of column 'pixels' must have one dtype"):
        next(iter(loader_of(write(tmp_path, rows), pack=pack, size=1)))
    batch = next(iter(loader_of(tmp_path, pack=pack, size=1, loader={"collate_fn": lambda rows: rows})))
    assert len(batch[0]) > 1


@pytest.mark.parametrize("name", ["num_tokens", "position_ids", "document_ids"])
@pytest.mark.parametrize("is_array", [False, True])
def test_a_column_that_replaces_a_part_of_the_layout_is_cut_as_a_column(name: str, is_array: bool) -> None:
    """Composer cuts batches into micro-batches."""
    rows = [{"x": np.arange(n), name: np.full(n, 100 + n) if is_array else 100 + n} for n in (3, 4, 5, 6, 7)]
    loader = StatefulDataLoader(
        rows, 3, lengths=[3, 4, 5, 6, 7], pack=Packing(column=None, lengths="tokens", row_length=9)
    )
    batch = next(iter(loader))
    for begin in range(3):
        first, last = batch["row_splits"][begin : begin + 2].tolist()
        part = take_rows(batch, slice(begin, begin + 1))
        edges = batch["splits"].get(name, torch.arange(6))
        assert part[name].tolist() == batch[name][int(edges[first]) : int(edges[last])].tolist()


@pytest.mark.parametrize("name", ["splits", "row_splits", "cu_seqlens", "max_seqlen"])
def test_a_column_that_would_hide_where_the_samples_are_is_an_error(name: str) -> None:
    loader = StatefulDataLoader(
        [{"x": np.arange(3), name: 1}], lengths=[3], pack=Packing(column=None, lengths="tokens")
    )
    with pytest.raises(ValueError, match=rf"found \['{name}'\]. Rename them in a transform"):
        next(iter(loader))


def test_a_length_by_its_name_packs_whole_samples_too(folder: Path) -> None:
    pack = Packing(column=None, lengths="tokens", row_length=64, window=50)
    batch = next(iter(loader_of(folder, pack=pack)))
    assert batch["splits"]["tokens"].tolist() == batch["cu_seqlens"].tolist()
    tokens = Packing(lengths="tokens", row_length=64)
    assert (tokens.is_whole, tokens.long_documents) == (False, "split")


def test_a_state_does_not_depend_on_how_the_lengths_are_written(folder: Path) -> None:
    loader = loader_of(folder)
    batches = iter(loader)
    rows_of(next(batches))
    state, wanted = loader.state_dict(), rows_of(next(batches))
    other = loader_of(folder, pack=Packing(lengths=f"images * {PATCHES} + tokens", row_length=LENGTH, window=50))
    other.load_state_dict(state)
    assert rows_of(next(iter(other))) == wanted


@pytest.mark.parametrize("pack", [PACK, Packing(row_length=64, window=50)])
def test_shares_are_balanced_by_an_expression(folder: Path, pack: Packing) -> None:
    def ratio(balance: str | None) -> float:
        options = {"balance": balance, "num_canonical_nodes": 1}
        ranks = [loader_of(folder, 32, pack, world=(rank, 4), **options) for rank in range(4)]
        reader = source_of(ranks[0].streaming).reader
        plans = [[*loader.micro_batches_from(loader.position).walk()] for loader in ranks]
        work = np.array([[reader.amounts(cost, batch.rows.ids).sum() for batch in plan[:-1]] for plan in plans])
        return float((work.max(axis=0) / work.mean(axis=0)).mean())

    cost = "images ** 2 + 1"
    assert ratio(cost) < 1.03 < ratio(None)


def test_a_row_with_a_sample_that_cannot_be_read_is_replaced_as_a_whole(folder: Path, tmp_path: Path) -> None:
    def names(rank: int, ranks: int) -> list[str]:
        options = {"on_bad": {"sample": "substitute", "quarantine": tmp_path / "bad.jsonl"}}
        loader = loader_of(folder, world=(rank, ranks), loader={"tail": "drop"}, **options)
        source_of(loader.streaming).bad_data.samples.update(dict.fromkeys((7, 50), "it is damaged"))
        return [name for batch in loader for name in batch["name"]]

    alone = names(0, 1)
    assert not {"7", "50"} & {*alone}
    assert sorted(names(0, 2) + names(1, 2)) == sorted(alone)


class Chats:
    """A dataset of the user's."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> dict[str, Any]:
        return SAMPLES[number]


def test_samples_of_any_dataset_are_packed() -> None:
    lengths = {"tokens": [len(one["tokens"]) for one in SAMPLES], "images": [one["images"] for one in SAMPLES]}

    def loader(rank: int = 0, ranks: int = 1) -> Any:
        options: dict[str, Any] = {"shuffle": True, "lengths": lengths, "pack": PACK, "world": (rank, ranks)}
        return StatefulDataLoader(Chats(), 12 // ranks, tail="drop", **options)

    whole = [sorted(rows_of(batch)) for batch in loader()]
    assert len({name for rows in whole for row in rows for name in row}) > COUNT // 2
    alone, pair = loader(), [loader(rank, 2) for rank in range(2)]
    next(iter(alone))
    for one in pair:
        one.load_state_dict(alone.state_dict())
    rest = [sorted(rows_of(a) + rows_of(b)) for a, b in zip(*pair, strict=True)]
    assert rest == whole[1:]
