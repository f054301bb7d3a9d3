"""What a reader must know of each experiment: where it departs from the paper, and what was found on the way."""

EVERY_TEN = "KFAC inverts every 10 steps instead of every step."
FIRST_IMAGES = "The images are the first of the training set, not a random choice."
LR_FOR_EACH = "A learning rate is searched for each λ."
LR_IS_LAMBDA = "The paper's learning rates, lr = λ, hardly train KFAC where λ is small: it probably had another scale."
FULL_SCALE = (
    "The paper scales its full Fisher in a way of its own, which it does not give; taken as a sum over the 1,000 images its lr and λ "
    "fit, and its losses come out."
)

DEPARTURES: dict[str, str] = {  # at every size
    "fig1a": f"{EVERY_TEN} SGD's momentum is 0.9 and not searched.",
    "fig1b": "Subsampled KFAC takes a new batch and inverts every 10 steps instead of every step.",
    "fig1d": FIRST_IMAGES,
    "fig2a": FIRST_IMAGES,
    "fig2b": EVERY_TEN,
    "fig2c": f"{FIRST_IMAGES} KFAC is that of Fig. 1D.",
    "fig3a": EVERY_TEN,
    "fig3b": "Measured every 50 steps; KFAC inverts every 10. FOOF's λ is the λ_A that KFAC's heuristic would give at the run's own λ.",
    "fig3c": f"{EVERY_TEN} {LR_FOR_EACH}",
    "fig3d": f"{EVERY_TEN} {LR_FOR_EACH}",
    "fig4b": "T = 10 stands in for T = 1; T = 100 has a search of its own, where the paper takes the settings of T = 1.",
    "fig4c": EVERY_TEN,
    "batches": "Two of the seven published dampings are run, 1e-4 (low) and 100 (high).",
    "one-hidden": "With ReLU and for 10 epochs; the work that the paper compares with has a setup of its own.",
}

SMALLER: dict[str, str] = {  # where the study is smaller than the paper
    "fig1c": "D is 4 and 8 times the batch; these Fishers are renewed every 10 steps, not every step.",
    "fig2a": "Not run at this size: one layer separates a few hundred images, and with a large enough learning rate every method, KFAC, "
    "natural gradients and SGD, then ends at zero loss (seen with 300).",
}

PAPER_SIZE: dict[str, str] = {  # where it is as large
    "fig1a": "Of λ one smaller and one larger value are tried, each with one learning rate.",
    "fig1c": "These Fishers are renewed every 10 steps, the largest every 50, not every step. The largest is run, and compared, for the "
    "first 1,200 of the paper's 6,000 steps only, its grid for 300.",
    "fig1d": f"{FULL_SCALE} The grid of learning rates for it stops after 20 steps.",
    "fig2a": f"{FULL_SCALE} The grid of learning rates for it stops after 20 steps.",
    "fig2c": "Natural gradients with the full Fisher, of which each step factorises four matrices of order 9,000, are run, and compared, "
    f"for 50 steps, their grid for 10. {FULL_SCALE}",
    "fig3a": "The paper gives no setting for standard damping without the transposition: smaller λ are tried for it.",
    "fig4c": "The first 1,800 of the paper's 6,000 steps, measured every 20, at the lr and λ of Fig. 1A's KFAC.",
}

FOUND: dict[str, str] = {  # on Fashion-MNIST at the paper's size
    "fig1a": "With a hundredth of the paper's λ KFAC is far ahead in the grid, at step 1,200, but explodes before the end.",
    "fig4b": "FOOF with a hundredth of the paper's λ is ahead in the grid, at step 1,200, and ends where it ends with the paper's.",
    "fig1d": "KFAC diverges at the paper's setting, in float64 too, once nearly all images are fitted: labels drawn from the model are "
    "then those of the data, its Fisher vanishes, and steps grow to lr/λ gradients. Its lr and λ are our own; a setting counts only if "
    "no seed explodes. At thrice the learning rate natural gradients with the full Fisher end at 0.00037 on one seed, and explode on "
    "another within ten steps.",
    "fig3a": "The published curve of heuristic damping is that of Fig. 3C at λ = 0.0001, which explodes if it goes on to 6,000 steps; "
    "beside it stands the KFAC of Fig. 1A.",
    "fig3b": "The paper does not say which λ its FOOF had beside standard damping; neither form of it has the published similarity.",
    "fig3c": LR_IS_LAMBDA,
    "fig3d": "With a learning rate of its own for each λ, KFAC still trains better than FOOF at λ = 1e-6; at 1e-8 it falls behind, by a "
    "factor of two.",
}


def note(figure: str, dataset: str, paper_size: bool, run: bool) -> str:
    """All there is to say about an experiment at a size; what was found only if it was `run`."""
    parts = [DEPARTURES.get(figure), (PAPER_SIZE if paper_size else SMALLER).get(figure)]
    if paper_size and run and dataset == "fashion-mnist":
        parts.append(FOUND.get(figure))
    return " ".join(filter(None, parts))
