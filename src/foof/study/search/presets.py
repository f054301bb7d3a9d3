"""How large the study is, and what a method's search looks like at that size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foof.study.search.estimate import core_seconds
from foof.study.search.grids import Row, Search, lr_at, lr_index
from foof.study.train.setting import Setting

MINUTES = 12 * 60.0  # seconds on one core of a run that takes minutes: all but Fishers of more than the batch, full ones, standard damping
Pair = tuple[float, float | str | None]  # learning rate, λ


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
    short_seeds: int | None = None  # that report where a run takes minutes; None: as many as elsewhere

    def seeds_of(self, setting: Setting) -> int:
        """How many seeds report a setting."""
        return self.short_seeds if self.short_seeds and core_seconds(setting) < MINUTES else self.seeds


PRESETS: dict[str, Preset] = {
    "smoke": Preset(
        "smoke", "seconds: tiny networks, to see that everything works",
        Setting(train_size=400, hidden=(12,), batch_size=50, steps=12, log_every=2), seeds=2, fine=False,
        images=30, full_steps=6, early=12,
    ),
    "quick": Preset(
        "quick", "minutes: the paper's network at 0.4 of its width on the embedded 6,000 images, 4 epochs; only learning rates searched",
        Setting(hidden=(400, 400, 400), steps=240), seeds=3, fine=True, images=100, full_steps=100, early=240,
    ),
    "paper": Preset(
        "paper", "many hours: the paper's network on all of Fashion-MNIST and MNIST, 10 epochs; its own settings first, then shorter runs "
        "around them; what is clearly better there (by a tenth) goes on; five seeds of what wins where a run takes up "
        "to 12 minutes on one core, three elsewhere",
        Setting(source="full", steps=6000), seeds=3, fine=True, images=1000, full_steps=100, early=1800,
        datasets=("fashion-mnist", "mnist"), centred=True, grid_steps=1200, short_seeds=5,
    ),
}  # fmt: skip


# The second row of learning rates below the first, and above: a hundredth of λ goes with a tenth of lr, and a hundred times both. So do
# the paper's own settings of KFAC and FOOF; by how many places of the ladder.
RIDGE = (-2, 4)
TRIALS = 9  # of every method in a figure at the paper's size: three λ with three learning rates each, or as many of SGD and Adam


def search(
    preset: Preset, setting: Setting, paper: Pair, quick: Pair | None = None, urgency: int = 1, known: bool = True,
    grid_steps: int | None = None, ridge: tuple[int, int] | None = RIDGE, below: int = 1,
    every: int = 2,
) -> Search:  # fmt: skip
    """A method's search at this preset: around the paper's setting, or around one that suits the smaller study.

    The paper's settings are given in the library's scale: (lr/B, λ/B) of its FOOF and KFAC at batch size B. Not `known`: it is ours.
    At the paper's size every method has `TRIALS` trials: a damped one three λ, `every` so many decades, of which `below` are smaller than
    the paper's, each with three learning rates that follow its `ridge`; without a ridge λ is given. The smaller study searches learning
    rates.
    """
    lr, damping = paper if preset.centred or quick is None else quick
    row = Row(ladder(lr, 3) if preset.fine else (lr,), damping)
    if not preset.centred:
        return Search(setting, (row,), seeds=preset.seeds_of(setting))
    rows: tuple[Row, ...] = (row,)
    if damping is None:
        rows = (Row(ladder(lr, TRIALS)),)
    elif isinstance(damping, float) and ridge is not None:
        rows = tuple(row.moved(every * i, i * (-ridge[0] if i < 0 else ridge[1])) for i in range(-below, 3 - below))
    short = grid_steps or preset.grid_steps
    return Search(setting, rows, every, extend=preset.extend, seeds=preset.seeds_of(setting), centre=(lr, damping), known=known,
                  urgency=urgency, grid_steps=short if short and short < setting.steps else None)  # fmt: skip


def ladder(lr: float, n: int) -> tuple[float, ...]:
    """n learning rates around one, of an even number one more below."""
    return tuple(lr_at(lr_index(lr) + i - n // 2) for i in range(n))


def momenta(preset: Preset, found: Search, lr: float) -> Search:
    """SGD's search with its momentum searched as in the paper, {0, 0.9}: as many trials as before, and ten times the rate without."""
    if not preset.centred:
        return found
    with_, without = Row(ladder(lr, 5), None, (("momentum", 0.9),)), Row(ladder(lr_at(lr_index(lr) + 2), 4))
    return replace(found, base=found.base.but(options=()), rows=(with_, without))


def fixed(preset: Preset, setting: Setting, urgency: int = 1) -> Search:
    """A given setting, all seeds: for what does not depend on the learning rate, as time per step."""
    centre = (setting.lr, setting.damping)
    row = Row((setting.lr,), setting.damping)
    return Search(setting, (row,), extend=0, seeds=preset.seeds_of(setting), centre=centre, urgency=urgency)
