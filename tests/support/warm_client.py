"""The program of `warm`: hands what it was started with to the server, and ends as the process there ends.

It imports next to nothing, and runs what it cannot hand over by Python itself.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT")


def main(real: str, address: str, *arguments: str) -> None:
    rest = list(arguments)
    actions = []
    while rest and rest[0] in ("-u", "-W"):
        if rest.pop(0) == "-W":
            actions.append(rest.pop(0))
    can_hand_over = rest and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))
    if not can_hand_over or rest[:2] == ["-m", "pip"] or (rest[0] == "-c" and "multiprocessing" in rest[1][:40]):
        os.execv(real, [real, *arguments])
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    for name in PASSED_ON:
        signal.signal(getattr(signal, name), lambda number, _: server.sendall(bytes([number])))
    asked = {"cwd": os.getcwd(), "env": dict(os.environ), "options": actions, "arguments": rest}  # noqa: PTH109
    text = json.dumps(asked).encode()
    socket.send_fds(server, [b"%8d" % len(text)], [0, 1, 2])
    server.sendall(text)
    for number in (0, 1, 2):
        os.close(number)
    code = int(server.recv(8) or b"1")
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


main(*sys.argv[1:])
