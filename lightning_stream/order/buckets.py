"""How samples of similar lengths come together: the settings, chosen from the data and the run's first start."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_stream.lazy import cached

from .arrays import Integers
from .orders import ceil_div
from .rules import TEXT, Rule, count, violations

_WINDOW = 16384
_BATCHES = 64  # in a window, at least
_MULTIPLES = (1, 2, 4, 8, 16)  # so that 16 devices or fewer, as a power of two, have equal shares
_MOST = 2**31 - 1


@dataclass(frozen=True)
class LengthBuckets:
    """How samples of similar lengths come together. Make one with :meth:`resolved`, which chooses what is None.

    Args:
        window: W, samples that are sorted by length together, a multiple of ``batch_size``.
        batch_size: B of the run's first start. With a budget: what the sizes of all batches are multiples of.
        batch_tokens: Tokens of a global batch at most, if its samples are padded to the longest; None: batches of B.
        lengths: A digest of the samples' lengths, by which a state recognises other data.

    Raises:
        ValueError: A value that is not allowed; all of them are named.

    Example::

        LengthBuckets.resolved(np.array([512, 2000]), batch_size=None, batch_tokens=65536)
    """

    window: int
    batch_size: int
    batch_tokens: int | None = None
    lengths: str = ""

    def __post_init__(self) -> None:
        problems = violations(vars(self), _RULES)
        if not problems and self.window % self.batch_size:
            problems = [f"window must be a multiple of batch_size, {self.batch_size}; found {self.window}."]
        if problems:
            raise ValueError(f"Samples cannot be sorted by length this way. {' '.join(problems)}")

    @classmethod
    def resolved(
        cls,
        lengths: Integers,
        *,
        batch_size: int | None,
        window: int | None = None,
        batch_tokens: int | None = None,
        digest: str = "",
        resumed: LengthBuckets | None = None,
    ) -> LengthBuckets:
        """Choose what is None, from the data and the run's first start alone.

        Args:
            lengths: Those of all samples: 1-d.
            batch_size: As above; with a budget, None means the largest power of two up to 16 that it has room for.
            window: Rounded up to whole batches; None means 16,384, or 64 batches where these are more.
            resumed: The settings of the state to resume from.

        Raises:
            ValueError: The budget has no room for ``batch_size`` samples of the greatest length.
        """
        usual = batch_size or 1
        if batch_tokens is not None:
            longest, mean = cached(_SUMMARIES, digest, lambda _: _summary(lengths), 4) if digest else _summary(lengths)
            room = batch_tokens // longest
            multiple = batch_size or max(size for size in _MULTIPLES if size <= max(room, 1))
            if multiple > room:
                raise ValueError(
                    f"batch_tokens must have room for {multiple} samples of the greatest length, {longest:,}, which is "
                    f"{multiple * longest:,}; found {batch_tokens:,}. Raise it, omit long samples (by "
                    "the lengths of filter; of a map-style dataset, by torch.utils.data.Subset), or lower the multiple"
                )
            batch_size = multiple
            usual = batch_tokens // mean
        elif resumed is not None:
            batch_size = resumed.batch_size
        batch_size = batch_size or 1
        if window is None:
            window = max(_WINDOW, _BATCHES * usual) if resumed is None else resumed.window
        return cls(ceil_div(window, batch_size) * batch_size, batch_size, batch_tokens, digest)


_SUMMARIES: dict[str, tuple[int, int]] = {}  # by digest: a loader asks for its settings several times


def _summary(lengths: Integers) -> tuple[int, int]:
    """The greatest length and the mean one, at least 1."""
    mean = int(lengths.mean()) if len(lengths) else 1
    return int(lengths.max(initial=1)), max(1, mean)


_RULES: dict[str, Rule] = {
    "window": count(1, _MOST),
    "batch_size": count(1, _MOST),
    "batch_tokens": count(1, 2**62, optional=True),
    "lengths": TEXT,
}
