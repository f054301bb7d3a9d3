"""The optimizers of the study by name: one table, so that a setting can name any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import foof
from foof.study.setting import Setting

STUDY_OPTIONS = ("initialise",)  # options that the run itself reads; all others go to the optimizer


@dataclass(frozen=True)
class Method:
    """A way to train: its name for people, and how to build its optimizer for a model and a setting."""

    title: str
    build: Callable[[nn.Module, Setting], torch.optim.Optimizer]
    damped: bool = False


def _options(setting: Setting) -> dict:
    return {k: v for k, v in setting.options if k not in STUDY_OPTIONS}


def _sgd(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=setting.lr, **_options(setting))


def _adam(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=setting.lr, **_options(setting))


def _neurons(name: str) -> Callable[[nn.Module, Setting], torch.optim.Optimizer]:
    """An optimizer of this library, which all take lr and damping."""

    def build(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
        return getattr(foof, name)(model, lr=setting.lr, damping=setting.damping, **_options(setting))

    return build


METHODS: dict[str, Method] = {
    "sgd": Method("SGD", _sgd),
    "adam": Method("Adam", _adam),
    "foof": Method("FOOF", _neurons("FOOF"), damped=True),
    "kfac": Method("KFAC", _neurons("KFAC"), damped=True),
}


def method(setting: Setting) -> Method:
    """The method a setting names; an error that lists the names if there is none, or if its damping does not fit."""
    if setting.optimizer not in METHODS:
        raise ValueError(f"no optimizer is called {setting.optimizer!r}; there are {', '.join(METHODS)}")
    found = METHODS[setting.optimizer]
    if found.damped != (setting.damping is not None):
        raise ValueError(f"{found.title} {'needs a' if found.damped else 'has no'} damping, but it is {setting.damping}")
    return found


def title(setting: Setting) -> str:
    """What to call a setting's method in a legend."""
    found = METHODS[setting.optimizer].title if setting.optimizer in METHODS else setting.optimizer
    return f"{found} + momentum" if setting.optimizer == "sgd" and setting.option("momentum") else found
