"""The optimizers of the study by name: one table, so that a setting can name any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import foof
from foof.covering import covered_layers
from foof.layers import Layer
from foof.study.train import ablations
from foof.study.train.setting import Setting
from foof.tap import Tap, Visit

# Options that the run itself reads; all others go to the optimizer.
#   initialise: batches of statistics before training; measure_every: steps between measurements (default: log_every)
#   same_batch: natural gradients take their Fisher from the gradient's batch; fisher_batch: D, else the batch size
#   augment: flips and padded crops; polyak: the decay of averaged weights; momentum_after: epochs without momentum
#   train_norm: train batch norm's parameters (else SGD and Adam do); likelihood: of an autoencoder
STUDY_OPTIONS = {
    "initialise": int, "measure_every": int, "same_batch": bool, "fisher_batch": int, "augment": bool, "polyak": float,
    "momentum_after": int, "train_norm": bool, "likelihood": str,
}  # fmt: skip
IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number with a point", str: "a name"}


@dataclass(frozen=True)
class Method:
    """A way to train: its name for people, how to build its optimizer for a model and a setting, and (lr, λ) to begin with."""

    title: str
    build: Callable[[nn.Module, Setting], torch.optim.Optimizer]
    default: tuple[float, float | None]
    initialised: bool = False  # does it want statistics of some batches before training?

    @property
    def damped(self) -> bool:
        return self.default[1] is not None


def _options(setting: Setting) -> dict:
    return {k: v for k, v in setting.options if k not in STUDY_OPTIONS}


def _fisher(setting: Setting) -> dict:
    """Those of methods that have a Fisher: its likelihood is that of the loss."""
    likelihood = setting.option("likelihood", "gaussian") if setting.model == "autoencoder" else "categorical"
    return {"likelihood": likelihood, **_options(setting)}


def _sgd(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=setting.lr, **_options(setting))


def _adam(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=setting.lr, **_options(setting))


def _foof(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return foof.FOOF(model, lr=setting.lr, damping=setting.damping, **_options(setting))


CG_FROM = 1e-3  # λ, from which on conjugate gradients reach their residual


def by_conjugate_gradients(setting: Setting) -> bool:
    """The full Fisher of one layer, which has more columns than parameters: in float64 a fiftieth of the time of a factor in float32,
    and nearer to the exact solution."""
    large = isinstance(setting.damping, float) and setting.damping >= CG_FROM
    fits = not setting.hidden and setting.option("fisher") == "full" and large
    return setting.option("solver", "cg" if fits else "cholesky") == "cg"


def _natural(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    options = _fisher(setting)
    if by_conjugate_gradients(setting):
        options = {"solver": "cg", "dtype": "float64", **options}
    if "dtype" in options:
        options["dtype"] = getattr(torch, str(options["dtype"]))
    return foof.NaturalGradient(model, lr=setting.lr, damping=setting.damping, **options)  # type: ignore[arg-type]


def _kfac(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return ablations.kfac(model, setting.lr, setting.damping, **_fisher(setting))  # type: ignore[arg-type]


def _kfac_transposed(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return ablations.kfac(model, setting.lr, setting.damping, damping_mode="transposed", **_fisher(setting))  # type: ignore[arg-type]


class PerDatapointFOOF(torch.optim.SGD):
    """Appendix F: FOOF on each datapoint alone, the updates averaged: SGD on gradients that taps have so changed."""

    mask: Tensor | None = None

    def __init__(self, model: nn.Module, lr: float, damping: float) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.damping = damping
        self.taps = [Tap(layer, self) for layer in _layers(model)]

    def receive(self, visit: Visit) -> Tensor:
        """`1/N Σ_i E_iᵀ A_i (A_iᵀ A_i + λI)⁻¹`; e comes from a mean over the batch, so it is N times too small."""
        a, e = visit.layer.input_rows(visit.x), visit.layer.error_rows(visit.e)
        return foof.per_datapoint_gradient(a.to(e.dtype), e * len(e), self.damping)


def _layers(model: nn.Module) -> Iterable[Layer]:
    return covered_layers(model)[0]


def _per_datapoint(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    assert isinstance(setting.damping, float)
    return PerDatapointFOOF(model, setting.lr, setting.damping, **_options(setting))


METHODS: dict[str, Method] = {
    "sgd": Method("SGD", _sgd, (0.1, None)),
    "adam": Method("Adam", _adam, (3e-4, None)),
    "foof": Method("FOOF", _foof, (0.3, 1.0), initialised=True),
    "kfac": Method("KFAC", _kfac, (3e-3, 1e-2), initialised=True),
    "natural": Method("Natural gradient", _natural, (1e-4, 1e-2)),
    "kfac-transposed": Method("KFAC, standard damping as released", _kfac_transposed, (1e-3, 1e-2), initialised=True),
    "foof-per-datapoint": Method("FOOF per datapoint", _per_datapoint, (30.0, 1.0)),
}


def method(setting: Setting) -> Method:
    """The method a setting names; an error that lists the names if there is none, or if its damping does not fit."""
    if setting.optimizer not in METHODS:
        raise ValueError(f"no optimizer is called {setting.optimizer!r}; there are {', '.join(METHODS)}")
    found = METHODS[setting.optimizer]
    if found.damped != (setting.damping is not None):
        raise ValueError(f"{found.title} {'needs a' if found.damped else 'has no'} damping, but it is {setting.damping}")
    for name, given in setting.options:
        if name in STUDY_OPTIONS and type(given) is not STUDY_OPTIONS[name]:
            raise ValueError(f"the option {name} should be {IN_WORDS[STUDY_OPTIONS[name]]}, but it is {given!r}")
    return found


def optimizer_of(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer a setting names, for this model."""
    try:
        return method(setting).build(model, setting)
    except TypeError as problem:  # of an option's name
        raise ValueError(f"{method(setting).title} does not take the options {dict(setting.options)}: {problem}") from problem


def title(setting: Setting) -> str:
    """What to call a setting's method in a legend."""
    found = METHODS[setting.optimizer].title if setting.optimizer in METHODS else setting.optimizer
    if setting.optimizer == "kfac" and setting.option("damping_mode") == "standard":
        return "KFAC, standard damping"
    if setting.optimizer == "kfac" and str(setting.option("second_factor", "")).startswith("drop"):
        return "FOOF with KFAC's λ_A"
    return f"{found} + momentum" if setting.optimizer == "sgd" and setting.option("momentum") else found
