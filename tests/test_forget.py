"""Samples that a trained model must forget: the replay ends with the very weights of a run that has never had them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import (  # noqa: E402
    MDSWriter,
    Packing,
    PositionTracker,
    StreamingDataLoader,
    StreamingDataset,
    World,
)
from lightning_stream.dataset import source_of  # noqa: E402
from lightning_stream.errors import SettingsMismatch, SnapshotMismatch  # noqa: E402

NUM_SAMPLES, ROW, WORDS = 300, 8, 50


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(1)
    columns = {"id": "int", "tokens": "ndarray:int64"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=2000, lengths={"tokens": len}) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": number, "tokens": rng.integers(0, WORDS, rng.integers(ROW, 3 * ROW))})
    return folder


def beginning(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": sample["id"], "input_ids": sample["tokens"][:ROW]}


KINDS: dict[str, dict[str, Any]] = {
    "samples": {"transform": beginning},
    "rows": {"pack": Packing(row_length=2 * ROW, window=30), "num_canonical_nodes": 1},
}


class Training:
    """A small transformer with dropout, and a checkpoint of all of it every four steps; two epochs in all."""

    def __init__(self, shards: Path, **options: Any) -> None:
        torch.manual_seed(7)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.model = torch.nn.Sequential(torch.nn.Embedding(WORDS, 16), layer, torch.nn.Linear(16, WORDS))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        dataset = StreamingDataset(local=shards, shuffle=True, **options)
        self.loader = StreamingDataLoader(dataset, 10, world=World())
        self.tracker = PositionTracker(self.loader, seed_steps=7)  # dropout then depends on the position alone
        self.checkpoints: list[dict[str, Any]] = []
        self.seen: set[int] = set()

    def run(self, checkpoint: dict[str, Any] | None = None) -> Training:
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.tracker.load(checkpoint["data"])
        while self.tracker.position.epoch < 2:
            for number, batch in enumerate(self.tracker):
                self._step(batch["input_ids"].long())
                self.tracker.stepped()
                if number % 4 == 1:
                    parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                    self.checkpoints.append(copy.deepcopy({**parts, "data": self.tracker.state()}))
        return self

    def _step(self, tokens: Any) -> None:
        assert self.tracker.current is not None
        self.seen.update(self.tracker.current.sample_ids.tolist())
        scores = self.model(tokens)[:, :-1]
        loss = torch.nn.functional.cross_entropy(scores.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def bytes(self) -> list[bytes]:
        return [one.detach().numpy().tobytes() for one in self.model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_has_the_weights_of_a_run_that_never_had_the_samples(shards: Path, kind: str) -> None:
    options = KINDS[kind]
    whole = Training(shards, **options).run()
    order = StreamingDataset(local=shards, shuffle=True, **options)
    states = [one["data"] for one in whole.checkpoints]
    begin = StreamingDataLoader(order, 10, world=World()).first_position()
    traced = whole.loader.micro_batches_from(begin)[17].sample_ids
    ids = sorted({*traced[3:6].tolist()})  # 1 % of the samples
    replay = order.plan_replay(ids, states)
    assert replay.epoch == 0
    assert replay.position is not None
    assert (170 if kind == "samples" else 120) <= replay.position < 180
    assert replay.checkpoint is not None
    assert replay.position - 40 < states[replay.checkpoint]["position"] <= replay.position
    again = Training(shards, forget=ids, **options).run(whole.checkpoints[replay.checkpoint])
    never = Training(shards, forget=ids, **options).run()
    assert again.bytes() == never.bytes() != whole.bytes()
    assert whole.seen == set(range(NUM_SAMPLES))
    assert never.seen == whole.seen - set(ids)
    assert again.tracker.state() == never.tracker.state()
    with pytest.raises(SettingsMismatch, match="forgotten was None"):
        Training(shards, forget=ids, **options).run(whole.checkpoints[replay.checkpoint + 1])


def test_a_replay_of_packed_rows_has_the_rows_of_a_run_that_never_had_the_documents(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"tokens": "ndarray:int64"}, lengths={"tokens": len}) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"tokens": np.full(number % 23 + 1, number)})

    def loader_of(**options: Any) -> StreamingDataLoader:
        pack = Packing(column="tokens", row_length=32, window=40)
        return StreamingDataLoader(
            StreamingDataset(local=tmp_path, shuffle=True, pack=pack, **options), 4, world=World()
        )

    def train(loader: StreamingDataLoader) -> tuple[list[list[Any]], list[dict[str, Any]]]:
        trained = [(batch["input_ids"].tolist(), loader.state_dict()) for batch in loader]
        return [batch for batch, _ in trained], [state for _, state in trained]

    batches, states = train(loader_of())
    ids = batches[-2][0][:1]
    replay = StreamingDataset(local=tmp_path, shuffle=True, pack=Packing(column="tokens", row_length=32, window=40))
    found = replay.plan_replay(ids, states)
    assert found.checkpoint is not None
    assert 0 < found.checkpoint < len(batches) - 3
    again = loader_of(forget=ids)
    again.load_state_dict(states[found.checkpoint])
    never, _ = train(loader_of(forget=ids))
    assert train(again)[0] == never[found.checkpoint + 1 :]
    assert never[: found.checkpoint + 1] == batches[: found.checkpoint + 1]
    assert not any(ids[0] in row for batch in never for row in batch)


def test_forgotten_samples_of_a_subset_are_forgotten_there(shards: Path) -> None:
    part = StreamingDataset(local=shards, shuffle=True, forget=[7, 250]).subset([*range(20, 4, -1)])
    seen = [number for batch in StreamingDataLoader(part, 4, world=World()) for number in batch["id"].tolist()]
    assert set(seen) == set(range(5, 21)) - {7}
    other = StreamingDataset(local=shards, forget=[250]).subset(range(8))
    assert [batch["id"].tolist() for batch in StreamingDataLoader(other, 8, world=World())] == [[*range(8)]]


def test_states_of_several_runs_have_no_replay(shards: Path) -> None:
    dataset = StreamingDataset(local=shards, shuffle=True)
    states = [StreamingDataLoader(dataset, size, world=World()).state_dict() for size in (6, 10)]
    with pytest.raises(ValueError, match="found 2 different ones in 2 states"):
        dataset.plan_replay([1], states)
    with pytest.raises(SnapshotMismatch):
        dataset.subset(range(100)).plan_replay([1], states[:1])


def test_a_forgotten_sample_does_not_take_the_place_of_a_bad_one(shards: Path) -> None:
    forget = range(150, NUM_SAMPLES)
    dataset = StreamingDataset(local=shards, forget=forget, on_bad={"sample": "substitute"})
    loader = StreamingDataLoader(dataset, 10, world=World())
    next(iter(loader))
    info = loader.last_batch
    assert info is not None
    bad = source_of(dataset).bad_data
    bad.samples.update(dict.fromkeys(info.ids.tolist(), "damaged"))
    order = loader.micro_batches_from(loader.position).plan.order
    delivered = {*bad.replaced(dataset.reader, info, order).delivered.tolist()}
    assert not delivered & {*forget, *info.ids.tolist()}
