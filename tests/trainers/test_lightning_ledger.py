"""The ledger in checkpoints is whole after a resume, and a run's own record tells what was trained on."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lightning.pytorch")

import torch
from support.lightning_runs import GLOBAL_BATCH, Recorder, Run, SavesAt, checkpoints, keep_all, saved_on_exception
from support.resume_contract import WARNINGS, At, Stopped

from lightning_stream import PositionTracker, SampleLog, StreamingDataLoader, StreamingDataset
from lightning_stream.errors import LedgerError, StateError
from lightning_stream.order import World, ledger
from lightning_stream.trainers.audit import verify_delivery

pytestmark = WARNINGS


def ledgers(folder: Path) -> dict[int, str]:
    states = {step: torch.load(path, weights_only=True)["callbacks"] for step, path in checkpoints(folder)}
    return {step: state["lightning_stream"]["position"]["ledger"] for step, state in states.items()}


def test_the_ledger_of_a_resumed_run_continues_from_the_one_it_was_given(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Run(shards, tmp_path, every_n_train_steps=1, max_epochs=2)
    proven, saved = ledgers(tmp_path), dict(checkpoints(tmp_path))
    assert len(set(proven.values())) == 21  # the two ends of epochs have none yet
    begun = []
    expected = ledger.expected
    monkeypatch.setattr(ledger, "expected", lambda order, a, b: begun.append((order.epoch, a)) or expected(order, a, b))
    for step in (4, 15):
        begun.clear()
        Run(shards, tmp_path / str(step), saved[step], every_n_train_steps=1, max_epochs=2)
        assert ledgers(tmp_path / str(step)) == {s: one for s, one in proven.items() if s > step}
        assert begun.count((step // 11, 0)) == 1  # to check the state; what was proven before is not summed again
    assert len(whole.steps) == 22


def test_a_checkpoint_whose_ledger_proves_another_past_is_refused(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, save_at=(5,), max_epochs=1)
    path = checkpoints(tmp_path)[0][1]
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["callbacks"]["lightning_stream"]["position"]
    state["ledger"] = "0" * 16
    del state["checksum"]  # as an older version wrote it
    torch.save(checkpoint, path)
    with pytest.raises(StateError, match="ledger must be the sum"):
        Run(shards, tmp_path / "again", path, max_epochs=1)


def dataset(shards: Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(remote=shards, shuffle=True, **options)


@pytest.mark.parametrize("tail", ["pad", "exact"])
def test_a_record_over_stops_and_worlds_says_that_all_steps_were_delivered(
    shards: Path, tmp_path: Path, tail: str
) -> None:
    ckpt: Path | None = None
    for link, (ranks, accumulate, stop) in enumerate([(1, 1, 5), (2, 2, 14), (4, 1, None)]):
        for rank in range(ranks):
            own = tmp_path / f"{link}.{rank}"
            world = World(rank=rank, num_ranks=ranks, ranks_per_node=ranks)
            Run(
                shards, own, ckpt, accumulate_grad_batches=accumulate,
                callbacks=[saved_on_exception(own)], raises=Stopped, world=world,
                data={"record_delivery": tmp_path / "record", "tail": tail},
                module={"at": None if stop is None else At("training_step", stop)},
            )  # fmt: skip
        ckpt = own / "on_exception.ckpt"
    verdict = verify_delivery(tmp_path / "record", dataset(shards))
    assert verdict.first_difference is None
    assert verdict.num_steps == 33
    assert verdict.sentence == "all 33 recorded steps saw exactly the planned samples"

    victim = tmp_path / "record" / f"epoch1-from48-batch16-{tail}-rank2of4by1.ledger"
    sums = np.frombuffer(victim.read_bytes(), "<u8").copy()
    sums[3] += 1
    victim.write_bytes(sums.tobytes())
    found = verify_delivery(tmp_path / "record", dataset(shards))
    assert found.first_difference == (1, 48 + 3 * GLOBAL_BATCH)
    assert "epoch 1, position 96 is the first step that differs" in found.sentence
    victim.unlink()
    with pytest.raises(LedgerError, match=r"of 4 ranks at epoch 1, position 48 those of \[2\] are missing"):
        verify_delivery(tmp_path / "record", dataset(shards))
    with pytest.raises(StateError, match=r"verify_delivery takes .* record.*Pass the former rules") as error:
        verify_delivery(tmp_path / "record", dataset(shards, filter={"exclude_ids": [1]}))
    assert "on_mismatch" not in str(error.value)  # which it does not take


def test_a_record_shows_a_gap_and_an_epoch_cut_short(shards: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    with pytest.raises(LedgerError, match=r"leaves run\.json and"):
        verify_delivery(tmp_path, dataset(shards))
    run = Run(shards, tmp_path, limit_train_batches=4, data={"record_delivery": record})
    assert "stream/num_substituted" not in run.trainer.callback_metrics  # nothing is, unless the dataset is set to
    verdict = verify_delivery(record, dataset(shards))
    assert verdict.sentence == (
        "all 12 recorded steps saw exactly the planned samples; epoch 0 was left at position 64; epoch 1 was left at "
        "position 64"
    )
    first = record / "epoch0-from0-batch16-pad-rank0of1by1.ledger"
    first.rename(record / "epoch0-from16-batch16-pad-rank0of1by1.ledger")
    assert verify_delivery(record, dataset(shards)).first_difference == (0, 0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_neither_record_nor_sample_log_has_what_the_model_left_out_of_an_epoch(
    shards: Path, tmp_path: Path, accumulate: int
) -> None:
    class LeavesOut(Recorder):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.trainer.current_epoch == 0 and batch_idx == 2 * accumulate + 1 else None

    whole = Run(shards, tmp_path / "whole", max_epochs=2, accumulate_grad_batches=accumulate).steps
    Run(
        shards, tmp_path, recorder=LeavesOut, max_epochs=2, accumulate_grad_batches=accumulate,
        callbacks=[SampleLog(tmp_path)], data={"record_delivery": tmp_path / "record"},
    )  # fmt: skip
    num_steps = 3 if accumulate == 1 else 2
    logged = [json.loads(line)["ids"] for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    wanted = [whole[k] for k in (*range(num_steps), *range(11, 22))]
    assert [sorted(ids) for ids in logged] == [sorted(ids) for ids in wanted]
    verdict = verify_delivery(tmp_path / "record", dataset(shards))
    assert verdict.num_steps == len(wanted)
    assert verdict.sentence.endswith(f"epoch 0 was left at position {GLOBAL_BATCH * num_steps}")


def test_a_record_has_all_batches_of_a_step_by_hand_over_more_than_an_epoch(shards: Path, tmp_path: Path) -> None:
    class StepsSeldom(Recorder):
        def __init__(self) -> None:
            super().__init__(manual=True)
            self.num_batches = 0

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self.manual_backward(self.net(batch["x"]).square().mean())
            self.num_batches += 1
            if self.num_batches % 15 == 0:
                self.optimizers().step()

    Run(shards, tmp_path, recorder=StepsSeldom, data={"record_delivery": tmp_path / "record"})
    verdict = verify_delivery(tmp_path / "record", dataset(shards))
    assert verdict.first_difference is None
    assert verdict.num_steps == 30


class StepsByHand(Recorder):
    """Steps after every fourth batch, and at an epoch's last one if it is to."""

    steps_at_end = False

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.manual_backward(self.net(batch["x"]).square().mean())
        if batch_idx % 4 == 3 or (self.steps_at_end and self.trainer.is_last_batch):
            self.optimizers().step()


class StepsAtEnd(StepsByHand):
    steps_at_end = True


class LeavesLast(StepsAtEnd):
    """Leaves out the batch after a step by hand, and what is left of the epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 8 else None


@pytest.mark.parametrize("recorder", [StepsByHand, StepsAtEnd, LeavesLast])
def test_a_checkpoint_behind_an_epoch_of_whose_end_no_step_has_gradients_warns_that_a_resume_loses_them(
    shards: Path, tmp_path: Path, recorder: Any, recwarn: pytest.WarningsRecorder
) -> None:
    ends = keep_all(tmp_path, every_n_epochs=1, save_on_train_epoch_end=True)
    Run(shards, tmp_path, recorder=recorder, callbacks=[ends, SavesAt(tmp_path, (3, 4))], max_epochs=2, val=False)
    warned = [str(one.message) for one in recwarn if "a checkpoint has no gradients" in str(one.message)]
    assert ["of epoch 0 from position 128 on" in text for text in warned[:1]] == [True] * (recorder is StepsByHand)
    assert all("position 128 on" in text for text in warned)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_from_the_start_replaces_the_record_of_another_run(shards: Path, tmp_path: Path, ranks: int) -> None:
    record = tmp_path / "record"
    for rank in range(ranks):
        world = World(rank=rank, num_ranks=ranks, ranks_per_node=ranks)
        options = {"data": {"record_delivery": record}, "dataset": {"shuffle_seed": 1}}
        Run(shards, tmp_path / f"first{rank}", world=world, **options)
    Run(shards, tmp_path / "second", max_steps=7, data={"record_delivery": record}, dataset={"shuffle_seed": 2})
    verdict = verify_delivery(record, dataset(shards))
    assert verdict.first_difference is None
    assert verdict.num_steps == 7


def test_a_resumed_run_in_the_folder_of_another_run_has_a_record_of_its_own(shards: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    Run(shards, tmp_path, save_at=(4,), max_steps=5, data={"record_delivery": record})
    Run(shards, tmp_path / "other", max_steps=2, data={"record_delivery": record}, dataset={"shuffle_seed": 2})
    with pytest.warns(UserWarning, match="Give each run a folder of its own"):
        Run(shards, tmp_path / "resumed", checkpoints(tmp_path)[0][1], max_steps=9, data={"record_delivery": record})
    verdict = verify_delivery(record, dataset(shards))
    assert verdict.first_difference is None
    assert verdict.num_steps == 2 + 5
    (own,) = record.glob("run-*")
    sentence = "all 5 recorded steps saw exactly the planned samples; the record begins at epoch 0, position 64"
    assert verify_delivery(own, dataset(shards)).sentence == sentence
    assert verdict.sentence.endswith(f"{own.name}: {sentence}")


def recorded(loader: StreamingDataLoader, folder: Path, steps: int, state: Any = None) -> PositionTracker:
    """A plain loop that records so many steps."""
    tracker = PositionTracker(loader, record_delivery=folder)
    tracker.output = lambda _: None
    if state is not None:
        tracker.load(state)
    while steps:
        for _ in tracker:
            tracker.stepped()
            steps -= 1
            if not steps:
                break
    return tracker


def loaders(shards: Path, ranks: int = 1) -> list[StreamingDataLoader]:
    worlds = [World(rank=rank, num_ranks=ranks, ranks_per_node=ranks) for rank in range(ranks)]
    return [StreamingDataLoader(dataset(shards), global_batch_size=GLOBAL_BATCH, world=world) for world in worlds]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_from_a_checkpoint_replaces_what_was_recorded_after_it(shards: Path, tmp_path: Path, ranks: int) -> None:
    states = [recorded(loader, tmp_path, 4).state() for loader in loaders(shards, 2)]
    for loader in loaders(shards, 2):
        recorded(loader, tmp_path, 16, states[0])  # to the middle of the epoch after
    for _ in range(2):  # twice from one checkpoint
        for loader in loaders(shards, ranks):
            recorded(loader, tmp_path, 3, states[0])
    verdict = verify_delivery(tmp_path, dataset(shards))
    assert verdict.sentence == "all 7 recorded steps saw exactly the planned samples"


def test_a_step_that_a_run_from_a_checkpoint_did_not_record_is_not_hidden_by_the_run_before_it(
    shards: Path, tmp_path: Path
) -> None:
    state = recorded(*loaders(shards), tmp_path, 4).state()
    recorded(*loaders(shards), tmp_path, 6, state)
    recorded(*loaders(shards), tmp_path, 3, state)
    (tmp_path / "epoch0-from64-batch16-pad-rank0of1by1.ledger").unlink()
    later = recorded(*loaders(shards), tmp_path / "other", 7).state()
    recorded(*loaders(shards), tmp_path, 2, later)
    assert verify_delivery(tmp_path, dataset(shards)).first_difference == (0, 64)


def test_two_runs_of_one_order_that_record_in_one_folder_at_a_time_are_told(shards: Path, tmp_path: Path) -> None:
    first = recorded(*loaders(shards), tmp_path, 3)
    second = recorded(*loaders(shards), tmp_path, 5)
    with pytest.warns(UserWarning, match="has replaced"):
        first.detach()
    second.detach()
    assert verify_delivery(tmp_path, dataset(shards)).num_steps == 5


def without_a_shard(shards: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of the data that lacks a shard, and the arguments of a dataset over it."""
    damaged = folder / "damaged"
    shutil.copytree(shards, damaged)
    index = json.loads((damaged / "index.json").read_text())
    (damaged / index["shards"][3]["raw_data"]["basename"]).unlink()
    on_bad = {"shard": "substitute", "quarantine": folder / "bad"}
    return damaged, {"remote": damaged, "local": folder / "cache", "on_bad": on_bad}


def test_a_run_that_ends_while_it_records_a_substitution_is_not_called_different(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, options = without_a_shard(shards, tmp_path)
    opened = Path.open

    def killed(self: Path, *arguments: Any, **named: Any) -> Any:
        if self.suffix == ".substitutions":
            raise Stopped
        return opened(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", killed)
    Run(
        damaged, tmp_path, dataset=options, data={"record_delivery": tmp_path / "record"}, limit_val_batches=0,
        raises=Stopped,
    )  # fmt: skip
    monkeypatch.undo()
    assert verify_delivery(tmp_path / "record", dataset(damaged)).first_difference is None


def test_a_line_that_a_killed_run_wrote_in_part_is_of_a_step_without_a_sum(shards: Path, tmp_path: Path) -> None:
    damaged, options = without_a_shard(shards, tmp_path)
    record = tmp_path / "record"
    Run(damaged, tmp_path, dataset=options, data={"record_delivery": record}, limit_val_batches=0, max_epochs=1)
    num_steps = verify_delivery(record, dataset(damaged)).num_steps
    (listed,) = record.glob("*.substitutions")
    lines = listed.read_bytes()
    for rest in (b"[", b"[1, 2, 3]"):
        listed.write_bytes(lines + rest)
        verdict = verify_delivery(record, dataset(damaged))
        assert (verdict.first_difference, verdict.num_steps) == (None, num_steps)


def test_a_file_that_one_rank_alone_had_begun_when_the_run_was_killed_is_void_after_a_resume_in_another_world(
    shards: Path, tmp_path: Path
) -> None:
    state, _ = [recorded(loader, tmp_path, 9).state() for loader in loaders(shards, 2)]
    for loader, steps in zip(loaders(shards, 2), (3, 2), strict=True):
        recorded(loader, tmp_path, steps, state)
    with pytest.raises(LedgerError, match=r"of 2 ranks at epoch 1, position 0 those of \[1\] are missing"):
        verify_delivery(tmp_path, dataset(shards))
    recorded(*loaders(shards), tmp_path, 4, state)
    sentence = "all 13 recorded steps saw exactly the planned samples"
    assert verify_delivery(tmp_path, dataset(shards)).sentence == sentence


class Interrupts:
    """Lets Ctrl-C come at one of the calls of a commit, by a profiler."""

    def __init__(self, at: int) -> None:
        self.rest = at

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        is_ours = frame.f_code.co_filename.endswith(("tracker.py", "audit.py", "sample_log.py"))
        self.rest -= is_ours and event in ("call", "c_call", "c_return")
        if not self.rest:
            sys.setprofile(None)
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a file that is not closed at once
@pytest.mark.parametrize("step", [1, 3])
def test_ctrl_c_at_any_call_of_a_commit_leaves_no_gap_and_writes_nothing_twice(
    shards: Path, tmp_path: Path, step: int
) -> None:
    for at in count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        interrupts = Interrupts(at)
        tracker = PositionTracker(*loaders(shards), record_delivery=folder)
        log = SampleLog(folder)
        tracker.records.append(log)
        tracker.output = lambda _: None
        tracker._loop.step = lambda tracker=tracker: tracker.num_steps + 1  # type: ignore[method-assign]
        before = sys.getprofile()
        try:
            for taken, _ in enumerate(tracker, 1):
                sys.setprofile(interrupts if taken == step else before)
                tracker.stepped()
                sys.setprofile(before)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(before)
        state = tracker.state()
        if interrupts.rest > 0:
            break
        assert state["position"] in ((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH)
        recorded(*loaders(shards), folder, 2, state)
        verdict = verify_delivery(folder, dataset(shards))
        assert (verdict.first_difference, verdict.num_steps) == (None, state["position"] // GLOBAL_BATCH + 2), at
        assert "begins at" not in verdict.sentence
        lines = (folder / "rank-0.jsonl").read_text().splitlines() if state["position"] else []
        assert [json.loads(line)["step"] for line in lines] == [*range(1, state["position"] // GLOBAL_BATCH + 1)]
    assert at > 20


def test_a_planned_substitution_is_no_difference(shards: Path, tmp_path: Path) -> None:
    damaged, options = without_a_shard(shards, tmp_path)
    index = json.loads((damaged / "index.json").read_text())
    data = {"record_delivery": tmp_path / "record"}
    log = SampleLog(tmp_path / "samples")
    run = Run(damaged, tmp_path, dataset=options, data=data, callbacks=[log], limit_val_batches=0)
    assert run.trainer.callback_metrics["stream/num_substituted"] == index["shards"][3]["samples"]
    logged = [json.loads(line) for line in (tmp_path / "samples" / "rank-0.jsonl").read_text().splitlines()]
    assert {line["step"] - 1: sorted(line["ids"]) for line in logged} == {
        step: sorted(ids) for step, ids in run.steps.items()
    }
    verdict = verify_delivery(tmp_path / "record", dataset(damaged))
    assert verdict.first_difference is None, verdict.sentence
    assert verdict.num_steps == 33
    listed = next((tmp_path / "record").glob("*.substitutions"))
    listed.write_bytes(listed.read_bytes()[:-3])
    with pytest.raises(LedgerError, match=f"{listed} cannot be read"):
        verify_delivery(tmp_path / "record", dataset(damaged))


def test_a_file_that_no_run_wrote_is_not_replaced_by_a_record(shards: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"lr": 1}')
    with pytest.raises(LedgerError, match=r"run\.json cannot be read.*record elsewhere"):
        recorded(*loaders(shards), tmp_path, 1)
    assert path.read_text() == '{"lr": 1}'


@pytest.mark.parametrize("content", [b"", b"\xe8", b"null", b"{}", b'{"version": 1'])
def test_a_damaged_record_is_named_by_who_verifies_or_continues_it(
    shards: Path, tmp_path: Path, content: bytes
) -> None:
    state = recorded(*loaders(shards), tmp_path, 3).state()
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(LedgerError, match=r"run\.json cannot be read"):
        verify_delivery(tmp_path, dataset(shards))
    with pytest.raises(LedgerError, match=r"run\.json cannot be read"):
        recorded(*loaders(shards), tmp_path, 2, state)
