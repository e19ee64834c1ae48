"""Image folders: mixed files keep their bytes, and truncated ones are never lost without a word."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_stream import LocalDataset
from lightning_stream.convert import convert

PLAIN: dict[str, Any] = {"num_workers": 1}
image = pytest.importorskip("PIL.Image")


def picture(kind: str, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    image.effect_noise((20, 20), 50).convert(mode).save(out, kind)
    return out.getvalue()


def folder(tmp_path: Path, **files: bytes) -> Path:
    for name, data in files.items():
        path = tmp_path / "in" / "dog" / name.replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "in"


def test_a_folder_of_png_and_jpeg_files_is_read_as_images(tmp_path: Path) -> None:
    kinds = {"a_JPEG": picture("PNG"), "b_JPEG": picture("JPEG", "CMYK"), "c_jpg": picture("JPEG")}
    done = convert(folder(tmp_path, **kinds), tmp_path / "out", **PLAIN)
    assert done.columns["image"] == "jpeg"
    dataset = LocalDataset(tmp_path / "out")
    assert [dataset[k]["image"].format for k in range(3)] == ["PNG", "JPEG", "JPEG"]
    for k, data in enumerate(kinds.values()):
        assert dataset[k]["image"].tobytes() == image.open(io.BytesIO(data)).tobytes()


def test_images_of_several_kinds_keep_their_bytes(tmp_path: Path, files_of: Any, samples_of: Any) -> None:
    kinds = {"a_JPEG": picture("PNG"), "b_JPEG": picture("JPEG", "CMYK"), "c_jpg": picture("JPEG"), "d_webp": b"RIFF"}
    done = convert(folder(tmp_path, **kinds), tmp_path / "out", **PLAIN)
    assert done.columns["image"] == "bytes"
    assert [sample["image"] for sample in samples_of(tmp_path / "out")] == list(kinds.values())
    assert not [name for name in files_of(tmp_path / "out") if name.endswith(".zstd")]


@pytest.mark.parametrize(("kind", "encoding"), [("JPEG", "jpeg"), ("PNG", "png"), ("WEBP", "bytes")])
def test_a_truncated_image_is_refused_by_name_or_skipped_by_name(
    tmp_path: Path, samples_of: Any, caplog: Any, kind: str, encoding: str
) -> None:
    source = folder(tmp_path, a_jpg=picture(kind), b_jpg=picture(kind)[:-9], c_jpg=picture(kind))
    with pytest.raises(ValueError, match=r"b\.jpg is truncated.*'skip'"):
        convert(source, tmp_path / "out", **PLAIN)
    with caplog.at_level(logging.WARNING):
        done = convert(source, tmp_path / "out", **PLAIN, source_options={"truncated": "skip"})
    assert done.columns["image"] == encoding
    assert [sample["name"] for sample in samples_of(tmp_path / "out")] == ["dog/a.jpg", "dog/c.jpg"]
    assert "b.jpg: the image is truncated" in caplog.text
    with pytest.raises(ValueError, match="'refuse' or 'skip'"):
        convert(source, tmp_path / "out", **PLAIN, source_options={"truncated": "no"})
