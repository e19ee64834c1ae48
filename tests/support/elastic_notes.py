"""What the workers of `elastic_job` trained on, as their notes say."""

from __future__ import annotations

import json
import re
from pathlib import Path

WAITS = {4: 7, 2: 25}
"""At which step a world of this size waits until it is changed: in the first epoch, and in the second one."""
STEPS = 60
_NAME = re.compile(r"(\d+)-from-(\d+)-of-(\d+)-rank-\d+\.jsonl")


def read_notes(folder: Path) -> tuple[list[int], list[list[int]]]:
    """The worlds' sizes as they followed, and the sorted samples of each step that the last checkpoint stands on."""
    starts: dict[int, list[Path]] = {}
    for path in folder.glob("*.jsonl"):
        starts.setdefault(int(path.name.split("-")[0]), []).append(path)
    sizes, trained = [], {}
    for start in sorted(starts):
        match = _NAME.fullmatch(starts[start][0].name)
        assert match
        first, size = int(match[2]), int(match[3])
        sizes.append(size)
        trained = {step: samples for step, samples in trained.items() if step < first}  # later ones are trained again
        for path in starts[start]:
            for line in path.read_text().splitlines():
                step, samples = json.loads(line)
                trained.setdefault(step, []).extend(samples)
    return sizes, [sorted(trained[step]) for step in sorted(trained)]
