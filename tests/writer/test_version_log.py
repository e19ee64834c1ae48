"""The log of versions: appends that nobody loses, doubles or sees in part, and that cost a small file."""

from __future__ import annotations

import contextlib
import json
import random
import re
import selectors
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="StreamingDataset needs torch: uv sync")

from servers.s3 import bucket_at, options_of
from support import appenders

from lightning_stream import StreamingDataset, cli, version_log, versions
from lightning_stream.errors import ConflictError, FormatError, NotFoundError, UnavailableError
from lightning_stream.formats.index import Index
from lightning_stream.stores import LocalStore, Store, open_store
from lightning_stream.version_log import read_changes, read_newest, read_version
from lightning_stream.writer import MDSWriter, merge_index, place

_KILLED = 1 / 8  # of the appends, followed by a kill within 0.2 s
SUPPORT = Path(appenders.__file__)


def write(out: Any, values: Any, **how: Any) -> None:
    with MDSWriter(out=out, columns={"x": "int"}, size_limit=260, **how) as writer:
        writer.write_batch({"x": np.array(values)})


def values(url: Any, options: Any = None, **how: Any) -> list[int]:
    store = open_store(str(url), options)
    index = (read_version(store, **how) if how else read_newest(store)).index
    return values_of(store, index)


def values_of(store: Store, index: Index) -> list[int]:
    found: list[int] = []
    for entry in map(index.entry, range(len(index))):
        data = store.read(entry.raw.basename)
        begin = int(np.frombuffer(data, "<u4", 1, 4)[0])
        found += np.frombuffer(data[begin:], "<i8").tolist()
    return found


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of any size is too large to be published by each commit."""
    monkeypatch.setattr(version_log, "_PUBLISHED_BYTES", 0)


@pytest.mark.usefixtures("large")
def test_an_append_to_a_large_dataset_puts_one_small_file_beside_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, range(1990))
    write(tmp_path, range(1990, 2000), append=True)  # the first one is noted in index.json
    before = (tmp_path / "index.json").read_bytes()
    puts: list[tuple[str, int]] = []
    put = LocalStore.put

    def counted(self: LocalStore, name: str, source: Any, **how: Any) -> None:
        puts.append((name, len(source)))
        put(self, name, source, **how)

    monkeypatch.setattr(LocalStore, "put", counted)
    write(tmp_path, range(2000, 2010), append=True)
    assert (tmp_path / "index.json").read_bytes() == before
    ((name, num_bytes),) = puts  # shards of a folder are written otherwise
    assert name.startswith("versions/")
    assert num_bytes < 2000 < len(before)
    assert values(tmp_path) == list(range(2010))
    assert [sample["x"] for sample in StreamingDataset(local=tmp_path)[:]] == list(range(2010))


@pytest.mark.parametrize("is_large", [False, True])
def test_every_version_can_be_read_by_its_number_and_by_its_digest(
    tmp_path: Path, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(version_log, "_PUBLISHED_BYTES", 0)
        monkeypatch.setattr(version_log, "_PUBLISHED_EVERY", 7)
    write(tmp_path, [0])
    digests = [read_newest(LocalStore(tmp_path)).index.digest]
    for number in range(1, 40):
        write(tmp_path, [number], append=True, message=f"number {number}")
        digests.append(read_newest(LocalStore(tmp_path)).index.digest)
    assert read_newest(LocalStore(tmp_path)).number == 39
    for number, digest in enumerate(digests):
        for wanted in (number, digest, digest[:16], digest[:8]):
            assert values(tmp_path, wanted=wanted) == list(range(number + 1))
    pinned = StreamingDataset(remote=tmp_path, local=tmp_path / "cache", version=20)
    assert [sample["x"] for sample in pinned[:]] == list(range(21))
    for unknown in (40, -1, "0" * 16):
        with pytest.raises(NotFoundError, match="version must be one that the dataset has"):
            values(tmp_path, wanted=unknown)
    changes = read_changes(LocalStore(tmp_path), digests[0][:16])
    assert [(one.number, one.message, one.samples) for one in changes] == [
        (number, f"number {number}", number + 1) for number in range(1, 40)
    ]


@pytest.mark.usefixtures("large")
def test_the_digest_and_the_text_of_a_version_do_not_depend_on_when_it_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, range(50), lengths={"x": int})
    for number in range(3):
        write(tmp_path, [50 + number], append=True, lengths={"x": int})
    store = LocalStore(tmp_path)
    newest = read_newest(store)
    version_log.publish(store, newest)
    published = (tmp_path / "index.json").read_bytes()
    assert Index.from_bytes(published, "").digest == newest.index.digest
    assert published == newest.index.data == read_newest(store).index.data
    assert StreamingDataset(local=tmp_path).lengths("x").tolist() == list(range(53))
    version_log.publish(store, read_version(store, 1))  # it is older
    assert (tmp_path / "index.json").read_bytes() == published


def test_an_append_with_a_key_is_made_once(tmp_path: Path) -> None:
    write(tmp_path, [0])
    for _ in range(3):
        for key in ("batch-1", "batch-2"):
            write(tmp_path, [1], append=True, key=key)
    assert values(tmp_path) == [0, 1, 1]
    assert len(list(tmp_path.glob("shard.*"))) == 3
    with pytest.raises(ValueError, match="pass append=True"):
        MDSWriter(out=tmp_path, key="batch-3")


def test_another_change_under_a_key_that_is_there_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, [0])
    write(tmp_path, [1, 2], append=True, key="May")
    files = set(tmp_path.rglob("*"))
    for other in ([3], [3, 4, 5], []):
        with pytest.raises(ConflictError, match=r"'May'.* with 2 new samples, .*Pass another key") as failure:
            write(tmp_path, other, append=True, key="May")
        assert "another writer" not in str(failure.value)
    with pytest.raises(ConflictError, match='operation "append" with 2 new samples, and this one "delete"'):
        versions.delete_rows(tmp_path, [0], key="May")
    assert versions.delete_rows(tmp_path, [1], key="June") == 1
    with pytest.raises(ConflictError, match='operation "delete"'):
        write(tmp_path, [3], append=True, key="June")
    assert versions.delete_rows(tmp_path, [0], key="June") == 0
    versions.compact(tmp_path)
    write(tmp_path, [1, 2], append=True, key="May")
    with pytest.raises(ConflictError, match="Pass another key"):
        write(tmp_path, [3], append=True, key="May")
    for first in tmp_path.glob("index.?*.json"):  # version 0, which a copy of the dataset may lack
        first.unlink()
    write(tmp_path, [1, 2], append=True, key="May")
    assert values(tmp_path) == [0, 2]
    assert {path for path in files if path.suffix == ".mds"} < set(tmp_path.rglob("*"))


@pytest.mark.parametrize("others", [0, 2])
def test_an_append_that_is_finished_again_after_an_error_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """The network may fail between the put of a change and the answer to what is asked after it."""
    write(tmp_path, [0])
    writer = MDSWriter(out=tmp_path, columns={"x": "int"}, append=True)
    writer.write({"x": 1})
    with monkeypatch.context() as patch:
        patch.setattr(version_log, "_is_current", raising(UnavailableError("the network is gone")))
        with pytest.raises(UnavailableError, match=r"the network is gone\. This change was made: it is version 1"):
            writer.finish()
    for number in range(others):
        write(tmp_path, [2 + number], append=True)
    writer.finish()
    assert values(tmp_path) == [0, 1, 2, 3][: 2 + others]
    assert len(read_changes(LocalStore(tmp_path), read_newest(LocalStore(tmp_path)).root)) == 1 + others


@pytest.mark.parametrize("is_put", [True, False])
@pytest.mark.parametrize("is_read", [True, False])
def test_an_append_whose_answer_is_lost_is_made_or_its_error_says_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_put: bool, is_read: bool
) -> None:
    write(tmp_path, [0])
    put, read = LocalStore.put, LocalStore.read
    has_failed = False

    def lost(store: Any, name: str, *args: Any, **kwargs: Any) -> None:
        nonlocal has_failed
        if "versions" not in name or is_put:
            put(store, name, *args, **kwargs)
        if "versions" in name:
            has_failed = True
            raise UnavailableError("the network is gone")

    def refused(store: Any, name: str) -> bytes:
        if has_failed and not is_read:
            raise UnavailableError("it is gone")
        return read(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put", lost)
        patch.setattr(LocalStore, "read", refused)
        said = "was not made" if is_read else "Whether this change was made is not known"
        with contextlib.nullcontext() if is_put and is_read else pytest.raises(UnavailableError, match=said):
            write(tmp_path, [1], append=True)
    assert values(tmp_path) == ([0, 1] if is_put else [0])


def test_an_append_that_was_made_ends_without_an_error_though_index_json_cannot_be_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [0])
    with monkeypatch.context() as patch:
        patch.setattr(place, "publish", raising(UnavailableError("the network is gone")))
        write(tmp_path, [1], append=True)
    assert "the change was made; index.json" in caplog.text
    assert "the network is gone" in caplog.text
    assert values(tmp_path) == [0, 1]


def test_the_commands_that_such_an_append_names_put_index_json_at_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places = (tmp_path / "local", tmp_path / "remote")
    write(places, [0], keep_local=True)
    with monkeypatch.context() as patch:
        patch.setattr(place, "publish", raising(UnavailableError("the network is gone")))
        write(places, [1], append=True, keep_local=True)
    for command in re.findall("`lightning-stream (.*?)`", caplog.text):
        assert cli.main(command.split()) == 0
    for folder in places:
        index = Index.from_bytes((folder / "index.json").read_bytes(), str(folder))
        assert values_of(LocalStore(folder), index) == [0, 1]


def test_an_append_of_the_bytes_that_came_last_is_logged_unless_its_key_tells_that_it_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [0])
    write(tmp_path, [1], append=True)
    write(tmp_path, [2], append=True)
    write(tmp_path, [2], append=True, key="another")
    assert not caplog.text
    write(tmp_path, [2], append=True)
    assert "pass version=3 to readers" in caplog.text
    assert values(tmp_path, wanted=3) == [0, 1, 2, 2]


def raising(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_an_append_that_is_repeated_after_its_rows_were_deleted_keeps_the_versions_that_have_them(
    tmp_path: Path,
) -> None:
    write(tmp_path, [0])
    write(tmp_path, [1], append=True, key="batch-1")
    versions.delete_rows(tmp_path, [1])
    versions.compact(tmp_path)
    write(tmp_path, [1], append=True, key="batch-1")  # of a job that starts again: nothing is added
    assert values(tmp_path) == [0]
    assert values(tmp_path, wanted=1) == [0, 1]


@pytest.mark.usefixtures("large")
def test_an_append_to_a_dataset_that_was_overwritten_meanwhile_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, [0])
    late = MDSWriter(out=tmp_path, columns={"x": "int"}, append=True)
    late.write({"x": 1})
    write(tmp_path, [2], overwrite=True)
    with pytest.raises(ConflictError, match=r"was overwritten since this writer began.*Its dataset stays"):
        late.finish()
    assert values(tmp_path) == [2]
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) == 2, files
    write(tmp_path, [3], append=True)
    assert values(tmp_path) == [2, 3]


def test_an_append_is_refused_though_the_dataset_was_overwritten_by_one_that_began_as_it_did(tmp_path: Path) -> None:
    write(tmp_path, [])
    write(tmp_path, [0], append=True)
    late = MDSWriter(out=tmp_path, columns={"x": "int"}, append=True)
    late.write({"x": 1})
    write(tmp_path, [], overwrite=True)
    with pytest.raises(ConflictError, match="was overwritten since this writer began"):
        late.finish()
    write(tmp_path, [2], append=True)
    assert values(tmp_path) == [2]


@pytest.mark.usefixtures("large")
def test_an_append_of_columns_that_the_dataset_does_not_have_any_more_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [0])
    late = MDSWriter(out=tmp_path, columns={"x": "int"}, append=True)
    late.write({"x": 1})
    from lightning_stream import add_lengths

    add_lengths(tmp_path, {"x": int}, num_workers=1)
    with pytest.raises(ConflictError, match="has other columns or lengths"):
        late.finish()
    assert values(tmp_path) == [0]


@pytest.mark.parametrize(
    "later", [{"columns": {"x": "int"}}, {"columns": {"y": "int"}, "lengths": {"x": lambda sample: 1}}]
)
def test_appends_to_an_empty_dataset_at_once_have_the_columns_and_lengths_of_the_first(
    tmp_path: Path, later: dict[str, Any]
) -> None:
    write(tmp_path, [])
    late = MDSWriter(out=tmp_path, append=True, **later)
    late.write_batch({name: [1] for name in later["columns"]})
    write(tmp_path, [0], append=True, lengths={"x": int})
    with pytest.raises(ConflictError, match="has other columns or lengths"):
        late.finish()
    dataset = StreamingDataset(local=tmp_path)
    assert dataset[:] == [{"x": 0}]
    assert dataset.lengths("x").tolist() == [0]


@pytest.mark.usefixtures("large")
def test_a_merge_has_what_was_appended_to_the_partitions(tmp_path: Path) -> None:
    for part in ("a", "b"):
        write(tmp_path / part, [0])
        write(tmp_path / part, [1], append=True)
    merge_index(tmp_path)
    assert values(tmp_path) == [0, 1, 0, 1]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("damage", ["replaced", "changed", "no JSON"])
def test_a_damaged_log_is_an_error_and_not_another_version(tmp_path: Path, damage: str) -> None:
    write(tmp_path, [0])
    for number in (1, 2):
        write(tmp_path, [number], append=True)
    first, second = sorted(tmp_path.glob("versions/*/*.json"))
    if damage == "no JSON":
        first.write_bytes(b"\0\0")
    else:
        text = first.read_bytes()
        first.write_bytes(second.read_bytes() if damage == "replaced" else text.replace(b"shard.00001", b"shard.00009"))
    with pytest.raises(FormatError, match="versions/"):
        read_newest(LocalStore(tmp_path))


@pytest.mark.usefixtures("large")
def test_threads_that_append_at_the_same_time_lose_and_double_nothing(tmp_path: Path) -> None:
    write(tmp_path, [0])
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(appenders.append, str(tmp_path), None, k % 4, k // 4, None) for k in range(40)]:
            done.result()
    assert read_newest(LocalStore(tmp_path)).number == 40
    assert sorted(values(tmp_path)) == sorted([0, *(x for k in range(4) for x in rows(k, 10))])


def rows(number: int, num_batches: int) -> list[int]:
    """What a process writes."""
    first = 1_000_000 * (number + 1)
    return list(range(first, first + appenders.ROWS * num_batches))


def _place(kind: str, folder: Path, request: Any) -> tuple[str, Any]:
    if kind == "folder":
        return str(folder / "set"), None
    endpoint = request.getfixturevalue("ceph_endpoint")
    bucket_at(endpoint, "appends")
    return "s3://appends/set", options_of(endpoint)


class Appender:
    """A process that appends its batches, and is started again where it was killed."""

    def __init__(self, url: str, options: Any, number: int, num_batches: int) -> None:
        self.about = {"url": url, "options": options, "number": number, "end": num_batches}
        self.done = 0
        self.num_kills = 0
        self.start()

    def start(self) -> None:
        given = json.dumps({**self.about, "begin": self.done})
        self.process = subprocess.Popen([sys.executable, str(SUPPORT), given], stdout=subprocess.PIPE, bufsize=0)

    def read(self) -> bool:
        """Read a line, or start the process again; False once all is done."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            self.done = int(line) + 1
        elif self.done == self.about["end"]:
            assert self.process.wait() in (0, -signal.SIGKILL)
            self.process.stdout.close()
            return False
        else:
            assert self.process.wait() == -signal.SIGKILL
            self.process.stdout.close()
            self.start()
        return True

    def kill(self) -> None:
        self.process.kill()
        self.num_kills += 1


def _append_and_kill(url: str, options: Any, num_batches: int, seed: int) -> int:
    """Let 4 processes append while they are killed at random moments, and a reader looks; give the number of kills."""
    store, draw = open_store(url, options), random.Random(seed)
    appenders_ = [Appender(url, options, number, num_batches) for number in range(4)]
    running, seen = dict.fromkeys(appenders_), [0]
    kills: dict[Appender, float] = {}  # when each is killed next
    try:
        while running:
            with selectors.DefaultSelector() as selector:
                for one in running:
                    selector.register(one.process.stdout, selectors.EVENT_READ, one)  # type: ignore[arg-type]
                ready = [key.data for key, _ in selector.select(0.05)]
            for one in ready:
                if not one.read():
                    del running[one]
                elif draw.random() < _KILLED:
                    kills.setdefault(one, time.monotonic() + draw.uniform(0, 0.2))
                elif one is appenders_[0] and not one.num_kills:  # at least one kill, on any machine
                    kills.setdefault(one, time.monotonic())
            for one in [one for one, when in kills.items() if one in running and time.monotonic() > when]:
                del kills[one]
                one.kill()
                found = values_of(store, read_newest(store).index)
                assert found[: len(seen)] == seen  # ids of samples stay
                assert len(set(found)) == len(found)
                assert all(len(found[k : k + 3]) == 3 for k in range(1, len(found), 3))
                seen = found
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
    return sum(one.num_kills for one in appenders_)


@pytest.mark.parametrize(
    ("kind", "num_batches"),
    [("folder", 8), pytest.param("ceph", 125, marks=pytest.mark.nightly)],
)
def test_writers_that_are_killed_and_repeat_their_appends_lose_and_double_nothing(
    tmp_path: Path, kind: str, num_batches: int, request: Any
) -> None:
    url, options = _place(kind, tmp_path, request)
    write(url, [0], store_options=options)
    num_kills = _append_and_kill(url, options, num_batches, seed=1)
    assert num_kills > 0
    wanted = sorted([0, *(x for number in range(4) for x in rows(number, num_batches))])
    assert sorted(values(url, options)) == wanted
    store = open_store(url, options)
    newest = read_newest(store)
    assert newest.number == 4 * num_batches
    assert len({change.key for change in read_changes(store, newest.root)}) == newest.number
    sys.stderr.write(f"\n{kind}: {newest.number} appends, {num_kills} kills\n")
