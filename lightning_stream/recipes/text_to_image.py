"""A small network that draws what a caption says, shaped like latent diffusion: latents of a picture are denoised.

Diffusion as in Ho et al., "Denoising Diffusion Probabilistic Models" (2020), with the cosine schedule of Nichol and
Dhariwal (2021) and the target v of Salimans and Ho, "Progressive Distillation" (2022); pictures are drawn by the
deterministic sampler of Song et al., "Denoising Diffusion Implicit Models" (2021). Where latent diffusion has a learnt
autoencoder, a fixed one stands here: a patch of 4 x 4 pixels is a latent.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from lightning_stream.recipes.captions import END, CaptionData, tokens_of
from lightning_stream.recipes.evaluation import Tally, tally
from lightning_stream.recipes.picture import draw_captioned, save_picture
from lightning_stream.recipes.task import Batch, Judged, Shown, TaskData, TaskModel, fitting

PATCH = 4
_TIMES = 64  # numbers that a time is told to the network by


def encode(images: Tensor) -> Tensor:
    """Latents, float[n, 3 * PATCH**2, h / PATCH, w / PATCH], of uint8[n, 3, h, w]."""
    latents: Tensor = functional.pixel_unshuffle(images.float() / 127.5 - 1, PATCH)
    return latents


def decode(latents: Tensor) -> Tensor:
    """The images, uint8[n, 3, h, w], of latents."""
    return ((functional.pixel_shuffle(latents, PATCH) + 1) * 127.5).clamp(0, 255).to(torch.uint8)


def parts_at(time: Tensor) -> tuple[Tensor, Tensor]:
    """How much of the picture, and of noise, latents hold at a time in [0, 1]; their squares add up to 1."""
    angle = (time * 0.98 + 0.01) * (math.pi / 2)
    return angle.cos(), angle.sin()


class Layer(nn.Module):
    """Looks at what lies around each place, then at all places and at the caption.

    Args:
        side: Places to a side.
        width, heads: See `Denoiser`.
    """

    def __init__(self, side: int, width: int, heads: int) -> None:
        super().__init__()
        self.around = nn.Sequential(_normed(width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), _normed(width))
        self.told = nn.Linear(width, 2 * width)
        self.then = nn.Conv2d(width, width, 3, padding=1)
        self.normed = _normed(width)
        self.at = nn.Parameter(torch.randn(side**2, width) * 0.02)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        nn.init.zeros_(self.then.weight)
        nn.init.zeros_(self.attention.out_proj.weight)

    def forward(self, seen: Tensor, told: Tensor, caption: Tensor) -> Tensor:
        """float[n, width, side, side] of that; told float[n, width] for the whole, and float[n, length, width]."""
        scale, shift = self.told(told)[:, :, None, None].chunk(2, 1)
        seen = seen + self.then(functional.silu(self.around(seen) * (1 + scale) + shift))
        asked = self.normed(seen).flatten(2).transpose(1, 2) + self.at
        all_of_it = torch.cat([asked, caption], 1)
        found: Tensor = self.attention(asked, all_of_it, all_of_it, need_weights=False)[0]
        return seen + found.transpose(1, 2).reshape(seen.shape)


class Denoiser(nn.Module):
    """Tells v, from which picture and noise follow, told a time and a caption.

    Args:
        side: Latents of a picture, to a side.
        length: Tokens of a caption.
        width: Numbers that each place and each token is seen as.
        depth: Layers.
        heads: Of their attention.
    """

    def __init__(self, side: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        size = 3 * PATCH**2
        self.length = length
        self.of_latents = nn.Conv2d(size, width, 3, padding=1)
        self.of_tokens = nn.Embedding(256, width, padding_idx=END)
        self.at = nn.Parameter(torch.randn(length, width) * 0.02)
        self.reading = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.of_caption = nn.Linear(width, width)
        self.of_time = nn.Sequential(nn.Linear(_TIMES, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(Layer(side, width, heads) for _ in range(depth))
        self.normed = _normed(width)
        self.found = nn.Conv2d(width, size, 3, padding=1)
        self.passed_on = nn.Linear(width, size)  # v holds the noise, and the latents have it: no layer need carry it
        for last in (self.found, self.passed_on):
            nn.init.zeros_(last.weight)

    def forward(self, latents: Tensor, time: Tensor, tokens: Tensor) -> Tensor:
        """float[n, size, side, side] of latents of that shape, times float[n] and captions uint8[n, length]."""
        rates = torch.exp(torch.arange(_TIMES // 2, device=time.device) * (-math.log(1000) / (_TIMES // 2 - 1))) * 1000
        waves = time[:, None] * rates
        caption = self.reading(self.of_tokens(tokens.long()) + self.at)
        told = self.of_time(torch.cat([waves.sin(), waves.cos()], 1)) + self.of_caption(caption.mean(1))
        told = functional.silu(told)
        seen = self.of_latents(latents)
        for layer in self.layers:
            seen = layer(seen, told, caption)
        found: Tensor = self.found(functional.silu(self.normed(seen)))
        passed_on: Tensor = self.passed_on(told)
        return found + passed_on[:, :, None, None] * latents


def _normed(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(8, width), width)


class TextToImage(TaskModel):
    """Learns to part pictures from noise, told their captions; so it can draw what a caption says.

    In training, times and noise come from torch's global generator, which is seeded for each step. In evaluation each
    sample has a time and a noise of its own, so that the measures are the same on any number of devices.

    Args:
        width, depth, heads: See `Denoiser`.
        captionless: Share of the samples that are learnt without their caption.
        guidance: How far a drawing follows its caption; 1 is what was learnt.
        drawing_steps: Of the sampler.
        learning_rate, weight_decay, warmup: See `TaskModel`.
        seed: Of the first weights, and of the drawings.
    """

    shown = ("train/loss", "val/loss")
    learns_from = CaptionData

    def __init__(
        self,
        *,
        width: int = 96,
        depth: int = 4,
        heads: int = 4,
        captionless: float = 0.1,
        guidance: float = 2.0,
        drawing_steps: int = 25,
        learning_rate: float = 0.003,
        weight_decay: float = 0.01,
        warmup: float = 0.1,
        seed: int = 1,
    ) -> None:
        super().__init__(learning_rate, weight_decay, warmup)
        self.width, self.depth, self.heads = width, depth, heads
        self.captionless = captionless
        self.guidance = guidance
        self.drawing_steps = drawing_steps
        self.seed = seed
        self.side = 0
        self.network: Denoiser | None = None

    def build(self, data: TaskData) -> None:
        """Make the network, unless that was done, for the data's pictures and captions."""
        if self.network is not None:
            return
        images = fitting(data, CaptionData, "Choose images with captions, e.g. +data=laion, or a model for this data.")
        self.side = images.image_size
        if self.side % PATCH:
            raise ValueError(f"a picture is cut into patches of {PATCH} pixels; image_size is {self.side}.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.network = Denoiser(self.side // PATCH, images.length, self.width, self.depth, self.heads)

    def judge(self, batch: Batch) -> Judged:
        """The mean squared error of v in each picture."""
        assert self.network is not None
        latents, tokens = encode(batch["image"]), batch["tokens"]
        if self.training:
            time, noise = torch.rand(len(latents), device=latents.device), torch.randn_like(latents)
            tokens = tokens * (torch.rand(len(latents), 1, device=latents.device) >= self.captionless)
        else:
            time, noise = _own_noise(batch["number"], latents)
        signal, rest = parts_at(time[:, None, None, None])
        found = self.network(signal * latents + rest * noise, time, tokens)
        losses = (found - (signal * noise - rest * latents)).square().mean((1, 2, 3))
        return Judged(losses, tally(losses.detach() < 1, losses))

    @staticmethod
    def measures(counted: Tally) -> dict[str, float]:
        """The mean loss."""
        return {"loss": counted.loss}

    def show(self, data: TaskData, folder: Path) -> Shown:
        """Pictures for some captions that were held out."""
        assert isinstance(data, CaptionData)
        captions = data.captions(5)
        images = self.draw([caption for caption in captions for _ in range(4)])
        pictures = [Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()) for image in images]
        sheet = draw_captioned(pictures, captions, "Drawn from captions")
        path = folder / "drawn.png"
        save_picture(sheet, path)
        return Shown({"picture": str(path)})

    @torch.inference_mode()
    def draw(self, captions: list[str]) -> Tensor:
        """A picture for each caption, uint8[n, 3, side, side]; the same for the same weights."""
        assert self.network is not None
        self.eval()
        tokens = torch.stack([tokens_of(caption, self.network.length) for caption in captions]).to(self.device)
        size = (len(captions), 3 * PATCH**2, self.side // PATCH, self.side // PATCH)
        latents = torch.randn(size, generator=torch.Generator().manual_seed(self.seed)).to(self.device)
        times = torch.linspace(1, 0, self.drawing_steps + 1, device=self.device)
        for now, later in pairwise(times):
            time = now.expand(len(captions))
            told, untold = (self.network(latents, time, one) for one in (tokens, torch.zeros_like(tokens)))
            found = untold + self.guidance * (told - untold)
            (signal, rest), (next_signal, next_rest) = parts_at(now), parts_at(later)
            clean, noise = (signal * latents - rest * found).clamp(-1, 1), rest * latents + signal * found
            latents = next_signal * clean + next_rest * noise
        return decode(latents).cpu()


def _own_noise(numbers: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    """A time and a noise for each sample that depend on its number alone."""
    drawn = []
    for number in numbers.tolist():
        chance = torch.Generator().manual_seed(number)
        drawn.append((torch.rand((), generator=chance), torch.randn(latents.shape[1:], generator=chance)))
    times, noises = (torch.stack([one[part] for one in drawn]).to(latents.device) for part in range(2))
    return times, noises
