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


# --- inputs that all datapoints have in common ---------------------------------------------------------------------------------


class Positions(nn.Module):
    """One table for all datapoints, and something made of it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.table, self.mixed, self.head = nn.Embedding(L, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        where = torch.arange(x.shape[1])
        table = self.table(where if self.form == "(L,)" else where.unsqueeze(0))
        if self.form == "written into":
            table += 1
        return self.head((x + self.mixed(table.tanh())).tanh()).sum(1)


@pytest.mark.parametrize("rows", [1, 3, L])
@pytest.mark.parametrize("form", ["(L,)", "(1, L)", "written into"])
@pytest.mark.parametrize("labels", ["mc", "full"])
def test_a_table_of_positions_is_each_datapoint_s(form: str, rows: int, labels: str) -> None:
    """Also where there are as many datapoints as positions."""
    model, x = made({form: lambda: Positions(form)}, form, rows=rows)
    F = foof.Fisher(model, x, labels, generator=5)
    if labels == "full":
        expected = oracle.full_fisher(model, x, F.params, "categorical")
    else:
        p = model(x).detach().softmax(-1)
        y = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(5)).squeeze(1)
        expected = oracle.fisher_of_errors(model, x, F.params, p - nn.functional.one_hot(y, 3))
    assert oracle.relative_error(F.dense(), expected) < 1e-9
    opt = foof.NaturalGradient(model, lr=1.0, damping=0.1, fisher="full")
    opt.update_curvature(inputs=x)
    model(x).square().mean().backward()
    assert opt.step() is None


def test_dropout_is_the_same_in_the_second_forward_pass() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Positions("(1, L)"), nn.Dropout(0.5), nn.Linear(3, 3)).double(), torch.randn(5, L, WIDTH).double()
    with pytest.warns(UserWarning, match="training mode"):
        foof.Fisher(model, x, "full")


def test_from_outputs_a_table_of_positions_is_refused_with_what_to_do() -> None:
    model, x = made({"": lambda: Positions("(1, L)")}, "")
    opt = foof.NaturalGradient(model)
    with pytest.raises(ValueError, match=r"is not the 6 datapoints.*update_curvature\(inputs=\.\.\.\)"):
        opt.update_curvature(model(x))


def test_outputs_that_are_nan_stay_nan() -> None:
    x = torch.randn(5, 3)
    x[2] = float("nan")
    assert foof.Fisher(nn.Linear(3, 2), x).trace().isnan()
