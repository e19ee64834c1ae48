"""CIFAR-10, ImageNet and folders come out of the shards as they were distributed, photo by photo."""

from __future__ import annotations

import csv
import io
import json
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from numpy.typing import NDArray
from PIL import Image

from lightning_stream import StreamingDataset
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes import training
from lightning_stream.recipes.cifar import CLASSES, Cifar10
from lightning_stream.recipes.converted_set import Made
from lightning_stream.recipes.drawing import drawn_jpeg
from lightning_stream.recipes.image_folders import ImageFolders
from lightning_stream.recipes.image_sets import DESCRIPTION, image_data
from lightning_stream.recipes.imagenet import TRAIN_TAR, VAL_TAR, ImageNet
from lightning_stream.recipes.labelled_set import LabelledSet

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHARDS = {"compression": None, "hashes": ("xxh3_64",), "size_limit": "32kb", "num_workers": 1}
Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def _tar(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def _batches(count: int) -> dict[str, Batch]:
    chance = np.random.default_rng(1)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    return {
        name: (
            chance.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8),
            chance.integers(0, 10, count, dtype=np.uint8),
        )
        for name in names
    }


def _binary(batch: Batch) -> bytes:
    return np.concatenate([batch[1][:, None], batch[0].reshape(len(batch[0]), -1)], 1).tobytes()


def _pickled(batch: Batch) -> bytes:
    """As Python 2 pickled the batches that are distributed: its ``str`` are opcodes U and T."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def glob(module: str, name: str) -> bytes:
        return f"c{module}\n{name}\n".encode()

    pixels, labels = batch
    raw = pixels.tobytes()
    dtype = glob("numpy", "dtype") + text(b"u1") + b"K\x00K\x01\x87R" + b"(K\x03" + text(b"|") + b"NNN"
    dtype += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = glob("numpy.core.multiarray", "_reconstruct") + glob("numpy", "ndarray") + b"K\x00\x85" + text(b"b")
    array += b"\x87R(K\x01" + b"J" + struct.pack("<i", len(pixels)) + b"J" + struct.pack("<i", 3072) + b"\x86"
    array += dtype + b"\x89" + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    told = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + told + b"u."


def _read(place: str, split: str, tmp_path: Path) -> list[dict[str, Any]]:
    dataset = StreamingDataset(remote=f"{place}/{split}", local=str(tmp_path / "cache" / place[-8:] / split))
    return [dataset[index] for index in range(dataset.size)]


@pytest.mark.parametrize("form", ["binary.tar.gz", "python.tar.gz", "binary folder", "python folder"])
def test_cifar_comes_through_pixel_for_pixel_from_any_of_its_forms(form: str, tmp_path: Path) -> None:
    batches, is_binary = _batches(6), form.startswith("binary")
    files = {
        f"cifar-10-batches/{name}{'.bin' if is_binary else ''}": (_binary if is_binary else _pickled)(batch)
        for name, batch in batches.items()
    }
    path = tmp_path / "cifar"
    if form.endswith("gz"):
        _tar(path, {"cifar-10-batches/readme.html": b"hello", **files}, "w:gz")
    else:
        (path / "cifar-10-batches").mkdir(parents=True)
        for name, data in files.items():
            (path / name).write_bytes(data)
    images = LabelledSet.plan(Cifar10(path), str(tmp_path / "shards"), SHARDS, DESCRIPTION)
    done = images.run().description
    assert (done.classes, done.num_train, done.num_val) == (CLASSES, 30, 6)
    for split, names in (("train", list(batches)[:5]), ("val", ["test_batch"])):
        samples = _read(images.place, split, tmp_path)
        pixels = np.concatenate([batches[name][0] for name in names])
        labels = np.concatenate([batches[name][1] for name in names])
        assert np.array_equal([sample["image"] for sample in samples], pixels)
        assert [sample["label"] for sample in samples] == labels.tolist()


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code from a pickle ran",)


def test_a_pickle_that_asks_for_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, data in enumerate((pickle.dumps(Evil()), pickle.dumps({b"data": Evil(), b"labels": [1]}))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "data_batch_1").write_bytes(data)
        with pytest.raises(FormatError, match=r"asks for builtins\.print: refused"):
            list(Cifar10(folder).read("data_batch_1"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("data", [b"", b"\x80\x02}.", b"\x80\x02K\x01.", b"\x80", b"no pickle at all"])
def test_a_broken_batch_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(data)
    with pytest.raises(FormatError, match="data_batch_1 must be a batch"):
        list(Cifar10(tmp_path).read("data_batch_1"))
    (tmp_path / "data_batch_1.bin").write_bytes(data + b"x")
    with pytest.raises(FormatError, match="samples of 3073 bytes"):
        list(Cifar10(tmp_path).read("data_batch_1.bin"))


def test_what_is_no_cifar_says_what_it_should_be(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no CIFAR-10 archive at"):
        Cifar10(tmp_path / "none").fingerprint()
    with pytest.raises(NotFoundError, match=r"no data_batch_1\.bin"):
        Cifar10(tmp_path).fingerprint()
    (tmp_path / "a.tar.gz").write_bytes(b"no archive")
    with pytest.raises(FormatError, match=r"must be a whole \.tar\.gz"):
        Cifar10(tmp_path / "a.tar.gz").fingerprint()


SYNSETS = ("n01440764", "n01443537", "n01484850")
KINDS = dict(zip(SYNSETS, ("daisy", "roses", "tulips"), strict=True))


def _imagenet(folder: Path, labels: str) -> dict[str, bytes]:
    """Both tars with a few drawings, laid out as those that are distributed; gives all photos by name."""
    folder.mkdir()
    photos: dict[str, bytes] = {}
    inner: dict[str, bytes] = {}
    for synset in reversed(SYNSETS):
        held = {f"{synset}_{number}.JPEG": drawn_jpeg(KINDS[synset], 1, number) for number in range(4)}
        photos.update({f"{synset}/{name}": data for name, data in held.items()})
        _tar(folder / "inner.tar", held)
        inner[f"{synset}.tar"] = (folder / "inner.tar").read_bytes()
    (folder / "inner.tar").unlink()
    _tar(folder / TRAIN_TAR, inner)
    val = {f"ILSVRC2012_val_{n:08}.JPEG": (SYNSETS[(2 * n) % 3], drawn_jpeg("daisy", 2, n)) for n in range(1, 6)}
    _tar(folder / VAL_TAR, {name: data for name, (_, data) in sorted(val.items(), reverse=True)})
    photos.update({f"{synset}/{name}": data for name, (synset, data) in val.items()})
    if labels == "lines":
        told = "".join(f"{synset}\n" for _, (synset, _) in sorted(val.items()))
        (folder / "imagenet_2012_validation_synset_labels.txt").write_text(told)
    else:
        with (folder / "LOC_val_solution.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["ImageId", "PredictionString"])
            table.writerows([name.removesuffix(".JPEG"), f"{synset} 1 2 3 4"] for name, (synset, _) in val.items())
    return photos


@pytest.mark.parametrize("labels", ["lines", "table"])
def test_imagenet_s_tars_come_through_byte_for_byte_with_their_labels(labels: str, tmp_path: Path) -> None:
    photos = _imagenet(tmp_path / "imagenet", labels)
    images = LabelledSet.plan(ImageNet(tmp_path / "imagenet"), str(tmp_path / "shards"), SHARDS, DESCRIPTION)
    done = images.run().description
    assert (done.classes, done.num_train, done.num_val) == (SYNSETS, 12, 5)
    found: dict[str, bytes] = {}
    for split in ("train", "val"):
        dataset = StreamingDataset(remote=f"{images.place}/{split}", local=str(tmp_path / "cache" / split))
        for index in range(dataset.size):
            sample = dataset[index]
            assert sample["name"].startswith(f"{SYNSETS[sample['label']]}/")
            found[sample["name"]] = np.array(sample["image"]).tobytes()
    assert found.keys() == photos.keys()
    for name, data in photos.items():
        with Image.open(io.BytesIO(data)) as image:
            assert found[name] == np.array(image).tobytes()
    first = [sample["label"] for sample in _read(images.place, "train", tmp_path)]
    assert first != sorted(first)  # classes are mixed
    assert images.run() == Made(done, is_new=False)


def test_imagenet_without_its_labels_says_which_files_tell(tmp_path: Path) -> None:
    _imagenet(tmp_path / "imagenet", "lines")
    (labels,) = (tmp_path / "imagenet").glob("*.txt")
    told = labels.read_text()
    labels.write_text(told + "n01440764\n")
    with pytest.raises(FormatError, match="it has 6 for 5"):
        ImageNet(tmp_path / "imagenet").fingerprint()
    labels.write_text(told.replace(told.split()[0], "n99999999"))
    with pytest.raises(FormatError, match="lack one, n99999999 first"):
        ImageNet(tmp_path / "imagenet").fingerprint()
    labels.unlink()
    with pytest.raises(NotFoundError, match=r"LOC_val_solution\.csv; .* holds neither"):
        ImageNet(tmp_path / "imagenet").fingerprint()


def test_folders_are_split_as_they_lie_or_by_share(photo_folder: Path, tmp_path: Path) -> None:
    by_share = ImageFolders(photo_folder, 0.25)
    train, val = (
        {photo.name for piece in by_share.pieces(split) for photo in piece.photos} for split in ("train", "val")
    )
    assert len(train) + len(val) == len(train | val) == 60
    assert 5 < len(val) < 25
    for split, names in (("train", train), ("val", val)):
        for name in names:
            target = tmp_path / "split" / split / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((photo_folder / name).read_bytes())
    as_it_lies = ImageFolders(tmp_path / "split", 0.9)
    assert {photo.name for piece in as_it_lies.pieces("val") for photo in piece.photos} == val
    (tmp_path / "split" / "val" / "daisies").mkdir()
    (tmp_path / "split" / "val" / "daisies" / "a.jpg").write_bytes(drawn_jpeg("daisy", 1, 1))
    with pytest.raises(FormatError, match="found daisies"):
        as_it_lies.pieces("val")


def test_an_unknown_kind_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="cifar10, imagenet, folders; found 'mnist'"):
        image_data(kind="mnist")


def test_train_py_runs_a_resnet_on_cifar(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-binary.tar.gz"
    _tar(archive, {f"{name}.bin": _binary(batch) for name, batch in _batches(4).items()}, "w:gz")
    arguments = [
        "experiment=resnet_cifar10",
        f"data.source={archive}",
        f"root={tmp_path}",
        "data.global_batch_size=10",
        "data.num_workers=0",
        "trainer.max_epochs=1",
        "scale=cpu",
        "num_threads=1",
        "~callbacks.progress",
        "trainer.enable_progress_bar=false",
    ]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        training.train(compose("train", overrides=arguments))
    told = json.loads((tmp_path / "resnet_cifar10" / "summary.json").read_text())
    assert told["num_samples"] == 20
    assert told["num_steps"] == 2
    assert set(told["history"]["0"]) == {"train/accuracy", "train/loss", "val/accuracy", "val/loss"}
    with Image.open(told["places"]["picture"]) as picture:
        assert picture.size[0] > 600
