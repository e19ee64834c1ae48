"""Folders that Hugging Face's ``save_to_disk`` made."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lightning_stream.convert.files import SourceFile

_STATE, _SPLITS = "state.json", "dataset_dict.json"


def saved_files(found: Sequence[SourceFile]) -> list[SourceFile]:
    """The Arrow files of a saved dataset, in its order; any other files as they are.

    Raises:
        ValueError: It holds several splits.
    """
    by_name = {file.name: file for file in found}
    if _SPLITS in by_name:
        splits = json.loads(by_name[_SPLITS].read())["splits"]
        raise ValueError(
            f"{by_name[_SPLITS].root} holds the splits {', '.join(splits)}; convert each by itself: "
            f"{by_name[_SPLITS].root}/{splits[0]}."
        )
    if _STATE not in by_name:
        return list(found)
    state = json.loads(by_name[_STATE].read())
    names = [each["filename"] for each in state.get("_data_files", ())]
    return [by_name[name] for name in names] if names and all(name in by_name for name in names) else list(found)
