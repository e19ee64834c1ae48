"""Chords played by this package: sounds to learn from, with no file and no network at hand."""

from __future__ import annotations

import io
import wave

import numpy as np
from numpy.typing import NDArray

VERSION = 1
"""Raised whenever the same seed gives other sounds than before."""

KINDS: dict[str, tuple[int, int, int]] = {
    "major": (0, 4, 7),
    "minor": (0, 3, 7),
    "diminished": (0, 3, 6),
    "augmented": (0, 4, 8),
    "suspended": (0, 5, 7),
}
"""The chords, each as semitones above its lowest note."""

RATE = 8000
_MOMENTS = 12000
_OVERTONES = 5


def play(kind: str, seed: int, number: int) -> NDArray[np.float32]:
    """One and a half seconds of a chord, float32[12000] in [-1, 1]; the same for the same arguments.

    Lowest note, tuning, timbre, loudness, fading and noise vary: only the steps between the notes tell its kind.

    Args:
        kind: One of `KINDS`.
        seed: Chooses the whole set of sounds.
        number: Which sound of the set, from 0.
    """
    rng = np.random.default_rng([seed, [*KINDS].index(kind), number])
    seconds = np.arange(_MOMENTS) / RATE
    lowest = 110 * 2 ** rng.uniform(0, 1.5)
    steepness, fading = rng.uniform(0.8, 2.0), rng.uniform(0.2, 2.5)
    sound = np.zeros(_MOMENTS)
    for semitones in KINDS[kind]:
        pitch = lowest * 2 ** ((semitones + rng.normal() * 0.1) / 12)
        struck = np.clip((seconds - rng.uniform(0, 0.1)) / 0.02, 0, 1)
        for overtone in range(1, _OVERTONES + 1):
            strength = rng.uniform(0.4, 1.0) / overtone**steepness
            wave_of_it = np.sin(2 * np.pi * (pitch * overtone * seconds + rng.random()))
            sound += strength * struck * np.exp(-fading * seconds) * wave_of_it
    sound /= np.abs(sound).max()
    sound += rng.normal(size=_MOMENTS) * rng.uniform(0.005, 0.1)
    played: NDArray[np.float32] = (sound / np.abs(sound).max() * rng.uniform(0.2, 0.95)).astype(np.float32)
    return played


def wav_file(sound: NDArray[np.float32], rate: int = RATE) -> bytes:
    """A sound, float32[moments] in [-1, 1], as the bytes of a WAV file of 16-bit numbers."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())
    return out.getvalue()
