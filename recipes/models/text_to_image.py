"""A small text-conditional diffusion model of images, shaped like latent diffusion.

It predicts v (Salimans and Ho, 2022) under a cosine schedule (Nichol and Dhariwal, 2021), and draws by DDIM (Song et
al., 2021) with classifier-free guidance (Ho and Salimans, 2022). A latent is a patch of 2 x 2 pixels.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from recipes.data.captions import CAPTION_PAD, CaptionData, caption_tokens
from recipes.models.base import Batch, ExactMean, LossOutput, RecipeModule
from recipes.report import image_grid

PATCH = 2
LATENT_CHANNELS = 3 * PATCH**2
_TIME_FEATURES = _TEXT_WIDTH = 64


def to_latents(images: Tensor) -> Tensor:
    """Latents float[n, 12, h / 2, w / 2] in [-1, 1] of images uint8[n, 3, h, w]."""
    return functional.pixel_unshuffle(images.float() / 127.5 - 1, PATCH)


def to_images(latents: Tensor) -> Tensor:
    """Images uint8[n, 3, h, w] of latents."""
    return ((functional.pixel_shuffle(latents, PATCH) + 1) * 127.5).clamp(0, 255).to(torch.uint8)


def signal_and_noise(time: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine schedule: the amplitudes of signal and noise at a time in [0, 1]; their squares add up to 1."""
    angle = (time * 0.98 + 0.01) * (math.pi / 2)
    return angle.cos(), angle.sin()


class ResidualBlock(nn.Module):
    """Two convolutions; the condition scales and shifts the channels between them."""

    def __init__(self, channels_in: int, channels: int, condition: int) -> None:
        super().__init__()
        self.before = nn.Sequential(
            nn.GroupNorm(8, channels_in), nn.SiLU(), nn.Conv2d(channels_in, channels, 3, padding=1)
        )
        self.norm, self.modulation = nn.GroupNorm(8, channels, affine=False), nn.Linear(condition, 2 * channels)
        self.after = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = nn.Conv2d(channels_in, channels, 1)
        nn.init.zeros_(self.after.weight)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulation(condition)[:, :, None, None].chunk(2, 1)
        changed = functional.silu(self.norm(self.before(hidden)) * (1 + scale) + shift)
        return self.skip(hidden) + self.after(changed)


class UNet(nn.Module):
    """A U-Net over latents, which predicts v for a caption and a time; ``channels`` of each level, all multiples of 8.

    Half the width and height of one level is the next.
    """

    def __init__(self, caption_length: int, channels: Sequence[int]) -> None:
        super().__init__()
        first, last, width = channels[0], channels[-1], 2 * channels[0]
        self.caption_length = caption_length
        self.token_embedding = nn.Embedding(256, _TEXT_WIDTH, padding_idx=CAPTION_PAD)
        self.positions = nn.Parameter(torch.randn(caption_length, _TEXT_WIDTH) * 0.1)
        self.text = nn.TransformerEncoderLayer(
            _TEXT_WIDTH, 4, 4 * _TEXT_WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.caption = nn.Linear(_TEXT_WIDTH * caption_length, width)
        self.time = nn.Sequential(nn.Linear(_TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width))
        self.latents_in = nn.Conv2d(LATENT_CHANNELS, first, 3, padding=1)
        levels = [*pairwise(channels)]
        self.down = nn.ModuleList(ResidualBlock(here, here, width) for here, _ in levels)
        self.shrink = nn.ModuleList(nn.Conv2d(here, below, 3, 2, 1) for here, below in levels)
        self.middle = nn.ModuleList(ResidualBlock(last, last, width) for _ in range(2))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(below, here, 4, 2, 1) for here, below in levels[::-1])
        self.up = nn.ModuleList(ResidualBlock(2 * here, here, width) for here, _ in levels[::-1])
        self.out = nn.Sequential(nn.GroupNorm(8, first), nn.SiLU(), nn.Conv2d(first, LATENT_CHANNELS, 3, padding=1))
        self.skip = nn.Linear(width, LATENT_CHANNELS)  # v holds the noise, which the latents have: copy it from there

    def forward(self, latents: Tensor, time: Tensor, tokens: Tensor) -> Tensor:
        """Predict v, in the shape of the latents, at times float[n] with captions uint8[n, length]."""
        steps = torch.arange(_TIME_FEATURES // 2, device=time.device) / (_TIME_FEATURES // 2 - 1)
        waves = time[:, None] * 1000 * torch.exp(-math.log(1000) * steps)
        timing = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        caption = self.caption(self.text(self.token_embedding(tokens.long()) + self.positions).flatten(1))
        condition = functional.silu(timing + caption)
        hidden, saved = self.latents_in(latents), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            saved.append(block(hidden, condition))
            hidden = shrink(saved[-1])
        for block in self.middle:
            hidden = block(hidden, condition)
        for block, grow in zip(self.up, self.grow, strict=True):
            hidden = block(torch.cat([grow(hidden), saved.pop()], 1), condition)
        return self.out(hidden) + self.skip(timing)[:, :, None, None] * latents


class TextToImage(RecipeModule):
    """Text-conditional diffusion model with v-prediction; configs/model/text_to_image.yaml describes the settings.

    In training, times and noise come from torch's global generator, which is seeded for each step. In evaluation each
    sample has its own time and noise, so that the loss is the same on any number of devices.
    """

    data_type = CaptionData
    shown = ("train/loss", "val/loss")

    def __init__(
        self, *, block_out_channels: Sequence[int] = (48, 96), cond_dropout: float = 0.1,
        guidance_scale: float = 2.0, num_inference_steps: int = 25, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(**shared)
        self.channels, self.side = tuple(block_out_channels), 0
        self.cond_dropout, self.guidance_scale = cond_dropout, guidance_scale
        self.num_inference_steps = num_inference_steps

    def make_metrics(self) -> dict[str, Metric]:
        return {"loss": ExactMean()}

    def make_network(self, data: CaptionData) -> nn.Module:
        least = PATCH * 2 ** (len(self.channels) - 1)
        if data.image_size % least or any(one % 8 for one in self.channels):
            found = f"{data.image_size} pixels and {[*self.channels]}"
            raise ValueError(
                f"data.image_size must be a multiple of {least}, and model.block_out_channels of 8; found {found}."
            )
        self.side = data.image_size // PATCH
        return UNet(data.caption_length, self.channels)

    def compute_loss(self, batch: Batch) -> LossOutput:
        """The mean squared error of v in each image."""
        latents, tokens = to_latents(batch["image"]), batch["tokens"]
        if self.training:
            time, noise = torch.rand(len(latents), device=latents.device), torch.randn_like(latents)
            tokens = tokens * (torch.rand(len(latents), 1, device=latents.device) >= self.cond_dropout)
        else:
            time, noise = fixed_noise(batch["number"], latents)
        signal, sigma = signal_and_noise(time[:, None, None, None])
        predicted = self.network(signal * latents + sigma * noise, time, tokens)
        return LossOutput((predicted - (signal * noise - sigma * latents)).square().mean((1, 2, 3)))

    def show(self, data: CaptionData, folder: Path) -> dict[str, Path]:
        """Draw four images for each of five captions of the validation split."""
        found = dict.fromkeys(data.val_dataset[index]["caption"] for index in range(min(64, data.val_dataset.size)))
        captions = [caption for caption in [*found][:5] for _ in range(4)]
        images = [image.permute(1, 2, 0).numpy() for image in self.generate(captions)]
        texts = [fill(caption, 20) for caption in captions]
        image_grid(images, texts, folder / "generated.png", "Drawn for captions of the validation split", columns=4)
        return {"picture": folder / "generated.png"}

    @torch.inference_mode()
    def generate(self, captions: list[str]) -> Tensor:
        """Draw an image for each caption, uint8[n, 3, h, w]; the same for the same weights."""
        self.eval()
        length = self.network.caption_length
        tokens = torch.stack([caption_tokens(caption, length) for caption in captions]).to(self.device)
        shape = (len(captions), LATENT_CHANNELS, self.side, self.side)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed)).to(self.device)
        for now, later in pairwise(torch.linspace(1, 0, self.num_inference_steps + 1, device=self.device)):
            time = now.expand(len(captions))
            with_caption, without = (self.network(latents, time, one) for one in (tokens, torch.zeros_like(tokens)))
            predicted = without + self.guidance_scale * (with_caption - without)
            (signal, sigma), (next_signal, next_sigma) = signal_and_noise(now), signal_and_noise(later)
            clean, noise = (signal * latents - sigma * predicted).clamp(-1, 1), sigma * latents + signal * predicted
            latents = next_signal * clean + next_sigma * noise
        return to_images(latents).cpu()


def fixed_noise(numbers: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    """A time and a noise for each sample, from its number alone."""
    generators = [torch.Generator().manual_seed(number) for number in numbers.tolist()]
    times = torch.stack([torch.rand((), generator=rng) for rng in generators])
    noises = torch.stack([torch.randn(latents.shape[1:], generator=rng) for rng in generators])
    return times.to(latents.device), noises.to(latents.device)
