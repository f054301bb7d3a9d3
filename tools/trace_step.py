"""How far is it through the library for one step? ``python tools/trace_step.py``.

For one step at T = 1 on a two-layer MLP, from the forward pass to the end of ``step()``: how many functions of the library are called, in
how many files, and how often one call is in another file than the call before it.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import foof

HOME = str(Path(foof.__file__).parent)


def trace(make: Any) -> tuple[int, int, int]:
    """Distinct functions, distinct files, and switches between files from one call to the next."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    opt, x, y = make(model), torch.randn(6, 4), torch.arange(6) % 3
    way: list[tuple[str, str, int]] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME):
            way.append((code.co_filename, code.co_qualname, code.co_firstlineno))

    for t in range(3):  # the third: nothing is there for the first time
        opt.zero_grad()
        if t == 2:
            sys.setprofile(profile)
        try:
            out = model(x)
            opt.update_curvature(out)
            nn.functional.cross_entropy(out, y).backward()
            opt.step()
        finally:
            sys.setprofile(None)
    switches = sum(here[0] != there[0] for here, there in pairwise(way))
    return len(set(way)), len({file for file, *_ in way}), switches


if __name__ == "__main__":
    for name, make in {"FOOF": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, T=1), "KFAC": lambda m: foof.KFAC(m, T=1)}.items():
        functions, files, switches = trace(make)
        print(f"{name}: {functions} functions, {files} files, {switches} switches between files")
