"""Nothing silently wrong: situations of real training loops, each ruled out by the step as a transaction, or refused with what to do.

``docs/problems.md`` lists them with their remedies.
"""

import copy
import functools
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import foof
from cases import batch, flat, mlp, net, norm_net, step, train
from foof.study.train import ablations
from oracle import relative_error


def sigmas(opt):
    return {name: moments["Sigma"] for name, moments in opt.second_moments().items()}


def assert_same(left, right, tolerance=0.0):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert relative_error(value, right[name]) <= tolerance if tolerance else torch.equal(value, right[name])


# --- what counts: only what .grad came from -------------------------------------------------------------------------------


class TiedCheckpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        return self.head(checkpoint(lambda v: torch.tanh(self.inner(v)), h, use_reentrant=True))


def test_reentrant_checkpoints_with_a_tied_head_feed_every_layer_on_every_step():
    torch.manual_seed(0)
    model = TiedCheckpointed().double()
    opt = foof.FOOF(model, T=1)
    for t in range(10):
        x = torch.randint(7, (6, 3), generator=torch.Generator().manual_seed(t))
        opt.zero_grad()
        cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        opt.step()
    updates = {block.name: block.moments["Sigma"].updates for block in opt.preconditioner.blocks}
    assert set(updates.values()) == {10}, updates


@pytest.mark.parametrize("first", [True, False])
def test_autograd_grad_between_backward_and_step_leaves_no_trace(first):
    ends = []
    for diagnosed in (False, True):
        model = net()
        opt = foof.FOOF(model, T=1)
        if not first:
            train(model, opt, 2)
        opt.zero_grad()
        x, y = batch(7)
        cross_entropy(model(x), y).backward()
        if diagnosed:
            torch.autograd.grad(cross_entropy(model(1000 * x), y), list(model.parameters()))
        opt.step()
        ends.append((flat(model), sigmas(opt)))
    assert torch.equal(ends[0][0], ends[1][0])
    assert_same(ends[0][1], ends[1][1])


def test_gradients_assigned_by_hand_feed_the_statistics_from_all_their_passes():
    ends = []
    for by_hand in (False, True):
        model = net().double()
        opt = foof.FOOF(model, T=1)
        for t in range(3):
            opt.zero_grad()
            parts = []
            for k in range(2):
                x, y = batch(10 * t + k)
                loss = cross_entropy(model(x.double()), y)
                if by_hand:
                    parts.append(torch.autograd.grad(loss, list(model.parameters())))
                else:
                    loss.backward()
            for p, *each in zip(model.parameters(), *parts, strict=True) if by_hand else ():
                p.grad = sum(each)
            opt.step()
        ends.append((flat(model), sigmas(opt)))
    assert relative_error(*(end[0] for end in ends)) < 1e-12
    assert_same(ends[0][1], ends[1][1], 1e-12)


def test_gradients_of_function_transforms_are_preconditioned_like_any_other():
    """torch.func stands beside the taps: what it returns is plain, and so is what is assigned from it."""
    model, twin = net().double(), net().double()
    opt, other = foof.FOOF(model, T=100), foof.FOOF(twin, T=100)
    x, y = (batch(0)[0].double(), batch(0)[1])
    opt.initialise([x])
    other.initialise([x])
    cross_entropy(model(x), y).backward()
    opt.step()
    names = [name for name, _ in twin.named_parameters()]
    values = {name: p.detach() for name, p in twin.named_parameters()}
    grads = torch.func.grad(lambda v: cross_entropy(torch.func.functional_call(twin, v, (x,)), y))(values)
    for name in names:
        twin.get_parameter(name).grad = grads[name]
    other.step()
    assert relative_error(flat(twin), flat(model)) < 1e-12


@pytest.mark.parametrize("fisher", ["full", "empirical"])
def test_an_estimate_of_a_skipped_batch_does_not_join_the_next_step(fisher):
    ends = []
    for skips in (False, True):
        model = net()
        opt = foof.KFAC(model, T=1, fisher=fisher)
        for t in range(4):
            if skips:
                x, y = batch(50 + t)
                out = model(100 * x)
                opt.update_curvature(out, y)
                opt.zero_grad()
            step(model, opt, *batch(t))
        ends.append((flat(model), opt.second_moments()))
    assert torch.equal(ends[0][0], ends[1][0])
    for name, moments in ends[0][1].items():
        assert_same(moments, ends[1][1][name])


def test_zero_grad_between_an_estimate_and_its_backward_pass_keeps_it():
    ends = []
    for late in (False, True):
        model = net()
        opt = foof.KFAC(model, T=1, fisher="full")
        for t in range(3):
            x, y = batch(t)
            if not late:
                opt.zero_grad()
            out = model(x)
            opt.update_curvature(out)
            if late:
                opt.zero_grad()
            cross_entropy(out, y).backward()
            opt.step()
        ends.append(flat(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("kind", ["foof", "kfac", "kfac-deferred", "natural"])
@pytest.mark.parametrize("how", ["in place", "hook"])
def test_elementwise_masks_on_gradients_are_respected_on_every_step(kind, how):
    make = {
        "foof": lambda m: foof.FOOF(m, T=2), "kfac": lambda m: foof.KFAC(m, T=2), "natural": lambda m: foof.NaturalGradient(m, lr=0.1),
        "kfac-deferred": lambda m: ablations.kfac(m, T=2, deferred=True),
    }[kind]  # fmt: skip
    model = net()
    opt = make(model)
    masks = {p: (torch.rand_like(p) > 0.5).to(p.dtype) for p in model.parameters()}
    before = {p: p.detach().clone() for p in masks}
    if how == "hook":
        for p, mask in masks.items():
            p.register_hook(lambda g, mask=mask: g * mask)
    for t in range(4):
        x, y = batch(t)
        opt.zero_grad()
        out = model(x)
        opt.update_curvature(out, y)
        cross_entropy(out, y).backward()
        if how == "in place":
            for p, mask in masks.items():
                p.grad.mul_(mask)
        opt.step()
    for p, mask in masks.items():
        assert torch.equal(p[mask == 0], before[p][mask == 0]), "a pruned weight has moved"
        assert not torch.equal(p[mask == 1], before[p][mask == 1])


def test_initialise_with_gradients_pending_does_not_make_the_step_a_plain_one():
    model, twin = net().double(), net().double()
    opt, other = foof.FOOF(model), foof.FOOF(twin)
    x, y = batch(0)[0].double(), batch(0)[1]
    cross_entropy(model(x), y).backward()
    opt.initialise([x])
    opt.step()
    other.initialise([x])
    cross_entropy(twin(x), y).backward()
    other.step()
    assert relative_error(flat(model), flat(twin)) < 1e-12


@pytest.mark.parametrize("kind", ["natural", "kfac"])
def test_a_skipped_batch_with_inf_makes_nothing_of_the_next_one(kind):
    ends = []
    for bad in (False, True):
        model = net().double()
        opt = foof.NaturalGradient(model, lr=0.1, fisher="full") if kind == "natural" else foof.KFAC(model, T=1, fisher="full")
        for t in range(3):
            if bad:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    x, y = batch(t)
                    out = model(x.double() * float("inf"))
                    opt.update_curvature(out)
                    cross_entropy(out, y).backward()
                    opt.zero_grad()  # a GradScaler skips such a step
            x, y = batch(t)
            step(model, opt, x.double(), y)
        ends.append(flat(model))
    assert torch.equal(*ends)


class Experts(nn.Module):
    """Rows go to one of two experts by the sign of their first feature."""

    def __init__(self):
        super().__init__()
        self.experts, self.head = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5)]), nn.Linear(5, 3)

    def forward(self, x):
        chosen = x[:, 0] > 0
        h = x.new_zeros(len(x), 5)
        for k, expert in enumerate(self.experts):
            h[chosen == bool(k)] = torch.tanh(expert(x[chosen == bool(k)]))
        return self.head(h)


@pytest.mark.parametrize("make", [lambda m: foof.FOOF(m, T=1), lambda m: foof.KFAC(m, T=1, fisher="full"), foof.Muon])
def test_an_expert_without_rows_at_first_is_trained_once_it_has_some(make):
    torch.manual_seed(0)
    model = Experts()
    opt, before = make(model), model.experts[1].weight.detach().clone()
    for t in range(4):
        x, y = batch(t)
        x[:, 0] = -x[:, 0].abs() if t < 2 else x[:, 0]
        step(model, opt, x, y)
        if t == 1:
            assert torch.equal(model.experts[1].weight, before)
    assert not torch.equal(model.experts[1].weight, before)
    assert torch.isfinite(flat(model)).all()


# --- second derivatives, batched gradients, odd inputs ----------------------------------------------------------------------


def test_second_derivatives_are_an_error_however_they_are_asked_for():
    model = mlp(3, 4, 1).double()
    opt = foof.FOOF(model)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def loss(v):
        return model(v).sum()

    asks = [
        lambda: torch.autograd.functional.hessian(loss, x),
        lambda: torch.autograd.functional.hvp(loss, x, torch.ones_like(x)),
        lambda: torch.autograd.grad(torch.autograd.grad(loss(x), x, create_graph=True)[0].sum(), x, materialize_grads=True),
        lambda: torch.autograd.grad(torch.autograd.grad(loss(x), x, create_graph=True)[0].sum(), model[0].weight, allow_unused=True),
    ]
    for ask in asks:
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            ask()
    opt.remove()
    assert torch.autograd.functional.hessian(loss, x).any()


def test_many_gradients_at_once_are_refused():
    model = net()
    opt = foof.FOOF(model)
    out = model(batch(0)[0])
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(out, list(model.parameters()), torch.eye(out.numel()).reshape(-1, *out.shape), is_grads_batched=True)
    opt.remove()


def test_sparse_and_nested_inputs_are_refused_with_what_to_do():
    layer = nn.Linear(4, 3)
    foof_on_it = foof.FOOF(nn.Sequential(layer))
    with pytest.raises(TypeError, match=r"sparse.*to_dense"):
        layer(torch.eye(4).to_sparse())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"nested.*to_padded_tensor"):
        layer(nested)
    foof_on_it.remove()


# --- padding ----------------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 9)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.embed(x))))


@pytest.mark.parametrize("kind", ["foof", "kfac"])
def test_padded_and_unpadded_batches_give_equal_statistics(kind):
    found = []
    for padded in (False, True):
        torch.manual_seed(0)
        model = Tokens().double()
        opt = foof.FOOF(model, T=1) if kind == "foof" else foof.KFAC(model, T=1, fisher="full")
        x = torch.randint(9, (4, 3), generator=torch.Generator().manual_seed(1))
        y = x.clone()
        if padded:
            x, y = nn.functional.pad(x, (0, 2), value=8), nn.functional.pad(y, (0, 2), value=-100)
        with opt.mask(y != -100):
            out = model(x)
        opt.update_curvature(out, y)
        cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100).div(4).backward()
        opt.step()
        found.append((opt.second_moments(), flat(model)))
    for name, moments in found[0][0].items():
        assert_same(moments, found[1][0][name], 1e-12)
    assert relative_error(found[0][1], found[1][1]) < 1e-10


# --- what is refused, and says what to do ---------------------------------------------------------------------------------------


SINGLE_RATES = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=0.3, cycle_momentum=False),
    "average": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=1),
}


@pytest.mark.parametrize("name", SINGLE_RATES)
def test_a_scheduler_with_one_rate_for_all_is_refused(name):
    model = norm_net()
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    scheduler = SINGLE_RATES[name](opt)
    with pytest.raises(ValueError, match="one for each"):  # noqa: PT012
        for t in range(3):
            step(model, opt, *batch(t))
            scheduler.step()


def test_a_graph_from_before_remove_gives_plain_gradients():
    model, x, y = nn.Linear(4, 3).double(), torch.randn(6, 4).double(), torch.randn(6, 3).double()
    opt = foof.FOOF(model, lr=0.1, damping=1.0)
    nn.functional.mse_loss(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    opt.remove()
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    for got, expected in zip(found, torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters())), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_removed_optimizer_neither_steps_nor_saves():
    model = net()
    opt = foof.FOOF(model)
    train(model, opt, 2)
    opt.remove()
    cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    with pytest.raises(RuntimeError, match=r"taken off its model by remove"):
        opt.step()
    with pytest.raises(RuntimeError, match=r"save its state before"):
        opt.state_dict()


def test_a_bad_damping_in_a_group_is_refused_before_the_weights_move():
    model = net()
    opt = foof.FOOF(model, T=1)
    train(model, opt, 2)
    before = flat(model)
    opt.zero_grad()
    cross_entropy(model(batch(3)[0]), batch(3)[1]).backward()
    opt.param_groups[0]["damping"] = -1.0
    with pytest.raises(ValueError, match="damping λ must be"):
        opt.step()
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("options", [{"T": 2.5}, {"T": 4, "S": 1.5}])
def test_schedules_are_whole_numbers(options):
    with pytest.raises(ValueError, match=r"must be (a whole number|in 1)"):
        foof.FOOF(net(), **options)


def test_one_batch_is_not_an_iterable_of_batches():
    with pytest.raises(TypeError, match=r"initialise\(\[batch\]\)"):
        foof.FOOF(net()).initialise(batch(0)[0])


@pytest.mark.parametrize("change", ["resized", "weight_norm"])
def test_a_weight_replaced_since_is_said_so(change):
    model = Tokens()
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    if change == "resized":  # as resize_token_embeddings does
        model.head.weight = nn.Parameter(torch.randn(9, 5))
    else:
        nn.utils.parametrizations.weight_norm(model.head)
    x = torch.randint(9, (4, 3))
    cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    with pytest.raises(RuntimeError, match="another one than when the optimizer was made"):
        opt.step()


def test_a_layer_taken_out_of_the_model_is_said_so():
    model = Tokens()
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    model.embed = nn.Embedding(9, 4)
    x = torch.randint(9, (4, 3))
    cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    with pytest.warns(UserWarning, match="embed: this layer has been taken out"):
        opt.step()


def test_forward_called_directly_is_said_so():
    model = net()
    opt = foof.FOOF(model)
    x, y = batch(0)
    cross_entropy(model[4](torch.tanh(model[2].forward(torch.tanh(model[0](x))))), y).backward()
    with pytest.raises(RuntimeError, match=r"forward\(\) was called directly"):
        opt.step()


def test_warnings_point_at_the_callers_line():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    opt = foof.FOOF(model)
    model["used"](batch(0)[0]).sum().backward()
    with pytest.warns(UserWarning, match="not reached") as caught:
        opt.step()
    assert Path(caught[0].filename).name == Path(__file__).name


def test_an_optimizer_that_is_attached_and_forgotten_says_so():
    model = net()
    opt, other = foof.FOOF(model), torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.warns(UserWarning, match=r"call its step\(\), or its remove\(\)"):  # noqa: PT031
        for t in range(101):
            other.zero_grad()
            cross_entropy(model(batch(t)[0]), batch(t)[1]).backward()
            other.step()
    opt.remove()


# --- what people expect -----------------------------------------------------------------------------------------------------


def test_explain_counts_what_is_held_for_tied_weights():
    model = nn.Sequential(nn.Embedding(250, 10), nn.Linear(10, 250, bias=False))
    model[1].weight = model[0].weight
    opt = foof.FOOF(model, T=1)
    x = torch.randint(250, (4, 3))
    cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    opt.step()
    held = sum(
        t.numel() * t.element_size() for block in opt.preconditioner.blocks for t in (block.moments["Sigma"].value, block.inverse.tensor)
    )
    assert sum(row.memory for row in foof.explain(model).rows) == held


def test_decay_and_no_decay_groups_hold_for_covered_and_uncovered_alike():
    model = norm_net()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    opt = foof.FOOF(model, groups=[{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], weight_decay=0.5)
    found = {id(p): (group["kind"], group["weight_decay"]) for group in opt.param_groups for p in group["params"]}
    assert found[id(model[0].weight)] == ("neurons", 0.1)
    assert found[id(model[0].bias)] == ("neurons", 0.0)
    assert found[id(model[1].weight)] == ("rest", 0.0)
    train(model, opt, 2)


def test_groups_from_named_parameters():
    model = net()
    opt = foof.FOOF(model, groups=[{"params": list(model[0].named_parameters()), "lr": 0.5}])
    assert [(g["lr"], len(g["params"])) for g in opt.param_groups] == [(0.5, 2), (0.3, 4)] or opt.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("rest", [functools.partial(torch.optim.AdamW, lr=1e-3), lambda ps: torch.optim.RMSprop(ps, lr=1e-3)])
def test_the_fallback_may_be_any_factory(rest):
    model, before = norm_net(), norm_net()
    opt = foof.FOOF(model, rest=rest)
    train(model, opt, 2)
    assert not torch.equal(model[1].weight, before[1].weight)
    state = copy.deepcopy(opt.state_dict())
    other = norm_net()
    again = foof.FOOF(other, rest=rest)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(state)
    train(model, opt, 2, 2)
    train(other, again, 2, 2)
    assert torch.equal(flat(model), flat(other))
    with pytest.raises(TypeError, match="must return a torch optimizer"):
        foof.FOOF(norm_net(), rest=lambda ps: None)


def test_an_optimizer_explains_itself():
    model = norm_net()
    opt = foof.FOOF(model, exclude=["5"], groups=[{"params": model[0].parameters(), "lr": 0.1}])
    said = opt.explain()
    assert said.rest["5.weight"] == "excluded by request"
    groups = {row.parameter: row.group for row in said.rows}
    assert groups["0.weight"] == "group 0"
    assert groups["3.weight"] == "group 1"
    assert groups["1.weight"] == "group 2"
    assert "group 2" in str(said)


def test_second_moments_and_adaptive_are_public():
    model = net()
    opt = foof.KFAC(model, adaptive=foof.Adaptive(damping=False), T=1)
    step(model, opt, *batch(0))
    shapes = {name: {key: tuple(value.shape) for key, value in moments.items()} for name, moments in opt.second_moments().items()}
    assert shapes["0"] == {"Sigma": (5, 5), "Sigma_E": (7, 7)}


# --- very wide layers -----------------------------------------------------------------------------------------------------------


def test_a_layer_with_gigabytes_of_statistics_is_warned_of():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(25088, 4096))
    with pytest.warns(UserWarning, match=r'4\.7 GiB.*blocks="auto"'):
        foof.FOOF(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        foof.FOOF(copy.deepcopy(model), blocks="auto")


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("k", [2, 3])
def test_blocks_of_inputs_are_foof_on_each_block(k, rows, relative):
    torch.manual_seed(0)
    layer = nn.Linear(7, 6, bias=True).double()
    before, x, target = copy.deepcopy(layer), torch.randn(rows, 7, dtype=torch.float64), torch.randn(rows, 6, dtype=torch.float64)
    opt = foof.FOOF(layer, lr=1.0, damping=0.3, blocks=k, T=1, relative=relative)
    (layer(x) * target).sum().backward()
    opt.step()
    a = torch.cat([x, torch.ones(rows, 1, dtype=torch.float64)], 1)
    G, size = target.mT @ a, -(-8 // k)
    parts = []
    for g, part in zip(G.split(size, 1), a.split(size, 1), strict=True):
        Sigma = part.mT @ part / rows
        damping = 0.3 * (Sigma.diagonal().mean() if relative else 1)
        parts.append(g @ torch.linalg.inv(Sigma + damping * torch.eye(len(Sigma)).double()))
    expected = torch.cat(parts, 1)
    moved = torch.cat([before.weight - layer.weight, (before.bias - layer.bias)[:, None]], 1)
    assert relative_error(moved, expected) < 1e-10
    for t in range(3):  # and it goes on
        opt.zero_grad()
        (layer(x * t) * target).sum().backward()
        opt.step()
    assert torch.isfinite(layer.weight).all()


def test_loss_average_makes_lr_mean_the_same_at_any_length():
    """The same tokens twice in a row, with a loss that is a mean over tokens."""
    for make in (
        lambda m: foof.FOOF(m, lr=0.3, damping=0.1, T=1, loss_average="batch+sequence"),
        lambda m: foof.KFAC(m, lr=0.03, damping=0.1, T=1, fisher="full", loss_average="batch+sequence"),
        lambda m: foof.Muon(m, T=1),
        lambda m: foof.AdamW(m, T=1),
    ):
        ends = []
        for repeats in (1, 2):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 9)).double()
            opt = make(model)
            for t in range(4):
                x = torch.randint(9, (4, 32), generator=torch.Generator().manual_seed(t)).repeat(1, repeats)
                opt.zero_grad()
                out = model(x)
                opt.update_curvature(out)
                following = x[:, :32].roll(1, 1).repeat(1, repeats)
                cross_entropy(out.flatten(0, 1), following.flatten()).backward()
                opt.step()
            ends.append(flat(model))
        assert relative_error(*ends) < 1e-6, type(opt).__name__


# --- what an adversary found ------------------------------------------------------------------------------------------------------


FORMS = {"paper": {"lr": 0.3, "damping": 1.0}, "bounded": {"lr": 0.3, "damping": 1.0, "max_change": 0.02}, "paced": {}}


@pytest.mark.parametrize("form", FORMS)
def test_weight_and_bias_in_groups_of_their_own_move_as_in_one(form):
    """The usual split into decay and no decay: with the same options as one group, and with decay for the weights alone."""
    ends = []
    for split in (False, True):
        model = net().double()
        weights, biases = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
        groups = [{"params": weights}, {"params": biases}] if split else []
        opt = foof.FOOF(model, groups=groups, weight_decay=0.1, **FORMS[form])
        for t in range(4):
            step(model, opt, batch(t)[0].double(), batch(t)[1])
        ends.append(flat(model))
    assert torch.equal(*ends)
    model = net().double()
    weights, biases = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    before = [p.detach().clone() for p in biases]
    opt = foof.FOOF(model, groups=[{"params": weights}, {"params": biases, "lr": 0.0}], **FORMS[form])
    step(model, opt, batch(0)[0].double(), batch(0)[1])
    assert all(torch.equal(p, b) for p, b in zip(biases, before, strict=True))


@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("into", FORMS)
def test_a_checkpoint_goes_on_in_the_form_it_was_saved_in(saved, into):
    model = net().double()
    opt = foof.FOOF(model, **FORMS[saved])
    for t in range(3):
        step(model, opt, batch(t)[0].double(), batch(t)[1])
    other = copy.deepcopy(model)
    again = foof.FOOF(other, **FORMS[into])
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for m, o in ((model, opt), (other, again)):
        step(m, o, batch(3)[0].double(), batch(3)[1])
    assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize("make", [foof.FOOF, lambda m: foof.FOOF(m, 0.3, 1.0), lambda m: foof.KFAC(m, T=1), foof.EKFAC])
def test_a_state_loaded_between_backward_and_step_does_not_precondition_twice(make):
    ends = []
    for loads in (False, True):
        model = net().double()
        opt = make(model)
        for t in range(4):
            opt.zero_grad()
            out = model(batch(t)[0].double())
            opt.update_curvature(out)
            cross_entropy(out, batch(t)[1]).backward()
            if loads and t == 3:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            opt.step()
        ends.append(flat(model))
    assert relative_error(*ends) < 1e-12


def test_groups_put_in_place_of_ours_are_tied_again():
    ends = []
    for replaced in (False, True):
        model = net()
        opt = foof.FOOF(model, lr=0.3, damping=1.0, T=1)
        train(model, opt, 2)
        if replaced:
            opt.param_groups = [dict(group) for group in opt.param_groups]
        opt.param_groups[0]["damping"] = 0.5
        train(model, opt, 2, 2)
        ends.append(flat(model))
    assert torch.equal(*ends)


def test_schedulers_with_a_floor_may_bring_all_groups_there():
    model = norm_net()
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    scheduler = lr_scheduler.CosineAnnealingLR(opt, 3, eta_min=1e-5)
    plateau = lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.01, min_lr=1e-5)
    for t in range(6):
        step(model, opt, *batch(t))
        scheduler.step() if t < 3 else plateau.step(1.0)


def test_masks_reach_ekfac_and_are_refused_by_natural_gradients():
    found = []
    for padded in (False, True):
        torch.manual_seed(0)
        model = Tokens().double()
        opt = foof.EKFAC(model, fisher="full", T=1)
        x = torch.randint(9, (4, 3), generator=torch.Generator().manual_seed(1))
        y = x.clone()
        if padded:
            x, y = nn.functional.pad(x, (0, 2), value=8), nn.functional.pad(y, (0, 2), value=-100)
        with opt.mask(y != -100):
            out = model(x)
        opt.update_curvature(out)  # without labels, which would do it, too
        cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100).div(4).backward()
        opt.step()
        found.append(flat(model))
    assert relative_error(*found) < 1e-10
    with pytest.raises(NotImplementedError, match="labels of -100"):
        foof.NaturalGradient(net()).mask(torch.ones(2, 2))


def test_a_bias_without_a_gradient_and_half_precision():
    model = net()
    opt = foof.FOOF(model)
    step(model, opt, *batch(0))
    opt.zero_grad()
    cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
    model[0].bias.grad, before = None, model[0].bias.detach().clone()
    opt.step()
    assert torch.equal(model[0].bias, before)
    half = net().half()
    opt = foof.FOOF(half)
    (half(batch(0)[0].half()).float().square().mean() * 1e-3).backward()
    opt.step()
    assert all(torch.isfinite(p).all() for p in half.parameters())


def test_a_gradient_that_a_step_has_used_is_not_preconditioned_again_when_it_is_clipped():
    """An expert's gradient stays from a step before, as nobody calls zero_grad(), and is clipped along with the others."""
    torch.manual_seed(0)
    model = Experts().double()
    opt = foof.FOOF(model, lr=0.1, damping=0.5, T=1)
    x, y = batch(0)[0].double(), batch(0)[1]
    step(model, opt, x, y)
    used = model.experts[1].weight.grad.clone()
    negative = x.clone()
    negative[:, 0] = -negative[:, 0].abs() - 1
    model.experts[1].requires_grad_(False)  # no pass reaches it
    cross_entropy(model(negative), y).backward()
    model.experts[1].requires_grad_(True)
    scale = min(1.0, 0.1 / torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
    before = model.experts[1].weight.detach().clone()
    opt.step()
    assert relative_error(before - model.experts[1].weight, 0.1 * scale * used) < 1e-4
