"""What every test may ask for: the shared golden data and photos, where this machine has them."""

from __future__ import annotations

import fcntl
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from servers import processes, s3
from support.warm import python

from lightning_stream.formats import encodings

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci")

# A shell starts background jobs with Ctrl-C ignored, and a program that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Else each worker that a forkserver starts imports pytest, which takes longer than most tests.
multiprocessing.set_forkserver_preload(
    ["__main__", "lightning_stream.loading.in_forkserver", "lightning_stream.loader", "pytest"]
)
# Else a program that a test starts writes a line and its end apart, and lines of its processes mix.
os.environ.pop("PYTHONUNBUFFERED", None)


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of other packages that say nothing about this one."""
    # Hypothesis's own, on Python 3.14.
    config.addinivalue_line("filterwarnings", "ignore:It looks like `register_random` was passed an object")
    if find_spec("composer") is not None:
        # CheckpointSaver leaves a temporary folder to the garbage collector, which warns in any later test.
        config.addinivalue_line("filterwarnings", "ignore:Implicitly cleaning up:ResourceWarning")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files come first: a processor would have nothing to do while the other runs the last of them."""
    marks = ("slow", "distributed")
    long = {item.path for item in items if any(item.get_closest_marker(mark) for mark in marks)}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session", autouse=True)
def _default_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Default cache folders of this run: those of the user would keep what tests read, and know it again."""
    os.environ["LIGHTNING_STREAM_CACHE"] = str(tmp_path_factory.mktemp("default_cache"))


_CHECKOUT = Path(__file__).resolve().parent.parent


def _shared(folder: str) -> Path:
    root = Path(os.environ.get("LIGHTNING_STREAM_SHARED", _CHECKOUT.parent / "shared"))
    path = root / folder
    if not path.is_dir():
        pytest.skip(f"no {path}: set LIGHTNING_STREAM_SHARED to the folder that holds {folder}/")
    return path


@pytest.fixture(scope="session")
def shared_golden() -> Path:
    """Data and orders made by mosaicml-streaming."""
    return _shared("golden")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real photos, text and a table."""
    return _shared("data")


@pytest.fixture(scope="session")
def moto_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 server of Python: `servers.s3` makes buckets there."""
    with processes.moto(tmp_path_factory.mktemp("moto-server")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def ceph_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server, which checks signatures, rights and checksums."""
    with processes.ceph(tmp_path_factory.mktemp("ceph-server"), s3.KEY, s3.SECRET) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_endpoint(request: pytest.FixtureRequest) -> str:
    """Ceph where it is installed, else moto."""
    has_ceph = shutil.which("radosgw") and shutil.which("ceph-mon")
    return str(request.getfixturevalue("ceph_endpoint" if has_ceph else "moto_endpoint"))


@pytest.fixture(autouse=True)
def _own_encodings_end_with_their_test() -> Iterator[None]:
    """What a test, or the code of a page, registers is no encoding of the tests after it."""
    before = dict(encodings._REGISTER)
    yield
    if before != encodings._REGISTER:
        encodings._REGISTER.clear()
        encodings._REGISTER.update(before)
        encodings.get_encoding.cache_clear()


@pytest.fixture(autouse=True)
def _modules_that_a_test_writes_end_with_it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Another test may write one of the same name."""
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]


def _log_settings() -> dict[str, tuple[int, list[logging.Handler]]]:
    """The level and the handlers of each log of the package."""
    return {
        one.name: (one.level, [*one.handlers])
        for one in logging.root.manager.loggerDict.values()
        if isinstance(one, logging.Logger) and one.name.split(".")[0] == "lightning_stream"
    }


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """What a test, a run or the code of a page sets in the package's logs ends with the test."""
    before = _log_settings()
    yield
    for name in _log_settings():
        logger = logging.getLogger(name)
        level, logger.handlers = before.get(name, (logging.NOTSET, []))
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _log_of_this_test(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What threads of earlier tests log, e.g. that a server is gone, is not this test's."""
    earlier = {*threading.enumerate()} - {threading.main_thread()}

    def is_of_this_test(_: logging.LogRecord) -> bool:
        return threading.current_thread() not in earlier

    caplog.handler.addFilter(is_of_this_test)
    yield
    caplog.handler.removeFilter(is_of_this_test)


@pytest.fixture
def workers_by_fork() -> Iterator[None]:
    """Workers that know the test's own functions, also where another way to start them is the default."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def mosaic_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The Python of mosaicml-streaming; tests take turns, as its processes choose the same names of shared memory."""
    interpreter = os.environ.get("LIGHTNING_STREAM_MOSAIC_PYTHON")
    if not interpreter:
        pytest.skip("LIGHTNING_STREAM_MOSAIC_PYTHON=/path/to/python names none that has mosaicml-streaming")
    with (tmp_path_factory.getbasetemp().parent / "mosaic.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield python(interpreter, "streaming")


@pytest.fixture(scope="module", autouse=True)
def _collections_do_not_visit_what_was_there_before() -> None:
    """All that imports and earlier tests made: that takes a garbage collection up to a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What tests have read unverified and left is not compared when this process ends: their servers are gone."""
    if (shards := sys.modules.get("lightning_stream.reading.stream_shards")) is not None:
        shards._undecided.clear()
    gc.unfreeze()  # else extension modules report at exit that their functions were never freed
