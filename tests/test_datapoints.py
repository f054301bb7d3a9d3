"""Is the first dimension the datapoints? What is refused because it is not, and what is accepted because it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import foof
import oracle

N, L, WIDTH = 6, 4, 8
pytestmark = pytest.mark.filterwarnings("ignore:the Fisher does not cover", "ignore:enable_nested_tensor")


class Encoder(nn.Module):
    """A transformer's encoder, with or without a layer of its own before it."""

    def __init__(self, batch_first: bool, first: bool, layers: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if first else nn.Identity()
        block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=batch_first)
        self.encoder, self.head = nn.TransformerEncoder(block, layers), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.first(x)))


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool, first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if first else nn.Identity()
        self.gru, self.head = nn.GRU(WIDTH, 5, batch_first=batch_first), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.first(x))[0])


class Sorted(nn.Module):
    """Sorts the batch, and unsorts its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum((1, 2)).argsort()
        return self.b(self.a(x.mean(1)[order]).tanh())[order.argsort()]


class Graph(nn.Module):
    """Two layers over the nodes of a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        A = torch.eye(len(x), dtype=x.dtype).roll(1, 0) * 0.3 + torch.eye(len(x), dtype=x.dtype)
        return A @ self.b((A @ self.a(x.mean(1))).tanh())


class Similarity(nn.Module):
    """Which of the batch's other members each is like."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x.mean(1))
        return z @ z.mT


WRONG = {
    "transformer, time first": lambda: Encoder(False, first=False),
    "two transformer layers, time first": lambda: Encoder(False, first=False, layers=2),
    "transformer after a layer, time first": lambda: Encoder(False, first=True),
    "GRU, default layout": lambda: Recurrent(False, first=False),
    "GRU after a layer, default layout": lambda: Recurrent(False, first=True),
    "sorted batch": Sorted,
    "graph": Graph,
    "similarities": Similarity,
}
RIGHT = {
    "transformer": lambda: Encoder(True, first=True),
    "GRU": lambda: Recurrent(True, first=True),
}
FROM_OUTPUTS = [name for name in WRONG if name not in ("transformer, time first", "GRU, default layout")]  # seen at the inputs only
NOT_THEIRS = "cannot be told apart|not the datapoints"


def made(kinds: dict, name: str, dtype: torch.dtype = torch.float64, rows: int = N) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return kinds[name]().to(dtype).eval(), torch.randn(rows, L, WIDTH, dtype=dtype)


@pytest.mark.parametrize("rows", [2, N, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", WRONG)
def test_a_first_dimension_that_is_not_the_datapoints_is_refused(name: str, dtype: torch.dtype, rows: int) -> None:
    model, x = made(WRONG, name, dtype, rows)
    if name == "sorted batch" and rows == 2:
        x = x[x.sum((1, 2)).argsort(descending=True)]  # the other order is no order
    for labels in ("mc", "full"):
        with pytest.raises(ValueError, match=NOT_THEIRS):
            foof.Fisher(model, x, labels)


@pytest.mark.parametrize("name", WRONG)
def test_by_whatever_makes_a_fisher(name: str) -> None:
    model, x = made(WRONG, name)
    y = torch.zeros(model(x).shape[:-1], dtype=torch.long)
    for call in [
        lambda: foof.laplace.fit(model, x, y),
        lambda: foof.laplace.fit_kronecker(model, x, y),
        lambda: foof.ewc.EWC(model, 1.0).consolidate(x),
        lambda: foof.NaturalGradient(model).update_curvature(inputs=x),
    ]:
        with pytest.raises(ValueError, match=NOT_THEIRS):
            call()


@pytest.mark.parametrize("name", FROM_OUTPUTS)
def test_from_the_outputs_of_a_training_pass(name: str) -> None:
    model, x = made(WRONG, name)
    opt = foof.NaturalGradient(model)
    with pytest.raises(ValueError, match=NOT_THEIRS):
        opt.update_curvature(model(x))


@pytest.mark.parametrize("name", RIGHT)
def test_datapoints_first_is_accepted_and_right(name: str) -> None:
    model, x = made(RIGHT, name)
    F = foof.Fisher(model, x, "full")
    assert oracle.relative_error(F.dense(), oracle.full_fisher(model, x, F.params, "categorical")) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rounding_is_mistaken_for_another_datapoint(dtype: torch.dtype) -> None:
    """1,000 datapoints of very different sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 50), nn.LayerNorm(50), nn.GELU(), nn.Linear(50, 10))
    x = torch.randn(1000, 20) * torch.logspace(-3, 3, 1000).unsqueeze(1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert foof.Fisher(model, x).N == 1000
    opt = foof.NaturalGradient(model)
    opt.update_curvature(model(x))


def test_outputs_that_are_nan_stay_nan() -> None:
    x = torch.randn(5, 3)
    x[2] = float("nan")
    assert foof.Fisher(nn.Linear(3, 2), x).trace().isnan()
