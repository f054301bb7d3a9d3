"""Verdicts, figures and the page: what is measured is what is shown."""

import csv
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from foof.study.paper import published
from foof.study.paper.answers import Answer, answers
from foof.study.paper.changes import changes
from foof.study.paper.claims import CLAIMS
from foof.study.paper.experiments import RUNS, chosen, committed, conduct, experiments_of, recall, remembered
from foof.study.paper.left import left, total
from foof.study.paper.rules import QUANTITIES, All, Between, Bound, ExplodesMore, Provided, Term, Widens, decide, lower, similar
from foof.study.paper.searches import FOOF, FOOF_10, KFAC, NATURAL, RELEASED, SGD, STANDARD, timed
from foof.study.paper.toy import toy
from foof.study.paper.trials import trials
from foof.study.paper.verdicts import Condition, Effect, Ruling, Spread, Verdict, deciding, effect, of, spread
from foof.study.search.estimate import core_seconds
from foof.study.search.grids import Search, Tuned, look, rectangle
from foof.study.search.presets import PRESETS, TRIALS
from foof.study.search.store import Store
from foof.study.show import plots, report
from foof.study.show.drawings import compare, draw
from foof.study.show.scoreboard import brief, groups, scoreboard_svg
from foof.study.show.svg import bars_svg, curves_svg
from foof.study.train.setting import Record, Setting

SMOKE, QUICK, PAPER = (PRESETS[name] for name in ("smoke", "quick", "paper"))
SPEED = {"foof": 0.02, "kfac": 0.05, "natural": 0.2, "adam": 0.2, "sgd": 0.3}  # end losses of the made-up world below


def made_up(setting: Setting) -> Record:
    """A record without training: losses that fall to an end value of the optimizer, and depend a little on the seed."""
    steps = list(range(1, setting.steps + 1, setting.log_every))
    end = SPEED[setting.optimizer.partition("-")[0]] * (1 + 0.01 * setting.seed) * (1 + abs(math.log10(setting.lr)) / 10)
    loss = [end + 2 * math.exp(-8 * (x - 1) / setting.steps) for x in steps]
    every = setting.option("measure_every", setting.log_every)
    at = list(range(1, setting.steps + 1, every)) if setting.measure else []
    measured = {m: [0.5 + 0.001 * setting.seed] * len(at) for m in setting.measure}
    series = {"step": steps, "loss": loss, **({"measured_at": at} if at else {}), **measured}
    final = {"train_loss": end, "test_accuracy": 0.9 - end / 10, "test_loss": 0.3 + end, "last_loss": end}
    return Record(setting, "finished", series, final, {"seconds": 1.0, "seconds_per_step": end, "cpu_per_step": 0.01 * end}, {})


@pytest.fixture(scope="module")
def outcomes():
    return conduct(list(experiments_of(QUICK).values()), QUICK, lambda settings: [made_up(s) for s in settings])


@pytest.fixture(scope="module")
def page(outcomes, tmp_path_factory):
    return report.write(tmp_path_factory.mktemp("out") / "report.html", outcomes, QUICK)


def test_spread_and_order():
    assert spread([1, 2, 3]) == Spread(2, 1, 3)
    assert str(spread([0.5])) == "0.5 (n = 1)"
    assert math.isnan(spread([]).mean)


def test_an_effect_is_the_mean_of_paired_log_ratios_with_a_t_interval():
    """By hand: ratios 2 and 8 have the geometric mean 4, deviation log 2 · √2, and t = 12.7062 for one degree of freedom."""
    e = effect({1: 1.0, 2: 1.0, 7: 3.0}, {1: 2.0, 2: 8.0, 5: 1.0})
    assert (e.ratio, e.n) == (pytest.approx(4), 2)
    assert math.log(e.high / 4) == pytest.approx(12.7062 * math.log(2), rel=1e-4) == -math.log(e.low / 4)
    assert effect({1: 1.0}, {1: 2.0}) == Effect(pytest.approx(2.0), 0.0, math.inf, 1)
    three = {i: float(i) for i in (1, 2, 3)}
    assert effect(three, dict.fromkeys(three, math.inf)) == Effect(math.inf, math.inf, math.inf, 3)
    assert math.isnan(effect(three, {**three, 2: math.inf}).ratio)
    assert math.isnan(effect(three, {}).ratio)


def test_a_ruling_needs_the_whole_interval():
    e = Effect(2.0, 1.5, 3.0, 5)
    assert [Condition(e, *where).ruling for where in ((1, math.inf), (0, 1), (1.2, 4), (1.8, 4), (4, 9))] == [
        Ruling.HOLDS, Ruling.FAILS, Ruling.HOLDS, Ruling.UNDECIDED, Ruling.FAILS,
    ]  # fmt: skip
    assert Condition(Effect(math.nan, 0, math.inf, 0), 0, math.inf).ruling is Ruling.UNDECIDED


def test_smoothing_is_that_of_the_published_curves():
    assert plots.smooth([1.0, 0.0, 0.0]) == pytest.approx([1.0, 0.9, 0.81])
    assert plots.smooth([3.0, 2.0], keep=0.0) == [3.0, 2.0]


def test_a_curve_is_the_mean_over_seeds_where_all_still_run():
    def record(seed, loss):
        return Record(Setting(seed=seed), "finished", {"step": list(range(len(loss))), "loss": loss})

    c = plots.curve([record(0, [1.0, 2.0, 9.0]), record(1, [3.0, 2.0])])
    assert (c.steps, c.mean, c.label, c.seeds) == ([0, 1], [2.0, 2.0], "SGD", 2)
    assert c.high[0] - c.low[0] == pytest.approx(2 * math.sqrt(2))
    assert plots.curve([record(0, [1.0, 2.0]), record(1, [1.0, math.inf])]).steps == [0]


def tuned(label, losses, searched=True, **final):
    def record(seed, loss):
        return Record(Setting(seed=seed, steps=11), "finished", {"step": [1, 11], "loss": [9.0, loss]}, final)

    records = tuple(record(i, loss) for i, loss in enumerate(losses))
    return {label: Tuned(records[0].setting, records, records[:1], False, searched)}


def test_the_end_loss_is_the_mean_of_the_last_tenth():
    series = {"step": list(range(1, 1001, 10)), "loss": [float(x) for x in range(100)]}
    record = Record(Setting(steps=1000), "finished", series)
    assert record.end_loss() == pytest.approx(sum(range(90, 100)) / 10)
    assert record.end_loss(until=500) == pytest.approx(sum(range(45, 50)) / 5)
    assert Record(Setting(steps=2000), "diverged", series).end_loss() == math.inf
    assert Record(Setting(steps=2000), "diverged", series).end_loss(until=500) == pytest.approx(47)  # it diverged later


def test_rules_decide_beyond_the_interval_and_not_within_it():
    found = {
        **tuned("a", [1.0, 1.1, 0.9]), **tuned("b", [3.0, 3.3, 2.6]), **tuned("c", [1.0, 1.2, 0.9]), **tuned("d", [0.9, 1.3, 0.8]),
        **tuned("once", [1.2]),
    }  # fmt: skip

    def ruling(rule):
        return decide(rule, found, None).ruling

    a, b, c, d, once = (Term(x) for x in ("a", "b", "c", "d", "once"))
    assert (ruling(lower(a, b)), ruling(lower(b, a)), ruling(lower(a, d))) == (Ruling.HOLDS, Ruling.FAILS, Ruling.UNDECIDED)
    assert (ruling(lower(a, b, 2)), ruling(lower(a, b, 4))) == (Ruling.HOLDS, Ruling.FAILS)
    assert ruling(lower(once, b)) is Ruling.UNDECIDED  # one seed decides nothing
    assert (ruling(similar(a, c, 1.5)), ruling(similar(a, b, 1.5)), ruling(similar(a, d, 1.2))) == (
        Ruling.HOLDS, Ruling.FAILS, Ruling.UNDECIDED,
    )  # fmt: skip
    assert (ruling(Between(a, b, 2, 4)), ruling(Between(a, b, 4, 5)), ruling(Between(a, b, 1, 2))) == (
        Ruling.HOLDS, Ruling.FAILS, Ruling.FAILS,
    )  # fmt: skip
    assert (ruling(Bound(b, 2, True)), ruling(Bound(b, 2, False)), ruling(Bound(b, 3.1, True))) == (
        Ruling.HOLDS, Ruling.FAILS, Ruling.UNDECIDED,
    )  # fmt: skip
    assert ruling(All((lower(a, b), lower(a, d)))) is Ruling.UNDECIDED
    assert ruling(All((lower(b, a), lower(a, d)))) is Ruling.FAILS
    assert ruling(lower(a, Term("nobody"))) is Ruling.NOT_RUN
    unfinished = {**found, **tuned("b", [3.0, 3.3, 2.6], searched=False)}
    assert decide(lower(a, b), unfinished, None).ruling is Ruling.UNDECIDED
    assert decide(lower(a, b), {**found, "b": replace(found["b"], selecting=True)}, None).ruling is Ruling.UNDECIDED


def test_curves_of_different_lengths_are_compared_where_the_shorter_ends():
    def falls(label, steps, start):  # by 1/100 every step
        series = {"step": list(range(1, steps + 1)), "loss": [start - x / 100 for x in range(1, steps + 1)]}
        records = tuple(Record(Setting(steps=steps, seed=i, log_every=1), "finished", series) for i in range(2))
        return {label: Tuned(records[0].setting, records, records[:1], False)}

    found = {**falls("long", 100, 2.0), **falls("short", 10, 1.8)}
    assert decide(lower(Term("short"), Term("long")), found, None).ruling is Ruling.HOLDS  # 1.7 and 1.9 at step 10
    assert decide(similar(Term("short"), Term("long"), 1.2), found, None).ruling is Ruling.HOLDS


@pytest.mark.parametrize(("losses", "ruling"), [([math.inf, math.inf], Ruling.HOLDS), ([math.inf, 1.0], Ruling.UNDECIDED)])
def test_divergence_is_worse_than_any_loss_if_all_seeds_diverge(losses, ruling):
    found = {**tuned("a", [1.0, 1.1]), **tuned("b", losses)}
    assert decide(lower(Term("a"), Term("b")), found, None).ruling is ruling


def test_a_measurement_that_blew_up_is_not_left_out():
    record = Record(Setting(), "finished", {"step": [1], "loss": [1.0], "decrease": [0.5, -math.inf, 0.5]})
    assert QUANTITIES["decrease"].value(record, None) == -math.inf
    assert spread([-math.inf]) == Spread(-math.inf, 0.0, 1)


def at_its_rate(setting):
    """A record whose loss is its learning rate."""
    return Record(setting, "finished", {"step": [1], "loss": [setting.lr]})


def test_a_guess_decides_nothing_before_its_grid_is_done():
    search = Search(Setting(), rectangle((0.1, 0.3, 1.0)), seeds=2, centre=(0.3, None), extend=0)
    known = {s: at_its_rate(s) for s in (Setting(lr=0.3, seed=i) for i in range(3))}
    assert look(search, known.get).tuned.searched
    guess = replace(search, known=False)
    assert not look(guess, known.get).tuned.searched
    known |= {s: at_its_rate(s) for lr in (0.1, 1.0) for s in (Setting(lr=lr, seed=i) for i in range(3))}
    assert look(guess, known.get).tuned.searched


def test_every_claim_about_mnist_can_be_decided_and_nothing_else_is_run():
    there = experiments_of(PAPER)
    assert all(s.searched for e in there.values() for s in e.searches(PAPER).values())
    assert set(there["robustness-mnist"].searches(PAPER)) == {"FOOF", "FOOF, T = 10"}
    assert set(there["fig4a-mnist"].searches(PAPER)) == set(there["fig4a"].searches(PAPER))


def test_times_are_drawn_beside_those_of_sgd():
    (only,) = chosen(["foof-half-again"], QUICK)
    assert set(only.searches(QUICK)) == {"SGD + momentum", "FOOF, T = 100", "KFAC, T = 100"}


def test_the_worse_of_two_losses_at_the_edge_of_its_grid_needs_a_factor_of_two():
    found = {**tuned("a", [1.0, 1.1, 0.9]), **tuned("b", [1.8, 1.9, 1.7]), **tuned("c", [2.8, 2.9, 2.7])}
    rules = {name: lower(Term("a"), Term(name)) for name in "bc"}
    assert {decide(rule, found, None).ruling for rule in rules.values()} == {Ruling.HOLDS}
    at_edge = {label: replace(t, on_edge=label != "a") for label, t in found.items()}
    assert [decide(rule, at_edge, None).ruling for rule in rules.values()] == [Ruling.UNDECIDED, Ruling.HOLDS]
    assert decide(lower(Term("b"), Term("a")), at_edge, None).ruling is Ruling.UNDECIDED
    assert decide(rules["b"], {**found, "a": replace(found["a"], on_edge=True)}, None).ruling is Ruling.HOLDS  # the better side


def test_stability_is_judged_by_the_odds_of_trials_to_explode():
    """By hand: of 9 and 9 trials 5 and 0 explode; Fisher's exact interval of the odds ratio begins at 1.05. 4 are too few."""

    def search(label, lost):
        trials = [Record(Setting(lr=1.0 + i), "diverged" if i < lost else "finished", {"step": [1], "loss": [1.0]}, {"train_loss": 1.0})
                  for i in range(9)]  # fmt: skip
        return {label: replace(tuned(label, [1.0])[label], tried=tuple(trials))}

    def ruling(foof, kfac):
        return decide(ExplodesMore("a", "b"), {**search("a", foof), **search("b", kfac)}, None)

    assert ruling(0, 5).ruling is Ruling.HOLDS
    assert ruling(0, 4).ruling is ruling(2, 2).ruling is ruling(0, 0).ruling is Ruling.UNDECIDED
    assert ruling(5, 0).ruling is Ruling.FAILS
    assert "b: 5 of 9 trials; a: 0 of 9 trials diverge" in ruling(0, 5).text


def test_stability_is_judged_in_as_many_steps_of_every_trial():
    """Of b three short trials live, and three long ones, which diverge, explode and come back, or go over, later than these end."""

    def trial(lr, steps, status="finished", exploded_at=None):
        losses = [20.0 if step == exploded_at else 1.0 for step in range(1, 1 + (exploded_at if status == "diverged" else steps))]
        return Record(Setting(lr=lr, steps=steps), status, {"step": list(range(1, 1 + len(losses))), "loss": losses}, {"train_loss": 1.0})

    late = [trial(1.0, 40, "diverged", 30), trial(2.0, 40, "finished", 30), *(trial(lr, 10) for lr in (3.0, 4.0, 5.0))]
    soon = [trial(1.0, 40, "diverged", 5), trial(2.0, 40, "finished", 5), trial(3.0, 10, "finished", 10)]
    found = {label: replace(tuned(label, [1.0])[label], tried=tuple(tried)) for label, tried in (("a", late), ("b", soon))}
    measured = decide(ExplodesMore("a", "b"), found, None)
    assert "b: 3 of 3 trials; a: 0 of 5 trials diverge or explode within 10 steps" in measured.text


def test_a_run_that_diverged_counts_as_ten_times_its_first_loss():
    """By hand: all begin at 9. Seven pairs of 4 and one of 90 against 1 have the mean ratio (4⁷·90)^(1/8); all lost, it is infinite."""
    found = {**tuned("a", [1.0] * 8), **tuned("b", [4.0] * 7 + [math.inf])}
    measured = decide(lower(Term("a"), Term("b")), found, None)
    assert measured.conditions[0].effect.ratio == pytest.approx((4**7 * 90) ** (1 / 8))
    assert measured.ruling is Ruling.HOLDS
    assert "b diverged on 1 of 8 seeds" in measured.text
    lost = decide(lower(Term("a"), Term("b")), {**tuned("a", [1.0] * 3), **tuned("b", [math.inf] * 3)}, None)
    assert lost.conditions[0].effect.ratio == math.inf


def test_what_a_change_costs_one_is_compared_with_what_it_costs_the_other():
    """By hand: a goes from 1 to 2, b from 1 to 8 and c from 4 to 6: b loses four times as much, c three quarters as much as a."""
    curves = {"a0": 1.0, "a": 2.0, "b0": 1.0, "b": 8.0, "c0": 4.0, "c": 6.0}
    found = {k: t for label, x in curves.items() for k, t in tuned(label, [x, 1.01 * x, 0.99 * x]).items()}
    b, c = (Widens(Term("a"), Term(name), Term("a0"), Term(f"{name}0")) for name in "bc")
    judged = [decide(rule, found, None) for rule in (b, c)]
    assert [m.conditions[0].effect.ratio for m in judged] == pytest.approx([4.0, 0.75])
    assert [m.ruling for m in judged] == [Ruling.HOLDS, Ruling.FAILS]
    assert decide(b, {**found, "a": replace(found["a"], on_edge=True)}, None).ruling is Ruling.UNDECIDED
    assert set(b.needs) == {"a", "b", "a0", "b0"}


def test_two_that_are_alike_are_no_finding_where_all_are():
    found = {**tuned("a", [1.0, 1.1, 0.9]), **tuned("b", [1.0, 1.1, 0.9]), **tuned("c", [1.0, 1.1, 0.9]), **tuned("d", [0.5, 0.55, 0.45]),
             **tuned("e", [2.0, 2.2, 1.8])}  # fmt: skip
    def rule(label, leader):
        return Provided(similar(Term(label), Term("a"), 1.25), lower(Term(leader), Term("a"), 1.25))

    def alike(label, leader):
        return decide(rule(label, leader), found, None)

    assert [alike("b", leader).ruling for leader in "cd"] == [Ruling.UNDECIDED, Ruling.HOLDS]
    assert alike("e", "c").ruling is Ruling.FAILS  # what is not alike is not, whoever leads
    assert "undecided unless training loss: a over c above 1.25" in rule("b", "c").text()


def test_nothing_is_decided_by_a_part_of_a_search_or_of_the_seeds():
    found = {**tuned("a", [1.0, 1.1, 0.9]), **tuned("b", [1.8, 1.9, 1.7])}
    rule = lower(Term("a"), Term("b"))
    assert decide(rule, found, None).ruling is Ruling.HOLDS
    for state, why in (({"grid_done": False}, "the search for settings is not finished"), ({"seeds": 5}, "not all seeds that report")):
        part = decide(rule, {**found, "b": replace(found["b"], **state)}, None)
        assert part.ruling is Ruling.UNDECIDED
        assert f"({why}" in part.text


def test_what_is_much_worse_is_not_shown_to_be_better_than_is_said():
    """"Not notably better" holds up to three times worse, is undecided beyond, and is refuted only by what is better."""
    rules = [Between(Term("a"), Term(name), 1 / 1.5, 3.0, open_above=True) for name in "bcd"]
    found = {**tuned("a", [1.0] * 3), **tuned("b", [2.0] * 3), **tuned("c", [6.0] * 3), **tuned("d", [0.5] * 3)}
    assert [decide(rule, found, None).ruling for rule in rules] == [Ruling.HOLDS, Ruling.UNDECIDED, Ruling.FAILS]
    assert "refuted below, undecided above" in rules[0].text()


def test_a_beginning_is_no_match_for_what_was_chosen_at_the_end():
    """Of b there is the beginning only, at which it was chosen. a was chosen at the end, and could have been 1.5 times better there."""
    found = {**tuned("a", [1.0, 1.1, 0.9]), **tuned("b", [0.8, 0.88, 0.72])}
    rule = lower(Term("b"), Term("a"))
    assert decide(rule, found, None).ruling is Ruling.HOLDS
    early = {"a": replace(found["a"], early_gain=1.5), "b": replace(found["b"], to_the_end=False)}
    assert decide(rule, early, None).ruling is Ruling.UNDECIDED
    assert "not run to the end of training: b" in decide(rule, early, None).text
    assert decide(rule, {**early, "a": replace(found["a"], early_gain=1.1)}, None).ruling is Ruling.HOLDS
    assert decide(lower(Term("a"), Term("b")), early, None).ruling is Ruling.UNDECIDED


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_every_claim_can_be_run_at_every_preset(preset):
    """Each rule names curves that its experiment runs, on each data set the paper makes it for."""
    assert len({c.id for c in CLAIMS}) == len(CLAIMS) >= 30
    for e in experiments_of(preset).values():
        for claim in e.claims if e.searches(preset) else ():
            assert set(claim.rule.needs) <= set(RUNS[e.figure](preset, e.dataset)), claim.id
            assert claim.rule.text()
    without = {e.id for e in experiments_of(preset).values() if not e.searches(preset)} - {"toy"}
    assert without == ({"fig2a", "adaptive-1a", "adaptive-1d", "adaptive-2a", "finer-kfac"} if preset is QUICK else set())
    if "mnist" in preset.datasets:
        assert {c.experiment for c in CLAIMS} == {e.figure for e in experiments_of(preset).values()} - {"toy"}


def test_five_seeds_report_what_takes_minutes_three_what_takes_longer_and_twenty_what_takes_seconds():
    fig1a, fig1c, fig2a, fig3a = (RUNS[figure](PAPER, "fashion-mnist") for figure in ("fig1a", "fig1c", "fig2a", "fig3a"))
    assert {s.seeds for s in fig1a.values()} == {5}
    assert {(s.seeds, s.vets) for s in fig2a.values()} == {(20, 5)}
    assert [s.seeds for s in fig1c.values()] == [5, 3, 3]
    assert fig3a[STANDARD].seeds == 3
    assert {(s.seeds, s.vets) for s in RUNS["fig1d"](PAPER, "fashion-mnist").values()} == {(5, 5)}
    assert [s.seed for s in fig1a[SGD].reports(fig1a[SGD].middle)] == [1, 2, 3, 4, 5]
    assert {s.seeds for s in RUNS["fig1a"](QUICK, "fashion-mnist").values()} == {3}


def test_a_choice_is_a_figure_a_family_of_figures_or_a_claim():
    assert [e.id for e in chosen(["fig3"], QUICK)] == ["fig3a", "fig3b", "fig3c", "fig3d"]
    assert [e.id for e in chosen(["fig1a", "fig1a-mnist"], PAPER)] == ["fig1a", "fig1a-mnist"]
    assert [e.id for e in chosen(["fig1a"], PAPER)] == ["fig1a"]
    assert [e.id for e in chosen(["kfac-vs-sgd-mnist"], PAPER)] == ["fig1a-mnist"]
    (one,) = chosen(["foof-vs-kfac"], QUICK)
    assert set(one.searches(QUICK)) == {FOOF, KFAC}
    (both,) = chosen(["foof-vs-kfac", "foof-vs-sgd"], QUICK)
    assert (set(both.searches(QUICK)), len(both.claims)) == ({FOOF, KFAC, SGD}, 2)
    with pytest.raises(ValueError, match="no experiment and no claim"):
        chosen(["fig9"], QUICK)


def test_verdicts_say_what_the_records_say(outcomes):
    found = {o.experiment.id: o for o in outcomes}["fig4b"].found
    verdicts = {v.id: v for o in outcomes for v in o.verdicts}
    foof, sgd = (Term(label).values(found, None) for label in (FOOF, SGD))
    assert set(foof) == {1, 2, 3}  # seed 0 has selected
    assert verdicts["foof-vs-sgd"].conditions == (Condition(effect(foof, sgd), 1.0, math.inf),)
    assert verdicts["foof-vs-sgd"].ruling is Ruling.HOLDS
    assert f"FOOF: {spread(foof.values())}" in verdicts["foof-vs-sgd"].measured
    assert verdicts["kfac-ten-times"].ruling is Ruling.FAILS
    assert {verdicts["toy-sgd"].ruling, verdicts["toy-foof"].ruling} == {Ruling.HOLDS}
    assert "(2, 1)" in verdicts["toy-sgd"].measured
    assert "(-1, 4)" in verdicts["toy-foof"].measured
    assert of(found[FOOF].records, "test_accuracy").n == 3


def test_nothing_is_decided_without_a_search():
    (outcome,) = conduct(chosen(["fig4b"], SMOKE), SMOKE, lambda settings: [made_up(s) for s in settings])
    assert {v.ruling for v in outcome.verdicts} == {Ruling.UNDECIDED}


def test_a_report_makes_the_best_of_what_is_there(tmp_path):
    """With a few records of the preset paper: what they say is shown, and undecided; all other claims are said not to have been run."""
    fig1a = RUNS["fig1a"](PAPER, "fashion-mnist")
    with Store(":memory:") as store:
        for label, seeds in ((KFAC, 3), (SGD, 4)):
            for seed in range(seeds):
                store.put(made_up(fig1a[label].middle.but(seed=seed)))
        outcomes = recall(list(experiments_of(PAPER).values()), PAPER, remembered(store))
    verdicts = {v.id: v for o in outcomes for v in o.verdicts}
    assert verdicts["kfac-vs-sgd"].ruling is Ruling.UNDECIDED
    assert "n = 2" in verdicts["kfac-vs-sgd"].measured
    assert "the search for settings is not finished" in verdicts["kfac-vs-sgd"].measured
    assert verdicts["kfac-vs-natural"].ruling is Ruling.NOT_RUN
    assert verdicts["kfac-vs-sgd-mnist"].ruling is Ruling.NOT_RUN
    text = report.write(tmp_path / "r.html", outcomes, PAPER).read_text(encoding="utf-8")
    assert "Not run yet" in text
    assert "foof reproduce fig1b --preset paper" in text
    assert "fig1a-mnist" in text
    assert "ours / published" in text
    smaller = [Verdict(v.id, v.where, v.claim, "", "", Ruling.UNDECIDED) for v in verdicts.values()]
    small = replace(outcomes[0], found={}, verdicts=smaller)
    found = {line.verdict.id: line.paper for line in report.lines([small], outcomes)}
    assert found["kfac-vs-sgd"].ruling is Ruling.UNDECIDED
    assert found["kfac-vs-natural"] is None


def test_the_headline_has_both_standard_dampings(outcomes):
    top = report.headline(((PAPER, []), (QUICK, outcomes)))
    assert top.preset == "quick"
    assert [row[""] for row in top.rows] == [
        "KFAC, heuristic damping, λ of Fig. 1A", "KFAC, heuristic damping, λ of Fig. 3C", "KFAC, standard damping as in Eq. (3)",
        "KFAC, standard damping as released (transposed)", "SGD with momentum",
    ]  # fmt: skip
    assert {"standard-like-sgd", "released-like-sgd"} <= {v.id for v in top.verdicts}
    assert report.headline(((PAPER, []),)) is None


def test_published_curves_are_compared_in_the_paper_s_way():
    """Ours at the last published step, smoothed with the same coefficient; a curve of the paper itself gives a ratio of one."""
    (panel,) = published.panels("fig1a", "fashion-mnist")
    assert panel.keep == 0.9
    assert {s.label for s in panel.series} == {SGD, "Adam", KFAC, NATURAL}
    record = Record(Setting(steps=6000), "finished", {"step": [1, 11, 5991], "loss": [1.0, 0.0, 0.0]}, {}, {}, {})
    rows = compare("fig1a", "fashion-mnist", {SGD: Tuned(record.setting, (record,), (), False)})
    assert [(r.curve, r.step, r.ours.mean) for r in rows] == [(SGD, 5991, pytest.approx(0.81))]
    assert rows[0].ratio == pytest.approx(0.81 / 0.1458, rel=1e-3)
    for figure in published.OURS:
        for dataset in ("fashion-mnist", "mnist"):
            (panel,) = published.panels(figure, dataset)
            ours = {STANDARD, *RUNS[figure](PAPER, dataset), "FOOF with KFAC's λ_A"}
            assert panel.series
            assert {s.label for s in panel.series} <= ours
    assert published.seconds_per_epoch("mnist")["FOOF, T = 1"] == 14.32
    assert RELEASED in {s.label for s in published.panels("fig3a", "mnist")[0].series}


@pytest.mark.parametrize("preset", [QUICK, PRESETS["reduced"], PAPER], ids=["quick", "reduced", "paper"])
def test_committed_records_belong_to_their_preset_and_redraw_its_report(preset, tmp_path):
    """Whatever state its searches are in; beside the paper's scale its board links only to claims that are on the page."""
    paper = report.recalled(list(experiments_of(PAPER).values()), PAPER, committed(PAPER))
    outcomes = paper if preset is PAPER else report.recalled(list(experiments_of(preset).values()), preset, committed(preset))
    decided = [v for o in outcomes for v in o.verdicts if v.ruling is not Ruling.NOT_RUN]
    assert len(decided) > 2
    text = report.write(tmp_path / "report.html", outcomes, preset, [] if preset is PAPER else paper).read_text(encoding="utf-8")
    found = Page(re.sub(r"<script>.*?</script>", "", text, flags=re.S))
    assert {link[1:] for link in found.links} <= found.ids


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
        if tag == "a" and "href" in attrs:
            self.links.append(attrs["href"])
        if "src" in attrs or tag == "link":
            self.sources.append(attrs.get("src") or attrs["href"])


def test_the_page_is_whole_and_needs_no_network(page, outcomes):
    text = page.read_text(encoding="utf-8")
    found = Page(re.sub(r"<script>.*?</script>", "", text, flags=re.S))
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert found.sources == ["data:,"]
    specs = re.findall(r'<script type="application/json">(.*?)</script>', text, flags=re.S)
    assert len(specs) == 1 + sum(len(draw(o)) for o in outcomes)  # the headline's stands above those of the experiments
    for spec in specs:
        assert json.loads(spec)["data"]


def test_text_from_outside_cannot_break_the_page():
    evil = Verdict("x", "<b>", "</script><script>alert(1)</script>", "1 < 2", "r", Ruling.FAILS)
    figure = plots.curves_figure([], "</script><script>alert(2)</script>")
    first = report.FirstScreen("quick", groups([evil]), [])
    said = {"runs": "0", "preset": "quick"}
    text = report.render([report.Line(evil)], [report.Section("s", "t", "w", "c", [figure], [], "foof")], said, first)
    assert "<script>alert" not in text
    assert "&lt;b&gt;" in text


def test_the_board_has_a_cell_for_every_claim_that_was_run(outcomes):
    verdicts = [v for o in outcomes for v in o.verdicts]
    run = [v for v in verdicts if v.ruling is not Ruling.NOT_RUN]
    board = ElementTree.fromstring(scoreboard_svg(verdicts, "a < b"))
    cells = [r for r in board.iter("{http://www.w3.org/2000/svg}rect") if r.get("class").startswith("cell")]
    assert len(cells) == len(run) == sum(len(g.verdicts) for g in groups(verdicts))
    assert sum(r.get("class") == "cell fails" for r in cells) == sum(v.ruling is Ruling.FAILS for v in run)
    assert {g.title for g in groups(verdicts)} == {"The paper's claims", "Its released code", "Our own questions"}


def test_a_verdict_s_bar_is_that_of_the_condition_it_hangs_on():
    holds, fails = (Condition(Effect(x, x / 2, x * 2, 3), 1, math.inf) for x in (10.0, 0.1))
    v = Verdict("x", "w", "c", "m", "r", Ruling.FAILS, conditions=(holds, fails))
    assert deciding(v) is fails
    assert brief(deciding(v)) == "0.1× (0.05–0.2)"
    assert brief(Condition(Effect(1.0, 1.0, 1.0, 3), 0.8, 1.25)) == "1× (1–1)"
    near = Effect(1.002, 0.9981, 1.006, 3)  # in as many digits as it takes to tell them apart
    assert brief(Condition(near, 0.8, 1.25)) == "1× (0.998–1.01)"
    assert str(Effect(1.002, 1.0001, 1.004, 3)) == "1.002, 95 % interval 1–1.004 (n = 3)"
    assert str(Effect(2.0, 1.2345, 3.0, 2)) == "2, 95 % interval 1.23–3 (n = 2)"


def test_the_questions_are_answered_by_the_comparison_that_decides_them(outcomes):
    found = answers(outcomes)
    assert [a.word for a in found] == ["Yes", "Not decided", "Yes"]
    assert found[0].parts[0][1].ruling is Ruling.NOT_RUN  # no one-layer network at this preset
    assert "Fig. 2A" not in found[0].sentence
    assert "a ratio of" in found[2].sentence
    assert {a.word for a in answers([])} == {"Not run"}
    both = frozenset({Ruling.HOLDS, Ruling.UNDECIDED})
    assert (Answer("?", both, ()).word, Answer("?", both, ()).ruling) == ("In part, yes", Ruling.UNDECIDED)
    assert Answer("?", frozenset({Ruling.FAILS, Ruling.UNDECIDED}), ()).word == "In part, no"
    assert Answer("?", frozenset({Ruling.FAILS, Ruling.HOLDS}), ()).word == "In part"


def test_a_search_of_which_only_a_seed_is_there_is_shown_and_decides_nothing():
    """As in a store that was put together from parts."""
    alone = {label: replace(tuned(label, [1.0])[label], tried=(), grid_done=False) for label in "ab"}
    assert decide(ExplodesMore("a", "b"), alone, None).ruling is Ruling.UNDECIDED
    fig1a = experiments_of(PAPER)["fig1a"]
    seed = fig1a.searches(PAPER)[KFAC].middle.but(seed=1)
    part = recall([fig1a], PAPER, {seed: made_up(seed)}.get)
    assert [(t.run, t.seeds) for t in trials(part)] == [(0, 1)]


def test_trials_are_counted_from_the_records(outcomes):
    counted = {(t.experiment, t.curve): t for t in trials(outcomes)}
    sgd = counted["fig1a", SGD]
    assert (sgd.run, sgd.planned, sgd.lost, sgd.seeds) == (len({r.setting.lr for r in _tried(outcomes, "fig1a", SGD)}), sgd.run, 0, 3)
    assert all(t.run == t.planned for t in counted.values())


def _tried(outcomes, experiment, label):
    return next(o for o in outcomes if o.experiment.id == experiment).found[label].tried


def test_every_claim_is_a_row_of_the_table(outcomes, tmp_path):
    with report.write_claims(tmp_path / "claims.csv", outcomes).open(encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    verdicts = [v for o in outcomes for v in o.verdicts]
    assert [row["claim"] for row in rows] == [v.id for v in verdicts]
    assert {row["verdict"] for row in rows} == {str(v.ruling) for v in verdicts}
    assert all(row["about"] in ("paper", "released", "ours") for row in rows)


@pytest.mark.parametrize("figure", [e for e in RUNS if e.startswith("fig") and e not in ("fig4a", "fig4c", "fig5a")])
def test_methods_of_a_figure_have_equal_searches_at_the_paper_s_size(figure):
    """As many trials for each, and as many values of λ for each that has one; at fixed λ, as many learning rates."""
    searches = {k: s for k, s in RUNS[figure](PAPER, "fashion-mnist").items() if k != FOOF_10}  # which takes the λ of T = 100
    fixed = {k: s for k, s in searches.items() if "λ =" in k}
    assert {len(s.grid) for k, s in searches.items() if k not in fixed} <= {TRIALS}
    assert {len(s.grid) for s in fixed.values()} <= {3}


def test_time_to_a_loss_is_of_a_running_mean_and_of_timed_runs():
    losses = [1.0, 0.3, 0.1, 0.2, 0.3, 0.1, 0.1, 0.1]
    record = Record(Setting(steps=80), "finished", {"step": list(range(1, 80, 10)), "loss": losses}, {}, {"cpu_per_step": 9.0})
    never = replace(record, setting=Setting(seed=1), series={"step": [1, 11], "loss": [1.0, 0.1]})
    short = [replace(record, cost={"cpu_per_step": x}) for x in (0.4, 0.6)]  # of another machine than the loss
    found = {label: Tuned(record.setting, tuple(of), (), False) for label, of in ((FOOF, (record, never)), (timed(FOOF), short))}
    term = Term(FOOF, "cpu_to_loss")
    assert term.needs == (FOOF, timed(FOOF))
    assert term.values(found, None) == {0: 51 * 0.5, 1: math.inf}  # the mean of 0.3, 0.1, 0.2, 0.3, 0.1 is 0.2


def test_losses_are_drawn_over_time(outcomes):
    (drawn,) = draw(next(o for o in outcomes if o.experiment.id == "time"))
    found = next(o for o in outcomes if o.experiment.id == "time").found
    methods = {SGD, "Adam", KFAC, NATURAL, FOOF}
    assert {c.label for c in drawn.curves} == methods
    assert set(found) == methods | {timed(label) for label in methods}
    foof = next(c for c in drawn.curves if c.label == FOOF)
    costs = [r.cost["cpu_per_step"] for r in found[timed(FOOF)].records]
    assert foof.steps == pytest.approx([sum(costs) / len(costs) * step for step in found[FOOF].records[0].series["step"]])
    assert drawn.figure().layout.xaxis.title.text == "seconds of one core"


def test_a_verdict_that_was_another_says_why():
    def verdict(id_, ruling, measured="m", changed="", high=math.inf):
        condition = Condition(Effect(2.0, 0.5, 8.0, 3), 1.0, high)
        return Verdict(id_, "w", "c", measured, "r", ruling, conditions=(condition,), changed=changed)

    assert changes([verdict("kfac-vs-sgd", Ruling.HOLDS), verdict("new", Ruling.FAILS), verdict("kfac-vs-adam", Ruling.NOT_RUN)]) == []
    wide, rule, pending = changes([
        verdict("kfac-vs-sgd", Ruling.UNDECIDED), verdict("mc-vs-sgd", Ruling.FAILS, changed="2026-11-16: reason."),
        verdict("standard-worse", Ruling.UNDECIDED, "x (the search for settings is not finished: KFAC)"),
    ])  # fmt: skip
    assert (wide.was, wide.ratio, wide.now) == ("holds", "15.4", "2, 95 % interval 0.5–8 (n = 3)")
    assert "3 seeds" in wide.why
    assert rule.why == "The rule is another. 2026-11-16: reason."
    assert pending.why == "Settings were chosen at step 1,800. The search for settings is not finished."


def test_what_is_left_is_counted_and_priced():
    """With nothing run everything is left, the runs that two experiments share once in the sum; a stored run is not."""
    chosen_ = chosen(["fig1a", "fig1b"], PAPER)
    a, b = found = recall(chosen_, PAPER, lambda _: None)
    assert [(x.experiment, x.runs, x.undecided) for x in left(found)] == [("fig1a", len(a.left), ()), ("fig1b", len(b.left), ())]
    assert left(found)[0].not_run[0] == "kfac-vs-natural"
    assert left(found)[0].hours == pytest.approx(sum(map(core_seconds, a.left)) / 3600)
    assert total(found)[0] == len({*a.left, *b.left}) < len(a.left) + len(b.left)
    there = made_up(a.left[0])
    assert set(recall(chosen_[:1], PAPER, lambda s: there if s == there.setting else None)[0].left) == {*a.left} - {there.setting}


def test_a_map_marks_what_diverged_and_what_was_chosen():
    def trial(lr, damping, loss, status="finished"):
        setting = Setting(optimizer="kfac", lr=lr, damping=damping, steps=11)
        return Record(setting, status, {"step": [1, 11], "loss": [3.0, loss]}, {"train_loss": loss})

    tried = (trial(0.1, 1.0, 0.5), trial(0.3, 1.0, math.inf, "diverged"), trial(0.1, 0.01, 0.2), trial(0.3, 0.01, 0.4))
    figure = plots.map_figure({"KFAC": Tuned(tried[2].setting, tried[2:3], tried, False)}, "map")
    squares, crosses = figure.data
    assert list(zip(squares.x, squares.y, squares.text, strict=True)) == [
        (0.1, "KFAC, λ = 0.01", "0.2"), (0.3, "KFAC, λ = 0.01", "0.4"), (0.1, "KFAC, λ = 1", "0.5"),
    ]  # fmt: skip
    assert list(squares.marker.line.width) == [3, 0, 0]
    assert (list(crosses.x), list(crosses.y)) == ([0.3], ["KFAC, λ = 1"])


def test_the_svg_is_well_formed():
    c = plots.Curve("FOOF", [1, 11, 21], [2.0, 0.5, 0.02], [1.9, 0.4, -0.01], [2.1, 0.6, 0.05], 3)
    root = ElementTree.fromstring(curves_svg([c], "a < b"))
    assert len(root.findall("{*}polyline")) == 1
    linear = ElementTree.fromstring(curves_svg([c], "b", log=False, published=[c]))
    assert len(linear.findall("{*}polyline")) == 2
    ours = {"SGD": Spread(1, 0, 1), "FOOF": Spread(2, 0.1, 3)}
    for theirs, lines in ((None, 2), ({"FOOF": 5.0}, 3)):
        bars = ElementTree.fromstring(bars_svg(ours, "a", "b", theirs))
        assert (len(bars.findall("{*}rect")), len(bars.findall("{*}line[@class='mark']"))) == (2, lines)


def test_every_figure_is_exported(outcomes, tmp_path):
    written = report.write_svgs(tmp_path, outcomes)
    alone = [path for path in written if not re.fullmatch(r"figj?\d+", path.stem)]
    assert len(alone) == sum(bool(d.svg()) for o in outcomes for d in draw(o))
    assert {path.stem: len(ElementTree.parse(path).findall("{*}svg")) for path in written if path not in alone} == {
        "fig1": 4, "fig2": 2, "fig3": 4, "fig4": 3, "fig5": 1, "figj20": 2,
    }  # fmt: skip


def test_the_toy_figure_shows_both_datapoints():
    assert [t.name for t in plots.toy_figure(toy()).data] == ["SGD", "SGD", "FOOF", "FOOF"]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


PROBE = """<script>
document.querySelector('[data-show="holds"]').click();
const rows = [...document.querySelectorAll("[data-ruling]")].filter(row => !row.hidden);
document.body.dataset.filtered = rows.length + " " + rows.every(row => row.dataset.ruling === "holds");
document.querySelector('[data-show="all"]').click();
document.getElementById("theme").click();
document.body.dataset.theme = document.documentElement.dataset.theme;
location.hash = "#fig4b";
document.body.dataset.target = document.querySelector(":target").id;
document.querySelector('[data-show="holds"]').click();
document.getElementById("claims").open = false;
document.querySelector(".cell.undecided[href]").click();
setTimeout(() => {
  const row = document.querySelector('tr[data-ruling="undecided"]');
  document.body.dataset.unfolded = document.getElementById("claims").open && !row.hidden;
}, 500);
</script></body>"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")
def test_in_a_browser_every_figure_renders_and_filters_links_and_theme_work(page, outcomes, tmp_path):
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=8000",
        f"--user-data-dir={tmp_path}", "--dump-dom", probed.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not re.findall(r".*CONSOLE.*", done.stderr)
    assert done.stdout.count('class="plot js-plotly-plot"') == 1 + sum(len(draw(o)) for o in outcomes)
    assert done.stdout.count('<svg class="main-svg"') >= 2
    holds = sum(v.ruling is Ruling.HOLDS for o in outcomes for v in o.verdicts)
    assert f'data-filtered="{holds} true"' in done.stdout
    assert re.search(r'data-theme="(dark|light)" data-target="fig4b" data-unfolded="true"', done.stdout)
