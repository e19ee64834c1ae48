"""Datasets in other formats, read in place: the same rows give the same ids, the same ledger and equal batches."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from lightning_stream import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, merge_index  # noqa: E402
from lightning_stream.cli import main  # noqa: E402
from lightning_stream.errors import FormatError, LightningStreamError, NotFoundError, SnapshotMismatch  # noqa: E402

ROWS, PER_SHARD = 100, 25
TOKENS = [np.arange(number % 7, dtype=np.int32) for number in range(ROWS)]
TEXTS = [f"text {number} é" * (number % 3) for number in range(ROWS)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def table(numbers: range) -> Any:
    columns = {
        "id": pa.array(numbers, pa.int64()),
        "text": pa.array([TEXTS[k] for k in numbers]),
        "tokens": pa.array([TOKENS[k] for k in numbers], pa.list_(pa.int32())),
    }
    return pa.table(columns)


def samples(numbers: range) -> list[dict[str, Any]]:
    return [{"id": k, "text": TEXTS[k], "tokens": TOKENS[k]} for k in numbers]


def write_mds(folder: Path, number: int, numbers: range) -> None:
    columns = {"id": "int64", "text": "str", "tokens": "ndarray:int32"}
    with MDSWriter(out=str(folder / f"part-{number}"), columns=columns) as writer:
        for sample in samples(numbers):
            writer.write(sample)
    merge_index(str(folder))


def write_parquet(folder: Path, number: int, numbers: range) -> None:
    if number % 2:  # two row groups in each file
        numbers = range(numbers[0] - PER_SHARD, numbers[-1] + 1)
        pq.write_table(table(numbers), folder / f"part-{number}.parquet", row_group_size=PER_SHARD)


def write_arrow(folder: Path, number: int, numbers: range) -> None:
    with pa.OSFile(str(folder / f"{number}.arrow"), "wb") as file, pa.ipc.new_file(file, table(numbers).schema) as out:
        out.write_table(table(numbers))


def write_stream(folder: Path, number: int, numbers: range) -> None:
    """As Hugging Face's ``save_to_disk`` writes."""
    name = f"data-{number:05}-of-00004.arrow"
    with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table(numbers).schema) as out:
        out.write_table(table(numbers))
    state = {"_data_files": [{"filename": f"data-{k:05}-of-00004.arrow"} for k in range(number + 1)]}
    (folder / "state.json").write_text(json.dumps(state))


def write_feather(folder: Path, number: int, numbers: range) -> None:
    feather.write_feather(table(numbers), str(folder / f"{number}.feather"), compression="zstd")


def write_jsonl(folder: Path, number: int, numbers: range) -> None:
    rows = [{**sample, "tokens": sample["tokens"].tolist()} for sample in samples(numbers)]
    (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tar(folder: Path, number: int, numbers: range) -> None:
    with tarfile.open(folder / f"{number}.tar", "w") as out:
        for sample in samples(numbers):
            array = io.BytesIO()
            np.save(array, sample["tokens"])
            texts = {"id": str(sample["id"]).encode(), "txt": sample["text"].encode(), "npy": array.getvalue()}
            for ending, data in texts.items():
                member = tarfile.TarInfo(f"{sample['id']:05}.{ending}")
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))


def write_litdata(
    folder: Path, number: int, numbers: range, formats: Any = ("int", "str", "no_header_numpy:2")
) -> None:
    items = []
    for sample in samples(numbers):
        text = pickle.dumps(sample["text"]) if "pickle" in formats else sample["text"].encode()
        values = [np.int64(sample["id"]).tobytes(), text, sample["tokens"].tobytes()]
        items.append(np.array([*map(len, values)], "<u4").tobytes() + b"".join(values))
    ends = np.cumsum([8 + 4 * len(items), *map(len, items)])
    chunk = np.uint32(len(items)).tobytes() + ends.astype("<u4").tobytes() + b"".join(items)
    (folder / f"chunk-0-{number}.bin").write_bytes(chunk)
    path = folder / "index.json"
    chunks = json.loads(path.read_text())["chunks"] if path.exists() else []
    chunks.append({"chunk_bytes": len(chunk), "chunk_size": len(items), "filename": f"chunk-0-{number}.bin"})
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = {"type": "builtins.dict", "context": '["id", "text", "tokens"]', "children_spec": [leaf] * 3}
    config = {"compression": None, "data_format": [*formats], "data_spec": json.dumps([1, spec])}
    path.write_text(json.dumps({"chunks": chunks, "config": config}))


FORMATS: dict[str, Callable[[Path, int, range], None]] = {
    "mds": write_mds,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "hugging_face": write_stream,
    "feather": write_feather,
    "jsonl": write_jsonl,
    "tar": write_tar,
    "litdata": write_litdata,
}


def written(folder: Path, kind: str) -> str:
    folder.mkdir()
    for number in range(ROWS // PER_SHARD):
        FORMATS[kind](folder, number, range(number * PER_SHARD, (number + 1) * PER_SHARD))
    return str(folder)


def values(sample: dict[str, Any]) -> tuple[int, str, list[int]]:
    text, tokens = (sample["txt"], sample["npy"]) if "txt" in sample else (sample["text"], sample["tokens"])
    return int(sample["id"]), text, [int(token) for token in tokens]


def collate(batch: list[dict[str, Any]]) -> list[tuple[int, str, list[int]]]:
    return [values(sample) for sample in batch]


def trained(dataset: StreamingDataset, steps: int | None = None, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """The batches from where the dataset is, with the sample ids of each, and the state after them."""
    loader, found = StreamingDataLoader(dataset, global_batch_size=8, collate_fn=collate, **options), []
    for batch in loader:
        assert loader.last_batch is not None
        found.append((loader.last_batch.ids.tolist(), batch))
        if len(found) == steps:
            break
    return found, loader.state_dict()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("wanted") / "mds"
    return trained(StreamingDataset(local=written(folder, "mds"), shuffle=True), 9)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "mds"])
def test_the_same_rows_have_the_same_ids_ledger_and_batches_in_every_format(
    kind: str, wanted: tuple[list[Any], dict[str, Any]], tmp_path: Path
) -> None:
    uri = written(tmp_path / kind, kind)
    before = {path: path.read_bytes() for path in Path(uri).rglob("*")}
    dataset = StreamingDataset(remote=uri, shuffle=True)
    assert [values(dataset[k]) for k in (0, 31, 99)] == [(k, TEXTS[k], TOKENS[k].tolist()) for k in (0, 31, 99)]
    found, state = trained(dataset, 9, num_workers=2)
    assert found == wanted[0]
    assert (state["ledger"], state["position"]) == (wanted[1]["ledger"], wanted[1]["position"])
    rest = StreamingDataset(remote=uri, shuffle=True)  # in a new process: nothing of the first one is needed
    loader = StreamingDataLoader(rest, global_batch_size=8, collate_fn=collate)
    loader.load_state_dict(state)
    assert sorted(row[0] for _, batch in found for row in batch) + sorted(
        row[0] for batch in loader for row in batch
    ) != sorted(range(ROWS))  # two sorted halves, which together are all samples:
    loader.load_state_dict(state)
    assert sorted([row[0] for _, batch in found for row in batch] + [r[0] for b in loader for r in b]) == [*range(ROWS)]
    assert {path: path.read_bytes() for path in Path(uri).rglob("*")} == before, "nothing is written beside the data"


def test_streams_of_different_formats_mix(tmp_path: Path) -> None:
    streams = [Stream(remote=written(tmp_path / kind, kind)) for kind in ("parquet", "mds", "litdata")]
    found, _ = trained(StreamingDataset(streams=streams, shuffle=True, batching_method="stratified"))
    assert sorted(row[0] for _, batch in found for row in batch) == sorted([*range(ROWS)] * 3)


def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    uri = written(tmp_path / "parquet", "parquet")
    assert set(StreamingDataset(remote=uri, columns=["text"])[7]) == {"text"}
    sample = StreamingDataset(streams=[Stream(remote=uri, columns={"id": "int32", "tokens": "json"})])[9]
    assert (type(sample["id"]), sample["tokens"]) == (np.int32, [0, 1])
    with pytest.raises(ValueError, match="is not a column; the columns are id, text, tokens"):
        StreamingDataset(streams=[Stream(remote=uri, columns=["words"])])[0]


def test_one_cache_folder_for_other_settings_reads_as_those_say(tmp_path: Path) -> None:
    """Files of a pattern, encodings and formats that were chosen before, in the same folder, say nothing."""
    uri = written(tmp_path / "parquet", "parquet")
    settings: list[dict[str, Any]] = [
        {"columns": ["id"]}, {"columns": {"id": "int32"}}, {"columns": {"id": "float64", "text": "str"}}, {},
        {"format": "files"}, {"columns": ["data"], "format": "files"},
    ]  # fmt: skip
    streams = [Stream(remote=uri, local=str(tmp_path / "local"), **chosen) for chosen in settings]
    datasets = [StreamingDataset(streams=[stream]) for stream in [*streams, *reversed(streams)]]
    values = [{name: type(value) for name, value in dataset[0].items()} for dataset in datasets]
    assert values[: len(settings)] == [
        {"id": np.int64}, {"id": np.int32}, {"id": np.float64, "text": str},
        {"id": np.int64, "text": str, "tokens": np.ndarray}, {"data": bytes, "name": str}, {"data": bytes},
    ]  # fmt: skip
    assert values == [*values[: len(settings)], *reversed(values[: len(settings)])]
    assert [{name: type(value) for name, value in dataset[0].items()} for dataset in datasets] == values


def test_a_cache_limit_holds_and_shards_are_made_again(tmp_path: Path, cache: Path) -> None:
    uri = written(tmp_path / "parquet", "parquet")
    dataset = StreamingDataset(remote=uri, cache_limit="5kb", num_canonical_nodes=1, window=1, predownload=1)
    assert [dataset[k]["id"] for k in range(ROWS)] == [*range(ROWS)]
    assert sum(path.stat().st_size for path in cache.rglob("*.mds")) <= 5000
    assert len(list(cache.rglob("*.mds"))) < 4


def test_a_changed_file_is_another_snapshot(tmp_path: Path) -> None:
    uri = written(tmp_path / "parquet", "parquet")
    _, state = trained(StreamingDataset(remote=uri, shuffle=True), 3)
    text = table(range(50)).set_column(1, "text", pa.array(["changed"] * 50))
    pq.write_table(text, Path(uri) / "part-1.parquet", row_group_size=PER_SHARD)
    dataset = StreamingDataset(remote=uri, shuffle=True)
    assert dataset[3]["text"] == "changed"
    with pytest.raises(SnapshotMismatch):
        StreamingDataLoader(dataset, global_batch_size=8).load_state_dict(state)


def test_the_index_is_made_once_while_the_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = written(tmp_path / "parquet", "parquet")
    assert StreamingDataset(remote=uri)[5]["id"] == 5
    with monkeypatch.context() as patched:
        patched.setattr(pq, "ParquetFile", None)
        assert StreamingDataset(remote=uri)[7]["id"] == 7
    pq.write_table(table(range(50)), Path(uri) / "part-9.parquet", row_group_size=PER_SHARD)
    assert StreamingDataset(remote=uri).size == 150


def test_a_file_that_changes_under_a_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    uri = written(tmp_path / "parquet", "parquet")
    dataset = StreamingDataset(remote=uri)
    assert dataset[0]["id"] == 0
    pq.write_table(table(range(3)), Path(uri) / "part-3.parquet")
    with pytest.raises(FormatError, match=r"part-3.parquet"):
        dataset[60]
    (Path(uri) / "part-3.parquet").unlink()
    with pytest.raises(LightningStreamError, match=r"part-3.parquet"):
        dataset[60]


def test_nulls_are_none_where_footers_and_headers_know_them(tmp_path: Path) -> None:
    folder = tmp_path / "nulls"
    folder.mkdir()
    pq.write_table(pa.table({"id": [1, None, 3], "text": ["a", "b", None], "x": [1.5, 2.5, 3.5]}), folder / "a.parquet")
    dataset = StreamingDataset(remote=str(folder))
    assert [(dataset[k]["id"], dataset[k]["text"]) for k in range(3)] == [(1, "a"), (None, "b"), (3, None)]
    assert isinstance(dataset[0]["x"], np.float64)
    write_arrow_nulls = pa.table({"id": pa.array([1, None])})
    feather.write_feather(write_arrow_nulls, str(tmp_path / "cache.feather"))
    other = tmp_path / "other"
    other.mkdir()
    shutil.move(str(tmp_path / "cache.feather"), other / "a.feather")
    assert [StreamingDataset(remote=str(other))[k]["id"] for k in range(2)] == [1, None]
    (other / "b.jsonl").write_text('{"id": 1}\n{"id": null}\n')
    with pytest.raises(FormatError, match=r"b.jsonl.*nulls; found id: 1.*'json'"):
        StreamingDataset(remote=str(other), format="jsonl")[0]


def broken(folder: Path, kind: str) -> None:
    """Damage the last file of a dataset."""
    path = max(path for path in folder.rglob("*") if path.name not in ("index.json", "state.json"))
    data = path.read_bytes()
    path.write_bytes(data[:-10] if kind == "jsonl" else data[: len(data) // 2])


@pytest.mark.parametrize("kind", ["parquet", "arrow", "hugging_face", "feather", "jsonl", "tar", "litdata"])
def test_a_file_that_is_cut_off_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    uri = written(tmp_path / kind, kind)
    broken(Path(uri), kind)
    dataset = StreamingDataset(remote=uri)
    with pytest.raises(FormatError, match=str(tmp_path / kind)):
        [dataset[k] for k in range(ROWS)]


def test_wrong_folders_get_a_clear_error(tmp_path: Path) -> None:
    for name in ("empty", "mixed", "other", "columns", "types"):
        (tmp_path / name).mkdir()
    with pytest.raises(NotFoundError, match=r"empty holds no files"):
        StreamingDataset(remote=str(tmp_path / "empty"))[0]
    write_arrow(tmp_path / "mixed", 0, range(3))
    write_jsonl(tmp_path / "mixed", 0, range(3))
    with pytest.raises(ValueError, match=r"of one format; .* 1 arrow, 1 jsonl. Name one: format="):
        StreamingDataset(remote=str(tmp_path / "mixed"))[0]
    assert StreamingDataset(remote=str(tmp_path / "mixed"), format="arrow")[2]["id"] == 2
    (tmp_path / "other" / "a.xyz").write_text("?")
    with pytest.raises(NotFoundError, match=r"no file of a known format; it holds 1 \*.xyz"):
        StreamingDataset(remote=str(tmp_path / "other"))[0]
    pq.write_table(table(range(3)), tmp_path / "columns" / "a.parquet")
    pq.write_table(table(range(3)).select(["id"]), tmp_path / "columns" / "b.parquet")
    with pytest.raises(FormatError, match=r"b.parquet lacks text, tokens"):
        StreamingDataset(remote=str(tmp_path / "columns"))[0]
    pq.write_table(pa.table({"id": [1]}), tmp_path / "types" / "a.parquet")
    pq.write_table(pa.table({"id": ["one"]}), tmp_path / "types" / "b.parquet")
    with pytest.raises(FormatError, match=r"b.parquet.*'id'.*string is not written as 'int64'"):
        StreamingDataset(remote=str(tmp_path / "types"))[0]


def test_a_pickle_in_a_chunk_is_refused_and_not_executed(tmp_path: Path) -> None:
    write_litdata(tmp_path, 0, range(5), ("int", "pickle", "no_header_numpy:2"))
    with pytest.raises(ValueError, match=r"'text' has LitData's format 'pickle'. Unpickling would run code"):
        StreamingDataset(remote=str(tmp_path))[0]
    dataset = StreamingDataset(streams=[Stream(remote=str(tmp_path), columns=["id", "tokens"])])
    assert [dataset[k]["id"] for k in range(5)] == [*range(5)]


def test_the_parts_of_a_tuple_are_columns_and_the_tuple_is_none(tmp_path: Path) -> None:
    numbers = np.array([8, 1, 8], "<u4").tobytes()
    item = numbers + np.int64(7).tobytes() + b"a" + np.float64(0.5).tobytes()
    chunk = np.array([1, 12, 12 + len(item)], "<u4").tobytes() + item
    (tmp_path / "chunk-0-0.bin").write_bytes(chunk)
    leaf = {"type": None, "context": None, "children_spec": []}
    pair = {"type": "builtins.tuple", "context": None, "children_spec": [leaf, leaf]}
    spec = {"type": "builtins.dict", "context": '["id", "pair"]', "children_spec": [leaf, pair]}
    config = {"data_format": ["int", "str", "float"], "data_spec": json.dumps([1, spec])}
    config["types"] = {"id": "int", "pair": "json"}
    chunks = [{"chunk_bytes": len(chunk), "chunk_size": 1, "filename": "chunk-0-0.bin"}]
    (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    assert StreamingDataset(remote=str(tmp_path))[0] == {"id": 7, "pair.0": "a", "pair.1": 0.5}


def test_a_delta_table_is_read_at_a_version_with_its_partitions_and_new_columns(tmp_path: Path) -> None:
    delta = pytest.importorskip("deltalake", reason="deltalake is not installed: uv sync --extra delta")
    uri = str(tmp_path / "table")
    rows = {"id": list(range(10)), "text": [f"t{k}" for k in range(10)], "kind": ["a"] * 6 + ["b"] * 4}
    delta.write_deltalake(uri, pa.table(rows), partition_by=["kind"])
    delta.write_deltalake(uri, pa.table({"id": [10, 11], "text": ["x", "y"], "kind": ["b", None]}), mode="append")
    delta.DeltaTable(uri).delete("id = 3")
    more = pa.table({"id": [12], "text": ["z"], "kind": ["a"], "score": [0.5]})
    delta.write_deltalake(uri, more, mode="append", schema_mode="merge")

    def rows_of(**options: Any) -> list[tuple[Any, ...]]:
        dataset = StreamingDataset(remote=uri, **options)
        return sorted(tuple(dataset[k].values()) for k in range(dataset.size))

    def wanted(ids: list[int]) -> list[tuple[Any, ...]]:
        texts = {**dict(enumerate(rows["text"])), 10: "x", 11: "y", 12: "z"}
        return sorted((k, texts[k]) for k in ids)

    both = ["id", "text"]
    assert rows_of(version=0, columns=both) == wanted([*range(10)])
    assert rows_of(version=1, columns=both) == wanted([*range(12)])
    assert rows_of(columns=both) == wanted([0, 1, 2, *range(4, 13)])
    whole = StreamingDataset(remote=uri)
    found = {
        int(sample["id"]): (sample["kind"], sample["score"]) for sample in map(whole.__getitem__, range(whole.size))
    }
    assert found[12] == ("a", 0.5)
    assert found[11] == (None, None)
    assert {found[k] for k in range(6, 11)} == {("b", None)}
    assert (
        sorted(StreamingDataset(remote=uri, columns=["kind"], version=0)[k]["kind"] for k in range(10)) == rows["kind"]
    )
    for version, num_rows in ((0, 10), (None, 12), (1, 12), (0, 10)):
        assert StreamingDataset(remote=uri, local=str(tmp_path / "local"), version=version).size == num_rows
    with pytest.raises(FormatError, match="cannot be read as a Delta table"):
        rows_of(version=99)


@pytest.mark.parametrize("kind", ["parquet", "litdata"])
def test_the_command_line_knows_other_formats(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = written(tmp_path / kind, kind)
    assert main(["show", uri, "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"format                 {kind}" in shown
    assert "tokens" in shown
    assert main(["plan", uri, "--batch-size", "8"]) == 0
    assert "13 global batches of 8 samples" in capsys.readouterr().out
    assert main(["check", uri]) == 0
    assert "reading all rows" in capsys.readouterr().out
    broken(Path(uri), kind)
    assert main(["check", uri]) != 0
