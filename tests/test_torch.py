"""Every private name of torch that ``foof._torch`` leans on: what it must mean, said when a new torch changes it."""

import typing

import pytest
import torch
from torch import nn

from foof import _torch
from foof._torch import Destination


class Probe(torch.autograd.Function):
    """Asks, in its backward, where the gradients of its inputs go."""

    seen: typing.ClassVar[list] = []

    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, e):
        Probe.seen.append((_torch.destination(ctx, 0), _torch.destination(ctx, 1), _torch.destination(ctx, 5), _torch.backward_pass_id()))
        return e, e


@pytest.fixture
def leaves():
    Probe.seen = []
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    return x, weight, Probe.apply(x, weight).sum()


def test_a_backward_pass_accumulates(leaves):
    leaves[2].backward()
    assert Probe.seen[0][:3] == (Destination.GRAD, Destination.GRAD, Destination.NOWHERE), "torch._C._will_engine_execute_node has changed"


def test_autograd_grad_captures_and_passes_the_rest_by(leaves):
    _, weight, loss = leaves
    torch.autograd.grad(loss, weight, retain_graph=True)
    assert Probe.seen[0][:2] == (Destination.NOWHERE, Destination.CAPTURED), "torch._C._will_engine_execute_node has changed"
    loss.backward(inputs=[weight])
    assert Probe.seen[1][:2] == (Destination.NOWHERE, Destination.GRAD)


def test_a_leaf_knows_where_its_gradient_goes(leaves):
    x, weight, loss = leaves
    seen = []
    handle = loss.grad_fn.register_prehook(lambda _: seen.append((_torch.destination_of(x), _torch.destination_of(weight))))
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, weight)
    handle.remove()
    assert seen == [(Destination.GRAD, Destination.GRAD), (Destination.NOWHERE, Destination.CAPTURED)], "get_gradient_edge has changed"


def test_passes_have_numbers_of_their_own(leaves):
    _, _, loss = leaves
    loss.backward(retain_graph=True)
    loss.backward()
    first, second = (seen[3] for seen in Probe.seen)
    assert first >= 0, "torch._C._current_graph_task_id has changed"
    assert first != second
    assert _torch.backward_pass_id() == -1


def test_transforms_are_seen():
    seen = []
    x = torch.ones(2)

    def f(v):
        seen.append(_torch.inside_transform())
        return v.sum()

    f(x)
    torch.func.grad(f)(x)
    torch.func.vmap(f)(torch.ones(3, 2))
    torch.func.jvp(f, (x,), (x,))
    assert seen == [False, True, True, True], "torch._C._are_functorch_transforms_active or forward_ad._current_level has changed"


def test_batched_backward_passes_are_seen():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, e):
            seen.append(_torch.batched(e))
            return e

    x = torch.ones(2, requires_grad=True)
    out = Look.apply(x)
    torch.autograd.grad(out, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(out, x, torch.ones(2))
    assert seen == [True, False], "torch._C._functorch.is_batchedtensor or is_legacy_batchedtensor has changed"


def test_nodes_of_a_function_have_its_class():
    node = Probe.apply(torch.ones(1, requires_grad=True), torch.ones(1)).grad_fn
    assert isinstance(node, _torch.node_class(Probe)), "autograd.Function._backward_cls has changed"


def test_forward_hooks_run_in_the_order_of_their_dictionary():
    layer, order = nn.Linear(1, 1), []
    handles = [layer.register_forward_hook(lambda *_, k=k: order.append(k)) for k in range(2)]
    assert list(_torch.forward_hooks(layer)) == [h.id for h in handles], "nn.Module._forward_hooks has changed"
    _torch.forward_hooks(layer).move_to_end(handles[1].id, last=False)
    layer(torch.ones(1))
    assert order == [1, 0]


def test_own_parameters():
    layer = nn.Linear(2, 2)
    assert _torch.own_parameter(layer, "weight") is layer.weight, "nn.Module._parameters has changed"
    assert _torch.own_parameter(nn.Linear(2, 2, bias=False), "bias") is None
    assert _torch.own_parameter(nn.utils.parametrizations.weight_norm(layer), "weight") is None


def test_origin_and_version():
    x = torch.zeros(3)
    assert _torch.origin(x[1:]) is x, "Tensor._base has changed"
    assert _torch.origin(x) is x
    before = _torch.version(x)
    x[1:].add_(1)
    assert _torch.version(x) > before, "Tensor._version has changed"


def test_hooks_on_gradients_are_seen():
    x = torch.ones(1, requires_grad=True)
    assert not _torch.has_hooks(x)
    handle = x.register_hook(lambda g: g)
    assert _torch.has_hooks(x), "Tensor._backward_hooks has changed"
    handle.remove()
    assert not _torch.has_hooks(x)


def test_padding_of_convolutions():
    conv = nn.Conv2d(1, 1, (2, 3), padding="same")
    assert _torch.padding_of_both_sides(conv) == [1, 1, 0, 1], "Conv._reversed_padding_repeated_twice has changed"
    called = []
    setattr(conv, _torch.CONV_FORWARD, lambda *a: called.append(1) or a[0])
    conv(torch.ones(1, 1, 4, 4))
    assert called, "a convolution's forward() no longer calls _conv_forward"


def test_compiled_models_hold_the_model_inside():
    model = nn.Linear(1, 1)
    assert _torch.inside_compiled(torch.compile(model)) is model, "torch.compile's _orig_mod has changed"
    assert _torch.inside_compiled(model) is None


def test_joining_is_seen():
    assert not _torch.joins_uneven_inputs(nn.Linear(1, 1))
    config = nn.parallel.DistributedDataParallel.__init__  # its attribute is made there
    assert "_join_config" in config.__code__.co_names or hasattr(torch.distributed.algorithms.join, "_JoinConfig")


def test_lists_of_tensors_at_once():
    tensors = [torch.ones(2), torch.ones(3)]
    _torch.foreach_mul_(tensors, 2.0)
    _torch.foreach_add_(tensors, [torch.ones(2), torch.ones(3)], alpha=-1.0)
    assert all((t == 1).all() for t in tensors), "torch._foreach_mul_ or _foreach_add_ has changed"
    _torch.foreach_addcmul_(tensors, [torch.ones(2), torch.ones(3)], [torch.tensor(2.0), torch.tensor(4.0)], value=0.5)
    assert [t.mean().item() for t in tensors] == [2.0, 3.0], "torch._foreach_addcmul_ has changed, or refuses factors of no shape"
    norms = _torch.foreach_norm([t.half() for t in tensors], dtype=torch.float32)
    assert torch.equal(torch.stack(norms), torch.tensor([8.0, 27.0]).sqrt()), "torch._foreach_norm has changed"


def test_one_pass_over_memory_is_sgd_with_momentum():
    w, g, v = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0]), torch.tensor([4.0, 8.0])
    _torch.fused_sgd_([w], [g], [v], weight_decay=0.0, momentum=0.5, lr=2.0, dampening=0.75, nesterov=False, maximize=False,
                      is_first_step=False)  # fmt: skip
    assert v.tolist() == [2.75, 3.75], "torch._fused_sgd_ has another momentum"
    assert w.tolist() == [-4.5, -5.5], "torch._fused_sgd_ takes another step"


def test_operations_are_seen():
    class Names(_torch.DispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append((str(func.overloadpacket), func.is_view))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 3)
    with Names() as names:
        x.mT @ x
    assert names.seen == [("aten.transpose", True), ("aten.mm", False)], "torch.utils._python_dispatch.TorchDispatchMode has changed"


def test_kinds_of_layers_with_passes_of_their_own():
    assert isinstance(nn.Dropout2d(), _torch.Dropout)
    assert isinstance(nn.BatchNorm3d(1), _torch.BatchNorm)


def test_dynamo_breaks_its_graph_at_a_disabled_function():
    assert _torch.disable_dynamo(lambda: 3)() == 3


def test_onednn_multiplies_by_the_transposed():
    if _torch.onednn_linear is None:
        pytest.skip("torch was built without oneDNN")
    x, w = torch.randn(5, 3), torch.randn(4, 3)
    assert torch.allclose(_torch.onednn_linear(x, w, None, "none", [], ""), x @ w.mT), "torch.ops.mkldnn._linear_pointwise has changed"
    assert torch.allclose(_torch.onednn_linear(x, w.mT.contiguous().mT, None, "none", [], ""), x @ w.mT)
