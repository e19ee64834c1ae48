"""Synthetic text and captioned images, so that the text and caption recipes run offline."""

import math
from io import BytesIO
from random import Random

import numpy as np
from PIL import Image, ImageDraw

_WHO = ["the miller", "the old fox", "a young queen", "the ferryman", "her brother", "the clockmaker", "the baker"]
_DID = ["found", "carried", "sold", "hid", "painted", "lost", "repaired", "counted"]
_WHAT = ["a silver key", "three apples", "the broken lamp", "a letter", "the blue door", "an empty boat"]
_WHERE = ["by the river", "under the bridge", "in the tower", "behind the mill", "at the market", "on the frozen lake"]
_WHEN = ["One morning", "At dusk", "After the storm", "In winter", "Before the feast", "When the bells rang"]
_QUOTE = ["It is mine", "Nobody saw it", "We must go", "I will wait", "Give it back", "Let us share it"]
_END = ["And so it stayed.", "Nobody spoke of it again.", "They laughed all the way home."]

COLORS = {
    "red": (214, 48, 49), "orange": (240, 140, 30), "yellow": (245, 214, 60), "green": (46, 160, 80),
    "blue": (44, 100, 220), "purple": (130, 60, 180), "white": (250, 250, 248), "black": (28, 28, 34),
}  # fmt: skip
CORNERS = {"circle": 64, "square": 4, "triangle": 3}


def story(number: int, seed: int = 1) -> str:
    """A story of three to seven sentences from a grammar; the same for the same arguments."""
    rng = Random(f"{seed} {number}")
    hero, thing = rng.choice(_WHO), rng.choice(_WHAT)
    lines = [f"{rng.choice(_WHEN)} {hero} {rng.choice(_DID)} {thing} {rng.choice(_WHERE)}."]
    for _ in range(rng.randint(1, 5)):
        actor = rng.choice((hero, rng.choice(_WHO)))
        if rng.random() < 0.4:
            lines.append(f'"{rng.choice(_QUOTE)}," said {actor}.')
        else:
            lines.append(f"Then {actor} {rng.choice(_DID)} {rng.choice((thing, rng.choice(_WHAT)))}.")
    return " ".join([*lines, rng.choice(_END)])


def captioned_shape(number: int, seed: int = 1, side: int = 64) -> tuple[bytes, str]:
    """A JPEG of one shape on a plain background, and its caption, e.g. ``"a red circle on white"``."""
    rng = np.random.default_rng([seed, number])
    color, background = rng.choice([*COLORS], 2, replace=False)
    shape = str(rng.choice([*CORNERS]))
    image = Image.new("RGB", (4 * side, 4 * side), _shade(rng, background))  # reduced below: that smooths the edges
    radius = rng.uniform(0.3, 0.44) * 4 * side
    x, y = rng.uniform(radius, 4 * side - radius, 2)
    turn = rng.uniform(-0.25, 0.25) + (math.pi / 4 if shape == "square" else 0.0)
    angles = turn + 2 * math.pi * np.arange(CORNERS[shape]) / CORNERS[shape]
    corners = zip(x + radius * np.sin(angles), y - radius * np.cos(angles), strict=True)
    ImageDraw.Draw(image).polygon([(float(a), float(b)) for a, b in corners], fill=_shade(rng, color))
    out = BytesIO()
    image.reduce(4).save(out, format="JPEG", quality=90)
    return out.getvalue(), f"{'an' if color[0] in 'aeiou' else 'a'} {color} {shape} on {background}"


def _shade(rng: np.random.Generator, color: str) -> tuple[int, int, int]:
    r, g, b = np.clip(np.array(COLORS[color]) + rng.integers(-12, 13, 3), 0, 255).tolist()
    return r, g, b
