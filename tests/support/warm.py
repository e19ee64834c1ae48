"""A Python whose processes begin with torch and a trainer imported: they are forked from one process that did it once.

Tests that start many ranks use it in place of `sys.executable`, under any launcher: to import torch and Lightning
takes a process 6 to 8 CPU-seconds, and these processes none. `python()` is a program that takes the arguments of
Python. It hands them, its environment and its files to the server, passes signals on, and ends as the process ended.
What multiprocessing starts by itself is a Python of its own, and so is what a test of the interpreter's end starts.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

CLIENT = Path(__file__).with_name("warm_client.py")
# Composer replaces functions of torch: where it is installed, Lightning's processes are not what the tests are about.
TRAINER = "composer" if find_spec("composer") else "lightning.pytorch"
IMPORTED = ("torch", "torch._dynamo", "torch.distributed.run", TRAINER, "hydra", "torchvision")


@cache
def python(interpreter: str = sys.executable, *imported: str) -> str:
    """The path of the program; its server ends with this process. Other modules may be imported, by another Python."""
    folder = tempfile.mkdtemp(prefix="warm")
    address = f"{folder}/socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)  # before the server begins, so that a client need not try again
    program = Path(folder, "python")
    program.write_text(f'#!/bin/sh\nexec "{interpreter}" -IS "{CLIENT}" "{interpreter}" "{address}" "$@"\n')
    program.chmod(0o755)
    number = listener.detach()
    command = [interpreter, "-W", "ignore", "-P", __file__, str(number), str(program), *(imported or IMPORTED)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number])
    os.close(number)  # of a server that has failed, the address refuses
    atexit.register(_end, server, folder)
    return str(program)


def _end(server: subprocess.Popen[bytes], folder: str) -> None:
    server.kill()  # a process that still has its input, as a worker may, cannot keep it
    server.wait()
    shutil.rmtree(folder)


class _Server:
    """Forks a process for each client; what a client sends later is a signal, and its end is a SIGKILL."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._pids: dict[socket.socket, int] = {}

    def serve(self) -> dict[str, Any] | None:
        """Return what a forked process is to run, in that process; None at the end of the input."""
        while True:
            # poll, unlike select, takes files of any number: the listener has that of a process with many open files
            with selectors.PollSelector() as selector:
                for file in (sys.stdin, self._listener, *self._pids):
                    selector.register(file, selectors.EVENT_READ)
                readable = {key.fileobj for key, _ in selector.select(0.02)}
            if sys.stdin in readable:
                return None
            if self._listener in readable:
                request = self._accept()
                if request is not None:
                    return request
            for client in [client for client in self._pids if client in readable]:
                self._pass_on(client)
            self._reap()

    def _accept(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        size, files, _, _ = socket.recv_fds(client, 8, 3)
        text = client.recv(int(size), socket.MSG_WAITALL)
        pid = os.fork()
        if pid:
            for file in files:
                os.close(file)
            self._pids[client] = pid
            return None
        os.setsid()  # what it starts ends with it, as a launch with a session of its own does
        for open_socket in (self._listener, client, *self._pids):
            open_socket.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        request: dict[str, Any] = json.loads(text)
        return request

    def _pass_on(self, client: socket.socket) -> None:
        sent = client.recv(1)
        pid = self._pids[client]
        os.kill(pid, sent[0] if sent else signal.SIGKILL)
        if not sent:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self._pids[client]
            client.close()

    def _reap(self) -> None:
        for client, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[client]
                with contextlib.suppress(BrokenPipeError):
                    client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                client.close()


def _become(request: dict[str, Any], program: str) -> None:
    """Make this process what a new one would be, and run what its arguments say."""
    import random
    import runpy
    import warnings

    import numpy as np

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable = program
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as Python opens them
    for number, name in ((1, "stdout"), (2, "stderr")):
        text = open(number, "w", closefd=False, buffering=1 if number == 2 or os.isatty(number) else -1)  # noqa: SIM115
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    if rank_zero := sys.modules.get("lightning.fabric.utilities.rank_zero"):  # reads the environment at its import
        rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0
    random.seed()
    np.random.seed()
    options, arguments = request["options"], request["arguments"]
    chosen = [*filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")), *options]
    warnings.resetwarnings()
    for action in chosen:
        warnings.simplefilter(action)  # type: ignore[arg-type]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(folder).resolve()) for folder in added if folder]
    main = sys.modules["__main__"] = ModuleType("__main__")
    kind, *rest = arguments
    if kind == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = rest
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], main.__dict__)
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        sys.argv = arguments
        main.__file__ = kind
        exec(compile(Path(kind).read_text(), kind, "exec"), main.__dict__)


def _run(request: dict[str, Any], program: str) -> int:
    """Run it to the end that Python comes to, but without clearing what was imported; returns its exit code."""
    import threading

    code = 0
    try:
        _become(request, program)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - printed, as Python does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _main(number: str, program: str, *imported: str) -> None:
    server = _Server(socket.socket(fileno=int(number)))
    for name in imported:
        if find_spec(name.partition(".")[0]):
            import_module(name)
    gc.freeze()  # a collection in a forked process would copy all that was imported
    request = server.serve()
    os._exit(0 if request is None else _run(request, program))


if __name__ == "__main__":
    _main(*sys.argv[1:])
