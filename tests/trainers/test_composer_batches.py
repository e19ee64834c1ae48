"""Batches as Composer counts and cuts them; needs torch alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the trainers need torch: uv sync")

import numpy as np  # noqa: E402

from lightning_stream import MDSWriter, Packing, StreamingDataLoader, StreamingDataset, World  # noqa: E402
from lightning_stream.loading.packing import by_row, collate_rows  # noqa: E402
from lightning_stream.trainers.composer.counting import BatchCounter, length_of  # noqa: E402
from lightning_stream.trainers.tracker import PositionTracker  # noqa: E402

IDS = torch.arange(6)


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (IDS, 6),
        (IDS.numpy(), 6),
        ({"id": IDS, "text": list("abcdef")}, 6),
        ({"text": list("abcdef"), "n": 3}, 6),
        ({"id": IDS, "scalar": torch.tensor(1.0), "names": ["x", "y"], "flag": None}, 6),
        ({"image": [np.zeros((n, 2)) for n in range(6)], "label": IDS}, 6),
        ({"inner": {"id": IDS}}, 6),
        ((IDS, list("abcdef")), 6),
        ([IDS, {"y": IDS}], 6),
        ([{"id": 1}, {"id": 2}], 2),
        (["a", "b", "c"], 3),
        (object(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_length_of_a_batch_is_that_of_its_columns(batch: Any, length: int | None) -> None:
    assert length_of(batch) == length


def test_columns_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="columns of \\[5, 6\\] rows"):
        length_of({"a": IDS, "b": IDS[:5]})


def _counter(folder: Path, num_samples: int, world: World, global_batch_size: int = 16) -> Any:
    if not (folder / "index.json").exists():
        with MDSWriter(out=str(folder), columns={"id": "int", "input_ids": "ndarray:int64:3"}) as writer:
            for number in range(num_samples):
                writer.write({"id": number, "input_ids": np.array([number, 0, 0])})
    loader = StreamingDataLoader(StreamingDataset(remote=folder), global_batch_size=global_batch_size, world=world)
    tracker = PositionTracker(loader)
    tracker.clock.padding = False  # as Composer's
    return tracker, BatchCounter(loader, padding_id=0)


def test_filler_has_no_weight_in_any_micro_batch_of_any_rank(tmp_path: Path) -> None:
    """A rest of 7 over 4 ranks: two rows each, the last rank's second being filler."""
    trained: list[int] = []
    for rank in range(4):
        loader, counter = _counter(tmp_path, 23, World(rank, 4, 4))
        *_, batch = loader
        whole = counter.num_samples(batch)
        for size in (1, 2, 4):
            pieces = counter.split(batch, size)
            assert len(pieces) == (2 if size == 1 else 1)
            assert all(len(piece["id"]) <= size for piece in pieces)
            counts = [counter.num_samples(piece) for piece in pieces]
            assert sum(counts) == whole
            assert counter.num_samples(batch) == whole  # the whole batch is at hand again
        trained += [int(piece["id"][0]) for piece in counter.split(batch, 1) if counter.num_samples(piece)]
    assert sorted(trained) == list(range(16, 23))


def test_tokens_leave_padding_and_filler_out(tmp_path: Path) -> None:
    total = 0
    for rank in range(4):
        loader, counter = _counter(tmp_path, 23, World(rank, 4, 4))
        for batch in loader:
            count = counter.num_tokens(batch)
            assert count == sum(counter.num_tokens(piece) for piece in counter.split(batch, 1))
            total += count
    assert total == 22  # of 23 samples with one token each, one has the id of padding


def test_lists_of_tokens_count_too(tmp_path: Path) -> None:
    _, counter = _counter(tmp_path, 23, World())
    assert counter.num_tokens({"input_ids": [np.array([1, 2]), np.array([3]), [4, 0]]}) == 4
    assert counter.num_tokens({"x": IDS}) == counter.num_tokens(IDS) == 0


def test_ranks_that_share_samples_count_their_part_of_them(tmp_path: Path) -> None:
    counts: list[float] = []
    tokens: list[dict[str, int]] = []
    for rank in range(4):
        loader, counter = _counter(tmp_path, 16, World(rank, 4, 4, replication=2))
        batch = next(iter(loader))
        counts.append(counter.num_samples(batch))
        tokens.append(counter.num_tokens(batch))
    assert counts == [4.0] * 4
    assert all(isinstance(count, float) for count in counts)  # all ranks must add up the same type
    assert sum(count["total"] for count in tokens) == 15
    assert [count["loss_generating"] for count in tokens] == [7, 7, 8, 8]


def test_a_micro_batch_keeps_the_batchs_structure(tmp_path: Path) -> None:
    loader, counter = _counter(tmp_path, 16, World(), global_batch_size=6)
    next(iter(loader))
    batch = {"id": IDS, "text": list("abcdef"), "scale": 2.0, "names": ["x", "y"], "in": {"y": IDS.numpy()}}
    first, second = counter.split(batch, 4)
    assert first["id"].tolist() == [0, 1, 2, 3]
    assert second["text"] == ["e", "f"]
    assert second["in"]["y"].tolist() == [4, 5]
    assert (second["scale"], second["names"]) == (2.0, ["x", "y"])
    pairs = counter.split((IDS, list("abcdef")), 3)
    assert isinstance(pairs[1], tuple)
    assert pairs[1][1] == ["d", "e", "f"]
    assert [piece.tolist() for piece in counter.split(IDS, 5)] == [[0, 1, 2, 3, 4], [5]]
    assert counter.split(IDS, 6)[0] is IDS


def test_batches_that_a_transform_changed_are_cut_by_what_they_have(tmp_path: Path) -> None:
    loader, counter = _counter(tmp_path, 16, World())
    next(iter(loader))
    assert [len(piece) for piece in counter.split(torch.arange(40), 16)] == [16, 16, 8]
    assert counter.num_samples(torch.arange(40)) == 40


def test_batches_of_unknown_kind_are_passed_on_whole_or_refused(tmp_path: Path) -> None:
    loader, counter = _counter(tmp_path, 16, World())
    next(iter(loader))
    unknown = object()
    assert counter.split(unknown, 16) == [unknown]
    assert counter.num_samples(unknown) == 16
    with pytest.raises(TypeError, match="Pass split_batch= to data_spec"):
        counter.split(unknown, 8)
    with pytest.raises(ValueError, match=r"device_train_microbatch_size is 0\.5"):
        counter.split(IDS, 0.5)


def test_uneven_shares_are_cut_into_the_same_number_of_micro_batches(tmp_path: Path) -> None:
    sizes = []
    for rank in range(2):
        tracker, _ = _counter(tmp_path, 15, World(rank, 2, 2), global_batch_size=8)
        loader = tracker.loader
        exact = StreamingDataLoader(loader.dataset, global_batch_size=8, evaluation=True, world=replace(loader.world))
        counter = BatchCounter(exact)
        *_, batch = exact
        sizes.append([len(piece["id"]) for piece in counter.split(batch, 2)])
    assert sorted(map(sum, sizes)) == [3, 4]
    assert len(sizes[0]) == len(sizes[1])
    assert max(map(max, sizes)) <= 2


def _expect_equal(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            _expect_equal(found[name], value)
        else:
            assert torch.equal(found[name], value), name


def test_a_batch_of_packed_samples_is_counted_and_cut_by_its_rows(tmp_path: Path) -> None:
    columns = {"tokens": "ndarray:int32", "length": "int"}
    with MDSWriter(out=str(tmp_path), columns=columns, lengths={"tokens": len}) as writer:
        for number in range(40):
            tokens = np.full(1 + number % 7, number, np.int32)
            writer.write({"tokens": tokens, "length": len(tokens) + 2})
    pack = Packing(lengths="tokens + 2", row_length=16, window=20)
    loader = StreamingDataLoader(StreamingDataset(local=tmp_path, pack=pack), global_batch_size=4)
    counter = BatchCounter(loader)
    for batch in loader:
        rows = (~loader.last_batch.filler).sum()
        assert counter.num_samples(batch) == rows
        assert counter.num_tokens(batch) == len(batch["position_ids"])
        assert counter.split(batch, 4) == [batch]
        pieces = list(counter.split(batch, 3))
        samples = np.split(batch["tokens"].numpy(), batch["splits"]["tokens"][1:-1].tolist())
        wanted = by_row([{"tokens": tokens, "length": len(tokens) + 2} for tokens in samples], loader.last_batch.rows)
        assert sum(map(counter.num_samples, pieces)) == rows
        for piece, part in zip(pieces, (slice(0, 3), slice(3, 4)), strict=True):
            _expect_equal(piece, collate_rows(wanted[part], loader.last_batch.rows.take(np.arange(4)[part])))
