"""Polyak averaging: the weights of a run, averaged over its last steps, which is what is judged in Fig. 5D."""

from __future__ import annotations

import copy

import torch
from torch import nn

DECAY = 0.99  # per step, as Martens & Grosse (2015); the paper takes over a recommended value without naming it


class Average:
    """``θ̄ ← ξ θ̄ + (1 - ξ) θ`` after step k, with ``ξ = min(1 - 1/k, decay)``: of parameters, and of batch norm's running moments."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"the decay of an average is from 0 up to 1, but {decay!r} was given")
        self.model, self.decay, self.steps = copy.deepcopy(model).requires_grad_(False), decay, 0
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.0  # normalising a batch changes nothing of it

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.steps += 1
        kept = min(1 - 1 / self.steps, self.decay)
        theirs = model.state_dict()
        for name, mine in self.model.state_dict().items():
            if mine.is_floating_point():
                mine.lerp_(theirs[name], 1 - kept)
            else:
                mine.copy_(theirs[name])
