"""How large the study is, and what a method's search looks like at that size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foof.study.search.estimate import core_seconds
from foof.study.search.grids import Row, Search, lr_at, lr_index
from foof.study.train.setting import Setting

MINUTES = 12 * 60.0  # seconds on one core of a run that takes minutes: all but Fishers of more than the batch, full ones, standard damping
Pair = tuple[float, float | str | None]  # learning rate, λ


@dataclass(frozen=True)
class Task:
    """One network on one data set at a preset's size: the setting of its runs, and how often FOOF and KFAC gather and invert."""

    base: Setting
    T: int
    S: int
    initialise: int = 50  # batches of statistics before training
    grid_steps: int | None = None  # trials stop here, the best two of them go on; None: all go to the end

    @property
    def schedule(self) -> tuple[tuple[str, int], ...]:
        return (("T", self.T), ("S", self.S), ("initialise", self.initialise))


@dataclass(frozen=True)
class Nets:
    """The convolutional half of the study at a preset's size."""

    tasks: Mapping[str, Task]  # "resnet", "vgg" and the autoencoders' data sets
    figures: tuple[str, ...] = ()  # those that are run; none named: all
    extend: int = 1  # how often a grid may grow
    batches: tuple[int, ...] = (128, 256, 512, 1024)  # of Figs. J.17 and J.18


@dataclass(frozen=True)
class Preset:
    """How large the study is."""

    name: str
    about: str
    base: Setting
    seeds: int  # that report
    fine: bool  # whole grids of learning rates; otherwise one value
    images: int  # of figures with full batches
    full_steps: int  # their steps
    early: int  # steps of Fig. 3
    datasets: tuple[str, ...] = ("fashion-mnist",)
    centred: bool = False  # the paper's settings first, then a grid around them
    grid_steps: int | None = None  # that grid's runs stop here
    extend: int = 1  # how often it may grow
    nets: Nets | None = None
    reduced: bool = False  # smaller than the paper, but searched as it is, and shown beside its curves
    short_seeds: int | None = None  # that report where a run takes minutes; None: as many as elsewhere
    layer_seeds: int | None = None  # that report Fig. 2A, where one layer is trained in seconds; None: as many as elsewhere
    vets: int = 0  # see `Search.vets`

    def seeds_of(self, setting: Setting) -> int:
        """How many seeds report a setting."""
        return self.short_seeds if self.short_seeds and core_seconds(setting) < MINUTES else self.seeds

    @property
    def mark(self) -> str:
        """What everything that is shown of this preset says of its size, where that might be taken for the paper's."""
        return "reduced scale" if self.reduced else ""


AUGMENTED = (("augment", True),)


def _resnet(**size: Any) -> Setting:
    return Setting(**{"dataset": "cifar-10", "source": "full", "model": "resnet18-no-norm", "options": AUGMENTED, **size})


def _vgg(**size: Any) -> Setting:
    return Setting(**{"dataset": "svhn", "source": "full", "model": "vgg11", "options": AUGMENTED, **size})


def _codes(**size: Any) -> Setting:
    return Setting(**{"source": "full", "model": "autoencoder", "hidden": CODE, **size})


CODE = (1000, 500, 250, 30)
FOR_SMOKE = {"dataset": "fashion-mnist", "source": "embedded", "train_size": 40, "batch_size": 20, "steps": 4, "log_every": 1}
SMOKE_NETS = Nets(
    {
        "resnet": Task(_resnet(hidden=(2,), **FOR_SMOKE), 2, 2, 1),
        "mnist": Task(_codes(hidden=(8, 4), **FOR_SMOKE), 2, 2, 1),
    },
    figures=("fig5b", "fig5d", "figj20a", "figj20c"),
)  # fmt: skip
FOR_QUICK = {"dataset": "fashion-mnist", "source": "embedded", "log_every": 5}
QUICK_NETS = Nets(
    {
        "resnet": Task(_resnet(train_size=1000, hidden=(4,), batch_size=25, steps=60, **FOR_QUICK), 30, 5, 5),
        "mnist": Task(_codes(hidden=(100, 50, 25, 10), batch_size=200, steps=120, **FOR_QUICK), 10, 2, 5),
    },
    figures=("fig5b", "figj20a", "figj20c"),
)  # fmt: skip
FOR_REDUCED = {"train_size": 2000, "hidden": (8,), "log_every": 5}
REDUCED_CODE = {"hidden": (500, 250, 125, 30), "batch_size": 500, "steps": 600}
REDUCED_NETS = Nets(
    {  # all trials go to the end: early losses are still on a plateau, and tell nothing
        "resnet": Task(_resnet(batch_size=50, steps=400, **FOR_REDUCED), 40, 10, 20),
        "vgg": Task(_vgg(batch_size=32, steps=620, **FOR_REDUCED), 20, 10, 20),
        **{name: Task(_codes(dataset=name, **REDUCED_CODE), 10, 2, 20) for name in ("faces", "mnist", "curves")},
    },
    batches=(32, 64, 128, 256),
    extend=12,
)  # fmt: skip
PAPER_NETS = Nets(
    {
        "resnet": Task(_resnet(train_size=50_000, hidden=(64,), batch_size=100, steps=25_000, log_every=100), 500, 10, 50, 5000),
        "vgg": Task(_vgg(train_size=73_257, hidden=(64,), batch_size=128, steps=28_600, log_every=100), 100, 50, 50, 5720),
        "faces": Task(_codes(dataset="faces", train_size=103_500, batch_size=1000, steps=10_300), 10, 10, 50, 2000),
        "mnist": Task(_codes(dataset="mnist", train_size=60_000, batch_size=1000, steps=12_000), 10, 10, 50, 2400),
        "curves": Task(_codes(dataset="curves", train_size=20_000, batch_size=1000, steps=4000), 10, 10, 50, 800),
    },
    extend=3,
)  # fmt: skip


PRESETS: dict[str, Preset] = {
    "smoke": Preset(
        "smoke", "seconds: tiny networks, to see that everything works",
        Setting(train_size=400, hidden=(12,), batch_size=50, steps=12, log_every=2), seeds=2, fine=False,
        images=30, full_steps=6, early=12, nets=SMOKE_NETS,
    ),
    "quick": Preset(
        "quick", "minutes: the paper's network at 0.4 of its width on the embedded 6,000 images, 4 epochs; only learning rates "
        "searched; of the convolutional half two small figures, on the same images",
        Setting(hidden=(400, 400, 400), steps=240), seeds=3, fine=True, images=100, full_steps=100, early=240,
        nets=QUICK_NETS,
    ),
    "reduced": Preset(
        "reduced", "hours on two cores: the convolutional half alone, much smaller than the paper's: ResNet18 and VGG11 of width 8 on "
        "2,000 images, 10 epochs; autoencoders of half the width, 600 steps with batches of 500; nine trials for every method first; what "
        "wins must not explode on two more seeds, and is run with three others",
        Setting(), seeds=3, vets=2, fine=True, images=0, full_steps=0, early=0, datasets=(), nets=REDUCED_NETS, reduced=True,
    ),
    "paper": Preset(
        "paper", "many hours: the paper's network on all of Fashion-MNIST and MNIST, 10 epochs; its own settings first, then shorter runs "
        "around them; what is clearly better there (by a tenth), and the best of each λ, go on; five seeds of what wins where a run takes "
        "up to 12 minutes on one core, and of Fig. 1D, three elsewhere, twenty in Fig. 2A, where it takes seconds",
        Setting(source="full", steps=6000), seeds=3, fine=True, images=1000, full_steps=100, early=1800,
        datasets=("fashion-mnist", "mnist"), centred=True, grid_steps=1200, extend=3, nets=PAPER_NETS, short_seeds=5, layer_seeds=20,
    ),
}  # fmt: skip


# The second row of learning rates below the first, and above: a hundredth of λ goes with a tenth of lr, and a hundred times both. So do
# the paper's own settings of KFAC and FOOF; by how many places of the ladder.
RIDGE = (-2, 4)
TRIALS = 9  # every method's first at the paper's size: three λ with three learning rates each, or as many of SGD and Adam
IN_ALL = 2  # times as many are tried of each, wherever its grid must grow or else between them


def search(
    preset: Preset, setting: Setting, paper: Pair, quick: Pair | None = None, urgency: int = 1, known: bool = True,
    grid_steps: int | None = None, ridge: tuple[int, int] | None = RIDGE, below: int = 1,
    every: int = 2, vetted: bool = False,
) -> Search:  # fmt: skip
    """A method's search at this preset: around the paper's setting, or around one that suits the smaller study.

    The paper's settings are given in the library's scale: (lr/B, λ/B) of its FOOF and KFAC at batch size B. Not `known`: it is ours.
    At the paper's size every method has `TRIALS` trials first, and `IN_ALL` times as many once its grid has grown and been filled: a
    damped one three λ, `every` so many decades, of which `below` are smaller than the paper's, each with three learning rates that follow
    its `ridge`; without a ridge λ is given. The smaller study searches learning rates. `vetted`: what wins must not explode on as many
    more seeds as report most figures.
    """
    lr, damping = paper if preset.centred or quick is None else quick
    row = Row(ladder(lr, 3) if preset.fine else (lr,), damping)
    seeds = preset.seeds_of(setting)
    if not preset.centred:
        return Search(setting, (row,), seeds=seeds, vets=seeds if vetted else 0)
    rows: tuple[Row, ...] = (row,)
    if damping is None:
        rows = (Row(ladder(lr, TRIALS)),)
    elif isinstance(damping, float) and ridge is not None:
        rows = tuple(row.moved(every * i, i * (-ridge[0] if i < 0 else ridge[1])) for i in range(-below, 3 - below))
    short = grid_steps or preset.grid_steps
    trials = IN_ALL * sum(len(row.lrs) for row in rows)
    return Search(setting, rows, every, extend=preset.extend, trials=trials, seeds=seeds, vets=seeds if vetted else 0, centre=(lr, damping),
                  known=known, urgency=urgency, grid_steps=short if short and short < setting.steps else None)  # fmt: skip


def of_task(preset: Preset, task: Task, setting: Setting, middle: Pair, urgency: int = 0, ridge: tuple[int, int] = RIDGE) -> Search:
    """A method's search in the convolutional half, around `middle`, of which nothing is known: no centre is run first.

    Nine trials for everyone where it is reduced or of the paper's size: three λ, each with three learning rates that follow its `ridge`, or
    nine learning rates; they stop at the task's `grid_steps`, and the best two go on to the end. Elsewhere three learning rates, or one.
    """
    lr, damping = middle
    rows: tuple[Row, ...] = (Row(ladder(lr, 3) if preset.fine else (lr,), damping),)
    if preset.reduced or preset.centred:
        if damping is None:
            rows = (Row(ladder(lr, TRIALS)),)
        else:
            rows = tuple(rows[0].moved(2 * i, i * (-ridge[0] if i < 0 else ridge[1])) for i in (-1, 0, 1))
    stop = task.grid_steps * setting.steps // task.base.steps if task.grid_steps else None  # runs of fewer, larger batches stop as early
    assert preset.nets is not None
    return Search(setting, rows, extend=preset.nets.extend, seeds=preset.seeds, vets=preset.vets, urgency=urgency, grid_steps=stop)


def ladder(lr: float, n: int) -> tuple[float, ...]:
    """n learning rates around one, of an even number one more below."""
    return tuple(lr_at(lr_index(lr) + i - n // 2) for i in range(n))


def momenta(preset: Preset, found: Search, lr: float) -> Search:
    """SGD's search with its momentum searched as in the paper, {0, 0.9}: as many trials as before, and ten times the rate without."""
    if not preset.centred:
        return found
    with_, without = Row(ladder(lr, 5), None, (("momentum", 0.9),)), Row(ladder(lr_at(lr_index(lr) + 2), 4))
    return replace(found, base=found.base.but(options=()), rows=(with_, without))


def fixed(preset: Preset, setting: Setting, urgency: int = 1, chosen_before: bool = False) -> Search:
    """A given setting, all seeds: for what does not depend on the learning rate, as time per step, or was `chosen_before`."""
    centre = (setting.lr, setting.damping)
    row = Row((setting.lr,), setting.damping)
    return Search(setting, (row,), extend=0, seeds=preset.seeds_of(setting), centre=centre, urgency=urgency, chosen_before=chosen_before)
