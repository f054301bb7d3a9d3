"""The examples run, say what they promise and leave a picture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "laplace": "first factor, sampled",
    "ewc": "exact        after the last task",
    "implicit": "unrolled",
    "natural_gradient": "Full Fisher",
}


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_ends_in_a_picture(name: str, tmp_path: Path) -> None:
    out = tmp_path / "picture.html"
    path = os.pathsep.join([str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--out", out],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert SAYS[name] in ran.stdout
    assert out.stat().st_size > 10_000


def test_every_example_with_a_picture_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py") if "from common import" in path.read_text()} == set(SAYS)


def test_implicit_and_unrolled_agree_in_the_example() -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import implicit
        import torch

        x, y, valid_x, valid_y = implicit.problem()
        log_strength = torch.tensor(-2.3, dtype=torch.float64, requires_grad=True)
        ours = implicit.implicit(x, y, valid_x, valid_y, log_strength)[1]
        theirs = implicit.unrolled(x, y, valid_x, valid_y, log_strength)
    finally:
        sys.path.remove(str(EXAMPLES))
    assert ours == pytest.approx(theirs, rel=1e-6)
