"""The resume contract: under every host, a run that is continued trains on exactly what was left, or is refused.

A run is saved at each stop and continues to its end; it is then continued from each stop in each world. All runs of a
host together must feed every optimizer step with the samples that the order says, whatever the world; or the host is
refused before its first step, with a sentence that names the cure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the hosts need torch: uv sync --extra torch")

from hosts.run import EPOCHS, GLOBAL_BATCH, STEPS_PER_EPOCH, STOPS
from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset

# The first case of a module waits for the runs of all.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
TESTS = Path(__file__).resolve().parents[1]
Steps = dict[int, list[int]]
WORLDS = {"same": (1, 1), "grown": (1, 2), "shrunk": (2, 1), "same two": (2, 2)}


@dataclass(frozen=True)
class Host:
    """A host, and what it promises.

    Args:
        adapter: The function that runs it, as ``module:function``.
        package: What must be installed.
        install: The command that installs it.
        refused: What the refusal says, by the number of ranks; for other numbers it is exact.
        marks_padding: Whether its loader marks padding, so that its epochs may have a rest.
    """

    adapter: str
    package: str = "torch"
    install: str = "uv sync --extra torch"
    refused: tuple[tuple[int, str], ...] = ()
    marks_padding: bool = True


_LIGHTNING = ("lightning", "uv sync --extra lightning")
_COMPOSER = ("composer", "uv sync --no-dev --extra composer")
_ACCELERATE = ("accelerate", "pip install accelerate")
_TRANSFORMERS = ("transformers", "pip install transformers accelerate")
_DEALT_TWICE = ((2, "StreamingDataLoader"),)
HOSTS = {
    "plain loop": Host("with_torch:plain_loop"),
    "torch.distributed.checkpoint": Host("with_dcp:dcp"),
    "torchdata": Host("with_torch:torchdata", "torchdata", "pip install torchdata", marks_padding=False),
    "Lightning, data module": Host("with_lightning:data_module", *_LIGHTNING),
    "Lightning, bare loader": Host("with_lightning:bare_loader", *_LIGHTNING),
    "Lightning, callback": Host("with_lightning:callback", *_LIGHTNING),
    "Fabric": Host("with_lightning:fabric", *_LIGHTNING),
    "Composer, data_spec": Host("with_composer:spec", *_COMPOSER),
    "Composer, bare loader": Host("with_composer:bare_loader", *_COMPOSER),
    "Composer, torch DataLoader": Host("with_composer:torch_loader", *_COMPOSER, marks_padding=False),
    "Accelerate, loader": Host("with_accelerate:bare_loader", *_ACCELERATE),
    "Accelerate, torch DataLoader": Host("with_accelerate:torch_loader", *_ACCELERATE, _DEALT_TWICE, False),
    "Transformers, loader": Host("with_transformers:bare_loader", *_TRANSFORMERS),
    "Transformers, dataset": Host("with_transformers:dataset", *_TRANSFORMERS, _DEALT_TWICE, False),
}
# In a plain run each stop and each change of the world comes once; the full product is slow.
QUICK = [("middle", "grown"), ("epoch end", "same"), ("last batch", "shrunk"), ("later epoch", "shrunk")]
CASES = [
    pytest.param(stop, change, marks=[] if (stop, change) in QUICK else [pytest.mark.nightly], id=f"{stop}, {change}")
    for stop in STOPS
    for change in WORLDS
]


class Runs:
    """The runs of all selected cases, which are launched when the first of a module is asked for."""

    def __init__(self, selected: set[tuple[str, str, str]], folder: Path) -> None:
        self.folder = folder
        self.plans: dict[str, list[dict[str, Any]]] = {}
        # The runs that save come first: they are those without a stop.
        runs = {(host, WORLDS[change][0], None, WORLDS[change][0]) for host, _, change in selected}
        continued = {(host, WORLDS[change][0], stop, WORLDS[change][1]) for host, stop, change in selected}
        for host, saved, stop, world in [*sorted(runs), *sorted(continued)]:
            module, function = HOSTS[host].adapter.split(":")
            resumes = None if stop is None else str(self._of(host, saved, None, saved))
            options = {"host": function, "shards": str(self.shards(host)), "world": world, "stop": stop}
            found = {**options, "folder": str(self._of(host, saved, stop, world)), "resumes": resumes}
            self.plans.setdefault(module, []).append(found)

    def shards(self, host: str) -> Path:
        """Seven batches an epoch, the last one whole or not."""
        num_samples = 53 if HOSTS[host].marks_padding else 56
        path = self.folder / f"shards-{num_samples}"
        if not path.exists():
            with MDSWriter(out=str(path), columns={"id": "int"}, size_limit=100) as writer:
                for number in range(num_samples):
                    writer.write({"id": number})
        return path

    def launch(self, host: str) -> None:
        """Run what is planned for the host's module, in one process."""
        module = HOSTS[host].adapter.split(":")[0]
        if plan := self.plans.pop(module, None):
            (self.folder / f"{module}.json").write_text(json.dumps(plan))
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
            command = [sys.executable, "-W", "ignore", "-m", "hosts.launch", module, f"{module}.json"]
            subprocess.run(command, cwd=self.folder, env=env, check=True)

    def result(self, host: str, saved: int, stop: str | None, world: int) -> tuple[bool, Steps, str]:
        """Whether a run succeeded, what fed its steps, and what its ranks printed."""
        folder = self._of(host, saved, stop, world)
        steps: Steps = {}
        for file in folder.glob("ids.*"):
            for line in map(json.loads, file.read_text().splitlines()):
                steps.setdefault(line["step"], []).extend(line["ids"])
        output = "\n".join(file.read_text() for file in sorted(folder.glob("out.*")))
        codes = json.loads((folder / "codes.json").read_text())
        return not any(codes), {step: sorted(ids) for step, ids in steps.items()}, output

    def _of(self, host: str, saved: int, stop: str | None, world: int) -> Path:
        return self.folder / host / f"{saved}-{stop}-{world}"


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of every selected case whose host is installed."""
    here = request.node.items if hasattr(request.node, "items") else request.session.items
    params = [item.callspec.params for item in here if hasattr(item, "callspec") and item.path == Path(__file__)]
    selected = {(one["host"], one["stop"], one["change"]) for one in params if "change" in one}
    return Runs(
        {case for case in selected if find_spec(HOSTS[case[0]].package) is not None}, tmp_path_factory.mktemp("hosts")
    )


def planned(shards: Path) -> Steps:
    """What feeds every step, by the order alone."""
    loader = StreamingDataLoader(
        StreamingDataset(remote=str(shards), shuffle=True, shuffle_seed=3), global_batch_size=GLOBAL_BATCH
    )
    steps = [
        sorted(loader.last_batch.ids[~loader.last_batch.filler].tolist())
        for _ in range(EPOCHS)
        for _ in loader
        if loader.last_batch is not None
    ]
    assert len(steps) == EPOCHS * STEPS_PER_EPOCH
    return dict(enumerate(steps))


@pytest.mark.parametrize(("stop", "change"), CASES)
@pytest.mark.parametrize("host", HOSTS)
def test_a_run_continues_with_exactly_what_is_left_or_is_refused_with_the_cure(
    runs: Runs, host: str, stop: str, change: str
) -> None:
    if find_spec(HOSTS[host].package) is None:
        pytest.skip(f"{host} needs {HOSTS[host].package}: {HOSTS[host].install}")
    runs.launch(host)
    plan, refused, (saved, now) = planned(runs.shards(host)), dict(HOSTS[host].refused), WORLDS[change]
    for at, world in ((None, saved), (stop, now)):
        succeeded, steps, output = runs.result(host, saved, at, world)
        if world in refused:
            assert not succeeded
            assert steps == {}, "refused only after training began"
            assert re.search(refused[world], output), output[-3000:]
            return  # there is no checkpoint to continue from
        assert succeeded, output[-3000:]
        assert steps == {step: ids for step, ids in plan.items() if at is None or step >= STOPS[at]}
