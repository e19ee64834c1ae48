"""Photos decoded in parts: the pixels of a whole decode, the same in every run, and odd files alike or refused."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
PIL = pytest.importorskip("PIL", reason="images need Pillow: uv sync --extra images")

from PIL import Image  # noqa: E402

from lightning_stream import (  # noqa: E402
    DecodeCenterCrop,
    DecodeRandomCrop,
    MDSWriter,
    StreamingDataLoader,
    StreamingDataset,
)
from lightning_stream.errors import FormatError, MissingExtraError  # noqa: E402
from lightning_stream.media import crops, jpeg  # noqa: E402

# torchvision deprecates its decoders, for those of TorchCodec.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
SIZE = 32
ROUNDED = 1  # torchvision computes with floats or with integers, depending on its version and the processor


def photo(size: tuple[int, int] = (320, 240), kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """A smooth picture, whose scaled pixels are close to those of the whole one."""
    x, y = np.meshgrid(np.linspace(0, 6, size[0]), np.linspace(0, 5, size[1]))
    pixels = np.stack([np.sin(x) * 90 + 128, np.cos(y) * 90 + 128, np.sin(x + y) * 90 + 128], -1)
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).convert(mode).save(out, kind, **options)
    return out.getvalue()


def at(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def pixels_of(data: Any, rng: np.random.Generator | None = None, **options: Any) -> Any:
    return DecodeRandomCrop(SIZE, **options)({"image": data}, rng or at(0))["image"]


@pytest.fixture(params=["simplejpeg", "pillow", "torchvision"])
def decoder(request: pytest.FixtureRequest) -> str:
    if request.param != "pillow":
        pytest.importorskip(request.param, reason="a decoder: uv sync --extra torchvision")
    return str(request.param)


def whole_box(crop: DecodeRandomCrop, height: int, width: int, seed: int) -> tuple[Any, bool]:
    """The part that a crop draws, and whether it mirrors."""
    rng = at(seed)
    return crop._draw(height, width, rng.random), rng.random() < crop.flip


@pytest.mark.parametrize("given", [bytes, lambda data: Image.open(io.BytesIO(data))], ids=["bytes", "opened"])
def test_unscaled_parts_have_the_pixels_of_a_whole_decode(decoder: str, given: Callable[[bytes], Any]) -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    data, crop = photo((300, 200)), DecodeRandomCrop((120, 160), decoder=decoder)
    whole = functional.pil_to_tensor(Image.open(io.BytesIO(data)))
    flipped = 0
    for seed in range(30):
        box, flip = whole_box(crop, 200, 300, seed)
        top, left, height, width = box
        cut = whole[:, top : top + height, left : left + width].permute(1, 2, 0).numpy()
        wanted = crops._resized(cut, (120, 160))
        found = crop({"image": given(data), "label": 3}, at(seed))
        assert found["label"] == 3
        assert found["image"].dtype == torch.uint8
        assert torch.equal(found["image"], wanted.flip(-1) if flip else wanted)
        theirs = functional.resized_crop(whole, *box, [120, 160], antialias=True)
        assert (wanted.int() - theirs.int()).abs().max() <= ROUNDED
        flipped += flip
    assert 5 < flipped < 25


def test_large_parts_are_decoded_at_a_smaller_scale_that_is_never_too_small(
    decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    scales: list[int] = []
    decode = jpeg.DECODERS[decoder]

    def noted(data: bytes, scale: int, is_whole: bool) -> Any:
        scales.append(scale)
        return decode.decode(data, scale, is_whole)

    monkeypatch.setitem(jpeg.DECODERS, decoder, decode._replace(decode=noted))
    data, crop = photo((1000, 700)), DecodeRandomCrop((50, 60), decoder=decoder)
    whole = functional.pil_to_tensor(Image.open(io.BytesIO(data)))
    for seed in range(30):
        box, flip = whole_box(crop, 700, 1000, seed)
        wanted = functional.resized_crop(whole, *box, [50, 60], antialias=True)
        found = crop({"image": data}, at(seed))["image"].int()
        assert (found - (wanted.flip(-1) if flip else wanted)).abs().float().mean() < 1.5
        (scale,) = {scales.pop()}
        fitting = [k for k in (1, 2, 4, 8) if box[2] >= 50 * k and box[3] >= 60 * k]
        assert scale == (1 if decoder == "torchvision" else max(fitting, default=1))


@pytest.mark.parametrize(("size", "scaled"), [((300, 200), False), ((203, 301), False), ((1400, 800), True)])
def test_the_middle_is_that_of_resize_and_center_crop(decoder: str, size: tuple[int, int], scaled: bool) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    data = photo(size)
    for crop, plain in (
        (DecodeCenterCrop(112, resize=128, decoder=decoder), v2.Compose([v2.Resize(128), v2.CenterCrop(112)])),
        (DecodeCenterCrop((99, 112), decoder=decoder), v2.Compose([v2.Resize(112), v2.CenterCrop((99, 112))])),
    ):
        wanted = plain(v2.functional.pil_to_tensor(Image.open(io.BytesIO(data))))
        found = crop({"image": data})["image"]
        assert found.shape == wanted.shape
        if scaled:
            assert (found.int() - wanted.int()).abs().float().mean() < 1.5
        else:
            assert (found.int() - wanted.int()).abs().max() <= ROUNDED


def _exif(orientation: int) -> Any:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


def _frames(kind: str) -> bytes:
    frames = [Image.open(io.BytesIO(photo())), Image.new("RGB", (320, 240))]
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    return out.getvalue()


def _sixteen_bits() -> bytes:
    grey = np.asarray(Image.open(io.BytesIO(photo(mode="L", kind="PNG")))).astype(np.uint16)
    out = io.BytesIO()
    Image.fromarray(grey * 256 + 99).save(out, "PNG")
    return out.getvalue()


ODD = {
    "grey": lambda: photo(mode="L"),
    "CMYK": lambda: photo(mode="CMYK"),
    "progressive": lambda: photo(progressive=True),
    "no color subsampling": lambda: photo(subsampling=0),
    "oriented": lambda: photo(exif=_exif(6)),
    "RGB without YCbCr": lambda: photo(keep_rgb=True),
    "restarts": lambda: photo(restart_marker_blocks=3),
    "bytes after the end": lambda: photo() + bytes(7),
    "two pictures": lambda: photo() + photo(),
    "MPO": lambda: _frames("MPO"),
    "PNG": lambda: photo(kind="PNG"),
    "16-bit PNG": _sixteen_bits,
    "PNG with alpha": lambda: photo(kind="PNG", mode="RGBA"),
    "PNG with a palette": lambda: photo(kind="PNG", mode="P", transparency=b"\x00\x80\xff"),
    "PNG of two colors": lambda: photo(kind="PNG", mode="1"),
    "animated PNG": lambda: _frames("PNG"),
    "animated GIF": lambda: _frames("GIF"),
    "animated WebP": lambda: _frames("WEBP"),
    "TIFF": lambda: photo(kind="TIFF"),
    "BMP": lambda: photo(kind="BMP"),
}
GREY = ("grey", "16-bit PNG", "PNG of two colors")


@pytest.mark.parametrize("name", ODD)
def test_odd_files_have_the_pixels_of_a_plain_one(decoder: str, name: str) -> None:
    data = ODD[name]()
    whole = np.asarray(Image.open(io.BytesIO(photo())).convert("L" if name in GREY else "RGB").convert("RGB"))
    plain = Image.fromarray(whole)
    for seed in range(5):
        wanted, found = (pixels_of(one, at(seed), decoder=decoder).int() for one in (plain, data))
        assert found.shape == (3, SIZE, SIZE)
        difference = (found - wanted).abs().float().mean()
        assert difference < (30 if "two colors" in name else 8 if "palette" in name or "GIF" in name else 3), name


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (7, 3), (33, 31)])
def test_tiny_and_narrow_photos_are_enlarged(decoder: str, size: tuple[int, int]) -> None:
    data = photo(size)
    for seed in range(20):
        assert pixels_of(data, at(seed), decoder=decoder).shape == (3, SIZE, SIZE)
    assert DecodeCenterCrop(SIZE, decoder=decoder)({"image": data})["image"].shape == (3, SIZE, SIZE)


def _bomb() -> bytes:
    data = photo()
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + b"\xea\x60\xea\x60" + data[at + 9 :]


@pytest.mark.parametrize(
    "data", [photo()[:-40], photo()[:3000], photo()[:200], photo(kind="PNG")[:-200], b"", b"text", _bomb()]
)
def test_damaged_files_are_refused_alike(decoder: str, data: bytes) -> None:
    for seed in range(3):
        with pytest.raises(FormatError, match="column 'image': cannot be decoded"):
            pixels_of(data, at(seed), decoder=decoder)


@pytest.mark.parametrize("value", [None, "photo.jpg", np.zeros((8, 8, 3), np.uint8), [photo()], 3])
def test_what_is_no_photo_is_a_type_error_that_names_the_column(value: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)column 'image': .* got .* Pass no decoder for the column"):
        pixels_of(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be"),
        ({"size": (1, 2, 3)}, "size must be"),
        ({"size": "224"}, "size must be"),
        ({"size": 22.5}, "size must be"),
        ({"size": 8, "scale": (0.0, 1.0)}, "scale must be"),
        ({"size": 8, "scale": 0.5}, "scale must be two numbers"),
        ({"size": 8, "scale": (0.5, 1.5)}, "scale must be two numbers above 0 of at most 1"),
        ({"size": 8, "ratio": (2, 1)}, "ratio must be"),
        ({"size": 8, "flip": 1.2}, "flip must be a probability"),
        ({"size": 8, "decoder": "opencv"}, "decoder must be one of auto, pillow, simplejpeg, torchvision"),
    ],
)
def test_mistakes_are_named_when_it_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeRandomCrop(**options)


def test_a_crop_among_the_decoders_says_where_it_belongs(shards: Path) -> None:
    dataset = StreamingDataset(local=shards, decoders={"image": DecodeRandomCrop(SIZE)})
    with pytest.raises(FormatError, match=r"takes a sample, a dict; got bytes. Pass it as transform=."):
        dataset[0]


def test_a_misspelled_argument_is_named() -> None:
    with pytest.raises(TypeError, match=r"DecodeRandomCrop\(\) got .* 'scales'. Did you mean 'scale'"):
        DecodeRandomCrop(8, scales=(0.5, 1))  # type: ignore[call-arg]


def test_a_resize_below_the_size_and_an_absent_column_are_refused() -> None:
    with pytest.raises(ValueError, match="resize must be a whole number of at least 32"):
        DecodeCenterCrop(SIZE, resize=31)
    with pytest.raises(ValueError, match=r"needs a column 'image'; found jpg, label. Pass column="):
        DecodeCenterCrop(SIZE)({"jpg": photo(), "label": 1})
    assert DecodeCenterCrop(32.0, column="jpg")({"jpg": photo()})["jpg"].shape == (3, 32, 32)


@pytest.mark.parametrize("name", ["simplejpeg", "torchvision"])
def test_a_decoder_that_is_not_installed_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "simplejpeg", lambda: None)
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    with pytest.raises(MissingExtraError, match=rf"'{name}', which is not installed.*\[(images|torchvision)\]"):
        pixels_of(photo(), decoder=name)
    assert torch.equal(pixels_of(photo(), decoder="auto"), pixels_of(photo(), decoder="pillow"))


def test_parts_are_drawn_within_the_photo_and_the_limits() -> None:
    crop = DecodeRandomCrop(SIZE, scale=(0.2, 0.5), ratio=(0.5, 2))
    boxes = np.array([crop._draw(300, 400, rng.random) for rng in [at(0)] for _ in range(2000)])
    top, left, height, width = boxes.T
    assert top.min() >= 0 <= left.min()
    assert (top + height).max() == 300
    assert (left + width).max() == 400
    area, ratio = height * width / 120_000, width / height
    assert 0.199 < area.min() < 0.21 < 0.49 < area.max() < 0.501
    assert 0.49 < ratio.min() < 0.52 < 1.9 < ratio.max() < 2.02
    assert abs(np.log(ratio).mean()) < 0.05
    assert crop._draw(10, 1000, at(0).random)[2:] == (10, 20)  # no such part: the middle, of the widest ratio
    assert crop._draw(1000, 10, at(0).random) == (490, 0, 20, 10)


def colored(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform without `rng` that uses the crop, and draws from the global generators."""
    sample = DecodeRandomCrop(SIZE)(sample)
    return {**sample, "image": sample["image"] + torch.randint(0, 2, (3, 1, 1), dtype=torch.uint8)}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    with MDSWriter(out=folder, columns={"image": "jpeg", "label": "int"}, size_limit="20kb") as writer:
        for k in range(24):
            writer.write({"image": photo((200 + k, 260 - k), "PNG" if k % 6 == 5 else "JPEG"), "label": k})
    return folder


@pytest.mark.parametrize("transform", [DecodeRandomCrop(SIZE), colored])
def test_parts_are_the_same_with_workers_on_other_devices_and_after_a_resume(shards: Path, transform: Any) -> None:
    def loader_of(rank: int = 0, ranks: int = 1, **options: Any) -> StreamingDataLoader:
        dataset = StreamingDataset(local=shards, shuffle=True, world=(rank, ranks), transform=transform)
        return StreamingDataLoader(dataset, 8 // ranks, **options)

    def seen(*loaders: StreamingDataLoader) -> list[tuple[int, bytes]]:
        batches = [list(loader) for loader in loaders]
        return sorted(
            (int(label), image.numpy().tobytes())
            for share in batches
            for batch in share
            for label, image in zip(batch["label"], batch["image"], strict=True)
        )

    loader = loader_of()
    whole, following = seen(loader), seen(loader)
    assert len(whole) == 24
    assert whole != following  # another epoch draws other parts
    assert seen(loader_of(num_workers=2)) == whole
    if transform is not colored:
        assert seen(loader_of(num_workers=2, workers="threads")) == whole
    assert seen(loader_of(0, 2), loader_of(1, 2)) == whole
    stopped = loader_of()
    batches = iter(stopped)
    first = [int(label) for label in next(batches)["label"]]
    resumed = loader_of()
    resumed.load_state_dict(stopped.state_dict())
    assert seen(resumed) == [one for one in whole if one[0] not in first]


def test_middles_are_the_same_in_threads(shards: Path) -> None:
    dataset = StreamingDataset(local=shards, transform=DecodeCenterCrop(SIZE))
    batches = [
        list(StreamingDataLoader(dataset, 8, **given)) for given in ({}, {"num_workers": 2, "workers": "threads"})
    ]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one["image"], other["image"])


def test_crops_can_be_sent_to_other_processes() -> None:
    for crop in (DecodeRandomCrop(SIZE, decoder="pillow"), DecodeCenterCrop((8, 9))):
        again = pickle.loads(pickle.dumps(crop))
        assert vars(again) == vars(crop)


def test_a_damaged_photo_is_substituted_or_names_its_sample(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "set", columns={"image": "jpeg", "label": "int"}) as writer:
        for k in range(8):
            writer.write({"image": photo()[: -900 if k == 3 else None], "label": k})
    options: dict[str, Any] = {"local": tmp_path / "set", "transform": DecodeRandomCrop(SIZE)}
    with pytest.raises(FormatError, match="column 'image': cannot be decoded") as caught:
        list(StreamingDataLoader(StreamingDataset(**options), 4))
    assert "samples [3]" in caught.value.__notes__[0]
    dataset = StreamingDataset(**options, on_bad={"sample": "substitute", "quarantine": tmp_path / "bad.jsonl"})
    labels = [int(label) for batch in StreamingDataLoader(dataset, 4) for label in batch["label"]]
    assert len(labels) == 8
    assert 3 not in labels
