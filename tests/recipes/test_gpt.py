"""The GPT sees what it may see, its metrics count tokens, and `train.py` trains and resumes it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
from support.recipe_runs import train

from lightning_stream import Packing, StreamingDataset, read_position
from recipes.data.text import TextData
from recipes.models.gpt import GPT, LanguageModel, Perplexity

TINY = (
    "data=text", "data.synthetic_count=80", "data.seq_len=64", "data.size_limit=16kb", "data.num_workers=0",
    "model.d_model=32", "model.n_layers=1", "model.n_heads=2", "model.learning_rate=0.01", "model.sample_tokens=20",
    "trainer.max_epochs=2",
)  # fmt: skip


@pytest.fixture
def network() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=50, seq_len=16, d_model=32, n_layers=2, n_heads=4).double().eval()


def test_a_document_is_read_as_if_it_were_alone(network: GPT) -> None:
    tokens = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[3] * 5 + [4] * 8 + [7] * 3])
    together = network(tokens, documents)
    for begin, end in ((0, 5), (5, 13), (13, 16)):
        torch.testing.assert_close(together[:, begin:end], network(tokens[:, begin:end]))
    assert not torch.allclose(together[:, 5:], network(tokens)[:, 5:])


def test_no_token_sees_what_comes_after_it(network: GPT) -> None:
    tokens = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    torch.testing.assert_close(network(changed)[:, :9], network(tokens)[:, :9])
    assert not torch.allclose(network(changed)[:, 9:], network(tokens)[:, 9:])


class Uniform(torch.nn.Module):
    """Finds every token equally likely."""

    def forward(self, tokens: torch.Tensor, _documents: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 257)


def test_the_end_of_a_document_is_predicted_and_padding_is_not() -> None:
    model = LanguageModel()
    model.bos_token, model.network = 256, Uniform()  # type: ignore[assignment]
    tokens = torch.tensor([[5, 6, 256, 7, 8, 256, 256, 256]], dtype=torch.uint16)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2]], dtype=torch.int32)
    output = model.compute_loss({"input_ids": tokens, "document_ids": documents, "num_tokens": torch.tensor([5])})
    assert output.losses.tolist() == pytest.approx([math.log(257)])
    model.update_metrics("val", output)
    assert int(model.metrics_of("val")["loss"].sums[1]) == 4  # 6, the end of the first document, 7, 8
    measured = model.end_pass("val", 0)
    assert measured["val/loss"] == pytest.approx(math.log(257), abs=1e-6)
    assert measured["val/perplexity"] == pytest.approx(257, rel=1e-5)


def test_a_perplexity_too_large_for_a_float_is_inf() -> None:
    metric = Perplexity()
    metric.update(torch.tensor([800.0]))
    assert float(metric.compute()) == math.inf


def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    data = TextData(remote=str(tmp_path), local=str(tmp_path), seq_len=32)
    states = []
    for noise in range(2):
        torch.manual_seed(noise)
        model = LanguageModel(d_model=16, n_layers=1, n_heads=2, seed=5)
        model.build(data)
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_ends_with_the_weights_and_metrics_of_an_unbroken_one(tmp_path: Path) -> None:
    kept = ("callbacks.last.every_n_train_steps=7", "callbacks.last.save_top_k=-1")
    whole = train(tmp_path / "whole", *TINY, *kept)
    first, last = whole["history"]["0"], whole["history"]["1"]
    assert last["val/loss"] < first["val/loss"] < math.log(257)
    assert last["val/perplexity"] == pytest.approx(math.exp(last["val/loss"]))
    assert "synthetic stories" in whole["notes"][0]
    assert Path(whole["paths"]["sample"]).read_text(encoding="utf-8")
    (checkpoint,) = (tmp_path / "whole" / "checkpoints").glob("*step=7.ckpt")
    resumed = train(tmp_path / "resumed", *TINY, *kept, f'ckpt_path="{checkpoint}"')
    assert resumed["history"] == whole["history"]
    paths = [tmp_path / name / "checkpoints" / "last.ckpt" for name in ("whole", "resumed")]
    states = [torch.load(path, weights_only=True) for path in paths]
    assert states[0]["global_step"] == states[1]["global_step"] > 7
    assert all(torch.equal(value, states[1]["state_dict"][name]) for name, value in states[0]["state_dict"].items())


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_replay_with_dropout_ends_with_the_weights_of_a_run_that_never_had_a_document(tmp_path: Path) -> None:
    settings = (*TINY, "data.pack_window=8", "data.num_canonical_nodes=1", "model.dropout=0.2")
    settings = (*settings, "callbacks.last.every_n_train_steps=4", "callbacks.last.save_top_k=-1")
    whole = train(tmp_path / "whole", *settings)
    files = sorted((tmp_path / "whole" / "checkpoints").glob("*step=*.ckpt"))
    shards = Path(whole["paths"]["shards"]) / "train"
    dataset = StreamingDataset(
        local=shards, shuffle=True, shuffle_seed=1, num_canonical_nodes=1, pack=Packing(row_length=64, window=8)
    )
    states = [read_position(file) for file in files]
    plans = {number: dataset.plan_replay([number], states) for number in range(dataset.size)}
    late = max(plans, key=lambda number: plans[number].position or 0)  # about 1 % of the documents
    checkpoint = plans[late].checkpoint
    assert checkpoint is not None
    assert states[checkpoint]["position"] > 0
    forget = f"data.forget=[{late}]"
    train(tmp_path / "again", *settings, forget, f'ckpt_path="{files[checkpoint]}"')
    train(tmp_path / "never", *settings, forget)
    paths = [tmp_path / name / "checkpoints" / "last.ckpt" for name in ("whole", "again", "never")]
    first, again, never = (torch.load(path, weights_only=True)["state_dict"] for path in paths)
    assert all(torch.equal(value, never[name]) for name, value in again.items())
    assert not all(torch.equal(value, never[name]) for name, value in first.items())


def test_a_gpt_learns_from_a_mixture(tmp_path: Path) -> None:
    counts = [f"data.parts.{name}.synthetic_count=40" for name in ("stories", "more_stories")]
    settings = [one for one in TINY if one != "data=text" and "max_epochs" not in one]
    summary = train(tmp_path / "mix", "data=mix", *counts, *settings, "trainer.max_epochs=1")
    assert "a mixture of stories (" in summary["notes"][0]
    assert summary["history"]["0"]["val/loss"] < math.log(257)
