"""What a reader must know of each experiment: where it departs from the paper, and what was found on the way."""

from foof.study.paper.catalogue import CATALOGUE, CODES
from foof.study.search.presets import PRESETS, Preset

EVERY_TEN = "KFAC inverts every 10 steps instead of every step."
FIRST_IMAGES = "The images are the first of the training set, not a random choice."
LR_FOR_EACH = "A learning rate is searched for each λ."
LR_IS_LAMBDA = "The paper's learning rates, lr = λ, hardly train KFAC where λ is small: it probably had another scale."
FULL_SCALE = (
    "The paper scales its full Fisher in a way of its own, which it does not give; taken as a sum over the 1,000 images its lr and λ "
    "fit, and its losses come out."
)

EQUAL = (
    "Every method has eighteen trials. The first nine are three λ with three learning rates each, of SGD five with momentum 0.9 and four "
    "without, of Adam nine; the rest lie where its grid must grow, and else half-way between its learning rates, the best first. They are "
    "compared at step 1,200; what does clearly better there than the paper's setting, and the best of each λ, go on to the end."
)
TO_THE_END = (
    "Settings are chosen at the end of training, step 6,000, as in Appendix D.2; where only the first 1,800 steps have been run, which the "
    "published figure shows, losses are compared there, and the claim is decided only if that cannot turn it."
)
RELEASED = (
    "The released code did not make the paper's figures (Appendix D.4), and its transposed rotation depends on the signs of eigenvectors, "
    "which differ between builds of LAPACK: flipping one changes the update by half."
)

NOT_REPRODUCED = (
    "The order of Fig. 3B is reproduced, its numbers are not. At the first step, where the learning rate plays no part, our cosines "
    "at the three λ are 0.53, 0.42 and 0.31, the published ones 0.83, 0.71 and 0.30; over the second half ours are 0.55, 0.42 and "
    "0.32, and the published curves end at 0.76, 0.65 and 0.44. Two other definitions come no closer at the first step: the Euclidean "
    "inner product (0.57, 0.43, 0.31) and the mean of the layers' own cosines (0.61, 0.54, 0.48)."
)

ADAPTIVE = (
    "Step size and momentum minimise the quadratic model of the loss in each step, and λ follows how well it foresaw the last one, every "
    "five steps, as in Martens & Grosse (2015); what is searched is the λ to begin with."
)

DEPARTURES: dict[str, str] = {  # at every size
    "fig1a": EVERY_TEN,
    "fig1b": "Subsampled KFAC takes a new batch and inverts every 10 steps instead of every step.",
    "fig1d": FIRST_IMAGES,
    "fig2a": FIRST_IMAGES,
    "fig2b": EVERY_TEN,
    "fig2c": f"{FIRST_IMAGES} KFAC is that of Fig. 1D.",
    "fig3a": EVERY_TEN,
    "fig3b": "Measured every 50 steps, at the settings of Figs. 3A and C; KFAC inverts every 10. FOOF's λ is the λ_A that KFAC's "
    "heuristic would give at the run's own λ.",
    "fig3c": f"{EVERY_TEN} {LR_FOR_EACH}",
    "fig3d": f"{EVERY_TEN} {LR_FOR_EACH}",
    "fig4b": "T = 10 stands in for T = 1; T = 100 has a search of its own, where the paper takes the settings of T = 1.",
    "fig4c": EVERY_TEN,
    "batches": "Two of the seven published dampings are run, 1e-4 (low) and 100 (high).",
    "adaptive-1a": f"{ADAPTIVE} {EVERY_TEN}",
    "adaptive-1d": f"{ADAPTIVE} {FIRST_IMAGES}",
    "adaptive-2a": f"{ADAPTIVE} {FIRST_IMAGES}",
    "time": "Seconds are steps times a method's mean time per step, of its own thread, in short runs of all methods together: losses are "
    "of runs on several machines. Evaluations and measurements are not counted. Each method has the learning rate and λ with the lowest "
    "loss at the end, not those that are fastest to a loss.",
    "finer": "Both searches share trials; where both choose the same setting, the ratio is 1.",
    "inside": "FOOF and KFAC are run at given settings; beside λ_A stands the λ of Fig. 4B's FOOF. λ_A is the geometric mean over "
    "layers, in the second half of the run; of Σ, the mean over layers of relative Frobenius distances: between now and a hundred "
    "steps before, and between one mini-batch's AᵀA/N and the moving average. Inverses and decompositions are of all layers' Σ, on "
    "one core. Posteriors: test loss of predictions averaged over five networks drawn from N(W, (λI + N Σ_E ⊗ Σ)⁻¹), Σ_E a multiple "
    "of I where it is dropped; λ is the best of seven on 500 test images, the loss is of 2,000 others.",
    "one-hidden": "With ReLU and for 10 epochs; the work that the paper compares with has a setup of its own.",
}

SMALLER: dict[str, str] = {  # where the study is smaller than the paper
    "fig1a": "SGD's momentum is 0.9 and not searched, and λ is one that suits each method.",
    "fig1c": "D is 4 and 8 times the batch; these Fishers are renewed every 10 steps, not every step.",
    "fig2a": "Not run at this size: one layer separates a few hundred images, and with a large enough learning rate every method, KFAC, "
    "natural gradients and SGD, then ends at zero loss (seen with 300).",
    "finer-kfac": "Not run at this size.",
    "adaptive-1a": "Not run at this size.",
    "adaptive-1d": "Not run at this size.",
    "adaptive-2a": "Not run at this size.",
}

NINE_LAMBDAS = "Every adaptive method has nine trials, λ at as many powers of ten, around values that suit it."

PAPER_SIZE: dict[str, str] = {  # where it is as large
    "fig1a": EQUAL,
    "fig1b": f"{EQUAL} What wins of subsampled KFAC must not explode on five more seeds, which is not asked of natural gradients.",
    "fig2b": EQUAL,
    "fig4b": EQUAL,
    "fig1c": "These Fishers are renewed every 10 steps, the largest every 50, not every step. The largest is run, and compared, for the "
    "first 1,200 of the paper's 6,000 steps only, its grid for 300.",
    "fig1d": f"{FULL_SCALE} Its trials are compared after 20 steps; its λ are a power of ten apart, others' two.",
    "fig2a": f"{FULL_SCALE} Its λ are a power of ten apart, others' two. Where λ is 1e-3 or more "
    "its systems are solved by conjugate gradients in float64 (the oldest runs by a factorisation in float32: losses agree to 5e-6).",
    "fig2c": "Natural gradients with the full Fisher, of which each step factorises four matrices of order 9,000, are run, and compared, "
    f"for 50 steps, their grid for 10. {FULL_SCALE}",
    "fig3a": "Every method has twenty trials, two more than elsewhere: with eighteen, standard damping won beside a λ that could "
    f"still grow. The paper gives no setting for it without the transposition: smaller λ are tried for it. {TO_THE_END} "
    f"{RELEASED}",
    "fig3b": f"{RELEASED} {NOT_REPRODUCED}",
    "fig3c": f"Six learning rates are tried for each λ. {TO_THE_END}",
    "fig3d": f"Six learning rates are tried for each λ. {TO_THE_END}",
    "adaptive-1a": NINE_LAMBDAS,
    "adaptive-1d": f"{NINE_LAMBDAS} Trials of the full Fisher are compared after 20 steps.",
    "adaptive-2a": f"{NINE_LAMBDAS} The full Fisher is solved by conjugate gradients.",
    "fig4c": "The first 1,800 of the paper's 6,000 steps, measured every 20, at the lr and λ of Fig. 1A's KFAC.",
}

FOUND: dict[str, str] = {  # on Fashion-MNIST at the paper's size
    "fig1a": "With a hundredth of the paper's λ KFAC is ahead in the grid, at step 1,200, but explodes before the end or ends above it.",
    "fig1b": "At the end of training subsampled KFAC is best at a hundredth of the paper's λ, where it ends at 0.015, and at the paper's "
    "setting at 0.05 to 0.15; at step 1,200 they are alike.",
    "fig2a": "Both KFAC and natural gradients with the full Fisher do far better at settings that explode on some seeds, and are passed "
    "over for that: KFAC at (3, 0.1) ends at 0.0002 to 0.0003 on four seeds of seven, and explodes on two; natural gradients at "
    "(0.1, 0.001) end at 0.0012 to 0.0013 on seven of nine. What limits either is how large a constant step it bears, and that is what "
    "decides: KFAC at (2, 0.1), a learning rate between those of the ladder, explodes on none of 26 seeds and ends at 0.0014 to 0.0029; "
    "natural gradients at (0.1, 0.01) explode on one of 26 and else end at 0.0083 to 0.0088.",
    "inside": "At the paper's own λ for FOOF, 1 in our scale, λ_A is 4.8 times that; FOOF's search finds a hundredth of it to be better.",
    "fig3c": f"{LR_IS_LAMBDA} Past step 1,800, where the figure's axis ends, the published curves cross, too: at step 5,991 they are "
    "at 0.020 with λ = 1e-6, at 0.038 with 1e-4, and at 0.30 with 1e-8. Beside the learning rate that wins at 1e-4 its double does as "
    "well with the seed that selects (0.0101 and 0.0103).",
    "fig4b": "Of what goes on after step 1,200 three of KFAC's eleven trials diverge, none of FOOF's six: some of KFAC's settings do "
    "become unstable late, but these are too few to say that fewer of FOOF's do. With a hundredth of the paper's λ and a learning "
    "rate between those of the ladder, (0.05, 0.01), FOOF ends at half of what it ends at with the paper's, whether it inverts every "
    "hundred steps or every ten.",
    "fig1d": "KFAC diverges at the paper's setting, in float64 too, once nearly all images are fitted: labels drawn from the model are "
    "then those of the data, its Fisher vanishes, and steps grow to lr/λ gradients. Its lr and λ are our own. A setting counts only if "
    "it explodes on no seed that vets, and that is what decides: KFAC at (0.0003, 1e-5) ends at 0.0001 on nine seeds of eleven, and "
    "explodes on two; at (0.003, 0.001), which explodes on none, at 0.002. Natural gradients with the full Fisher end at 0.0003 at "
    "(0.1, 0.01) on four seeds of six, and explode on two; at 0.0028 at (0.1, 0.1) on eight of nine, and explode on one.",
    "fig2c": "At step 50, where they end, natural gradients by layer with the full Fisher are at 0.0132 and KFAC at 0.0124, with the lr "
    "and λ that are best for it at step 100.",
    "fig3a": "The published curve of heuristic damping is that of Fig. 3C at λ = 0.0001; the learning rate that is best for it at step "
    "1,800 takes it from 0.05 there to 0.8 at 6,000. Beside it stands the KFAC of Fig. 1A. Each at its best, the released rotation ends "
    "about where the corrected one does, at 0.084 and 0.080; small λ of the latter lead at step 1,800, and stall. Past the figure's "
    "axis, at step 5,991, the published curves are at 0.115 (standard damping), 0.146 (SGD) and 0.038 (heuristic).",
    "fig3b": "The paper does not say which λ its FOOF had beside standard damping. The published curve of standard damping ends at 0.10; "
    "ours is at 0.23 with the corrected rotation, at 0.15 as released.",
    "fig3d": "FOOF is below KFAC at every λ, so that the order alone says nothing of damping. What weak damping costs does: at λ = 1e-8 "
    "KFAC ends at 46 times its loss at 1e-4, FOOF at 0.65 times; at 1e-6 both gain, to 0.64 and 0.50 times.",
}


# The convolutional half ------------------------------------------------------------------------------------------------

IMAGES = "Images are flipped and cropped at random, momentum (0.9) starts with the second epoch, all methods have nine trials first."
CODED = (
    "Losses are mean squared errors per pixel; what is minimised is half the sum of squares, whose Fisher KFAC takes. The paper does "
    "not say "
    "which methods have momentum here: SGD's is searched, the others have none, as in the fully connected half."
)
NETS: dict[str, str] = {
    **dict.fromkeys(("fig5b", "fig5c", "figj16a", "figj16b", "amortised"), IMAGES),
    "fig5a": "T = 500 and S = 10 as in the paper, whatever the size; time of one core, where the paper's is a GPU's.",
    "fig5d": "The runs of Fig. 5C, with its settings (the paper searched for both, and found the same): weights averaged with a decay of "
    "0.99 per step. The paper takes its decay from Grosse & Martens (2016) without naming it.",
    **dict.fromkeys(("figj12a", "figj12b"), f"{IMAGES} Natural gradients have no momentum, and their Fisher is renewed every 10 steps, "
          "as is "
                    "that of subsampled KFAC."),
    **dict.fromkeys(("figj14a", "figj14b", "vgg"), f"{IMAGES} {RELEASED}"),
    **dict.fromkeys(("figj17", "figj18"), f"{IMAGES} As many epochs at every batch size."),
    **dict.fromkeys(("figj13a", "figj13b", "figj13c"), f"{CODED} Fishers of natural gradients and of subsampled KFAC are renewed every 10 "
                    "steps."),
    **dict.fromkeys(("figj15a", "figj15b", "figj15c"), f"{CODED} {RELEASED}"),
    **dict.fromkeys(("figj19a", "figj20a", "figj21a", "figj22a", "figj22b", "figj22c"), CODED),
    **dict.fromkeys(("figj19c", "figj20c", "figj21c"), "Measured twenty times along the KFAC runs of panel A, with their lr and λ."),
    "bernoulli": "The loss of a pixel is the cross entropy of its brightness, from 0 to 1; inputs are normalised as elsewhere.",
}  # fmt: skip
MADE = {
    "curves": "CURVES may not be redistributed: images are ours, a smooth curve through three random points; losses are not those of "
    "CURVES.",
    "faces": "Patches are ours, made of the Olivetti faces as those of FACES were said to be made; losses are close to those, not the "
    "same.",
}
NOT_EMBEDDED = (
    "Neither CIFAR-10 nor MNIST comes with the package: at this size the network is small, and trained on the embedded Fashion-MNIST, "
    "with three "
    "learning rates for each method. The figure itself, and all others of the convolutional half, are those of the preset reduced."
)
SMALL = "Reduced: beside the published curves, not in place of them; neither steps nor losses are to be compared."
IN_PARTS = (
    "The records in the package are of a part of the data: 10,000 training images, by whose moments all are normalised, and 2,000 test "
    "images"
)
AT_HAND = {  # what the records of the preset reduced are of
    "cifar-10": f"{IN_PARTS}, the first of either.",
    "cifar-100": f"{IN_PARTS}, drawn at random.",
    "svhn": f"{IN_PARTS}, drawn at random, and cropped from whole numbers once more, to within 1/255 of the official crops.",
}
ONLY_REDUCED = {
    "amortised": "Half of T is less than five times S here: the schedule that inverts more often gathers in every step, which is twice the "
    "statistics in as many inversions, not five times.",
    **dict.fromkeys(("figj17", "figj18"), "All four batch sizes are a quarter of the paper's. With the largest a run is so short that FOOF "
                    "and KFAC invert only three times in it."),
}  # fmt: skip


def smaller(figure: str, task: str, preset: Preset) -> str:
    """By how much a network of the convolutional half is smaller than the paper's, from the sizes of both."""
    sizes = []
    for p in (preset, PRESETS["paper"]):
        assert p.nets is not None
        t = p.nets.tasks[task]
        run = {"steps": t.base.steps, "T": t.T, "S": t.S, "batches of statistics before training": t.initialise}
        width = {"width" if len(t.base.hidden) == 1 else "hidden layers": "-".join(map(str, t.base.hidden))}
        sizes.append({**width, "images": t.base.train_size, "batch": t.base.batch_size, **({} if figure == "fig5a" else run)})
    said = [f"{name} {_number(x)} instead of {_number(sizes[1][name])}" for name, x in sizes[0].items() if x not in (None, sizes[1][name])]
    return f"{SMALL} In numbers: {', '.join(said)}."


def _number(x: object) -> str:
    return f"{x:,}" if isinstance(x, int) else str(x)


def net_note(figure: str, dataset: str, preset: Preset) -> str:
    """All there is to say about a figure of the convolutional half."""
    parts = [NETS.get(figure), MADE.get(dataset) if preset.reduced or preset.centred else None]
    if preset.reduced:
        task = dataset if dataset in CODES else "vgg" if dataset == "svhn" else "resnet"
        parts += [smaller(figure, task, preset), ONLY_REDUCED.get(figure), AT_HAND.get(dataset)]
    elif not preset.centred:
        parts.append(NOT_EMBEDDED)
    return " ".join(filter(None, parts))


def note(figure: str, dataset: str, preset: Preset, run: bool) -> str:
    """All there is to say about an experiment at a size; what was found only if it was `run`."""
    if CATALOGUE[figure].nets:
        return net_note(figure, dataset, preset)
    parts = [DEPARTURES.get(figure), (PAPER_SIZE if preset.centred else SMALLER).get(figure)]
    if preset.centred and run and dataset == "fashion-mnist":
        parts.append(FOUND.get(figure))
    return " ".join(filter(None, parts))
