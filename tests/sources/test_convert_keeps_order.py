"""A dataset that `convert` writes from data in another format has its order, so that a training run continues on it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from servers.s3 import bucket_at, options_of  # noqa: E402

from lightning_stream import MDSWriter, Packing, Stream, StreamingDataLoader, StreamingDataset, versions  # noqa: E402
from lightning_stream.convert import convert, read_manifest  # noqa: E402
from lightning_stream.errors import SnapshotMismatch  # noqa: E402
from tests.sources.test_in_place import FORMATS, ROWS, TOKENS, collate, table, trained, written  # noqa: E402

KINDS = [kind for kind in FORMATS if kind != "mds"]
PLAIN: dict[str, Any] = {"num_workers": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


def continued(dataset: StreamingDataset, state: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    loader, found = StreamingDataLoader(dataset, global_batch_size=8, collate_fn=collate), []
    loader.load_state_dict(state)
    for batch in loader:
        assert loader.last_batch is not None
        found.append((loader.last_batch.ids.tolist(), batch))
    return found, loader.state_dict()


def written_images(folder: Path) -> str:
    for number in range(60):
        path = folder / f"class{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xd8\xff" + bytes([number]) * 100 + b"\xff\xd9")
    return str(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_run_continues_on_the_converted_data(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = written(tmp_path / "in", kind), str(tmp_path / "out")
    before, state = trained(StreamingDataset(remote=source, shuffle=True), 5)
    rest, _ = continued(StreamingDataset(remote=source, shuffle=True), state)
    assert convert(source, out, **PLAIN).num_shards == {"": 4}
    dataset = StreamingDataset(local=out, shuffle=True)
    with caplog.at_level(logging.INFO, "lightning_stream"):
        found, later = continued(dataset, state)
    assert found == rest
    assert "The data was converted since this state was saved." in caplog.text
    assert trained(StreamingDataset(local=out, shuffle=True), 5)[0] == before
    assert later["snapshot"]["digest"] == dataset.snapshot.digest != state["snapshot"]["digest"]
    assert StreamingDataset(local=out)[31].keys() == StreamingDataset(remote=source)[31].keys()
    assert continued(StreamingDataset(local=out, shuffle=True), later)[1]["epoch"] == later["epoch"] + 1


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "litdata"])
def test_every_sample_has_the_bytes_that_it_has_in_place(kind: str, tmp_path: Path) -> None:
    source, out = written(tmp_path / "in", kind), tmp_path / "out"
    convert(source, out, compression=None, num_workers=2)
    there, here = StreamingDataset(remote=source), StreamingDataset(local=str(out))
    for shard in range(4):
        there.prepare_shard(shard)
    raw = [there.reader.caches[0].folder / there.shards[k].basename for k in range(4)]
    rows = [(out / here.shards[k].basename).read_bytes() for k in range(4)]
    config = [path.read_bytes().index(b"{") for path in raw]
    for path, data, _ in zip(raw, rows, config, strict=True):
        in_place = path.read_bytes()
        begin = int(np.frombuffer(in_place[4:8], "<u4")[0])
        first = int(np.frombuffer(data[4:8], "<u4")[0])
        assert in_place[begin:] == data[first:]


def test_a_chunk_of_litdata_keeps_its_place_in_the_order_of_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(12):  # chunk-0-10.bin is before chunk-0-2.bin by its name
        FORMATS["litdata"](folder, number, range(number * 5, number * 5 + 5))
    for name, options in (("auto", {}), ("by bytes", {"size_limit": "64mb"})):
        convert(folder, tmp_path / name, **PLAIN, **options)
        dataset = StreamingDataset(local=str(tmp_path / name))
        assert [int(dataset[k]["id"]) for k in range(60)] == list(range(60))


def test_images_keep_their_order(tmp_path: Path) -> None:
    source, out = written_images(tmp_path / "in"), str(tmp_path / "out")
    columns = {"image": "bytes", "label": "int", "name": "str"}
    names = lambda samples: [(sample["name"], sample["label"]) for sample in samples]  # noqa: E731
    there = StreamingDataset(remote=source, columns=columns, shuffle=True)
    loader = StreamingDataLoader(there, global_batch_size=7, collate_fn=names)
    steps = iter(loader)
    assert len([next(steps) for _ in range(3)]) == 3
    state, rest = loader.state_dict(), list(steps)
    convert(source, out, columns=columns, **PLAIN)
    again = StreamingDataLoader(StreamingDataset(local=out, shuffle=True), global_batch_size=7, collate_fn=names)
    again.load_state_dict(state)
    assert list(again) == rest


def test_other_columns_have_the_same_order(tmp_path: Path) -> None:
    source = written(tmp_path / "in", "parquet")
    _, state = trained(StreamingDataset(remote=source, shuffle=True), 5)
    convert(source, tmp_path / "tokens", columns={"tokens": "ndarray:int32"}, **PLAIN)
    for dataset in (
        StreamingDataset(remote=source, columns=["tokens"], shuffle=True),
        StreamingDataset(local=str(tmp_path / "tokens"), shuffle=True),
    ):
        loader = StreamingDataLoader(dataset, global_batch_size=8, collate_fn=list)
        loader.load_state_dict(state)
        ids = []
        for batch in loader:
            assert loader.last_batch is not None
            ids += loader.last_batch.ids.tolist()
            assert all(list(sample) == ["tokens"] for sample in batch)
        assert len(set(ids)) == ROWS - 40


@pytest.mark.parametrize("converted", [(0,), (1,), (0, 1)])
def test_streams_of_a_mixture_are_converted_one_by_one(converted: tuple[int, ...], tmp_path: Path) -> None:
    folders = [written(tmp_path / kind, kind) for kind in ("parquet", "litdata", "mds")]

    def mixture() -> StreamingDataset:
        streams = [Stream(remote=folder, proportion=weight) for folder, weight in zip(folders, (2, 1, 1), strict=True)]
        return StreamingDataset(streams=streams, shuffle=True, batching_method="stratified")

    _, state = trained(mixture(), 4)
    _, later = trained(mixture(), 9)
    rest, end = continued(mixture(), state)
    for number in converted:  # the state of each step is accepted after the next conversion
        convert(folders[number], tmp_path / f"out{number}", **PLAIN)
        folders[number] = str(tmp_path / f"out{number}")
        found, reached = continued(mixture(), state)
        assert found == rest
        assert (reached["ledger"], reached["epoch"]) == (end["ledger"], end["epoch"])
        loader = StreamingDataLoader(mixture(), global_batch_size=8, collate_fn=collate)
        loader.load_state_dict(later)
        later = loader.state_dict()
    assert later["snapshot"]["digest"] == mixture().snapshot.digest


def test_chosen_samples_stay_chosen(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in", "parquet"), str(tmp_path / "out")
    ids = list(range(3, ROWS, 2))
    convert(source, out, **PLAIN)
    _, state = trained(StreamingDataset(remote=source, shuffle=True).subset(ids), 2)
    places: list[dict[str, Any]] = [{"remote": source}, {"local": out}]
    rests = [continued(StreamingDataset(**place, shuffle=True).subset(ids), state)[0] for place in places]
    assert rests[0] == rests[1]
    with pytest.raises(SnapshotMismatch):
        continued(StreamingDataset(local=out, shuffle=True).subset(ids[1:]), state)


@pytest.mark.parametrize(
    "options",
    [{"size_limit": "1kb"}, {"partition_bytes": "1kb"}, {"shuffle": True}, {"transform": dict}, {"drop_nulls": True}],
)
def test_other_shards_have_another_order_and_the_refusal_names_the_options(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source, out = written(tmp_path / "in", "jsonl"), str(tmp_path / "out")
    _, state = trained(StreamingDataset(remote=source, shuffle=True), 5)
    convert(source, out, **PLAIN, **options)
    with pytest.raises(SnapshotMismatch, match="`convert` keeps the order if neither size_limit"):
        continued(StreamingDataset(local=out, shuffle=True), state)


def test_a_source_that_changed_has_another_order(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in", "parquet"), str(tmp_path / "out")
    _, state = trained(StreamingDataset(remote=source, shuffle=True), 5)
    pq.write_table(table(range(50)).slice(1), Path(source) / "part-1.parquet", row_group_size=25)
    convert(source, out, **PLAIN)
    with pytest.raises(SnapshotMismatch):
        continued(StreamingDataset(local=out, shuffle=True), state)


def test_a_later_change_of_the_dataset_makes_it_another_one_and_its_first_version_stays(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in", "parquet"), str(tmp_path / "out")
    _, state = trained(StreamingDataset(remote=source, shuffle=True), 5)
    rest, _ = continued(StreamingDataset(remote=source, shuffle=True), state)
    convert(source, out, **PLAIN)
    with MDSWriter(out=out, append=True) as writer:
        writer.write({"id": np.int64(100), "text": "more", "tokens": np.arange(3, dtype=np.int32)})
    with pytest.raises(SnapshotMismatch):
        continued(StreamingDataset(local=out, shuffle=True), state)
    first = StreamingDataset(streams=[Stream(out, local=str(tmp_path / "local"), version=0)], shuffle=True)
    assert continued(first, state)[0] == rest
    versions.delete_rows(out, [5])
    versions.compact(out)
    with pytest.raises(SnapshotMismatch):
        continued(StreamingDataset(local=out, shuffle=True), state)


def test_lengths_do_not_change_whose_order_it_is(tmp_path: Path) -> None:
    from lightning_stream.convert import add_lengths

    source, out = written(tmp_path / "in", "parquet"), str(tmp_path / "out")
    _, state = trained(StreamingDataset(remote=source, shuffle=True), 5)
    rest, _ = continued(StreamingDataset(remote=source, shuffle=True), state)
    convert(source, out, lengths={"tokens": len}, **PLAIN)
    assert StreamingDataset(local=out).lengths("tokens").tolist() == [len(each) for each in TOKENS]
    add_lengths(out, {"text": len}, num_workers=1)
    assert continued(StreamingDataset(local=out, shuffle=True), state)[0] == rest


def test_the_dataset_is_the_same_for_any_number_of_processes_and_after_a_kill(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    numbers = np.arange(4000, dtype=np.int64)
    for k in range(4):
        columns = {"k": numbers[k::4], "x": [str(k) * 100] * 1000}
        pq.write_table(pa.table(columns), source / f"{k}.parquet", row_group_size=70)
    _, state = trained_ids(StreamingDataset(remote=str(source), shuffle=True))
    files = []
    for count in (1, 2):
        out = tmp_path / f"out{count}"
        convert(source, out, num_workers=count)
        files.append({str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert files[0] == files[1]
    assert not convert(source, tmp_path / "out2", num_workers=2).is_new
    shutil.rmtree(tmp_path / "out2" / "part-00000")
    convert(source, tmp_path / "out2", num_workers=2, force=True)
    loader = StreamingDataLoader(StreamingDataset(local=str(tmp_path / "out2"), shuffle=True), global_batch_size=8)
    loader.load_state_dict(state)
    index = json.loads(files[0]["index.json"])
    assert len(index["shards"]) == 4 * 15
    assert index["converted_from"]["source"]


def trained_ids(dataset: StreamingDataset) -> tuple[list[int], dict[str, Any]]:
    loader, ids = StreamingDataLoader(dataset, global_batch_size=8), []
    for _, _ in zip(range(7), loader, strict=False):
        assert loader.last_batch is not None
        ids += loader.last_batch.ids.tolist()
    return ids, loader.state_dict()


def test_pieces_without_rows_are_no_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_stream.sources.lines import JsonlReader

    monkeypatch.setattr("lightning_stream.sources.lines._PIECE_BYTES", 50)
    monkeypatch.setattr(JsonlReader, "piece_bytes", 50)
    source, out = tmp_path / "in", str(tmp_path / "out")
    source.mkdir()
    (source / "a.jsonl").write_text("\n" * 70 + "".join(f'{{"k": {k}}}\n' for k in range(40)) + "\n" * 200)
    (source / "b.jsonl").write_text("".join(f'{{"k": {k}}}\n' for k in range(40, 50)))
    ids, state = trained_ids(StreamingDataset(remote=str(source), shuffle=True))
    convert(source, out, **PLAIN)
    dataset = StreamingDataset(local=out, shuffle=True)
    assert dataset.samples_per_shard.tolist() == StreamingDataset(remote=str(source)).samples_per_shard.tolist()
    assert trained_ids(dataset)[0] == ids
    loader = StreamingDataLoader(dataset, global_batch_size=8)
    loader.load_state_dict(state)


def test_folders_of_splits_keep_the_order_of_each_split(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "in").mkdir(exist_ok=True)
        written(tmp_path / "in" / split, "litdata")
    source, out = str(tmp_path / "in"), str(tmp_path / "out")
    convert(source, out, **PLAIN)
    assert read_manifest(out).num_samples == {"train": ROWS, "val": ROWS}
    for split in ("train", "val"):
        _, state = trained(StreamingDataset(remote=source, split=split, shuffle=True), 5)
        rest, _ = continued(StreamingDataset(remote=source, split=split, shuffle=True), state)
        assert continued(StreamingDataset(remote=out, split=split, shuffle=True), state)[0] == rest


def test_a_piece_that_is_too_large_is_cut_by_bytes_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_stream.convert.conversion._MAX_PIECE_BYTES", 100)
    source = written(tmp_path / "in", "parquet")
    done = convert(source, tmp_path / "out", **PLAIN)
    assert done.num_shards == {"": 1}
    assert "too large for a shard" in caplog.text


def test_a_format_that_cannot_be_read_in_place_has_shards_of_64_mb(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("k,text\n" + "".join(f"{k},text {k}\n" for k in range(100)))
    convert(tmp_path / "rows.csv", tmp_path / "out", **PLAIN)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert [shard["size_limit"] for shard in index["shards"]] == [64 << 20]
    assert "converted_from" not in index


def test_a_delta_table_is_converted_as_it_is_read_in_place(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: uv sync --extra delta")
    uri, out = str(tmp_path / "table"), str(tmp_path / "out")
    for k in range(3):
        rows = pa.table({"id": range(k * 40, k * 40 + 40), "part": [f"p{k}"] * 40, "text": [f"text {k}"] * 40})
        deltalake.write_deltalake(uri, rows, mode="append", partition_by=["part"])
    deltalake.DeltaTable(uri).delete("id >= 40 AND id < 50")  # its file stays beside the one that replaces it
    there = StreamingDataset(remote=uri, shuffle=True)
    ids, state = trained_ids(there)
    done = convert(uri, out, **PLAIN)
    here = StreamingDataset(local=out, shuffle=True)
    assert done.total == there.size == here.size == 110
    assert [dict(here[k]) for k in range(110)] == [dict(there[k]) for k in range(110)]
    assert trained_ids(here)[0] == ids
    StreamingDataLoader(here, global_batch_size=8).load_state_dict(state)
    old = convert(uri, tmp_path / "old", source_options={"version": 1}, shuffle=True, **PLAIN)
    assert old.total == 80
    some = StreamingDataset(remote=uri, columns=["text"], shuffle=True)
    StreamingDataLoader(some, global_batch_size=8).load_state_dict(state)


def test_dictionaries_in_arrow_files_keep_the_order(tmp_path: Path) -> None:
    source, out = tmp_path / "in", str(tmp_path / "out")
    source.mkdir()
    words = pa.array(["a", "b", "a", "c"] * 25).dictionary_encode()
    feather.write_feather(pa.table({"id": range(100), "word": words}), str(source / "a.feather"), chunksize=30)
    ids, state = trained_ids(StreamingDataset(remote=str(source), shuffle=True))
    convert(source, out, **PLAIN)
    here = StreamingDataset(local=out, shuffle=True)
    assert (trained_ids(here)[0], here.samples_per_shard.tolist()) == (ids, [30, 30, 30, 10])
    StreamingDataLoader(here, global_batch_size=8).load_state_dict(state)


def test_a_conversion_that_was_interrupted_is_continued_with_the_same_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_stream.convert.task import PartitionTask
    from lightning_stream.sources.tables import ParquetReader

    monkeypatch.setattr(ParquetReader, "min_bytes", 1000)  # several partitions
    source = written(tmp_path / "in", "parquet")
    convert(source, tmp_path / "whole", **PLAIN)
    assert len(list((tmp_path / "whole").glob("part-*"))) > 1
    run, done = PartitionTask.run, []

    def interrupted(task: Any, partition: Any) -> Any:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(partition.partition_id)
        return run(task, partition)

    with monkeypatch.context() as patched:
        patched.setattr(PartitionTask, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", **PLAIN)
    assert not (tmp_path / "out" / "index.json").exists()
    convert(source, tmp_path / "out", num_workers=2)
    files = [
        {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
        for out in (tmp_path / "whole", tmp_path / "out")
    ]
    assert files[0] == files[1]


def test_many_small_shards_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_stream.convert.conversion._MANY_SHARDS", 3)
    convert(written(tmp_path / "in", "parquet"), tmp_path / "out", **PLAIN)
    assert "has 4 shards of 0 KB on average, as the pieces of the source are. size_limit='64mb' writes" in caplog.text


def test_a_source_in_a_store_keeps_its_order(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec: uv sync --group test")
    from lightning_stream.stores import open_store

    folder, url = Path(written(tmp_path / "in", "parquet")), "memory://convert-keeps-order"
    for path in folder.iterdir():
        open_store(url).put(f"in/{path.name}", path.read_bytes())
    _, state = trained(StreamingDataset(remote=f"{url}/in", shuffle=True), 5)
    rest, _ = continued(StreamingDataset(remote=f"{url}/in", shuffle=True), state)
    for number, given in enumerate((f"{url}/in", f"{url}/in/*.parquet")):
        convert(given, f"{url}/out{number}", **PLAIN)
        assert continued(StreamingDataset(remote=f"{url}/out{number}", shuffle=True), state)[0] == rest


@pytest.mark.nightly
def test_a_bucket_keeps_its_order(tmp_path: Path, moto_endpoint: str) -> None:
    client, options = bucket_at(moto_endpoint, "order"), options_of(moto_endpoint)
    for path in Path(written(tmp_path / "in", "tar")).iterdir():
        client.put_object(Bucket="order", Key=f"in/{path.name}", Body=path.read_bytes())

    def dataset(name: str) -> StreamingDataset:
        return StreamingDataset(streams=[Stream(f"s3://order/{name}", options=options)], shuffle=True)

    _, state = trained(dataset("in"), 5)
    rest, _ = continued(dataset("in"), state)
    convert("s3://order/in", "s3://order/out", source_store_options=options, store_options=options, num_workers=2)
    assert continued(dataset("out"), state)[0] == rest


def test_columns_with_nulls_are_written_as_they_are_read_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = tmp_path / "in", str(tmp_path / "out")
    source.mkdir()
    rows = pa.table({"id": range(90), "text": [None if k % 7 == 3 else f"text {k}" for k in range(90)]})
    pq.write_table(rows, source / "a.parquet", row_group_size=20)
    there = StreamingDataset(remote=str(source), shuffle=True)
    ids, state = trained_ids(there)
    assert convert(source, out, **PLAIN).columns == {"id": "int64", "text": "json"}
    assert "has nulls in text, which become json" in caplog.text
    here = StreamingDataset(local=out, shuffle=True)
    assert [dict(here[k]) for k in range(90)] == [dict(there[k]) for k in range(90)]
    assert (here[3]["text"], trained_ids(here)[0]) == (None, ids)
    StreamingDataLoader(here, global_batch_size=8).load_state_dict(state)
    assert convert(source, tmp_path / "filled", **PLAIN, fill_nulls={"text": ""}).columns["text"] == "str"


def test_documents_in_place_are_packed_and_the_run_continues_on_converted_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "in", str(tmp_path / "out")
    source.mkdir()
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 9, rng.integers(1, 40)).astype(np.int32) for _ in range(300)]
    rows = {"text": [f"document {k}" for k in range(300)], "tokens": pa.array(documents, pa.list_(pa.int32()))}
    pq.write_table(pa.table(rows), source / "a.parquet", row_group_size=40)

    def packed(place: str) -> StreamingDataLoader:
        dataset = StreamingDataset(place, shuffle=True, pack=Packing("tokens", row_length=64))
        return StreamingDataLoader(dataset, global_batch_size=4)

    loader = packed(str(source))
    steps = iter(loader)
    assert len([next(steps) for _ in range(3)]) == 3
    state, rest = loader.state_dict(), [batch["input_ids"].tolist() for batch in steps]
    assert loader.dataset.lengths("tokens").tolist() == list(map(len, documents))
    assert StreamingDataset(str(source)).lengths("text")[7] == len("document 7")
    with monkeypatch.context() as patched:
        patched.setattr("lightning_stream.sources.in_place.InPlace.write", None)  # the lengths stay in the cache
        assert StreamingDataset(str(source), cache_limit="1gb").lengths("tokens")[5] == len(documents[5])
    convert(source, out, lengths={"tokens": len}, **PLAIN)
    loader = packed(out)
    loader.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in loader] == rest


def test_a_record_of_both_parts_of_the_run_is_verified_on_the_converted_data(tmp_path: Path) -> None:
    from lightning_stream import PositionTracker, verify_delivery

    source, out = written(tmp_path / "in", "parquet"), str(tmp_path / "out")
    convert(source, out, **PLAIN)
    state: dict[str, Any] | None = None
    for place in (source, out):
        loader = StreamingDataLoader(StreamingDataset(remote=place, shuffle=True), global_batch_size=8)
        if state is not None:
            loader.load_state_dict(state)
        tracker = PositionTracker(loader, record_delivery=tmp_path / "record")
        for _ in tracker:
            tracker.stepped()
            if state is None and tracker.num_steps == 5:
                break
        state = loader.state_dict()
        tracker.detach()
    found = verify_delivery(tmp_path / "record", StreamingDataset(remote=out, shuffle=True))
    assert (found.num_steps, found.first_difference) == (13, None), found.sentence
