"""The Fisher as an operator: implicit equals explicit (the paper's Appendix B, widened)."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import foof
import oracle
from cases import cnn, mlp
from foof import gradients

TOLERANCE = 1e-9


class Attention(nn.Module):
    """A small transformer block over tokens: embedding, one head of attention, a residual MLP, a mean over positions."""

    def __init__(self, tokens: int = 7, width: int = 4, classes: int = 3, pool: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width, padding_idx=0)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(width, 6), nn.Linear(6, width), nn.Linear(width, classes)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        scores = (self.q(h) @ self.k(h).mT / h.shape[-1] ** 0.5).softmax(-1)
        h = h + self.out(scores @ self.v(h))
        h = h + self.down(torch.tanh(self.up(h)))
        return self.head(h.mean(1) if self.pool else h)


class Shared(nn.Module):
    """One layer called three times, once on its own outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))) + self.inner(x**2))


class Tied(nn.Module):
    """A language model whose head is its embedding: one weight in two orientations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.embed(x)))).sum(1)


def case(name: str) -> tuple[nn.Module, Tensor, list[int]]:
    """A model in float64, inputs, and the sizes of its blocks in the order of its parameters."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (5, 4))
    model, x = {
        "mlp": lambda: (mlp(5, 6, 4, 3), torch.randn(7, 5)),
        "mlp without bias": lambda: (mlp(5, 6, 3, bias=False), torch.randn(7, 5)),
        "cnn": lambda: (cnn(), torch.randn(5, 2, 8, 8)),
        "conv1d": lambda: (
            nn.Sequential(
                nn.Conv1d(2, 3, 3, dilation=2, padding=2, padding_mode="circular"), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)
            ),
            torch.randn(6, 2, 6),
        ),
        "transformer": lambda: (Attention(), tokens),
        "sequence labels": lambda: (Attention(pool=False), tokens),
        "shared": lambda: (Shared(), torch.randn(6, 4)),
        "tied": lambda: (Tied(), torch.randint(0, 5, (6, 3))),
    }[name]()
    model = model.double()
    own = [[p.numel() for p in module.parameters(recurse=False)] for module in model.modules()]
    sizes = [15, 12] if name == "tied" else [sum(each) for each in own if each]
    return model, x.double() if x.is_floating_point() else x, sizes


CASES = ("mlp", "mlp without bias", "cnn", "conv1d", "transformer", "sequence labels", "shared", "tied")


@functools.cache
def dense_fisher(name: str) -> Tensor:
    """The oracle's full Fisher of a case, which several tests share."""
    model, x, _ = case(name)
    return oracle.full_fisher(model, x, list(model.parameters()), "categorical")


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert oracle.relative_error(ours, theirs) < TOLERANCE


@pytest.fixture(params=["by rows", "by slices", "by the cheaper", "in pieces"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the Gram matrix, and small pieces, whatever they cost."""
    if request.param == "by rows":
        monkeypatch.setattr(gradients.Columns, "_rows_are_cheaper", lambda *_: True)
    if request.param == "by slices":
        monkeypatch.setattr(gradients.Columns, "_rows_are_cheaper", lambda *_: False)
    if request.param == "in pieces":
        monkeypatch.setattr(gradients, "ROWS", 5)
        monkeypatch.setattr(gradients, "BUDGET", 4000)
    return request.param


@pytest.mark.parametrize("blocks", ["full", "layer"])
@pytest.mark.parametrize("labels", ["mc", "full"])
@pytest.mark.parametrize("name", CASES)
def test_implicit_equals_explicit(name: str, labels: str, blocks: str, way: str) -> None:
    model, x, sizes = case(name)
    F = foof.Fisher(model, x, labels, blocks=blocks, generator=torch.Generator().manual_seed(3))
    if labels == "full":
        dense = dense_fisher(name)
    else:
        p = model(x).detach().softmax(-1)
        y = torch.multinomial(p.flatten(0, -2), 1, generator=torch.Generator().manual_seed(3)).reshape(p.shape[:-1])
        dense = oracle.fisher_of_errors(model, x, F.params, p - nn.functional.one_hot(y, p.shape[-1]))
    dense = dense if blocks == "full" else oracle.block_diagonal(dense, sizes)
    v = torch.randn(F.P, 2, dtype=torch.float64)
    damped = dense + 0.1 * torch.eye(F.P, dtype=torch.float64)

    close(F.dense(), dense)
    close(F @ v, dense @ v)
    close(F.quadratic(v), (v * (dense @ v)).sum(0))
    close(F.solve(v, 0.1), torch.linalg.solve(damped, v))
    close(torch.cat([d.flatten() for d in F.diagonal()]), dense.diagonal())
    close(F.trace(), dense.trace())
    close(F.logdet(0.7, datapoints=50.0), torch.logdet(0.7 * torch.eye(F.P, dtype=torch.float64) + 50 * dense))
    G, gram = F.columns(), F.gram()
    if blocks == "full":
        close(gram, G.T @ G)
    else:
        close(gram.sum(0), G.T @ G)
        assert len(gram) == len(sizes)
    close(F.eigenvalues()[-5:], torch.linalg.eigvalsh(dense)[-5:])


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "tied"])
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_other_likelihoods(name: str, likelihood: str) -> None:
    model, x, _ = case(name)
    F = foof.Fisher(model, x, "full", likelihood=likelihood)
    close(F.dense(), oracle.full_fisher(model, x, F.params, likelihood))


def test_the_empirical_fisher_uses_the_labels_of_the_data() -> None:
    model, x, _ = case("cnn")
    y = torch.tensor([0, 2, 1, 1, 0])
    F = foof.Fisher(model, x, "empirical", y)
    errors = model(x).detach().softmax(-1) - nn.functional.one_hot(y, 3)
    close(F.dense(), oracle.fisher_of_errors(model, x, F.params, errors))


def test_many_draws_per_input_approach_the_full_fisher() -> None:
    model, x, _ = case("mlp")
    F = foof.Fisher(model, x, "mc", samples=400, generator=torch.Generator().manual_seed(0))
    assert 400 * len(x) == F.D
    assert oracle.relative_error(F.dense(), oracle.full_fisher(model, x, F.params, "categorical")) < 0.1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["per tensor", "any diagonal"])
@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_any_diagonal_prior(name: str, kind: str, blocks: str, way: str) -> None:
    model, x, sizes = case(name)
    F = foof.Fisher(model, x, "full", blocks=blocks)
    flat = torch.rand(F.P, dtype=torch.float64) + 0.5
    prior = flat if kind == "any diagonal" else [float(d.mean()) for d in F.as_list(flat)]
    if kind == "per tensor":
        flat = torch.cat([torch.full((p.numel(),), value, dtype=torch.float64) for p, value in zip(F.params, prior, strict=True)])
    dense = dense_fisher(name)
    dense = dense if blocks == "full" else oracle.block_diagonal(dense, sizes)
    v = torch.randn(F.P, dtype=torch.float64)
    close(F.solve(v, prior), torch.linalg.solve(dense + flat.diag(), v))
    close(F.posterior_solve(v, prior), torch.linalg.solve(F.N * dense + flat.diag(), v))
    close(F.logdet(prior), torch.logdet(F.N * dense + flat.diag()))


def test_the_answer_has_the_form_of_the_question() -> None:
    model, x, _ = case("mlp")
    F = foof.Fisher(model, x)
    v = torch.randn(F.P, dtype=torch.float64)
    as_list = [u.clone() for u in F.as_list(v)]
    for operation in (lambda u: F @ u, lambda u: F.solve(u, 0.3), lambda u: F.posterior_solve(u, 2.0)):
        flat, listed, many = operation(v), operation(as_list), operation(torch.stack([v, -v], dim=1))
        assert [u.shape for u in listed] == [p.shape for p in F.params]
        torch.testing.assert_close(F.as_flat(listed), flat)
        torch.testing.assert_close(many, torch.stack([flat, -flat], dim=1))
    assert F.quadratic(v).shape == ()
    assert F.quadratic(as_list) == F.quadratic(v)
    assert (F @ v.float()).dtype == torch.float32


def test_the_passes_may_be_cut_into_batches() -> None:
    model, x, _ = case("cnn")
    close(foof.Fisher(model, x, "full", batch_size=2).dense(), foof.Fisher(model, x, "full").dense())


class Routed(nn.Module):
    """Each batch takes one of two layers, once or twice, by its first datapoint."""

    def __init__(self, times: bool) -> None:
        super().__init__()
        self.a, self.b, self.head, self.times = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2), times

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            return self.head(self.a(x))
        return self.head(self.a(self.a(x)) if self.times else self.b(x))


@pytest.mark.parametrize("times", [True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_batches_that_take_different_paths_are_refused(times: bool, order: int) -> None:
    x = torch.randn(4, 3)
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0]) * order
    with pytest.raises(ValueError, match=r"take different paths.*batch_size=None"):
        foof.Fisher(Routed(times), x, "full", batch_size=2)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x: Tensor, negative: bool, scale: Tensor | None) -> Tensor:
        return self.linear(-x if negative else x) * (1 if scale is None else scale)


@pytest.mark.parametrize("scale", [None, torch.tensor(2.0)])
def test_batches_of_inputs_with_options(scale: Tensor | None) -> None:
    """What is no tensor over datapoints is the same for all of them."""
    model, x = Optional(), torch.randn(5, 3).double()
    expected = foof.Fisher(model, (x, True, scale), "full").dense()
    close(foof.Fisher(model, {"x": x, "negative": True, "scale": scale}, "full", batch_size=2).dense(), expected)
    close(foof.Fisher(model, (x, True, scale), "full", batch_size=2).dense(), expected)


def test_indices_of_any_integer_type() -> None:
    model, x = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)).double(), torch.randint(0, 5, (4, 2))
    close(foof.Fisher(model, x.int(), "full").dense(), foof.Fisher(model, x, "full").dense())


@pytest.mark.parametrize("labels", ["full", "mc"])
def test_positions_that_the_data_leave_out_are_left_out(labels: str) -> None:
    """The Fisher is that of the positions with a loss."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4).double(), torch.randn(5, 2, 3).double(), torch.randint(0, 4, (5, 2))
    y[:, 1] = -100
    F = foof.Fisher(model, x, labels, y, generator=torch.Generator().manual_seed(0))
    alone = foof.Fisher(model, x[:, :1], "full")
    if labels == "full":
        close(F.dense(), alone.dense())
    else:
        assert F.trace() < foof.Fisher(model, x, labels, generator=torch.Generator().manual_seed(0)).trace()


def test_the_operator_outlives_its_inputs_and_the_training_of_the_model() -> None:
    model, x, _ = case("mlp")
    F = foof.Fisher(model, x, "full")
    before = F.dense()
    x.zero_()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    close(F.dense(), before)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        foof.Fisher(model, torch.randn(8, 4), exclude=["1"])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_hook_that_changes_an_output_is_part_of_the_model() -> None:
    torch.manual_seed(0)
    model, x = mlp(4, 5, 3).double(), torch.randn(6, 4).double()
    model[0].register_forward_hook(lambda module, args, out: torch.sin(3 * out))
    close(foof.Fisher(model, x, "full").dense(), oracle.full_fisher(model, x, list(model.parameters()), "categorical"))


def test_beside_an_optimizer_on_neurons() -> None:
    model, x, _ = case("mlp")
    expected = foof.Fisher(model, x, "full").dense()
    foof_optimizer = foof.FOOF(model, lr=0.3, damping=1.0)
    close(foof.Fisher(model, x, "full").dense(), expected)
    foof_optimizer.remove()


def test_float64_for_tiny_damping() -> None:
    torch.manual_seed(0)
    model, x, damping = mlp(30, 40, 10), torch.randn(100, 30), 1e-7
    reference = foof.Fisher(model.double(), x.double(), "full")
    v = torch.randn(reference.P, dtype=torch.float64)
    expected = reference.solve(v, damping)
    model = model.float()
    errors = {
        dtype: oracle.relative_error(foof.Fisher(model, x, "full", dtype=dtype).solve(v, damping), expected)
        for dtype in (torch.float32, torch.float64)
    }
    assert errors[torch.float64] < 0.05 * errors[torch.float32]


def test_a_residual_correction_restores_what_woodbury_loses() -> None:
    model, x, _ = case("mlp")
    F = foof.Fisher(model, x, "full")
    v = F @ torch.randn(F.P, dtype=torch.float64)  # in F's range, where the difference is small
    expected = F.solve(v, 1e-4)
    single = foof.Fisher(model.float(), x.float(), "full")
    errors = [oracle.relative_error(single.solve(v, 1e-4, refine=n), expected) for n in (0, 1)]
    assert errors[1] < 0.1 * errors[0]


def test_a_scipy_view() -> None:
    from scipy.sparse.linalg import cg, eigsh

    model, x, _ = case("mlp")
    F = foof.Fisher(model, x, "full")
    dense, v = F.dense(), torch.randn(F.P, dtype=torch.float64)
    close(torch.as_tensor(F.to_scipy() @ v.numpy()), dense @ v)
    close(torch.as_tensor(F.to_scipy(damping=0.2) @ v.numpy()), F.solve(v, 0.2))
    largest = eigsh(F.to_scipy(), k=1, return_eigenvectors=False)
    assert largest[0] == pytest.approx(torch.linalg.eigvalsh(dense)[-1].item())
    solution, info = cg(F.to_scipy(), (dense @ v).numpy(), rtol=1e-12)
    assert info == 0
    close(F @ torch.as_tensor(solution), dense @ v)


class TiedGroups(nn.Module):
    """One kernel, in a plain convolution of 2 channels and in a grouped one of 4."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.plain, self.grouped = nn.Conv1d(2, 4, 3, bias=bias), nn.Conv1d(4, 4, 3, groups=2, bias=bias)
        self.grouped.weight = self.plain.weight
        if bias:
            self.grouped.bias = self.plain.bias
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.grouped(self.plain(x).tanh()).tanh().mean(-1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_tied_convolutions_with_different_groups(bias: bool, blocks: str) -> None:
    torch.manual_seed(0)
    model, x = TiedGroups(bias).double(), torch.randn(5, 2, 7).double()
    F = foof.Fisher(model, x, "full", blocks=blocks)
    dense = oracle.full_fisher(model, x, F.params, "categorical")
    if blocks == "layer":
        dense = oracle.block_diagonal(dense, [24 + 4 * bias, 15])
    v = torch.randn(F.P, dtype=torch.float64)
    close(F.dense(), dense)
    close(F @ v, dense @ v)
    close(F.solve(v, 0.1), torch.linalg.solve(dense + 0.1 * torch.eye(F.P, dtype=torch.float64), v))


def test_at_one_datum_by_hand() -> None:
    """One datum, one label: F = g gᵀ, so (F + λI)⁻¹ g = g / (|g|² + λ)."""
    model, x, _ = case("mlp")
    F = foof.Fisher(model, x[:1], "empirical", torch.tensor([1]))
    loss = nn.functional.cross_entropy(model(x[:1]), torch.tensor([1]))
    g = F.as_flat(torch.autograd.grad(loss, F.params))
    close(F.solve(g, 0.5), g / (g @ g + 0.5))


# --- samples -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_the_covariance_of_samples(blocks: str) -> None:
    """20,000 draws on 200 parameters: every entry of the covariance within its Monte-Carlo error, and so all of them together."""
    torch.manual_seed(0)
    model, x, n = mlp(9, 10, 8, 2).double(), torch.randn(30, 9).double(), 20_000
    F = foof.Fisher(model, x, "full", blocks=blocks)
    assert 190 <= F.P <= 210
    prior = torch.rand(F.P, dtype=torch.float64) + 0.5
    posterior = torch.linalg.inv(prior.diag() + F.N * F.dense())
    draws = F.sample(n, prior, generator=torch.Generator().manual_seed(1))
    d = posterior.diagonal()
    error = ((posterior**2 + torch.outer(d, d)) / n).sqrt()  # the standard error of an empirical covariance
    z = (draws @ draws.T / n - posterior) / error
    assert z.abs().max() < 5.5  # 20,100 distinct entries
    assert 0.95 < z.square().mean().sqrt() < 1.05
    mean_z = draws.mean(1) / (d / n).sqrt()
    assert mean_z.abs().max() < 4.5


@pytest.mark.parametrize("blocks", ["full", "layer"])
@pytest.mark.parametrize("labels", ["mc", "full"])
@pytest.mark.parametrize("name", CASES)
def test_samples_are_a_linear_map_of_noise_with_exactly_the_posterior_covariance(name: str, labels: str, blocks: str) -> None:
    """x = M (y, z) for a fixed matrix M, so the covariance M Mᵀ can be read off exactly, without sampling error."""
    model, x, _ = case(name)
    F = foof.Fisher(model, x, labels, blocks=blocks)
    parts = len(F.operator.parts)
    n = F.P + parts * F.D
    units = iter(torch.eye(n, dtype=torch.float64).split([p.numel() for p in F.params] + [F.D] * parts))
    asked = 0

    def unit_noise(*shape: int, **_: object) -> Tensor:
        nonlocal asked
        asked += 1
        rows = next(units)  # of each draw, one unit of noise
        return rows.mT.reshape(shape) if asked <= len(F.params) else rows.reshape(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", unit_noise)
        M = F.sample(n, 0.7)
    close(M @ M.T, torch.linalg.inv(0.7 * torch.eye(F.P, dtype=torch.float64) + F.N * F.dense()))


@pytest.mark.parametrize("name", CASES)
def test_many_vectors_at_once_are_as_one_by_one(name: str) -> None:
    model, x, _ = case(name)
    F = foof.Fisher(model, x, "full")
    v = torch.randn(F.P, gradients.MANY, dtype=torch.float64)
    close(F @ v, torch.stack([F @ u for u in v.T], dim=1))
    close(F.solve(v, 0.1), torch.stack([F.solve(u, 0.1) for u in v.T], dim=1))
