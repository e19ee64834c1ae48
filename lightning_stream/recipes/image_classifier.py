"""An image classifier: a torchvision network that learns from streamed uint8 images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_stream.recipes.evaluation import tally
from lightning_stream.recipes.images import as_picture
from lightning_stream.recipes.labelled_data import LabelledData
from lightning_stream.recipes.picture import Prediction, draw_predictions, save_picture
from lightning_stream.recipes.task import Batch, Judged, Shown, TaskData, TaskModel, fitting
from lightning_stream.recipes.weights import build_network, load_weights, look_closely

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SHOWN = 24


class ImageData(LabelledData):
    """Images and labels, streamed as batches of ``{"image": uint8[n, 3, h, w], "label": int64[n]}``."""

    @property
    def kind(self) -> str:
        """What to call the pictures: ``"photos"``, ``"drawings (not photos)"``."""
        return "photos"


class ImageClassifier(TaskModel):
    """Classifies uint8 images; learns from batches of ``{"image": uint8[n, 3, h, w], "label": int64[n]}``.

    The network is made when the trainer sets up, for as many classes as the data has.

    Args:
        network: A name that ``torchvision.models.get_model`` knows.
        num_classes: Classes to tell apart; None for what the data module says.
        weights: File of weights to start from, read with ``weights_only=True``; its head is left out where the number
            of classes differs. None to start from scratch.
        network_options: More arguments of the network.
        small_images: Whether a ResNet looks at each pixel at first, as pictures of 32 pixels need.
        learning_rate: Its highest value.
        weight_decay: Of all weights with more than one dimension.
        warmup: Share of all steps in which the learning rate rises; it falls along a cosine after.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        channels_last: Whether images lie in memory as channels-last, which is faster on CPUs and GPUs alike.
        seed: Of the first weights.
    """

    learns_from = ImageData

    def __init__(
        self,
        *,
        network: str = "mobilenet_v2",
        num_classes: int | None = None,
        weights: str | None = None,
        network_options: Mapping[str, Any] | None = None,
        small_images: bool = False,
        learning_rate: float = 0.002,
        weight_decay: float = 0.02,
        warmup: float = 0.1,
        label_smoothing: float = 0.05,
        channels_last: bool = True,
        seed: int = 1,
    ) -> None:
        super().__init__(learning_rate, weight_decay, warmup)
        self.name = network
        self.num_classes = num_classes
        self.weights = weights
        self.network_options = dict(network_options or {})
        self.small_images = small_images
        self.label_smoothing = label_smoothing
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.seed = seed
        self.network: nn.Module | None = None
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", 255 * torch.tensor(_MEAN).reshape(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(_STD).reshape(1, 3, 1, 1), persistent=False)

    def build(self, data: TaskData) -> None:
        """Make the network, unless that was done, for as many classes as the data has."""
        if self.network is not None:
            return
        images = fitting(data, ImageData, "Choose a model for this data, e.g. model=gpt for text.")
        classes = self.num_classes or len(images.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = build_network(self.name, classes, self.network_options)
            if self.small_images:
                look_closely(network)
        if self.weights is not None:
            load_weights(network, self.weights)
        self.network = network.to(memory_format=self.memory_format)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float[n, classes], of uint8 images."""
        assert self.network is not None
        pixels = (images.float() - self.mean) / self.std
        logits: Tensor = self.network(pixels.contiguous(memory_format=self.memory_format))
        return logits

    def judge(self, batch: Batch) -> Judged:
        """Cross-entropy; its smoothing of labels is for learning only, and in no measure."""
        logits, labels = self(batch["image"]), batch["label"]
        losses = functional.cross_entropy(logits, labels, reduction="none")
        right = logits.argmax(1) == labels
        learnt = losses
        if self.label_smoothing:
            learnt = functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing, reduction="none")
        return Judged(learnt, tally(right, losses))

    def show(self, data: TaskData, folder: Path) -> Shown:
        """Some held-out samples with what the model says of them."""
        assert isinstance(data, ImageData)
        return Shown({"picture": str(picture_of(data, self, folder / "predictions.png"))})


@torch.inference_mode()
def picture_of(data: ImageData, model: ImageClassifier, path: Path) -> Path:
    """Ask the model about some held-out samples, and draw them with what it says."""
    model.eval()
    dataset, classes = data.held_out, data.classes
    assert dataset.transform is not None
    some = range(min(_SHOWN, dataset.size))
    seen = torch.stack([dataset.transform(dataset[index])["image"] for index in some])
    likely = model(seen.to(model.device)).softmax(1).cpu()
    shown = [
        Prediction(as_picture(sample["image"]), classes[sample["label"]], classes[int(row.argmax())], float(row.max()))
        for sample, row in zip((dataset[index] for index in some), likely, strict=True)
    ]
    right = sum(prediction.label == prediction.predicted for prediction in shown)
    title = f"Held-out {data.kind}: of these {len(shown)}, {right} are recognised"
    save_picture(draw_predictions(shown, title, f"None of them was trained on. Source: {data.source}."), path)
    return path
