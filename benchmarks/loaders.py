"""The photos, and the loaders that are compared.

Each reads the same data as its own library writes it, with its usual shuffle. Without `remote` they read the folder of
the job in place; with it, they read that folder from the bucket into a cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from frame import Clock, Job, Result

BUCKET = "s3://bucket"
PHOTO = {"image": "jpeg", "label": "int"}
Loader = Callable[..., Any]


def ours(job: Job, name: str, batch: int, workers: int = 0, remote: bool = False, **options: Any) -> Any:
    """This package's loader; options are of the dataset, but `loading`."""
    from lightning_stream import StreamingDataLoader, StreamingDataset

    place = {"remote": f"{BUCKET}/{name}", "local": job.scratch} if remote else {"local": job.folder / name}
    loading = options.pop("loading", {})
    dataset = StreamingDataset(**place, shuffle=True, **options)
    return StreamingDataLoader(dataset, batch, num_workers=workers, **loading)


def mosaic(job: Job, name: str, batch: int, workers: int = 0, remote: bool = False, **options: Any) -> Any:
    """mosaicml-streaming's, over the same shards."""
    from streaming import StreamingDataLoader, StreamingDataset

    place = {"remote": f"{BUCKET}/{name}", "local": str(job.scratch)} if remote else {"local": str(job.folder / name)}
    dataset = StreamingDataset(**place, shuffle=True, batch_size=batch, shuffle_algo="py1e")
    return StreamingDataLoader(dataset, batch_size=batch, num_workers=workers, **options)


def litdata(job: Job, name: str, batch: int, workers: int = 0, remote: bool = False, **options: Any) -> Any:
    """LitData's, over the same rows; its Python needs what this package depends on."""
    import litdata as peer
    from litdata.streaming import downloader

    if not remote:
        write_litdata(job, name)

    # Its fast path would refuse the server of this machine: it has no TLS, or a certificate that it signed itself.
    downloader._OBSTORE_CLIENT_OPTIONS.update({"allow_http": True, "allow_invalid_certificates": True})  # noqa: SLF001
    place = f"{BUCKET}/{name}_litdata" if remote else str(job.folder / f"{name}_litdata")
    endpoint = {"storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}} if remote else {}
    cache = str(job.scratch) if remote else None
    dataset = peer.StreamingDataset(place, cache_dir=cache, shuffle=True, drop_last=False, **endpoint)
    return peer.StreamingDataLoader(dataset, batch_size=batch, num_workers=workers, **options)


def write_litdata(job: Job, name: str, decoders: dict[str, Any] | None = None, **chunks: int) -> None:
    """Write the rows of the shards as LitData's chunks where these are not there yet, before any clock begins."""
    import litdata as peer

    from lightning_stream import StreamingDataset

    folder = job.folder / f"{name}_litdata"
    if not (folder / "index.json").exists():
        rows = StreamingDataset(local=job.folder / name, decoders=decoders)
        writer = peer.streaming.Cache(str(folder), **(chunks or {"chunk_bytes": 1 << 23}))
        for k in range(rows.size):
            writer[k] = rows[k]
        writer.done()
        writer.merge()


def read(loader: Any, epochs: int = 1, clock: Clock | None = None) -> Result:
    """Take all batches of some epochs; notes when the first one came."""
    clock = clock or Clock()
    count = 0
    first_s = 0.0
    for _ in range(epochs):
        for batch in loader:
            first_s = first_s or clock.wall_s
            count += len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
    return clock.stop(count, first_s=first_s)


def photos(job: Job, count: int) -> list[Path]:
    """JPEG files of ``$LIGHTNING_STREAM_SHARED/data/flower_photos``, of which the figures in the docs are; or drawn."""
    usual = Path(__file__).resolve().parent.parent.parent / "shared"
    folder = Path(os.environ.get("LIGHTNING_STREAM_SHARED", usual)) / "data" / "flower_photos"
    paths = sorted(folder.glob("*/*.jpg")) or _drawn(job.folder / "drawn")
    return [paths[k % len(paths)] for k in range(count)]


def _drawn(folder: Path) -> list[Path]:
    from PIL import Image

    folder.mkdir(exist_ok=True)
    paths = [folder / f"{k}.jpg" for k in range(16)]
    for k, path in enumerate(paths):
        coarse = np.random.default_rng(k).integers(0, 256, (30, 40, 3), np.uint8)
        Image.fromarray(coarse).resize((500, 375)).save(path, "JPEG", quality=90)
    return paths
