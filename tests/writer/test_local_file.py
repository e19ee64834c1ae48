"""Files of this machine: the same bytes past the page cache and through it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream.errors import StoreError
from lightning_stream.shared_files import file_system
from lightning_stream.writer import local_file
from lightning_stream.writer.local_file import write_file
from lightning_stream.writer.place import Transaction

BLOCK, STAGE = local_file._BLOCK_BYTES, local_file._STAGE_BYTES
_BYTES = np.random.default_rng(0).bytes(3 * STAGE + 2 * BLOCK)


@pytest.fixture
def direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where files of any size go past the page cache."""
    if file_system(tmp_path) not in local_file._DIRECT_FILE_SYSTEMS:
        pytest.skip(f"{tmp_path} is on {file_system(tmp_path)}; pass --basetemp a folder on ext4 or xfs")
    monkeypatch.setattr(local_file, "_MIN_DIRECT_BYTES", 0)
    return tmp_path


def _flagged(monkeypatch: pytest.MonkeyPatch, fail_at: int = -1) -> list[tuple[bool, int]]:
    """Record, of each write, whether it goes past the page cache, and its bytes; one may fail as on an odd disk."""
    seen: list[tuple[bool, int]] = []
    real = os.writev

    def writev(fd: int, views: Any) -> int:
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and len(seen) == fail_at:
            raise OSError(errno.EINVAL, "Invalid argument")
        seen.append((is_direct, sum(map(len, views))))
        return real(fd, views)

    monkeypatch.setattr(os, "writev", writev)
    return seen


@pytest.mark.parametrize(
    "size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, STAGE - 1, STAGE, STAGE + 1, 3 * STAGE + BLOCK + 7]
)
@pytest.mark.parametrize("cut", [7_000, 1 << 30])
def test_a_file_of_any_size_and_cut_has_the_bytes_of_its_parts(direct: Path, size: int, cut: int) -> None:
    parts = [_BYTES[k : min(k + cut, size)] for k in range(0, size, cut)]
    write_file(direct / "sub" / "file", parts)
    assert (direct / "sub" / "file").read_bytes() == _BYTES[:size]
    assert [path.name for path in (direct / "sub").iterdir()] == ["file"]


def test_whole_blocks_go_past_the_page_cache_and_the_rest_as_usual(
    direct: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _flagged(monkeypatch)
    write_file(direct / "file", [_BYTES[:5], _BYTES[5 : STAGE + BLOCK + 9]])
    assert seen == [(True, STAGE), (True, BLOCK), (False, 9)]


def test_a_disk_that_refuses_gets_the_rest_through_the_page_cache(
    direct: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _flagged(monkeypatch, fail_at=1)
    write_file(direct / "file", [_BYTES])
    assert [is_direct for is_direct, _ in seen] == [True, False, False, False]
    assert (direct / "file").read_bytes() == _BYTES


def test_small_files_and_unknown_file_systems_are_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _flagged(monkeypatch)
    write_file(tmp_path / "small", [b"ab", b"c"])
    monkeypatch.setattr(local_file, "_file_system", lambda _: "nfs4")
    write_file(tmp_path / "large", [_BYTES, _BYTES])
    assert not any(is_direct for is_direct, _ in seen)
    assert (tmp_path / "large").read_bytes() == _BYTES + _BYTES


def test_a_write_that_fails_leaves_no_file(direct: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, views: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StoreError, match=r"shard\.00000\.mds: No space left.*Free some space"):
        Transaction(direct).part("shard.00000.mds", [_BYTES])
    assert list(direct.iterdir()) == []


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(StoreError, match=r"taken must be a folder.*Use another folder"):
        write_file(tmp_path / "taken" / "file", [b"abc"])
