"""Draw docs/img/loss.svg, the picture of the README, from the committed records of the preset `quick`."""

from pathlib import Path

from foof.study.drawings import Curves
from foof.study.experiments import chosen, committed
from foof.study.presets import PRESETS
from foof.study.report import recalled
from foof.study.runs import FOOF_10
from foof.study.svg import curves_svg

TARGET = Path(__file__).parents[1] / "docs/img/loss.svg"


def picture() -> str:
    """The training loss of each method at its best setting, mean ± deviation over seeds."""
    preset = PRESETS["quick"]
    (outcome,) = recalled(chosen(["fig4b"], preset), preset, committed(preset))
    drawn = outcome.drawings[0]
    assert isinstance(drawn, Curves)
    sizes = "-".join(map(str, (784, *preset.base.hidden, 10)))
    curves = [c for c in drawn.curves if c.label != FOOF_10]
    return curves_svg(curves, f"Fashion-MNIST (6,000 images), {sizes}, batch {preset.base.batch_size}")


if __name__ == "__main__":
    TARGET.write_text(picture())
