"""The recipes' classifier as MosaicML Composer trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer import ComposerModel
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from lightning_stream.recipes.classifier import ImageClassifier


class ComposerClassifier(ComposerModel):  # type: ignore[misc]  # Composer has no types
    """An `ImageClassifier` as Composer trains it.

    Args:
        classifier: The network and its settings.
        num_classes: Classes to tell apart.
    """

    def __init__(self, classifier: ImageClassifier, num_classes: int) -> None:
        super().__init__()
        classifier.num_classes = classifier.num_classes or num_classes
        classifier.configure_model()
        self.classifier = classifier
        self.accuracies = nn.ModuleList([MulticlassAccuracy(num_classes, average="micro") for _ in range(2)])

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Logits, float[n, classes]."""
        logits: Tensor = self.classifier(batch["image"])
        return logits

    def loss(self, outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The loss of one micro-batch."""
        return functional.cross_entropy(outputs, batch["label"], label_smoothing=self.classifier.label_smoothing)

    def eval_forward(self, batch: Mapping[str, Any], outputs: Tensor | None = None) -> Tensor:
        """Logits for the metrics; the training's are taken where there are some."""
        return self.forward(batch) if outputs is None else outputs

    def update_metric(self, batch: Mapping[str, Any], outputs: Tensor, metric: Any) -> None:
        """Count what is right."""
        metric.update(outputs, batch["label"])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """The accuracy, under Composer's usual name."""
        return {"MulticlassAccuracy": self.accuracies[0 if is_train else 1]}
