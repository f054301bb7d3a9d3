"""Modules by the names they once had: importing one is an error that says where it is now."""

from __future__ import annotations

from typing import Any

STUDY = {  # the rooms of the study, and what moved into each
    "data": "download formats",
    "train": "measuring:measurements methods models run setting",
    "search": "estimate presets store sweep tune:grids",
    "paper": "catalogue claims experiments notes published rules runs:searches toy verdict:verdicts",
    "show": "drawings figures:plots headline report svg",
}
MOVED = {
    "foof.curvature": "foof.kronecker",
    "foof.measures": "foof.study.train.updates",
    "foof.recording": "foof.passes",
    "foof.optim.preconditioner": "foof.optim.engine",
    "foof.optim.attach": "foof.optim.engine",
    **{
        f"foof.study.{old}": f"foof.study.{room}.{new or old}"
        for room, names in STUDY.items() for old, _, new in (name.partition(":") for name in names.split())
    },
}  # fmt: skip


def explain(name: str) -> str:
    """What to say of an attribute or module that is not there."""
    package, _, last = name.rpartition(".")
    return f"{name} is now {MOVED[name]}" if name in MOVED else f"module {package!r} has no attribute {last!r}"


class Finder:
    """The last to be asked for a module (``sys.meta_path``): ``__getattr__`` of a package is not, by ``import foof.curvature``."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name in MOVED:
            raise ModuleNotFoundError(explain(name))
