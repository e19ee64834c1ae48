"""What Hugging Face's and LitData's own writers wrote reads as their own readers give it."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import StreamingDataset
from lightning_stream.convert import convert

ROWS = 6


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


def plain(value: Any) -> Any:
    if hasattr(value, "getpixel"):
        return value.tobytes()
    return value.tolist() if hasattr(value, "tolist") else value


def read(uri: Path) -> list[dict[str, Any]]:
    dataset = StreamingDataset(str(uri))
    return [{name: plain(value) for name, value in dataset[k].items()} for k in range(dataset.size)]


def png(number: int) -> bytes:
    image = pytest.importorskip("PIL.Image", reason="needs pillow: uv sync --extra images")
    out = io.BytesIO()
    image.new("RGB", (4, 5), (number, 0, 0)).save(out, "PNG")
    return out.getvalue()


def features(hf: Any) -> dict[str, tuple[Any, list[Any], list[Any]]]:
    """A feature, its values, and what they read as."""
    grids = [np.arange(6).reshape(2, 3) + k for k in range(ROWS)]
    pixels = [bytes((k, 0, 0)) * 20 for k in range(ROWS)]
    turns = [[{"role": "user", "content": str(k)}] for k in range(ROWS)]
    return {
        "image": (hf.Image(), [{"bytes": png(k), "path": None} for k in range(ROWS)], pixels),
        "video": (hf.Video(), [{"bytes": b"v", "path": None} for _ in range(ROWS)], [b"v"] * ROWS),
        "label": (hf.ClassLabel(names=["a", "b"]), [0, 1] * 3, [0, 1] * 3),
        "tokens": (hf.Sequence(hf.Value("int32")), [[k] * k for k in range(ROWS)], [[k] * k for k in range(ROWS)]),
        "large": (hf.LargeList(hf.Value("int64")), [[k] for k in range(ROWS)], [[k] for k in range(ROWS)]),
        "grid": (hf.Array2D((2, 3), "int32"), grids, [grid.tolist() for grid in grids]),
        "cube": (hf.Array3D((1, 2, 3), "float32"), [grid[None] for grid in grids], [[grid.tolist()] for grid in grids]),
        "any": (hf.Array2D((None, 3), "int8"), [grid[:1] for grid in grids], [grid[:1].tolist() for grid in grids]),
        "turns": ([{"role": hf.Value("string"), "content": hf.Value("string")}], turns, turns),
        "text": (hf.Value("string"), ["a", None] * 3, ["a", None] * 3),
    }  # fmt: skip


READ = """
import sys
from lightning_stream import StreamingDataset

dataset = StreamingDataset(sys.argv[1], local=sys.argv[2])
print("datasets" in sys.modules, [repr(dataset[k]) for k in range(dataset.size)])
"""


def test_every_feature_of_hugging_face_reads_as_its_values(tmp_path: Path) -> None:
    hf = pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets", exc_type=ImportError)
    about = features(hf)
    data = {name: values for name, (_, values, _) in about.items()}
    rows = hf.Dataset.from_dict(data, features=hf.Features({name: kind for name, (kind, _, _) in about.items()}))
    wanted = [{name: values[k] for name, (_, _, values) in sorted(about.items())} for k in range(ROWS)]
    rows.save_to_disk(str(tmp_path / "disk"), num_shards=2)
    assert read(tmp_path / "disk") == wanted
    assert convert(tmp_path / "disk", tmp_path / "out", num_workers=1).num_samples == {"": ROWS}
    assert read(tmp_path / "out") == wanted
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    assert read(tmp_path / "rows.parquet") == wanted
    chosen = [3, 1, 5]
    rows.select(chosen).save_to_disk(str(tmp_path / "chosen"))
    assert read(tmp_path / "chosen") == [wanted[k] for k in chosen]
    dataset = StreamingDataset(str(tmp_path / "disk"))
    command = [sys.executable, "-c", READ, str(tmp_path / "disk"), str(tmp_path / "alone")]
    alone = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    shown = [repr(dataset[k]) for k in range(ROWS)]
    assert [part.split(" at 0x")[0] for part in alone.split("image")] == [
        part.split(" at 0x")[0] for part in f"False {shown}".split("image")
    ]


LITDATA = """
import sys
import numpy as np
import litdata


def mixed(k):
    return {"s": f"é {k}", "b": bytes([k]), "flag": k % 2 == 0, "x": k / 4, "n": k}


def nested(k):
    return {"ids": list(range(k)), "words": ["a"] * k, "meta": {"a": k, "b": {"c": "x"}}}


def binary(k):
    dicts = [{"a": k, "b": None, "c": "é", "d": 0.5, "e": True}]
    return {"grid": np.arange(k + 1), "dicts": dicts, "words": ["é"] * k, "flags": [True], "more": {"a": [1, "b"]}}


def absent(k):
    return {"n": k, "t": None if k == 1 else "t", **({"late": k / 2} if k > 3 else {})}


def numbers(k):
    return {"empty": [k] * (k - 3), "mixed": [k] if k < 4 else [k + 0.5]}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        function, _, compression = name.partition(" ")
        litdata.optimize(
            fn=globals()[function], inputs=list(range(6)), output_dir=name, chunk_size=4, num_workers=1,
            compression=compression or None,
        )
        dataset = litdata.StreamingDataset(name, shuffle=False)
        rows = [{key: getattr(value, "tolist", lambda: value)() for key, value in dataset[k].items()} for k in range(6)]
        print("rows", [name, rows])
"""


def flat(row: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The values of a dict in dicts, by names that dots join."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["absent", "nested zstd"], marks=pytest.mark.slow),
        pytest.param(["mixed", "binary", "numbers", "nested", "binary zstd"], marks=pytest.mark.nightly),
    ],
    ids=["some", "others"],
)
def test_what_litdata_optimized_reads_as_its_own_reader_gives_it(tmp_path: Path, names: list[str]) -> None:
    pytest.importorskip("litdata", reason="litdata is not installed: pip install litdata zstd", exc_type=ImportError)
    if find_spec("zstd") is None:
        names = [name for name in names if not name.endswith("zstd")]
    (tmp_path / "write.py").write_text(LITDATA)
    command = [sys.executable, str(tmp_path / "write.py"), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = dict(ast.literal_eval(line[5:]) for line in done.stdout.splitlines() if line.startswith("rows ["))
    assert list(written) == names
    for name, rows in written.items():
        wanted = [flat(row) for row in rows]
        keys = dict.fromkeys(key for row in wanted for key in row)
        wanted = [{**keys, **row} for row in wanted]
        assert read(tmp_path / name) == wanted, name
        convert(tmp_path / name, tmp_path / f"{name} converted", num_workers=1)
        assert read(tmp_path / f"{name} converted") == wanted, name
