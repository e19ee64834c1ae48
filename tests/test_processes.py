"""What a container leaves to a process: the least of all control groups that it is in, of either version."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from lightning_stream import processes

CASES: dict[str, tuple[str, dict[str, str], tuple[int, float]]] = {
    "no control groups": ("", {}, (8, math.inf)),
    "version 2, without limits": ("0::/job", {"job/memory.max": "max", "job/cpu.max": "max 100000"}, (8, math.inf)),
    "version 2, a container": ("0::/", {"memory.max": "5000", "cpu.max": "250000 100000"}, (2, 5000)),
    "version 2, a group that holds this one has less": (
        "0::/slurm/job/step",
        {"slurm/memory.max": "9000", "slurm/job/memory.max": "4000", "slurm/job/step/memory.max": "max"}
        | {"slurm/job/cpu.max": "300000 100000", "slurm/job/step/cpu.max": "400000 100000"},
        (3, 4000),
    ),
    "version 2, a group that others are in": ("0::/job", {"other/memory.max": "7"}, (8, math.inf)),
    "version 1": (
        "5:cpuset:/\n4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n1:name=systemd:/docker/a\n0::/system",
        {"memory/docker/a/memory.limit_in_bytes": "6000", "memory/memory.limit_in_bytes": "9223372036854771712"}
        | {"cpu,cpuacct/docker/a/cpu.cfs_quota_us": "400000", "cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000"}
        | {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
        (4, 6000),
    ),
    "version 1, in a container that sees its own group as the root": (
        "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a",
        {"memory/memory.limit_in_bytes": "6000", "cpu,cpuacct/cpu.cfs_quota_us": "50000"}
        | {"cpu,cpuacct/cpu.cfs_period_us": "100000"},
        (1, 6000),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_least_limit_of_all_control_groups_of_a_process_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    groups, files, expected = CASES[case]
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{text}\n")
    monkeypatch.setattr(processes, "_GROUPS_OF_PROCESS", tmp_path / "groups")
    monkeypatch.setattr(processes, "_CONTROL_GROUPS", str(tmp_path / "fs"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert (processes.num_cores(), processes.memory_limit()) == expected
