"""A plain loop over a loader, as a host of the resume contract."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lightning_stream import StreamingDataLoader, World  # noqa: E402
from support.chains import Chain, Link, User  # noqa: E402
from support.resume_contract import EPOCHS, Steps, Stopped  # noqa: E402


class Run:
    """One run of the loop; it keeps a checkpoint after each step, or after those of `save_at`."""

    def __init__(
        self, loader: StreamingDataLoader, folder: Path, checkpoint: Path | None, user: User, save_at: Any = None,
        until: int = 10**9,
    ) -> None:  # fmt: skip
        self.loader, self.user, self.save_at, self.until = loader, user, save_at, until
        self.saves = folder / "ckpt"
        self.saves.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01)
        self.losses: dict[int, float] = {}
        self.evaluations: list[tuple[int, tuple[int, ...]]] = []
        self.epochs: dict[int, int] = {}
        self.seen: Steps = defaultdict(list)
        self.step = 0
        if checkpoint is not None:
            saved = torch.load(checkpoint, weights_only=True)
            self.step = saved["step"]
            self.net.load_state_dict(saved["net"])
            loader.load_state_dict(saved["loader"])
        try:
            while self.step < until and loader.position.epoch < EPOCHS:
                self._train_epoch()
        except Stopped:
            pass  # by its user

    def _train_epoch(self) -> None:
        for batch in self.loader:
            self._reaches("batch_start")
            place = self.loader.last_batch
            self.seen[self.step] += batch["id"][~torch.from_numpy(place.filler)].tolist()
            self.epochs[self.step] = place.epoch
            self.net(batch["x"]).square().mean().backward()
            self._reaches("after_backward")
            if not place.completes_step:
                continue
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            if self.save_at is None or self.step in self.save_at:
                self._save()
            self._reaches("batch_end")
            if self.step == self.until:
                return

    def _save(self) -> None:
        content = {"step": self.step, "net": self.net.state_dict(), "loader": self.loader.state_dict()}
        torch.save(content, self.saves / f"{self.step}.pt")

    def _reaches(self, hook: str) -> None:
        self.user.reaches(hook, self.step, self.loader)

    @property
    def steps(self) -> Steps:
        return {step: sorted(ids) for step, ids in self.seen.items()}

    @property
    def clock(self) -> int:
        return self.step

    @property
    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()]).tolist()


class PlainHost:
    """See `support.resume_contract.Host`, and `support.chains` for the rest; nothing but training moves its loader."""

    name = "plain loop"
    simulates_ranks, passes_over_empty_batches = True, False
    sources = ("bare",)
    ways = ("max_steps", "exception", "killed")
    stops_in = ("batch_start", "after_backward", "batch_end")
    hooks = uses = limits = ()

    def run(self, shards: Path, folder: Path, checkpoint: Path | None = None, **options: Any) -> Run:
        chain = Chain(0, options.get("dataset", {}), options.get("data", {}))
        return Run(chain.loader(shards), folder, checkpoint, User(), options.get("save_at", ()))

    def checkpoints(self, folder: Path) -> list[tuple[int, Path]]:
        return sorted((int(path.stem), path) for path in (folder / "ckpt").iterdir())

    def is_due(self, evaluated_at: int, step: int, options: Mapping[str, Any]) -> bool:
        return False

    def draw_options(self, rng: Any) -> dict[str, Any]:
        """Options of the trainer."""
        return {}

    def run_link(
        self, shards: Path, folder: Path, chain: Chain, link: Link, world: World, checkpoint: Path | None, loaders: Any
    ) -> Run:
        """One run of a chain, on one of its ranks."""
        loader = chain.loader(shards, world=world, accumulate=link.accumulate, num_workers=link.workers)
        if link.way == "exception":
            return Run(loader, folder, checkpoint, User(stop=link.at))
        until = 10**9 if link.at is None else link.at.step + 2 * (link.way == "killed")
        return Run(loader, folder, checkpoint, User(), until=until)


HOST = PlainHost()
