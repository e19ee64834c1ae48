"""An image classifier: any classification network of torchvision, on streamed uint8 images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from recipes.data.images import ImageData, as_tensor
from recipes.models.base import Batch, LossOutput, RecipeModule
from recipes.report import image_grid

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SHOWN = 24
_NO_AUXILIARY = {"aux_logits": False, "init_weights": False}  # this recipe does not train these networks' other heads


class ImageClassifier(RecipeModule):
    """Classifies uint8 images; the reported loss has no label smoothing.

    `cifar_stem` begins a ResNet with a 3x3 convolution of stride 1 and no max-pool, as 32-pixel images need.
    """

    data_type = ImageData
    mean: Tensor
    std: Tensor

    def __init__(
        self, *, arch: str = "mobilenet_v2", num_classes: int | None = None, weights: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None, cifar_stem: bool = False, label_smoothing: float = 0.05,
        channels_last: bool = True, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(**shared)
        known = torchvision.models.list_models(module=torchvision.models)
        if arch not in known:
            raise ValueError(f"model.arch must be one of {', '.join(known)}; found {arch!r}.")
        self.arch, self.num_classes, self.weights, self.cifar_stem = arch, num_classes, weights, cifar_stem
        self.model_kwargs = {**(_NO_AUXILIARY if arch in ("googlenet", "inception_v3") else {}), **(model_kwargs or {})}
        self.label_smoothing = label_smoothing
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        for name, values in (("mean", _MEAN), ("std", _STD)):
            self.register_buffer(name, 255 * torch.tensor(values).reshape(1, 3, 1, 1), persistent=False)

    def make_network(self, data: ImageData) -> nn.Module:
        """The network, for as many classes as the data has."""
        classes = self.num_classes or len(data.classes)
        network: Any = torchvision.models.get_model(self.arch, num_classes=classes, **self.model_kwargs)
        if self.cifar_stem:
            network.conv1 = nn.Conv2d(3, network.conv1.out_channels, 3, padding=1, bias=False)
            network.maxpool = nn.Identity()
        if self.weights is not None:
            load_weights(network, self.weights)
        return network.to(memory_format=self.memory_format)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float[n, classes], of uint8[n, 3, h, w]."""
        pixels = (images.float() - self.mean) / self.std
        return self.network(pixels.contiguous(memory_format=self.memory_format))

    def compute_loss(self, batch: Batch) -> LossOutput:
        """Cross-entropy."""
        logits, labels = self(batch["image"]), batch["label"].long()
        plain, smooth = (
            functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
            for smoothing in (0.0, self.label_smoothing)
        )
        return LossOutput(smooth, {"accuracy": (logits.argmax(1) == labels,), "loss": (plain,)})

    def describe(self, data: ImageData) -> str:
        """The validation accuracy beside that of guessing."""
        accuracy = self.history.get(max(self.history, default=0), {}).get("val/accuracy")
        if accuracy is None:
            return "The last epoch was not validated."
        chance = 1 / len(data.classes)
        return f"Validation accuracy {accuracy:.1%} on {data.val_dataset.size:,} samples (chance {chance:.0%})."

    @torch.inference_mode()
    def show(self, data: ImageData, folder: Path) -> dict[str, Path]:
        """Draw some validation samples with the predictions."""
        self.eval()
        classes, dataset = data.classes, data.val_dataset
        transform: Any = dataset.transform
        samples = [dataset[index] for index in range(min(_SHOWN, dataset.size))]
        logits = self(torch.stack([transform(sample)["image"] for sample in samples]).to(self.device))
        shares, predicted = (each.tolist() for each in logits.softmax(1).cpu().max(1))
        labels = [sample["label"] for sample in samples]
        texts = [
            f"{classes[guess]} {share:.0%}\n" + ("correct" if guess == label else f"true: {classes[label]}")
            for guess, share, label in zip(predicted, shares, labels, strict=True)
        ]
        colors = ["#18804a" if guess == label else "#c42c2c" for guess, label in zip(predicted, labels, strict=True)]
        images = [as_tensor(sample["image"]).permute(1, 2, 0).numpy() for sample in samples]
        correct = sum(guess == label for guess, label in zip(predicted, labels, strict=True))
        title = f"{correct} of {len(labels)} correct (validation set, {data.title})"
        image_grid(images, texts, folder / "predictions.png", title, colors)
        return {"picture": folder / "predictions.png"}


def load_weights(network: nn.Module, path: str) -> None:
    """Load weights from a file, but not those of a head for another number of classes."""
    held, wanted = torch.load(Path(path).expanduser(), map_location="cpu", weights_only=True), network.state_dict()
    fitting = {name: held[name] for name in wanted if name in held and held[name].shape == wanted[name].shape}
    absent = wanted.keys() - fitting.keys()
    if len(absent) > 2:  # a head has a weight and a bias
        raise ValueError(
            f"model.weights must fit model.arch; {path} does not have its {', '.join(sorted(absent)):.200}"
        )
    network.load_state_dict(fitting, strict=False)
