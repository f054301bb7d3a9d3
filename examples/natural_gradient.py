"""Natural gradients without any approximation: full batch, Full Fisher, exact inversion (Fig. 1D in small).

The settings are plain ones, not tuned: this shows how it is used. For a comparison of methods see ``benchmarks/fig1d.md``.
"""

from __future__ import annotations

import plotly.graph_objects as go
import torch
from common import data, network, output_file, save
from torch import nn

import foof


def losses(method: str, steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    x, y, _, _ = data(100, 1)
    model = network(784, 60, 60)
    if method == "SGD + momentum":
        opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    elif method == "FOOF":
        opt = foof.FOOF(model, lr=0.3, damping=1.0, T=1)
    else:
        opt = foof.NaturalGradient(model, lr=0.3, damping=0.3, fisher="full" if method == "Full Fisher" else "mc")
    seen = []
    for _ in range(steps):
        out = model(x)
        if isinstance(opt, foof.NaturalGradient):
            opt.update_curvature(out)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        seen.append(loss.item())
    return seen


def main() -> None:
    out = output_file("natural_gradient")
    figure = go.Figure()
    for method in ("SGD + momentum", "MC Fisher", "Full Fisher", "FOOF"):
        curve = losses(method)
        print(f"{method:16} {curve[0]:.3f} → {curve[-1]:.5f}")
        figure.add_scatter(name=method, y=curve, mode="lines")
    figure.update_yaxes(type="log", title="training loss", exponentformat="power")
    figure.update_xaxes(title="update")
    figure.update_layout(title="100 images, full batch")
    save(figure, out)


if __name__ == "__main__":
    main()
