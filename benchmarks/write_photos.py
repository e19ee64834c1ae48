"""Writing JPEG photos (as files on disk, their class as a number) to a local folder.

python benchmarks/write_photos.py [--rounds 3]      photos from $LIGHTNING_STREAM_SHARED/data or ../shared/data
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from side_by_side import Clock, main

COLUMNS = {"image": "jpeg", "label": "int"}
TIMES = 3


def photos() -> list[tuple[Path, int]]:
    checkout = Path(__file__).resolve().parent.parent
    root = Path(os.environ.get("LIGHTNING_STREAM_SHARED", checkout.parent / "shared")) / "data" / "flower_photos"
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    return [(path, label) for label, name in enumerate(classes) for path in sorted((root / name).glob("*.jpg"))] * TIMES


def prepare(_: Path) -> None:
    for path, _ in photos():
        path.read_bytes()


def write(folder: Path, writer_class: type, as_image: bool, hashes: tuple[str, ...] = ("sha1",)) -> dict:
    from PIL import Image

    out, found = folder / "out", photos()
    shutil.rmtree(out, ignore_errors=True)
    clock = Clock()
    with writer_class(out=str(out), columns=COLUMNS, hashes=list(hashes)) as writer:
        for path, label in found:
            if as_image:
                with Image.open(path) as image:
                    writer.write({"image": image, "label": label})
            else:
                writer.write({"image": path.read_bytes(), "label": label})
    return clock.stop(len(found))


def ours(folder: Path) -> dict:
    from lightning_stream import MDSWriter

    return write(folder, MDSWriter, as_image=True)


def mosaic(folder: Path) -> dict:
    from streaming import MDSWriter

    return write(folder, MDSWriter, as_image=True)


def ours_bytes(folder: Path) -> dict:
    from lightning_stream import MDSWriter

    return write(folder, MDSWriter, as_image=False)


def mosaic_bytes(folder: Path) -> dict:
    from streaming import MDSWriter

    return write(folder, MDSWriter, as_image=False)


def ours_plain(folder: Path) -> dict:
    from lightning_stream import MDSWriter

    return write(folder, MDSWriter, as_image=False, hashes=())


def mosaic_plain(folder: Path) -> dict:
    from streaming import MDSWriter

    return write(folder, MDSWriter, as_image=False, hashes=())


def bare_file(folder: Path) -> dict:
    """The same bytes read, and written to one file by plain writes, and synced."""
    found = photos()
    clock = Clock()
    with (folder / "bare").open("wb", buffering=0) as file:
        for path, _ in found:
            file.write(path.read_bytes())
        os.fsync(file.fileno())
    result = clock.stop(len(found))
    (folder / "bare").unlink()
    return result


class NoWriter:
    """Takes samples and does nothing: what opening the photos costs by itself."""

    def __init__(self, **_: object) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, _: object) -> None:
        pass


def opening(folder: Path) -> dict:
    return write(folder, NoWriter, as_image=True)


def reading(folder: Path) -> dict:
    return write(folder, NoWriter, as_image=False)


if __name__ == "__main__":
    contenders = {
        "ours, images": ours,
        "mosaic, images": mosaic,
        "only opening images": opening,
        "ours, bytes": ours_bytes,
        "mosaic, bytes": mosaic_bytes,
        "ours, bytes, no hash": ours_plain,
        "mosaic, bytes, no hash": mosaic_plain,
        "bare file": bare_file,
        "only reading bytes": reading,
    }
    main(__file__, contenders, prepare)
