"""What the records say: tables, what was asked for and whether it holds, and cost against width, batch and D as pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from foof.bench.loss import NO_LR
from foof.bench.methods import BASELINE, METHODS
from foof.bench.records import Record

Table = tuple[list[str], list[list[str]]]  # head and rows
PEERS = [name for name, method in METHODS.items() if method.second and not method.ours]
COLOURS = (
    "#d5513e", "#f0876f", "#0a84c6", "#5bb5ea", "#a32a1d", "#e69f00", "#8a8f98", "#009e73", "#56c9a4", "#cc79a7", "#7f5af0", "#b8a200",
)  # fmt: skip
COLOUR = dict(zip(METHODS, COLOURS, strict=True))


def about(records: Sequence[Record]) -> str:
    """The class of machine and the versions, in one sentence for each that differs."""
    said = []
    for record in records:
        machine, versions, setup = record["machine"], record["versions"], record["setup"]
        what = f"{machine['processor']}, {setup['threads']} of {machine['cores']} cores, {machine['memory_gib']:g} GiB, {machine['system']}"
        on = f", {machine['accelerator']}" if setup["device"] != "cpu" else ""
        said.append(f"{what}{on}; " + ", ".join(f"{name} {version}" for name, version in versions.items() if version) + ".")
    return " ".join(dict.fromkeys(said))


def steps(record: Record) -> Table:
    """One case: the ratio first."""
    rows = []
    for name, m in sorted(record["methods"].items(), key=lambda item: item[1]["ratio"]):
        least = "≥ " if m["cut"] else ""
        spread = "cut short" if m["cut"] else f"{m['quartiles'][0]:.2f}–{m['quartiles'][1]:.2f}, n = {m['rounds']}"
        predicted = record.get("predicted", {}).get(name, {}).get("ratio")
        reached = record.get("reached", {}).get(name)
        rows.append([
            name, f"{least}{m['ratio']:.2f}", spread, least + _digits(m["mean_ms"]), _digits(m["median_ms"]),
            "–" if m["cut"] else f"{_digits(m['worst_ms'])} ({m['worst_ms'] / m['median_ms']:.1f} ×)",
            f"{predicted:.2f}" if predicted else "", f"{100 * reached:.0f} %" if reached else "",
        ])  # fmt: skip
    rows += [[name, "not run", why, *[""] * 5] for name, why in record["failed"].items()]
    return ["method", "ratio to SGD", "quartiles", "mean, ms", "median", "worst (of median)", "predicted", "of product rate"], rows


def _digits(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def memory(record: Record) -> Table:
    predicted = record["predicted"]
    rows = [
        [name, f"{size / 2**20:.1f}", f"{predicted[name] / 2**20:.1f}" if name in predicted else ""]
        for name, size in sorted(record["beside"].items(), key=lambda item: item[1])
    ]  # fmt: skip
    rows += [[name, "not run", why] for name, why in record["failed"].items()]
    return [f"method (SGD: {record['sgd'] / 2**20:.1f} MiB)", "MiB beside SGD", "formula"], rows


def loss(record: Record) -> Table:
    def key(item: tuple[str, Record]) -> float:
        return item[1]["reached"] if item[1]["reached"] is not None else math.inf

    rows = []
    for name, m in sorted(record["methods"].items(), key=key):
        when = ["not within SGD's", "> 1", "–"]
        if m["reached"] is not None:
            when = [f"{m['reached']:.1f}", f"{m['of_sgd']:.2f}", f"{m['steps_to']:,}"]
        last = "diverged" if m["last"] is None else f"{m['last']:.3f} after {m['steps']:,} steps"
        rows.append([name, *when, "–" if name in NO_LR else f"{m['lr']:.2g}", last])
    rows += [[name, "not run", why, "", "", ""] for name, why in record["failed"].items()]
    return ["method", f"seconds to {record['goal']:.3f}", "of SGD's", "steps", "lr", "loss at the end"], rows


def fisher(records: Iterable[Record]) -> Table:
    """All sizes; seconds."""
    keys = ("build", "product", "first", "solve", "sample")
    rows = []
    for r in records:
        size, mine = [f"{r['parameters']:,}", f"{r['D']:,}"], r["ours"]
        rows.append(["foof", *size, *(f"{mine[k]:.3g}" for k in keys), f"{mine['bytes'] / 2**20:.0f}", f"residual {mine['residual']:.1e}"])
        for name, row in r["peers"].items():
            note = ""
            if "residual" in row:
                first, further = row["solve"] / (mine["build"] + mine["first"]), row["solve"] / mine["solve"]
                ratios = f"{first:.1f} × our build and solve, {further:.0f} × a next one"
                note = f"residual {row['residual']:.1e}, {row['products']} products; {ratios}"
            rows.append([name, *size, *(f"{row[k]:.3g}" if k in row else "–" for k in keys), "–", note])
        rows += [[name, *size, *["–"] * 6, why] for name, why in r["failed"].items()]
    return ["library", "parameters", "D", "build", "F @ v", "first solve", "solve", "sample", "MiB", "note"], rows


def laplace(records: Iterable[Record]) -> Table:
    rows = []
    for r in records:
        for name, row in {"foof": r["ours"], **r["peers"]}.items():
            rows.append([name, r["structure"], f"{r['parameters']:,}", f"{r['D']:,}", f"{row['fit']:.3g}", f"{row['sample']:.3g}"])
        rows += [[name, r["structure"], f"{r['parameters']:,}", f"{r['D']:,}", "not run", why] for name, why in r["failed"].items()]
    return ["library", "structure", "parameters", "datapoints", "fit, s", "first sample, s"], rows


def markdown(table: Table) -> str:
    head, rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# --- what was asked for -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A line that was to be shown, what was measured, and whether it holds."""

    asked: str
    measured: str
    holds: bool


RATIOS = (
    ("mlp-1000", "FOOF", 1.38), ("mlp-4000", "FOOF", 1.27), ("mlp-1000-T1", "FOOF", 3.5), ("mlp-1000", "KFAC", 1.75),
    ("mlp-1000-T1", "KFAC", 6.0),
)  # fmt: skip


def checks(records: Sequence[Record]) -> list[Check]:
    """Every line that these records have something to say about."""
    by_unit = {record["unit"]: record for record in records}
    timed = [r for r in records if r["kind"] == "steps"]
    found = [_ratio(by_unit[f"steps/{case}"], name, most) for case, name, most in RATIOS if name in _methods(by_unit, case)]
    found += [check for record in timed for name in ("FOOF", "KFAC") if (check := _below_peers(record, name))]
    found += [check for record in timed for name in ("FOOF, spread", "KFAC, spread") if (check := _even(record, name))]
    found += [_predicted(record, name) for record in timed for name in ("FOOF", "KFAC") if name in record["methods"]]
    found += [_formula(r, name) for r in records if r["kind"] == "memory" for name in r["predicted"] if name in r["beside"]]
    if "loss" in by_unit and not by_unit["loss"]["setup"]["quick"]:  # of two short epochs nothing is asked
        found += _sooner(by_unit["loss"])
    if "fisher/1000-4000" in by_unit:
        size = by_unit["fisher/1000-4000"]["ours"]["bytes"]
        found.append(Check("the Fisher of 2.8 M parameters, D = 4,000: ≤ 2 GiB beside the model", f"{size / 2**30:.2f} GiB", size <= 2**31))
    return found


def _methods(by_unit: Mapping[str, Record], case: str) -> Mapping[str, Record]:
    return by_unit[f"steps/{case}"]["methods"] if f"steps/{case}" in by_unit else {}


def _ratio(record: Record, name: str, most: float) -> Check:
    ratio = record["methods"][name]["ratio"]
    return Check(f"{record['title']}: {name} ≤ {most} × SGD", f"{ratio:.2f}", ratio <= most)


def _below_peers(record: Record, name: str) -> Check | None:
    peers = {peer: record["methods"][peer]["ratio"] for peer in PEERS if peer in record["methods"]}
    if not peers or name not in record["methods"]:
        return None
    mine, best = record["methods"][name]["ratio"], min(peers, key=lambda peer: peers[peer])
    least = "≥ " if record["methods"][best]["cut"] else ""  # a lower bound above ours decides, one below leaves it open
    said = f"{mine:.2f}, {best} {least}{peers[best]:.2f}"
    if absent := [peer for peer in PEERS if peer in record["failed"]]:
        said += f"; not run: {', '.join(absent)}"
    return Check(f"{record['title']}: {name} below every second-order peer", said, mine < peers[best])


def _even(record: Record, name: str) -> Check | None:
    m = record["methods"].get(name)
    if m is None or not record["case"].startswith("mlp") or record["T"] == 1 or _sizes(record["case"])[0] < 1000:
        return None
    worst = m["worst_ms"] / m["median_ms"]
    return Check(f"{record['title']}: no step of {name} over 2 × its median", f"{worst:.2f} ×", worst <= 2)


def _predicted(record: Record, name: str) -> Check:
    measured, predicted = record["methods"][name]["ratio"], record["predicted"][name]["ratio"]
    off = predicted / measured - 1
    said = f"{predicted:.2f} for {measured:.2f}, {100 * off:+.0f} %"
    return Check(f"{record['title']}: {name} predicted within 15 %", said, abs(off) <= 0.15)


def _formula(record: Record, name: str) -> Check:
    measured, predicted = record["beside"][name], record["predicted"][name]
    off = predicted / measured - 1
    said = f"{predicted / 2**20:.1f} for {measured / 2**20:.1f} MiB, {100 * off:+.0f} %"
    return Check(f"{record['title']}: {name}'s memory within 10 % of the formula", said, abs(off) <= 0.1)


def _sooner(record: Record) -> list[Check]:
    seconds = {name: m["reached"] if m["reached"] is not None else math.inf for name, m in record["methods"].items()}
    if "FOOF" not in seconds:
        return []
    mine, sgd = seconds["FOOF"], seconds[BASELINE.name]
    found = [Check("FOOF at SGD's last loss in a third of its seconds", f"{mine:.1f} of {sgd:.1f} s", mine <= sgd / 3)]
    if others := {name: s for name, s in seconds.items() if name in METHODS and not METHODS[name].ours}:
        best = min(others, key=lambda name: others[name])
        found.append(Check("FOOF there before every other method", f"{mine:.1f} s, {best} {others[best]:.1f} s", mine < others[best]))
    return found


# --- pictures -----------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 60, 170, 40, 46
STYLE = """text{font:13px system-ui,sans-serif;fill:#24292f}.title{font-size:15px;font-weight:600}.grid{stroke:#d0d7de}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.grid{stroke:#30363d}}"""
Lines = Mapping[str, Sequence[tuple[float, float]]]


def cost_against(records: Iterable[Record], axis: str) -> str:
    """Ratios to SGD of the MLPs at T = 100 against their ``"width"`` (batch 100) or ``"batch"`` (width 1,000), as SVG."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record["kind"] == "steps" and record["case"].startswith("mlp-") and record["T"] == 100:
            width, batch = _sizes(record["case"])
            if (batch == 100) if axis == "width" else (width == 1000):
                for name, m in record["methods"].items():
                    if name != BASELINE.name:
                        lines.setdefault(name, []).append((width if axis == "width" else batch, m["ratio"]))
    return lines_svg(lines, f"Time per step over SGD with momentum, against {axis}", axis)


def _sizes(case: str) -> tuple[int, int]:
    """Width and batch of ``mlp-1000-b32``."""
    parts = case.split("-")
    return int(parts[1]), next((int(part[1:]) for part in parts[2:] if part.startswith("b")), 100)


def fisher_against_D(records: Iterable[Record]) -> str:
    """Seconds of the exact Fisher at 2.8 million parameters against D, as SVG."""
    there = [r for r in records if r["kind"] == "fisher" and r["width"] == 1000]
    names = {"build": "build", "first": "first solve", "solve": "solve", "sample": "sample"}
    lines = {title: [(r["D"], r["ours"][key]) for r in there] for key, title in names.items()}
    colours = dict(zip(names.values(), COLOURS, strict=False))
    return lines_svg(lines, "The exact Fisher of 2.8 million parameters, seconds against D", "D", colours)


def lines_svg(lines: Lines, title: str, x: str, colours: Mapping[str, str] = COLOUR) -> str:
    """Lines on logarithmic axes, labelled at their ends. Nothing where there are not two places to draw between."""
    points = {name: sorted(line) for name, line in lines.items() if line}
    xs, ys = sorted({a for line in points.values() for a, _ in line}), [b for line in points.values() for _, b in line]
    if len(xs) < 2:
        return ""
    px = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    py = _scale(min(*ys, 1.0) if min(ys) > 0.5 else min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{STYLE}</style>']
    parts.append(f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>')
    for tick in _ticks(min(*ys, 1.0) if min(ys) > 0.5 else min(ys), max(ys)):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [f'<text x="{px(a):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{a:,g}</text>' for a in xs]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    for name, line in points.items():
        path = " ".join(f"{px(a):.1f},{py(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours.get(name, "#8a8f98")}" stroke-width="2.5"/>')
    below = -math.inf
    for name, line in sorted(points.items(), key=lambda item: py(item[1][-1][1])):
        y = below = max(py(line[-1][1]) + 4, below + 15)
        parts.append(f'<text x="{px(line[-1][0]) + 8:.1f}" y="{y:.1f}" style="fill:{colours.get(name, "#8a8f98")}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = math.log(high / low) or 1.0
    return lambda value: start + math.log(value / low) / span * (end - start)


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [d * 10.0**k for k in decades for d in ((1, 2, 5) if high / low < 100 else (1,)) if low * 0.999 <= d * 10.0**k <= high * 1.001]
