"""Text to blocks of tokens in shards, by one process and by several: the same bytes, and how fast.

PYTHONPATH=. python benchmarks/tokenise_text.py                      # 8 files of gzipped JSON lines, as C4 has them
PYTHONPATH=. python benchmarks/tokenise_text.py --tokenizer tokenizer.json --workers 1 2 4
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from recipes.data.synthetic import story
from recipes.data.text import BYTES, TextData


def write_texts(folder: Path, files: int, documents: int) -> int:
    """JSON lines of synthetic documents, about 1.2 kB each; their characters in all."""
    characters = 0
    for file in range(files):
        lines = []
        for number in range(documents):
            text = " ".join(story(4 * (file * documents + number) + part)[0]["text"] for part in range(4))
            characters += len(text)
            lines.append(json.dumps({"text": text, "url": "x"}) + "\n")
        with gzip.open(folder / f"c4-train.{file:05}.json.gz", "wt", compresslevel=1) as out:
            out.writelines(lines)
    with gzip.open(folder / "c4-validation.00000.json.gz", "wt") as out:
        out.write(json.dumps(story(0)[0]) + "\n")
    return characters


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.zstd")):
        total.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return total.hexdigest()


def cpu_s() -> float:
    return sum(
        part
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        for part in (resource.getrusage(who).ru_utime, resource.getrusage(who).ru_stime)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--documents", type=int, default=3000, help="in each file")
    parser.add_argument("--tokenizer", default=BYTES)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        texts, out = Path(temporary) / "texts", Path(temporary) / "out"
        texts.mkdir()
        megabytes = write_texts(texts, options.files, options.documents) / 1e6
        files = {"source": str(texts), "files": {"train": "c4-train.*", "val": "c4-validation.*"}}
        settings = {"remote": str(out), "local": str(out), "tokenizer": options.tokenizer, "seq_len": 1024}
        seconds: dict[int, list[tuple[float, float]]] = {workers: [] for workers in options.workers}
        digests = set()
        for _ in range(options.rounds):
            for workers, taken in seconds.items():
                made = TextData(**files, **settings, size_limit="8mb", conversion_workers=workers)
                wall, cpu = time.perf_counter(), cpu_s()
                made.convert_source()
                taken.append((time.perf_counter() - wall, cpu_s() - cpu))
                digests.add(digest(Path(made.uri)))
                shutil.rmtree(out)
    print(f"{megabytes:.0f} MB of text in {options.files} files, tokenizer {options.tokenizer}; medians")
    for workers, taken in seconds.items():
        wall, cpu = (statistics.median(one[part] for one in taken) for part in (0, 1))
        print(f"{workers} processes: {wall:6.2f} s, {megabytes / wall:6.1f} MB/s; {cpu:6.2f} CPU-s")
    print("the same bytes" if len(digests) == 1 else "DIFFERENT bytes")


if __name__ == "__main__":
    main()
