"""The GPT sees what it may see, counts what it foretells, and learns under the same `train.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from lightning_stream.errors import LightningStreamError
from lightning_stream.recipes import training
from lightning_stream.recipes.checks import find_problems
from lightning_stream.recipes.evaluation import Tally
from lightning_stream.recipes.gpt import GPT
from lightning_stream.recipes.image_classifier import ImageClassifier
from lightning_stream.recipes.language_model import LanguageModel
from lightning_stream.recipes.text import text_data
from lightning_stream.recipes.tokens import PADDING

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TINY = [
    "data=text",
    "model=gpt",
    "scale=cpu",
    "num_threads=1",
    "data.generated_count=80",
    "data.block=64",
    "data.size_limit=16kb",
    "data.num_workers=0",
    "model.width=32",
    "model.depth=2",
    "model.heads=2",
    "model.learning_rate=0.01",
    "model.sample_tokens=40",
    "trainer.max_epochs=2",
    "~callbacks.progress",
    "trainer.enable_progress_bar=false",
]


@pytest.fixture
def network() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=50, block=16, width=32, depth=2, heads=4).double().eval()


def test_a_document_is_read_as_if_it_were_alone(network: GPT) -> None:
    tokens = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[3] * 5 + [4] * 8 + [7] * 3])
    together = network(tokens, documents)
    for begin, end in ((0, 5), (5, 13), (13, 16)):
        torch.testing.assert_close(together[:, begin:end], network(tokens[:, begin:end]))
    assert not torch.allclose(together[:, 5:], network(tokens)[:, 5:])  # where they are one, they see each other


def test_no_token_sees_what_comes_after_it(network: GPT) -> None:
    tokens = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    torch.testing.assert_close(network(changed)[:, :9], network(tokens)[:, :9])
    assert not torch.allclose(network(changed)[:, 9:], network(tokens)[:, 9:])


class Uniform(torch.nn.Module):
    """Finds each token equally likely."""

    block = 8

    def forward(self, tokens: torch.Tensor, _documents: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 257)


def test_a_document_s_end_is_foretold_and_padding_is_not() -> None:
    model = LanguageModel()
    model.boundary, model.network = 256, Uniform()  # type: ignore[assignment]
    tokens = torch.tensor([[5, 6, 256, 7, 8, 256, 256, 256]], dtype=torch.uint16)
    documents = torch.tensor([[0, 0, 1, 1, 1, PADDING, PADDING, PADDING]], dtype=torch.int32)
    judged = model.judge({"tokens": tokens, "documents": documents})
    counted = Tally.of(judged.tally.sum(0))
    assert counted.total == 4  # 6, the end of the first document, 7, 8
    assert counted.loss == pytest.approx(math.log(257), abs=1e-6)
    assert judged.losses.tolist() == pytest.approx([math.log(257)])
    assert model.measures(counted)["perplexity"] == pytest.approx(257, rel=1e-5)


def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    data = text_data(generated_count=20, block=32, remote=str(tmp_path / "shards"), local=str(tmp_path / "cache"))
    states = []
    for noise in range(2):
        torch.manual_seed(noise)
        model = LanguageModel(width=16, depth=1, heads=2, seed=5)
        model.build(data)
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def _train(root: Path, name: str, *more: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("train", overrides=[*TINY, f"root={root}", f"name={name}", *more])
    training.train(config)
    told: dict[str, Any] = json.loads((root / name / "summary.json").read_text())
    return told


def test_train_py_learns_from_generated_text_and_writes_some(tmp_path: Path) -> None:
    told = _train(tmp_path, "whole")
    first, last = told["history"]["0"], told["history"]["1"]
    assert last["val/loss"] < first["val/loss"] < math.log(257)
    assert last["val/perplexity"] == pytest.approx(math.exp(last["val/loss"]))
    written = Path(told["places"]["sample"]).read_text(encoding="utf-8")
    assert written
    assert any("stories made from a grammar" in note for note in told["notes"])


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_resumed_at_any_checkpoint_ends_with_the_same_weights_and_measures(tmp_path: Path) -> None:
    kept = ("callbacks.last.every_n_train_steps=7", "callbacks.last.save_top_k=-1", "callbacks=trained_ids")
    whole = _train(tmp_path, "whole", *kept)
    (checkpoint,) = (tmp_path / "whole" / "checkpoints").glob("*step=7.ckpt")
    resumed = _train(tmp_path, "resumed", *kept, f'ckpt_path="{checkpoint}"')
    assert resumed["history"] == whole["history"]
    states = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True) for name in ("whole", "resumed")
    ]
    assert states[0]["global_step"] == states[1]["global_step"] > 7
    for name, value in states[0]["state_dict"].items():
        assert torch.equal(value, states[1]["state_dict"][name])


def test_a_model_that_does_not_fit_the_data_says_what_would(tmp_path: Path) -> None:
    data = text_data(generated_count=20, block=32, remote=str(tmp_path / "shards"), local=str(tmp_path / "cache"))
    with pytest.raises(LightningStreamError, match=r"learns from ImageData; found TextData.*model=gpt"):
        ImageClassifier().build(data)


def test_text_that_is_not_there_is_told_before_work_starts(tmp_path: Path) -> None:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("train", overrides=[*TINY, f"root={tmp_path}", "name=x", "data.source=genrated"])
    (problem,) = find_problems(config)
    assert problem.startswith("data.source: is 'generated' or a path; there is nothing at ")
    assert problem.endswith("Did you mean 'generated'?")
