"""An image classifier: any classification network of torchvision, on streamed uint8 images."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from recipes.data.base import RecipeData
from recipes.data.images import ImageData, as_tensor
from recipes.models.base import Artifacts, Batch, LossOutput, RecipeModule
from recipes.report import image_grid

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SHOWN = 24
_AUXILIARY = ("googlenet", "inception_v3")  # networks with further heads, which this recipe does not train


class ImageClassifier(RecipeModule):
    """Classifies uint8 images; learns from batches of ``{"image": uint8[n, 3, h, w], "label": int64[n]}``.

    `arch` is a classification network of ``torchvision.models``. From a file of `weights` (read with
    ``weights_only=True``), the tensors for another number of classes are not used. `cifar_stem` begins a ResNet with a
    3x3 convolution of stride 1 and no max-pool, as 32-pixel images need. The reported loss has no label smoothing.
    """

    data_type = ImageData

    def __init__(
        self,
        *,
        arch: str = "mobilenet_v2",
        num_classes: int | None = None,
        weights: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        cifar_stem: bool = False,
        learning_rate: float = 0.002,
        weight_decay: float = 0.02,
        warmup: float = 0.1,
        label_smoothing: float = 0.05,
        channels_last: bool = True,
        seed: int = 1,
    ) -> None:
        super().__init__(learning_rate, weight_decay, warmup, seed)
        known = torchvision.models.list_models(module=torchvision.models)
        if arch not in known:
            near = difflib.get_close_matches(arch, known, n=3)
            raise ValueError(f"model.arch is a classification network of torchvision; found {arch!r}. Near: {near}.")
        if cifar_stem and not arch.startswith(("resnet", "resnext", "wide_resnet")):
            raise ValueError(f"model.cifar_stem applies to ResNets; model.arch is {arch!r}.")
        self.arch, self.num_classes, self.weights, self.cifar_stem = arch, num_classes, weights, cifar_stem
        self.model_kwargs = {
            **({"aux_logits": False, "init_weights": False} if arch in _AUXILIARY else {}),
            **(model_kwargs or {}),
        }
        self.label_smoothing = label_smoothing
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.network: nn.Module | None = None
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", 255 * torch.tensor(_MEAN).reshape(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(_STD).reshape(1, 3, 1, 1), persistent=False)

    def build(self, data: RecipeData) -> None:
        """Make the network, unless that was done, for as many classes as the data has."""
        if self.network is not None:
            return
        classes = self.num_classes or len(cast(ImageData, data).classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network: Any = torchvision.models.get_model(self.arch, num_classes=classes, **self.model_kwargs)
            if self.cifar_stem:
                network.conv1 = nn.Conv2d(3, network.conv1.out_channels, 3, padding=1, bias=False)
                network.maxpool = nn.Identity()
        if self.weights is not None:
            load_weights(network, self.weights, classes)
        self.network = network.to(memory_format=self.memory_format)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float[n, classes], of uint8[n, 3, h, w]."""
        assert self.network is not None
        pixels = (images.float() - self.mean) / self.std
        return cast(Tensor, self.network(pixels.contiguous(memory_format=self.memory_format)))

    def compute_loss(self, batch: Batch) -> LossOutput:
        """Cross-entropy."""
        logits, labels = self(batch["image"]), batch["label"]
        plain = functional.cross_entropy(logits, labels, reduction="none")
        smooth = plain
        if self.label_smoothing:
            smooth = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=self.label_smoothing)
        return LossOutput(smooth, {"accuracy": (logits.argmax(1) == labels,), "loss": (plain,)})

    def describe(self, data: RecipeData) -> str:
        """The validation accuracy beside that of guessing."""
        accuracy = self.history.get(max(self.history, default=0), {}).get("val/accuracy")
        if accuracy is None:
            return "The last epoch was not validated."
        chance = 1 / len(cast(ImageData, data).classes)
        return f"Validation accuracy {accuracy:.1%} on {data.val_dataset.size:,} samples (chance {chance:.0%})."

    @torch.inference_mode()
    def show(self, data: RecipeData, folder: Path) -> Artifacts:
        """Draw some validation samples with the predictions."""
        self.eval()
        classes, dataset = cast(ImageData, data).classes, data.val_dataset
        samples = [dataset[index] for index in range(min(_SHOWN, dataset.size))]
        transform = cast(Any, dataset.transform)
        logits = self(torch.stack([transform(sample)["image"] for sample in samples]).to(self.device))
        shares, predicted = (each.tolist() for each in logits.softmax(1).cpu().max(1))
        correct = [guess == sample["label"] for guess, sample in zip(predicted, samples, strict=True)]
        texts = [
            f"{classes[guess]} {share:.0%}\n" + ("correct" if right else f"true: {classes[sample['label']]}")
            for guess, share, right, sample in zip(predicted, shares, correct, samples, strict=True)
        ]
        images = [as_tensor(sample["image"]).permute(1, 2, 0).numpy() for sample in samples]
        title = f"{sum(correct)} of {len(correct)} correct (validation set, {data.title})"
        image_grid(images, texts, folder / "predictions.png", title, correct)
        return Artifacts({"picture": str(folder / "predictions.png")})


def load_weights(network: nn.Module, path: str, num_classes: int) -> None:
    """Load weights from a file, without the tensors of a head for another number of classes.

    Raises:
        ValueError: Another tensor differs, or is missing.
    """
    held = torch.load(Path(path).expanduser(), map_location="cpu", weights_only=True)
    wanted = network.state_dict()
    given = {name: value for name, value in held.items() if not name.startswith(("aux", "AuxLogits"))}
    head = [
        name
        for name, value in given.items()
        if name in wanted
        and value.shape != wanted[name].shape
        and (value.shape[1:], wanted[name].shape[0]) == (wanted[name].shape[1:], num_classes)
    ]
    try:
        network.load_state_dict({**given, **{name: wanted[name] for name in head}})
    except RuntimeError as error:
        raise ValueError(f"model.weights must fit model.arch; {path} does not: {error!s:.300}") from error
