"""The tap gives exact plain gradients wherever it is put, and leaves no trace."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap

from cases import KINDS, cnn, mlp
from foof._torch import backward_pass_id
from foof.covering import covered_layers
from foof.layers import Linear
from foof.tap import Tap, existing_tap, tapped


class Plain:
    """A receiver that returns the plain gradient and remembers the passes it saw."""

    mask = None

    def __init__(self):
        self.passes = []

    def receive(self, visit):
        self.passes.append(backward_pass_id())
        return visit.layer.weight_gradient(visit.x, visit.e)


class Silent:
    mask = None

    def receive(self, visit):
        return None


def gradients(model, *inputs):
    model.zero_grad()
    floating = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    for x in floating:
        x.grad = None
    (model(*inputs) ** 2).sum().backward()
    return [p.grad.clone() for p in model.parameters()] + [x.grad.clone() for x in floating]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_plain_gradients_are_exact(kind, data):
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    layer, x = data.draw(KINDS[kind])
    layer = layer.double()
    x = x.double() if x.is_floating_point() else x
    expected = gradients(layer, x)
    with tapped(covered_layers(layer)[0], Plain()):
        ours = gradients(layer, x)
    for a, b in zip(ours, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert not layer._forward_hooks


@pytest.mark.parametrize("shape", [(4,), (2, 8, 8)])
def test_unbatched_inputs(shape):
    """A single vector for a linear layer, a single image for a convolution."""
    model = (nn.Linear(4, 3) if len(shape) == 1 else nn.Conv2d(2, 3, 3, padding=1)).double()
    x = torch.randn(*shape, dtype=torch.float64)
    expected = gradients(model, x)
    with tapped(covered_layers(model)[0], Plain()):
        ours = gradients(model, x)
    assert all(torch.allclose(a, b) for a, b in zip(ours, expected, strict=True))


def test_in_place_activations_after_a_tapped_layer():
    model, x = cnn().double(), torch.randn(3, 2, 8, 8, dtype=torch.float64)
    expected = gradients(model, x)
    receiver = Plain()
    with tapped(covered_layers(model)[0], receiver):
        ours = gradients(model, x)
    assert all(torch.allclose(a, b) for a, b in zip(ours, expected, strict=True))
    assert len(receiver.passes) == 3
    assert len(set(receiver.passes)) == 1


def test_functional_call_and_function_transforms():
    model, x = mlp(4, 5, 3).double(), torch.randn(6, 4, dtype=torch.float64)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = torch.autograd.grad(functional_call(model, weights, (x,)).sum(), list(weights.values()))

    def loss(weights, x):
        return functional_call(model, weights, (x,)).sum()

    plain = {name: p.detach() for name, p in model.named_parameters()}
    per_datapoint = vmap(grad(loss), (None, 0))(plain, x)
    with tapped(covered_layers(model)[0], Plain()):
        ours = torch.autograd.grad(functional_call(model, weights, (x,)).sum(), list(weights.values()))
        transformed = vmap(grad(loss), (None, 0))(plain, x)
    assert all(torch.allclose(a, b) for a, b in zip(ours, expected, strict=True))
    assert all(torch.equal(transformed[k], per_datapoint[k]) for k in plain)


def test_keyword_input_and_second_backward():
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    with tapped(covered_layers(model)[0], Plain()):
        out = model(input=x).sum()
        out.backward(retain_graph=True)
        once = model.weight.grad.clone()
        out.backward()
        assert torch.allclose(model.weight.grad, 2 * once)
        (first,) = torch.autograd.grad(model(x).pow(2).sum(), model.weight, create_graph=True)
        with pytest.raises(RuntimeError, match=r"cannot be differentiated again.*remove\(\) first"):
            first.sum().backward()


def test_a_gradient_penalty_is_refused_where_the_error_is_constant():
    """Next to the output e does not depend on anything: torch alone would call the second derivative zero."""
    model, x = nn.Linear(4, 1), torch.randn(2, 4, requires_grad=True)
    with tapped(covered_layers(model)[0], Plain()):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            slope.square().sum().backward()


def test_forward_mode_and_traces_are_plain():
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    with tapped(covered_layers(model)[0], Plain()):
        assert torch.jit.trace(model, x)(x).equal(model(x))
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert torch.allclose(tangent, model.weight.sum(1).expand(2, 3))


def test_a_receiver_may_skip_weight_gradients():
    model, x = mlp(4, 5, 3), torch.randn(6, 4)
    with tapped(covered_layers(model)[0], Silent()):
        x.requires_grad_()
        model(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert x.grad is not None


def test_the_last_tap_is_on_top():
    """A Fisher pass over a model with an optimizer attached sees the errors; the optimizer's tap sees none."""
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    below, above = Plain(), Plain()
    tap = Tap(covered_layers(model)[0][0], below)
    with tapped(covered_layers(model)[0], above):
        model(x).sum().backward()
    assert (len(below.passes), len(above.passes)) == (0, 1)
    assert existing_tap(model) is tap
    tap.remove()
    assert existing_tap(model) is None


@pytest.mark.parametrize("made", ["before", "after", "beside"])
def test_a_hook_that_changes_the_output_comes_after_the_tap(made):
    """Registered before the tap or after it, and with an optimizer's tap below."""
    model, x = mlp(4, 5, 3).double(), torch.randn(6, 4, dtype=torch.float64)

    def register():
        return model[0].register_forward_hook(lambda module, args, out: torch.sin(3 * out))

    handle = register()
    expected = gradients(model, x)
    handle.remove()
    if made != "after":
        register()
    below, receiver = Plain(), Plain()
    if made == "beside":
        taps = [Tap(layer, below) for layer in covered_layers(model)[0]]
        assert taps
    with tapped(covered_layers(model)[0], receiver):
        if made == "after":
            register()
        ours = gradients(model, x)
    assert all(torch.allclose(a, b) for a, b in zip(ours, expected, strict=True))
    assert (len(below.passes), len(receiver.passes)) == (0, 2)


def test_a_hook_put_before_the_tap_is_refused():
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    with tapped(covered_layers(model)[0], Plain()):
        handle = model.register_forward_hook(lambda module, args, out: 2 * out, prepend=True)
        with pytest.raises(RuntimeError, match="Register it without prepend"):
            model(x)
        with torch.no_grad():
            model(x)
        handle.remove()
        model(x)


def test_no_graph_is_kept_twice():
    """The layer's own backward node is dropped: the output hangs on the tap alone."""
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    with tapped(covered_layers(model)[0], Plain()):
        out = model(x)
    assert type(out.grad_fn).__name__ == "_JunctionBackward"
    assert all("Addmm" not in type(f).__name__ for f, _ in out.grad_fn.next_functions if f is not None)


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@settings(max_examples=20)
@given(data=st.data())
def test_a_bias_that_is_not_the_layers_own_has_its_plain_gradient(kind, data):
    layer, x = data.draw(KINDS[kind])
    layer, x = layer.double(), x.double()
    expected = gradients(layer, x)
    (covered,) = covered_layers(layer)[0]
    with tapped([type(covered)("", layer, with_bias=False)], Plain()):
        ours = gradients(layer, x)
    for a, b in zip(ours, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_bias_that_is_not_the_layers_own_is_none_of_the_receivers_business():
    model, x, receiver = nn.Linear(4, 3).double(), torch.randn(6, 4, dtype=torch.float64), Plain()
    with tapped([Linear("", model, with_bias=False)], receiver):
        (found,) = torch.autograd.grad((model(x) ** 2).sum(), model.bias)
    assert not receiver.passes
    assert torch.allclose(found, 2 * model(x).sum(0))


@pytest.mark.parametrize("wanted", ["inputs", "weight", "bias"])
def test_only_passes_that_lead_to_a_layers_weights_are_received(wanted):
    """A gradient with respect to the inputs (saliency, adversarial examples) is none of the optimizer's business."""
    model, x = mlp(4, 5, 3).double(), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    target = {"inputs": x, "weight": model[0].weight, "bias": model[0].bias}[wanted]
    (expected,) = torch.autograd.grad((model(x) ** 2).sum(), target)
    receiver = Plain()
    with tapped(covered_layers(model)[0], receiver):
        (found,) = torch.autograd.grad((model(x) ** 2).sum(), target)
    assert len(receiver.passes) == (0 if wanted == "inputs" else 1)
    assert torch.allclose(found, expected)
