"""Data as people have it: loaders, mappings, models of transformers, seeds; and warnings where they can be seen."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import foof
import oracle
from cases import mlp


def problem(N: int = 10) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return mlp(4, 6, 3).double(), torch.randn(N, 4).double(), torch.randint(0, 3, (N,))


class Keywords(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: Tensor) -> Tensor:
        return self.inner(features)


def loader(x: Tensor, y: Tensor, form: str, batch_size: int = 4) -> tuple[DataLoader, Any]:
    """A loader of 10 datapoints in three batches, and what wraps the model for it."""
    if form == "mapping":
        data = [{"features": a, "labels": b} for a, b in zip(x, y, strict=True)]
        return DataLoader(data, batch_size=batch_size), Keywords
    if form == "three":
        return DataLoader(TensorDataset(0.5 * x, 0.5 * x, y), batch_size=batch_size), Sum
    return DataLoader(TensorDataset(x, y), batch_size=batch_size), lambda model: model


class Sum(Keywords):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        return self.inner(a + b)


@pytest.mark.parametrize("form", ["pairs", "mapping", "three"])
def test_a_data_loader_is_the_data_it_loads(form: str) -> None:
    model, x, y = problem()
    batches, wrap = loader(x, y, form)
    wrapped = wrap(model)
    for labels in ("full", "empirical"):
        ours, theirs = foof.Fisher(wrapped, batches, labels), foof.Fisher(model, x, labels, y)
        assert ours.N == 10
        assert oracle.relative_error(ours.dense(), theirs.dense()) < 1e-12
    assert foof.Fisher(wrapped, batches, "full", batch_size=3).N == 10
    for fit in (foof.laplace.fit, foof.laplace.fit_kronecker):
        ours, theirs = fit(wrapped, batches, labels="full"), fit(model, x, y, labels="full")
        assert ours.prior_precision == pytest.approx(theirs.prior_precision, rel=1e-6)
        assert ours.log_marginal_likelihood().item() == pytest.approx(theirs.log_marginal_likelihood().item())
        if form == "pairs":
            torch.testing.assert_close(ours.predict(batches), theirs.predict(x), rtol=1e-5, atol=1e-6)
    F, ewc = foof.Fisher(model, x, "full"), foof.ewc.EWC(wrapped, 2.0)
    ewc.consolidate(batches, labels="full")
    delta = torch.randn(F.P, dtype=torch.float64)
    with torch.no_grad():
        for p, d in zip(F.params, F.as_list(delta), strict=True):
            p += d
    assert ewc.penalty().item() == pytest.approx(F.quadratic(delta).item())


def test_labels_of_a_loader_come_in_its_batches() -> None:
    model, x, y = problem()
    batches, _ = loader(x, y, "pairs")
    with pytest.raises(ValueError, match="leave out y"):
        foof.Fisher(model, batches, "full", y)
    without = DataLoader(TensorDataset(x), batch_size=4)
    assert foof.Fisher(model, without).N == 10
    for fit in (foof.laplace.fit, foof.laplace.fit_kronecker):
        with pytest.raises(ValueError, match=r"must give pairs \(inputs, labels\)"):
            fit(model, without)
        with pytest.raises(ValueError, match=r"needs the data's labels.*y=None with x of type Tensor"):
            fit(model, x, None)
    with pytest.raises(ValueError, match="no batch"):
        foof.Fisher(model, DataLoader([]))


def test_a_long_loader_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    fake = types.ModuleType("tqdm")
    fake.tqdm = lambda batches, **options: shown.append(options) or batches  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", fake)
    model, x, y = problem()
    foof.Fisher(model, loader(x, y, "pairs")[0])
    assert shown[0]["total"] == 3
    assert shown[0]["delay"] > 0
    monkeypatch.setitem(sys.modules, "tqdm", None)  # not installed
    assert foof.Fisher(model, loader(x, y, "pairs")[0]).N == 10


def test_batches_of_different_lengths_are_refused_with_what_to_do() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
    batches = DataLoader([torch.randint(7, (5,)), torch.randint(7, (6,))], batch_size=1)
    with pytest.raises(ValueError, match="pad them to one length"):
        foof.Fisher(model, batches)


# --- transformers ---------------------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    """What the model itself returns is an output object; for the oracle, its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(input_ids=x).logits


def stock(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "GPT-2":
        config = transformers.GPT2Config(vocab_size=9, n_positions=5, n_embd=4, n_layer=1, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                                         max_position_embeddings=5, num_labels=3)  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
    return model.double().eval()


@pytest.mark.filterwarnings("ignore:the Fisher does not cover")
@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_stock_models_of_transformers(name: str, rows: int) -> None:
    """Position embeddings see (1, L), the head of GPT-2 is its embedding, outputs are objects with logits; 5 tokens."""
    model, x = stock(name), torch.randint(0, 9, (rows, 5))
    inputs = transformers.BatchEncoding({"input_ids": x, "attention_mask": torch.ones_like(x)})
    F = foof.Fisher(model, inputs, "full")
    names = set(F.names)
    assert {n for n in names if "position" in n or "wpe" in n}
    assert oracle.relative_error(F.dense(), oracle.full_fisher(Logits(model), x, F.params, "categorical")) < 1e-9
    labels = x if name == "GPT-2" else torch.arange(rows) % 3
    posterior = foof.laplace.fit(model, inputs, labels, prior_precision=1.0)
    assert posterior.predict(inputs).shape == model(**inputs).logits.shape
    batches = DataLoader([{"input_ids": a, "labels": b} for a, b in zip(x, labels, strict=True)], batch_size=2)
    assert oracle.relative_error(foof.Fisher(model, batches, "full").dense(), F.dense()) < 1e-9
    opt = foof.NaturalGradient(model, lr=0.1, damping=0.1, fisher="full")
    opt.update_curvature(inputs=inputs)
    loss = model(**inputs, labels=labels).loss
    g = torch.cat([each.flatten() for each in torch.autograd.grad(loss, F.params, retain_graph=True)])
    before = torch.cat([p.detach().flatten().clone() for p in F.params])
    loss.backward()
    opt.step()
    moved = torch.cat([p.detach().flatten() for p in F.params]) - before
    expected = -0.1 * torch.linalg.solve(F.dense() + 0.1 * torch.eye(F.P, dtype=torch.float64), g)
    assert oracle.relative_error(moved, expected) < 1e-6


def test_an_output_without_logits_is_refused() -> None:
    class Pair(nn.Linear):
        pass

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Pair(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), x

    with pytest.raises(TypeError, match=r"one tensor \(N, \.\.\., C\), or an output with \.logits, got tuple"):
        foof.Fisher(Two(), torch.randn(4, 3))


# --- seeds and warnings ---------------------------------------------------------------------------------------------------------


def test_a_seed_is_a_generator() -> None:
    model, x, y = problem()
    seeded = foof.Fisher(model, x, generator=3).dense()
    assert torch.equal(seeded, foof.Fisher(model, x, generator=torch.Generator().manual_seed(3)).dense())
    assert not torch.equal(seeded, foof.Fisher(model, x, generator=0).dense())
    posteriors = [foof.laplace.fit_kronecker(model, x, y, generator=0, prior_precision=1.0) for _ in range(2)]
    assert torch.equal(posteriors[0].eigenvalues(), posteriors[1].eigenvalues())


def test_warnings_point_at_the_line_that_made_the_fisher() -> None:
    torch.manual_seed(0)
    norm, x, y = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Dropout(), nn.Linear(5, 3)), torch.randn(8, 4), torch.arange(8) % 3
    for call in [
        lambda: foof.Fisher(norm, x),
        lambda: foof.laplace.fit(norm, x, y),
        lambda: foof.laplace.fit_kronecker(norm, x, y),
        lambda: foof.ewc.EWC(norm, 1.0).consolidate(x),
    ]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        said = " ".join(str(w.message) for w in caught)
        assert "does not cover" in said
        assert "training mode" in said
        assert {w.filename for w in caught} == {__file__}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        foof.laplace.fit(mlp(4, 6, 3), x, y).tune_prior(high=1e-3)
    assert [w.filename for w in caught] == [__file__]
