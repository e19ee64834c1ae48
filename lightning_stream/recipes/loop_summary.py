"""The summary of a plain loop's run: the same figures, places and picture as under Lightning."""

from __future__ import annotations

from lightning_stream.recipes.places import TORCH, checkpoints, last_checkpoint
from lightning_stream.recipes.summary import RunSummary
from lightning_stream.recipes.task import TaskData, TaskModel
from lightning_stream.recipes.torch_run import TorchRun


def summarise_loop(run: TorchRun, data: TaskData, model: TaskModel, num_ranks: int) -> RunSummary:
    """Gather the figures of a run that is over, let the model draw, and keep both in the run's folder."""
    figures, folder = run.figures, run.folder
    shown = model.show(data, folder)
    num_samples = figures.num_samples * num_ranks
    summary = RunSummary(
        places={
            "shards": data.place,
            "checkpoint": str(last_checkpoint(folder, TORCH)),
            "log": str(checkpoints(folder, TORCH) / "log.jsonl"),
            **shown.files,
        },
        notes=(*data.notes(model.history), *shown.notes),
        num_samples=num_samples,
        num_steps=figures.num_steps,
        samples_per_s=num_samples / figures.training_s if figures.training_s else 0.0,
        training_s=figures.training_s,
        validating_s=figures.validating_s,
        waiting_s=figures.waited_s,
        longest_wait_s=figures.longest_s,
        history=model.history,
        shown=model.shown,
    )
    (folder / "summary.json").write_text(summary.to_json())
    return summary
