"""Does a wheel work in an environment with torch alone? ``python tools/smoke_wheel.py dist/foof-*.whl``.

Makes an empty virtual environment, links torch and what torch itself requires into it (a download would take minutes), installs the
wheel without looking for anything else, lets pip check that nothing is missing, and trains with it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib import metadata
from pathlib import Path

SMOKE = """
import sys, torch, foof
from importlib.metadata import version
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
x, y = torch.randn(30, 4), torch.arange(30) % 3
for make in (foof.FOOF, foof.KFAC, foof.NaturalGradient):
    opt = make(model)
    for _ in range(3):
        opt.zero_grad()
        out = model(x)
        opt.update_curvature(out)
        torch.nn.functional.cross_entropy(out, y).backward()
        opt.step()
    opt.remove()
print(foof.explain(model))
foof.Fisher(model, x, "mc").quadratic([p.detach() for p in model.parameters()])
extra = {"dask", "plotly", "typer", "pytest", "scipy"} & {name.partition(".")[0] for name in sys.modules}
assert not extra, extra
assert "site-packages" in foof.__file__, foof.__file__
print("foof", version("foof"), "works with torch", torch.__version__, "alone")
"""


def requirements(name: str, seen: set[str]) -> set[str]:
    """A distribution and all it requires, without extras."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in seen:
        return seen
    seen.add(name)
    for requirement in metadata.requires(name) or []:
        if "extra ==" not in requirement:
            other = re.match(r"[\w.-]+", requirement)
            try:
                requirements(other[0] if other else "", seen)
            except metadata.PackageNotFoundError:
                seen.discard(other[0].lower() if other else "")  # for another platform
    return seen


def link(name: str, target: Path) -> None:
    """Link a distribution's top-level files into another environment."""
    distribution = metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        source = Path(str(distribution.locate_file(top)))
        if source.exists() and not (target / top).exists():
            (target / top).symlink_to(source)


def main(wheel: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        site = Path(sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder}))
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "setuptools"], check=True)  # torch brings its own
        for name in sorted(requirements("torch", set())):
            link(name, site)
        subprocess.run([*pip, "install", "--quiet", "--no-deps", wheel], check=True)
        subprocess.run([*pip, "check"], check=True)
        subprocess.run([python, "-W", "ignore", "-c", SMOKE], check=True, cwd=folder)


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
