"""The command `foof`: arguments in, calls to the study out."""

from __future__ import annotations

import math
import os
import sys
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated

import torch

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Column, Table

    import foof
    from foof.bench import records as bench_records
    from foof.bench import run as bench_run
    from foof.bench import show as bench_show
    from foof.bench.cases import CASES
    from foof.bench.machine import pin, usable_cores
    from foof.study import data
    from foof.study.data.formats import DataError
    from foof.study.paper.experiments import (
        Experiment,
        NotRun,
        Outcome,
        begun,
        chosen,
        committed,
        conduct,
        experiments_of,
        lacking,
        recall,
        remembered,
    )  # fmt: skip
    from foof.study.paper.verdicts import Ruling, deciding, of
    from foof.study.search import store, sweep
    from foof.study.search.estimate import hours, pace, remaining
    from foof.study.search.grids import RunAll, Search, damping_grid, lr_grid, rectangle, tune
    from foof.study.search.presets import PRESETS, Preset
    from foof.study.show import report
    from foof.study.train.methods import METHODS, method, title
    from foof.study.train.models import MODELS, mlp
    from foof.study.train.run import run
    from foof.study.train.setting import Record, Setting
except ModuleNotFoundError as error:
    sys.exit(f"The command `foof` needs the study's packages, and {error.name} is missing: pip install 'foof[study]'")

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Gradient descent on neurons, put to the test.")
console = Console()
COLOUR = {Ruling.HOLDS: "green", Ruling.FAILS: "red", Ruling.UNDECIDED: "yellow", Ruling.NOT_RUN: "dim"}

PresetName = Annotated[str, typer.Option("--preset", help=f"How large: {', '.join(PRESETS)}.")]
Folder = Annotated[Path, typer.Option("--out", help="Where records and report are.", envvar="FOOF_OUT")]
OUT = Path("reproduction")


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise typer.BadParameter(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def _chosen(names: Sequence[str] | None, preset: Preset) -> list[Experiment]:
    try:
        return chosen(names, preset) if names else list(experiments_of(preset).values())
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None


def _at_hand(experiments: Sequence[Experiment], size: Preset) -> list[Experiment]:
    """Those whose data, and whose GPU, are here. The others are left out, and named, with what to do."""
    left: dict[str, list[str]] = {}
    for e in experiments:
        left.setdefault(lacking(e, size), []).append(e.id)
    for what, ids in left.items():
        if what:
            do = "name them to run them on processors all the same" if what == "a GPU" else "`foof data` says how to fetch it"
            console.print(f"Left out for want of {what}: {', '.join(ids)} ({do}).", highlight=False)
    return [e for e in experiments if e.id in left.get("", [])]


def _records_file(out: Path) -> Path:
    return out / "records.sqlite"


@contextmanager
def _sweeping(into: store.Store, workers: int | None, scheduler: str | None) -> Iterator[RunAll]:
    """A way to run settings that shows a bar with the time left; the bar's unit is the step, since runs differ in length."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True))  # fmt: skip
    with Progress(*columns, console=console, speed_estimate_period=3600) as bar:  # runs end in bursts: average over many
        task = bar.add_task("training", total=0)
        planned: set[Setting] = set()

        def notify(record: Record, new: bool) -> None:
            s = record.setting
            bar.advance(task, s.steps)
            if new:
                damping = f", λ {s.damping}" if s.damping is not None else ""
                loss = f"loss {record.score:.4g}" if record.status == "finished" else "[yellow]diverged[/]"
                bar.console.print(f"  {title(s)}, lr {s.lr:g}{damping}, seed {s.seed}: {loss}", highlight=False)

        def run_all(settings: Sequence[Setting]) -> list[Record]:
            fresh = [s for s in dict.fromkeys(settings) if s not in planned]
            planned.update(fresh)
            known = [s for s in settings if s not in fresh]  # run a moment ago: already counted
            bar.update(task, total=(bar.tasks[0].total or 0) + sum(s.steps for s in fresh))
            done = {r.setting: r for r in sweep.sweep(fresh, into, workers=workers, scheduler=scheduler, notify=notify)}
            done |= {r.setting: r for s in known if (r := into.get(s))}
            return [done[s] for s in settings]

        yield run_all


def _show(outcomes: Sequence[Outcome]) -> None:
    """The verdicts; of many, without the measurements, which the report has."""
    verdicts = [v for o in outcomes for v in o.verdicts]
    few = len(verdicts) <= 12
    table = Table("Verdict", "Claim", *(["Measured"] if few else []), "Where", title_justify="left")
    for v in verdicts:
        table.add_row(f"[{COLOUR[v.ruling]}]{v.ruling}[/]", v.claim, *([v.measured] if few else []), v.where)
    console.print(table)


def _announce(experiments: Sequence[Experiment], size: Preset, into: store.Store, workers: int | None) -> None:
    """How much there is to do, before it is begun."""
    searches = [search for e in experiments for search in e.searches(size).values()]
    get = remembered(into)
    runs = list(dict.fromkeys(s for search in searches for s in remaining(search, get)))
    minutes, cores = 60 * hours(runs) / pace(), workers or os.cpu_count() or 1
    console.print(f"[bold]foof reproduce[/] · {size.name} ({size.about})")
    if runs:
        console.print(f"{len(runs)} runs to do (grids may grow, winners run again with all seeds): about {minutes:.0f} core-minutes, "
                      f"{minutes / cores:.0f} minutes on {cores} idle cores. Ctrl-C loses at most the runs in hand.",
                      highlight=False)  # fmt: skip


def _paper_outcomes(size: Preset, among: Sequence[Experiment]) -> list[Outcome]:
    """What the records that came with the package say at the paper's scale, for a report of a smaller one."""
    paper = PRESETS["paper"]
    wanted = {e.figure for e in among}
    there = [e for e in experiments_of(paper).values() if e.figure in wanted and e.dataset == "fashion-mnist"]
    return [] if size.name == paper.name else report.recalled(there, paper, committed(paper))


@app.command()
def reproduce(
    what: Annotated[list[str] | None, typer.Argument(help="Figures (fig3, fig3a), claims (see `foof claims`). Default: all.")] = None,
    preset: PresetName = "quick",
    out: Folder = OUT,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default one per core.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler to run on instead.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a claim does not hold.")] = False,
) -> None:
    """Run the study and write its report. What has been run already is not run again."""
    size = _preset(preset)
    experiments = _chosen(what, size) if what else _at_hand(_chosen(what, size), size)
    with store.Store(_records_file(out)) as into:
        if (size.centred or size.reduced) and committed(size).exists():
            _take_over(committed(size), into)  # hours that need not be spent again
        _announce(experiments, size, into, workers)
        with _sweeping(into, workers, scheduler) as run_all:
            outcomes = conduct(experiments, size, run_all, into.get)
        page = report.write(out / "report.html", outcomes, size, _paper_outcomes(size, experiments))
        store.export(into, out / "records.csv")
        report.write_claims(out / "claims.csv", outcomes)
    _show(outcomes)
    console.print(f"Report: [bold]{page}[/]   Claims: {out / 'claims.csv'}   Records: {out / 'records.csv'}")
    if strict and any(v.ruling is Ruling.FAILS for o in outcomes for v in o.verdicts):
        raise typer.Exit(1)


def _take_over(dump: Path, into: store.Store) -> None:
    """The records of a dump, but those of other files than are here: a part of a data set has other losses than all of it."""
    here, others = cache(data.test_records), Counter[str]()

    def of_these_files(record: Record) -> bool:
        name = record.setting.dataset
        used = record.environment.get("test_records", data.SPECS[name].counts[1])  # early records are all of whole data sets
        if record.setting.source != "full" or used == here(name):
            return True
        others[f"{name} with {used} test records, not {here(name)}"] += 1
        return False

    into.load_dump(dump, of_these_files)
    for which, count in others.items():
        console.print(f"{count} records that came with the package are left out: they are of other files ({which}).", highlight=False)


@app.command("claims")
def claims_(preset: PresetName = "quick", out: Folder = OUT) -> None:
    """List the claims, the rule that decides each, and what the records say so far."""
    size = _preset(preset)
    with _known(size, out) as records:
        table = Table(Column("Claim", no_wrap=True), "Where", "Says", "Holds if", "Ratio", "Verdict")
        for o in recall(list(experiments_of(size).values()), size, remembered(records)):
            for v in o.verdicts:
                decides = deciding(v)
                table.add_row(v.id, v.where, v.claim, v.rule, str(decides.effect) if decides else "", f"[{COLOUR[v.ruling]}]{v.ruling}[/]")
    console.print(table)


@contextmanager
def _known(size: Preset, out: Path) -> Iterator[store.Store]:
    """The folder's records, and, where it has none of this preset or hours can be saved, those that came with the package."""
    with store.Store(":memory:") as records:
        if _records_file(out).exists():
            with store.Store(_records_file(out)) as theirs:  # whose file stays as it is
                records.put_all(theirs)
        own = begun(size, remembered(records))
        if (size.centred or size.reduced or not own) and committed(size).exists():
            if own:
                _take_over(committed(size), records)
            else:
                records.load_dump(committed(size))
                console.print(f"No records of the preset {size.name} in {out}: these are the ones that came with the package.")
        yield records


@app.command("sweep")
def sweep_(
    optimizer: Annotated[str, typer.Argument(help=f"One of {', '.join(METHODS)}.")],
    lr: Annotated[str, typer.Option(help="Learning rates, LOW:HIGH on the ladder {1, 3}·10^i.")] = "0.1:1",
    damping: Annotated[str | None, typer.Option(help="λ, LOW:HIGH in powers of ten, or one value.")] = None,
    fine: Annotated[bool, typer.Option("--fine", help="Dampings at every power of ten, not every second.")] = False,
    preset: PresetName = "quick",
    out: Folder = OUT,
    seeds: Annotated[int, typer.Option(min=1, help="For the winner.")] = 3,
    workers: Annotated[int | None, typer.Option(min=1)] = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler to run on instead.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Of the optimizer, as NAME=VALUE, e.g. momentum=0.9.")] = None,
) -> None:
    """Search one method's learning rate and damping by the paper's protocol."""
    base = _preset(preset).base.but(optimizer=optimizer, options=tuple(_option(o) for o in option or ()))
    every = 1 if fine else 2
    if damping is None:
        dampings: tuple[float | None, ...] = (None,)
    else:
        dampings = damping_grid(*_range(damping, "--damping"), every) if ":" in damping else _range(damping, "--damping")[:1]
    search = Search(base, rectangle(lr_grid(*_range(lr, "--lr")), dampings), every, seeds=seeds)
    method(search.grid[0])  # a name or a λ that does not fit is an error before anything is begun
    with store.Store(_records_file(out)) as into, _sweeping(into, workers, scheduler) as run_all:
        found = tune(search, run_all)
    table = Table("Learning rate", "λ", "Training loss", "")
    for record in sorted(found.tried, key=lambda r: r.score):
        s = record.setting
        best = f"best: {of(found.records, 'train_loss')}" + (" (edge of the grid)" if found.on_edge else "")
        table.add_row(f"{s.lr:g}", str(s.damping or "–"), f"{record.score:.4g}", best if s == found.best else "")
    console.print(table)


def _range(text: str, of: str) -> tuple[float, float]:
    """`LOW:HIGH`, or one value for both."""
    low, _, high = text.partition(":")
    try:
        values = float(low), float(high or low)
    except ValueError:
        values = math.nan, math.nan
    if not 0 < values[0] <= values[1] < math.inf:
        raise typer.BadParameter(f"{of} is LOW:HIGH or one value, positive numbers, low first, but {text!r} was given")
    return values


def _hidden(text: str) -> tuple[int, ...]:
    """Sizes of hidden layers, separated by commas; none: an empty text."""
    try:
        sizes = tuple(int(n) for n in text.split(",") if n)
    except ValueError:
        sizes = (0,)
    if any(n < 1 for n in sizes):
        raise typer.BadParameter(f"--hidden is positive whole numbers separated by commas, but {text!r} was given")
    return sizes


@app.command("report")
def report_(
    preset: PresetName = "quick",
    out: Folder = OUT,
    svg: Annotated[bool, typer.Option("--svg", help="Also write every figure as an SVG file.")] = False,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Redraw the report without training: from the records in the folder, or else from those that came with the package."""
    size = _preset(preset)
    experiments = list(experiments_of(size).values())
    with _known(size, out) as records:
        if not begun(size, remembered(records)):
            raise NotRun(f"records of the preset {size.name} were needed in {_records_file(out)}, but there are none; "
                         f"run `foof reproduce --preset {size.name}` first")  # fmt: skip
        outcomes = recall(experiments, size, remembered(records))
    page = report.write(out / "report.html", outcomes, size, _paper_outcomes(size, experiments))
    console.print(f"Report: [bold]{page}[/]   Claims: {report.write_claims(out / 'claims.csv', outcomes)}")
    if svg:
        console.print(f"{len(report.write_svgs(out / 'figures', outcomes))} figures in {out / 'figures'}")
    if open_:
        webbrowser.open(page.resolve().as_uri())


@app.command("data")
def data_(
    download: Annotated[str | None, typer.Option(help=f"Fetch one first: {', '.join(data.SPECS)}.")] = None,
) -> None:
    """List the data sets that are on this machine."""
    if download:
        data.read(download, "download")
    table = Table("Data set", "Source", "Training", "Test", "Official", "")
    for f in data.available():
        counts = [f"{n:,}" for n in f.counts] if f.counts else ["–", "–"]
        note = "" if f.counts == f.official else f.problem or "a part"
        table.add_row(data.SPECS[f.name].title, f.source, *counts, " + ".join(f"{n:,}" for n in f.official), note)
    console.print(table)
    console.print(f"Folder: {data.data_folder()} (set FOOF_DATA to change it)")


@app.command()
def train(
    optimizer: Annotated[str, typer.Argument(help=f"One of {', '.join(METHODS)}.")] = "foof",
    lr: Annotated[float | None, typer.Option(help="Default: one that suits the method on Fashion-MNIST.")] = None,
    damping: Annotated[float | None, typer.Option(help="λ, for methods that have one; default likewise.")] = None,
    dataset: Annotated[str, typer.Option(help=f"One of {', '.join(data.SPECS)}.")] = "fashion-mnist",
    source: Annotated[str, typer.Option(help=f"One of {', '.join(data.SOURCES)}.")] = "embedded",
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "mlp",
    hidden: Annotated[str, typer.Option(help="Hidden sizes, separated by commas, or a width.")] = "1000,1000,1000",
    batch_size: int = 100,
    steps: int = 300,
    seed: int = 0,
    option: Annotated[list[str] | None, typer.Option(help="Of the optimizer, as NAME=VALUE, e.g. momentum=0.9.")] = None,
) -> None:
    """Train one network and watch."""
    default = METHODS[optimizer].default if optimizer in METHODS else (1.0, None)
    lr, damping = default[0] if lr is None else lr, default[1] if damping is None else damping
    setting = Setting(
        dataset=dataset, source=source, model=model, hidden=_hidden(hidden), optimizer=optimizer, lr=lr,
        damping=damping, batch_size=batch_size, steps=steps, seed=seed, options=tuple(_option(o) for o in option or ()),
    )  # fmt: skip
    method(setting)  # a name or a λ that does not fit is an error before anything is begun
    loss_now = TextColumn("loss {task.fields[loss]:.4f}")
    columns = (TextColumn("step {task.completed:.0f}"), BarColumn(), loss_now, TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, loss=float("nan"))
        record = run(setting, watch=lambda step, loss: bar.update(task, completed=step, loss=loss))
        if record.status == "finished":
            bar.update(task, completed=steps)
    table = Table(f"{title(setting)}: {record.status}", "")
    for name, value in {**record.final, **record.cost}.items():
        table.add_row(name.replace("_", " "), f"{value:.5g}")
    console.print(table)


def _option(text: str) -> tuple[str, bool | int | float | str]:
    """`NAME=VALUE` as a pair, the value as the simplest type that fits."""
    name, found, value = text.partition("=")
    if not found:
        raise typer.BadParameter(f"options are NAME=VALUE, but {text!r} was given")
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


@app.command()
def explain(
    hidden: Annotated[str, typer.Option(help="Hidden sizes, separated by commas.")] = "1000,1000,1000",
) -> None:
    """Show which parameters of the study's network are covered, and what that costs per step."""
    model = mlp(784, _hidden(hidden), 10)
    console.print(str(foof.explain(model, torch.zeros(100, 784))), highlight=False, soft_wrap=True)


@app.command()
def bench(
    what: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join((*bench_run.KINDS, *CASES))}. Default: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The main sizes in few rounds, in about three minutes.")] = False,
    method: Annotated[list[str] | None, typer.Option(help="This method alone (may be given again); see the table for names.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each case; default: as many as the case has.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads, on as many cores.")] = min(2, len(usable_cores())),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option("--out", help="The file of records; what it has is not measured again.")] = Path("bench.jsonl"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what has been measured.")] = False,
) -> None:
    """Measure what steps, solves and a given loss cost, against SGD, AdamW, Muon and second-order peers, in one interleaved run."""
    setup = bench_run.Setup(quick, threads, device, rounds, tuple(method or ()))
    units = bench_run.plan(setup, what or ())
    store = bench_records.Store(out, asdict(setup), fresh)
    store.protect(unit.name for unit in units if unit.timed and unit.name != "machine")
    pin(threads)
    console.print(f"[bold]foof bench[/] · {len(units)} measurements into {out}; Ctrl-C loses the one in hand.", highlight=False)
    with console.status("") as status:

        def before(unit: bench_run.Unit) -> Callable[[str], None]:
            status.update(unit.name)
            return lambda said: status.update(f"{unit.name}: {said}")

        def after(unit: bench_run.Unit, record: bench_records.Record, new: bool) -> None:
            console.print(f"{unit.name}: {record['taken']:.0f} s{'' if new else ', measured before'}", highlight=False)
            _show_bench([record])

        try:
            found = bench_run.run(units, store, before, after)
        except KeyboardInterrupt:
            console.print(f"[yellow]stopped; {out} has what was measured, and the same command goes on from there[/]", highlight=False)
            raise typer.Exit(130) from None
    console.print(bench_show.about(found), highlight=False)
    table = Table("", "Asked for", "Measured")
    for check in bench_show.checks(found):
        table.add_row("[green]holds[/]" if check.holds else "[red]does not hold[/]", check.asked, check.measured)
    console.print(table)


def _show_bench(found: Sequence[bench_records.Record]) -> None:
    """The table of a measurement, by its kind; searches and rates go into others."""
    for record in found:
        kind = record["kind"]
        if kind in ("steps", "memory", "loss"):
            head, rows = getattr(bench_show, kind)(record)
        elif kind in ("fisher", "laplace"):
            head, rows = getattr(bench_show, kind)([record])
        else:
            continue
        table = Table(*head, title=record.get("title"), title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="A .csv, .parquet or .jsonl.gz file.")],
    out: Folder = OUT,
) -> None:
    """Write the stored records to a file."""
    nothing = NotRun(f"records were needed in {_records_file(out)}, but there are none; run `foof reproduce` first")
    if not _records_file(out).exists():
        raise nothing
    with store.Store(_records_file(out)) as records:
        if not len(records):
            raise nothing
        if path.name.endswith(".jsonl.gz"):
            store.dump(records, path)
        else:
            store.export(records, path)
        console.print(f"{len(records)} records → {path}")


def main() -> None:
    """The entry point: errors that the user can mend are told in one line, Ctrl-C ends with what to do next."""
    try:
        sys.exit(app(standalone_mode=False))  # what typer.Exit carries comes back as a value
    except sweep.Interrupted as stop:
        console.print(f"\n[yellow]{stop}[/]", highlight=False)
        sys.exit(130)
    except (DataError, NotRun, store.StoreError, sweep.WorkerDied, ValueError, OSError) as problem:
        Console(stderr=True).print(f"[red]error:[/] {problem}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except Exception as problem:
        if not hasattr(problem, "exit_code"):
            raise
        if hasattr(problem, "show"):
            problem.show()
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
