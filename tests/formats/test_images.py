"""A photo is stored as it is in memory: its file's own bytes only while nobody changed anything."""

from __future__ import annotations

import io
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps

from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import open_shard
from lightning_stream.media.jpeg import decode_jpeg
from lightning_stream.writer import MDSWriter

JPEG = get_encoding("jpeg")
BOX = (0, 0, 24, 24)


def photo(value: int = 255, size: tuple[int, int] = (40, 32), **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x8825] = {1: "N"}
    out = io.BytesIO()
    Image.new("RGB", size, (value, value, value)).save(out, "JPEG", exif=exif, comment=b"by", **options)
    return out.getvalue()


def draw(image: Image.Image) -> None:
    ImageDraw.Draw(image).rectangle(BOX, fill=(0, 0, 0))


def set_pixels(image: Image.Image) -> None:
    pixels: Any = image.load()
    for x in range(24):
        for y in range(24):
            pixels[x, y] = (0, 0, 0)


def from_bytes(image: Image.Image) -> None:
    image.load()
    image.frombytes(bytes(3 * image.width * image.height))


def from_bytes_of_a_copy(image: Image.Image) -> None:
    image.load()
    image.im.paste((0, 0, 0), BOX)


EDITS: dict[str, Callable[[Image.Image], Any]] = {
    "draw": draw,
    "paste": lambda image: image.paste((0, 0, 0), BOX),
    "putpixel": lambda image: [image.putpixel((x, y), (0, 0, 0)) for x in range(24) for y in range(24)],
    "load": set_pixels,
    "frombytes": from_bytes,
    "core": from_bytes_of_a_copy,
    "putdata": lambda image: image.putdata([(0, 0, 0)] * (image.width * image.height)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("name", ["jpeg", "png", "pil", "list[jpeg]", "list[png]", "jpeg_array"])
def test_what_was_blackened_stays_black(tmp_path: Path, name: str, edit: Callable[[Image.Image], Any]) -> None:
    (tmp_path / "a.jpg").write_bytes(photo())
    encoding = get_encoding(name)
    with Image.open(tmp_path / "a.jpg") as image:
        edit(image)
        many = "list" in name or "array" in name
        back = encoding.decode(encoding.encode([image] if many else image))
    assert (back[0] if many else back).getpixel((5, 5)) == (0, 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.thumbnail((20, 20)),
        lambda image: image.draft("L", (10, 10)),
        lambda image: ImageOps.exif_transpose(image, in_place=True),
        lambda image: image.info.pop("exif"),
        lambda image: image.info.update(comment=b"another"),
        lambda image: image.getexif().pop(0x8825),
        lambda image: image.getexif().get_ifd(0x8825).update({1: "S"}),
        lambda image: image.putalpha(9) or image.__setattr__("_mode", "RGBA"),
    ],
    ids=["thumbnail", "draft", "exif_transpose", "info", "comment", "exif", "gps", "putalpha"],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_what_was_changed_beside_the_pixels_is_not_brought_back(
    tmp_path: Path, change: Callable[[Image.Image], Any], loaded: bool
) -> None:
    data = photo()
    (tmp_path / "a.jpg").write_bytes(data)
    with Image.open(tmp_path / "a.jpg") as image:
        if loaded:
            image.load()
        before = (image.size, image.mode, dict(image.info), image.getexif().tobytes())
        change(image)
        if loaded and before == (image.size, image.mode, dict(image.info), image.getexif().tobytes()):
            return  # draft() does nothing then
        try:
            assert JPEG.encode(image) != data
        except ValueError as error:
            assert "cannot store mode" in str(error)  # noqa: PT017


def test_of_a_file_that_was_replaced_only_what_the_image_shows_is_stored(tmp_path: Path) -> None:
    path, other = tmp_path / "a.jpg", tmp_path / "b.jpg"
    other.write_bytes(photo(0))
    for loaded in (True, False):
        path.write_bytes(photo())
        with Image.open(path) as image:
            if loaded:
                image.load()
            shutil.copy(other, tmp_path / "c.jpg")
            (tmp_path / "c.jpg").replace(path)
            assert JPEG.decode(JPEG.encode(image)).getpixel((5, 5)) == (255, 255, 255)
    memory = io.BytesIO(photo())
    image = Image.open(memory)
    image.load()
    memory.seek(0)
    memory.write(photo(0))
    assert JPEG.decode(JPEG.encode(image)).getpixel((5, 5)) == (255, 255, 255)
    with Image.open(path) as image:
        pass
    with pytest.raises(ValueError, match="closed"):
        JPEG.encode(image)


def test_an_unchanged_photo_keeps_its_bytes_also_where_its_exif_was_read(tmp_path: Path) -> None:
    data = photo()
    (tmp_path / "a.jpg").write_bytes(data)
    with Image.open(tmp_path / "a.jpg") as image:
        image.getexif().get_ifd(0x8825)
        assert JPEG.encode(image) == data
        image.load()
        assert JPEG.encode(image) == data
    assert JPEG.encode(Image.open(io.BytesIO(data))) == data
    assert JPEG.encode(JPEG.decode(data)) == data


def test_lists_take_images_files_and_pixels() -> None:
    pixels = np.full((2, 8, 8, 3), 7, np.uint8)
    objects = np.empty(2, object)
    objects[:] = [Image.fromarray(pixels[0]), Image.fromarray(pixels[1])]
    for name in ("jpeg_array", "jpegarray", "list[jpeg]", "list[png]"):
        encoding = get_encoding(name)
        for value in (pixels, list(pixels), tuple(pixels), objects, [Image.fromarray(one) for one in pixels]):
            back = encoding.decode(encoding.encode(value))
            assert [np.asarray(one).tolist() for one in back] == pixels.tolist()
        for wrong in (pixels[0], pixels[0, 0], "ab", 3, [pixels[0].astype(float)]):
            with pytest.raises(TypeError, match="takes a"):
                encoding.encode(wrong)
        with pytest.raises(ValueError, match="takes bytes that are a stored value"):
            encoding.encode(b"ab")
    assert JPEG.encode(memoryview(photo())) == JPEG.encode(bytearray(photo())) == photo()


def bomb(name: str) -> bytes:
    if name == "png":
        head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
        chunk = b"IHDR" + head
        return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    at = photo().index(b"\xff\xc0")
    return photo()[: at + 5] + struct.pack(">HH", 60_000, 60_000) + photo()[at + 9 :]


@pytest.mark.parametrize("name", ["jpeg", "png", "list[jpeg]", "list[png]", "jpeg_array", "pil", "list[pil]"])
def test_a_decompression_bomb_is_a_bad_sample(tmp_path: Path, name: str) -> None:
    data = bomb("png" if "png" in name else "jpeg")
    if "pil" in name:
        data = struct.pack("<III", 60_000, 60_000, 3) + b"RGB" + bytes(100)
    if "list" in name or "array" in name:
        data = (b"" if "array" in name else bytes(4)) + struct.pack("<II", 1, len(data)) + data
    with MDSWriter(out=tmp_path, columns={"x": "bytes"}) as writer:
        writer.write_batch({"x": [data, data]})
    text = (tmp_path / "index.json").read_text().replace('"bytes"]', f'"{name}"]')
    shard = open_shard(Index.from_bytes(text.encode(), "x").entry(0), tmp_path)
    for read in (lambda: shard.sample(1), lambda: shard.columns(np.array([0, 1]))):
        with pytest.raises(FormatError, match=r"shard.00000.mds, sample [01], column 'x': cannot be decoded"):
            read()


def test_a_jpeg_of_too_many_pixels_is_refused_before_its_memory_is_taken() -> None:
    with pytest.raises(ValueError, match="exceeds limit"):
        decode_jpeg(bomb("jpeg"))


@pytest.mark.parametrize("name", ["jpeg", "png", "list[jpeg]", "list[png]", "jpeg_array"])
@pytest.mark.parametrize("kind", ["GIF", "BMP", "EPS", "TIFF", "PPM"])
def test_an_image_column_opens_no_other_format(name: str, kind: str) -> None:
    out = io.BytesIO()
    Image.new("RGB", (4, 4)).save(out, kind)
    data = out.getvalue()
    if "list" in name or "array" in name:
        data = (b"" if "array" in name else bytes(4)) + struct.pack("<II", 1, len(data)) + data
    with pytest.raises(OSError, match="cannot identify"):
        get_encoding(name).decode(data)
    with pytest.raises(ValueError, match="not a readable JPEG"):
        decode_jpeg(out.getvalue())
