"""Images with captions, from tars or files, to a model that draws."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")
from support.recipe_runs import train

from lightning_stream import StreamingDataset
from lightning_stream.errors import FormatError, NotFoundError
from recipes.data.captions import CaptionData
from recipes.data.synthetic_text import captioned_shape
from recipes.models.text_to_image import TextToImage, to_images, to_latents


def captions(folder: Path, source: Path | str, **settings: Any) -> CaptionData:
    paths = {"remote": str(folder / "shards"), "local": str(folder / "cache"), "conversion_workers": 1}
    data = CaptionData(source=str(source), val_fraction=0.3, image_size=16, **paths, **settings)
    data.prepare_data()
    return data


def samples(data: CaptionData) -> dict[str, tuple[str, bytes]]:
    sets = [StreamingDataset(remote=f"{data.uri}/{split}", decoders={"image": bytes}) for split in ("train", "val")]
    found = [one for dataset in sets for one in dataset[:]]
    return {one["key"]: (one["caption"], one["image"]) for one in found}


def test_tars_and_files_give_the_same_samples(tmp_path: Path) -> None:
    tars, files = tmp_path / "laion [1]", tmp_path / "files [1]" / "00000"
    tars.mkdir()
    files.mkdir(parents=True)
    for number in range(14):
        image, caption = captioned_shape(number)
        sample = {"jpg": image, "txt": caption.encode(), "json": json.dumps({"caption": caption}).encode()}
        with tarfile.open(tars / f"{number // 7:05}.tar", "a") as tar:
            for ending, content in sample.items():
                entry = tarfile.TarInfo(f"{number:09}.{ending}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
                (files / entry.name).write_bytes(content)
    (files / "000000003.txt").unlink()  # then the caption in its .json counts
    (files / "000000004.jpg").unlink()  # an image that could not be downloaded
    from_tars, from_files = samples(captions(tmp_path, tars)), samples(captions(tmp_path, files.parent))
    assert len(from_tars) == 14
    assert from_tars["000000003"] == captioned_shape(3)[::-1]
    assert from_tars.pop("000000004")
    assert from_files == from_tars
    (files / "000000005.txt").write_text("another caption")
    with pytest.raises(FileExistsError):  # the converted captions are not used silently
        captions(tmp_path, files.parent)
    assert samples(captions(tmp_path, files.parent, overwrite=True))["000000005"][0] == "another caption"


def test_a_folder_without_captioned_images_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no folder at"):
        captions(tmp_path, tmp_path / "absent")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(FormatError, match="download the images with img2dataset"):
        captions(tmp_path, tmp_path / "lists")
    (tmp_path / "lists" / "00000.jpg").write_bytes(captioned_shape(1)[0])
    with pytest.raises(FormatError, match=r"none of the images .* has a caption"):
        captions(tmp_path, tmp_path / "lists")


def test_the_shards_depend_on_the_settings_and_not_on_where_the_checkout_is(tmp_path: Path) -> None:
    uris = {CaptionData(source="synthetic", remote=str(tmp_path), local="x", synthetic_count=n).uri for n in (5, 5, 6)}
    assert len(uris) == 2


def test_latents_are_the_image() -> None:
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    latents = to_latents(images)
    assert latents.shape == (2, 12, 8, 8)
    assert (to_images(latents).int() - images.int()).abs().max() <= 1


def test_a_validation_sample_has_the_same_loss_in_any_batch(tmp_path: Path) -> None:
    data = captions(tmp_path, "synthetic", synthetic_count=20)
    model = TextToImage(block_out_channels=(8, 16))
    model.build(data)
    model.eval()
    loaded = [data.val_dataset.transform(data.train_dataset[index]) for index in range(4)]  # type: ignore[misc]
    batch = {name: torch.stack([sample[name] for sample in loaded]) for name in loaded[0]}
    with torch.inference_mode():
        together = model.compute_loss(batch).losses
        alone = [model.compute_loss({name: each[i : i + 1] for name, each in batch.items()}).losses for i in range(4)]
    torch.testing.assert_close(together, torch.cat(alone))
    assert len(set(together.tolist())) == 4


def test_train_py_learns_from_synthetic_shapes_and_draws(tmp_path: Path) -> None:
    summary = train(
        tmp_path / "laion", "data=laion", "data.synthetic_count=60", "data.val_fraction=0.2", "data.image_size=16",
        "data.global_batch_size=8", "data.num_workers=0", "model.block_out_channels=[8,16]",
        "model.num_inference_steps=4", "model.learning_rate=0.01", "trainer.max_epochs=2",
    )  # fmt: skip
    assert summary["history"]["1"]["val/loss"] < summary["history"]["0"]["val/loss"]
    assert Path(summary["paths"]["picture"]).read_bytes().startswith(b"\x89PNG")
