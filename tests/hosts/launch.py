"""Runs a list of runs under their hosts: these are imported once, then each run's ranks are forked.

Started as ``python -m hosts.launch RUNS.json``; each rank's output is in its run's folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # optimizers load it at their first use, which is slow
from servers.ports import free_port

from hosts.run import Run

TIMEOUT_S, GRACE_S = 120.0, 3.0


def _rank(host: Callable[[Run], None], run: Run, port: int) -> None:
    output = os.open(f"{run.folder}/out.{run.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The variables of torchrun, on one node.
    own = {"RANK": run.rank, "LOCAL_RANK": run.rank, "WORLD_SIZE": run.world, "LOCAL_WORLD_SIZE": run.world}
    address = {"GROUP_RANK": 0, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in {**own, **address, "TORCHELASTIC_RUN_ID": "hosts"}.items()}
    code = 1
    try:
        host(run)
        code = 0
    except BaseException:  # noqa: BLE001  # printed, and seen by the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the threads of gloo, which can abort a process at its end


def _fork(host: Callable[[Run], None], options: dict[str, Any]) -> list[int]:
    """Start the ranks of a run and wait for them; as torchrun does, end the others when one fails."""
    Path(options["folder"]).mkdir(parents=True)
    port, codes, pids = free_port(), {}, {}
    for rank in range(options["world"]):
        pid = os.fork()
        if pid == 0:
            _rank(host, Run(rank=rank, **options), port)
        pids[pid] = rank
    ends = time.monotonic() + TIMEOUT_S
    while len(codes) < len(pids):
        for pid in pids.keys() - codes.keys():
            if time.monotonic() > ends:
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    ends = min(ends, time.monotonic() + GRACE_S)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def main(plan: str) -> None:
    """Run them in order, but none that resumes a failed run; each run's exit codes are written to its folder."""
    runs = json.loads(Path(plan).read_text())
    modules = {module: import_module(f"hosts.{module}") for module in {run["host"].split(":")[0] for run in runs}}
    failed: set[str] = set()
    for options in runs:
        module, function = options.pop("host").split(":")
        if options["resumes"] in failed:
            continue
        codes = _fork(getattr(modules[module], function), options)
        if any(codes):
            failed.add(options["folder"])
        (Path(options["folder"]) / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
