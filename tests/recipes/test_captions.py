"""Images with captions, from tars or folders, to a network that draws."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes import shapes, training
from lightning_stream.recipes.captions import CaptionData, caption_data, draw_tars
from lightning_stream.recipes.text_to_image import TextToImage, decode, encode

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def captions(folder: Path, source: Path) -> CaptionData:
    places = {"remote": str(folder / "shards"), "local": str(folder / "cache")}
    return caption_data(source=str(source), held_out=0.2, conversion_workers=1, num_workers=0, image_size=16, **places)


def told(data: CaptionData) -> dict[str, tuple[str, bytes]]:
    data.prepare_data()
    decoders = {"image": bytes}
    samples = [sample for split in ("train", "val") for sample in _raw(data, split, decoders)]
    return {sample["key"]: (sample["caption"], sample["image"]) for sample in samples}


def _raw(data: CaptionData, split: str, decoders: dict[str, type]) -> list[dict[str, object]]:
    from lightning_stream import StreamingDataset

    return StreamingDataset(remote=f"{data.place}/{split}", decoders=decoders)[:]  # type: ignore[arg-type]


def test_tars_and_folders_of_files_give_the_same_samples(tmp_path: Path) -> None:
    draw_tars(tmp_path / "tars", count=12, seed=1)
    folder = tmp_path / "files" / "00000"
    folder.mkdir(parents=True)
    for path in sorted((tmp_path / "tars").glob("*.tar")):
        with tarfile.open(path) as tar:
            for entry in tar:
                content = tar.extractfile(entry)
                assert content is not None
                (folder / entry.name).write_bytes(content.read())
    for number, ending in ((3, "txt"), (4, "jpg")):  # a caption that only the .json has; a picture not fetched
        (folder / f"{number:09}.{ending}").unlink()
    from_tars = told(captions(tmp_path / "one", tmp_path / "tars"))
    from_files = told(captions(tmp_path / "two", tmp_path / "files"))
    assert len(from_tars) == 12
    assert from_tars.pop("000000004")
    assert from_files == from_tars
    assert from_tars["000000003"][0] == shapes.draw_shape(1, 3)[1]
    assert from_tars["000000003"][1].startswith(b"\xff\xd8\xff")


def test_what_holds_no_pictures_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no folder at"):
        captions(tmp_path, tmp_path / "absent").prepare_data()
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(FormatError, match="fetch the pictures with img2dataset"):
        captions(tmp_path, tmp_path / "lists").prepare_data()
    (tmp_path / "lists" / "00000.jpg").write_bytes(shapes.shape_jpeg(1, 1)[0])
    with pytest.raises(FormatError, match=r"caption is in a \.txt or \.json file"):
        captions(tmp_path, tmp_path / "lists").prepare_data()


def test_latents_are_the_picture() -> None:
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    latents = encode(images)
    assert latents.shape == (2, 48, 4, 4)
    assert (decode(latents).int() - images.int()).abs().max() <= 1


def test_a_held_out_sample_is_judged_the_same_in_any_batch(tmp_path: Path) -> None:
    draw_tars(tmp_path / "tars", count=25, seed=1)
    data = captions(tmp_path, tmp_path / "tars")
    data.prepare_data()
    model = TextToImage(width=16, depth=1, heads=2)
    model.build(data)
    model.eval()
    train = data.datasets["train"]
    assert train is not None
    assert train.transform is not None
    samples = [train.transform(train[index]) for index in range(4)]
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    with torch.inference_mode():
        together = model.judge(batch).losses
        alone = [model.judge({name: values[i : i + 1] for name, values in batch.items()}).losses for i in range(4)]
    torch.testing.assert_close(together, torch.cat(alone))
    assert len(set(together.tolist())) == 4


def test_train_py_learns_from_captioned_drawings_and_draws(tmp_path: Path) -> None:
    chosen = [
        "data=laion",
        "model=text_to_image",
        "scale=cpu",
        "num_threads=1",
        "data.drawn_count=60",
        "data.held_out=0.2",
        "data.image_size=16",
        "data.global_batch_size=8",
        "data.num_workers=0",
        "data.conversion_workers=1",
        "model.width=32",
        "model.depth=1",
        "model.heads=2",
        "model.drawing_steps=4",
        "model.learning_rate=0.01",
        "trainer.max_epochs=2",
        "~callbacks.progress",
        "trainer.enable_progress_bar=false",
        f"root={tmp_path}",
        "name=laion",
    ]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("train", overrides=chosen)
    training.train(config)
    summary = json.loads((tmp_path / "laion" / "summary.json").read_text())
    assert summary["history"]["1"]["val/loss"] < summary["history"]["0"]["val/loss"]
    assert Path(summary["places"]["picture"]).read_bytes().startswith(b"\x89PNG")
