"""One contract for every store, each against its real server or the nearest to one that runs here."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_stream.errors import AlreadyExistsError, ConflictError, LightningStreamError, NotFoundError, StoreError
from lightning_stream.stores import ObjectEntry, Store, open_store

QUICK = {"first_pause_s": 0.01, "retries": 2, "timeout_s": 20.0}
CONTENT = bytes(range(256)) * 9


@pytest.fixture
def store(place: Any) -> Store:
    options = place.options if place.kind == "local" else {**QUICK, **place.options}
    return open_store(place.url, options)


@pytest.fixture
def put(place: Any, store: Store) -> Any:
    """Puts an object, by the store or, where it only reads, behind its back."""

    def behind(name: str, content: bytes) -> None:
        place.server.objects[f"/datasets/org/name/resolve/v1/folder/{name}"] = content

    return store.put if place.can_write else behind


def test_what_is_put_is_read_whole_by_range_and_into_files(store: Store, put: Any, tmp_path: Path) -> None:
    put("a/b.bin", CONTENT)
    assert store.read("a/b.bin") == CONTENT
    assert store.get("a/b.bin", tmp_path / "b") == len(CONTENT)
    assert (tmp_path / "b").read_bytes() == CONTENT
    for begin, end in ((0, 1), (0, 256), (7, 300), (2303, 2304), (2000, 9999), (2304, 2305), (5000, 6000), (9, 9)):
        assert store.read("a/b.bin", begin, end) == CONTENT[begin:end], (begin, end)


def test_a_file_on_disk_is_put_as_it_is(place: Any, store: Store, tmp_path: Path) -> None:
    if not place.can_write:
        with pytest.raises(StoreError, match="read here, not written"):
            store.put("x", b"x")
        return
    content = CONTENT * 1000
    (tmp_path / "source").write_bytes(content)
    store.put("large.bin", tmp_path / "source")
    assert store.read("large.bin") == content
    store.put("large.bin", b"replaced")
    assert store.read("large.bin") == b"replaced"
    with pytest.raises(FileNotFoundError) as absent:
        store.put("another", tmp_path / "none")
    assert absent.value.filename == str(tmp_path / "none")
    assert not isinstance(absent.value, StoreError)


def test_an_empty_object_is_an_object(store: Store, put: Any, tmp_path: Path) -> None:
    put("empty", b"")
    assert store.read("empty") == b""
    assert store.get("empty", tmp_path / "empty") == 0
    assert store.exists("empty")
    assert store.read("empty", 0, 10) == b""


@pytest.mark.parametrize(
    "name", ["with space", "plus+and&more=1", "percent%20", "héllo/wörld", "a.b-c_d~e", "#hash", "q?x"]
)
def test_names_are_taken_as_they_are(store: Store, put: Any, place: Any, name: str) -> None:
    put(f"names/{name}", b"named")
    assert store.read(f"names/{name}") == b"named"
    if place.can_list:
        assert f"names/{name}" in [entry.name for entry in store.list("names/")]


def test_a_listing_is_sorted_recursive_paged_and_relative(place: Any, store: Store, put: Any) -> None:
    if not place.can_list:
        with pytest.raises(StoreError, match="cannot be listed"):
            list(store.list())
        return
    names = ["l/10", "l/2", "l/sub/deep/x", "l/sub.txt", "l/a", "l/b", "l/c", "l-other"]
    for name in names:
        put(name, name.encode())
    below = sorted(name for name in names if name.startswith("l/"))
    assert list(store.list("l/")) == [ObjectEntry(name, len(name)) for name in below]
    assert [entry.name for entry in store.list("l/s")] == ["l/sub.txt", "l/sub/deep/x"]
    assert {*names} <= {entry.name for entry in store.list()}
    assert list(store.list("nothing/here")) == []


def test_what_is_absent_is_not_found_and_named(store: Store, tmp_path: Path) -> None:
    for call in (
        lambda: store.read("no/such"),
        lambda: store.get("no/such", tmp_path / "x"),
        lambda: store.read("no/such", 0, 5),
        lambda: store.read("no/such", 5, 9),
    ):
        with pytest.raises(NotFoundError, match="no/such") as caught:
            call()
        assert caught.value.__cause__ is None or isinstance(caught.value.__cause__, LightningStreamError)
    assert not store.exists("no/such")


def test_deleting_is_final_and_twice_is_no_error(place: Any, store: Store) -> None:
    if not place.can_write:
        with pytest.raises(StoreError):
            store.delete("x")
        return
    store.put("gone", b"x")
    assert store.exists("gone")
    store.delete("gone")
    store.delete("gone")
    assert not store.exists("gone")


@pytest.mark.parametrize("name", ["", "/abs", "../up", "a/../../b", "a//b", "."])
def test_a_name_cannot_leave_the_folder(store: Store, name: str) -> None:
    for call in (store.read, store.exists, store.delete, lambda name: store.put(name, b"")):
        with pytest.raises((ValueError, StoreError), match=r"relative path|read here"):
            call(name)


def test_many_threads_may_use_one_store(store: Store, put: Any) -> None:
    contents = {f"t/{number}": bytes([number]) * 5000 for number in range(16)}
    for name, content in contents.items():
        put(name, content)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(store.read, contents)) == list(contents.values())


def version_of(store: Store, name: str) -> str:
    with store.open(name) as stream:
        b"".join(stream)
        assert stream.version is not None
        return stream.version


def test_a_put_if_absent_creates_and_never_replaces(place: Any, store: Store, tmp_path: Path) -> None:
    if not place.can_write:
        return
    store.put("once", b"first", if_absent=True)
    (tmp_path / "second").write_bytes(b"second")
    for source in (b"second", tmp_path / "second", b"first"):
        with pytest.raises(AlreadyExistsError, match="once: there is an object of that name already") as caught:
            store.put("once", source, if_absent=True)
        assert isinstance(caught.value, FileExistsError)
    assert store.read("once") == b"first"
    store.delete("once")
    store.put("once", tmp_path / "second", if_absent=True)
    assert store.read("once") == b"second"
    if place.can_list:
        assert [entry.name for entry in store.list("once")] == ["once"]


def test_a_put_if_version_replaces_that_version_only(place: Any, store: Store) -> None:
    if not place.can_write:
        return
    store.put("pointer", b"one")
    first = version_of(store, "pointer")
    store.put("pointer", b"two", if_version=first)
    assert store.read("pointer") == b"two"
    with pytest.raises(ConflictError, match="pointer: another process has replaced or deleted it"):
        store.put("pointer", b"six", if_version=first)
    assert store.read("pointer") == b"two"
    second = version_of(store, "pointer")
    store.delete("pointer")
    with pytest.raises(ConflictError):
        store.put("pointer", b"six", if_version=second)
    assert not store.exists("pointer")
    with pytest.raises(ValueError, match="not both"):
        store.put("pointer", b"x", if_absent=True, if_version=second)


def test_of_two_conditional_puts_at_once_one_wins_and_its_bytes_stay(place: Any, store: Store) -> None:
    if not place.can_write:
        return
    store.put("race/pointer", b"start")
    version = version_of(store, "race/pointer")
    for name, condition in (("race/fresh", {"if_absent": True}), ("race/pointer", {"if_version": version})):
        barrier = threading.Barrier(2)

        def put(content: bytes, name: str = name, condition: Any = condition, barrier: Any = barrier) -> bytes | None:
            barrier.wait()
            try:
                store.put(name, content, **condition)
            except (AlreadyExistsError, ConflictError):
                return None
            return content

        with ThreadPoolExecutor(2) as pool:
            won = [content for content in pool.map(put, [b"one", b"two"]) if content is not None]
        assert won == [store.read(name)]


def _read_in_child(store: Store, name: str, answers: Any) -> None:
    try:
        answers.put(store.read(name))
    except BaseException as error:  # noqa: BLE001
        answers.put(repr(error))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_store_works_after_a_pickle_and_in_a_forked_child(place: Any, store: Store, put: Any) -> None:
    put("forked", CONTENT)
    assert store.read("forked") == CONTENT
    assert pickle.loads(pickle.dumps(store)).read("forked") == CONTENT
    if place.kind == "fsspec":
        return  # its memory is one process's own; sftp stands for fsspec here
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_read_in_child, args=(store, "forked", answers))
    child.start()
    assert answers.get(timeout=60) == CONTENT
    child.join()
    assert store.read("forked") == CONTENT


def test_no_secret_is_shown(place: Any, store: Store) -> None:
    secrets = [str(place.options[key]) for key in ("secret_access_key", "token", "account_key") if key in place.options]
    inner = getattr(store, "store", store)
    shown = f"{store!r} {store.url} {store.identity} {inner!r} {getattr(inner, '_options', '')!r}"
    try:
        store.read("no/such")
    except NotFoundError as error:
        shown += f"{error} {error.__context__!r} {error.__cause__!r}"
    assert not [secret for secret in secrets if secret in shown]
