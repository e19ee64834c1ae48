"""`Tuner`: changes one setting of a running loader at a time, and keeps it if training waits less."""

from __future__ import annotations

from lightning_stream.loading.verdict import LiveChange

_HELPED = 0.9  # of the waiting that a second of training took before, at most


class Tuner:
    """Decides, after each interval of training, which settings to use in the next one.

    It is pure, so that all ranks that ask with the same values decide alike.

    Attributes:
        settings: Those to use, for `StreamingDataLoader.tune`; 0: as the dataset has it.
    """

    def __init__(self) -> None:
        self.settings: dict[str, int] = {}
        self._trial: LiveChange | None = None  # whose effect the interval measures
        self._before, self._former, self._began = 0.0, 0, 0  # waiting and setting before the trial; its step
        self._tried: set[tuple[str, int]] = set()

    def decide(self, proposed: LiveChange | None, wait_share: float, step: int) -> str | None:
        """Change `settings` after an interval in which training waited this part of the time; what to tell the user."""
        trial, self._trial = self._trial, None
        if trial is not None:
            change = f"{trial.setting} from {trial.now:,} to {trial.value:,} at step {self._began:,}"
            shares = f"from {100 * self._before:.0f}% to {100 * wait_share:.0f}% of the time"
            waiting = f"{shares} (predicted: {100 * trial.wait_share:.0f}%)"
            if _waiting(wait_share) <= _HELPED * _waiting(self._before):
                return f"Raised {change}: waiting fell {waiting}."
            self.settings[trial.setting] = self._former
            return f"Raised {change}, and put it back: waiting went {waiting}."
        if proposed is not None and (proposed.setting, proposed.value) not in self._tried:
            self._tried.add((proposed.setting, proposed.value))
            self._trial, self._before, self._began = proposed, wait_share, step
            self._former = self.settings.get(proposed.setting, 0)
            self.settings[proposed.setting] = proposed.value
        return None


def _waiting(share: float) -> float:
    """Seconds of waiting for each second of training: from 99% to 98% of the time, waiting falls to a half."""
    return share / max(1e-9, 1 - share)
