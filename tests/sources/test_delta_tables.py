"""Delta tables: deletion vectors as the protocol defines them, checkpoints, versions, and tables that were vacuumed."""

from __future__ import annotations

import json
import shutil
import struct
import uuid
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
delta = pytest.importorskip("deltalake", reason="deltalake is not installed: uv sync --extra delta")

from lightning_stream import StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.convert import convert  # noqa: E402
from lightning_stream.errors import FormatError, LightningStreamError, NotFoundError, SnapshotMismatch  # noqa: E402

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_VECTORS = {"minReaderVersion": 3, "minWriterVersion": 7}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


def z85(data: bytes) -> str:
    words = struct.unpack(f">{len(data) // 4}I", data)
    return "".join(_Z85[word // 85**k % 85] for word in words for k in (4, 3, 2, 1, 0))


def bitmap(rows: Sequence[int]) -> bytes:
    """A RoaringBitmapArray with one bitmap, whose containers are arrays."""
    containers: dict[int, list[int]] = {}
    for row in sorted(rows):
        containers.setdefault(row >> 16, []).append(row & 0xFFFF)
    keys = b"".join(struct.pack("<HH", key, len(lows) - 1) for key, lows in containers.items())
    data, offsets, at = b"", b"", 8 + 8 * len(containers)
    for lows in containers.values():
        offsets += struct.pack("<I", at + len(data))
        data += struct.pack(f"<{len(lows)}H", *lows)
    roaring = struct.pack("<II", 12346, len(containers)) + keys + offsets + data
    return struct.pack("<iqi", 1681511377, 1, 0) + roaring


def commit(table: Path, version: int, *actions: dict[str, Any]) -> None:
    path = table / "_delta_log" / f"{version:020}.json"
    path.write_text("".join(json.dumps(action) + "\n" for action in actions))


def with_vectors(table: Path, vectors: dict[str, dict[str, Any]]) -> None:
    """Commit a version in which these files, by the beginning of their path, have these deletion vectors."""
    log = sorted((table / "_delta_log").glob("*.json"))
    adds = [json.loads(line)["add"] for path in log for line in path.read_text().splitlines() if '"add"' in line]
    features = {**_VECTORS, "readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    actions: list[dict[str, Any]] = [{"protocol": features}]
    for add in adds:
        vector = next((one for name, one in vectors.items() if add["path"].startswith(name)), None)
        if vector is not None:
            removed = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True, "size": add["size"]}
            actions += [{"remove": removed}, {"add": {**add, "deletionVector": vector}}]
    commit(table, len(log), *actions)


def vector_file(table: Path, rows: Sequence[int], folder: str = "") -> dict[str, Any]:
    data, name = bitmap(rows), uuid.UUID(int=2**100 + len(rows))
    path = table / folder / f"deletion_vector_{name}.bin"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\1" + struct.pack(">i", len(data)) + data + struct.pack(">I", zlib.crc32(data)))
    return {
        "storageType": "u",
        "pathOrInlineDv": folder + z85(name.bytes),
        "offset": 1,
        "sizeInBytes": len(data),
        "cardinality": len(rows),
    }


def inline(rows: Sequence[int]) -> dict[str, Any]:
    data = bitmap(rows)
    data += bytes(-len(data) % 4)
    return {"storageType": "i", "pathOrInlineDv": z85(data), "sizeInBytes": len(data), "cardinality": len(rows)}


def ids(uri: Path | str, **options: Any) -> list[int]:
    dataset = StreamingDataset(remote=str(uri), columns=["id"], **options)
    return sorted(int(dataset[k]["id"]) for k in range(dataset.size))


@pytest.mark.parametrize("kind", ["inline", "file", "file in a folder"])
def test_deleted_rows_of_every_kind_of_vector_are_not_read(kind: str, tmp_path: Path) -> None:
    table, num_rows = tmp_path / "table", 70_000
    properties = delta.WriterProperties(max_row_group_size=20_000)
    rows = pa.table({"id": range(num_rows), "kind": ["a b"] * num_rows})
    delta.write_deltalake(str(table), rows, partition_by=["kind"], writer_properties=properties)
    deleted = [0, 19_999, 20_000, 65_535, 65_536, num_rows - 1]
    vector = inline(deleted) if kind == "inline" else vector_file(table, deleted, "ab" if "folder" in kind else "")
    with_vectors(table, {"kind=": vector})
    kept = sorted(set(range(num_rows)) - set(deleted))
    assert delta.DeltaTable(str(table)).version() == 1
    dataset = StreamingDataset(remote=str(table), columns=["id", "kind"])
    assert dataset.size == len(kept)
    assert (int(dataset[0]["id"]), dataset[0]["kind"]) == (1, "a b")
    some = [0, 19_997, 19_998, 65_500, len(kept) - 1]
    assert [int(dataset[k]["id"]) for k in some] == [kept[k] for k in some]
    assert StreamingDataset(remote=str(table), version=0).size == num_rows


def test_a_file_whose_rows_are_all_deleted_gives_no_shard(tmp_path: Path) -> None:
    table = tmp_path / "table"
    for begin in (0, 5):
        delta.write_deltalake(str(table), pa.table({"id": range(begin, begin + 5)}), mode="append")
    first = json.loads((table / "_delta_log" / f"{0:020}.json").read_text().splitlines()[-1])["add"]["path"]
    with_vectors(table, {first: inline(range(5))})
    assert ids(table) == [*range(5, 10)]


def test_a_version_whose_rows_are_all_deleted_is_an_error_that_says_so(tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    delta.write_deltalake(table, pa.table({"id": range(5)}))
    delta.DeltaTable(table).delete()
    with pytest.raises(NotFoundError, match=r"version 1 of the Delta table .*table has no rows"):
        StreamingDataset(remote=table)[0]
    with pytest.raises(NotFoundError, match=r"version 1 of the Delta table .*table has no rows"):
        convert(table, tmp_path / "out")


def test_checkpoints_and_versions_are_read(tmp_path: Path) -> None:
    table = tmp_path / "table"
    for number in range(4):
        delta.write_deltalake(str(table), pa.table({"id": [number]}), mode="append")
    delta.DeltaTable(str(table)).create_checkpoint()
    delta.write_deltalake(str(table), pa.table({"id": [4]}), mode="append")
    for path in list((table / "_delta_log").glob("*.json"))[:3]:  # those before the checkpoint are not needed
        if int(path.stem) < 3:
            path.unlink()
    assert ids(table) == [0, 1, 2, 3, 4]
    assert ids(table, version=3) == [0, 1, 2, 3]


def test_a_resume_names_the_version_of_the_table_that_it_needs(tmp_path: Path) -> None:
    table = tmp_path / "table"
    delta.write_deltalake(str(table), pa.table({"id": range(40)}))
    loader = StreamingDataLoader(StreamingDataset(remote=str(table), shuffle=True), global_batch_size=4)
    first = [next(iter(loader))]
    state = loader.state_dict()
    assert [version[17:] for version in state["snapshot"]["versions"]] == ["0"]
    delta.write_deltalake(str(table), pa.table({"id": range(40, 50)}), mode="append")
    shutil.rmtree(tmp_path / "cache")  # on another machine
    loader = StreamingDataLoader(StreamingDataset(remote=str(table), shuffle=True), global_batch_size=4)
    with pytest.raises(SnapshotMismatch, match=r"pass to Stream or StreamingDataset: version=0 for"):
        loader.load_state_dict(state)
    loader = StreamingDataLoader(StreamingDataset(remote=str(table), shuffle=True, version=0), global_batch_size=4)
    loader.load_state_dict(state)
    seen = [int(one) for batch in [*first, *loader] for one in batch["id"]]
    assert sorted(seen) == [*range(40)]


def test_a_vacuumed_table_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    table = tmp_path / "table"
    delta.write_deltalake(str(table), pa.table({"id": range(10)}))
    delta.write_deltalake(str(table), pa.table({"id": range(5)}), mode="overwrite")
    dataset = StreamingDataset(remote=str(table), version=0)
    assert dataset.size == 10
    gone = delta.DeltaTable(str(table)).vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert gone
    with pytest.raises(NotFoundError, match=rf"{gone[0]}: a file must stay .* is gone.*vacuum"):
        dataset[3]
    with pytest.raises(LightningStreamError, match=rf"{gone[0]} belongs to version 0.*vacuumed. Read a newer version"):
        StreamingDataset(remote=str(table), version=0)[0]
    assert ids(table) == [0, 1, 2, 3, 4]


def test_tables_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "all" / "table"
    delta.write_deltalake(str(table), pa.table({"id": [1]}))
    with pytest.raises(ValueError, match=r"a Delta table must be opened by its own folder; .*all/table/ is one"):
        StreamingDataset(remote=str(table.parent))[0]
    for options in ({"remote": str(table), "format": "parquet"}, {"remote": f"{table}/part-*.parquet"}):
        with pytest.raises(ValueError, match=r"whose files hold deleted rows, too. Pass its folder, and no format"):
            StreamingDataset(**options)[0]
    assert StreamingDataset(remote=f"delta://{table}")[0]["id"] == 1
    with pytest.raises(ValueError, match=r"takes the whole URL of a table.*e.g. delta://s3://bucket/table"):
        StreamingDataset(remote="delta://bucket/table")
    path = table / "_delta_log" / f"{0:020}.json"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    about = next(line["metaData"] for line in lines if "metaData" in line)
    about["configuration"] = {"delta.columnMapping.mode": "name"}
    named = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "column-1"}
    about["schemaString"] = about["schemaString"].replace('"metadata":{}', f'"metadata":{json.dumps(named)}')
    features = {"readerFeatures": ["columnMapping"], "writerFeatures": ["columnMapping"]}
    commit(table, 1, {"protocol": {**_VECTORS, **features}}, {"metaData": about})
    with pytest.raises(FormatError, match=r"table: columns with mapped names cannot be read"):
        StreamingDataset(remote=str(table))[0]
    path.write_text("{bad")
    with pytest.raises(FormatError, match=r"table cannot be read as a Delta table"):
        StreamingDataset(remote=str(table), version=0)[0]


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_log_names_no_file_outside_its_table(place: str, tmp_path: Path) -> None:
    table, other = tmp_path / "table", tmp_path / "other"
    for folder in (table, other):
        delta.write_deltalake(str(folder), pa.table({"id": range(40)}))
    log = table / "_delta_log" / f"{0:020}.json"
    named = next((table if place == "inside" else other).glob("*.parquet"))
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "add" in action:
            action["add"]["path"] = named.as_uri()
    commit(table, 0, *actions)
    if place == "inside":
        assert ids(table) == list(range(40))
        return
    with pytest.raises(FormatError, match="stay below"):
        ids(table)


def test_a_file_of_deleted_rows_lies_in_its_table(tmp_path: Path) -> None:
    table = tmp_path / "table"
    delta.write_deltalake(str(table), pa.table({"id": range(40)}))
    vector = vector_file(tmp_path, [1, 2, 3])
    path = next(tmp_path.glob("deletion_vector_*.bin"))
    with_vectors(table, {"": {**vector, "storageType": "p", "pathOrInlineDv": path.as_uri()}})
    with pytest.raises(FormatError, match="stay below"):
        ids(table)


def test_a_conversion_reads_no_deleted_rows_of_tables_below_its_source(tmp_path: Path) -> None:
    tables = [tmp_path / "all" / name for name in "ab"]
    for table in tables:
        delta.write_deltalake(str(table), pa.table({"id": [1, 2]}))
        delta.DeltaTable(str(table)).delete("id = 1")
    with pytest.raises(ValueError, match="a Delta table must be opened by its own folder"):
        convert(tables[0].parent, tmp_path / "out", num_workers=1)
    for source in (tables, [f"{table}/*.parquet" for table in tables]):
        with pytest.raises(ValueError, match="is a Delta table, whose files hold deleted rows, too"):
            convert(source, tmp_path / "out", num_workers=1)
    done = convert(tables[:1], tmp_path / "out", num_workers=1)
    assert [sample["id"] for sample in StreamingDataset(local=done.uri)] == [2]


def test_partitions_by_binary_values_are_refused(tmp_path: Path) -> None:
    delta.write_deltalake(tmp_path, pa.table({"id": [0], "b": pa.array([b"x"])}), partition_by=["b"])
    with pytest.raises(FormatError, match="partitioned by binary values"):
        ids(tmp_path)


def test_partitions_by_moments_and_decimals_are_read(tmp_path: Path) -> None:
    moment, price = datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC), Decimal("1.50")
    moments = pa.array([moment, None], pa.timestamp("us", tz="UTC"))
    table = pa.table({"id": [0, 1], "at": moments, "price": pa.array([price, None], pa.decimal128(7, 2))})
    delta.write_deltalake(tmp_path / "table", table, partition_by=["at", "price"])
    rows = sorted(StreamingDataset(remote=str(tmp_path / "table")), key=lambda row: row["id"])
    assert [(row["at"], row["price"]) for row in rows] == [(moment.isoformat(), "1.50"), (None, None)]
    delta.write_deltalake(tmp_path / "whole", table.slice(0, 1), partition_by=["at", "price"])
    (row,) = StreamingDataset(remote=str(tmp_path / "whole"))
    assert (row["at"], row["price"]) == (int(moment.timestamp()) * 10**6 + 6, price)
