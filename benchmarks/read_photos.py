"""Photo rows (JPEG, class) decoded to pixels, in one process, from local shards.

python benchmarks/read_photos.py [--rounds 3]      photos from $LIGHTNING_STREAM_SHARED/data or ../shared/data
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import Clock, main
from write_photos import COLUMNS, photos

BATCH = 64


def prepare(folder: Path) -> None:
    from lightning_stream import MDSWriter

    if not (folder / "mds" / "index.json").exists():
        with MDSWriter(out=folder / "mds", columns=COLUMNS, size_limit="16mb") as writer:
            for path, label in photos()[:1000]:
                writer.write({"image": path.read_bytes(), "label": label})


def bare_decoder(_: Path) -> dict:
    """The floor: the same decoder over bytes in memory."""
    from lightning_stream.formats.encodings.jpeg import decode_jpeg

    files = [path.read_bytes() for path, _ in photos()[:1000]]
    decode_jpeg(files[0])
    clock = Clock()
    for data in files:
        decode_jpeg(data)
    return clock.stop(len(files))


def _ours(folder: Path, decoders: dict) -> dict:
    from lightning_stream.formats.index import Index
    from lightning_stream.formats.mds.gather import gather
    from lightning_stream.formats.shard import open_shard

    index = Index.from_file(folder / "mds" / "index.json")
    shards = [open_shard(index.entry(k), folder / "mds", decoders=decoders) for k in range(len(index))]
    starts = np.concatenate([[0], np.cumsum(index.shard_sizes)])
    order = np.random.default_rng(1).permutation(index.num_samples)
    clock, count = Clock(), 0
    for k in range(0, len(order), BATCH):
        ids = order[k : k + BATCH]
        which = np.searchsorted(starts, ids, side="right") - 1
        images = gather(shards, which, ids - starts[which])["image"]
        count += sum(
            np.asarray(image.convert("RGB") if hasattr(image, "convert") else image).ndim == 3 for image in images
        )
    return clock.stop(count)


def ours(folder: Path) -> dict:
    from lightning_stream.formats.encodings.jpeg import decode_jpeg

    return _ours(folder, {"image": decode_jpeg})


def ours_scaled(folder: Path) -> dict:
    from lightning_stream.formats.encodings.jpeg import decode_jpeg

    return _ours(folder, {"image": lambda data: decode_jpeg(data, 160, 160)})


def ours_pillow(folder: Path) -> dict:
    return _ours(folder, {})


def by_loader(folder: Path, **workers: Any) -> dict:
    from lightning_stream import StreamingDataLoader, StreamingDataset
    from lightning_stream.formats.encodings.jpeg import decode_jpeg

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, decoders={"image": decode_jpeg})
    loader = StreamingDataLoader(dataset, BATCH, **workers)
    clock = Clock()
    return clock.stop(sum(len(batch["image"]) for _ in range(4) for batch in loader))


def mosaic(folder: Path) -> dict:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH, shuffle_algo="py1e")
    clock, count = Clock(), 0
    for sample in dataset:
        count += np.asarray(sample["image"].convert("RGB")).ndim == 3
    return clock.stop(int(count))


def litdata(folder: Path) -> dict:
    import litdata
    from PIL import Image

    if not (folder / "litdata" / "index.json").exists():
        writer = litdata.streaming.Cache(str(folder / "litdata"), chunk_bytes=1 << 24)
        for k, (path, label) in enumerate(photos()[:1000]):
            writer[k] = {"image": path.read_bytes(), "label": label}
        writer.done()
        writer.merge()
    dataset = litdata.StreamingDataset(str(folder / "litdata"), shuffle=True)
    clock, count = Clock(), 0
    for sample in dataset:
        count += np.asarray(Image.open(io.BytesIO(sample["image"])).convert("RGB")).ndim == 3
    return clock.stop(int(count))


if __name__ == "__main__":
    contenders = {
        "ours": ours,
        "bare decoder": bare_decoder,
        "ours, scaled": ours_scaled,
        "ours, PIL images": ours_pillow,
        "loader": by_loader,
        "loader, two threads": partial(by_loader, num_workers=2, workers="threads"),
        "loader, two workers": partial(by_loader, num_workers=2),
        "mosaic": mosaic,
        "litdata": litdata,
    }
    main(__file__, contenders, prepare)
