"""Networks, their weights from files, and the learning rate's course."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes.task import rise_and_fall
from lightning_stream.recipes.weights import build_network, load_weights

SMALL = {"width_mult": 0.25}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    state = build_network("mobilenet_v2", 5, SMALL).state_dict()
    path = tmp_path_factory.mktemp("weights") / "five.pt"
    torch.save(state, path)
    return path, state


def equal_names(network: torch.nn.Module, state: dict[str, torch.Tensor]) -> set[str]:
    return {
        name for name, value in network.state_dict().items() if torch.equal(value, state.get(name, torch.tensor([])))
    }


def test_weights_of_the_same_network_are_taken_whole(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    network = build_network("mobilenet_v2", 5, SMALL)
    load_weights(network, saved[0])
    assert equal_names(network, saved[1]) == set(saved[1])


def test_another_number_of_classes_gets_a_fresh_head(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    network = build_network("mobilenet_v2", 3, SMALL)
    load_weights(network, saved[0])
    assert set(saved[1]) - equal_names(network, saved[1]) == {"classifier.1.weight", "classifier.1.bias"}


def test_a_checkpoint_of_our_classifier_serves_as_weights(saved: tuple[Path, Any], tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {f"network.{name}": value for name, value in saved[1].items()}, "epoch": 3}, path)
    network = build_network("mobilenet_v2", 5, SMALL)
    load_weights(network, path)
    assert equal_names(network, saved[1]) == set(saved[1])


def test_weights_of_another_network_are_refused(saved: tuple[Path, Any]) -> None:
    with pytest.raises(FormatError, match="must fit"):
        load_weights(build_network("mobilenet_v2", 5, {}), saved[0])  # four times as wide


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code from a file of weights ran",)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil.pt"
    torch.save({"a": Evil()}, path)
    with pytest.raises(FormatError, match="weights_only"):
        load_weights(build_network("mobilenet_v2", 5, SMALL), path)
    path.write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(FormatError, match="weights_only"):
        load_weights(build_network("mobilenet_v2", 5, SMALL), path)
    assert capsys.readouterr().out == ""


def test_a_missing_file_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is none at"):
        load_weights(build_network("mobilenet_v2", 5, SMALL), tmp_path / "none.pt")


def test_the_learning_rate_rises_then_falls() -> None:
    course = [rise_and_fall(step / 100, 0.2) for step in range(101)]
    assert course[:21] == sorted(course[:21])
    assert course[20:] == sorted(course[20:], reverse=True)
    assert course[20] == pytest.approx(1.0)
    assert 0 < course[100] < 0.01 < course[0] < 0.1
