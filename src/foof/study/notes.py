"""What a reader must know of each experiment: where it departs from the paper, and what was found on the way."""

FULL_SCALE = (
    "The paper scales its full Fisher in a way of its own, which it does not give: lr and λ are ours, with a grid of learning rates that "
    "stops after 20 steps."
)
EVERY_TEN = "KFAC inverts every 10 steps instead of every step."
FIRST_IMAGES = "The first 1,000 images, not a random choice."
LR_FOR_EACH = "A learning rate is searched for each λ."

DEPARTURES: dict[str, str] = {  # on any data set
    "fig1a": f"{EVERY_TEN} SGD's momentum is 0.9 and not searched. Of λ one smaller and one larger value were tried, each with one "
    "learning rate.",
    "fig1b": "Subsampled KFAC takes a new batch and inverts every 10 steps instead of every step.",
    "fig1c": "D is 1,000 and 4,000 (quick: 400 and 800); these Fishers are renewed every 10 steps, the largest every 50, not every step. "
    "The largest is run, and compared, for the first 1,200 of the paper's 6,000 steps only, its grid for 300.",
    "fig1d": f"{FIRST_IMAGES} {FULL_SCALE}",
    "fig2a": f"{FULL_SCALE} Not part of the preset quick: one layer separates the few hundred images that its time allows, and with a "
    "large enough learning rate every method, KFAC, natural gradients and SGD, then ends at zero loss (seen with 300).",
    "fig2c": f"{FIRST_IMAGES} KFAC is that of Fig. 1D. Natural gradients with the full Fisher, of which each step factorises four matrices "
    f"of order 9,000, are run, and compared, for 50 steps. {FULL_SCALE}",
    "fig3a": f"{EVERY_TEN} The paper gives no setting for standard damping without the transposition: smaller λ were tried for it.",
    "fig3b": "Measured every 50 steps; KFAC inverts every 10. FOOF's λ is the λ_A that KFAC's heuristic would give at the run's own λ.",
    "fig3c": LR_FOR_EACH,
    "fig3d": LR_FOR_EACH,
    "fig4b": "T = 10 stands in for T = 1; T = 100 has a search of its own, where the paper takes the settings of T = 1.",
    "fig4c": "The first 1,800 of the paper's 6,000 steps, measured every 20; KFAC inverts every 10, and has the paper's lr and λ for it.",
}

FOUND: dict[str, str] = {  # on Fashion-MNIST
    "fig1a": "With a hundredth of the paper's λ KFAC is far ahead in the grid, at step 1,200, but explodes before the end.",
    "fig4b": "FOOF with a hundredth of the paper's λ is ahead in the grid, at step 1,200, and ends where it ends with the paper's.",
    "fig1d": "KFAC diverges at the paper's setting, in float64 too, once nearly all images are fitted: labels drawn from the model are "
    "then those of the data, its Fisher vanishes, and steps grow to lr/λ gradients. Its lr and λ are our own; a setting counts only if "
    "no seed explodes.",
    "fig3a": "The published curve of heuristic damping is that of Fig. 3C at λ = 0.0001, which explodes if it goes on to 6,000 steps; "
    "beside it stands the KFAC of Fig. 1A.",
    "fig3b": "The paper does not say which λ its FOOF had beside standard damping; neither form of it has the published similarity.",
    "fig3c": "The paper's learning rates, lr = λ, hardly train where λ is small: it probably had another scale.",
    "fig3d": "The paper's learning rates, lr = λ, hardly train where λ is small: it probably had another scale.",
}


def note(figure: str, dataset: str) -> str:
    """All there is to say about an experiment."""
    found = FOUND.get(figure, "") if dataset == "fashion-mnist" else ""
    return " ".join(filter(None, (DEPARTURES.get(figure, ""), found)))
