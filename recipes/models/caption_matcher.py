"""A small model that finds the caption of an image among those of its batch, as CLIP learns to."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.models.task import Batch, Task


class CaptionMatcher(Task):
    """Learns from batches ``{"image": uint8[n, 3, h, w], "tokens": uint8[n, t]}``.

    Args:
        width: Of both encoders, and of the space in which images and captions are compared.
        optimizer: Arguments of `Task`.
    """

    def __init__(self, width: int = 64, **optimizer: float) -> None:
        super().__init__(**optimizer)
        layers: list[nn.Module] = []
        for channels in (3, width, width):
            layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.GELU()]
        self.of_image = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, width))
        self.embedding = nn.Embedding(256, width, padding_idx=0)
        self.of_caption = nn.Sequential(
            nn.Conv1d(width, width, 5, padding=2), nn.GELU(), nn.AdaptiveMaxPool1d(1), nn.Flatten()
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def scores(self, batch: Batch) -> Tensor:
        """How well each image fits each caption, float[n, n]."""
        images = functional.normalize(self.of_image(batch["image"].float() / 127.5 - 1))
        captions = functional.normalize(self.of_caption(self.embedding(batch["tokens"].long()).transpose(1, 2)))
        return images @ captions.T * self.scale.exp()

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        scores = self.scores(batch)
        fits = (batch["tokens"][:, None] == batch["tokens"]).all(2).float()  # several images may have the same caption
        targets = fits / fits.sum(1, keepdim=True)
        loss = (functional.cross_entropy(scores, targets) + functional.cross_entropy(scores.T, targets)) / 2
        return {"loss": loss, "accuracy": fits.gather(1, scores.argmax(1, keepdim=True)).mean()}
