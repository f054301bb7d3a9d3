"""How large the study is, and what a method's search looks like at that size."""

from __future__ import annotations

from dataclasses import dataclass

from foof.study.search.grids import Search, damping_at, lr_at, lr_index
from foof.study.train.setting import Setting

Pair = tuple[float, float | str | None]  # learning rate, λ


@dataclass(frozen=True)
class Preset:
    """How large the study is."""

    name: str
    about: str
    base: Setting
    seeds: int
    fine: bool  # whole grids of learning rates; otherwise one value
    images: int  # of figures with full batches
    full_steps: int  # their steps
    early: int  # steps of Fig. 3
    datasets: tuple[str, ...] = ("fashion-mnist",)
    centred: bool = False  # the paper's settings first, then a grid around them
    grid_steps: int | None = None  # that grid's runs stop here
    extend: int = 1  # how often it may grow


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
        "around them; what is clearly better there (by a tenth) goes on; three seeds of what wins",
        Setting(source="full", steps=6000), seeds=3, fine=True, images=1000, full_steps=100, early=1800,
        datasets=("fashion-mnist", "mnist"), centred=True, grid_steps=1200,
    ),
}  # fmt: skip


def search(
    preset: Preset, setting: Setting, paper: Pair, quick: Pair | None = None, urgency: int = 1, known: bool = True,
    dampings: bool = False, grid_steps: int | None = None,
) -> Search:  # fmt: skip
    """A method's search at this preset: around the paper's setting, or around one that suits the smaller study.

    The paper's settings are given in the library's scale: (lr/B, λ/B) of its FOOF and KFAC at batch size B. Not `known`: it is ours.
    Learning rates are searched, and at the paper's size, where `dampings` are too, one λ on either side: a hundredth of it with a
    tenth of the learning rate, and a hundred times both.
    """
    lr, damping = paper if preset.centred or quick is None else quick
    lrs = tuple(lr_at(lr_index(lr) + i) for i in (-1, 0, 1)) if preset.fine else (lr,)
    if preset.centred:
        also: tuple[Pair, ...] = ()
        short = grid_steps or preset.grid_steps
        if dampings and isinstance(damping, float):
            also = ((lr_at(lr_index(lr) - 2), damping_at(damping, -2)), (lr_at(lr_index(lr) + 4), damping_at(damping, 2)))
        return Search(setting, lrs, (damping,), extend=preset.extend, seeds=preset.seeds, centre=(lr, damping), known=known,
                      urgency=urgency, also=also, grid_steps=short if short and short < setting.steps else None)  # fmt: skip
    return Search(setting, lrs, (damping,), seeds=preset.seeds)


def fixed(preset: Preset, setting: Setting, urgency: int = 1) -> Search:
    """A given setting, all seeds: for what does not depend on the learning rate, as time per step."""
    centre = (setting.lr, setting.damping)
    return Search(setting, (setting.lr,), (setting.damping,), extend=0, seeds=preset.seeds, centre=centre, urgency=urgency)
