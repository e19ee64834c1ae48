"""Samples and shards that cannot be read: raised by default, or replaced as the order plans, alike in every world."""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset, World  # noqa: E402
from lightning_stream.errors import DigestError, FormatError, NotFoundError  # noqa: E402
from lightning_stream.formats.encodings import get_encoding  # noqa: E402
from lightning_stream.order.ledger import replacements  # noqa: E402

NUM_SAMPLES, BAD = 60, 17
SUBSTITUTE: dict[str, Any] = {"on_bad": "substitute"}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Small photos in several shards."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "remote"
    columns = {"id": "int", "image": "jpeg"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=8000, hashes=["xxh64"]) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": number, "image": image.new("RGB", (16, 16), (number, 0, 0))})
    return folder


def spoil_sample(folder: Path, sample_id: int) -> None:
    """Make a sample's JPEG none, as its writer would have written it: the index agrees with the bytes."""
    import xxhash

    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        if sample_id < shard["samples"]:
            break
        sample_id -= shard["samples"]
    path = folder / shard["raw_data"]["basename"]
    content = bytearray(path.read_bytes())
    begin, end = np.frombuffer(bytes(content[4 + 4 * sample_id : 12 + 4 * sample_id]), "<u4").tolist()
    content[begin + 12 : end] = bytes(end - begin - 12)  # behind the JPEG's size, and the id
    path.write_bytes(content)
    shard["raw_data"]["hashes"] = {"xxh64": xxhash.xxh64(bytes(content)).hexdigest()}
    (folder / "index.json").write_text(json.dumps(index))


def spoil_shard(folder: Path, number: int) -> list[int]:
    """Change a byte of a shard; the ids of its samples."""
    sizes = [shard["samples"] for shard in json.loads((folder / "index.json").read_text())["shards"]]
    path = folder / f"shard.{number:05}.mds"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return list(range(sum(sizes[:number]), sum(sizes[: number + 1])))


def dataset_in(folder: Path, shards: Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(remote=shards, local=folder, shuffle=True, **options)


def steps_of(loaders: list[StreamingDataLoader]) -> list[list[int]]:
    """Each global batch's delivered ids, sorted."""
    steps = zip(*loaders, strict=True)
    return [sorted(number for batch in step for number in batch["id"].tolist()) for step in steps]


def test_by_default_bad_data_raises(shards: Path, tmp_path: Path) -> None:
    spoil_sample(shards, BAD)
    for workers in (0, 1):
        with pytest.raises(FormatError, match="column 'image': cannot be decoded"):
            list(StreamingDataLoader(dataset_in(tmp_path / "a", shards), 8, num_workers=workers))
    spoil_shard(shards, 0)
    with pytest.raises(DigestError, match=r"shard\.00000\.mds"):
        list(StreamingDataLoader(dataset_in(tmp_path / "b", shards, on_bad={"sample": "substitute"}), 8))


def test_a_bad_sample_is_replaced_by_the_one_the_order_plans(shards: Path, tmp_path: Path) -> None:
    spoil_sample(shards, BAD)
    dataset = dataset_in(tmp_path / "cache", shards, **SUBSTITUTE)
    loader = StreamingDataLoader(dataset, 8)
    seen, made = [], []
    for batch in loader:
        assert len(batch["image"]) == len(batch["id"])
        seen += batch["id"].tolist()
        assert loader.last_batch is not None
        made += loader.last_batch.substitutions
    (one,) = made
    planned = replacements(dataset.snapshot, dataset.shuffle_seed, 0, one.position, BAD)
    assert (one.drawn, one.delivered) == (BAD, next(planned))
    assert loader.num_substituted == 1
    list(loader)
    assert loader.num_substituted == 2  # over all epochs
    assert sorted([*seen, BAD]) == sorted([*range(NUM_SAMPLES), one.delivered, *loader_filler(loader)])
    line = json.loads((tmp_path / "cache" / "quarantine.jsonl").read_text())
    assert (line["sample"], line["delivered"], line["position"]) == (BAD, one.delivered, one.position)
    assert "cannot be decoded" in line["reason"]


@pytest.mark.usefixtures("workers_by_fork")
def test_a_launch_lists_a_sample_once_though_each_epoch_has_new_workers(shards: Path, tmp_path: Path) -> None:
    spoil_sample(shards, BAD)
    for launch in (1, 2):
        dataset = dataset_in(tmp_path / "cache", shards, on_bad={"sample": "substitute"})
        loader = StreamingDataLoader(dataset, 8, num_workers=1)
        for _ in range(3):
            assert BAD not in {number for batch in loader for number in batch["id"].tolist()}
        list(StreamingDataLoader(dataset.subset([BAD, 2, 3]), 1))
        lines = (tmp_path / "cache" / "quarantine.jsonl").read_text().splitlines()
        assert [json.loads(line)["sample"] for line in lines] == [BAD] * launch


def loader_filler(loader: StreamingDataLoader) -> list[int]:
    assert loader.last_batch is not None
    return loader.last_batch.ids[loader.last_batch.filler].tolist()


@pytest.mark.parametrize("transform", [None, dict], ids=["columns", "samples"])
def test_substitutions_are_the_same_in_every_world(shards: Path, tmp_path: Path, transform: Any) -> None:
    spoil_sample(shards, BAD)
    bad = {BAD, *spoil_shard(shards, 3)}
    worlds = []
    for number, (num_ranks, workers) in enumerate([(1, 0), (2, 1), (4, 0)]):
        policy = {"sample": "substitute", "shard": "substitute", "quarantine": tmp_path / f"{number}.jsonl"}
        options: dict[str, Any] = {"on_bad": policy, "transform": transform}
        loaders = [
            StreamingDataLoader(
                dataset_in(tmp_path / f"cache{number}", shards, **options),
                global_batch_size=8, num_workers=workers, world=World(rank, num_ranks, num_ranks), tail="exact",
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        worlds.append(steps_of(loaders))
        assert sum(loader.num_substituted for loader in loaders) == len(bad)
        lines = [json.loads(line) for line in (tmp_path / f"{number}.jsonl").read_text().splitlines()]
        assert {line["sample"] for line in lines} == bad
    assert len(worlds[0]) == 8
    assert worlds[0] == worlds[1] == worlds[2]
    assert not bad & {number for step in worlds[0] for number in step}


def test_a_shard_that_is_missing_is_replaced_too(shards: Path, tmp_path: Path) -> None:
    (shards / "shard.00002.mds").unlink()
    with pytest.raises(NotFoundError):
        list(StreamingDataLoader(dataset_in(tmp_path / "a", shards, on_bad={"sample": "substitute"}), 4))
    loader = StreamingDataLoader(dataset_in(tmp_path / "b", shards, **SUBSTITUTE), 4)
    assert sum(len(batch["id"]) for batch in loader) == NUM_SAMPLES
    assert len(list(dataset_in(tmp_path / "b", shards, **SUBSTITUTE))) == NUM_SAMPLES


def test_steps_go_on_from_a_state_with_the_same_substitutions(shards: Path, tmp_path: Path) -> None:
    spoil_shard(shards, 1)
    whole = StreamingDataLoader(dataset_in(tmp_path / "a", shards, **SUBSTITUTE), 4)
    batches = [batch["id"].tolist() for batch in whole]
    first = StreamingDataLoader(dataset_in(tmp_path / "b", shards, **SUBSTITUTE), 4)
    some = iter(first)
    for _ in range(6):
        next(some)
    second = StreamingDataLoader(dataset_in(tmp_path / "c", shards, **SUBSTITUTE), 4)
    second.load_state_dict(first.state_dict())
    assert [batch["id"].tolist() for batch in second] == batches[6:]


def test_a_policy_is_one_of_two(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_bad must be 'raise' or 'substitute', also for its parts; found 'skip'"):
        StreamingDataset(local=tmp_path, on_bad="skip")  # type: ignore[arg-type]


def broken(error: BaseException) -> Any:
    def decode(data: bytes) -> int:
        if (number := int.from_bytes(data[:8], "little")) == BAD:
            raise error
        return number

    return decode


class OwnError(Exception):
    pass


WHATEVER = [
    OwnError("mine"),
    pickle.UnpicklingError("bad"),
    EOFError(),
    zlib.error("bad"),
    RuntimeError("x"),
    StopIteration(),
]


@pytest.mark.parametrize("error", WHATEVER, ids=lambda error: type(error).__name__)
def test_whatever_a_decoder_raises_names_the_sample_and_is_bad_for_the_policy(
    shards: Path, tmp_path: Path, error: Exception
) -> None:
    options: dict[str, Any] = {"decoders": {"id": broken(error)}}
    dataset = dataset_in(tmp_path / "a", shards, **options)
    number = int(dataset.snapshot.shards_of(np.array([BAD]))[0])
    where = rf"sample {BAD}, in shard\.{number:05}\.mds of {shards}: .*, column 'id': .*{type(error).__name__}"
    for read in (
        lambda: dataset[BAD],
        lambda: dataset.read_batch([3, BAD, 2]),
        lambda: list(StreamingDataLoader(dataset, 8)),
    ):
        with pytest.raises(FormatError, match=where) as caught:
            read()
        assert caught.value.__cause__ is error
    policy = {"sample": "substitute", "quarantine": tmp_path / "bad.jsonl"}
    loader = StreamingDataLoader(dataset_in(tmp_path / "a", shards, on_bad=policy, **options), 8)
    assert BAD not in {number for batch in loader for number in batch["id"]}
    assert json.loads((tmp_path / "bad.jsonl").read_text())["sample"] == BAD


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ImportError("no module")])
def test_an_interrupt_or_a_missing_package_is_no_bad_sample(shards: Path, tmp_path: Path, error: BaseException) -> None:
    dataset = dataset_in(tmp_path, shards, decoders={"id": broken(error)}, on_bad={"sample": "substitute"})
    with pytest.raises(type(error)):
        list(StreamingDataLoader(dataset, 8))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photos, of which one is cut off in the middle of its pixels."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    out = BytesIO()
    image.fromarray(pixels).save(out, "JPEG")
    columns = {"id": "int", "image": "jpeg", "images": "list[jpeg]"}
    with MDSWriter(out=tmp_path / "photos", columns=columns, size_limit=100_000) as writer:
        for number in range(NUM_SAMPLES):
            whole, cut = out.getvalue(), out.getvalue()[:-500]
            images = [whole, cut if number == BAD + 1 else whole]
            writer.write({"id": number, "image": cut if number == BAD else whole, "images": images})
    return tmp_path / "photos"


@pytest.mark.usefixtures("workers_by_fork")
@pytest.mark.parametrize(
    "transform", [None, lambda sample: {"id": sample["id"], "size": sample["image"].convert("L").size}]
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_photo_that_is_cut_off_is_bad_though_images_are_decoded_late(
    photos: Path, tmp_path: Path, transform: Any, num_workers: int
) -> None:
    options = {"transform": transform}
    dataset = dataset_in(
        tmp_path / "cache", photos, on_bad={"sample": "substitute", "quarantine": tmp_path / "bad.jsonl"}, **options
    )
    loader = StreamingDataLoader(dataset, 8, num_workers=num_workers)
    seen = {int(number) for batch in loader for number in batch["id"]}
    assert seen == {*range(NUM_SAMPLES)} - {BAD, BAD + 1}
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert {line["sample"] for line in lines} == {BAD, BAD + 1}
    assert all("truncated" in line["reason"] and "column 'image" in line["reason"] for line in lines)
    assert dataset_in(tmp_path / "cache", photos)[BAD]["image"].size == (64, 64)  # without the policy it is opened only


def test_an_image_column_opens_jpeg_and_png_only() -> None:
    image = pytest.importorskip("PIL.Image")
    for name, other in (("jpeg", "TIFF"), ("png", "EPS"), ("jpeg", "GIF"), ("list[png]", "BMP")):
        out = BytesIO()
        image.new("RGB", (4, 4)).save(out, other)
        data = out.getvalue()
        if name.startswith("list"):
            data = struct.pack("<III", 0, 1, len(data)) + data
        with pytest.raises(OSError, match="cannot identify"):
            get_encoding(name).decode(data)


def test_an_image_of_too_many_pixels_is_a_bad_sample(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    with MDSWriter(out=tmp_path / "d", columns={"image": "png"}) as writer:
        writer.write({"image": bomb})
    with pytest.raises(FormatError, match=r"sample 0, in shard\.00000\.mds of .*'image': .*DecompressionBombError"):
        StreamingDataset(local=tmp_path / "d")[0]
