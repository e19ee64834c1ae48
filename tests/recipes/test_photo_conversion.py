"""Conversion: by content, once, whole or not at all, and a split that no listing order can change."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from lightning_stream import dataset
from lightning_stream.errors import FormatError
from lightning_stream.recipes import photo_conversion
from lightning_stream.recipes.labelled_set import is_held_out, writing_order
from lightning_stream.recipes.photo_conversion import Conversion, ConversionConfig, as_jpeg
from lightning_stream.recipes.photos import DrawnFlowers, PhotoArchive, PhotoFolder, PhotoSource

SMALL = ConversionConfig(size_limit="64kb", held_out=0.25)


def plan(source: PhotoSource, tmp_path: Path) -> Conversion:
    return Conversion.plan(source, tmp_path / "shards", SMALL)


def shards(folder: str) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*.zstd")}


def test_about_the_share_of_each_class_is_held_out() -> None:
    held = [is_held_out(("roses", f"{n}.jpg"), 0.1) for n in range(5000)]
    assert 400 < sum(held) < 600


def test_the_split_is_by_class_and_name_together() -> None:
    by_class = [[is_held_out((label, f"{n}.jpg"), 0.3) for n in range(200)] for label in ("roses", "tulips")]
    assert by_class[0] != by_class[1]


def test_the_split_and_the_order_do_not_know_the_listing() -> None:
    keys = [("a", str(n)) for n in range(50)] + [("b", str(n)) for n in range(50)]
    assert writing_order(dict.fromkeys(keys)) == writing_order(dict.fromkeys(reversed(keys)))
    first = [label for label, _ in writing_order(dict.fromkeys(keys))[:20]]
    assert {"a", "b"} == set(first)


def test_a_folder_and_its_archive_become_the_same_shards(
    photo_folder: Path, photo_archive: Path, tmp_path: Path
) -> None:
    one, other = plan(PhotoFolder(photo_folder), tmp_path), plan(PhotoArchive(photo_archive), tmp_path)
    assert one.run().description.num_train == other.run().description.num_train
    assert shards(one.place) == shards(other.place)
    assert len(shards(one.place)) > 3


def test_the_jpegs_are_kept_as_they_are(photo_folder: Path, tmp_path: Path) -> None:
    made = plan(PhotoFolder(photo_folder), tmp_path)
    described = made.run().description
    found = {}
    for split in ("train", "val"):
        streamed = dataset.StreamingDataset(local=f"{made.place}/{split}")
        for index in range(streamed.size):
            sample = streamed[index]
            sample["image"].fp.seek(0)
            found[sample["name"]] = (sample["image"].fp.read(), described.classes[sample["label"]])
    assert len(found) == 60 == described.num_train + described.num_val
    for name, (data, label) in found.items():
        assert data == (photo_folder / name).read_bytes()
        assert name.startswith(f"{label}/")


def test_a_source_converted_already_is_not_converted_again(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(PhotoFolder(photo_folder), tmp_path).run()
    monkeypatch.setattr(photo_conversion, "MDSWriter", None)
    assert plan(PhotoFolder(photo_folder), tmp_path).run().description.num_train > 30


def test_a_source_that_changed_is_converted_anew_beside_the_old(photo_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(photo_folder, copy)
    before = plan(PhotoFolder(copy), tmp_path)
    old = before.run().description
    (copy / "daisy" / "3.jpg").write_bytes((copy / "roses" / "3.jpg").read_bytes())
    (copy / "roses" / "4.jpg").unlink()
    after = plan(PhotoFolder(copy), tmp_path)
    assert after.place != before.place
    assert after.run().description.num_train + after.run().description.num_val == 59
    assert before.describe() == old


def test_a_conversion_that_fails_leaves_nothing(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(PhotoFolder(photo_folder), tmp_path)
    monkeypatch.setattr(photo_conversion, "as_jpeg", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.run()
    assert made.describe() is None
    assert list((tmp_path / "shards").iterdir()) == []


def test_two_conversions_at_once_are_one(photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    monkeypatch.setattr(photo_conversion, "as_jpeg", lambda data: decoded.append(1) or as_jpeg(data))
    made = plan(PhotoFolder(photo_folder), tmp_path)
    done = []
    threads = [threading.Thread(target=lambda: done.append(made.run())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(decoded) == 60
    assert sorted(one.is_new for one in done) == [False, False, True]  # whoever waited did not convert
    assert made.describe() is not None


def test_files_that_cannot_be_decoded_are_left_out_and_named(photo_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(photo_folder, copy)
    whole = (copy / "daisy" / "1.jpg").read_bytes()
    (copy / "daisy" / "1.jpg").write_bytes(whole[: len(whole) // 2])
    (copy / "roses" / "2.jpg").write_bytes(b"no picture")
    assert set(plan(PhotoFolder(copy), tmp_path).run().description.unreadable) == {"daisy/1.jpg", "roses/2.jpg"}


def test_what_cannot_be_learnt_from_is_refused_with_what_was_found(tmp_path: Path, photo_folder: Path) -> None:
    with pytest.raises(FormatError, match=r"val set needs photos; by data\.held_out it gets none of these 5"):
        Conversion.plan(DrawnFlowers(5), tmp_path, ConversionConfig(held_out=0.001)).run()
    with pytest.raises(FormatError, match=r"<photo>\.jpg; found none: the photos in .*roses\. Set data"):
        plan(PhotoFolder(photo_folder / "roses"), tmp_path).run()
    (tmp_path / "one").mkdir()
    shutil.copytree(photo_folder / "roses", tmp_path / "one" / "roses")
    with pytest.raises(FormatError, match="two of them and more; found roses alone"):
        plan(PhotoFolder(tmp_path / "one"), tmp_path).run()
    (tmp_path / "bad" / "roses").mkdir(parents=True)
    (tmp_path / "bad" / "roses" / "1.jpg").write_bytes(b"no picture")
    with pytest.raises(FormatError, match=r"1 files cannot be decoded, e\.g\. roses/1\.jpg"):
        plan(PhotoFolder(tmp_path / "bad"), tmp_path).run()


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="held_out is a share"):
        ConversionConfig(held_out=1.5)
