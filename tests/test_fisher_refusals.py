"""What a Fisher cannot be made of, and what its messages say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import foof
from cases import mlp
from foof import gram


def test_bad_input_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = mlp(5, 6, 4, 3).double(), torch.randn(7, 5).double()
    F = foof.Fisher(model, x)
    for call, message in [
        (lambda: foof.Fisher(model, x, "empirical", torch.full((7,), 3)), r"labels must be in 0\.\.2"),
        (lambda: foof.Fisher(model, x, "empirical"), "pass y"),
        (lambda: foof.Fisher(model, x, "all"), '"mc", "full" or "empirical"'),
        (lambda: foof.Fisher(model, x, likelihood="poisson"), "likelihood must be one of"),
        (lambda: foof.Fisher(model, x, blocks="diagonal"), '"full" or "layer"'),
        (lambda: foof.Fisher(model, x[:0]), "at least one datapoint"),
        (lambda: foof.Fisher(nn.ReLU(), x), "no trainable"),
        (lambda: F.solve(torch.randn(F.P), 0.0), "damping must be positive"),
        (lambda: F.solve(torch.randn(F.P), -1.0), "damping must be positive"),
        (lambda: F.solve(torch.randn(F.P), float("nan")), "damping must be positive"),
        (lambda: F.sample(1, torch.zeros(F.P)), "prior_precision must be positive"),
        (lambda: F.sample(0, 1.0), "at least 1"),
        (lambda: F.solve(torch.randn(F.P), [1.0]), "entries like F.params"),
        (lambda: F @ torch.randn(F.P - 1), r"a flat vector must be"),
        (lambda: F @ [torch.randn(2, 2)], "shaped like F.params"),
        (lambda: foof.Fisher(model, x, batch_size=0), "batch_size"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    monkeypatch.setattr("foof.gram.available_memory", lambda _: 1000)
    with pytest.raises(MemoryError, match="Use fewer datapoints"):
        foof.Fisher(model, x).solve(torch.randn(F.P), 1.0)


def test_memory_that_torch_keeps_for_itself_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device of 100 bytes torch holds 70, of which 20 are in use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert gram.available_memory(torch.device("cuda")) == 80


def test_what_is_not_covered_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    with pytest.warns(UserWarning, match=r"1\.weight"):
        F = foof.Fisher(model, torch.randn(8, 4))
    assert len(F.params) == 4
    with pytest.warns(UserWarning, match="Dropout"):
        foof.Fisher(nn.Sequential(nn.Linear(4, 5), nn.Dropout(), nn.Linear(5, 3)), torch.randn(8, 4))


def test_layers_that_do_not_see_datapoints_first_are_refused() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x.flatten(0, 1)).unflatten(0, (len(x), -1)).sum(1))

    model = Pairs()
    with pytest.raises(ValueError, match="embed: the first dimension"):
        foof.Fisher(model, torch.randn(5, 6, 4))
    assert foof.Fisher(model, torch.randn(5, 6, 4), exclude=["embed"]).P == 15


def test_a_weight_used_outside_its_layer_is_refused() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + x @ self.a.weight

    with pytest.raises(ValueError, match="outside its layer"):
        foof.Fisher(Functional(), torch.randn(5, 4))


class TimeFirst(nn.Module):
    """Datapoints come first at its ends only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).tanh().mean(0))


@pytest.mark.parametrize(("N", "said"), [(3, "is not the 3 datapoints"), (5, "but is not theirs")])
def test_datapoints_must_come_first_even_where_lengths_agree(N, said):
    with pytest.raises(ValueError, match=said):
        foof.Fisher(TimeFirst(), torch.randn(N, 5, 4))


def test_as_many_positions_as_datapoints_are_no_trouble_if_datapoints_come_first():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Flatten(), nn.Linear(20, 2))
    foof.Fisher(model, torch.randint(7, (5, 5)))
