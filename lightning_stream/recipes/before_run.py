"""A Hydra callback that refuses what cannot run, before any folder is made and before any job of a sweep starts."""

from __future__ import annotations

from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lightning_stream.recipes.checks import refusal
from lightning_stream.recipes.command_line import fail, mark_composed
from lightning_stream.recipes.sweeps import jobs_of, note_swept


class ChecksBeforeRun(Callback):
    """Checks the config of a run, or of all jobs of a sweep; ends the program with all problems, and exit code 2."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """One run."""
        mark_composed()
        if sentences := _checked(config):
            raise fail(sentences)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """A sweep: what is wrong with any of its jobs, before the first starts."""
        mark_composed()
        note_swept(config)
        told: list[str] = []
        for label, job in jobs_of(config):
            told += [line if n else f"{label}: {line}" for n, line in enumerate(_checked(job))]
        if told:
            raise fail(told)


def _checked(config: DictConfig) -> list[str]:
    known = HydraConfig.instance()
    before = known.cfg
    known.set_config(config)  # what a config takes from Hydra, such as the name of the data, is found here
    try:
        return refusal(config)
    finally:
        known.cfg = before
