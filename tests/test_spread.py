"""Inversions spread over the steps: the sweep against a dense inverse, whose turn it is, and that a checkpoint goes on in the middle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foof
from cases import batch, flat, mlp, norm_net, train
from foof import linalg, sweep
from foof.optim.turns import Turns
from foof.statistics import Schedule, Turn
from foof.sweep import Gradual, Sweep
from oracle import relative_error
from test_checkpoints import save_and_load

# --- the sweep ------------------------------------------------------------------------------------------------------------------


def spd(*shape, rank=None, dtype=torch.float64, seed=0):
    X = torch.randn(*shape[:-2], rank or 2 * shape[-1], shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (X.mT @ X / X.shape[-2]).to(dtype)


@pytest.mark.parametrize(("shape", "damping"), [((1, 1), 0.1), ((10, 10), 0.1), ((3, 7, 7), 0.1), ((2, 3, 5, 5), torch.rand(2, 3) + 0.1)])
def test_a_sweep_is_the_damped_inverse(shape, damping):
    S = spd(*shape, rank=4)
    before, expected = S.clone(), torch.linalg.inv(linalg.add_damping(S, damping))
    for panel in (1, 2, 4, 16):
        gradual = Sweep(S, damping, panel)
        for part in range(gradual.parts):
            gradual.advance(part + 1)
        assert relative_error(gradual.result(), expected) < 1e-12
    assert torch.equal(S, before)


def test_a_sweep_is_as_accurate_as_cholesky():
    U = torch.linalg.qr(spd(200, 200))[0]
    S = (U * torch.logspace(0, -8, 200, dtype=torch.float64)) @ U.mT
    S = (S + S.mT).float() / 2
    exact = torch.linalg.inv(linalg.add_damping(S.double(), 1e-5))
    swept = Sweep(S, 1e-5, 32)
    swept.advance(swept.parts)
    assert relative_error(swept.result().double(), exact) < 2 * relative_error(linalg.damped_inverse(S, 1e-5).double(), exact) < 0.02


def test_what_is_indefinite_is_not_inverted():
    for S in (torch.diag(torch.tensor([1.0, -1.0, 1.0])), torch.full((3, 3), float("nan"))):
        swept = Sweep(S, 0.1, 1)
        swept.advance(3)
        assert swept.result() is None
        assert Gradual([Sweep(torch.eye(2), 0.1), swept], lambda P, Q: (P, Q)).result() is None


# --- whose turn it is -----------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    costs=st.lists(st.integers(1, 100), min_size=1, max_size=9), T=st.integers(1, 40), S=st.integers(1, 40), parts=st.integers(1, 9),
    warming_up=st.booleans(), together=st.booleans(),
)  # fmt: skip
def test_every_matrix_has_its_turn_once_in_every_round(costs, T, S, parts, warming_up, together):
    schedule, total = Schedule(T, min(S, T), warming_up=warming_up, spread=True), sum(costs)
    turns = [Turn(sum(costs[:k]), cost, total, parts) for k, cost in enumerate(costs)]
    while schedule.t < 3 * T:
        rounds, fed = [], [0] * len(turns)
        _, length = schedule.round()
        for step in range(length):
            assert schedule.round() == (step, length)
            steps = [turn.steps(schedule, together) for turn in turns]
            rounds.append(steps)
            for k, (first, last) in enumerate(steps):
                begins = 0 if together else turns[k].steps(Schedule(T, min(S, T), warming_up=False), together)[0]
                fed[k] += schedule.gathers(begins) and not first <= step < last
            schedule.advance()
        assert all(steps == rounds[0] for steps in rounds)
        for turn, (first, last) in zip(turns, rounds[0], strict=True):
            assert 0 <= first <= last < length
            done = [turn.done(step, first, last) for step in range(first, last + 1)]
            assert done == sorted(done)
            assert done[-1] == parts
        assert [first for first, _ in rounds[0]] == sorted(first for first, _ in rounds[0])
        if schedule.t > T:
            assert min(fed) >= min(S, T - T // 2)  # of every T steps, however long inversions take
            assert S > T // 2 + 1 or fed == [S] * len(turns)
        elif warming_up:
            assert min(fed) >= length // 2


def test_no_step_pays_for_all(monkeypatch):
    """After an initialisation: products of 8 rows at a time, and hardly more on one step than on another."""
    monkeypatch.setattr(sweep, "PANEL", 8)
    costs, counted, advance = [], Sweep._sweep, Turns.take

    def count(self, k):
        costs[-1] += self._shape[-1] ** 2 * 8
        counted(self, k)

    def step(self):
        costs.append(0)
        return advance(self)

    monkeypatch.setattr(Sweep, "_sweep", count)
    monkeypatch.setattr(Turns, "take", step)
    torch.manual_seed(0)
    model = mlp(40, 64, 96, 64, 10)
    opt = foof.FOOF(model, lr=0.01, damping=1.0, T=50, S=5, spread=True)
    data = [(torch.randn(8, 40), torch.randint(0, 10, (8,))) for _ in range(100)]
    opt.initialise([x for x, _ in data[:2]])
    at_once, invert = [], opt.preconditioner.estimator.invert
    monkeypatch.setattr(opt.preconditioner.estimator, "invert", lambda block, T: at_once.append(block) or invert(block, T))
    for x, y in data:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    sizes = [block.layer.m for block in opt.preconditioner.blocks]
    assert not at_once
    assert sum(costs) == 2 * sum(-(-m // 8) * 8 * m**2 for m in sizes)
    assert max(costs) <= 2 * 8 * max(sizes) ** 2  # a part of one, and where its turn ends a part of the next


# --- optimizers -----------------------------------------------------------------------------------------------------------------

SPREAD = {
    "foof": lambda model, **o: foof.FOOF(model, lr=0.1, damping=0.1, momentum=0.9, spread=True, **o),
    "foof-default": lambda model, **o: foof.FOOF(model, spread=True, **o),
    "sgd": lambda model, **o: foof.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, damping=0.1, spread=True, **o),
    "kfac": lambda model, **o: foof.KFAC(model, lr=0.1, damping=0.1, spread=True, **o),
    "kfac-standard": lambda model, **o: foof.KFAC(model, lr=0.1, damping=0.1, damping_mode="standard", spread=True, **o),
    "ekfac": lambda model, **o: foof.EKFAC(model, lr=0.1, damping=0.1, spread=True, **o),
    "foof.Muon": lambda model, **o: foof.Muon(model, lr=0.1, spread=True, **o),
    "foof.AdamW": lambda model, **o: foof.AdamW(model, lr=0.03, spread=True, **o),
}


def train_damped(model, opt, steps, start):
    """With another damping on every step."""
    for t in range(start, start + steps):
        for group in opt.param_groups:
            if "damping" in group:
                group["damping"] = 0.1 * (1 + t % 3)
        train(model, opt, 1, t)


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("initialised", [True, False])
@pytest.mark.parametrize("S", [2, 7])
def test_resume_is_bitwise_at_any_step(name, initialised, S, monkeypatch):
    monkeypatch.setattr(sweep, "PANEL", 2)
    straight = norm_net()
    opt = SPREAD[name](straight, T=7, S=S)
    if initialised:
        opt.preconditioner.initialise([batch(100 + k) for k in range(3)])
    saved, begun = [], set()
    for t in range(16):
        saved.append(save_and_load({"model": straight.state_dict(), "opt": opt.state_dict()}))
        train_damped(straight, opt, 1, t)
        begun |= set(opt.preconditioner.making)
    assert bool(begun) == (name in ("foof", "foof-default", "sgd", "kfac", "foof.Muon"))  # an eigenbasis is made at once
    for t, state in enumerate(saved):
        model = norm_net()
        resumed = SPREAD[name](model, T=7, S=S)
        model.load_state_dict(state["model"])
        resumed.load_state_dict(state["opt"])
        train_damped(model, resumed, 16 - t, t)
        assert torch.equal(flat(model), flat(straight)), f"resumed at step {t}"


def one_step(model, opt, x, y):
    opt.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    opt.step()


def wide():
    """A network with inverses of several panels, and steps of a round of 12, in which each is made in parts."""
    torch.manual_seed(0)
    model = mlp(20, 400, 200, 3)
    opt = foof.FOOF(model, lr=0.01, damping=0.5, T=12, S=2, spread=True)
    data = [(torch.randn(30, 20), torch.randint(0, 3, (30,))) for _ in range(40)]
    opt.initialise([data[0][0]])
    return model, opt, data


def test_an_inverse_is_of_the_averages_at_the_beginning_of_its_turn():
    model, opt, data = wide()
    engine, of = opt.preconditioner, {}
    for x, y in data:
        one_step(model, opt, x, y)
        for block in engine.blocks:
            if block in engine.making and block not in of:
                of[block] = block.moments["Sigma"].value.clone()
            elif block in of and block not in engine.making:
                expected = torch.linalg.inv(linalg.add_damping(of.pop(block).double(), 0.5))
                assert relative_error(block.inverse.tensor.double(), expected) < 1e-5
    assert not of or engine.making


def test_refresh_and_a_move_in_the_middle():
    model, opt, data = wide()
    engine = opt.preconditioner
    for x, y in data[:7]:
        one_step(model, opt, x, y)
    assert engine.making
    for group in opt.param_groups:
        group["damping"] = 2.0
    engine.refresh()
    assert not engine.making
    for block in engine.blocks:
        expected = torch.linalg.inv(linalg.add_damping(block.moments["Sigma"].value.double(), 2.0))
        assert relative_error(block.inverse.apply(torch.eye(block.layer.m)).double(), expected) < 1e-5
    one_step(model, opt, *data[7])
    assert engine.making
    model.double()
    for x, y in data[8:]:
        one_step(model, opt, x.double(), y)
    assert {block.inverse.tensor.dtype for block in engine.blocks} == {torch.float64}


def test_what_cannot_be_made_in_parts_is_made_at_once(monkeypatch):
    monkeypatch.setattr(Sweep, "result", lambda self: None)
    model, opt, data = wide()
    block = opt.preconditioner.blocks[1]
    for x, y in data[:12]:
        before, was_making = block.inverse, block in opt.preconditioner.making
        Sigma = block.moments["Sigma"].value.clone()
        one_step(model, opt, x, y)
        if was_making and block not in opt.preconditioner.making:
            assert block.inverse is not before
            assert torch.equal(block.inverse.tensor, linalg.damped_inverse(Sigma, 0.5))
            return
    raise AssertionError("no inverse has been made")


def test_a_checkpoint_of_an_optimizer_that_does_not_spread():
    plain, spread = norm_net(), norm_net()
    before = foof.FOOF(plain, lr=0.1, damping=0.1, T=7)
    train(plain, before, 9)
    after = foof.FOOF(spread, lr=0.1, damping=0.1, T=7, spread=True)
    spread.load_state_dict(plain.state_dict())
    after.load_state_dict(before.state_dict())
    train(spread, after, 20, 9)
    before.load_state_dict(after.state_dict())
