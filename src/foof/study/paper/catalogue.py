"""The experiments in words: titles, places in the paper, what is claimed there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """What a section of the report says about its experiment. `draws` names the way its figure is drawn."""

    title: str
    where: str
    claimed: str
    mnist: str = ""  # where the paper has the same for MNIST; empty: nowhere
    draws: str = "loss"
    early: bool = False  # the published figure ends before training does, as Fig. 3: its end is shown beside that of training
    nets: bool = False  # of the convolutional half, which has data sets of its own


GOOD_STEPS = (
    "Natural gradients gained little by an adaptive damping, step size and momentum (Martens & Grosse 2015). Here both they and KFAC have "
    "them: does KFAC lead with good steps, too?"
)
CATALOGUE: dict[str, Entry] = {
    "toy": Entry(
        "Two datapoints that disagree", "Appendix F",
        "Gradients of different datapoints can conflict. SGD adds them up, so one can overwrite the other; FOOF finds the update "
        "that serves both."),
    "fig1a": Entry(
        "KFAC against natural gradients", "Section 3.2, Fig. 1A",
        "KFAC is motivated as an approximation of natural gradients, yet trains far faster than exact, subsampled ones; these are "
        "hardly better than SGD with momentum.", "Fig. J.8A"),
    "fig1b": Entry(
        "The same curvature data for both", "Fig. 1B",
        "KFAC's advantage is not that its moving averages see more data: with one mini-batch, as natural gradients have it, KFAC is "
        "still ahead.", "Fig. J.8B"),
    "fig1c": Entry(
        "More curvature data for natural gradients", "Fig. 1C",
        "Nor do larger batches for the Fisher close the gap.", "Fig. J.8C"),
    "fig1d": Entry(
        "Nothing approximated at all", "Fig. 1D",
        "On few images with full batches, the gradient, the Fisher and its inversion are exact. Natural gradients then beat SGD, but "
        "KFAC beats them.", "Fig. J.8D"),
    "fig2a": Entry(
        "One layer", "Fig. 2A",
        "In logistic regression the block-diagonal Fisher is the whole Fisher, and KFAC is still ahead of natural gradients.", "Fig. J.9A"),
    "fig2b": Entry("Block-diagonal natural gradients", "Fig. 2B",
                   "Restricting natural gradients to the blocks KFAC uses does not explain its advantage.", "Fig. J.9B"),
    "fig2c": Entry("Block-diagonal, full batch", "Fig. 2C", "The same with full batches on few images.", "Fig. J.9C"),
    "fig3a": Entry(
        "The damping heuristic", "Fig. 3A",
        "KFAC damps each of its factors by itself. With standard damping, λ added to the whole, it performs like SGD. The released code "
        "for standard damping rotates with a transposed matrix; both are shown.", "Fig. J.10A", early=True),
    "fig3b": Entry(
        "How similar KFAC is to FOOF", "Fig. 3B",
        "Cosine between the updates of KFAC and of FOOF, in the inner product of FOOF's Σ. Heuristic damping raises it, and more so the "
        "stronger it is.", "Fig. J.10B", draws="similarity", early=True),
    "fig3c": Entry("KFAC at three dampings", "Fig. 3C", "KFAC trains the better the stronger its heuristic damping, and so the more "
                   "similar it is to FOOF.", "Fig. J.10C", early=True),
    "fig3d": Entry("FOOF at the same dampings", "Fig. 3D", "FOOF, with λ_A taken from KFAC, already works well at dampings where KFAC "
                   "does not: KFAC needs damping to limit its second factor.", "Fig. J.10D", early=True),
    "fig4a": Entry("Time per step", "Section 4.2, Fig. 4A", "FOOF has one factor instead of two and needs no second backward pass: it is "
                   "about 1.5 times faster than KFAC.", "Fig. J.11A", draws="time"),
    "fig4b": Entry(
        "FOOF against SGD, Adam and KFAC", "Section 4, Fig. 4B",
        "Gradient descent on neurons (FOOF) trains faster than SGD with momentum and Adam, and also than KFAC, each tuned by its own "
        "search; inverting every 100 steps is enough.", "Fig. J.11B"),
    "fig4c": Entry("What the second factor adds", "Section 4.2, Fig. 4C", "Along KFAC's trajectory, the share of the batch's loss that "
                   "its update removes, with and without the second factor (rescaled to the same norm per layer).",
                   "Fig. J.11C", draws="decrease"),
    "time": Entry("Loss against time", "Section 4.2", "FOOF makes more progress per update than KFAC, and its updates cost less. What "
                  "counts in the end is time: the training loss of every method over seconds of one core.", draws="seconds"),
    "generalisation": Entry("Unseen images", "Section 5", "The advantage in training loss usually carries over to validation accuracy; "
                            "FOOF and KFAC behave alike.", "Section 5", draws="accuracy"),
    "robustness": Entry("What FOOF does not depend on", "Appendix D.3", "The decay m of the moving average, the schedule S and T and the "
                        "damping need no careful tuning.", "Fig. J.11B"),
    "per-datapoint": Entry("FOOF on single datapoints", "Appendix F", "Applied to each datapoint alone and averaged, FOOF is SGD with a "
                           "learning rate per datapoint, and performs like SGD: combining datapoints is the point."),
    "batches": Entry("Fisher and gradient from the same mini-batch?", "Appendix I.5, Fig. I.6", "Estimating both on the same mini-batch "
                     "biases natural gradients; an independent one avoids that.", "Fig. I.7"),
    "bayesian": Entry("A damping nobody tuned", "Appendix K", "A Bayesian reading suggests λ = the precision of the weight initialisation; "
                      "then only the learning rate is left to tune."),
    "finer": Entry("A finer grid of λ", "Appendices D.2, D.3", "Refining the grid of λ from 10^(2i) to 10^i hardly improves FOOF."),
    "finer-kfac": Entry("A finer grid of λ for KFAC", "Appendix D.2", "Nor does it KFAC."),
    "inside": Entry(
        "Inside FOOF and KFAC", "Appendices D.4, G, H.2, K",
        "KFAC's λ_A, the damping of its first factor, is close to FOOF's λ; Σ changes slowly; inverting it is about ten times faster than "
        "decomposing it into singular values; and as a posterior of weights the first factor alone might do as well as both.",
        draws="inside"),
    "adaptive-1a": Entry("Constant steps or good steps?", "Appendix A, Fig. 1A", f"{GOOD_STEPS} On mini-batches."),
    "adaptive-1d": Entry("Good steps, nothing approximated", "Appendix A, Fig. 1D", f"{GOOD_STEPS} With full batches of few images."),
    "adaptive-2a": Entry("Good steps in one layer", "Appendix A, Fig. 2A", f"{GOOD_STEPS} In one layer, with full batches of few images."),
    "one-hidden": Entry("One hidden layer of 500 on MNIST", "", "Where earlier work has a loss of 0.3 and less than 95 % accuracy, KFAC "
                        "reaches a loss a hundred times smaller and 98 %.", "Appendix H.1.1"),
}  # fmt: skip


def _net(title: str, where: str, claimed: str, draws: str = "loss") -> Entry:
    return Entry(title, where, claimed, draws=draws, nets=True)


WITHOUT, WITH = "ResNet18 without batch norm", "ResNet18 with batch norm"
SUBSAMPLED = "KFAC outperforms subsampled natural gradients also when its own curvature is subsampled alike."
DAMPING = (
    "Heuristic damping is essential for KFAC's performance. The released code for standard damping rotates with a transposed matrix; both "
    "are shown."
)
LIKE_CIFAR_10 = "On CIFAR-100 results are as on CIFAR-10."
CODES = {"faces": "FACES", "mnist": "MNIST", "curves": "CURVES"}  # left, middle and right of Figs. J.13, J.15 and J.22
SIDES = dict(zip(CODES, "abc", strict=True))
NUMBERS = {"faces": 19, "mnist": 20, "curves": 21}  # of their own figures, J.19 to J.21


def _codes(dataset: str, name: str) -> dict[str, Entry]:
    """The figures of one autoencoder."""
    side, number, of = SIDES[dataset], NUMBERS[dataset], f"{name} autoencoder"
    return {
        f"figj13{side}": _net(f"Subsampled natural gradients, {of}", f"Fig. J.13, {name}", SUBSAMPLED),
        f"figj15{side}": _net(f"The damping heuristic, {of}", f"Fig. J.15, {name}", DAMPING),
        f"figj{number}a": _net(of, f"Fig. J.{number}A", "The exception that the paper reports: KFAC is slightly ahead of FOOF; both are "
                               "ahead of Adam and SGD."),
        f"figj{number}c": _net(f"Progress per update, {of}", f"Fig. J.{number}C", "Along KFAC's trajectory FOOF makes more progress per "
                               "update than KFAC itself.", "decrease"),
        f"figj22{side}": _net(f"The empirical Fisher, {of}", f"Fig. J.22, {name}", "KFAC works equally well with the empirical Fisher."),
    }  # fmt: skip


CATALOGUE |= {
    "fig5a": _net("Time per step of a ResNet18", "Section 4.2, Fig. 5A", "In convolutional networks FOOF and KFAC can be amortised to cost "
                  "hardly more than SGD: about 10 % (FOOF) and 15 % (KFAC).", "time"),
    "fig5b": _net(f"{WITHOUT} on CIFAR-10", "Fig. 5B", "FOOF outperforms KFAC in a Wide ResNet18, and both SGD."),
    "fig5c": _net(f"{WITH} on CIFAR-10", "Fig. 5C", "With batch norm, whose parameters FOOF and KFAC leave as they are, FOOF still "
                  "outperforms KFAC and SGD."),
    "fig5d": _net(f"{WITH}, weights averaged", "Fig. 5D", "Likewise for weights averaged over the last steps (Polyak).", "averaged"),
    "amortised": _net("How often to invert in a ResNet18", "Appendix D.6", "Inverting twice as often, with five times the statistics, "
                      "gives essentially the same results."),
    "figj12a": _net(f"Subsampled natural gradients, {WITHOUT}", "Fig. J.12, left", SUBSAMPLED),
    "figj12b": _net(f"Subsampled natural gradients, {WITH}", "Fig. J.12, right", SUBSAMPLED),
    "figj14a": _net(f"The damping heuristic, {WITHOUT}", "Fig. J.14, left", DAMPING),
    "figj14b": _net(f"The damping heuristic, {WITH}", "Fig. J.14, right", DAMPING),
    "figj16a": _net(f"{WITHOUT} on CIFAR-100", "Fig. J.16, left", LIKE_CIFAR_10),
    "figj16b": _net(f"{WITH} on CIFAR-100", "Fig. J.16, right", LIKE_CIFAR_10),
    "figj17": _net("VGG11 on SVHN at four batch sizes", "Fig. J.17", "On SVHN results are as on CIFAR-10: FOOF and KFAC are ahead of SGD "
                   "at every batch size."),
    "figj18": _net("What large batches cost", "Fig. J.18", "The same runs by method: after as many epochs, SGD is behind with large "
                   "batches; FOOF and KFAC hardly are."),
    "vgg": _net("Natural gradients and both dampings, VGG11 on SVHN", "our own", "What Figs. J.12 and J.14 ask of a ResNet18, asked of a "
                "VGG11: does KFAC beat natural gradients, and does it need its damping heuristic?"),
    **{figure: entry for dataset, name in CODES.items() for figure, entry in _codes(dataset, name).items()},
    "bernoulli": _net("MNIST autoencoder with a Bernoulli likelihood", "our own", "The autoencoder as Martens & Grosse (2015) trained it: "
                      "logits of pixels, cross entropy. Are methods in the same order?"),
}  # fmt: skip
