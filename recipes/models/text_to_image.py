"""A small text-conditional diffusion model of images, shaped like latent diffusion.

It predicts v (Salimans and Ho, "Progressive Distillation", 2022) under the cosine schedule of Nichol and Dhariwal
(2021), and draws with the deterministic DDIM sampler (Song et al., 2021) and classifier-free guidance (Ho and Salimans,
2022). In place of a trained autoencoder, a latent is a patch of 4 x 4 pixels.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from recipes.data.base import RecipeData
from recipes.data.captions import CAPTION_PAD, CaptionData, caption_tokens
from recipes.models.base import Artifacts, Batch, ExactMean, LossOutput, RecipeModule

PATCH = 4
LATENT_CHANNELS = 3 * PATCH**2
_TIME_FEATURES = 64


def to_latents(images: Tensor) -> Tensor:
    """Latents float[n, 48, h / 4, w / 4] in [-1, 1] of images uint8[n, 3, h, w]."""
    latents: Tensor = functional.pixel_unshuffle(images.float() / 127.5 - 1, PATCH)
    return latents


def to_images(latents: Tensor) -> Tensor:
    """Images uint8[n, 3, h, w] of latents."""
    return ((functional.pixel_shuffle(latents, PATCH) + 1) * 127.5).clamp(0, 255).to(torch.uint8)


def signal_and_noise(time: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine schedule: the amplitudes of signal and noise at a time in [0, 1]; their squares add up to 1."""
    angle = (time * 0.98 + 0.01) * (math.pi / 2)
    return angle.cos(), angle.sin()


class Block(nn.Module):
    """A residual convolution that the conditioning scales and shifts, then attention over latents and caption."""

    def __init__(self, side: int, d_model: int, n_heads: int) -> None:
        super().__init__()
        convolution = nn.Conv2d(d_model, d_model, 3, padding=1)
        self.conv_in = nn.Sequential(group_norm(d_model), nn.SiLU(), convolution, group_norm(d_model))
        self.scale_shift = nn.Linear(d_model, 2 * d_model)
        self.conv_out = nn.Conv2d(d_model, d_model, 3, padding=1)
        self.norm = group_norm(d_model)
        self.positions = nn.Parameter(torch.randn(side**2, d_model) * 0.02)
        self.attention = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        nn.init.zeros_(self.conv_out.weight)
        nn.init.zeros_(self.attention.out_proj.weight)

    def forward(self, hidden: Tensor, conditioning: Tensor, caption: Tensor) -> Tensor:
        """Transform float[n, d, side, side], given float[n, d] (time and caption) and float[n, length, d] (caption)."""
        scale, shift = self.scale_shift(conditioning)[:, :, None, None].chunk(2, 1)
        hidden = hidden + self.conv_out(functional.silu(self.conv_in(hidden) * (1 + scale) + shift))
        queries = self.norm(hidden).flatten(2).transpose(1, 2) + self.positions
        context = torch.cat([queries, caption], 1)
        attended: Tensor = self.attention(queries, context, context, need_weights=False)[0]
        return hidden + attended.transpose(1, 2).reshape(hidden.shape)


class Denoiser(nn.Module):
    """Predicts v from noisy latents (`side` per side of the image), the time and the caption."""

    def __init__(self, side: int, caption_length: int, d_model: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(LATENT_CHANNELS, d_model, 3, padding=1)
        self.token_embedding = nn.Embedding(256, d_model, padding_idx=CAPTION_PAD)
        self.caption_positions = nn.Parameter(torch.randn(caption_length, d_model) * 0.02)
        self.caption_encoder = nn.TransformerEncoderLayer(
            d_model, n_heads, 2 * d_model, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.caption_out = nn.Linear(d_model, d_model)
        self.time_mlp = nn.Sequential(nn.Linear(_TIME_FEATURES, d_model), nn.SiLU(), nn.Linear(d_model, d_model))
        self.blocks = nn.ModuleList(Block(side, d_model, n_heads) for _ in range(n_layers))
        self.norm = group_norm(d_model)
        self.conv_out = nn.Conv2d(d_model, LATENT_CHANNELS, 3, padding=1)
        self.skip = nn.Linear(d_model, LATENT_CHANNELS)  # v holds the noise, which the latents have: copy it from there
        for last in (self.conv_out, self.skip):
            nn.init.zeros_(last.weight)

    def forward(self, latents: Tensor, time: Tensor, tokens: Tensor) -> Tensor:
        """Predict v, float[n, 48, side, side], of such latents at times float[n] with captions uint8[n, length]."""
        steps = torch.arange(_TIME_FEATURES // 2, device=time.device) / (_TIME_FEATURES // 2 - 1)
        waves = time[:, None] * 1000 * torch.exp(-math.log(1000) * steps)
        caption = self.caption_encoder(self.token_embedding(tokens.long()) + self.caption_positions)
        conditioning = self.time_mlp(torch.cat([waves.sin(), waves.cos()], 1)) + self.caption_out(caption.mean(1))
        conditioning = functional.silu(conditioning)
        hidden = self.conv_in(latents)
        for block in self.blocks:
            hidden = block(hidden, conditioning, caption)
        predicted: Tensor = self.conv_out(functional.silu(self.norm(hidden)))
        return predicted + self.skip(conditioning)[:, :, None, None] * latents


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(8, channels), channels)


class TextToImage(RecipeModule):
    """Text-conditional diffusion model with v-prediction; draws images for captions.

    In training, times and noise come from torch's global generator, which is seeded for each step. In evaluation each
    sample has its own time and noise, so that the loss is the same on any number of devices.

    Args:
        d_model, n_layers, n_heads: Embedding dimension, blocks and attention heads.
        cond_dropout: Share of the training samples whose caption is dropped, for classifier-free guidance.
        guidance_scale: How far an image follows its caption; 1 is no guidance.
        num_inference_steps: Steps of the sampler.
        **shared: See `RecipeModule`.
    """

    data_type = CaptionData
    shown = ("train/loss", "val/loss")

    def __init__(
        self, *, d_model: int = 96, n_layers: int = 4, n_heads: int = 4, cond_dropout: float = 0.1,
        guidance_scale: float = 2.0, num_inference_steps: int = 25, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(**{"learning_rate": 0.003, "weight_decay": 0.01, "warmup": 0.1, **shared})
        self.sizes = (d_model, n_layers, n_heads)
        self.cond_dropout, self.guidance_scale = cond_dropout, guidance_scale
        self.num_inference_steps = num_inference_steps
        self.side = 0
        self.network: Denoiser | None = None

    def make_metrics(self) -> dict[str, Metric]:
        return {"loss": ExactMean()}

    def build(self, data: RecipeData) -> None:
        if self.network is not None:
            return
        assert isinstance(data, CaptionData)
        if data.image_size % PATCH:
            raise ValueError(f"data.image_size must be a multiple of {PATCH}; found {data.image_size}.")
        self.side = data.image_size // PATCH
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.network = Denoiser(self.side, data.caption_length, *self.sizes)

    def compute_loss(self, batch: Batch) -> LossOutput:
        """The mean squared error of v in each image."""
        assert self.network is not None
        latents, tokens = to_latents(batch["image"]), batch["tokens"]
        if self.training:
            time, noise = torch.rand(len(latents), device=latents.device), torch.randn_like(latents)
            tokens = tokens * (torch.rand(len(latents), 1, device=latents.device) >= self.cond_dropout)
        else:
            time, noise = fixed_noise(batch["number"], latents)
        signal, sigma = signal_and_noise(time[:, None, None, None])
        predicted = self.network(signal * latents + sigma * noise, time, tokens)
        return LossOutput((predicted - (signal * noise - sigma * latents)).square().mean((1, 2, 3)))

    def show(self, data: RecipeData, folder: Path) -> Artifacts:
        """Draw four images for each of five captions of the validation split."""
        from matplotlib.figure import Figure

        assert isinstance(data, CaptionData)
        captions = data.captions(5)
        images = self.generate([caption for caption in captions for _ in range(4)])
        figure = Figure(figsize=(8, 2 * len(captions)), dpi=80, layout="constrained")
        for number, axes in enumerate(figure.subplots(len(captions), 4, squeeze=False).flat):
            axes.imshow(images[number].permute(1, 2, 0).numpy())
            axes.set_axis_off()
            axes.set_title(captions[number // 4] if number % 4 == 0 else "", loc="left", fontsize=10)
        path = folder / "generated.png"
        figure.savefig(path)
        return Artifacts({"picture": str(path)})

    @torch.inference_mode()
    def generate(self, captions: list[str]) -> Tensor:
        """Draw an image for each caption, uint8[n, 3, h, w]; the same for the same weights."""
        assert self.network is not None
        self.eval()
        length = len(self.network.caption_positions)
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
