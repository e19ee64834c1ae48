"""A classifier of sounds: a small convolutional network over spectrograms with an even scale of pitch."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from lightning_stream.recipes.evaluation import tally
from lightning_stream.recipes.picture import Prediction, draw_predictions, save_picture
from lightning_stream.recipes.sounds import SoundData
from lightning_stream.recipes.task import Batch, Judged, Shown, TaskData, TaskModel, fitting

_WINDOW = 1024
_STEP = 512
_LOWEST = 0.012  # of the pitches looked at, in periods per moment: 96 Hz at a rate of 8000
_OCTAVES = 5
_SHOWN = 24


class Spectrogram(nn.Module):
    """How loud each pitch is at each time: float[n, 1, pitches, times] of float[n, moments].

    The pitches lie evenly on the scale that notes have, so that the same chord on another note is the same picture
    moved up or down.

    Args:
        per_octave: Pitches of an octave.
    """

    bands: Tensor
    window: Tensor

    def __init__(self, per_octave: int) -> None:
        super().__init__()
        pitches = _LOWEST * 2 ** (torch.arange(_OCTAVES * per_octave) / per_octave)
        places = pitches[pitches < 0.49] * _WINDOW
        between = (places[:, None] - torch.arange(_WINDOW // 2 + 1)).abs()
        widths = (places * (2 ** (1 / per_octave) - 1)).clamp(min=1)[:, None]
        self.register_buffer("bands", (1 - between / widths).clamp(min=0), persistent=False)
        self.register_buffer("window", torch.hann_window(_WINDOW), persistent=False)

    def forward(self, sounds: Tensor) -> Tensor:
        """In logarithms, of mean 0 and deviation 1 in each sound: loudness tells nothing."""
        even = sounds.float() / (sounds.float().std(1, keepdim=True) + 1e-6)
        spectrum = torch.stft(even, _WINDOW, _STEP, window=self.window, return_complex=True).abs()
        heard = (self.bands @ spectrum + 1e-2).log()
        mean, deviation = heard.mean((1, 2), keepdim=True), heard.std((1, 2), keepdim=True)
        return ((heard - mean) / (deviation + 1e-6))[:, None]


class SoundClassifier(TaskModel):
    """Tells sounds apart; learns from batches of ``{"sound": float32[n, moments], "label": int64[n]}``.

    Args:
        width: Channels of the first layer.
        depth: Layers with strides.
        per_octave: Pitches of an octave that the network hears.
        learning_rate, weight_decay, warmup: See `TaskModel`.
        seed: Of the first weights.
    """

    learns_from = SoundData

    def __init__(
        self,
        *,
        width: int = 32,
        depth: int = 3,
        per_octave: int = 36,
        learning_rate: float = 0.003,
        weight_decay: float = 0.02,
        warmup: float = 0.1,
        seed: int = 1,
    ) -> None:
        super().__init__(learning_rate, weight_decay, warmup)
        self.width, self.depth = width, depth
        self.seed = seed
        self.spectrogram = Spectrogram(per_octave)
        self.network: nn.Sequential | None = None

    def build(self, data: TaskData) -> None:
        """Make the network, unless that was done, for the data's classes."""
        if self.network is not None:
            return
        sounds = fitting(data, SoundData, "Choose sounds, e.g. +data=sounds, or a model for this data.")
        if sounds.moments < _WINDOW:
            raise ValueError(f"a spectrogram needs {_WINDOW} moments and more; data.moments is {sounds.moments}.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            widths = [1, *(self.width * 2**layer for layer in range(self.depth))]
            layers = [one for pair in pairwise(widths) for one in _layer(*pair)]
            head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], len(sounds.classes))]
            self.network = nn.Sequential(*layers, *head)

    def forward(self, sounds: Tensor) -> Tensor:
        """Logits, float[n, classes], of float[n, moments]."""
        assert self.network is not None
        logits: Tensor = self.network(self.spectrogram(sounds))
        return logits

    def judge(self, batch: Batch) -> Judged:
        """Cross-entropy."""
        logits, labels = self(batch["sound"]), batch["label"]
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return Judged(losses, tally(logits.argmax(1) == labels, losses))

    @torch.inference_mode()
    def show(self, data: TaskData, folder: Path) -> Shown:
        """Spectrograms of some held-out sounds with what the model says of them."""
        assert isinstance(data, SoundData)
        self.eval()
        held_out, classes = data.held_out, data.classes
        assert held_out.transform is not None
        samples = [held_out.transform(held_out[index]) for index in range(min(_SHOWN, held_out.size))]
        sounds = torch.stack([sample["sound"] for sample in samples]).to(self.device)
        likely, seen = self(sounds).softmax(1).cpu(), self.spectrogram(sounds).cpu()[:, 0]
        shown = [
            Prediction(_picture(one), classes[sample["label"]], classes[int(row.argmax())], float(row.max()))
            for one, sample, row in zip(seen, samples, likely, strict=True)
        ]
        right = sum(one.label == one.predicted for one in shown)
        title = f"Held-out sounds, pitch over time: of these {len(shown)}, {right} are recognised"
        path = folder / "predictions.png"
        save_picture(draw_predictions(shown, title, f"None of them was trained on. Source: {data.source}."), path)
        return Shown({"picture": str(path)})


def _layer(narrow: int, wide: int) -> list[nn.Module]:
    stride = 1 if narrow == 1 else 2
    return [
        nn.Conv2d(narrow, wide, 5 if narrow == 1 else 3, stride, padding=2 if narrow == 1 else 1, bias=False),
        nn.GroupNorm(math.gcd(8, wide), wide),
        nn.SiLU(),
        nn.Conv2d(wide, wide, (7, 3), padding=(3, 1), groups=wide, bias=False),
        nn.Conv2d(wide, wide, 1),
        nn.SiLU(),
    ]


def _picture(spectrogram: Tensor) -> Image.Image:
    """Low pitches below, loud ones light."""
    light = ((spectrogram.flip(0) + 1.5) / 4.5).clamp(0, 1).numpy()
    shades = np.stack([light, light**1.5, 0.25 + 0.6 * light * (1 - light)], 2)
    return Image.fromarray((shades * 255).astype(np.uint8)).resize((168, 168), Image.Resampling.NEAREST)
