"""The house stands: which room may use which, no way leads in a circle, and the library never needs the study."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import foof
from foof._moved import MOVED

SRC = Path(__file__).parents[1] / "src" / "foof"

# The rooms, and the files in each. A room of the same name as a folder holds all of it.
ROOMS = {
    "ground": "_torch _moved notices vectors linalg sweep distributed",  # torch itself, and tensors in, tensors out
    "layers": "layers covering patches",
    "statistics": "statistics kronecker",  # second moments, and damped inverses made of them
    "passes": "likelihood tap gradients passes",  # where a and e meet, and who looks on
    "fisher": "gram woodbury conjugate fisher laplace ewc implicit",  # G Gᵀ, its damped inverse, and what these are for
    "explain": "explain cost",
    "optim": "optim.*",
    "public": "foof",
    "study.data": "study.data.*",
    "study.train": "study.train.*",
    "study.search": "study.search.*",
    "study.paper": "study.paper.*",
    "study.show": "study.show.*",
    "study": "study",
    "bench": "bench.*",
    "cli": "cli",
}
# Who may use whom, besides its own room. What is not here is not allowed.
EDGES = {
    "ground": "",
    "layers": "ground statistics",  # how wide second moments of patches are kept
    "statistics": "ground layers",
    "passes": "ground layers statistics",
    "fisher": "ground layers statistics passes",
    "explain": "ground layers passes",
    "optim": "ground layers statistics passes fisher explain",
    "public": "ground statistics fisher explain optim",
    "study.data": "",
    "study.train": "public layers statistics passes optim study.data",
    "study.search": "study.train",
    "study.paper": "study.train study.search",
    "study.show": "study.train study.search study.paper",
    "study": "",
    "bench": "public ground layers explain study.data study.train",
    "cli": "public bench study.data study.train study.search study.paper study.show",
}


def room_of(module: str) -> str:
    """The room a module is in: by its name, or by its folder's."""
    for room, files in ROOMS.items():
        folders = [f.removesuffix(".*") for f in files.split() if f.endswith(".*")]
        if module in files.split() or any(module == folder or module.startswith(folder + ".") for folder in folders):
            return room
    raise AssertionError(f"{module} is in no room: add it to ROOMS in tests/test_architecture.py where it belongs")


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
            folder = SRC.parent / node.module.replace(".", "/")
            found |= {f"{node.module}.{a.name}" if (folder / f"{a.name}.py").exists() or (folder / a.name).is_dir() else node.module
                      for a in node.names}  # fmt: skip
    ours = {m for m in found if m == "foof" or m.startswith("foof.")}
    return {m.removeprefix("foof.") for m in ours}


FILES = sorted(SRC.rglob("*.py"))
IMPORTS = {name_of(path): imports(path) for path in FILES}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_file_uses_only_rooms_it_may_use(name):
    mine = room_of(name)
    strange = {m for m in IMPORTS[name] if room_of(m) != mine and room_of(m) not in EDGES[mine].split()}
    assert not strange, f"{name} ({mine}) may not use {sorted(strange)}"


def test_every_edge_is_walked():
    """What nobody uses should not be allowed."""
    walked = {(room_of(name), room_of(m)) for name, used in IMPORTS.items() for m in used}
    idle = {(room, other) for room, others in EDGES.items() for other in others.split()} - walked
    assert not idle


def test_no_way_leads_in_a_circle():
    done: set[str] = set()

    def visit(name, way):
        assert name not in way, f"a circle: {' → '.join([*way, name])}"
        if name not in done:
            for other in IMPORTS.get(name, ()):
                if other != name:
                    visit(other, [*way, name])
            done.add(name)

    for name in IMPORTS:
        visit(name, [])


PRIVATE = (
    r"torch\._[a-zA-Z]|_will_engine_execute_node|_disable_dynamo|\._version\b|\._base\b|_backward_cls|\._forward_hooks|_orig_mod|"
    r"_join_config|\._parameters\b|_reversed_padding|_DropoutNd|_BatchNorm|_backward_hooks"
)


def test_private_names_of_torch_stand_in_one_file():
    found = [
        f"{path.relative_to(SRC)}: {line.strip()}"
        for path in FILES if path.name != "_torch.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(PRIVATE, line.replace("torch._dynamo.reset()", "").replace("foof import _torch", ""))
    ]  # fmt: skip
    assert not found


def test_the_library_needs_torch_alone():
    """`import foof` loads nothing of the study, nor of what the study depends on."""
    code = "import sys, foof; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    torch_alone = "import sys, torch; print(*sorted(sys.modules))"
    already = subprocess.run([sys.executable, "-c", torch_alone], capture_output=True, text=True, check=True).stdout.split()
    new = {m.partition(".")[0] for m in set(loaded) - set(already)} - set(sys.stdlib_module_names)
    assert new <= {"foof", "torch", "numpy"}
    assert not [m for m in loaded if m.startswith("foof.study")]


def test_moved_modules_say_where_they_are_now():
    """However they are asked for: imported, from their package or from inside them, or as an attribute."""
    for old, new in MOVED.items():
        assert old.removeprefix("foof.") not in IMPORTS, f"{old} is there"
        assert new.removeprefix("foof.") in IMPORTS
        package, _, name = old.rpartition(".")
        for code in (f"import {old}", f"from {old} import anything", f"from {package} import {name}"):
            with pytest.raises(ImportError, match=f"{old} is now {new}"):
                exec(code, {})
    for of in (foof, foof.optim):
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            of.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match=r"foof\.measures is now foof\.study\.train\.updates"):
        foof.measures  # noqa: B018
    with pytest.raises(AttributeError, match=r"foof\.optim\.preconditioner is now foof\.optim\.engine"):
        foof.optim.preconditioner  # noqa: B018
