"""Verdicts, figures and the page: what is measured is what is shown."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from foof.study import figures, report
from foof.study.experiments import EXPERIMENTS, PRESETS, NotRun, committed, conduct, remembered
from foof.study.run import run
from foof.study.setting import Record, Setting
from foof.study.store import Store
from foof.study.svg import curves_svg
from foof.study.toy import toy
from foof.study.verdict import Ruling, Spread, Verdict, lower, of, spread

SMOKE = PRESETS["smoke"]
SEARCHED = replace(SMOKE, fine=True)


@pytest.fixture(scope="module")
def outcomes():
    return conduct(list(EXPERIMENTS.values()), SEARCHED, lambda settings: [run(s) for s in settings])


@pytest.fixture(scope="module")
def page(outcomes, tmp_path_factory):
    return report.write(tmp_path_factory.mktemp("out") / "report.html", outcomes, SMOKE)


def test_spread_and_order():
    assert spread([1, 2, 3]) == Spread(2, 1, 3)
    assert str(spread([0.5])) == "0.5 (n = 1)"
    assert math.isnan(spread([]).mean)
    assert lower(Spread(1, 0.1, 3), Spread(2, 0.1, 3)) is Ruling.HOLDS
    assert lower(Spread(2, 0.1, 3), Spread(1, 0.1, 3)) is Ruling.FAILS
    assert lower(Spread(1, 0.6, 3), Spread(2, 0.6, 3)) is Ruling.UNDECIDED
    assert lower(Spread(1, 0.1, 3), Spread(math.inf, math.nan, 3)) is Ruling.HOLDS
    assert lower(Spread(math.nan, 0, 3), Spread(1, 0, 3)) is Ruling.UNDECIDED


def test_smoothing_is_that_of_the_published_curves():
    assert figures.smooth([1.0, 0.0, 0.0]) == pytest.approx([1.0, 0.9, 0.81])
    assert figures.smooth([3.0, 2.0], keep=0.0) == [3.0, 2.0]


def test_a_curve_is_the_mean_over_seeds_where_all_still_run():
    def record(seed, loss):
        return Record(Setting(seed=seed), "finished", {"step": list(range(len(loss))), "loss": loss})

    c = figures.curve([record(0, [1.0, 2.0, 9.0]), record(1, [3.0, 2.0])])
    assert (c.steps, c.mean, c.label, c.seeds) == ([0, 1], [2.0, 2.0], "SGD", 2)
    assert c.high[0] - c.low[0] == pytest.approx(2 * math.sqrt(2))
    groups = figures.by_setting([record(0, [1.0]), record(1, [1.0])])
    assert list(map(len, groups.values())) == [2]


def test_verdicts_say_what_the_records_say(outcomes):
    found = {o.experiment.id: o for o in outcomes}["methods"].found
    verdicts = {v.id: v for o in outcomes for v in o.verdicts}
    foof, sgd = (of(found[name].records, "train_loss") for name in ("FOOF", "SGD + momentum"))
    assert verdicts["foof-vs-sgd"].ruling is lower(foof, sgd)
    assert f"FOOF {foof}" in verdicts["foof-vs-sgd"].measured
    assert {verdicts["toy-sgd"].ruling, verdicts["toy-foof"].ruling} == {Ruling.HOLDS}
    assert "(2, 1)" in verdicts["toy-sgd"].measured
    assert "(-1, 4)" in verdicts["toy-foof"].measured


def test_nothing_is_decided_without_a_search():
    outcome = conduct([EXPERIMENTS["methods"]], SMOKE, lambda settings: [run(s) for s in settings])[0]
    assert {v.ruling for v in outcome.verdicts} == {Ruling.UNDECIDED}


def test_a_report_never_trains(tmp_path):
    with Store(tmp_path / "records.sqlite") as store, pytest.raises(NotRun, match="run `foof reproduce` first"):
        conduct(list(EXPERIMENTS.values()), SMOKE, remembered(store))


@pytest.mark.parametrize("name", PRESETS)
def test_committed_records_are_complete(name):
    """Each dump in the package redraws its whole report."""
    preset = PRESETS[name]
    if not committed(preset).exists():
        pytest.skip("no records of this preset are in the package")
    with Store(":memory:") as store:
        store.load_dump(committed(preset))
        assert conduct(list(EXPERIMENTS.values()), preset, remembered(store))


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.sources = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if "id" in attrs:
            assert attrs["id"] not in self.ids
            self.ids.add(attrs["id"])
        if tag == "a":
            self.links.append(attrs["href"])
        if "src" in attrs or tag == "link":
            self.sources.append(attrs.get("src") or attrs["href"])


def test_the_page_is_whole_and_needs_no_network(page):
    text = page.read_text(encoding="utf-8")
    found = Page(re.sub(r"<script>.*?</script>", "", text, flags=re.S))
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert found.sources == ["data:,"]
    specs = re.findall(r'<script type="application/json">(.*?)</script>', text, flags=re.S)
    assert len(specs) == 3
    for spec in specs:
        assert json.loads(spec)["data"]


def test_text_from_outside_cannot_break_the_page():
    evil = Verdict("x", "<b>", "</script><script>alert(1)</script>", "1 < 2", "r", Ruling.FAILS)
    figure = figures.curves_figure([], "</script><script>alert(2)</script>")
    text = report.render([evil], [report.Section("s", "t", "w", "c", [figure], [], "foof")], {"runs": "0"})
    assert "<script>alert" not in text
    assert "&lt;b&gt;" in text


def test_the_svg_is_well_formed():
    from xml.etree import ElementTree

    c = figures.Curve("FOOF", [1, 11, 21], [2.0, 0.5, 0.02], [1.9, 0.4, -0.01], [2.1, 0.6, 0.05], 3)
    root = ElementTree.fromstring(curves_svg([c], "a < b"))
    assert len(root.findall("{*}polyline")) == 1


def test_the_toy_figure_shows_both_datapoints():
    assert [t.name for t in figures.toy_figure(toy()).data] == ["SGD", "SGD", "FOOF", "FOOF"]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")
def test_every_figure_renders_in_a_browser_without_errors(page, tmp_path):
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=4000",
        f"--user-data-dir={tmp_path}", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not re.findall(r".*CONSOLE.*", done.stderr)
    assert done.stdout.count('class="plot js-plotly-plot"') == 3
    assert done.stdout.count("<svg class=\"main-svg\"") >= 2
