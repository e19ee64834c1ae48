"""An image classifier: any classification network of torchvision, on streamed uint8 images."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional
from torchvision.models import get_model_builder

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
        self.build = get_model_builder(arch)
        self.num_classes = num_classes
        self.model_kwargs = dict(model_kwargs or {})
        self.label_smoothing = label_smoothing
        self.network: Any = None

    def configure_model(self) -> None:
        """Make the network; the data is converted by now, so its classes are known."""
        if self.network is not None:
            return
        trainer: Any = self.trainer
        classes = getattr(trainer.datamodule, "classes", ())
        num_classes = len(classes) if self.num_classes is None else self.num_classes
        if num_classes < max(1, len(classes)):
            raise ValueError(
                f"a classifier needs a class for each of the data's; found model.num_classes={self.num_classes}, and "
                f"{len(classes)} classes in the data. Correct it, or choose data with classes"
            )
        self.network = self.build(num_classes=num_classes, **self.model_kwargs)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float[n, classes], of uint8[n, 3, h, w]."""
        return self.network(images.float() / 127.5 - 1)

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        logits = self(batch["image"])
        labels = batch["label"].long()
        smoothing = self.label_smoothing if self.training else 0.0
        loss = functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}
