"""A small text-conditional diffusion model of images, shaped like latent diffusion.

It predicts v (Salimans and Ho, 2022) under a cosine schedule (Nichol and Dhariwal, 2021), and draws by DDIM (Song et
al., 2021) with classifier-free guidance (Ho and Salimans, 2022). A latent is a patch of 4 x 4 pixels.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from recipes.data.captions import CAPTION_PAD, CaptionData, caption_tokens
from recipes.models.base import Batch, ExactMean, LossOutput, RecipeModule
from recipes.report import image_grid

PATCH = 4
LATENT_CHANNELS = 3 * PATCH**2
_TIME_FEATURES = 64


def to_latents(images: Tensor) -> Tensor:
    """Latents float[n, 48, h / 4, w / 4] in [-1, 1] of images uint8[n, 3, h, w]."""
    return functional.pixel_unshuffle(images.float() / 127.5 - 1, PATCH)


def to_images(latents: Tensor) -> Tensor:
    """Images uint8[n, 3, h, w] of latents."""
    return ((functional.pixel_shuffle(latents, PATCH) + 1) * 127.5).clamp(0, 255).to(torch.uint8)


def signal_and_noise(time: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine schedule: the amplitudes of signal and noise at a time in [0, 1]; their squares add up to 1."""
    angle = (time * 0.98 + 0.01) * (math.pi / 2)
    return angle.cos(), angle.sin()


class Denoiser(nn.Module):
    """A transformer over latents (`side` per side of the image), caption and time, which predicts v."""

    def __init__(self, side: int, caption_length: int, d_model: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.latents_in = nn.Linear(LATENT_CHANNELS, d_model)
        self.token_embedding = nn.Embedding(256, d_model, padding_idx=CAPTION_PAD)
        self.time_mlp = nn.Sequential(nn.Linear(_TIME_FEATURES, d_model), nn.SiLU(), nn.Linear(d_model, d_model))
        self.positions = nn.Parameter(torch.randn(side**2 + caption_length, d_model) * 0.02)
        self.caption_length = caption_length
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, n_heads, 4 * d_model, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(n_layers)
        )
        self.out = nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, LATENT_CHANNELS))
        self.skip = nn.Linear(d_model, LATENT_CHANNELS)  # v holds the noise, which the latents have: copy it from there

    def forward(self, latents: Tensor, time: Tensor, tokens: Tensor) -> Tensor:
        """Predict v, float[n, 48, side, side], of such latents at times float[n] with captions uint8[n, length]."""
        steps = torch.arange(_TIME_FEATURES // 2, device=time.device) / (_TIME_FEATURES // 2 - 1)
        waves = time[:, None] * 1000 * torch.exp(-math.log(1000) * steps)
        timing = self.time_mlp(torch.cat([waves.sin(), waves.cos()], 1))
        pixels = self.latents_in(latents.flatten(2).transpose(1, 2))
        hidden = torch.cat([pixels, self.token_embedding(tokens.long())], 1) + self.positions + timing[:, None]
        for block in self.blocks:
            hidden = block(hidden)
        predicted = self.out(hidden[:, : pixels.shape[1]]).transpose(1, 2).reshape(latents.shape)
        return predicted + self.skip(timing)[:, :, None, None] * latents


class TextToImage(RecipeModule):
    """Text-conditional diffusion model with v-prediction; configs/model/text_to_image.yaml describes the settings.

    In training, times and noise come from torch's global generator, which is seeded for each step. In evaluation each
    sample has its own time and noise, so that the loss is the same on any number of devices.
    """

    data_type = CaptionData
    shown = ("train/loss", "val/loss")

    def __init__(
        self, *, d_model: int = 96, n_layers: int = 4, n_heads: int = 4, cond_dropout: float = 0.1,
        guidance_scale: float = 2.0, num_inference_steps: int = 25, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(**shared)
        self.sizes, self.side = (d_model, n_layers, n_heads), 0
        self.cond_dropout, self.guidance_scale = cond_dropout, guidance_scale
        self.num_inference_steps = num_inference_steps

    def make_metrics(self) -> dict[str, Metric]:
        return {"loss": ExactMean()}

    def make_network(self, data: CaptionData) -> nn.Module:
        if data.image_size % PATCH:
            raise ValueError(f"data.image_size must be a multiple of {PATCH}; found {data.image_size}.")
        self.side = data.image_size // PATCH
        return Denoiser(self.side, data.caption_length, *self.sizes)

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
        image_grid(images, captions, folder / "generated.png", "Drawn for captions of the validation split", columns=4)
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
