"""The house stands: a file imports only from those before it, and the library never from the study."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "foof"

# Every module of the package, each allowed to import from those in lines above it.
ORDER = """
notices
linalg
layers
statistics
likelihood
tap
kronecker
vectors
gradients
gram
woodbury
passes
distributed
optim.rules
optim.attach
optim.block
optim.preconditioner
optim.base
optim.foof
optim.adaptive
optim.kfac
optim.natural
optim.precondition
optim
explain
fisher
laplace ewc implicit
foof
study.data.formats
study.data.download
study.data.datasets
study.data
study.train.models
study.train.setting
study.train.methods
study.train.updates
study.train.measurements
study.train.run
study.train
study.search.store
study.search.sweep
study.search.grids
study.search.presets
study.search.estimate
study.search
study.paper.searches
study.paper.toy
study.paper.verdicts
study.paper.rules
study.paper.claims
study.paper.catalogue
study.paper.notes
study.paper.published
study.paper.experiments
study.paper.answers
study.paper.trials
study.paper
study.show.plots
study.show.svg
study.show.scoreboard
study.show.drawings
study.show.headline
study.show.report
study.show
study
cli
"""
RANK = {name: i for i, line in enumerate(ORDER.split("\n")) for name in line.split()}


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts) or "foof"


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            # `from foof.study import data` imports the module data; `from foof.study.data import load` does not import load
            found |= {f"{node.module}.{a.name}" if (SRC.parent / node.module.replace(".", "/") / f"{a.name}.py").exists()
                      else node.module for a in node.names}  # fmt: skip
    ours = {m for m in found if m == "foof" or m.startswith("foof.")}
    return {m.removeprefix("foof.") for m in ours}


FILES = sorted(SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_from_those_before_it(path):
    name = name_of(path)
    assert name in RANK, f"{name} has no place in the order: add it to tests/test_architecture.py where it belongs"
    late = [m for m in imports(path) if RANK.get(m, -1) >= RANK[name] and m != name]
    assert not late, f"{name} imports {late}, which come after it"


def test_the_library_needs_torch_alone():
    """`import foof` loads nothing of the study, nor of what the study depends on."""
    code = "import sys, foof; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    torch_alone = "import sys, torch; print(*sorted(sys.modules))"
    already = subprocess.run([sys.executable, "-c", torch_alone], capture_output=True, text=True, check=True).stdout.split()
    new = {m.partition(".")[0] for m in set(loaded) - set(already)} - set(sys.stdlib_module_names)
    assert new <= {"foof", "torch", "numpy"}
    assert not [m for m in loaded if m.startswith("foof.study")]
