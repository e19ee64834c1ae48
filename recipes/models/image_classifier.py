"""An image classifier: any classification network of torchvision, on streamed uint8 images."""

from collections.abc import Mapping
from typing import Any

import torchvision
from torch import Tensor
from torch.nn import functional

from recipes.models.task import Batch, Task


class ImageClassifier(Task):
    """Classifies batches ``{"image": uint8[n, 3, h, w], "label": int64[n]}``.

    Args:
        arch: A classification network of torchvision.
        num_classes: None: as many as the datamodule has `classes`.
        model_kwargs: More arguments of the network.
        label_smoothing: Of the training loss.
        optimizer: Arguments of `Task`.
    """

    def __init__(
        self, arch: str = "mobilenet_v2", num_classes: int | None = None, model_kwargs: Mapping[str, Any] | None = None,
        label_smoothing: float = 0.05, **optimizer: float,
    ) -> None:  # fmt: skip
        super().__init__(**optimizer)
        self.arch = arch
        self.num_classes = num_classes
        self.model_kwargs = dict(model_kwargs or {})
        self.label_smoothing = label_smoothing
        self.network: Any = None

    def configure_model(self) -> None:
        """Make the network; the data is converted by now, so its classes are known."""
        if self.network is not None:
            return
        trainer: Any = self.trainer
        classes = self.num_classes or len(trainer.datamodule.classes)
        self.network = torchvision.models.get_model(self.arch, num_classes=classes, **self.model_kwargs)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float[n, classes], of uint8[n, 3, h, w]."""
        return self.network(images.float() / 127.5 - 1)

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        logits = self(batch["image"])
        labels = batch["label"].long()
        smoothing = self.label_smoothing if self.training else 0.0
        loss = functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}
