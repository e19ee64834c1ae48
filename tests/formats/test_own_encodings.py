"""An encoding owns its batch: a user's own has the same means as a built-in one, and what it raises says where."""

from __future__ import annotations

import gc
import struct
import time
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings import Encoding, register_encoding
from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.formats.index import Index
from lightning_stream.formats.mds.encode import MdsEncoder
from lightning_stream.formats.shard import Shard, gather, open_shard
from lightning_stream.writer import MDSWriter


class Complex(Encoding):
    """Complex numbers: fast in a batch, both ways."""

    size = 16
    calls = 0

    def encode(self, value: Any) -> bytes:
        self.calls += 1
        return np.complex128(value).tobytes()

    def decode(self, data: bytes | memoryview) -> complex:
        self.calls += 1
        return complex(np.frombuffer(data, np.complex128)[0])

    def encode_many(self, values: Any) -> Any:
        return np.asarray(values, np.complex128).view(np.uint8).reshape(len(values), 16)

    def decode_many(self, window: Any, offsets: Any, sizes: Any) -> Any:
        return window.take_as(np.dtype(np.complex128), offsets, 16)


class Slow(Complex):
    """The same without the batch."""

    encode_many = Encoding.encode_many
    decode_many = Encoding.decode_many


class Words(Encoding):
    """Values of any size, encoded as a list."""

    def encode(self, value: Any) -> bytes:
        return " ".join(value).encode()

    def decode(self, data: bytes | memoryview) -> list[str]:
        return str(data, "utf-8").split(" ")

    def encode_many(self, values: Any) -> list[bytes]:
        return [self.encode(value) for value in values]

    def decode_many(self, window: Any, offsets: Any, sizes: Any) -> list[Any]:
        pairs = zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True)
        return [str(window.view[begin:end], "utf-8").split(" ") for begin, end in pairs]


def write(out: Path, columns: dict[str, str], batch: dict[str, Any]) -> Shard:
    with MDSWriter(out=out, columns=columns) as writer:
        writer.write_batch(batch)
    return open_shard(Index.from_file(out / "index.json").entry(0), out)


def test_an_own_encoding_encodes_and_decodes_whole_batches(tmp_path: Path) -> None:
    own = Complex()
    register_encoding("complex", own)
    register_encoding("words", Words())
    values = [complex(k, -k) for k in range(50)]
    words = [["a"] * (1 + k % 3) for k in range(50)]
    shard = write(tmp_path / "a", {"z": "complex", "w": "words", "n": "int"}, {"z": values, "w": words, "n": range(50)})
    rows = np.arange(50)[::-1]
    batch = shard.columns(rows)
    assert own.calls == 0
    assert isinstance(batch["z"], np.ndarray)
    assert (batch["z"].tolist(), batch["w"]) == (values[::-1], words[::-1])
    assert shard.sample(7) == {"z": 7 - 7j, "w": words[7], "n": 7}
    with MDSWriter(out=tmp_path / "b", columns={"z": "complex", "w": "words", "n": "int"}) as writer:
        for k in range(50):
            writer.write({"z": values[k], "w": words[k], "n": k})
    one, other = ((tmp_path / name / "shard.00000.mds").read_bytes() for name in "ab")
    assert one == other


def test_an_own_encoding_is_as_fast_as_a_built_in_one(tmp_path: Path) -> None:
    register_encoding("complex", Complex())
    register_encoding("slow", Slow())
    values = np.arange(4000) * (1 + 1j)
    pairs = values.view(np.float64).reshape(-1, 2)
    own = write(tmp_path / "own", {"z": "complex"}, {"z": values})
    slow = write(tmp_path / "slow", {"z": "slow"}, {"z": values})
    built_in = write(tmp_path / "in", {"z": "ndarray:float64:2"}, {"z": pairs})
    rows = np.random.default_rng(0).permutation(4000)

    def seconds(shard: Shard) -> float:
        took = []
        for _ in range(7):
            begin = time.perf_counter()
            shard.columns(rows)
            took.append(time.perf_counter() - begin)
        return min(took)

    assert np.array_equal(own.columns(rows)["z"], np.array(slow.columns(rows)["z"]))
    assert seconds(own) < 5 * seconds(built_in) < seconds(slow)  # about 1 : 1 : 60


def test_a_batch_that_an_encoding_gets_wrong_is_refused(tmp_path: Path) -> None:
    class Wrong(Complex):
        result: Any = None

        def encode_many(self, values: Any) -> Any:
            return self.result

        def decode_many(self, window: Any, offsets: Any, sizes: Any) -> Any:
            return [1]

    wrong = Wrong()
    register_encoding("wrong", wrong)
    for result in (
        np.zeros((1, 16), np.uint8),
        np.zeros((2, 15), np.uint8),
        np.zeros((2, 16)),
        [b"x" * 16],
        [b"x"] * 2,
    ):
        wrong.result = result
        writer = MDSWriter(out=tmp_path / "out", columns={"z": "wrong"}, exist_ok=True)
        with pytest.raises(ValueError, match=r"column 'z': wrong"):
            writer.write_batch({"z": [1, 2]})
    wrong.result = None
    with pytest.raises(FormatError, match=r"shard\.00000\.mds, sample 0, column 'z': .*decode_many gave 1 values"):
        write(tmp_path / "read", {"z": "wrong"}, {"z": [1j, 2j]}).columns(np.arange(2))


class StrangeError(Exception):
    """Of a kind that nobody foresaw."""


@pytest.mark.parametrize("many", [True, False])
def test_whatever_a_decoder_raises_says_file_sample_and_column(tmp_path: Path, many: bool) -> None:
    class Failing(Encoding):
        def encode(self, value: Any) -> bytes:
            return struct.pack("<b", value)

        def decode(self, data: bytes | memoryview) -> Any:
            (number,) = struct.unpack("<b", data)
            if number == 3:
                raise StrangeError("three")
            return number

        def decode_many(self, window: Any, offsets: Any, sizes: Any) -> Any:
            if many:
                raise StrangeError("the batch")

    register_encoding("failing", Failing())
    shard = write(tmp_path, {"a": "int", "x": "failing"}, {"a": range(5), "x": range(5)})
    says = r"shard\.00000\.mds, sample 3, column 'x': cannot be decoded \(StrangeError: three\)"
    for read in (
        lambda: shard.sample(3),
        lambda: shard.columns(np.arange(5)),
        lambda: gather([shard, shard], np.array([0, 1]), np.array([2, 3])),
    ):
        with pytest.raises(FormatError, match=says):
            read()
    if many:
        with pytest.raises(FormatError, match="the batch"):
            shard.columns(np.arange(3))


def test_an_encoding_that_is_registered_again_is_used_at_once(tmp_path: Path) -> None:
    register_encoding("n", encode=lambda value: b"%d" % value, decode=int)
    write(tmp_path, {"x": "n"}, {"x": [1, 2]})
    (entry,) = map(Index.from_file(tmp_path / "index.json").entry, [0])
    before = open_shard(entry, tmp_path)
    register_encoding("another", encode=bytes, decode=bytes)
    same = open_shard(entry, tmp_path)
    assert gather([before, same], np.array([0, 1]), np.array([0, 1]))["x"] == [1, 2]
    register_encoding("n", encode=bytes, decode=lambda data: float(data) / 2, replace=True)
    assert open_shard(entry, tmp_path).columns(np.arange(2))["x"] == [0.5, 1.0]


def test_a_closed_shards_decoder_is_let_go(tmp_path: Path) -> None:
    class Decoder:
        def __call__(self, data: bytes) -> int:
            return len(data)

    decoder = Decoder()
    write(tmp_path, {"x": "str"}, {"x": ["a", "bcd"]})
    entry = Index.from_file(tmp_path / "index.json").entry(0)
    shard = open_shard(entry, tmp_path, decoders={"x": decoder})
    again = open_shard(entry, tmp_path, decoders={"x": decoder})
    assert gather([shard, again], np.array([0, 1]), np.array([0, 1]))["x"] == [1, 3]
    alive = weakref.ref(decoder)
    del shard, again, decoder
    gc.collect()
    assert alive() is None


class Given(Encoding):
    """What `encode`, `encode_many` and `decode_many` give is said by the test."""

    def __init__(self, one: Any = str.encode, many: Any = None, read: Any = None) -> None:
        self.encode = one  # type: ignore[method-assign]
        self.many, self.read = many, read

    def decode(self, data: Any) -> bytes:
        return bytes(data)

    def encode_many(self, values: Any) -> Any:
        return None if self.many is None else self.many

    def decode_many(self, window: Any, offsets: Any, sizes: Any) -> Any:
        return self.read


@pytest.mark.parametrize("in_batch", [False, True])
def test_what_encode_gives_is_stored_as_its_bytes_or_refused(tmp_path: Path, in_batch: bool) -> None:
    scratch = bytearray(1)

    def reused(value: str) -> bytearray:
        scratch[0] = ord(value)
        return scratch

    def stored(encoding: Encoding) -> list[bytes]:
        register_encoding("given", encoding, replace=True)
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        with MDSWriter(out=out, columns={"x": "given"}) as writer:
            if in_batch:
                writer.write_batch({"x": ["a", "b"]})
            else:
                writer.write({"x": "a"})
                writer.write({"x": "b"})
        shard = open_shard(Index.from_bytes((out / "index.json").read_bytes(), "index.json").entry(0), out)
        return [shard.sample(k)["x"] for k in range(2)]

    numbers = np.arange(3, dtype=np.int32)
    assert stored(Given(lambda _: numbers)) == [numbers.tobytes()] * 2
    assert stored(Given(lambda _: memoryview(numbers))) == [numbers.tobytes()] * 2
    assert stored(Given(reused)) == [b"a", b"b"]
    for wrong in ("text", None, [1, 2], 7):
        with pytest.raises(TypeError, match=r"column 'x': encode must give bytes; it gave "):
            stored(Given(lambda _, wrong=wrong: wrong))


@pytest.mark.parametrize("kind", ["functions", "subclass"])
def test_encode_gets_bytes_as_any_other_value(tmp_path: Path, kind: str) -> None:
    if kind == "functions":
        register_encoding("packed", encode=zlib.compress, decode=zlib.decompress)
    else:
        register_encoding("packed", Given(zlib.compress))
    encoder = MdsEncoder({"x": "packed"})
    values = [b"abc", b"abd"]
    wanted = [[zlib.compress(value)] for value in values]
    assert [encoder.encode({"x": value})[1:] for value in values] == wanted
    views = BinaryColumn(map(memoryview, values))
    for column in (values, np.array(values), np.array(values, object), views):
        rows = encoder.encode_batch({"x": column}, 2).rows()
        assert [[bytes(row[4:])] for row in rows] == wanted


@pytest.mark.parametrize("given", [[np.arange(2, dtype=np.int32)] * 2, "ab", 5, iter("ab"), (b"a", b"b"), ["a", "b"]])
def test_what_encode_many_gives_never_makes_a_damaged_shard(tmp_path: Path, given: Any) -> None:
    register_encoding("given", Given(many=given))
    with pytest.raises((TypeError, ValueError)), MDSWriter(out=tmp_path, columns={"x": "given"}) as writer:
        writer.write_batch({"x": ["a", "b"]})
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize("given", [5, "ab", (1, 2), {0: 1, 1: 2}, iter("ab"), np.array(2), [1], np.arange(3)])
def test_decode_many_gives_a_list_or_an_array_of_all_values(tmp_path: Path, given: Any) -> None:
    register_encoding("given", Given(read=given))
    shard = write(tmp_path / "data", {"x": "given"}, {"x": ["a", "b"]})
    with pytest.raises(FormatError, match=r"decode_many gave .*; it must give a list or an array of 2"):
        gather([shard], np.zeros(2, np.int64), np.arange(2))
