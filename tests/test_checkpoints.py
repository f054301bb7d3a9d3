"""Checkpoints: bitwise at every step, across precisions and devices, and refused where they do not fit."""

import copy
import io

import pytest
import torch
from torch import nn

import foof
from cases import OPTIMIZERS, batch, flat, mlp, norm_net, train
from foof.study.train import ablations
from oracle import relative_error


def save_and_load(state):
    """Through a file, with nothing but tensors and plain containers allowed."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("initialised", [True, False])
def test_resume_is_bitwise_at_any_step(name, initialised):
    straight = norm_net()
    opt = OPTIMIZERS[name](straight)
    attached = opt.preconditioner
    if initialised:
        attached.initialise([batch(100 + k) for k in range(3)])
    saved = []
    for t in range(11):
        saved.append(save_and_load({"model": straight.state_dict(), "opt": opt.state_dict()}))
        train(straight, opt, 1, t)
    for t, state in enumerate(saved):
        model = norm_net()
        resumed = OPTIMIZERS[name](model)
        model.load_state_dict(state["model"])
        resumed.load_state_dict(state["opt"])
        train(model, resumed, 11 - t, t)
        assert torch.equal(flat(model), flat(straight)), f"resumed at step {t}"


ENUMERATED = {  # another precision would draw other labels
    "foof": OPTIMIZERS["foof"],
    "foof-cholesky": OPTIMIZERS["foof-cholesky"],
    "kfac": OPTIMIZERS["kfac-full"],
    "kfac-standard": lambda model: foof.KFAC(model, lr=0.1, damping=0.1, fisher="full", damping_mode="standard", T=3, S=1),
    "kfac-deferred": lambda model: ablations.kfac(model, lr=0.1, damping=0.1, fisher="full", deferred=True, T=3, S=1),
    "natural": lambda model: foof.NaturalGradient(model, lr=0.05, damping=0.1, fisher="full", T=4),
}


@pytest.mark.parametrize("name", ENUMERATED)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_checkpoint_of_another_precision_goes_on_in_that_of_the_model(name, dtypes):
    state, ends = None, []
    for dtype in (*dtypes, dtypes[0]):  # saved by the first, resumed by the other two
        model = norm_net().to(dtype)
        opt = ENUMERATED[name](model)
        if state is not None:
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
        for t in range(2) if state is None else range(2, 7):
            x, y = batch(t)
            opt.zero_grad()
            out = model(x.to(dtype))
            opt.update_curvature(out, y)
            nn.functional.cross_entropy(out, y).backward()
            opt.step()
        state = state or save_and_load({"model": model.state_dict(), "opt": opt.state_dict()})
        ends.append(flat(model).double())
    assert relative_error(ends[1], ends[2]) < 1e-3


def test_a_checkpoint_from_another_kind_of_device_starts_new_labels():
    model = norm_net()
    opt = foof.KFAC(model, T=2)
    train(model, opt, 3)
    state = opt.state_dict()
    state["neurons"]["generator"] = torch.zeros(16, dtype=torch.uint8)  # what a CUDA generator saves
    with pytest.warns(UserWarning, match="another kind of device"):
        opt.load_state_dict(state)
    train(model, opt, 3, 3)


def test_a_checkpoint_of_another_architecture_changes_nothing():
    opt = foof.FOOF(mlp(4, 5, 3), lr=0.3, damping=1.0, T=2)
    model = mlp(4, 6, 3)
    other = foof.FOOF(model, lr=0.3, damping=1.0, T=2)
    train(model, other, 3)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="another architecture"):
        other.load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match="no statistics"):
        other.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())
    after = other.state_dict()
    assert after["neurons"]["t"] == before["neurons"]["t"]
    assert torch.equal(
        after["neurons"]["blocks"]["0"]["moments"]["Sigma"]["value"], before["neurons"]["blocks"]["0"]["moments"]["Sigma"]["value"]
    )


def test_a_checkpoint_knows_which_damping_its_inverses_were_made_with():
    def trained(twice: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        x, y = torch.randn(6, 4).double(), torch.randn(6, 3).double()
        opt = foof.FOOF(model, lr=0.1, damping=1.0, T=1)
        opt.param_groups[0]["damping"] = 10.0  # the inverse of the first step
        for damping in (10.0, 1.0, 1.0):
            opt.param_groups[0]["damping"] = damping
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if twice and damping == 10.0:
                state = opt.state_dict()
                opt.remove()
                opt = foof.FOOF(model, lr=0.1, damping=1.0, T=1)  # made with the damping that comes next
                opt.load_state_dict(state)
        return model.weight.detach()

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)
