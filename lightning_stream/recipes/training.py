"""From a config to a trained model: check, build, fit, summarise."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import (  # type: ignore[attr-defined]
    MisconfigurationException,
    SIGTERMException,
)
from omegaconf import DictConfig, OmegaConf

import lightning_stream
from lightning_stream.errors import LightningStreamError, MissingExtraError, StateError
from lightning_stream.recipes.callbacks import RunStopped
from lightning_stream.recipes.checks import refusal
from lightning_stream.recipes.command_line import fail, mark_composed, wants_traceback
from lightning_stream.recipes.launching import one_job
from lightning_stream.recipes.loop_summary import summarise_loop
from lightning_stream.recipes.places import LIGHTNING, TORCH, checkpoint_meant, checkpoints, last_checkpoint, trainer_of
from lightning_stream.recipes.stores import reaching
from lightning_stream.recipes.summary import RunSummary, summarise

_LOADING = "Error(s) in loading state_dict"
_CONFIG = "config.yaml"
_SIGNALLED = 128  # a shell's exit code for "ended by signal n" is this plus n


def train(config: DictConfig) -> RunSummary | None:
    """Run what a config of ``train.py`` describes, and say how it went; None on all ranks but the first.

    Raises:
        SystemExit: 2 for a config or data that cannot be used, after all reasons were printed; 128 + n where signal n
            stopped the run.
    """
    mark_composed()
    with one_job(config):
        if sentences := refusal(config):
            raise fail(sentences)
        return _told(config)


def _told(config: DictConfig) -> RunSummary | None:
    try:
        with reaching(OmegaConf.to_container(config.store, resolve=True)):  # type: ignore[arg-type]
            return _run(config)
    except (LightningStreamError, ImportError, ValueError, TypeError, OSError, HydraException) as error:
        sentence = in_our_words(error)
        if wants_traceback() or sentence is None:
            raise
        is_refused = isinstance(error, StateError) and config.ckpt_path is not None
        others = [_how_the_run_began(config)] if is_refused else []
        raise fail([sentence, *others, "(HYDRA_FULL_ERROR=1 shows where.)"]) from error
    except MisconfigurationException as error:
        if wants_traceback():
            raise
        raise fail([f"Lightning: {error}", "(HYDRA_FULL_ERROR=1 shows where.)"]) from error
    except RuntimeError as error:
        if wants_traceback() or _LOADING not in str(error):
            raise
        raise fail([_other_model(config, str(error)), "(HYDRA_FULL_ERROR=1 shows all of it.)"]) from error
    except SIGTERMException:  # several ranks: Lightning's own, which would end with 0, as if all were done
        signum: int = signal.SIGTERM
    except RunStopped as stop:
        _say_how_to_go_on(stop, config)
        signum = stop.signum
    raise SystemExit(_SIGNALLED + signum)


def _other_model(config: DictConfig, told: str) -> str:
    """What a user is told of weights that do not fit; torch lists them all."""
    first = next((line.strip() for line in told.splitlines()[1:] if line.strip()), "")
    return (
        f"ckpt_path: a run goes on with the model it began with, and this checkpoint's weights do not fit "
        f"{config.model._target_.rpartition('.')[2]} with these settings of model= and data=. Choose those of the run "
        f"to continue, or leave ckpt_path away to start. The first that differs: {first:.150} ..."
    )


def _how_the_run_began(config: DictConfig) -> str:
    """What to do where a checkpoint was refused."""
    kept = Path(config.folder) / _CONFIG
    began = f" (they are in {kept})" if kept.exists() else ""
    return (
        f"ckpt_path: go on with the data= and settings that the run began with{began}, or leave ckpt_path away to "
        "start anew."
    )


def in_our_words(error: BaseException) -> str | None:
    """What a user is told of an error that comes of a setting or of the world; None for what may be a fault of ours.

    Told are our own errors, a wrong setting that our own code refused, what an object's constructor refused, and what
    the system says of a file.
    """
    if isinstance(error, HydraException):
        cause = error.__cause__
        place = re.search(r"^full_key: (.+)$", str(error), re.MULTILINE)
        told = in_our_words(cause) or f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
        return f"{place[1] if place else 'config'}: {told}"
    own = isinstance(error, (LightningStreamError, MissingExtraError)) or (
        isinstance(error, OSError) and error.filename is not None
    )
    if own or (isinstance(error, (ValueError, TypeError)) and _was_refused_by_us(error)):
        return f"{type(error).__name__}: {error}"
    return None


def _was_refused_by_us(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = Path(trace.tb_frame.f_code.co_filename) if trace is not None else Path()
    return Path(lightning_stream.__file__).parent in file.parents


def _run(config: DictConfig) -> RunSummary | None:
    _quieten()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    folder, kind = Path(config.folder), trainer_of(config.trainer._target_)
    continued = None if config.ckpt_path is None else str(checkpoint_meant(config.ckpt_path, folder, kind))
    data: Any = instantiate(config.data, _convert_="all")
    model: Any = instantiate(config.model, _convert_="all")
    if continued is None:
        put_aside(checkpoints(folder, kind))
    earlier = keep_config(config, folder)
    try:
        if kind == LIGHTNING:
            summary = _run_lightning(config, model, data, continued)
        else:
            summary = _run_other(config, model, data, kind)
    except StateError:  # nothing was trained: the folder is still the earlier run's
        if continued is not None and earlier is not None:
            (folder / _CONFIG).write_text(earlier)
        raise
    finally:
        data.close()
    if summary is not None:
        print(summary.to_text())
    return summary


def _run_lightning(config: DictConfig, model: Any, data: Any, continued: str | None) -> RunSummary | None:
    folder = Path(config.folder)
    callbacks = [instantiate(one, _convert_="all") for one in (config.get("callbacks") or {}).values() if one]
    if config.trainer.get("enable_progress_bar") is False:
        callbacks = [one for one in callbacks if not isinstance(one, ProgressBar)]
    trainer: Any = instantiate(config.trainer, callbacks=callbacks, _convert_="all")
    trainer.fit(model, datamodule=data, ckpt_path=continued)
    trainer.save_checkpoint(last_checkpoint(folder))
    return summarise(trainer, data, model, folder) if trainer.is_global_zero else None


def _run_other(config: DictConfig, model: Any, data: Any, kind: str) -> RunSummary | None:
    """A trainer that keeps its own checkpoints and needs none of Lightning's callbacks."""
    run = instantiate(config.trainer, _convert_="all")
    measured = run.fit(model, data, config.ckpt_path)
    if not _speaks():
        return None
    if kind == TORCH:
        return summarise_loop(run, data, model, int(os.environ.get("WORLD_SIZE", "1")))
    _tell_measures(measured, checkpoints(Path(config.folder), kind))
    return None


def _tell_measures(measured: Mapping[str, float], folder: Path) -> None:
    print("Measured: " + ", ".join(f"{name} {value:.3f}" for name, value in measured.items()))
    print(f"Checkpoints: {folder}; go on with ckpt_path=last")


@rank_zero_only
def keep_config(config: DictConfig, folder: Path) -> str | None:
    """Write down what the run is made of; what it takes from the environment stays a reference.

    Returns:
        What was written there by an earlier run, if anything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _CONFIG
    earlier = path.read_text() if path.exists() else None
    OmegaConf.save(config, path)
    return earlier


@rank_zero_only
def put_aside(used: Path) -> None:
    """Keep an earlier run's checkpoints under another name, so that a new run of the same name starts anew."""
    if used.is_dir() and any(used.iterdir()):
        earlier = used.with_name(f"{used.name}.earlier")
        shutil.rmtree(earlier, ignore_errors=True)
        used.rename(earlier)
        print(f"Starting anew; the checkpoints of the earlier run are now in {earlier}.")


def _say_how_to_go_on(stop: RunStopped, config: DictConfig) -> None:
    if not _speaks():
        return
    saved = f"saved {stop.saved}" if stop.saved else "the last periodic checkpoint serves"
    print(
        f"Stopped by a signal; {saved}. Go on with the same command and ckpt_path=last (run {config.name!r}).",
        flush=True,
    )


def _speaks() -> bool:
    """Whether this process is the first."""
    return not int(getattr(rank_zero_only, "rank", 0))


def _quieten() -> None:
    """Leave the terminal to what a user can act on."""
    # Lightning's two packages share one logger: that of the one imported last.
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec.*", category=FutureWarning)  # Lightning's own
    # A resumed run writes into the folder of the stopped one: that is the point of it.
    warnings.filterwarnings("ignore", message=r"Checkpoint directory .* exists and is not empty")
