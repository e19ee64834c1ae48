"""Real servers as child processes on 127.0.0.1, ended by their own ids; absent ones say what would enable them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from servers.ports import free_port

CEPH = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-mgr ceph-common"
AZURITE = "npm install azurite, and put node_modules/.bin on PATH (or name azurite-blob in AZURITE_BLOB)"
NGINX = "apt-get install --no-install-recommends nginx"
SSHD = "apt-get install --no-install-recommends openssh-server, and pip install paramiko"


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path, limit_s: float = 60.0) -> None:
    """Until something listens there; an early end of the process is an error with its log."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"{process.args} does not listen on {port}: {log.read_text(errors='replace')[-2000:]}")


@contextlib.contextmanager
def daemon(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process, in a group of its own, while the context lasts; it ends with the tests however these end."""
    leash = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*leash, *command], stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[int]:
    """The same, once it listens."""
    with daemon(command, log) as process:
        wait_for_port(port, process, log)
        yield port


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[str]:
    """An S3 endpoint by moto; no server needed beyond the test environment."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("no moto: pip install 'moto[server,s3]'")
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port, folder / "moto.log"):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Azure's own emulator of its blob storage; yields the account's endpoint."""
    program = os.environ.get("AZURITE_BLOB") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip(f"no azurite-blob: {AZURITE}")
    port = free_port()
    command = [
        *(program, "--blobHost", "127.0.0.1", "--blobPort", str(port)),
        *("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"),
    ]
    with running(command, port, folder / "azurite.log"):
        yield f"http://127.0.0.1:{port}/devstoreaccount1"


@contextlib.contextmanager
def nginx(folder: Path, settings: str) -> Iterator[str]:
    """An nginx with these settings of its http block, which listens at ``{port}`` and may use ``{folder}``."""
    found = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
    if found is None:
        pytest.skip(f"nginx is missing: {NGINX}")
    port, places = free_port(), ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{place}_temp_path {folder}/{place};\n" for place in places)
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off;\npid {folder}/pid;\nerror_log {folder}/errors;\n{'user root;' if not os.getuid() else ''}\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}"
        f"{settings.replace('{port}', str(port)).replace('{folder}', str(folder))}\n}}\n"
    )
    command = [found, "-p", str(folder), "-e", str(folder / "errors"), "-c", str(config)]
    with running(command, port, folder / "log"):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[tuple[str, Path]]:
    """OpenSSH's server for the user who runs the tests; yields ``sftp://user@host:port`` and the private key."""
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None or importlib.util.find_spec("paramiko") is None:
        pytest.skip(f"no sshd or no paramiko: {SSHD}")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "authorized").chmod(0o600)
    with contextlib.suppress(PermissionError):
        Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    settings = [
        *(f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {folder}/host", f"PidFile {folder}/pid"),
        *(f"AuthorizedKeysFile {folder}/authorized", "StrictModes no", "UsePAM no", "PermitRootLogin yes"),
        *("PasswordAuthentication no", "Subsystem sftp internal-sftp"),
    ]
    (folder / "config").write_text("\n".join(settings) + "\n")
    with running([program, "-D", "-e", "-f", str(folder / "config")], port, folder / "sshd.log"):
        import getpass

        yield f"sftp://{getpass.getuser()}@127.0.0.1:{port}", folder / "user"


CEPH_CONFIG = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon2},v1:127.0.0.1:{mon}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth allow insecure global id reclaim = false
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file = {folder}/$name.pid
crash dir = {folder}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
osd pool default pg autoscale mode = off
mon warn on pool no redundancy = false
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 0
mon data avail warn = 1
paxos propose interval = 0.01
paxos min wait = 0.01
ms bind ipv6 = false
[mon]
mon data = {folder}/mon
[mgr]
mgr data = {folder}/mgr
mgr initial modules =
[osd]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd class load list = *
osd class default list = *
[client.rgw]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw dns name = localhost
rgw run sync thread = false
"""


@contextlib.contextmanager
def ceph(folder: Path, key: str, secret: str) -> Iterator[str]:
    """A real object store that speaks S3: Ceph's gateway over one monitor and one OSD in memory."""
    lacking = [
        name for name in ("radosgw", "ceph-mon", "ceph-osd", "ceph-mgr", "ceph-authtool") if not shutil.which(name)
    ]
    if lacking:
        pytest.skip(f"no {', '.join(lacking)}: {CEPH}")
    for name in ("mon", "mgr", "osd", "rgw"):
        (folder / name).mkdir()
    fsid, monitor, port = str(uuid.uuid4()), free_port(), free_port()
    config = folder / "ceph.conf"
    config.write_text(CEPH_CONFIG.format(fsid=fsid, mon=monitor, mon2=free_port(), folder=folder, port=port))
    with contextlib.ExitStack() as daemons:
        _start_ceph(daemons, folder, config, fsid)
        rgw = ["radosgw", "-c", str(config), "-n", "client.rgw", "-f"]
        daemons.enter_context(running(rgw, port, folder / "rgw.out"))
        user = ["user", "create", "--uid=test", "--display-name=test", f"--access-key={key}", f"--secret-key={secret}"]
        _tool(folder, "radosgw-admin", "-c", str(config), "-n", "client.rgw", *user)
        yield f"http://127.0.0.1:{port}"


def _start_ceph(daemons: contextlib.ExitStack, folder: Path, config: Path, fsid: str) -> None:
    keyring, monmap, conf = str(folder / "keyring"), str(folder / "monmap"), ["-c", str(config)]
    address = next(line for line in config.read_text().splitlines() if line.startswith("mon host"))
    _tool(folder, "ceph-authtool", "-C", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    for name in ("client.admin", "client.rgw", "osd.0", "mgr.x"):
        caps = [word for kind in ("mon", "osd", "mgr") for word in ("--cap", kind, "allow *")]
        _tool(folder, "ceph-authtool", keyring, "--gen-key", "-n", name, *caps)
    _tool(folder, "monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", address.split(" = ")[1], monmap)
    _tool(folder, "ceph-mon", *conf, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    port = int(address.rsplit(":", 1)[1].rstrip("]"))
    daemons.enter_context(running(["ceph-mon", *conf, "-i", "a", "-f"], port, folder / "mon.out"))
    osd = str(uuid.uuid4())
    _tool(folder, "ceph", *conf, "--connect-timeout", "20", "osd", "new", osd)
    daemons.enter_context(daemon(["ceph-mgr", *conf, "-i", "x", "-f"], folder / "mgr.out"))
    _tool(folder, "ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
    daemons.enter_context(daemon(["ceph-osd", *conf, "-i", "0", "-f"], folder / "osd.out"))


def _tool(folder: Path, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command} gave {done.returncode}: {done.stderr.decode(errors='replace')[-2000:]}")
