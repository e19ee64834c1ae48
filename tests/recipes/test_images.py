"""Images of every source become shards once, and any classification network learns from them."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")

from lightning_stream.convert import convert
from lightning_stream.errors import FormatError, LightningStreamError, NotFoundError
from recipes.data.images import Cifar10Data, ImageData, ImageNetData, as_tensor
from recipes.data.synthetic import FLOWERS, draw_flower, write_flowers
from recipes.models.image_classifier import ImageClassifier


def make(root: Path, kind: type[ImageData] = ImageData, **given: Any) -> Any:
    common = {"remote": str(root / "shards"), "local": str(root / "cache"), "downloads": str(root / "downloads")}
    return kind(**{**common, "image_size": 32, "conversion_workers": 1, "size_limit": "64kb", **given})


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders below one folder, with a file that is no image."""
    folder = tmp_path_factory.mktemp("photos") / "flower_photos"
    write_flowers(folder, 40)
    (folder / "LICENSE.txt").write_text("all rights observed\n")
    return folder


def count(data: Any) -> int:
    return int(data.train_dataset.size + data.val_dataset.size)


def test_drawings_are_the_same_each_time_and_fill_each_class(tmp_path: Path) -> None:
    write_flowers(tmp_path, 10)
    assert {folder.name: len(list(folder.iterdir())) for folder in tmp_path.iterdir()} == dict.fromkeys(FLOWERS, 2)
    first, again = (np.asarray(draw_flower("roses", 3)) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, np.asarray(draw_flower("roses", 8)))


def test_a_folder_an_archive_and_its_renamed_key_give_the_same_samples(photos: Path, tmp_path: Path) -> None:
    archive = tmp_path / "photos.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(photos, arcname="flower_photos")
    for number, given in enumerate(({"source": str(photos)}, {"source": str(archive)}, {"photos": str(archive)})):
        data = make(tmp_path / str(number), **given)
        data.prepare_data()
        assert data.classes == tuple(sorted(FLOWERS))
        assert count(data) == 40
        assert data.is_new
        data.prepare_data()
        assert not data.is_new
        batch = next(iter(data.train_dataloader()))
        assert batch["image"].shape[1:] == (3, 32, 32)
        assert batch["image"].dtype == torch.uint8
        data.close()


@pytest.mark.parametrize("mode", ["CMYK", "P", "RGBA", "L", "1", "I;16", "LA"])
def test_an_image_of_any_mode_is_rgb(mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 4), 51 * 256 + 7, np.uint16))
        assert image.mode == mode
        wanted = torch.full((3, 4, 4), 51, dtype=torch.uint8)
    else:
        image = Image.new("RGB", (4, 4), (255, 0, 0)).convert(mode)
        wanted = as_tensor(image.convert("RGB"))
    out = io.BytesIO()
    image.save(out, "TIFF" if mode == "CMYK" else "PNG")
    for given in (image, Image.open(out), out.getvalue()):
        assert torch.equal(as_tensor(given), wanted)


@pytest.mark.parametrize(("kinds", "encoding"), [(("PNG", "JPEG"), "jpeg"), (("PNG", "WEBP", "JPEG"), "bytes")])
def test_a_folder_of_several_kinds_of_images_trains(tmp_path: Path, kinds: tuple[str, ...], encoding: str) -> None:
    for k in range(24):
        path = tmp_path / "photos" / f"class{k % 2}" / f"{k}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (k, 40, 80)).save(path, kinds[k % len(kinds)])
    data = make(tmp_path, source=str(tmp_path / "photos"), global_batch_size=4)
    data.prepare_data()
    assert data.manifest.columns["image"] == encoding
    assert next(iter(data.train_dataloader()))["image"].shape == (4, 3, 32, 32)
    data.close()


def test_a_source_that_changed_is_refused_until_overwrite(photos: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(photos, copy)
    make(tmp_path, source=str(copy)).prepare_data()
    next(copy.glob("daisy/*.jpg")).unlink()
    with pytest.raises((LightningStreamError, FileExistsError)):
        make(tmp_path, source=str(copy)).prepare_data()
    data = make(tmp_path, source=str(copy), overwrite=True)
    data.prepare_data()
    assert count(data) == 39


def test_what_convert_wrote_is_trained_on_without_a_source(photos: Path, tmp_path: Path) -> None:
    convert(str(photos), str(tmp_path / "by-cli"), val_fraction=0.2, num_workers=1)
    data = make(tmp_path, remote=str(tmp_path / "by-cli"), source=None)
    data.prepare_data()
    assert data.classes == tuple(sorted(FLOWERS))
    assert count(data) == 40
    with pytest.raises(NotFoundError, match="nothing"):
        make(tmp_path, remote=str(tmp_path / "nothing"), source=None).prepare_data()


def test_train_and_val_folders_stay_apart(photos: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(photos / "daisy", tmp_path / "split" / split / "daisy")
        shutil.copytree(photos / "roses", tmp_path / "split" / split / "roses")
    data = make(tmp_path, source=str(tmp_path / "split"))
    data.prepare_data()
    assert data.classes == ("daisy", "roses")
    assert data.train_dataset.size == data.val_dataset.size == 16


def test_a_broken_archive_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "half.tgz"
    broken.write_bytes(b"\x1f\x8b half")
    with pytest.raises(FormatError, match="whole"):
        make(tmp_path, source=str(broken)).prepare_data()
    with pytest.raises(NotFoundError, match=r"data.source"):
        make(tmp_path, source=str(tmp_path / "none")).prepare_data()


def test_cifar10_is_read_from_the_binary_archive_and_pickles_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]:
        rows = rng.integers(0, 255, (12, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        rows.tofile(folder / name)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    data = make(tmp_path, Cifar10Data, source=str(archive))
    data.prepare_data()
    assert (data.train_dataset.size, data.val_dataset.size, len(data.classes)) == (60, 12, 10)
    sample = data.val_dataset[0]
    raw = np.fromfile(folder / "test_batch.bin", np.uint8).reshape(-1, 3073)
    assert any(np.array_equal(sample["image"].ravel(), row[1:]) and sample["label"] == row[0] for row in raw)
    pickled = tmp_path / "cifar-10-batches-py"
    pickled.mkdir()
    (pickled / "data_batch_1").write_bytes(b"\x80\x04.")
    with pytest.raises(NotFoundError, match="pickles"):
        make(tmp_path, Cifar10Data, source=str(pickled)).prepare_data()
    (folder / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(FormatError, match="3,073"):
        make(tmp_path / "short", Cifar10Data, source=str(folder)).prepare_data()


def jpeg(number: int) -> bytes:
    """A photo; number 2 is a PNG file and number 1 has CMYK pixels, as some of ImageNet are."""
    out = io.BytesIO()
    photo = Image.new("RGB", (20, 20), (number * 9 % 256, 40, 80)).convert("CMYK" if number == 1 else "RGB")
    photo.save(out, "PNG" if number == 2 else "JPEG")
    return out.getvalue()


def tar_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize("labels_as", ["lines", "table"])
def test_imagenet_is_read_from_its_tars_in_place(tmp_path: Path, labels_as: str) -> None:
    source = tmp_path / "imagenet"
    source.mkdir()
    synsets = ("n02", "n01")
    inner = {f"{s}.tar": tar_of({f"{s}_{n}.JPEG": jpeg(n) for n in range(3)}) for s in synsets}
    (source / "ILSVRC2012_img_train.tar").write_bytes(tar_of(inner))
    names = [f"ILSVRC2012_val_{n:08d}" for n in (1, 2, 3)]
    (source / "ILSVRC2012_img_val.tar").write_bytes(tar_of({f"{name}.JPEG": jpeg(7) for name in names}))
    shown = ("n02", "n01", "n02")
    if labels_as == "lines":
        (source / "imagenet_2012_validation_synset_labels.txt").write_text("\n".join(shown))
    else:
        rows = [f"{name},{synset} 1 2 3 4" for name, synset in zip(names, shown, strict=True)]
        (source / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows]))
    data = make(tmp_path, ImageNetData, source=str(source))
    data.prepare_data()
    assert data.classes == ("n01", "n02")
    found = {data.train_dataset[n]["name"]: data.train_dataset[n]["label"] for n in range(6)}
    assert found == {f"{s}/{s}_{n}.JPEG": int(s == "n02") for s in synsets for n in range(3)}
    assert [data.val_dataset[n]["label"] for n in range(3)] == [1, 0, 1]
    assert next(iter(data.train_dataloader()))["image"].shape == (6, 3, 32, 32)


@pytest.mark.parametrize("arch", ["squeezenet1_1", "googlenet", "resnet18"])
def test_any_network_starts_from_weights_for_other_classes(arch: str, photos: Path, tmp_path: Path) -> None:
    data = make(tmp_path, source=str(photos))
    data.prepare_data()
    first = ImageClassifier(arch=arch, num_classes=7)
    first.build(data)
    assert first.network is not None
    torch.save(first.network.state_dict(), tmp_path / "weights.pt")
    model = ImageClassifier(arch=arch, weights=str(tmp_path / "weights.pt"))
    model.build(data)
    labels = torch.tensor([0, 4], dtype=torch.int32)  # as Spark's shards may have them
    batch = {"image": torch.zeros(2, 3, 64, 64, dtype=torch.uint8), "label": labels}
    assert model.compute_loss(batch).losses.shape == (2,)
    with pytest.raises(ValueError, match=r"model\.weights"):
        ImageClassifier(arch="mobilenet_v2", weights=str(tmp_path / "weights.pt")).build(data)


def test_a_network_that_torchvision_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="resnet"):
        ImageClassifier(arch="resnet81")
