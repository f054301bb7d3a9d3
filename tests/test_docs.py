"""The documentation: its code runs, the tests it names exist, the site builds and its links lead somewhere."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import foof

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def code(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if code(page)])
def test_code_runs(page):
    """Top to bottom, each page by itself; what a fragment takes for granted is here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    names = {
        "__name__": "docs", "torch": torch, "nn": nn, "foof": foof, "model": model, "x": torch.randn(32, 8),
        "y": torch.randint(0, 3, (32,)), "loss_fn": nn.functional.cross_entropy,
    }  # fmt: skip
    for number, snippet in enumerate(code(page)):
        exec(compile(snippet, f"docs/{page}, snippet {number + 1}", "exec"), names)


def functions_of(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def features():
    """(feature, its cells, the tests named for it) of docs/features.md."""
    text = (DOCS / "features.md").read_text(encoding="utf-8")
    tests = dict(re.findall(r"^- \*\*(.*)\*\*: (.*)$", text, flags=re.M))
    for row in re.findall(r"^\| (?!\|)(.*) \|$", text, flags=re.M):
        feature, *cells = (cell.strip() for cell in row.split("|"))
        yield feature, cells, re.findall(r"`(tests/\w+\.py)::(\w+)(?:\[(\w+)\])?`", tests[feature])


def test_every_tick_names_tests_that_exist():
    found = list(features())
    assert len(found) > 20
    for feature, _, named in found:
        assert named, feature
        for file, test, parameter in named:
            assert test in functions_of(file), f"{file}::{test}"
            assert not parameter or parameter in functions_of(file), f"{file}::{test}[{parameter}]"


def test_exceptions_are_not_ticked():
    """What tests/test_features.py excepts is no ✓ in the table, and the other way round."""
    from test_features import EXCEPTIONS, FEATURES, OPTIMIZERS

    seen = set()
    for _, cells, named in features():
        for _, _, parameter in named:
            for name, cell in zip(OPTIMIZERS, cells, strict=True):
                assert not parameter or cell.startswith("✓") == ((parameter, name) not in EXCEPTIONS), f"{parameter}, {name}: {cell}"
            seen.add(parameter)
    assert {feature.__name__ for feature in FEATURES} <= seen


def texts(node):
    """Strings inside a node, with … for what is formatted into them."""
    if isinstance(node, ast.Constant):
        yield from [node.value] if isinstance(node.value, str) else []
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def said():
    """What the library, without study and benchmark, raises and warns of in so many words; and every string in it."""
    found, everything = set(), set()
    for path in (ROOT / "src" / "foof").rglob("*.py"):
        if path.relative_to(ROOT).parts[2] in ("study", "bench", "cli.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        everything.update(texts(tree))
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(call, ast.Call) and (call is not node or ast.unparse(call.func).endswith("warn")):
                found.update(text for arg in call.args if isinstance(arg, (ast.Constant, ast.JoinedStr)) for text in texts(arg))
    return found, everything


INTERNAL = ("autograd never asks for one", "object has no attribute", "… has no …: …")  # never seen, or not a problem's


def test_every_refusal_and_warning_is_on_the_page():
    """And the page quotes nothing that is not said."""
    quoted = re.findall(r"^\| `([^`]+)` \|", (DOCS / "problems.md").read_text(encoding="utf-8"), flags=re.M)
    found, everything = said()
    assert len(found) > 100
    missing = [text for text in found if not any(part in text for part in (*quoted, *INTERNAL))]
    assert not missing
    stale = [part for part in quoted if not any(part in text for text in everything)]
    assert not stale


def test_every_test_the_pages_name_exists():
    for page in PAGES:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)", (DOCS / page).read_text(encoding="utf-8"))
        assert named or page != "problems.md"
        for file, test in named:
            assert test in functions_of(file), f"{page}: {file}::{test}"


def test_each_row_of_problems_names_its_test():
    rows = re.findall(r"^\| (?:`|\d).* \|$", (DOCS / "problems.md").read_text(encoding="utf-8"), flags=re.M)
    assert [row for row in rows if "`tests/" not in row.split("|")[-2]] == []
    assert [row.split("|")[1].strip() for row in rows[-24:]] == [str(n) for n in range(1, 25)]


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    assert {page.replace(".md", ".html") for page in PAGES} <= {path.name for path in tmp_path.iterdir()}
    checked = subprocess.run([sys.executable, "tools/check_links.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
