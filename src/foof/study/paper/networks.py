"""What Fig. 5 and Figs. J.12-J.22 need to be run: convolutional networks and autoencoders, one search per curve.

The paper gives settings for Fig. 5 alone, in a scale of its released code that is another one for convolutions, so that here nothing is
taken as known: every method is searched in the same way, around a middle that suits it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foof.study.paper.catalogue import CODES, NUMBERS, SIDES
from foof.study.paper.searches import ADAM, FOOF, GD, KFAC, KFAC_ONE_BATCH, MOMENTUM, NATURAL, RELEASED, SGD, STANDARD, Runs
from foof.study.search.grids import Search
from foof.study.search.presets import Pair, Preset, Task, fixed, momenta, of_task
from foof.study.train.averages import DECAY
from foof.study.train.setting import Setting, Value

Options = tuple[tuple[str, Value], ...]
EMPIRICAL = "KFAC, empirical Fisher"
FOOF_OFTEN, KFAC_OFTEN = "FOOF, T / 2, S × 5", "KFAC, T / 2, S × 5"
BATCHES = ("B", "2 B", "4 B", "8 B")  # of Figs. J.17 and J.18: 128 to 1,024 in the paper
TIMED = (500, 10)  # T and S of Fig. 5A, at every size
LATER = (("momentum_after", 1),)  # "we switched on the momentum term only after the first epoch"
ONE_BATCH: Options = (("T", 10), ("S", 1), ("ema", 0.0), ("initialise", 1))
MEASURED = ("decrease", "decrease_without")  # along the way of every autoencoder's KFAC
# (lr, λ) to search around, by method: for convolutions without batch norm, with it, and for autoencoders
MIDDLES: dict[str, tuple[Pair, Pair, Pair]] = {
    SGD: ((0.01, None), (0.03, None), (1e-3, None)),
    GD: ((0.1, None), (0.3, None), (0.01, None)),
    ADAM: ((1e-3, None), (1e-3, None), (1e-3, None)),
    FOOF: ((3.0, 10.0), (10.0, 10.0), (0.1, 10.0)),
    KFAC: ((0.01, 0.1), (0.1, 0.1), (0.03, 0.1)),
    STANDARD: ((3e-4, 0.1), (3e-3, 1e-3), (1e-3, 1.0)),
    NATURAL: ((1e-3, 1.0), (0.01, 0.1), (0.01, 1.0)),
}


def label_17(method: str, batch: str) -> str:
    """A curve of Figs. J.17 and J.18."""
    return f"{method}, batch {batch}"


def task_of(p: Preset, name: str) -> Task:
    assert p.nets is not None
    return p.nets.tasks[name]


def _method(p: Preset, task: Task, setting: Setting, label: str, kind: int, options: Options = (), urgency: int = 0) -> Search:
    """One curve: its label names the method, `kind` where to search (see MIDDLES)."""
    family = KFAC if label.startswith("KFAC") else label
    middle = MIDDLES[STANDARD if label in (STANDARD, RELEASED) else family][kind]
    base = setting.but(
        optimizer={SGD: "sgd", GD: "sgd", ADAM: "adam", FOOF: "foof", KFAC: "kfac", NATURAL: "natural"}[family],
        options=(*setting.options, *(task.schedule if family in (FOOF, KFAC) else ()), *options),
    )
    return of_task(p, task, base, middle, urgency)


# CIFAR-10, CIFAR-100 and SVHN -----------------------------------------------------------------------------------------


def convolutions(
    p: Preset, *labels: str, norm: bool = False, dataset: str | None = None, network: str = "resnet", urgency: int = 0
) -> Runs:
    """Curves of a ResNet18, or VGG11: momentum 0.9 for all but Adam and natural gradients, from the second epoch on; with batch norm,
    weights are averaged on the way, which changes nothing else (Figs. 5C and D are of the same runs)."""
    task = task_of(p, network)
    setting = task.base.but(dataset=dataset or task.base.dataset)
    if norm:
        setting = setting.but(model="resnet18", options=(*setting.options, ("polyak", DECAY)))
    with_momentum: Options = (*MOMENTUM, *LATER)
    often: Options = (*with_momentum, ("T", task.T // 2), ("S", min(5 * task.S, task.T // 2)))
    options: dict[str, Options] = {
        ADAM: (), NATURAL: (("T", 10),), KFAC_ONE_BATCH: (*with_momentum, *ONE_BATCH), FOOF_OFTEN: often, KFAC_OFTEN: often,
        STANDARD: (*with_momentum, ("damping_mode", "standard")),
    }  # fmt: skip
    found = {
        label: _method(p, task, setting, FOOF if label == FOOF_OFTEN else label, int(norm), options.get(label, with_momentum), urgency)
        for label in labels
    }
    return {label: _as_released(s) if label == RELEASED else s for label, s in found.items()}


def _as_released(found: Search) -> Search:
    return replace(found, base=found.base.but(optimizer="kfac-transposed"))


def fig5a(p: Preset, _: str) -> Runs:
    """Time per step at the paper's T and S, whatever the size: one inversion, and statistics of ten steps, in 500."""
    task, (T, S) = task_of(p, "resnet"), TIMED
    often = (("T", T), ("S", S), ("initialise", 1))
    pairs: dict[str, tuple[str, float, float | None, Options]] = {
        SGD: ("sgd", 1e-3, None, ()), FOOF: ("foof", 1e-3, 10.0, often), KFAC: ("kfac", 1e-4, 1.0, often),
    }  # fmt: skip
    return {
        label: fixed(p, task.base.but(optimizer=name, lr=lr, damping=damping, steps=T, options=(*task.base.options, *MOMENTUM, *options)))
        for label, (name, lr, damping, options) in pairs.items()
    }


def svhn(p: Preset, _: str) -> Runs:
    """VGG11 at four batch sizes, as many epochs with each."""
    task = task_of(p, "vgg")
    assert p.nets is not None
    found = {}
    for name, size in zip(BATCHES, p.nets.batches, strict=True):
        steps = max(1, task.base.steps * (task.base.batch_size or size) // size)
        setting = task.base.but(batch_size=size, steps=steps, log_every=max(1, task.base.log_every * steps // task.base.steps))
        for method in (FOOF, KFAC, SGD):
            found[label_17(method, name)] = _method(p, task, setting, method, 0, (*MOMENTUM, *LATER), urgency=3)
    return found


# Autoencoders ---------------------------------------------------------------------------------------------------------


def autoencoders(p: Preset, name: str, *labels: str, likelihood: str = "gaussian", urgency: int = 0) -> Runs:
    """Curves of one data set's autoencoder: momentum for SGD alone, which is searched as in the fully connected half."""
    task = task_of(p, name)
    setting = task.base.but(options=(("likelihood", likelihood),)) if likelihood != "gaussian" else task.base
    options: dict[str, Options] = {
        SGD: MOMENTUM, NATURAL: (("T", 10),), KFAC_ONE_BATCH: ONE_BATCH, EMPIRICAL: (("fisher", "empirical"),),
        STANDARD: (("damping_mode", "standard"),),
    }  # fmt: skip
    found = {label: _method(p, task, setting, label, 2, options.get(label, ()), urgency) for label in labels}
    if KFAC in found:
        every = ("measure_every", max(1, setting.steps // 20))
        kfac = found[KFAC].base
        found[KFAC] = replace(found[KFAC], base=kfac.but(measure=MEASURED, options=(*kfac.options, every)))
    if SGD in found and (p.reduced or p.centred):
        lr = MIDDLES[SGD][2][0]
        found[SGD] = replace(momenta(replace(p, centred=True), found[SGD], lr), base=setting.but(optimizer="sgd"))
    return {label: _as_released(s) if label == RELEASED else s for label, s in found.items()}


def _all(find: Callable[..., Runs], *names: str, **where: object) -> Callable[[Preset, str], Runs]:
    return lambda p, _: find(p, *names, **where)


FOUR = (FOOF, KFAC, SGD, ADAM)
RUNS: dict[str, Callable[[Preset, str], Runs]] = {
    "fig5a": fig5a,
    "fig5b": _all(convolutions, *FOUR),
    "fig5c": _all(convolutions, *FOUR, norm=True, urgency=1),
    "fig5d": _all(convolutions, *FOUR, norm=True, urgency=1),
    "amortised": _all(convolutions, FOOF, FOOF_OFTEN, KFAC, KFAC_OFTEN, urgency=3),
    "figj12a": _all(convolutions, KFAC, KFAC_ONE_BATCH, NATURAL, SGD, urgency=2),
    "figj12b": _all(convolutions, KFAC, KFAC_ONE_BATCH, NATURAL, SGD, norm=True, urgency=3),
    "figj14a": _all(convolutions, KFAC, STANDARD, RELEASED, SGD, urgency=2),
    "figj14b": _all(convolutions, KFAC, STANDARD, RELEASED, SGD, norm=True, urgency=3),
    "figj16a": _all(convolutions, *FOUR, dataset="cifar-100", urgency=3),
    "figj16b": _all(convolutions, *FOUR, norm=True, dataset="cifar-100", urgency=3),
    "figj17": svhn,
    "figj18": svhn,
    "vgg": _all(convolutions, KFAC, STANDARD, RELEASED, NATURAL, SGD, network="vgg", urgency=3),
    "bernoulli": _all(autoencoders, "mnist", *FOUR, likelihood="bernoulli", urgency=3),
    **{f"figj13{SIDES[d]}": _all(autoencoders, d, KFAC, KFAC_ONE_BATCH, NATURAL, ADAM, SGD, GD, urgency=2) for d in CODES},
    **{f"figj15{SIDES[d]}": _all(autoencoders, d, KFAC, STANDARD, RELEASED, ADAM, SGD, urgency=2) for d in CODES},
    **{f"figj22{SIDES[d]}": _all(autoencoders, d, KFAC, EMPIRICAL, SGD, urgency=2) for d in CODES},
    **{f"figj{NUMBERS[d]}a": _all(autoencoders, d, KFAC, FOOF, ADAM, SGD, urgency=int(d != "mnist")) for d in CODES},
    **{f"figj{NUMBERS[d]}c": _all(autoencoders, d, KFAC, urgency=int(d != "mnist")) for d in CODES},
}  # fmt: skip
NEEDS = {  # the data set of each
    **dict.fromkeys(RUNS, "cifar-10"), **dict.fromkeys(("figj16a", "figj16b"), "cifar-100"),
    **dict.fromkeys(("figj17", "figj18", "vgg"), "svhn"),
    "bernoulli": "mnist", **{f"figj{n}{SIDES[d]}": d for n in (13, 15, 22) for d in CODES},
    **{f"figj{NUMBERS[d]}{x}": d for d in CODES for x in "ac"},
}  # fmt: skip
