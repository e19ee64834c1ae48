"""A script prints nothing of ours when it ends, in whatever way."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from lightning_stream import MDSWriter

START = """
from lightning_stream import StreamingDataLoader, StreamingDataset
import numpy as np
from torch.utils.data import DataLoader
dataset = StreamingDataset(remote={remote!r}, local={local!r}, batch_size=4, shuffle=True)
"""
WAYS = {
    "normal": "",
    "exit": "sys.exit(0)",
    "error": "raise RuntimeError('of the user')",
    "interrupt": "raise KeyboardInterrupt",
}
LOADERS = {
    "alone": "StreamingDataLoader(dataset, 4)",
    "workers": "StreamingDataLoader(dataset, 4, num_workers=2)",
    "persistent": "StreamingDataLoader(dataset, 4, num_workers=2, persistent_workers=True)",
}
SCRIPTS = {
    **{
        f"{loader}_{way}": f"loader = {made}\nbatches = iter(loader)\nfirst = next(batches)\n{end}"
        for loader, made in LOADERS.items()
        for way, end in WAYS.items()
    },
    "broken_off_with_workers": f"loader = {LOADERS['workers']}\nfor batch in loader: break",
    "epochs": f"loader = {LOADERS['persistent']}\nfor epoch in range(2):\n    for batch in loader: pass",
    "two_iterators": f"loader = {LOADERS['workers']}\none, other = iter(loader), iter(loader)\nnext(one), next(other)",
    "in_a_function": f"def main():\n    loader = {LOADERS['workers']}\n    for batch in loader: break\nmain()",
    "of_torch": "loader = DataLoader(dataset, 4, num_workers=2)\nbatches = iter(loader)\nnext(batches)",
    "in_flight": "dataset.reader.read_ahead(np.arange(400))",
    "forked": "dataset.reader.read_ahead(np.arange(100))\nif (pid := os.fork()): os.waitpid(pid, 0)\nelse: dataset[0]",
    "forgotten_in_a_child": "dataset[0]\nif (pid := os.fork()): os.waitpid(pid, 0)\nelse: del dataset",
    "thread": "import threading\nthreading.Thread(target=lambda: [dataset[k] for k in range(60)], daemon=True).start()",
    "batch_in_a_thread": """
import threading, time
loader = StreamingDataLoader(dataset, 4, collate_fn=lambda _: time.sleep(60))
batches = iter(loader)
threading.Thread(target=next, args=(batches,), daemon=True).start()
time.sleep(0.5)
""",
    "held_beyond_modules": "dataset[0]\nsys._held = list(sys.modules.values()), dataset, iter(dataset)",
}  # fmt: skip
# A process for each would spend its time on importing torch: they are forked from one that has, and end as they would.
DRIVER = """
import os, sys
import lightning_stream.loader, lightning_stream.dataset
scripts = eval(sys.stdin.read())
sys.stdin.close()
for name, (script, out) in scripts.items():
    if (pid := os.fork()) == 0:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 2)
        break
    os.waitpid(pid, 0)
else:
    os._exit(0)
exec(compile(script, name, "exec"))
"""


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    with MDSWriter(out=folder, columns={"id": "int", "x": "ndarray:float32:4"}, size_limit=200) as writer:
        for number in range(400):
            writer.write({"id": number, "x": np.zeros(4, np.float32)})
    return folder


def check(name: str, stderr: str) -> None:
    """Only the user's own traceback may be there."""
    if name.endswith(("_error", "_interrupt")):
        expected = "KeyboardInterrupt" if name.endswith("interrupt") else "RuntimeError: of the user"
        head, *frames, last = stderr.strip().splitlines()
        assert (head, last) == ("Traceback (most recent call last):", expected), f"{name}: {stderr}"
        assert all(line.startswith("  ") for line in frames), f"{name}: {stderr}"
    else:
        assert not stderr, f"{name}: {stderr}"


@pytest.mark.slow
def test_a_script_that_ends_prints_nothing_of_ours(remote: Path, tmp_path: Path) -> None:
    scripts = {
        name: ("import os, sys" + START.format(remote=str(remote), local=str(tmp_path / name)) + script,
               str(tmp_path / f"{name}.stderr"))
        for name, script in SCRIPTS.items()
    }  # fmt: skip
    driver = [sys.executable, "-c", DRIVER]
    run = subprocess.run(driver, input=repr(scripts), capture_output=True, text=True, timeout=250, check=True)
    assert not run.stderr
    for name, (_, out) in scripts.items():
        check(name, Path(out).read_text())


def test_an_iterator_that_outlives_the_modules_uses_none_of_them(remote: Path, tmp_path: Path) -> None:
    script = """
import atexit, sys
atexit.register(lambda: vars(sys.modules["lightning_stream.loading.worker_pool"]).update(_end_workers=None))
"""  # the first to be registered is called last, where the interpreter may clear modules
    body = "loader = StreamingDataLoader(dataset, 4, num_workers=1)\nbatches = iter(loader)\nnext(batches)\n"
    script += START.format(remote=str(remote), local=str(tmp_path / "l")) + body
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    assert not run.stderr


@pytest.mark.parametrize(
    "name",
    ["persistent_error", *(pytest.param(name, marks=pytest.mark.slow) for name in ("alone_normal", "workers_normal"))],
)
def test_a_process_of_its_own_ends_as_quietly(remote: Path, tmp_path: Path, name: str) -> None:
    script = tmp_path / "script.py"
    text = "import os, sys" + START.format(remote=str(remote), local=str(tmp_path / "l")) + SCRIPTS[name]
    script.write_text(f"if __name__ == '__main__':\n{textwrap.indent(text, '    ')}")  # a forkserver imports it, too
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == name.endswith("error")
    check(name, run.stderr)
