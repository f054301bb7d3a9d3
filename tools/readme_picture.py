"""Draw docs/img/loss.svg, the picture of the README, from the committed records of the preset `quick`."""

from pathlib import Path

from foof.study.experiments import METHODS_COMPARED, PRESETS, committed, conduct, remembered
from foof.study.figures import curve
from foof.study.store import Store
from foof.study.svg import curves_svg

TARGET = Path(__file__).parents[1] / "docs/img/loss.svg"


def picture() -> str:
    """The training loss of each method at its best setting, mean ± deviation over seeds."""
    preset = PRESETS["quick"]
    with Store(":memory:") as store:
        store.load_dump(committed(preset))
        (outcome,) = conduct([METHODS_COMPARED], preset, remembered(store))
    curves = [curve(tuned.records, label) for label, tuned in outcome.found.items()]
    return curves_svg(curves, "Fashion-MNIST (6,000 images), 784-500-500-500-10, batch 100")


if __name__ == "__main__":
    TARGET.write_text(picture())
