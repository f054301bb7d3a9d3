"""What each figure needs to be run: from a preset and a data set to one search per curve.

Settings of the paper are those of its Appendix D.4, in the library's scale. Where the study departs from them it is for time,
and `notes` says so, figure by figure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foof.study.search.grids import Row, Search, damping_at
from foof.study.search.presets import RIDGE, TRIALS, Preset, fixed, momenta, search
from foof.study.train.setting import Setting


def label_3(method: str, damping: float) -> str:
    """A curve of Figs. 3B-D."""
    return f"{method}, λ = {damping:g}"


Runs = dict[str, Search]
MOMENTUM = (("momentum", 0.9),)
EVERY_TEN = (("T", 10), ("S", 10))  # inverted every ten steps, statistics from all of them
THIS_BATCH = (("T", 1), ("S", 1), ("ema", 0.0))  # Figs. 1D, 2A and 2C: "KFAC does not use an exponential average"
SGD, ADAM, KFAC, NATURAL, FOOF = "SGD + momentum", "Adam", "KFAC", "Natural gradient", "FOOF"
GD = "SGD without momentum"
FOOF_LAMBDA_A = "FOOF with KFAC's λ_A"
STANDARD, RELEASED = "KFAC, standard damping", "KFAC, standard damping as released"
NATURAL_FULL, NATURAL_MC = "Natural gradient, full Fisher", "Natural gradient, MC Fisher"
BY_LAYER, BY_LAYER_FULL, BY_LAYER_MC = (f"Natural gradient, by layer{of}" for of in ("", ", full Fisher", ", MC Fisher"))
KFAC_ONE_BATCH, PER_DATAPOINT = "KFAC, subsampled", "FOOF per datapoint"
FOOF_10, FOOF_BAYESIAN, FOOF_BEST = "FOOF, T = 10", "FOOF, Bayesian λ", "FOOF of Fig. 4B"
FOOF_EMA, FOOF_S, FOOF_MORE, FOOF_LESS = "FOOF, m = 0.999", "FOOF, S = 10", "FOOF, λ × 100", "FOOF, λ / 100"
LARGER, LARGEST = "Natural gradient, larger D", "Natural gradient, largest D"
DAMPINGS = (1e-4, 1e-6, 1e-8)  # of Figs. 3B-D: 1e-2, 1e-4, 1e-6 in the paper's scale
HEURISTIC = label_3(KFAC, DAMPINGS[0])  # what Fig. 3A shows as heuristic damping: it is the first curve of Fig. 3C
TS = (1, 10, 100)
LATER = 200  # T > 100
COARSE, FINE = "λ from 10^(2i)", "λ from 10^i"
TIMED_STEPS = 200  # two periods of FOOF's T
FULL_GRID = 20  # steps of the grids of full Fishers of the whole network, of which one takes seconds


def base(preset: Preset, dataset: str) -> Setting:
    return preset.base.but(dataset=dataset)


def full_batch(preset: Preset, dataset: str) -> Setting:
    """Figs. 1D, 2A and 2C: few images, all of them in every step. The best steps are so large there that they explode on some seeds: what
    wins is vetted."""
    return base(preset, dataset).but(train_size=preset.images, batch_size=None, steps=preset.full_steps, log_every=1)


def _sgd(p: Preset, d: str) -> Search:
    return _momenta(p, base(p, d), 0.01, urgency=0)


def _momenta(p: Preset, setting: Setting, lr: float, quick: float | None = None, urgency: int = 1, vetted: bool = False) -> Search:
    """SGD, its momentum searched as in the paper."""
    found = search(p, setting.but(optimizer="sgd", options=MOMENTUM), (lr, None), (quick or lr, None), urgency=urgency, vetted=vetted)
    return momenta(p, found, lr)


def _kfac(p: Preset, d: str) -> Search:
    return search(p, base(p, d).but(optimizer="kfac", options=EVERY_TEN), (3e-3, 1e-2), (1e-2, 1e-2), urgency=0)


def _foof(p: Preset, d: str, T: int = 100) -> Search:
    setting = base(p, d).but(optimizer="foof", options=(("T", T), ("S", T)))
    return search(p, setting, (0.3, 1.0), (1.0, 1.0), urgency=0 if T == 100 else 1)


def _natural(p: Preset, d: str, *options: tuple[str, int | str | bool], urgency: int = 1) -> Search:
    """Of a Fisher of few datapoints lr/λ is nearly all that matters: learning rates follow λ."""
    setting = base(p, d).but(optimizer="natural", options=options)
    return search(p, setting, (1e-5, 1e-4), (1e-4, 1e-2), urgency=urgency, ridge=(-4, 4))


def _adam(p: Preset, d: str) -> Search:
    return search(p, base(p, d).but(optimizer="adam"), (1e-4, None), (3e-4, None), urgency=0)


def fig1a(p: Preset, d: str) -> Runs:
    return {SGD: _sgd(p, d), ADAM: _adam(p, d), KFAC: _kfac(p, d), NATURAL: _natural(p, d, urgency=0)}


def fig1b(p: Preset, d: str) -> Runs:
    """Of a Fisher from one batch, whether a step explodes differs from seed to seed: what wins of KFAC is vetted."""
    subsampled = base(p, d).but(optimizer="kfac", options=(("T", 10), ("S", 1), ("ema", 0.0)))
    return {KFAC_ONE_BATCH: search(p, subsampled, (3e-3, 1e-2), (3e-3, 1e-2), vetted=True), NATURAL: _natural(p, d), SGD: _sgd(p, d)}


def fig1c(p: Preset, d: str) -> Runs:
    """Fishers from 10 and 40 times the gradient's batch (4 and 8 times in the smaller study)."""
    B, natural = p.base.batch_size or 1, base(p, d).but(optimizer="natural")

    def larger(times: int, T: int, lr: float, steps: int, grid_steps: int | None = None) -> Search:
        setting = natural.but(options=(("T", T), ("fisher_batch", times * B)), steps=steps)
        return search(p, setting, (lr, 1e-2), (3e-4, 1e-2), grid_steps=grid_steps)

    steps = p.base.steps
    if p.centred:
        return {KFAC: _kfac(p, d), LARGER: larger(10, 10, 3e-4, steps), LARGEST: larger(40, 50, 1e-3, steps // 5, steps // 20)}
    return {KFAC: _kfac(p, d), LARGER: larger(4, 10, 3e-4, steps), LARGEST: larger(8, 10, 1e-3, steps)}


def fig1d(p: Preset, d: str) -> Runs:
    full = full_batch(p, d)
    exact = _exact(p, full, (0.1, 0.1))
    if p.short_seeds:  # as many seeds as others have, though each takes longer
        exact = replace(exact, seeds=p.short_seeds, vets=p.short_seeds)
    return {
        KFAC: search(p, full.but(optimizer="kfac", options=THIS_BATCH), (3e-4, 1e-5), (1e-3, 1e-4), known=False, ridge=(-2, 2),
                     vetted=True),
        NATURAL_FULL: exact,
        NATURAL_MC: search(p, full.but(optimizer="natural"), (0.1, 1.0), (0.1, 1.0), vetted=True),
        SGD: _momenta(p, full, 0.03, vetted=True),
    }


def _exact(p: Preset, setting: Setting, paper: tuple[float, float], quick: tuple[float, float] | None = None,
           *options: tuple[str, str], grid_steps: int = FULL_GRID) -> Search:  # fmt: skip
    """Natural gradients with the full Fisher. The paper's λ is the largest of the three: with it they are far from their best, and at
    smaller ones they want the same learning rates. λ at every power of ten: at a hundredth they explode on some seeds."""
    setting = setting.but(optimizer="natural", options=(("fisher", "full"), *options))
    return search(p, setting, paper, quick, grid_steps=grid_steps, ridge=(0, 0), below=2, every=1, vetted=True)


def fig2a(p: Preset, d: str) -> Runs:
    """One layer. Where a step explodes losses differ by orders of magnitude, and a run takes seconds: more seeds report."""
    if p.fine and not p.centred:
        return {}  # see `notes`
    full = full_batch(p, d).but(hidden=())
    found = {
        KFAC: search(p, full.but(optimizer="kfac", options=THIS_BATCH), (0.1, 1e-3), (0.3, 1e-3), ridge=(-4, 4), vetted=True),
        NATURAL_FULL: _exact(p, full, (0.1, 0.1), (0.3, 0.1), grid_steps=p.full_steps),
        NATURAL_MC: search(p, full.but(optimizer="natural"), (0.01, 0.01), (0.03, 0.01), ridge=(-4, 4), vetted=True),
        SGD: _momenta(p, full, 0.03, 0.1, vetted=True),
        GD: search(p, full.but(optimizer="sgd"), (0.03, None), (0.1, None), vetted=True),
    }
    return {label: replace(search_, seeds=p.layer_seeds or search_.seeds) for label, search_ in found.items()}


def fig2b(p: Preset, d: str) -> Runs:
    layers = base(p, d).but(optimizer="natural", options=(("blocks", "layer"),))
    return {KFAC: _kfac(p, d), BY_LAYER: search(p, layers, (10.0, 100.0), (1e-3, 1e-2))}


def fig2c(p: Preset, d: str) -> Runs:
    layers = full_batch(p, d).but(optimizer="natural", options=(("blocks", "layer"),))
    half = layers.but(steps=p.full_steps // 2 if p.centred else p.full_steps)
    return {
        KFAC: fig1d(p, d)[KFAC],
        BY_LAYER_FULL: _exact(p, half, (0.03, 0.1), None, ("blocks", "layer"), grid_steps=FULL_GRID // 2),
        BY_LAYER_MC: search(p, layers, (0.1, 1.0), (0.1, 1.0), vetted=True),
    }


def _measured(p: Preset, d: str, optimizer: str, *options: tuple[str, str]) -> Setting:
    """A run of Fig. 3B: the first part of training, in which its updates are compared with FOOF's."""
    every = ("measure_every", 5 * p.base.log_every)
    setting = base(p, d).but(optimizer=optimizer, steps=p.early, measure=("similarity",))
    return setting.but(options=(*EVERY_TEN, every, *options))


def _to_the_end(p: Preset, found: Search, *options: tuple[str, str]) -> Search:
    """At the paper's size, runs of Fig. 3 go on to the end of training, where the paper selects (Appendix D.2); those that are measured
    for Fig. 3B are as good as the beginnings of them."""
    if not p.centred:
        return found
    early = found.base
    grid_steps = p.grid_steps or early.steps
    whole = early.but(steps=p.base.steps, measure=(), options=(*EVERY_TEN, *options))
    return replace(found, base=whole, seeds=p.seeds_of(whole), grid_steps=grid_steps, stand_ins=(early, early.but(steps=grid_steps)))


def fig3a(p: Preset, d: str) -> Runs:
    """Both standard dampings are searched from the paper's setting down to λ where the released one diverges. Every method has two trials
    more than in the other figures: with as many as there standard damping won beside a λ that could still grow."""
    standard = ("damping_mode", "standard")
    found = {
        KFAC: _kfac(p, d),
        HEURISTIC: fig3c(p, d)[HEURISTIC],
        STANDARD: _to_the_end(p, _standard(p, d), standard),
        RELEASED: _to_the_end(p, _released(p, d)),
        SGD: _sgd(p, d),
        ADAM: _adam(p, d),
    }
    return {k: replace(s, trials=s.trials + 2) if s.trials and k != HEURISTIC else s for k, s in found.items()}


def _standard(p: Preset, d: str) -> Search:
    setting = _measured(p, d, "kfac", ("damping_mode", "standard"))
    found = search(p, setting, (1e-4, 1e-4), (3e-3, 1e-2), urgency=0)  # known from an earlier search of ours
    return replace(found, rows=STANDARD_ROWS, damping_every=1) if p.centred else found


def _released(p: Preset, d: str) -> Search:
    found = search(p, _measured(p, d, "kfac-transposed"), (1e-3, 1e-2), (3e-3, 1e-2), urgency=0)
    return replace(found, rows=STANDARD_ROWS, damping_every=1) if p.centred else found


# From the paper's setting for its standard damping, (1e-3, 1e-2), down to ever smaller λ: nine trials, as others have
STANDARD_ROWS = (Row((1e-5, 3e-5), 1e-5), Row((3e-5, 1e-4, 3e-4), 1e-4), Row((3e-4, 1e-3), 1e-3), Row((3e-4, 1e-3), 1e-2))


def fig3b(p: Preset, d: str) -> Runs:
    """Measured at the beginning of runs with the settings of Figs. 3A and C."""
    a, c = fig3a(p, d), fig3c(p, d)
    return {label: _beginning(p, found) for label, found in {STANDARD: a[STANDARD], RELEASED: a[RELEASED], **c}.items()}


def _beginning(p: Preset, found: Search) -> Search:
    """A search whose winner is reported by runs of its beginning, in which more is measured."""
    return replace(found, shown=found.stand_ins[0], seeds=p.seeds_of(found.stand_ins[0])) if found.stand_ins else found


def fig3c(p: Preset, d: str) -> Runs:
    setting = _measured(p, d, "kfac")
    return {label_3(KFAC, x): _to_the_end(p, _at_damping(p, setting, x, full, small)) for x, full, small in _LRS_KFAC}


def fig3d(p: Preset, d: str) -> Runs:
    dropped = ("second_factor", "drop-scaled")
    setting = base(p, d).but(optimizer="kfac", steps=p.early, options=(*EVERY_TEN, dropped))
    alone = {label_3(FOOF_LAMBDA_A, x): _at_damping(p, setting, x, full, small) for x, full, small in _LRS_FOOF}
    return {**fig3c(p, d), **{label: _to_the_end(p, found, dropped) for label, found in alone.items()}}


# λ, and learning rates to search around at the paper's size and at the smaller one
_LRS_KFAC = ((1e-4, 3e-4, 1e-3), (1e-6, 3e-5, 1e-4), (1e-8, 1e-5, 1e-5))
_LRS_FOOF = ((1e-4, 1e-4, 1e-4), (1e-6, 1e-6, 1e-5), (1e-8, 1e-7, 3e-7))


def _at_damping(p: Preset, setting: Setting, x: float, full: float, small: float) -> Search:
    """One of the figure's λ: the learning rate is tuned for each."""
    return search(p, setting, (full, x), (small, x), urgency=int(x != DAMPINGS[0]), known=False, ridge=None)


def fig4a(p: Preset, d: str) -> Runs:
    """Time per step: enough steps for some inversions. No evaluation of settings, so no search."""
    found = {SGD: fixed(p, base(p, d).but(optimizer="sgd", lr=1e-3, options=MOMENTUM, steps=50), urgency=0)}
    for name, lr, damping in (("foof", 0.1, 1.0), ("kfac", 1e-3, 1e-2)):
        for T in TS:
            short = base(p, d).but(optimizer=name, lr=lr, damping=damping, steps=max(2 * T, 20), options=(("T", T), ("S", T)))
            found[f"{name.upper()}, T = {T}"] = fixed(p, short, urgency=0)
    later = base(p, d).but(optimizer="foof", lr=0.1, damping=1.0, steps=LATER, options=(("T", LATER), ("S", LATER)))
    return {**found, f"FOOF, T = {LATER}": fixed(p, later, urgency=2)}


def fig4b(p: Preset, d: str) -> Runs:
    found = fig1a(p, d)
    return {SGD: found[SGD], ADAM: found[ADAM], KFAC: found[KFAC], FOOF_10: _foof(p, d, 10), FOOF: _foof(p, d)}


def fig4c(p: Preset, d: str) -> Runs:
    setting = base(p, d).but(optimizer="kfac", steps=p.early, measure=("decrease", "decrease_without"))
    setting = setting.but(options=(*EVERY_TEN, ("measure_every", 2 * p.base.log_every)))
    if p.centred and d == "fashion-mnist":  # the KFAC of Fig. 1A
        return {KFAC: fixed(p, setting.but(lr=3e-3, damping=1e-2), urgency=0, chosen_before=True)}
    return {KFAC: search(p, setting, (3e-3, 1e-2), (1e-2, 1e-2), urgency=0)}


def appendix_i(p: Preset, d: str) -> Runs:
    """Independent or same mini-batch, at a low and a high damping."""
    found = {}
    for name, options in (("independent", ()), ("same", (("same_batch", True),))):
        setting = base(p, d).but(optimizer="natural", options=options)
        found[label_i(name, "low")] = search(p, setting, (1e-5, 1e-4), (1e-4, 1e-2), urgency=2, known=name == "independent", ridge=None)
        found[label_i(name, "high")] = search(p, setting, (10.0, 100.0), urgency=2, known=False, ridge=None)
    return found


def label_i(batch: str, damping: str) -> str:
    return f"{batch} batch, {damping} λ"


def per_datapoint(p: Preset, d: str) -> Runs:
    setting = base(p, d)
    return {
        "SGD": search(p, setting.but(optimizer="sgd"), (0.1, None), urgency=2, known=False),
        PER_DATAPOINT: search(p, setting.but(optimizer="foof-per-datapoint"), (30.0, 1.0), urgency=2, known=False),
    }


def robustness(p: Preset, d: str) -> Runs:
    """Appendix D.3: FOOF with one thing changed at a time, at the λ that is best for it, or a hundred times more or less; the learning rate
    goes with λ (α/λ), and is searched."""
    best = (0.03, 0.01) if p.centred else (1.0, 1.0)  # what Fig. 4B's search finds at the paper's size, on the ladder
    foof = _foof(p, d)

    def changed(lr: float, damping: float, **options: float) -> Search:
        setting = foof.base.but(options=tuple({**dict(foof.base.options), **options}.items()))
        return search(p, setting, (lr, damping), (lr, damping), urgency=2, known=False, ridge=None)

    more, less = ((0.3, 1.0), (3e-3, 1e-4)) if p.centred else ((30.0, 100.0), (0.03, 0.01))
    return {
        SGD: _sgd(p, d), FOOF: foof, FOOF_10: _foof(p, d, 10),
        FOOF_EMA: changed(*best, ema=0.999), FOOF_S: changed(*best, S=10), FOOF_MORE: changed(*more), FOOF_LESS: changed(*less),
    }  # fmt: skip


def bayesian(p: Preset, d: str) -> Runs:
    """Appendix K: λ from the precision of the weight initialisation."""
    auto = search(p, _foof(p, d).base, (1.0, "auto"), (3.0, "auto"), urgency=2, known=False)
    return {SGD: _sgd(p, d), FOOF: _foof(p, d), FOOF_BAYESIAN: auto}


def inside(p: Preset, d: str) -> Runs:
    """What is looked at along a run, or at its end: Σ as it changes, how long it takes to invert, posteriors of its weights; KFAC's λ_A."""
    foof, kfac = ((0.3, 1.0), (3e-3, 1e-2)) if p.centred else ((1.0, 1.0), (1e-2, 1e-2))
    looked = base(p, d).but(optimizer="foof", lr=foof[0], damping=foof[1], steps=p.early,
                            measure=("sigma_drift", "sigma_noise", "inversion", "posterior"))  # fmt: skip
    split = base(p, d).but(optimizer="kfac", lr=kfac[0], damping=kfac[1], steps=max(p.early // 3, 1), measure=("lambda_A",))
    return {
        FOOF: fixed(p, looked.but(options=(("T", 100), ("S", 100), ("measure_every", 100 if p.fine else 1))), urgency=2),
        KFAC: fixed(p, split.but(options=(*EVERY_TEN, ("measure_every", 2 * p.base.log_every))), urgency=2),
        FOOF_BEST: _foof(p, d),
    }


def finer(p: Preset, d: str) -> Runs:
    """FOOF's search, and the same with λ between those of its grid."""
    found = _foof(p, d)
    return _refined(found if p.centred else replace(found, extend=0), RIDGE if p.centred else (-3, 3))


def finer_kfac(p: Preset, d: str) -> Runs:
    return {} if p.fine and not p.centred else _refined(_kfac(p, d), RIDGE)


def _refined(found: Search, ridge: tuple[int, int]) -> Runs:
    """A search with λ at 10^(2i), and one with λ at 10^i whose learning rates lie on the same ridge."""
    middle = found.rows[len(found.rows) // 2]
    below, above = (middle.moved(2 * way, by) for way, by in ((-1, ridge[0]), (1, ridge[1])))
    between = [middle.moved(way, int(by / 2)) for way, by in ((-1, ridge[0]), (1, ridge[1]))]
    found = replace(found, trials=0, urgency=2, known=False)
    return {
        COARSE: replace(found, rows=(below, middle, above)),
        FINE: replace(found, rows=(below, between[0], middle, between[1], above), damping_every=1),
    }


def adaptive(label: str) -> str:
    """A curve of a method whose steps are Appendix A's."""
    return f"{label}, adaptive"


def _adaptive(p: Preset, setting: Setting, damping: float, grid_steps: int | None = None, vetted: bool = False) -> Search:
    """Step size, momentum and λ by the quadratic model of the loss (Appendix A): only the λ to begin with is left to search, at
    nine powers of ten around `damping`."""
    setting = setting.but(options=(*setting.options, ("adaptive", True)))
    decades = range(-(TRIALS // 2), TRIALS // 2 + 1) if p.centred else (0,)
    rows = tuple(Row((1.0,), damping_at(damping, i)) for i in decades)
    short, seeds = grid_steps or p.grid_steps, p.seeds_of(setting)
    return Search(setting, rows, 1, extend=p.extend, seeds=seeds, vets=seeds if vetted else 0, urgency=2,
                  grid_steps=short if p.centred and short and short < setting.steps else None)  # fmt: skip


def _beside(constant: Runs, adapted: dict[str, Search]) -> Runs:
    """Adaptive methods beside what they are with constant steps."""
    return {**{label: constant[label] for label in (SGD, *adapted)}, **{adaptive(label): found for label, found in adapted.items()}}


def adaptive_1a(p: Preset, d: str) -> Runs:
    if p.fine and not p.centred:
        return {}  # see `notes`
    kfac, natural = base(p, d).but(optimizer="kfac", options=EVERY_TEN), base(p, d).but(optimizer="natural")
    return _beside(fig1a(p, d), {KFAC: _adaptive(p, kfac, 1e-3), NATURAL: _adaptive(p, natural, 1.0)})


def adaptive_1d(p: Preset, d: str) -> Runs:
    return _adaptive_full(p, full_batch(p, d), fig1d(p, d), (("fisher", "full"),))


def adaptive_2a(p: Preset, d: str) -> Runs:
    return _adaptive_full(p, full_batch(p, d).but(hidden=()), fig2a(p, d), (("fisher", "full"), ("solver", "cg"), ("dtype", "float64")))


def _adaptive_full(p: Preset, full: Setting, constant: Runs, exact: tuple[tuple[str, str], ...]) -> Runs:
    if p.fine and not p.centred:
        return {}
    return _beside(constant, {
        KFAC: _adaptive(p, full.but(optimizer="kfac", options=THIS_BATCH), 1e-3, vetted=True),
        NATURAL_FULL: _adaptive(p, full.but(optimizer="natural", options=exact), 1.0, FULL_GRID if full.hidden else None, vetted=True),
        NATURAL_MC: _adaptive(p, full.but(optimizer="natural"), 1.0, vetted=True),
    })  # fmt: skip


def one_hidden(p: Preset, d: str) -> Runs:
    """Appendix H.1.1: one hidden layer of 500 on MNIST."""
    if d != "mnist":
        return {}
    return {KFAC: search(p, base(p, d).but(hidden=(500,), optimizer="kfac", options=EVERY_TEN), (3e-3, 1e-2), urgency=2, known=False)}


def generalisation(p: Preset, d: str) -> Runs:
    return {SGD: _sgd(p, d), KFAC: _kfac(p, d), FOOF: _foof(p, d)}


def timed(label: str) -> str:
    """The curve of short runs that a method is timed by."""
    return f"{label}, timed"


def time_to_loss(p: Preset, d: str) -> Runs:
    """Losses from runs on whatever machine; seconds from a few short runs of all methods, which are run together."""
    found = {**fig1a(p, d), FOOF: _foof(p, d)}
    steps = min(TIMED_STEPS, p.base.steps // 100 * 100 or p.base.steps)  # whole periods of FOOF's T
    first = {label: search.middle or search.grid[0] for label, search in found.items()}
    return {**found, **{timed(label): fixed(p, s.but(steps=steps), urgency=2) for label, s in first.items()}}


RUNS: dict[str, Callable[[Preset, str], Runs]] = {
    "fig1a": fig1a, "fig1b": fig1b, "fig1c": fig1c, "fig1d": fig1d, "fig2a": fig2a, "fig2b": fig2b, "fig2c": fig2c,
    "fig3a": fig3a, "fig3b": fig3b, "fig3c": fig3c, "fig3d": fig3d, "fig4a": fig4a, "fig4b": fig4b, "fig4c": fig4c,
    "batches": appendix_i, "per-datapoint": per_datapoint, "robustness": robustness, "bayesian": bayesian,
    "one-hidden": one_hidden, "generalisation": generalisation, "adaptive-1a": adaptive_1a, "adaptive-1d": adaptive_1d,
    "adaptive-2a": adaptive_2a, "inside": inside, "finer": finer, "finer-kfac": finer_kfac,
    "time": time_to_loss,
}  # fmt: skip
