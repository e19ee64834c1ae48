"""Batches of packed documents: what is in them, and that they are the same in every world and after every resume."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.orders import pack_window
from torch.utils.data import DataLoader

from lightning_stream import MDSWriter, Packing, StreamingDataLoader, StreamingDataset
from lightning_stream.errors import FormatError, StateError
from lightning_stream.loading.packing import read_rows
from lightning_stream.order import micro_batches
from lightning_stream.order import rows as packed
from lightning_stream.order.packing import PackedWindow, RowPacking

LENGTH = 64


def documents(count=400, seed=0, most=150):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 1000, size).astype(np.int32) for size in rng.integers(1, most, count)]


def write(folder, docs, encoding="ndarray:int32", **given):
    columns = {"tokens": encoding, "mask": "ndarray:int8", "name": "str"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 13, lengths={"tokens": len}, **given) as writer:
        for number, tokens in enumerate(docs):
            writer.write({"tokens": tokens, "mask": (tokens % 2).astype(np.int8), "name": f"{number}"})
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("packed"), documents())


def dataset_of(folder, *, pack=None, **given):
    pack = pack or Packing(row_length=LENGTH, window=50)
    return StreamingDataset(local=folder, shuffle=True, pack=pack, **given)


def loader_of(folder, *, world=(0, 1), pack=None, size=12, **given):
    return StreamingDataLoader(dataset_of(folder, world=world, pack=pack), global_batch_size=size, **given)


def documents_in(batch):
    """The documents of a batch: (row, tokens) of each, cut where `document_ids` changes, without padding."""
    found = []
    for row, (tokens, ids, count) in enumerate(
        zip(batch["input_ids"], batch["document_ids"], batch["num_tokens"], strict=True)
    ):
        edges = [0, *(np.flatnonzero(np.diff(ids[:count])) + 1).tolist(), int(count)]
        found += [(row, tokens[a:b].tolist()) for a, b in pairwise(edges)]
    return found


def rows_in(batches):
    return sorted(tuple(row.tolist()) for batch in batches for row in batch["input_ids"])


def test_every_document_comes_once_in_pieces_of_a_row(folder):
    loader = loader_of(folder, tail="drop", size=1)
    pieces = sorted(tokens for batch in loader for _, tokens in documents_in(batch))
    wanted = [doc[at : at + LENGTH].tolist() for doc in documents() for at in range(0, len(doc), LENGTH)]
    assert pieces == sorted(wanted)


def test_a_batch_has_the_arrays_that_its_documents_give(folder):
    pack = Packing(row_length=LENGTH, window=50, columns=["mask"], labels=True, cu_seqlens=True, pad_token=7)
    batch = next(iter(loader_of(folder, pack=pack)))
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in batch.items() if name != "cu_seqlens"}
    square = (12, LENGTH)
    assert shapes == {
        "input_ids": (square, torch.int32), "mask": (square, torch.int8), "position_ids": (square, torch.int32),
        "document_ids": (square, torch.int32), "num_tokens": ((12,), torch.int32), "labels": (square, torch.int64),
        "max_seqlen": ((), torch.int32),
    }  # fmt: skip
    for row in range(12):
        count, ids = int(batch["num_tokens"][row]), batch["document_ids"][row]
        tokens, labels = batch["input_ids"][row], batch["labels"][row]
        assert (tokens[count:] == 7).all()
        assert (batch["mask"][row, :count] == tokens[:count] % 2).all()
        assert (batch["mask"][row, count:] == 0).all()
        starts = torch.cat([torch.tensor([True]), ids[1:] != ids[:-1]])
        begins = torch.where(starts, torch.arange(LENGTH), 0).cummax(0).values
        assert (batch["position_ids"][row] == torch.arange(LENGTH) - begins).all()
        is_masked = starts | (torch.arange(LENGTH) >= count)
        assert (labels == torch.where(is_masked, -100, tokens.long())).all()
        assert ids.tolist() == sorted(ids.tolist())
        assert len(set(ids.tolist())) == int(ids[-1]) + 1
    flat = (batch["document_ids"] + 1000 * torch.arange(12)[:, None]).reshape(-1)
    edges = torch.cat([torch.tensor([0]), torch.nonzero(flat.diff())[:, 0] + 1, torch.tensor([len(flat)])])
    assert batch["cu_seqlens"].tolist() == edges.tolist()
    assert batch["cu_seqlens"].dtype == torch.int32
    assert int(batch["max_seqlen"]) == int(edges.diff().max())


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (3, 2), (4, 1), (6, 0)])
def test_global_batches_are_the_same_in_every_world(folder, ranks, workers):
    whole = list(loader_of(folder, tail="drop"))
    shares = [list(loader_of(folder, tail="drop", world=(rank, ranks), num_workers=workers)) for rank in range(ranks)]
    assert {len(each) for each in shares} == {len(whole)}
    for step, batch in enumerate(whole):
        assert rows_in([each[step] for each in shares]) == rows_in([batch])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stop", [1, 9, 40])
def test_a_run_resumes_on_other_devices_at_the_next_row(folder, ranks, stop):
    whole = list(loader_of(folder))
    loader = loader_of(folder)
    batches = iter(loader)
    for _ in range(stop):
        next(batches)
    state = json.dumps(loader.state_dict())
    batches.close()
    resumed = [loader_of(folder, world=(rank, ranks)) for rank in range(ranks)]
    for each in resumed:
        each.load_state_dict(json.loads(state))
    shares = [list(each) for each in resumed]
    assert {len(each) for each in shares} == {len(whole) - stop}
    for step in range(len(whole) - stop - 1):  # the last has padding, another number of it in each world
        assert rows_in([each[step] for each in shares]) == rows_in([whole[stop + step]])


def test_epochs_have_other_rows_and_states_between_them(folder):
    loader = loader_of(folder)
    first, second = list(loader), list(loader)
    assert rows_in(first[:-1]) != rows_in(second[:-1])
    again = loader_of(folder)
    list(again)
    resumed = loader_of(folder)
    resumed.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert rows_in(resumed) == rows_in(second)


def test_a_loader_has_the_length_of_the_epoch_that_it_is_in(folder):
    loader = loader_of(folder)
    lengths = [loader.num_batches(epoch) for epoch in range(6)]
    for length in lengths:
        assert len(loader) == length
        assert sum(1 for _ in loader) == length
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "workers": "threads"}])
def test_the_first_batch_and_a_resume_plan_only_the_windows_they_need(tmp_path, monkeypatch, workers):
    docs, log = documents(3000, most=9), tmp_path / "planned"

    class Logged(PackedWindow):
        def __init__(self, *given):
            super().__init__(*given)
            with log.open("ab", buffering=0) as file:  # worker processes append to it too
                file.write(b".")

    monkeypatch.setattr(packed, "PackedWindow", Logged)
    monkeypatch.setattr(micro_batches, "_PLANNED_SAMPLES", 64)  # in proportion to the small data
    folder = write(tmp_path / "documents", docs)
    pack = Packing(row_length=LENGTH, window=10)  # 300 windows

    def planned_after(steps, state=None):
        log.write_bytes(b"")
        dataset = dataset_of(folder, pack=pack, predownload=4, num_canonical_nodes=1)
        loader = StreamingDataLoader(dataset, global_batch_size=4, **workers)
        if state is not None:
            loader.load_state_dict(state)
            assert loader.warm(1)
        batches = iter(loader)
        for _ in range(steps):
            next(batches)
        state = loader.state_dict()
        batches.close()
        return len(log.read_bytes()), state

    begin, state = planned_after(3)
    again, _ = planned_after(1, state)
    assert 0 < begin < 200
    assert 0 < again < 200


def test_an_evaluation_has_every_row_once_on_any_number_of_devices(folder):
    whole = rows_in(loader_of(folder, evaluation=True))
    loaders = [loader_of(folder, evaluation=True, world=(rank, 3)) for rank in range(3)]
    assert sorted(row for each in loaders for row in rows_in(each)) == whole


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_persistent_workers_continue_where_a_state_points(folder, method):
    given = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    whole = list(loader_of(folder))
    loader = loader_of(folder, **given)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    batches.close()
    other = loader_of(folder, **given)
    next(iter(other))
    other.load_state_dict(state)
    assert rows_in(other) == rows_in(whole[3:])
    other.close()
    loader.close()


def test_a_plain_loop_and_a_plain_dataloader_get_rows(folder):
    whole = rows_in(loader_of(folder, tail="exact"))
    rows = list(dataset_of(folder, num_canonical_nodes=12))
    assert sorted(tuple(row["input_ids"].tolist()) for row in rows) == whole
    dataset = dataset_of(folder, batch_size=4, num_canonical_nodes=12)
    batches = list(DataLoader(dataset, batch_size=4, num_workers=2))
    assert set(rows_in(batches)) == set(whole)


def test_a_transform_and_a_collate_function_get_rows(folder):
    def transform(row, rng):
        return {"tokens": torch.as_tensor(row["input_ids"]), "drawn": float(rng.random())}

    def collate(rows):
        return torch.stack([row["tokens"] for row in rows]), [row["drawn"] for row in rows]

    pack = Packing(row_length=LENGTH, window=50)
    plain = list(loader_of(folder, tail="drop"))

    def batches(rank=0, ranks=1):
        dataset = StreamingDataset(local=folder, shuffle=True, pack=pack, transform=transform, world=(rank, ranks))
        return list(StreamingDataLoader(dataset, global_batch_size=12, tail="drop", collate_fn=collate))

    found = batches()
    assert [sorted(map(tuple, tokens.tolist())) for tokens, _ in found] == [rows_in([batch]) for batch in plain]
    drawn = {tuple(row.tolist()): x for tokens, xs in found for row, x in zip(tokens, xs, strict=True)}
    shared = {
        tuple(row.tolist()): x
        for r in (0, 1)
        for tokens, xs in batches(r, 2)
        for row, x in zip(tokens, xs, strict=True)
    }
    assert shared == drawn


@pytest.mark.parametrize(("policy", "wanted"), [("truncate", [64, 10]), ("drop", [10]), ("split", [64, 36, 10])])
def test_long_documents_are_split_truncated_or_dropped(tmp_path, policy, wanted):
    write(tmp_path, [np.arange(1, 101, dtype=np.int32), np.arange(1, 11, dtype=np.int32)])
    pack = Packing(row_length=LENGTH, long_documents=policy)
    batches = loader_of(str(tmp_path), pack=pack, size=1, tail="drop")
    assert sorted((len(tokens) for b in batches for _, tokens in documents_in(b)), reverse=True) == wanted


@pytest.mark.parametrize(("encoding", "dtype"), [("ndarray", np.uint16), ("ndarray:uint16", np.uint16)])
def test_unsigned_tokens_become_signed_ones(tmp_path, encoding, dtype):
    docs = [one.astype(dtype) for one in documents(60)]
    folder = write(tmp_path, docs, encoding)
    batches = list(loader_of(folder, tail="drop", size=1))
    assert batches[0]["input_ids"].dtype == torch.int32
    assert sum(int(batch["input_ids"].sum()) for batch in batches) == sum(int(one.sum()) for one in docs)


def test_compressed_shards_and_shards_that_are_not_open_give_the_same_rows(folder, tmp_path):
    packed = write(tmp_path / "zstd", documents(), compression="zstd")
    remote = StreamingDataset(
        remote=packed, local=str(tmp_path / "cache"), shuffle=True, pack=Packing(row_length=LENGTH, window=50)
    )
    assert rows_in(StreamingDataLoader(remote, global_batch_size=12)) == rows_in(loader_of(folder))


def test_a_row_with_a_document_that_cannot_be_read_is_replaced_as_a_whole(tmp_path):
    folder = write(tmp_path / "data", documents(), hashes=[])
    before = list(loader_of(folder, tail="drop"))
    # A letter in the place of the number of dimensions of one document.
    dataset = dataset_of(folder)
    shard, within = dataset.spanner[17]
    path = tmp_path / "data" / dataset.shards[shard].basename
    content = bytearray(path.read_bytes())
    offset = int(np.frombuffer(content, "<u4", within + 1, 4)[within])
    start = offset + 12 + int(np.frombuffer(content, "<u4", 1, offset)[0])  # the columns are mask, name, tokens
    start += int(np.frombuffer(content, "<u4", 1, offset + 4)[0])
    content[start] = 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(FormatError, match=r"sample 17"):
        list(loader_of(folder, tail="drop"))

    def batches(rank=0, ranks=1):
        dataset = dataset_of(
            folder, world=(rank, ranks), on_bad={"sample": "substitute", "quarantine": tmp_path / "bad"}
        )
        loader = StreamingDataLoader(dataset, global_batch_size=12, tail="drop")
        return list(loader), loader.num_substituted

    after, num_substituted = batches()
    differing = [(a, b) for a, b in zip(before, after, strict=True) if not torch.equal(a["input_ids"], b["input_ids"])]
    assert 0 < len(differing) <= num_substituted <= 3
    known = set(rows_in(before))
    assert all(row in known for _, batch in differing for row in rows_in([batch]))
    shares = [batches(rank, 3)[0] for rank in range(3)]
    assert [rows_in(each) for each in zip(*shares, strict=True)] == [rows_in([batch]) for batch in after]
    line = json.loads((tmp_path / "bad").read_text().splitlines()[0])
    assert (line["sample"], line["delivered"]) == (17, None)


def test_only_the_columns_of_rows_decide_what_is_bad_whether_or_not_shards_are_open(tmp_path):
    folder = tmp_path / "data"
    columns = {"tokens": "ndarray:int32", "note": "json"}
    with MDSWriter(out=folder, columns=columns, lengths={"tokens": len}, hashes=[], size_limit=1000) as writer:
        for k in range(99):
            writer.write({"tokens": np.arange(1 + k % 20, dtype=np.int32), "note": {"id": f"#{k:02}"}})
    before = rows_in(loader_of(folder, size=3, tail="drop"))
    for path in folder.glob("shard.*"):
        path.write_bytes(path.read_bytes().replace(b'"#', b'"\xff'))
    with pytest.raises(FormatError, match="note"):
        dataset_of(folder)[3]
    for on_bad in ("raise", "substitute"):
        dataset = dataset_of(folder, on_bad=on_bad)  # no shard is open at its first batch, and all are later
        loader = StreamingDataLoader(dataset, global_batch_size=3, tail="drop")
        assert rows_in(loader) == before
        assert loader.num_substituted == 0
    next(folder.glob("shard.*")).unlink()  # a micro-batch of which a document is bad has the same rows in every world

    def batches(rank, ranks):
        dataset = dataset_of(
            folder, world=(rank, ranks), on_bad={"shard": "substitute", "quarantine": tmp_path / "bad"}
        )
        return list(StreamingDataLoader(dataset, global_batch_size=6, tail="drop"))

    shares = zip(*(batches(rank, 6) for rank in range(6)), strict=True)
    assert [rows_in(share) for share in shares] == [rows_in([batch]) for batch in batches(0, 1)]


def test_a_subset_is_packed_by_itself(folder):
    part = dataset_of(folder).subset(range(0, 400, 2))
    pieces = [
        tokens for batch in StreamingDataLoader(part, batch_size=1, tail="drop") for _, tokens in documents_in(batch)
    ]
    assert sum(map(len, pieces)) == sum(len(doc) for doc in documents()[::2])


def test_a_packed_dataset_is_true_in_a_condition(folder):
    dataset = StreamingDataset(local=folder, pack=Packing(row_length=32))
    assert (dataset or None) is dataset


def test_a_resume_with_another_packing_is_refused(folder):
    loader = loader_of(folder)
    next(iter(loader))
    state = loader.state_dict()
    other = loader_of(folder, pack=Packing(row_length=32, window=50))
    with pytest.raises(StateError, match="packing was RowPacking"):
        other.load_state_dict(state)
    plain = StreamingDataLoader(StreamingDataset(local=folder, shuffle=True), global_batch_size=12)
    with pytest.raises(StateError, match="packing was RowPacking"):
        plain.load_state_dict(state)


def test_the_usual_window_fills_about_700_rows_within_its_bounds():
    documents = np.random.default_rng(0)
    for mean, row_length in ((300, 32768), (30, 2048), (30, 8192), (1.5, 512)):
        lengths = documents.poisson(mean - 1, 200_000) + 1
        window = RowPacking(row_length).usual_window(lengths)
        assert window == 65536 or 0.95 < window * mean / row_length / 700 < 1.05
        rows = pack_window(lengths[:window], row_length)
        assert 1 - lengths[:window].sum() / (len(rows) * row_length) < 0.01
    assert RowPacking(2048).usual_window(np.full(10, 5000)) == 4096
    assert RowPacking(2048, long_documents="drop").usual_window(np.full(10, 5000)) == 65536
    assert RowPacking(2048).usual_window(np.zeros(0, np.uint32)) == 4096


def test_a_run_keeps_the_window_that_it_began_with(folder):
    began = loader_of(folder, pack=Packing(row_length=LENGTH, window=16384))
    next(iter(began))
    state = began.state_dict()
    usual = loader_of(folder, pack=Packing(row_length=LENGTH))
    assert usual.state_dict()["order"]["packing"]["window"] == 4096
    usual.load_state_dict(state)
    assert rows_in(usual) == rows_in(list(loader_of(folder, pack=Packing(row_length=LENGTH, window=16384)))[1:])
    assert usual.state_dict()["order"]["packing"]["window"] == 16384


def test_lengths_that_do_not_fit_the_documents_are_an_error(folder):
    loader = loader_of(folder)
    reader = loader._source.reader
    batch = loader.micro_batches_from(loader.first_position())[0]
    reader._lengths["tokens"] = reader.lengths("tokens") + np.uint32(1)
    with pytest.raises(FormatError, match=r"as many values as its length; found \d+, and its length is"):
        read_rows(reader, batch.rows, Packing(row_length=LENGTH))


def test_an_epoch_without_rows_names_its_cause(tmp_path):
    empty = write(tmp_path / "empty", [np.zeros(0, np.int32)] * 4)
    long = write(tmp_path / "long", [np.ones(LENGTH + 1, np.int32)] * 4)
    dropping = Packing(row_length=LENGTH, long_documents="drop")
    for data, pack, policy in ((empty, None, "split"), (long, dropping, "drop")):
        with pytest.raises(ValueError, match=rf"none of the 4 documents has a row .* \(long_documents='{policy}'\)"):
            next(iter(loader_of(data, pack=pack)))
    with pytest.raises(ValueError, match="tail='drop' leaves none of the 5 rows in global batches of 12"):
        next(iter(loader_of(long, tail="drop")))


def test_text_and_columns_of_a_transform_must_be_tokenised_first(folder):
    for column in ("name", "made"):
        dataset = dataset_of(folder, pack=Packing(column, LENGTH), transform=lambda row: row)
        with pytest.raises(ValueError, match=rf"found column='{column}' among .* Tokenise first: convert"):
            next(iter(StreamingDataLoader(dataset, global_batch_size=2)))


@pytest.mark.parametrize(
    "given",
    [
        {"columns": ("input_ids",)},
        {"columns": ["position_ids", "mask"]},
        {"columns": ("num_tokens",)},
        {"columns": ("labels",), "labels": True},
    ],
)
def test_further_columns_have_other_names_than_what_a_batch_has_itself(given):
    """They were left out, or took the place of the tokens, without a word."""
    with pytest.raises(ValueError, match="are what a batch has itself: write them under other names"):
        Packing(**given)
    Packing(column="input_ids", columns=("input_ids", "labels"))


def test_mistakes_get_a_clear_error(folder):
    with pytest.raises(TypeError, match="epochs of packed rows differ in length"):
        len(dataset_of(folder))
    with pytest.raises(ValueError, match="no column 'nothing'"):
        next(iter(loader_of(folder, pack=Packing(row_length=LENGTH, columns=["nothing"]))))
    with pytest.raises(ValueError, match="row_length must be an integer from 1"):
        Packing(row_length=0)
    for wrong in ({"lengths": ("a", "b")}, {"column": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            Packing(**wrong)
    with pytest.raises(ValueError, match="batching_method random or stratified"):
        dataset_of(folder, batching_method="per_stream")
    with pytest.raises(ValueError, match="native order"):
        dataset_of(folder, shuffle_algo="py1s")


@pytest.mark.parametrize("token", [-100, 70_000, np.int64(70_000)])
def test_a_token_of_padding_that_the_column_cannot_hold_is_refused(tmp_path, token):
    with MDSWriter(out=tmp_path / "out", columns={"tokens": "ndarray:uint16"}, lengths={"tokens": len}) as writer:
        writer.write({"tokens": np.arange(5, dtype=np.uint16)})
    with pytest.raises(ValueError, match=f"'tokens' of uint16 can hold; found {token}"):
        next(iter(loader_of(tmp_path / "out", pack=Packing(row_length=8, pad_token=token), size=1)))
    for other in (1.5, None, True, "0"):
        with pytest.raises(ValueError, match="pad_token must be an integer"):
            Packing(pad_token=other)
