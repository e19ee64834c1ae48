"""After a kill of any process at any time there is no dataset or a whole one, and a rerun writes the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import convert_inputs

from lightning_stream.convert import Inputs, convert, read_manifest
from lightning_stream.errors import LightningStreamError
from lightning_stream.writer.place import Transaction

SIZE = {"size_limit": 20_000}


def inputs_of(tmp_path: Path, read: Any, count: int = 4) -> Inputs:
    return Inputs([(str(tmp_path), k) for k in range(count)], read)


def shards_of(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != "manifest.json"}


def test_a_killed_worker_is_replaced_and_changes_nothing(tmp_path: Path, files_of: Any) -> None:
    convert(inputs_of(tmp_path, convert_inputs.samples), tmp_path / "whole", **SIZE, num_workers=1)
    convert(inputs_of(tmp_path, convert_inputs.dying_once), tmp_path / "out", **SIZE, num_workers=2)
    assert (tmp_path / "died").exists()
    assert shards_of(files_of(tmp_path / "out")) == shards_of(files_of(tmp_path / "whole"))


def test_a_part_that_kills_its_workers_ends_the_conversion_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(LightningStreamError, match=r"died 3 times while they worked on .*partition 1 .*num_workers=1"):
        convert(inputs_of(tmp_path, convert_inputs.dying), tmp_path / "out", **SIZE, num_workers=2)
    assert not (tmp_path / "out" / "index.json").exists()


def test_what_a_worker_raises_is_raised_here_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="input 1 is gone") as caught:
        convert(inputs_of(tmp_path, convert_inputs.raising), tmp_path / "out", **SIZE, num_workers=2)
    assert "convert_inputs.py" in str(caught.value.__cause__)
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_rerun_reads_only_what_is_missing(tmp_path: Path, files_of: Any) -> None:
    settings: dict[str, Any] = {**SIZE, "num_workers": 1}
    with pytest.raises(LookupError):
        convert(inputs_of(tmp_path, convert_inputs.raising), tmp_path / "out", **settings)
    (tmp_path / "read").unlink()
    with pytest.raises(LookupError):
        convert(inputs_of(tmp_path, convert_inputs.raising), tmp_path / "out", **settings)
    assert Counter((tmp_path / "read").read_text().split()) == {"0": 1, "1": 1}  # 0 to know the columns


def test_one_that_fails_before_it_has_written_anything_is_in_no_way_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"k": 1}\n{"k": 2}\n')

    def fails(row: dict[str, Any]) -> dict[str, Any]:
        return {"k": row["k"] // (2 - row["k"])}

    settings: dict[str, Any] = {"num_workers": 1, "columns": {"k": "int64"}}
    with pytest.raises(ZeroDivisionError):
        convert(tmp_path / "rows.jsonl", tmp_path / "out", **settings, transform=fails)
    assert convert(tmp_path / "rows.jsonl", tmp_path / "out", **settings).total == 2
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(ZeroDivisionError):
        convert(tmp_path / "rows.jsonl", tmp_path / "out", **settings, transform=fails, overwrite=True)
    assert {path: path.read_bytes() for path in before} == before
    assert not convert(tmp_path / "rows.jsonl", tmp_path / "out", **settings).is_new
    assert not caplog.records  # the error says all


def test_shards_left_without_any_receipt_are_known_as_ours(
    tmp_path: Path, files_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    inputs = inputs_of(tmp_path, convert_inputs.samples)
    with monkeypatch.context() as patch:
        patch.setattr("lightning_stream.convert.partition.receipt_name", fail)
        with pytest.raises(KeyboardInterrupt):
            convert(inputs, tmp_path / "out", **SIZE, num_workers=1)
    assert list((tmp_path / "out").glob("part-*/shard*"))
    convert(inputs, tmp_path / "out", **SIZE, num_workers=1)
    convert(inputs, tmp_path / "whole", **SIZE, num_workers=1)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_manifest_without_its_index_is_known_as_ours(
    tmp_path: Path, files_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = Transaction.swap

    def swap_unless_index(place: Transaction, name: str, data: bytes) -> None:
        if name == "index.json":
            raise KeyboardInterrupt
        swap(place, name, data)

    inputs = inputs_of(tmp_path, convert_inputs.samples)
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "swap", swap_unless_index)
        with pytest.raises(KeyboardInterrupt):
            convert(inputs, tmp_path / "out", **SIZE, num_workers=1)
    assert (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(FileExistsError, match="another conversion's dataset: size_limit was 20000, now 9999"):
        convert(inputs, tmp_path / "out", size_limit=9999, num_workers=1)
    convert(inputs, tmp_path / "out", **SIZE, num_workers=1)
    convert(inputs, tmp_path / "whole", **SIZE, num_workers=1)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("former", "step", "call", "now"),
    [
        ({"val_fraction": 0.3}, "sweep", 1, {"val_fraction": 0.3}),
        ({"val_fraction": 0.3}, "swap", 2, {}),
        ({}, "swap", 2, {"val_fraction": 0.3}),
        ({"size_limit": 300}, "sweep", 1, {"size_limit": 300}),
    ],
)
def test_what_a_killed_conversion_left_is_used_or_removed_by_the_next_with_any_splits(
    tmp_path: Path,
    files_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    former: dict[str, Any],
    step: str,
    call: int,
    now: dict[str, Any],
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"k": {k}}}\n' for k in range(40)))

    def converted(out: str, **settings: Any) -> Any:
        return convert(tmp_path / "rows.jsonl", tmp_path / out, num_workers=1, partition_bytes=99, **settings)

    real, calls = getattr(Transaction, step), []

    def dying(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == call:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, step, dying)
        with pytest.raises(KeyboardInterrupt):
            converted("out", **former)
    if now != former:
        with pytest.raises(FileExistsError):
            converted("out", **now)
    converted("out", **now, overwrite=now != former)
    converted("whole", **now)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert read_manifest(tmp_path / "out").total == 40
    converted("out", **now, force=True)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("order", [pytest.param("plain", marks=pytest.mark.nightly), "shuffle"])
@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)]
)
def test_a_conversion_killed_at_any_instant_is_finished_by_the_same_call(
    tmp_path: Path, files_of: Any, order: str, seed: int
) -> None:
    draw = random.Random(seed)
    whole, out = tmp_path / "whole", tmp_path / "out"
    convert_inputs.run(str(tmp_path), str(whole), 12, num_workers=1, shuffle=order == "shuffle")
    command = [sys.executable, "-m", "support.convert_inputs", str(tmp_path), str(out), "12", order]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(1 + seed):
        process = subprocess.Popen(command, env=env)
        time.sleep(draw.uniform(0.5, 2.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (
            not (out / "index.json").exists() or shards_of(files_of(out)).items() >= shards_of(files_of(whole)).items()
        )
    subprocess.run(command, env=env, check=True)
    assert files_of(out) == files_of(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out", "read"}
    assert not [path.name for path in out.rglob("*") if path.name.startswith((".", "_"))]
