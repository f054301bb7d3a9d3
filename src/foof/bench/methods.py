"""Who is compared: first-order optimizers of torch, ours, and peers, each as its own documentation recommends, at the case's T and S."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import foof
from foof.bench.cases import Batch, Case

Optimizers = list[torch.optim.Optimizer]
IDLE = 1e-6  # a learning rate that leaves random networks on random data as they are, for measuring what a step costs


@dataclass(frozen=True)
class Method:
    """How its optimizers are made for a model, a case and a learning rate. ``second``: does it use second-order information?"""

    name: str
    make: Callable[[nn.Module, Case, float], Optimizers]
    second: bool = True
    ours: bool = False
    scheduled: bool = True  # do steps differ over a period T?
    variant: bool = False  # measured where a case asks for it
    package: str | None = None  # that it needs, beside torch and foof

    @property
    def installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


class Training:
    """A model under a method, a step at a time."""

    def __init__(self, method: Method, case: Case, lr: float = IDLE, model: nn.Module | None = None) -> None:
        self.case, self.model = case, case.model() if model is None else model
        self.optimizers = method.make(self.model, case, lr)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One update; the loss before it."""
        for opt in self.optimizers:
            opt.zero_grad()
        out = self.model(x)
        for opt in self.optimizers:
            if hasattr(opt, "update_curvature"):
                opt.update_curvature(out)
            if hasattr(opt, "see"):
                opt.see(x, y)
        loss: Tensor = self.case.loss(out, y)
        loss.backward()
        for opt in self.optimizers:
            opt.step()
        return loss.detach()

    def close(self) -> None:
        """Take ours off the model, which would otherwise be kept alive by its hooks."""
        for opt in self.optimizers:
            if hasattr(opt, "remove"):
                opt.remove()


# --- torch's --------------------------------------------------------------------------------------------------------------


def _sgd(model: nn.Module, case: Case, lr: float) -> Optimizers:
    return [torch.optim.SGD(_trainable(model), lr=lr, momentum=0.9)]


def _adamw(model: nn.Module, case: Case, lr: float) -> Optimizers:
    return [torch.optim.AdamW(_trainable(model), lr=lr)]


def _muon(model: nn.Module, case: Case, lr: float) -> Optimizers:
    """For the hidden weights, which are matrices; embeddings, the output layer and the others by AdamW, as its documentation asks."""
    of_vocabulary = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices = [p for p in _trainable(model) if p.dim() == 2 and id(p) not in of_vocabulary][:-1]
    if not matrices:
        raise ValueError("torch.optim.Muon needs hidden weights that are matrices, and this model has none.")
    taken = {id(p) for p in matrices}
    others = torch.optim.AdamW([p for p in _trainable(model) if id(p) not in taken], lr=min(lr, 3e-4))
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), others]


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# --- ours -----------------------------------------------------------------------------------------------------------------


def _options(model: nn.Module, case: Case) -> dict[str, Any]:
    """Embeddings, whose inputs are a vocabulary, are left to the fallback optimizer."""
    exclude = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return {"T": case.T, "S": case.S, "exclude": exclude, "loss_average": "batch+sequence" if case.rows > 1 else "batch"}


def _foof(damping: float = 1.0, **more: Any) -> Callable[[nn.Module, Case, float], Optimizers]:
    def make(model: nn.Module, case: Case, lr: float) -> Optimizers:
        opt = foof.FOOF(model, lr=lr, damping=damping, **_options(model, case), **more)
        opt.initialise([x for x, _ in case.batches(case.initial)])
        return [opt]

    return make


def _foof_default(model: nn.Module, case: Case, lr: float) -> Optimizers:
    """Nothing chosen but T and S."""
    return [foof.FOOF(model, T=case.T, S=case.S)]


def _kfac(damping: float = 0.01, **more: Any) -> Callable[[nn.Module, Case, float], Optimizers]:
    def make(model: nn.Module, case: Case, lr: float) -> Optimizers:
        opt = foof.KFAC(model, lr=lr, damping=damping, likelihood=case.likelihood, **_options(model, case), **more)
        opt.initialise([x for x, _ in case.batches(case.initial)])
        return [opt]

    return make


# --- peers ----------------------------------------------------------------------------------------------------------------


class CurvlinopsKFAC(torch.optim.SGD):
    """SGD on gradients multiplied by curvlinops' ``KFACInverseLinearOperator``, made anew every T steps from the S batches before.

    curvlinops has no optimizer; this is the way its documentation shows for one: heuristic damping, inverses cached. ``forward-only`` is
    its name for FOOF. Parameters of other layers than linear ones and convolutions are stepped by plain SGD.
    """

    def __init__(self, model: nn.Module, case: Case, lr: float, damping: float, fisher: str) -> None:
        super().__init__(_trainable(model), lr=lr)
        self.model, self.case, self.damping, self.fisher, self.t = model, case, damping, fisher, 0
        known = (nn.Linear, nn.Conv2d)
        self.covered = [p for m in model.modules() if isinstance(m, known) for p in m.parameters(recurse=False) if p.requires_grad]
        self.batches = deque[Batch](maxlen=case.S)
        self.inverse: Any = None

    def see(self, x: Tensor, y: Tensor) -> None:
        self.batches.append((x, y))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.t % self.case.T == 0:
            self.inverse = self._invert()
        gradients = [p.grad for p in self.covered]
        for p, natural in zip(self.covered, self.inverse @ gradients, strict=True):
            p.grad = natural
        self.t += 1
        super().step(closure)

    def _invert(self) -> Any:
        from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

        K = KFACLinearOperator(
            self.model, self.case.loss, self.covered, list(self.batches), check_deterministic=False, fisher_type=self.fisher,
            separate_weight_and_bias=False, num_per_example_loss_terms=self.case.rows,
        )  # fmt: skip
        heuristic = self.fisher != "forward-only"  # whose second factor is the identity, and not damped
        return KFACInverseLinearOperator(K, damping=self.damping if heuristic else (self.damping, 0.0), use_heuristic_damping=heuristic)


def _curvlinops(fisher: str, damping: float) -> Callable[[nn.Module, Case, float], Optimizers]:
    return lambda model, case, lr: [CurvlinopsKFAC(model, case, lr, damping, fisher)]


def _singd(model: nn.Module, case: Case, lr: float) -> Optimizers:
    """Its defaults, with dense factors, which it feeds and updates on one of every T/S steps: as often as ours are fed. What it does not
    know is left to AdamW."""
    from singd.optim.optimizer import SINGD

    average = "batch+sequence" if case.rows > 1 else "batch"
    opt = SINGD(model, lr=lr, T=max(case.T // case.S, 1), loss_average=average, warn_unsupported=False)
    taken = {id(p) for group in opt.param_groups for p in group["params"]}
    left = [p for p in _trainable(model) if id(p) not in taken]
    return [opt, *([torch.optim.AdamW(left, lr=min(lr, 3e-4))] if left else [])]


def _soap(model: nn.Module, case: Case, lr: float) -> Optimizers:
    """Its defaults but T: statistics are fed on every step, which is how it is defined."""
    from pytorch_optimizer import SOAP

    return [SOAP(_trainable(model), lr=lr, precondition_frequency=case.T)]


def _shampoo(model: nn.Module, case: Case, lr: float) -> Optimizers:
    """Its scalable form, blocks of up to 512, grafted to RMSProp, as distributed Shampoo's authors use it; statistics on S of T steps."""
    from pytorch_optimizer import ScalableShampoo
    from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

    return [ScalableShampoo(_trainable(model), lr=lr, start_preconditioning_step=1, preconditioning_compute_steps=case.T,
                            statistics_compute_steps=max(case.T // case.S, 1), graft_type=LayerWiseGrafting.RMSPROP)]  # fmt: skip


BASELINE = Method("SGD + momentum", _sgd, second=False, scheduled=False)
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("FOOF", _foof(), ours=True),
        Method("FOOF, spread", _foof(spread=True), ours=True, variant=True),
        Method("KFAC", _kfac(), ours=True),
        Method("KFAC, spread", _kfac(spread=True), ours=True, variant=True),
        Method("FOOF, no lr", _foof_default, ours=True, variant=True),
        Method("AdamW", _adamw, second=False, scheduled=False),
        Method("Muon (torch)", _muon, second=False, scheduled=False),
        Method("curvlinops FOOF", _curvlinops("forward-only", 1.0), package="curvlinops"),
        Method("curvlinops KFAC", _curvlinops("mc", 0.01), package="curvlinops"),
        Method("SINGD", _singd, package="singd"),
        Method("SOAP", _soap, package="pytorch_optimizer"),
        Method("Shampoo", _shampoo, package="pytorch_optimizer"),
    )
}


def reason(error: Exception) -> str:
    """What an error says, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def chosen(names: Iterable[str] | None) -> dict[str, Method]:
    """Methods by name, in any case; all without names."""
    wanted = [name.lower() for name in names or METHODS]
    if unknown := set(wanted) - {name.lower() for name in METHODS}:
        raise ValueError(f"no method of the benchmark is called {', '.join(sorted(unknown))}; there are: {'; '.join(METHODS)}")
    return {name: method for name, method in METHODS.items() if name.lower() in wanted}


def entered(case: Case, names: Iterable[str]) -> dict[str, Method]:
    """Those that are measured on a case: the ones named, or all that the case does not leave out."""
    names, left_out = list(names), dict(case.without)
    if names:
        return chosen(names)
    return {name: method for name, method in METHODS.items() if (not method.variant or name in case.variants) and name not in left_out}
