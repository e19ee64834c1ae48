"""The recipes' data: each source becomes shards whose samples are those of the source, in the right split."""

from __future__ import annotations

import json
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")

from lightning_stream import LocalDataset, MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.order import World
from recipes.data.captions import CaptionData
from recipes.data.chats import ChatData
from recipes.data.image_chats import ImageChatData
from recipes.data.images import ImageData
from recipes.data.synthetic import captioned_flower, flower_chat, write_flowers
from recipes.data.table import TableData
from recipes.data.text import TextData, TextMixture
from recipes.models.gpt import GPT, as_rows
from recipes.models.image_classifier import ImageClassifier


def places(folder: Path, **more: Any) -> dict[str, Any]:
    common = {"remote": str(folder / "shards"), "local": str(folder / "cache"), "global_batch_size": 8}
    return {**common, "conversion_workers": 1, **more}


def samples(data: Any, split: str) -> list[dict[str, Any]]:
    return list(LocalDataset(f"{data.uri}/{split}"))


@pytest.mark.parametrize("as_archive", [False, True], ids=["folder", "tgz"])
def test_photos_keep_their_bytes_and_classes(as_archive: bool, tmp_path: Path) -> None:
    write_flowers(tmp_path / "photos", 30)
    source = tmp_path / "photos"
    if as_archive:
        with tarfile.open(tmp_path / "photos.tgz", "w:gz") as tar:
            tar.add(source, "photos")
        source = tmp_path / "photos.tgz"
    data = ImageData(photos=str(source), downloads=str(tmp_path / "downloads"), **places(tmp_path))
    data.prepare_data()
    kept = [sample for split in ("train", "val") for sample in samples(data, split)]
    assert len(kept) == 30
    for sample in kept:
        path = tmp_path / "photos" / sample["name"]
        assert data.classes[sample["label"]] == path.parent.name
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape[1:] == (3, 64, 64)
    assert batch["image"].dtype == torch.uint8


def test_shards_of_another_writer_need_no_names_of_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        with MDSWriter(out=tmp_path / "shards" / split, columns={"image": "jpeg", "label": "int32"}) as writer:
            writer.write({"image": b"\xff\xd8\xff", "label": 0})
    data = ImageData(**places(tmp_path))
    model = ImageClassifier("squeezenet1_1", num_classes=3)
    model.trainer = SimpleNamespace(datamodule=data)
    model.configure_model()
    assert data.classes == ()
    assert model.network.num_classes == 3


def test_archives_of_one_name_from_two_places_are_two(tmp_path: Path) -> None:
    for place in ("a", "b"):
        write_flowers(tmp_path / place / "photos", 10 if place == "a" else 20)
        with tarfile.open(tmp_path / place / "photos.tgz", "w:gz") as tar:
            tar.add(tmp_path / place / "photos", "photos")
        url = (tmp_path / place / "photos.tgz").as_uri()
        data = ImageData(photos=url, downloads=str(tmp_path / "downloads"), **places(tmp_path))
        data.prepare_data()
        assert len(samples(data, "train")) + len(samples(data, "val")) == (10 if place == "a" else 20)


def test_images_to_train_on_without_images_to_validate_on_are_refused(tmp_path: Path) -> None:
    write_flowers(tmp_path / "photos" / "train", 10)
    with pytest.raises(NotFoundError, match=r"photos has no val/"):
        ImageData(photos=str(tmp_path / "photos"), **places(tmp_path)).prepare_data()


@pytest.mark.parametrize(("source", "says"), [(None, "Without data.source="), ("absent", "data.source .* no absent")])
def test_images_that_are_not_there_are_answered_by_the_setting_that_names_them(
    tmp_path: Path, source: str | None, says: str
) -> None:
    with pytest.raises(NotFoundError, match=says):
        ImageData(source=source, **places(tmp_path)).prepare_data()


def test_another_source_or_setting_has_shards_of_its_own(tmp_path: Path) -> None:
    first = TableData(source="synthetic", synthetic_count=50, **places(tmp_path))
    same = TableData(source="synthetic", synthetic_count=50, **places(tmp_path))
    other = TableData(source="synthetic", synthetic_count=60, **places(tmp_path))
    assert first.uri == same.uri != other.uri
    first.prepare_data()
    before = {path: path.stat().st_mtime_ns for path in Path(first.uri).rglob("*.mds*")}
    same.prepare_data()
    other.prepare_data()
    assert {path: path.stat().st_mtime_ns for path in Path(first.uri).rglob("*.mds*")} == before


def test_a_document_is_in_one_split_and_keeps_its_bytes(tmp_path: Path) -> None:
    texts = [f"document {number} says {number * number}" for number in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    source = str(tmp_path / "texts.jsonl")
    data = TextData(source=source, text_key="body", val_fraction=0.2, seq_len=32, **places(tmp_path))
    data.prepare_data()
    kept = {
        split: [bytes(one["tokens"][1:].tolist()).decode() for one in samples(data, split)]
        for split in ("train", "val")
    }
    assert sorted(kept["train"] + kept["val"]) == sorted(texts)
    assert kept["val"]
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (8, 32)


def test_a_text_without_the_key_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"body": "x"}\n')
    data = TextData(source=str(tmp_path / "texts.jsonl"), **places(tmp_path))
    with pytest.raises(Exception, match=r"it has body\. Set data\.text_key"):
        data.prepare_data()


def test_what_the_assistant_says_is_learned(tmp_path: Path) -> None:
    said = [("user", "2+2?"), ("assistant", "4"), ("user", "3?"), ("assistant", "33")]
    messages = [{"role": role, "content": content} for role, content in said]
    chats = [[{"role": "system", "content": f"{number:02}"}, *messages] for number in range(30)]
    rows = [json.dumps({"messages": chat}) for chat in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    options = {"text_key": "messages", "seq_len": 128, "long_documents": "error", **places(tmp_path)}
    data = ChatData(source=str(tmp_path / "chats.jsonl"), val_fraction=0.2, **options)
    data.prepare_data()
    batch = next(iter(data.train_dataloader()))
    assert (batch["num_tokens"] == 108).all()  # two conversations fill most of a row
    tokens, learned = batch["input_ids"][0], batch["loss_mask"][0].bool()
    assert "".join("|" if token == 256 else chr(token) for token in tokens[learned]) == "4|33|4|33|"
    wrong = ChatData(source=str(tmp_path / "chats.jsonl"), **{**options, "text_key": "turns"})
    with pytest.raises(Exception, match=r"it has messages\. Set data\.text_key"):
        wrong.prepare_data()
    # of the same source, into the same place
    without = ImageChatData(source=str(tmp_path / "chats.jsonl"), val_fraction=0.2, **options)
    with pytest.raises(Exception, match=r"a list of JPEG files in 'images'; it has messages\. Set data\.images_key"):
        without.prepare_data()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": None}, "texts as role and content; found .*'content': None"),
        ({"from": "human", "value": "2+2?"}, "texts as role and content; found .*'from'"),
        ({"role": "gpt", "content": "4"}, r"nobody of these says anything .*Set data\.roles"),
    ],
)
def test_chats_of_which_nothing_would_be_learned_are_refused(
    message: dict[str, Any], says: str, tmp_path: Path
) -> None:
    rows = [json.dumps({"messages": [{"role": "user", "content": str(k)}, message]}) for k in range(20)]
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    options = {"text_key": "messages", "long_documents": "drop", "val_fraction": 0.2, **places(tmp_path)}
    data = ChatData(source=str(tmp_path / "chats.jsonl"), **options)
    with pytest.raises(FormatError, match=says):
        data.prepare_data()


def test_chats_with_images_are_packed_whole_and_begin_with_their_images(tmp_path: Path) -> None:
    options = {"synthetic_count": 40, "text_key": "messages", "seq_len": 192, "long_documents": "error"}
    data = ImageChatData(source="synthetic", image_size=16, patch_size=8, **options, **places(tmp_path))
    data.prepare_data()
    stored = {split: samples(data, split) for split in ("train", "val")}
    images = [len(sample["images"]) for split in stored.values() for sample in split]
    assert sorted(images) == sorted(len(flower_chat(number)[0]["images"]) for number in range(40))
    seen = 0
    for batch in data.train_dataloader():
        rows, sizes = as_rows(batch), batch["num_tokens"].tolist()
        assert rows["input_ids"].shape == rows["loss_mask"].shape == (len(sizes), max(sizes))
        assert max(sizes) <= 192
        starts = batch["cu_seqlens"].tolist()
        for begin, end, images in zip(starts, starts[1:], batch["splits"]["pixels"].diff().tolist(), strict=False):
            tokens, says = batch["input_ids"][begin:end], batch["loss_mask"][begin:end].bool()
            assert tokens[: 4 * images].tolist() == [-1] * 4 * images  # (16 / 8) ** 2 patches of each image
            assert tokens[4 * images] == 256
            assert "".join("|" if one == 256 else chr(one) for one in tokens[says]).count("a photo of") == images
            seen += 1
    assert seen == len(stored["train"])


@torch.no_grad()
def test_a_gpt_sees_the_images_of_its_own_chat_alone() -> None:
    torch.manual_seed(0)
    network = GPT(257, 16, 32, 1, 2, patch_size=8)
    tokens = torch.tensor([[-1, -1, 256, 5, -1, -1, 256, 5]])  # two chats with an image of two patches each
    documents, positions = torch.arange(8)[None] // 4, torch.arange(8)[None] % 4
    pixels = torch.randint(0, 256, (2, 3, 8, 16), dtype=torch.uint8)
    before = network(tokens, documents, positions, pixels)
    pixels[1] = 255 - pixels[1]
    after = network(tokens, documents, positions, pixels)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])
    with pytest.raises(ValueError, match=r"model\.patch_size must be data\.patch_size; found 16 patches and 4 places"):
        GPT(257, 16, 32, 1, 2, patch_size=4)(tokens, documents, positions, pixels)


@torch.no_grad()
def test_flex_attention_sees_what_the_mask_shows() -> None:
    network = GPT(257, 64, 32, 2, 2)
    tokens = torch.randint(0, 257, (3, 64), generator=torch.Generator().manual_seed(0))
    documents, positions = torch.arange(64).expand(3, 64) // 20, torch.arange(64).expand(3, 64) % 20
    masked = network(tokens, documents, positions)
    network.flex = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice to compile it
        assert torch.allclose(network(tokens, documents, positions), masked, atol=1e-5)
    alone = network(tokens[:, 20:40], documents[:, 20:40], positions[:, 20:40])
    assert torch.allclose(masked[:, 20:40], alone, atol=1e-5)


def test_a_mixture_has_its_proportions_and_validates_each_document_once(tmp_path: Path) -> None:
    parts = {
        name: {"source": "synthetic", "synthetic_count": 60, "proportion": share}
        for name, share in (("a", 3), ("b", 1))
    }
    data = TextMixture(parts=parts, seq_len=64, size_limit="4kb", **places(tmp_path))
    data.prepare_data()
    streams = data.datasets["train"].streams  # type: ignore[union-attr]
    assert [stream.proportion for stream in streams] == [3, 1]
    sizes = [len(samples(part, "val")) for part in data.parts.values()]
    assert data.datasets["val"].size == sum(sizes)  # type: ignore[union-attr]


def test_captions_come_from_txt_or_json_and_missing_images_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "00000.tar", "w") as tar:
        for number in range(20):
            (sample,) = captioned_flower(number)
            text = (
                {"txt": sample["caption"].encode()}
                if number % 2
                else {"json": json.dumps({"caption": sample["caption"]}).encode()}
            )
            for suffix, content in ({} if number == 3 else {"jpg": sample["image"]} | text).items():
                path = tmp_path / f"{number:05d}.{suffix}"
                path.write_bytes(content)
                tar.add(path, path.name)
    data = CaptionData(source=str(tmp_path / "tars"), val_fraction=0.3, **places(tmp_path))
    data.prepare_data()
    kept = [sample["caption"] for split in ("train", "val") for sample in samples(data, split)]
    assert sorted(kept) == sorted(captioned_flower(number)[0]["caption"] for number in range(20) if number != 3)


def test_captioned_images_of_another_kind_are_an_error(tmp_path: Path) -> None:
    """They were left out."""
    folder = tmp_path / "tars"
    folder.mkdir()
    with tarfile.open(folder / "00000.tar", "w") as tar:
        for name in ("0.jpg", "0.txt", "1.png", "1.txt"):
            content = b"a flower" if name.endswith(".txt") else captioned_flower(0)[0]["image"]
            (tmp_path / name).write_bytes(content)
            tar.add(tmp_path / name, name)
    with pytest.raises(FormatError, match=r"are JPEG files, \.jpg or \.jpeg; found \.png in a sample"):
        CaptionData(source=str(folder), **places(tmp_path)).prepare_data()


def test_a_table_drops_or_fills_empty_cells_and_names_columns(tmp_path: Path) -> None:
    rows = [f"{x},{'' if x % 10 == 0 else x * 2},word" for x in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["x,y,kind", *rows]))
    source = str(tmp_path / "table.csv")
    dropped = TableData(source=source, drop_nulls=True, **places(tmp_path))
    dropped.prepare_data()
    assert dropped.features == ["x"]
    assert len(samples(dropped, "train")) + len(samples(dropped, "val")) == 54
    filled = TableData(source=source, fill_nulls={"y": 0.0}, label="z", **places(tmp_path))
    filled.prepare_data()
    with pytest.raises(ValueError, match=r"one of the columns of numbers, x, y; found z"):
        _ = filled.features
    for wrong in (["kind"], ["x", "y"], ["q"]):
        chosen = TableData(source=source, fill_nulls={"y": 0.0}, label="y", features=wrong, **places(tmp_path))
        chosen.prepare_data()
        with pytest.raises(ValueError, match=r"other columns of numbers: x; found"):
            _ = chosen.features


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_an_evaluation_counts_each_sample_once_on_any_number_of_processes(count: int, tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "val", columns={"x": "int"}, size_limit=512) as writer:
        for number in range(103):
            writer.write({"x": number})
    seen = []
    for rank in range(count):
        dataset = StreamingDataset(remote=str(tmp_path / "val"), local=str(tmp_path / "cache"))
        loader = StreamingDataLoader(dataset, 16, evaluation=True, world=World(rank, count, count))
        seen += [x for batch in loader for x in batch["x"].tolist()]
    assert sorted(seen) == list(range(103))


@pytest.mark.slow
@pytest.mark.parametrize("data", ["text", "chats", "image_chats"])
def test_a_gpt_learns_from_packed_rows(data: str, run: Callable[..., Any]) -> None:
    small = ("data.synthetic_count=200", "model.d_model=32", "model.n_layers=1", "data.num_workers=0", "hardware=cpu")
    loss = run(data, f"+data={data}", *small, "trainer.max_epochs=3", "trainer.enable_progress_bar=false")
    assert loss < 4.5
