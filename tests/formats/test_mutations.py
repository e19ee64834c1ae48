"""Thousands of damaged indexes and shards: an error of our tree, or samples; bounded memory; never anything else.

The default run takes some hundreds; `-m slow` takes 10,000.
"""

from __future__ import annotations

import io
import json
import random
import resource
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_stream.errors import FormatError
from lightning_stream.formats.codecs import decompress_file
from lightning_stream.formats.hashing import digest_file
from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import gather, open_shard
from lightning_stream.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter

COMPRESSIONS = (None, "br:3", "bz2", "gz", "snappy", "zstd", "lz4")
ROW_WRITERS: dict[str, Any] = {"json": JSONWriter, "csv": CSVWriter, "tsv": TSVWriter}
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1.5, 2**31, 2**32, 2**47, 2**63, 2**64, 10**40, 1e308, "", "x", "..", "a/../b", "/etc/passwd",
    "nope", "ndarray:int32:-1", "ndarray:x", "ndarray:int32:" + "9" * 50, "pkl", "zstd:99", "\x00", "é", "\ud800",
    "x" * 5000, [], {}, [[]], {"a": {}}, [None], ["int"], [8], "json", "mds", "xsv",
)  # fmt: skip


def image(kind: str) -> Any:
    out = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(out, kind)
    return out.getvalue()


SAMPLE: dict[str, tuple[str, Any]] = {
    "a": ("bytes", b"abc"), "b": ("str", "é" * 9), "c": ("int", 5), "d": ("uint16", 7), "e": ("float16", 0.5),
    "f": ("str_int", 10**30), "g": ("str_float", 0.25), "h": ("str_decimal", Decimal("1.5")),
    "i": ("ndarray", np.ones((2, 3))),
    "j": ("ndarray:int16", np.arange(4, dtype=np.int16)), "k": ("ndarray:float32:3", np.ones(3, np.float32)),
    "l": ("pil", Image.new("RGB", (4, 4))), "m": ("jpeg", image("JPEG")), "n": ("png", image("PNG")),
    "o": ("list[jpeg]", [image("JPEG")]), "p": ("list[pil]", [Image.new("L", (3, 3))]), "q": ("json", {"k": [1, None]}),
    "r": ("tensors", {"x": np.ones((2, 2)), "y": np.zeros(3, np.int8)}), "s": ("video", b"film"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("good")
    made = []
    columns = {name: encoding for name, (encoding, _) in SAMPLE.items()}
    for compression in COMPRESSIONS:
        out = root / f"mds-{compression}".replace(":", "")
        with MDSWriter(out=out, columns=columns, compression=compression) as writer:
            for _ in range(4):
                writer.write({name: value for name, (_, value) in SAMPLE.items()})
        made.append(out)
    fixed = root / "fixed"
    with MDSWriter(out=fixed, columns={"n": "int", "v": "ndarray:int8:5"}, size_limit=250) as writer:
        for k in range(30):
            writer.write({"n": k, "v": np.full(5, k, np.int8)})
    made.append(fixed)
    rows: dict[str, Any] = dict(ROW_WRITERS)
    for name, kind in rows.items():
        for compression in (None, "zstd"):
            with kind(out=root / f"{name}-{compression}", columns={"i": "int", "f": "float", "t": "str"}) as writer:
                for k in range(6):
                    writer.write({"i": k, "f": k / 2, "t": f"text {k}"})
            made.append(root / f"{name}-{compression}")
    with XSVWriter(out=root / "xsv", columns={"i": "int", "t": "str"}, separator="||") as writer:
        writer.write({"i": 1, "t": "a"})
    return [*made, root / "xsv"]


def mutate_bytes(draw: random.Random, data: bytes) -> bytes:
    altered = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(altered) + 1)
        kind = draw.randrange(6)
        if kind == 0:
            altered[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            altered[at : at + 4] = draw.choice((0, 1, 2**31, 2**32 - 1, len(data), len(data) + 1)).to_bytes(4, "little")
        elif kind == 2:
            del altered[at : at + draw.randint(1, 40)]
        elif kind == 3:
            altered[at:at] = draw.choice(
                (b"\0" * 8, b"\xff" * 9, b'"', b"{", b"[" * 60, b" " * 99, bytes(altered[:30]))
            )
        elif kind == 4 and altered:  # in the head, where the offsets are
            at = 4 * draw.randrange(min(8, max(1, len(altered) // 4)))
            altered[at : at + 4] = draw.randrange(2**32).to_bytes(4, "little")
        else:
            del altered[at:]
    return bytes(altered)


def mutate_json(draw: random.Random, data: bytes) -> bytes:
    """One value somewhere in the index becomes another, or is left out, or is there twice."""
    value = json.loads(data)
    place: Any = draw.choice((value, *value["shards"] * 6)) if value["shards"] else value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key: Any = draw.choice(keys)
        if not place[key] or not isinstance(place[key], (dict, list)) or draw.random() < 0.4:
            break
        place = place[key]
    action = draw.randrange(4)
    if action == 0:
        del place[key]
    elif action == 1 and isinstance(place, list):
        place.append(place[key])
    else:
        place[key] = draw.choice(HOSTILE)
    text = json.dumps(value)
    if action == 3:
        text = text.replace(
            '"version": 2', draw.choice(('"version": NaN', '"version": 2, "version": 3', '"version": 2e0'))
        )
    return text.encode("utf-8", "surrogatepass")


def read_all(folder: Path, local: Path, check: bool) -> str:
    """What reading everything comes to: "read", or the name of the error."""
    try:
        index = Index.from_file(folder / "index.json")
        assert index.num_samples < 10**9  # or an order over it would take all the memory
        shards = []
        for entry in map(index.entry, range(len(index))):
            for raw, packed in entry.files:
                if not (folder / (packed or raw).basename).is_file():
                    return "another file is named"
                target = local / "raw" / raw.basename
                target.parent.mkdir(parents=True, exist_ok=True)
                if packed is None:
                    target.write_bytes((folder / raw.basename).read_bytes())
                else:
                    decompress_file(entry.schema.compression or "", folder / packed.basename, target, raw.num_bytes)
                names = [name for name in raw.hashes if name == "xxh3_64"]
                if check and digest_file(names, target) != {name: raw.hashes[name] for name in names}:
                    return "DigestError"
            shards.append(open_shard(entry, local / "raw", allow_unsafe_types=False))
        for shard in shards:
            rows = np.arange(shard.num_samples)
            gather([shard], np.zeros(len(rows), np.int64), rows)
            for k in rows.tolist():
                shard.sample(k)
    except FormatError:
        return "FormatError"
    except ValueError as error:
        if "allow_unsafe_types" in str(error):  # a setting of the caller's
            return "unsafe"
        raise
    return "read"


def attack(folders: list[Path], tmp_path: Path, count: int, seed: int) -> Counter[str]:
    draw, results = random.Random(seed), Counter[str]()
    for number in range(count):
        folder = draw.choice(folders)
        names = sorted(path.name for path in folder.iterdir())
        target = "index.json" if draw.random() < 0.45 else draw.choice(names)
        data = (folder / target).read_bytes()
        as_json = target == "index.json" and draw.random() < 0.7
        altered = mutate_json(draw, data) if as_json else mutate_bytes(draw, data)
        here = tmp_path / "here"
        here.mkdir(exist_ok=True)
        for name in names:
            (here / name).write_bytes(altered if name == target else (folder / name).read_bytes())
        check = target != "index.json" and draw.random() < 0.3
        # the index follows the new size, so that the bytes are looked at, not the size alone
        if target != "index.json" and draw.random() < 0.7:
            text = (here / "index.json").read_text()
            (here / "index.json").write_text(text.replace(f'"bytes": {len(data)},', f'"bytes": {len(altered)},'))
        try:
            outcome = read_all(here, tmp_path, check)
        except Exception as error:
            raise AssertionError(f"seed {seed}, number {number}: {target} of {folder.name}: {error!r}") from error
        if check and altered != data:
            assert outcome != "read", f"seed {seed}, number {number}: {target} of {folder.name}"
        results[("index: " if target == "index.json" else "shard: ") + outcome] += 1
        for name in names:
            (here / name).unlink()
    return results


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("seed", range(2))
def test_damage_is_an_error_of_ours_or_samples(folders: list[Path], tmp_path: Path, seed: int) -> None:
    assert attack(folders, tmp_path, 300, seed).total() == 300


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_ten_thousand_damages_take_no_memory(folders: list[Path], tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = attack(folders, tmp_path, 10_000, 1000)
    print(dict(results), "MiB more:", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 2, "shards": ' + "[" * 100_000, '{"shards": [], "version": 2, "deep": ' + '{"a":' * 100_000,
        '{"version": ' + "9" * 5000 + ', "shards": []}', '{"version": NaN, "shards": []}',
        '{"version": 2, "shards": [], "version": 3}', '{"version": 2, "shards": [' + "1," * 1000 + "1]}",
        " " * 3_000_000, "\ufeff", '{"version": 2, "shards": "\\ud800"}', '{"version": true, "shards": []}',
        "<html>please log in</html>", '{"version": 2, "shards": []} {}', '{"version": 2.5, "shards": []}',
    ],
)  # fmt: skip
def test_an_index_bomb_is_a_format_error_that_names_the_index(text: str) -> None:
    with pytest.raises(FormatError, match="there/index"):
        Index.from_bytes(text.encode(), "there/index.json")


def test_a_byte_order_mark_and_blanks_are_read(folders: list[Path]) -> None:
    for folder in folders:
        data = (folder / "index.json").read_bytes()
        plain = Index.from_bytes(data, "x")
        marked = Index.from_bytes(b"\xef\xbb\xbf" + b" " * 100_000 + data + b"\n" * 100_000, "x")
        assert marked.digest == plain.digest
        assert [marked.entry(k) for k in range(len(marked))] == [plain.entry(k) for k in range(len(plain))]
