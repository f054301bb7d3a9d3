"""Every Python snippet of the README runs as it stands, and what it links to exists."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
import docs_hooks  # noqa: E402
import readme  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet(number):
    exec(compile(SNIPPETS[number], f"README.md, snippet {number + 1}", "exec"), {"__name__": "readme"})


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_the_sentence_on_the_defaults_is_that_of_the_records():
    said = docs_hooks.defaults_table("tasks")().splitlines()[-1]
    wins = re.findall(r"(\d+ of \d+) tasks", said)
    claimed = re.search(r"AdamW's defaults on (\d+ of \d+) small tasks.* learning rates on (\d+ of \d+)", README.replace("\n", " "))
    assert list(claimed.groups()) == wins[:2]


def test_the_commands_of_the_readme_are_in_the_makefile():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(re.findall(r"^make ([a-z]+)", README, flags=re.M)) <= set(targets)


def test_findings_and_picture_are_those_of_the_records():
    """`python tools/readme.py` writes both anew."""
    found = readme.outcomes()
    for page, blocks in readme.BLOCKS.items():
        for name, write in blocks.items():
            assert readme.block(name).search(page.read_text(encoding="utf-8"))[0] == write(found), name
    assert readme.PICTURE.read_text(encoding="utf-8") == readme.picture(found)
    assert readme.BOARD.read_text(encoding="utf-8") == readme.board(found)
    small = readme.reduced_outcomes()
    assert readme.SMALL.read_text(encoding="utf-8") == readme.beside_published(small)
    assert readme.SMALL_BOARD.read_text(encoding="utf-8") == readme.small_board(small)
