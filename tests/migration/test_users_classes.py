"""Dataset classes as users of mosaicml-streaming write them run unchanged, with either loader, and resume exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
image_module = pytest.importorskip("PIL.Image")

from lightning_stream import LocalDataset, MDSWriter, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402

NUM_SAMPLES = 40
BATCH = {"shuffle": True, "batch_size": 4}


def tokens_of(text: str, length: int) -> dict[str, list[int]]:
    ids = [len(word) + 10 * ord(word[-1]) for word in text.split()][:length]
    return {"input_ids": ids + [0] * (length - len(ids)), "attention_mask": [1] * len(ids) + [0] * (length - len(ids))}


class Tokens(StreamingDataset):
    """A language model's: arguments of its own first, a sample as text or as tokens."""

    def __init__(self, tokenizer: Callable[..., Any], max_seq_len: int, streams: Any = None, **kwargs: Any) -> None:
        self.token_encoding_type = "int64"
        super().__init__(streams=streams, **kwargs)
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len

    def _tokenize(self, sample: Mapping[str, Any]) -> Any:
        return self.tokenizer(sample["text"], self.max_seq_len)

    def __getitem__(self, idx: int) -> Any:
        sample = super().__getitem__(idx)
        if "text" in sample:
            return self._tokenize(sample)
        array = np.frombuffer(sample["tokens"], getattr(np, self.token_encoding_type))
        return torch.from_numpy(array[: self.max_seq_len].copy())


class Conversations(Tokens):
    """A finetuning dataset: samples of ragged lists, and a state whose number of samples it may correct."""

    def __init__(self, *args: Any, packing_ratio: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.packing_ratio = packing_ratio

    def __getitem__(self, idx: int) -> Any:
        sample = StreamingDataset.__getitem__(self, idx)
        return {"turns": [{"input_ids": np.frombuffer(sample["tokens"], np.int64).tolist(), "labels": [idx]}]}

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # type: ignore[override]
        if self.packing_ratio is not None:
            num_samples = int(self.packing_ratio * num_samples)
        return super().state_dict(num_samples=num_samples, from_beginning=from_beginning)


class Captions(StreamingDataset):
    """A diffusion model's: ``self.transform`` is for the image alone, and captions are dropped at random."""

    def __init__(self, streams: Any = None, remote: Any = None, transform: Any = None, **streaming_kwargs: Any) -> None:
        streaming_kwargs.setdefault("shuffle_block_size", 1 << 18)
        streaming_kwargs.setdefault("shuffle_algo", "py1s")
        super().__init__(streams=streams, remote=remote, **streaming_kwargs)
        self.crop = None
        self.transform = transform

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        image = image_module.open(BytesIO(sample["image"])).convert("RGB")
        dropped = bool(torch.rand(1) < 0.3) or random.random() < 0.2
        return {"image": self.transform(image), "caption": "" if dropped else sample["caption"]}


class Latents(StreamingDataset):
    """A diffusion model's over precomputed latents."""

    def __init__(self, *args: Any, latent_shape: tuple[int, ...], transform: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shape, self.transform, self.order, self.reader, self.snapshot = latent_shape, transform, "x", "y", "z"

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return {"latent": torch.frombuffer(bytearray(sample["latent"]), dtype=torch.float32).reshape(self.shape)}


class Vision(StreamingDataset):
    """An image classifier's: ``get_item`` overridden, with torchvision's three transforms."""

    def __init__(self, *, remote: Any, local: Any, batch_size: int, transform: Any = None, **kwargs: Any) -> None:
        StreamingDataset.__init__(self, remote=remote, local=local, batch_size=batch_size, partition_algo="orig",
                                  shuffle_algo="py1s", shuffle_block_size=1 << 18, **kwargs)  # fmt: skip
        self.transform, self.target_transform = transform, None
        self.transforms = lambda x, y: (self.transform(x), y)

    def get_item(self, idx: int) -> Any:  # type: ignore[override]
        obj = super().get_item(idx)
        return self.transforms(obj["x"], obj["y"])


class Text(StreamingDataset):
    """A language model's that tokenizes in ``get_item``."""

    def get_item(self, idx: int, retry: int = 7) -> Any:
        return tokens_of(super().get_item(idx, retry)["text"], 8)


class Notebook(StreamingDataset):
    """The class of a tutorial."""

    def __init__(self, remote: Any, local: Any, shuffle: bool, batch_size: int, transforms: Any) -> None:
        super().__init__(local=local, remote=remote, shuffle=shuffle, batch_size=batch_size)
        self.transforms = transforms

    def __getitem__(self, idx: Any) -> Any:
        obj = super().__getitem__(idx)
        return self.transforms(obj["x"]), obj["y"]


def pixels(image: Any) -> Any:
    return torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")

    def picture(i: int) -> Any:
        return image_module.fromarray(np.full((8, 8, 3), i, np.uint8))

    def stored(i: int) -> bytes:
        file = BytesIO()
        picture(i).save(file, "PNG")
        return file.getvalue()

    made: dict[str, tuple[dict[str, str], Callable[[int], dict[str, Any]]]] = {
        "text": ({"text": "str"}, lambda i: {"text": f"word{i} other{i % 7}"}),
        "tokens": ({"tokens": "bytes"}, lambda i: {"tokens": np.arange(i, i + 9).tobytes()}),
        "captions": ({"image": "bytes", "caption": "str"}, lambda i: {"image": stored(i), "caption": f"a {i}"}),
        "latents": ({"latent": "bytes"}, lambda i: {"latent": np.full((2, 3), i, np.float32).tobytes()}),
        "xy": ({"x": "pil", "y": "int"}, lambda i: {"x": picture(i), "y": i}),
    }
    for name, (columns, sample) in made.items():
        with MDSWriter(out=str(root / name), columns=columns, size_limit=900) as writer:
            for i in range(NUM_SAMPLES):
                writer.write(sample(i))
    return root


Make = Callable[[Path, Path], StreamingDataset]
CLASSES: dict[str, Make] = {
    "text": lambda d, c: Tokens(tokens_of, 8, remote=str(d / "text"), local=str(c), **BATCH),
    "no streams": lambda d, c: Tokens(tokens_of, 8, streams=[], remote=str(d / "text"), local=str(c), **BATCH),
    "bytes": lambda d, c: Tokens(tokens_of, 8, streams=[Stream(remote=str(d), local=str(c))], split="tokens", **BATCH),
    "finetuning": lambda d, c: Conversations(tokens_of, 8, remote=str(d / "tokens"), local=str(c), **BATCH),
    "captions": lambda d, c: Captions(remote=str(d / "captions"), local=str(c), transform=pixels, **BATCH),
    "latents": lambda d, c: Latents(remote=str(d / "latents"), local=str(c), latent_shape=(2, 3), **BATCH),
    "vision": lambda d, c: Vision(remote=str(d / "xy"), local=str(c), transform=pixels, **BATCH),
    "c4": lambda d, c: Text(remote=str(d / "text"), local=str(c), shuffle_algo="py1e", **BATCH),
    "notebook": lambda d, c: Notebook(str(d / "xy"), str(c), True, 4, pixels),
}


def plain(value: Any) -> Any:
    """A batch as values that compare."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        (torch.utils.data.DataLoader, 2),
        (StreamingDataLoader, 0),
        pytest.param(torch.utils.data.DataLoader, 0, marks=pytest.mark.nightly),
        pytest.param(StreamingDataLoader, 2, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_mds_users_runs_and_resumes_exactly(
    data: Path, tmp_path: Path, name: str, kind: Any, workers: int
) -> None:
    def made() -> Any:
        collate = as_they_are if name == "finetuning" else None
        return kind(CLASSES[name](data, tmp_path), batch_size=4, num_workers=workers, collate_fn=collate)

    is_ours = kind is StreamingDataLoader
    whole = [plain(batch) for batch in made()]
    loader = made()
    batches = iter(loader)
    first = [plain(next(batches)) for _ in range(3)]
    state = loader.state_dict() if is_ours else loader.dataset.state_dict(12, True)
    del batches
    again = made()
    (again if is_ours else again.dataset).load_state_dict(state)
    rest = [plain(batch) for batch in again]
    assert len(whole) >= NUM_SAMPLES // 4
    assert first + rest == whole


def test_a_local_dataset_honours_overrides(data: Path) -> None:
    class Labels(LocalDataset):
        def get_item(self, sample_id: int, retry: int = 7) -> Any:
            return super().get_item(sample_id)["y"] * 10

    class Doubled(Labels):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index) * 2

    assert Labels(str(data), split="xy")[[3, -1]] == [30, 390]
    loader = torch.utils.data.DataLoader(Doubled(str(data), split="xy"), batch_size=4)
    assert next(iter(loader)).tolist() == [0, 20, 40, 60]
