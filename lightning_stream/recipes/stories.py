"""Little stories made from a grammar, so that a language model can be trained with no file and no network at hand."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

VERSION = 1
_WHO = [
    "the miller",
    "the old fox",
    "a young queen",
    "the ferryman",
    "her brother",
    "the clockmaker",
    "a quiet goose",
    "the baker",
]
_DOES = ["found", "carried", "sold", "hid", "painted", "lost", "mended", "counted"]
_WHAT = [
    "a silver key",
    "three apples",
    "the broken lamp",
    "a letter",
    "the blue door",
    "a sack of flour",
    "an empty boat",
]
_WHERE = ["by the river", "under the bridge", "in the tower", "behind the mill", "at the market", "on the frozen lake"]
_WHEN = ["One morning", "At dusk", "After the storm", "In winter", "Before the feast", "When the bells rang"]
_SAYS = ["It is mine", "Nobody saw it", "We must go", "I will wait", "Give it back", "Let us share it"]
_ENDS = [
    "And so it stayed.",
    "Nobody spoke of it again.",
    "They laughed all the way home.",
    "The river kept the secret.",
]


def stories(count: int, seed: int) -> Iterator[str]:
    """`count` stories of three to seven sentences; equal for equal arguments."""
    return (story(number, seed) for number in range(count))


def story(number: int, seed: int) -> str:
    """The story of this number, from 0."""
    chance = Random(f"{VERSION} {seed} {number}")
    hero, thing = chance.choice(_WHO), chance.choice(_WHAT)
    lines = [f"{chance.choice(_WHEN)} {hero} {chance.choice(_DOES)} {thing} {chance.choice(_WHERE)}."]
    for _ in range(chance.randint(1, 5)):
        if chance.random() < 0.4:
            lines.append(f'"{chance.choice(_SAYS)}," said {chance.choice((hero, chance.choice(_WHO)))}.')
        else:
            actor = chance.choice((hero, chance.choice(_WHO)))
            lines.append(f"Then {actor} {chance.choice(_DOES)} {chance.choice((thing, chance.choice(_WHAT)))}.")
    return " ".join([*lines, chance.choice(_ENDS)])
