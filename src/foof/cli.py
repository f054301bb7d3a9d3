"""The command `foof`: arguments in, calls to the study out."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Table

    import foof
    from foof.study import data, report, store, sweep
    from foof.study.experiments import EXPERIMENTS, PRESETS, Experiment, NotRun, Outcome, Preset, committed, conduct, remembered
    from foof.study.formats import DataError
    from foof.study.methods import METHODS, title
    from foof.study.models import mlp
    from foof.study.run import run
    from foof.study.setting import Record, Setting
    from foof.study.tune import RunAll
    from foof.study.verdict import Ruling
except ModuleNotFoundError as error:
    sys.exit(f"The command `foof` needs the study's packages, and {error.name} is missing: pip install 'foof[study]'")

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Gradient descent on neurons, put to the test.")
console = Console()
COLOUR = {Ruling.HOLDS: "green", Ruling.FAILS: "red", Ruling.UNDECIDED: "yellow"}

PresetName = Annotated[str, typer.Option("--preset", help=f"How large: {', '.join(PRESETS)}.")]
Folder = Annotated[Path, typer.Option("--out", help="Where records and report are.", envvar="FOOF_OUT")]
OUT = Path("reproduction")


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise typer.BadParameter(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def _chosen(ids: Sequence[str] | None) -> list[Experiment]:
    unknown = [i for i in ids or () if i not in EXPERIMENTS]
    if unknown:
        raise typer.BadParameter(f"no experiment is called {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}")
    return [EXPERIMENTS[i] for i in ids or EXPERIMENTS]


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
    table = Table("Verdict", "Claim", "Measured", "Where", title_justify="left")
    for v in (v for o in outcomes for v in o.verdicts):
        table.add_row(f"[{COLOUR[v.ruling]}]{v.ruling}[/]", v.claim, v.measured, v.where)
    console.print(table)


@app.command()
def reproduce(
    experiments: Annotated[list[str] | None, typer.Argument(help=f"Which: {', '.join(EXPERIMENTS)}. Default: all.")] = None,
    preset: PresetName = "quick",
    out: Folder = OUT,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default one per core.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler to run on instead.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a claim does not hold.")] = False,
) -> None:
    """Run the study and write its report. What has been run already is not run again."""
    chosen, size = _chosen(experiments), _preset(preset)
    console.print(f"[bold]foof reproduce[/] · {size.name} ({size.about})")
    with store.Store(_records_file(out)) as into:
        with _sweeping(into, workers, scheduler) as run_all:
            outcomes = conduct(chosen, size, run_all)
        page = report.write(out / "report.html", outcomes, size)
        store.export(into, out / "records.csv")
    _show(outcomes)
    console.print(f"Report: [bold]{page}[/]   Records: {out / 'records.csv'}")
    if strict and any(v.ruling is Ruling.FAILS for o in outcomes for v in o.verdicts):
        raise typer.Exit(1)


@app.command("report")
def report_(
    preset: PresetName = "quick",
    out: Folder = OUT,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Redraw the report without training: from the records in the folder, or else from those that came with the package."""
    size = _preset(preset)
    own = _records_file(out).exists()
    if not own and not committed(size).exists():
        raise NotRun(f"records were needed in {_records_file(out)}, but there are none; run `foof reproduce` first")
    with store.Store(_records_file(out) if own else ":memory:") as records:
        if not own:
            records.load_dump(committed(size))
            console.print("No records here: these are the ones that came with the package.")
        page = report.write(out / "report.html", conduct(list(EXPERIMENTS.values()), size, remembered(records)), size)
    console.print(f"Report: [bold]{page}[/]")
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
    lr: float = 0.3,
    damping: Annotated[float | None, typer.Option(help="λ, for methods that have one; default 1.")] = None,
    dataset: Annotated[str, typer.Option(help=f"One of {', '.join(data.SPECS)}.")] = "fashion-mnist",
    source: Annotated[str, typer.Option(help=f"One of {', '.join(data.SOURCES)}.")] = "embedded",
    hidden: Annotated[str, typer.Option(help="Hidden sizes, separated by commas.")] = "1000,1000,1000",
    batch_size: int = 100,
    steps: int = 300,
    seed: int = 0,
    option: Annotated[list[str] | None, typer.Option(help="Of the optimizer, as NAME=VALUE, e.g. momentum=0.9.")] = None,
) -> None:
    """Train one network and watch."""
    if damping is None and optimizer in METHODS and METHODS[optimizer].damped:
        damping = 1.0
    setting = Setting(
        dataset=dataset, source=source, hidden=tuple(int(n) for n in hidden.split(",") if n), optimizer=optimizer, lr=lr,
        damping=damping, batch_size=batch_size, steps=steps, seed=seed, options=tuple(_option(o) for o in option or ()),
    )  # fmt: skip
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
    model = mlp(784, tuple(int(n) for n in hidden.split(",") if n), 10)
    console.print(str(foof.explain(model, torch.zeros(100, 784))), highlight=False, soft_wrap=True)


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="A .csv, .parquet or .jsonl.gz file.")],
    out: Folder = OUT,
) -> None:
    """Write the stored records to a file."""
    with store.Store(_records_file(out)) as records:
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
    except (DataError, NotRun, store.StoreError, sweep.WorkerDied, ValueError) as problem:
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
