"""An image classifier for Lightning: a torchvision network, its optimizer and schedule, and exact accuracies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_stream.recipes.callbacks import batch_in_training
from lightning_stream.recipes.weights import build_network, load_weights

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageClassifier(LightningModule):
    """Classifies uint8 images; learns from batches of ``{"image": uint8[n, 3, h, w], "label": int64[n]}``.

    The network is made when the trainer sets up, for as many classes as the data has.

    Args:
        network: A name that ``torchvision.models.get_model`` knows.
        num_classes: Classes to tell apart; None for what the data module says.
        weights: File of weights to start from, read with ``weights_only=True``; its head is left out where the number
            of classes differs. None to start from scratch.
        network_options: More arguments of the network.
        learning_rate: Its highest value.
        weight_decay: Of all weights with more than one dimension.
        warmup: Share of all steps in which the learning rate rises; it falls along a cosine after.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        channels_last: Whether images lie in memory as channels-last, which is faster on CPUs and GPUs alike.
        seed: Of the first weights.
    """

    def __init__(
        self,
        *,
        network: str = "mobilenet_v2",
        num_classes: int | None = None,
        weights: str | None = None,
        network_options: Mapping[str, Any] | None = None,
        learning_rate: float = 0.002,
        weight_decay: float = 0.02,
        warmup: float = 0.1,
        label_smoothing: float = 0.05,
        channels_last: bool = True,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.name = network
        self.num_classes = num_classes
        self.weights = weights
        self.network_options = dict(network_options or {})
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.label_smoothing = label_smoothing
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.seed = seed
        self.network: nn.Module | None = None
        self.mean: Tensor
        self.std: Tensor
        self.history: dict[int, dict[str, float]] = {}
        self._counts = {"train": (0, 0), "val": (0, 0)}  # right and all, in the current pass
        self.register_buffer("mean", 255 * torch.tensor(_MEAN).reshape(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(_STD).reshape(1, 3, 1, 1), persistent=False)

    def configure_model(self) -> None:
        """Make the network, unless that was done."""
        if self.network is not None:
            return
        classes = self.num_classes or len(self.trainer.datamodule.classes)  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = build_network(self.name, classes, self.network_options)
        if self.weights is not None:
            load_weights(network, self.weights)
        self.network = network.to(memory_format=self.memory_format)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float[n, classes], of uint8 images."""
        assert self.network is not None
        pixels = (images.float() - self.mean) / self.std
        logits: Tensor = self.network(pixels.contiguous(memory_format=self.memory_format))
        return logits

    def training_step(self, batch: Mapping[str, Any], _batch_idx: int) -> Tensor:
        """This micro-batch's part of the mean loss of its optimizer step.

        Gradients are averaged over ranks, and over accumulated micro-batches; the factors undo that, so that a step's
        gradient is the mean over its samples, each counted once, on any number of devices.
        """
        made_of = batch_in_training(self.trainer)
        parts = self.trainer.world_size * self.trainer.accumulate_grad_batches
        counts = torch.from_numpy(~made_of.filler).to(self.device)
        logits, labels = self(batch["image"]), batch["label"]
        losses = functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing, reduction="none")
        loss = (losses * counts).sum() * (parts / (made_of.end - made_of.begin))
        self._count("train", logits[counts], labels[counts])
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(logits))
        return loss

    def validation_step(self, batch: Mapping[str, Any], _batch_idx: int) -> None:
        """Count what is right."""
        logits = self(batch["image"])
        loss = functional.cross_entropy(logits, batch["label"])
        self._count("val", logits, batch["label"])
        self.log("val/loss", loss, batch_size=len(logits), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW; the learning rate rises, then falls along a cosine, over all steps of the run."""
        assert self.network is not None
        matrices = [p for p in self.network.parameters() if p.ndim > 1]
        others = [p for p in self.network.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate)
        total, warmup = max(1, int(self.trainer.estimated_stepping_batches)), self.warmup
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rise_and_fall(step / total, warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # Accuracy, counted exactly over ranks and across a resume

    def _count(self, stage: str, logits: Tensor, labels: Tensor) -> None:
        right, total = self._counts[stage]
        self._counts[stage] = (right + int((logits.argmax(1) == labels).sum()), total + len(labels))

    def _note(self, stage: str, epoch: int) -> None:
        """Put the accuracy of the pass that ends into the history and the log."""
        counts = torch.tensor(self._counts[stage], dtype=torch.float64, device=self.device)
        right, total = self.trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        if total:
            self.history.setdefault(epoch, {})[stage] = right / total

    def on_train_epoch_start(self) -> None:
        """Count from zero; what a checkpoint at an epoch's very end left uncounted belongs to the one before."""
        if self._counts["train"][1] and self.current_epoch:
            self._note("train", self.current_epoch - 1)
        self._counts["train"] = (0, 0)

    def on_validation_epoch_start(self) -> None:
        """Count from zero."""
        self._counts["val"] = (0, 0)

    def on_validation_epoch_end(self) -> None:
        """Note both accuracies, before any checkpoint of this validation is written."""
        if self.trainer.sanity_checking:
            return
        for stage in ("train", "val"):
            self._note(stage, self.current_epoch)
        for stage, accuracy in self.history.get(self.current_epoch, {}).items():
            self.log(f"{stage}/accuracy", accuracy, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        """Note the train accuracy, also where this epoch had no validation."""
        self._note("train", self.current_epoch)
        self._counts["train"] = (0, 0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what was counted, as plain values."""
        checkpoint["accuracy"] = {"history": self.history, "counts": self._counts}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting."""
        kept = checkpoint.get("accuracy", {})
        self.history = {int(epoch): dict(values) for epoch, values in kept.get("history", {}).items()}
        self._counts = {**self._counts, **kept.get("counts", {})}


def rise_and_fall(done: float, warmup: float) -> float:
    """The share of the highest learning rate once `done` of the run is over, both in [0, 1]."""
    if done < warmup:
        return 0.04 + 0.96 * done / warmup
    fallen = min(1.0, (done - warmup) / max(1e-9, 1 - warmup))
    return 0.002 + 0.998 * 0.5 * (1 + math.cos(math.pi * fallen))
