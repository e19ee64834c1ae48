"""The data that the runs under a trainer train on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the trainers need torch: uv sync")


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """167 samples in shards of about a dozen."""
    from support.resume_contract import write_shards

    return write_shards(tmp_path_factory.mktemp("shards"))
