"""How sure is the network? Exact and Kronecker-factored Laplace posteriors side by side (Appendices C.1 and F).

A small classifier is trained to overconfidence; then its posterior is taken in four ways from the same 500 images. Appendix G asks
whether the first Kronecker factor alone does as well as both, and whether Kronecker beats the exact posterior given the same data.
Each way has its own prior precision, once by marginal likelihood and once by the likelihood of validation images.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import torch
from common import data, network, output_file, save, train
from torch import Tensor

from foof.laplace import Calibration, calibration, fit, fit_kronecker

PRIORS = (30.0, 100.0, 300.0, 1000.0)


def main() -> None:
    out = output_file("laplace")
    torch.manual_seed(0)
    x, y, test_x, test_y = data(1000, 1000)
    valid_x, valid_y, test_x, test_y = test_x[:300], test_y[:300], test_x[300:], test_y[300:]
    model = network(784, 50)
    train(model, x, y, steps=600)

    seen, labels = x[:500], y[:500]  # the data of all posteriors, scaled up to the whole training set
    exact = fit(model, seen, labels, datapoints=len(x))
    both = fit_kronecker(model, seen, labels, datapoints=len(x))
    first = fit_kronecker(model, seen, labels, datapoints=len(x), first_factor_only=True)

    def sampled(posterior: Any, inputs: Tensor) -> Tensor:
        return posterior.predict_sampled(inputs, 20, torch.Generator().manual_seed(1))  # type: ignore[no-any-return]

    def linearised(posterior: Any, inputs: Tensor) -> Tensor:
        return posterior.predict(inputs)  # type: ignore[no-any-return]

    ways = {
        "exact, linearised": (exact, linearised), "exact, sampled": (exact, sampled),
        "both factors, sampled": (both, sampled), "first factor, sampled": (first, sampled),
    }  # fmt: skip
    with torch.no_grad():
        numbers: dict[str, Calibration] = {"trained weights only": calibration(model(test_x).softmax(1), test_y)}
    print(f"{'':24}{'prior by':18}{'λ':>8}{'accuracy':>10}{'NLL':>8}{'Brier':>8}{'ECE':>8}")
    report("trained weights only", "-", 0.0, numbers["trained weights only"])
    for name, (posterior, predict) in ways.items():
        by_evidence = posterior.tune_prior()
        report(name, "evidence", by_evidence, calibration(predict(posterior, test_x), test_y))
        losses = {}
        for prior in PRIORS:
            posterior.prior_precision = prior
            losses[prior] = calibration(predict(posterior, valid_x), valid_y).nll
        posterior.prior_precision = min(losses, key=lambda prior: losses[prior])
        numbers[name] = calibration(predict(posterior, test_x), test_y)
        report(name, "validation", posterior.prior_precision, numbers[name])

    figure = go.Figure()
    for key, title in {"nll": "negative log likelihood", "brier": "Brier score", "ece": "calibration error"}.items():
        figure.add_bar(name=title, x=list(numbers), y=[getattr(c, key) for c in numbers.values()])
    figure.update_layout(title="Fashion-MNIST, 1,000 training images, prior by validation: lower is better", barmode="group")
    save(figure, out)


def report(name: str, how: str, prior: float, c: Calibration) -> None:
    print(f"{name:24}{how:18}{prior:8.3g}{c.accuracy:10.3f}{c.nll:8.3f}{c.brier:8.3f}{c.ece:8.3f}")


if __name__ == "__main__":
    main()
