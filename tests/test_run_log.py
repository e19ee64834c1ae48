"""The log of a training run: each run writes one of its own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from lightning_stream.run_log import LOG_NAME, open_log
from lightning_stream.shared_files import LOCK_FDS


def test_runs_that_start_at_once_have_a_log_each_and_keep_the_former_one(tmp_path: Path) -> None:
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        (folder / LOG_NAME).write_bytes(b"former\n")
        together = Barrier(6)

        def start(run: int, folder: Path = folder, together: Barrier = together) -> int:
            together.wait()
            _, fd, _ = open_log(folder, continues=False, say=str)
            os.write(fd, b"%d\n" % run)
            return fd

        with ThreadPoolExecutor(6) as pool:
            fds = list(pool.map(start, range(6)))
        logs = sorted(filter(None, (path.read_text() for path in folder.iterdir())))
        for fd in fds:
            LOCK_FDS.close(fd)
        assert logs == [*(f"{run}\n" for run in range(6)), "former\n"]
