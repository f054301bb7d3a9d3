"""FOOF without a learning rate: steps set, or bounded, by how far they move a layer's outputs."""

import copy
import math
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import foof
from foof.optim import rules
from foof.optim.change import MEMORY, BoundedSteps
from foof.optim.foof import MAX_CHANGE


def network(*widths, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    layers = [layer for m, n in pairwise(widths) for layer in (nn.Linear(m, n), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def steps(model, opt, batches, scale=1.0):
    """Train with a linear loss, whose errors do not depend on the scale of the outputs; the changes of all weights, step by step."""
    changes = []
    for x, y in batches:
        before = [p.detach().clone() for p in model.parameters()]
        opt.zero_grad()
        (scale * (model(x) * y).flatten(1).sum(1).mean()).backward()
        opt.step()
        changes.append(torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), before, strict=True)]))
    return torch.stack(changes)


BATCHES = [(draw(8, 5, seed=t), draw(8, 3, seed=100 + t)) for t in range(6)]
RULES = {"paced": {}, "bounded": {"lr": 1e4, "damping": 0.1, "relative": True, "max_change": 0.01}}


@pytest.fixture(params=RULES)
def options(request):
    return RULES[request.param]


def relative(after, before):
    return float((after.detach() - before).norm() / before.norm())


def close(a, b, rtol=1e-9):
    return torch.allclose(a, b, rtol=rtol, atol=1e-14)


# --- Nothing that does not matter changes a step ---------------------------------------------------------------------------------


def test_the_scale_of_the_loss(options):
    one, other = network(5, 4, 3), network(5, 4, 3)
    assert close(steps(one, foof.FOOF(one, **options), BATCHES), steps(other, foof.FOOF(other, **options), BATCHES, scale=100.0))


def test_the_scale_of_the_inputs(options):
    """One layer without a bias: a tanh behind it, or a bias beside it, would see another scale."""
    one, other = (nn.Linear(5, 3, bias=False, dtype=torch.float64) for _ in range(2))
    other.load_state_dict(one.state_dict())
    scaled = [(100 * x, y) for x, y in BATCHES]
    assert close(steps(one, foof.FOOF(one, **options), BATCHES), steps(other, foof.FOOF(other, **options), scaled))


def test_the_size_of_the_batch(options):
    one, other = network(5, 4, 3), network(5, 4, 3)
    twice = [(x.repeat(2, 1), y.repeat(2, 1)) for x, y in BATCHES]
    assert close(steps(one, foof.FOOF(one, **options), BATCHES), steps(other, foof.FOOF(other, **options), twice))


@pytest.mark.parametrize("mean", [False, True])
def test_every_token_repeated(options, mean):
    """Whether the loss is a sum over tokens or a mean."""
    one, other = network(5, 4, 3), network(5, 4, 3)
    tokens = [(x.unsqueeze(1).expand(-1, 2, -1), y.unsqueeze(1).expand(-1, 2, -1) / (2 if mean else 1)) for x, y in BATCHES]
    assert close(steps(one, foof.FOOF(one, **options), BATCHES), steps(other, foof.FOOF(other, **options), tokens))


# --- The rule --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_slow_twin(momentum):
    """T = 1: the reach is measured on every step, so ρ is that of the dense formula."""
    model = network(5, 4, 3)
    opt = foof.FOOF(model, T=1, momentum=momentum, weight_decay=0.1)
    usual, buffers, known = {0: 0.0, 2: 0.0}, {0: 0.0, 2: 0.0}, {}
    for count, (x, y) in enumerate(BATCHES, 1):
        opt.zero_grad()
        (model(x) * y).sum(1).mean().backward()
        before = copy.deepcopy(model)
        opt.step()
        for k, block in zip((0, 2), opt.preconditioner.blocks, strict=True):
            W = torch.cat([before[k].weight, before[k].bias[:, None]], 1).detach()
            U = torch.cat([model[k].weight.grad, model[k].bias.grad[:, None]], 1)  # .grad holds the neuron gradient
            Sigma = known.get(k, block.moments["Sigma"].value)  # of the steps before; on the first its own
            rho = rules.output_change(U, Sigma, W)
            usual[k] = MEMORY * usual[k] + (1 - MEMORY) * rho**2
            scaled = (1 - momentum) * U / torch.maximum(rho, (usual[k] / (1 - MEMORY**count)).sqrt() / 2)
            buffers[k] = momentum * buffers[k] + scaled
            expected = (1 - MAX_CHANGE * 0.1) * W - MAX_CHANGE * buffers[k]
            assert close(torch.cat([model[k].weight, model[k].bias[:, None]], 1), expected)
            known[k] = block.moments["Sigma"].value.clone()


def test_a_step_moves_the_outputs_by_max_change():
    model, (x, y) = nn.Linear(5, 3, bias=False, dtype=torch.float64), BATCHES[0]
    opt = foof.FOOF(model, max_change=0.07)
    before = model(x).detach()
    steps(model, opt, [(x, y)])
    assert math.isclose(relative(model(x), before), 0.07, rel_tol=1e-9)  # Σ is that of this very batch


def test_a_bound_is_a_bound_and_nothing_else():
    model, (x, y) = nn.Linear(5, 3, bias=False, dtype=torch.float64), BATCHES[0]
    twin, before = copy.deepcopy(model), model(x).detach()
    opt = foof.FOOF(model, lr=1e3, damping=0.5, max_change=0.02)
    steps(model, opt, [(x, y)])
    assert math.isclose(relative(model(x), before), 0.02, rel_tol=1e-9)
    opt.remove()
    model.load_state_dict(twin.state_dict())
    loose, none = foof.FOOF(model, lr=0.1, damping=0.5, max_change=1e6), foof.FOOF(twin, lr=0.1, damping=0.5, max_change=None)
    assert close(steps(model, loose, BATCHES), steps(twin, none, BATCHES))


def test_the_paper_s_form_is_that_without_any_of_this_bit_for_bit(monkeypatch):
    options = {"lr": 0.1, "damping": 0.1, "momentum": 0.9, "weight_decay": 0.01, "T": 3, "max_change": None}
    one, other = network(5, 4, 3, dtype=torch.float32), network(5, 4, 3, dtype=torch.float32)
    batches = [(x.float(), y.float()) for x, y in BATCHES]
    changes = steps(one, foof.FOOF(one, **options), batches)
    monkeypatch.delattr(foof.FOOF, "_update")
    monkeypatch.delattr(BoundedSteps, "_update")
    assert torch.equal(changes, steps(other, foof.FOOF(other, **options), batches))


def test_steps_shrink_with_the_errors():
    """After a hundred steps of one size, errors a hundredth as large move the outputs a fiftieth of τ as far, and not τ."""
    model, (x, y) = nn.Linear(5, 3, bias=False, dtype=torch.float64), BATCHES[0]
    opt = foof.FOOF(model, max_change=1e-6)
    large = steps(model, opt, [(x, y)] * 100)[-1].detach().norm()
    small = steps(model, opt, [(x, y / 100)])[-1].detach().norm()
    assert math.isclose(float(small / large), 0.02, rel_tol=0.01)  # ρ̄ has one small one in it


def test_a_scheduler_decays_the_step():
    model, (x, y) = nn.Linear(5, 3, bias=False, dtype=torch.float64), BATCHES[0]
    opt = foof.FOOF(model)
    assert opt.param_groups[0]["lr"] == MAX_CHANGE
    start = copy.deepcopy(model.state_dict())
    whole = steps(model, opt, [(x, y)])
    model.load_state_dict(start)
    opt.param_groups[0]["lr"] /= 2
    assert close(steps(model, opt, [(x, y)]), whole / 2, rtol=1e-6)


BOUNDED = {
    "FOOF": lambda m, **o: foof.FOOF(m, lr=1e3, damping=0.1, max_change=0.02, **o),
    "KFAC": lambda m, **o: foof.KFAC(m, lr=1e3, damping=0.1, fisher="full", max_change=0.02, **o),
    "NaturalGradient": lambda m, **o: foof.NaturalGradient(m, lr=1e3, damping=0.1, fisher="full", max_change=0.02, **o),
}


@pytest.mark.parametrize("make", BOUNDED.values(), ids=BOUNDED)
def test_a_scheduler_decays_a_bounded_step(make):
    model, whole = (nn.Linear(5, 3, bias=False, dtype=torch.float64) for _ in range(2))
    whole.load_state_dict(start := copy.deepcopy(model.state_dict()))
    opt = make(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.25 if t else 0.5)
    curved_steps(whole, make(whole), BATCHES[:1])
    for share in (0.5, 0.25):
        model.load_state_dict(start)
        curved_steps(model, opt, BATCHES[:1])
        scheduler.step()
        assert close(model.weight - start["weight"], share * (whole.weight - start["weight"]), rtol=1e-6)


@pytest.mark.parametrize("make", BOUNDED.values(), ids=BOUNDED)
def test_momentum_of_a_warm_up_is_bounded(make):
    """What a step at a learning rate of 0 leaves in the buffer is bounded as in any other."""
    model, twin = (nn.Linear(5, 3, bias=False, dtype=torch.float64) for _ in range(2))
    twin.load_state_dict(start := copy.deepcopy(model.state_dict()))
    opt = make(model, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: float(t > 0))
    curved_steps(model, opt, BATCHES[:1])
    assert torch.equal(model.weight, start["weight"])
    scheduler.step()
    curved_steps(model, opt, BATCHES[:1])
    curved_steps(twin, make(twin, momentum=0.9), BATCHES[:1])
    assert close(model.weight - start["weight"], 1.9 * (twin.weight - start["weight"]), rtol=1e-6)


def test_groups_have_their_own():
    model, x = network(5, 4, 3), BATCHES[0]
    opt = foof.FOOF(model, groups=[{"params": model[2].parameters(), "max_change": 0.001}])
    whole = network(5, 4, 3)
    changes, others = steps(model, opt, [x]), steps(whole, foof.FOOF(whole), [x])
    first = sum(p.numel() for p in model[0].parameters())
    assert close(changes[:, :first], others[:, :first])
    assert close(changes[:, first:], others[:, first:] * 0.001 / MAX_CHANGE)


def test_groups_have_a_momentum_of_their_own():
    model, whole = network(5, 4, 3), network(5, 4, 3)
    changes = steps(model, foof.FOOF(model, groups=[{"params": model[2].parameters(), "momentum": 0.9}]), BATCHES[:1])
    others = steps(whole, foof.FOOF(whole), BATCHES[:1])
    first = sum(p.numel() for p in model[0].parameters())
    assert close(changes[:, :first], others[:, :first])
    assert close(changes[:, first:], others[:, first:] * 0.1)


def test_a_layer_without_rows_at_first_is_measured_when_it_has_some():
    """An expert whose gradient is zero until a row is sent to it moves its outputs by max_change on that very step."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False)]).double()
    opt, (x, y) = foof.FOOF(model), BATCHES[0]
    for rows in (0, 0, 8):
        opt.zero_grad()
        ((model[0](x) * y).sum() + (model[1](x[:rows]) * y[:rows]).sum()).backward()
        before = model[1](x).detach()
        opt.step()
    assert math.isclose(relative(model[1](x), before), MAX_CHANGE, rel_tol=1e-9)


@pytest.mark.parametrize("value", [0.001, None])
def test_a_max_change_that_nothing_would_read(value):
    """Without an lr it is the groups' lr."""
    model = network(5, 4, 3)
    opt = foof.FOOF(model, groups=[{"params": model[2].parameters(), "max_change": 0.02}])
    steps(model, opt, BATCHES[:1])
    opt.param_groups[0]["max_change"] = value
    with pytest.raises(ValueError, match=r'max_change was 0.02 when FOOF\(model\) was made.*the group\'s "lr"'):
        steps(model, opt, BATCHES[:1])


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_a_max_change_that_cannot_be_meant(value):
    with pytest.raises(ValueError, match="max_change must be a positive"):
        foof.FOOF(network(5, 3), max_change=value)
    for make in (foof.KFAC, foof.EKFAC, foof.NaturalGradient):
        with pytest.raises(ValueError, match="max_change must be a positive"):
            make(network(5, 3), max_change=value)


def test_layers_of_zeros_and_layers_without_a_gradient():
    """LoRA: B = 0, so that A has no gradient on the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)).double()
    nn.init.zeros_(model[1].weight)
    changes = steps(model, foof.FOOF(model), BATCHES)
    assert changes.isfinite().all()
    assert not changes[0, :10].any()
    assert changes[1, :10].any()


# --- What is said of it ----------------------------------------------------------------------------------------------------------


def test_explain_shows_how_far_the_latest_step_went():
    model = network(5, 4, 3)
    opt = foof.FOOF(model, momentum=0.5)
    assert "latest" not in str(opt.explain())
    steps(model, opt, BATCHES[:1])
    said = opt.explain()
    assert [row.change for row in said.rows] == ["3.00%", "", "3.00%", ""]
    assert "outputs of 2 of 2 layers by 3.00% of their size" in said.note
    steps(model, opt, [(x, y / 1000) for x, y in BATCHES[1:2]])
    assert "outputs of 0 of 2 layers" in str(opt.explain())


def test_explain_shows_which_layers_are_bounded_and_which_would_be():
    """A layer that would go 1.5 times as far as it may: bounded at this max_change and at half of it, not at twice."""
    model = nn.Linear(5, 3, bias=False, dtype=torch.float64)
    twin = copy.deepcopy(model)
    free = foof.FOOF(twin, lr=1.0, damping=0.1, max_change=1e6)
    steps(twin, free, BATCHES[:1])
    Sigma = BATCHES[0][0].mT @ BATCHES[0][0] / 8
    rho = float(rules.output_change(twin.weight.grad, Sigma, model.weight.detach()))
    assert free.explain().rows[0].change == f"{rho:.2%}"
    last = foof.FOOF(model, lr=1.0, damping=0.1, max_change=rho / 1.5)
    steps(model, last, BATCHES[:1])
    assert last.explain().rows[0].change == f"{rho / 1.5:.2%}, bounded: {rho:.2%}"
    assert last.explain().note.endswith("bounded 1 of 1 layers in the latest step; half of it would have bounded 1, twice of it 0.")


# --- KFAC and natural gradients --------------------------------------------------------------------------------------------------

KRONECKER = {
    "heuristic": lambda m, **o: foof.KFAC(m, damping=0.1, fisher="full", **o),
    "standard": lambda m, **o: foof.KFAC(m, damping=0.1, damping_mode="standard", fisher="full", **o),
    "EKFAC": lambda m, **o: foof.EKFAC(m, damping=0.1, fisher="full", **o),
}


def curved_steps(model, opt, batches):
    for x, y in batches:
        opt.zero_grad()
        opt.update_curvature(out := model(x))
        (out * y).sum(1).mean().backward()
        opt.step()


@pytest.mark.parametrize("make", KRONECKER.values(), ids=KRONECKER)
def test_a_bound_under_kfac(make):
    model, (x, y) = nn.Linear(5, 3, bias=False, dtype=torch.float64), BATCHES[0]
    twin, before = copy.deepcopy(model), model(x).detach()
    opt = make(model, lr=1e3, max_change=0.02)
    curved_steps(model, opt, [(x, y)])
    assert math.isclose(relative(model(x), before), 0.02, rel_tol=1e-9)
    opt.remove()
    model.load_state_dict(twin.state_dict())
    curved_steps(model, make(model, lr=0.01, max_change=1e6), BATCHES)
    curved_steps(twin, make(twin, lr=0.01), BATCHES)
    assert close(model.weight, twin.weight)


@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_a_bound_under_natural_gradients_is_one_of_the_divergence(blocks):
    model, (x, y) = network(5, 4, 3), BATCHES[0]
    F = foof.Fisher(model, x, labels="full", blocks=blocks).dense()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    groups = [{"params": model[0].parameters(), "lr": 1e4}]  # ρ is of the step, whatever learning rates made it
    opt = foof.NaturalGradient(model, lr=1e3, damping=0.1, fisher="full", blocks=blocks, max_change=0.02, groups=groups)
    curved_steps(model, opt, [(x, y)])
    step = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert math.isclose(float(step @ F @ step), 0.02**2, rel_tol=1e-9)
    opt.remove()
    ours, theirs = network(5, 4, 3), network(5, 4, 3)
    curved_steps(ours, foof.NaturalGradient(ours, lr=0.01, damping=0.1, fisher="full", max_change=1e6), BATCHES)
    curved_steps(theirs, foof.NaturalGradient(theirs, lr=0.01, damping=0.1, fisher="full"), BATCHES)
    assert all(close(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_bound_of_the_divergence_is_one_of_the_outputs_for_squared_error():
    model, (x, y) = nn.Linear(5, 3, bias=False, dtype=torch.float64), BATCHES[0]
    before = model(x).detach()
    opt = foof.NaturalGradient(model, lr=1e3, fisher="full", likelihood="gaussian", max_change=0.02)
    curved_steps(model, opt, [(x, y)])
    assert math.isclose(float((model(x) - before).square().sum(1).mean().sqrt()), 0.02, rel_tol=1e-9)


@pytest.mark.parametrize("make", [foof.KFAC, foof.NaturalGradient])
def test_one_size_of_a_step_is_enough(make):
    with pytest.raises(ValueError, match="finds the size of a step by its quadratic model"):
        make(network(5, 3), adaptive=True, max_change=0.1)


# --- What is left to the fallback optimizer --------------------------------------------------------------------------------------


class Language(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed, self.inside, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.inside(self.embed(ids)))


@pytest.mark.parametrize("tied", [False, True])
def test_vocabularies_are_left_to_the_fallback(tied):
    opt = foof.FOOF(Language(tied))
    assert opt.explain().covered == ["inside.weight", "inside.bias"]
    assert opt.explain().rest["embed.weight"] == "an embedding"
    assert opt.param_groups[-1]["lr"] == 3e-3
    opt.remove()
    assert "embed.weight" in foof.FOOF(Language(tied), lr=0.3).explain().covered  # the paper's form has no opinion


def test_a_model_of_vocabularies_alone_is_covered():
    assert foof.FOOF(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))).explain().covered == ["0.weight", "1.weight", "1.bias"]


# --- Going on, and going wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 3, 4])
def test_going_on_from_a_checkpoint(at):
    model = network(5, 4, 3)
    twin = copy.deepcopy(model)
    whole = steps(model, foof.FOOF(model, T=3, momentum=0.9), BATCHES)
    opt = foof.FOOF(twin, T=3, momentum=0.9)
    first = steps(twin, opt, BATCHES[:at])
    other = copy.deepcopy(twin)
    again = foof.FOOF(other, T=3, momentum=0.9)
    again.load_state_dict(opt.state_dict())
    assert torch.equal(torch.cat([first, steps(other, again, BATCHES[at:])]), whole)


@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "damping": 0.1}])
def test_a_run_that_blows_up_says_where(options):
    model = network(5, 4, 3)
    opt = foof.FOOF(model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, opt, BATCHES[:2])
    model(BATCHES[2][0]).sum().backward()
    model[0].weight.grad[0, 0] = math.inf
    with pytest.warns(UserWarning, match=r"step 3: the neuron gradient of 0 is not finite.*try"):
        opt.step()
