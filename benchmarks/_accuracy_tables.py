"""Tables of how right verdicts on generated windows are, and what was aimed at."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import _generated as generated
import numpy as np
from _generated import JUDGES, OURS, Result
from _scenarios import (
    CLOCKS,
    FAMILIES,
    HEALTHY,
    MIXED_CLASSES,
    PATH,
    RE_MEASURED,
    SCENARIOS,
    SHAPES,
    USUAL,
    Score,
)
from _tables import Table

# What is expected of effects of this size and more.
AIM_EFFECT_US = 10.0
# And of what is saved without a cause, in groups up to this size.
_SAVINGS_RANKS, _SAVING_SHARE, _SAVING_US = 72, 0.15, 3.0
_MISTAKES_SHOWN = 3
_ORDERS: dict[str, Iterable[str]] = {
    "scenario": SCENARIOS,
    "shape": SHAPES,
    "family": FAMILIES,
    "clock": CLOCKS,
}

# Cells of rows in which nothing is wrong.
_PERFECT = {"1.00", "1.000", "-"}
_ALL_RIGHT = "1.00 throughout"
# What readers call the properties of cells.
_NAMES = {
    "scenario": "fault",
    "family": "kind of noise or load",
    "clock": "age of the clocks",
}

Results = Mapping[str, Sequence[Result]]


def total(results: Iterable[Result], judge: str, subjects: bool = False) -> Score:
    """Counts of all windows together."""
    score = Score()
    for result in results:
        score += (result.subject_scores if subjects else result.scores).get(judge, Score())
    return score


def by(results: Iterable[Result], field: str) -> dict[Any, list[Result]]:
    """Results by one property of their cell, in the order in which these are listed, or ascending."""
    groups: dict[Any, list[Result]] = defaultdict(list)
    for result in results:
        groups[getattr(result.task.cell, field)].append(result)
    return {key: groups[key] for key in _ORDERS.get(field, sorted(groups)) if key in groups}


def select(results: Iterable[Result], **wanted: Any) -> list[Result]:
    """Results whose cell has the given properties."""
    return [
        r for r in results if all(getattr(r.task.cell, k) == value for k, value in wanted.items())
    ]


def _windows(results: Iterable[Result]) -> int:
    return sum(r.task.num_windows for r in results)


def _all_right(results: Sequence[Result]) -> float:
    return sum(r.all_right for r in results) / max(_windows(results), 1)


def _share(results: Sequence[Result]) -> str:
    return f"{_all_right(results):.2f}" if results else "-"


def _of(results: Sequence[Result], judge: str = OURS) -> str:
    return f"{_alarms(results, judge)} of {_windows(results)}" if results else "-"


def _alarms(results: Iterable[Result], judge: str = OURS) -> int:
    return sum(r.alarms.get(judge, 0) for r in results)


def _scores(results: Iterable[Result], digits: int) -> list[str]:
    """Precision, recall and F1 of ours."""
    score = total(results, OURS)
    return [f"{x:.{digits}f}" for x in (score.precision, score.recall, score.f1)]


def _f1(results: Sequence[Result]) -> str:
    return f"{total(results, OURS).f1:.2f}" if results else "-"


def _mistakes(results: Iterable[Result]) -> str:
    counted: Counter[str] = Counter()
    for result in results:
        counted.update(result.mistakes)
    shown = counted.most_common(_MISTAKES_SHOWN)
    more = len(counted) - len(shown)
    texts = [f"{count} {what}" for what, count in shown] + [f"{more} other kinds"] * (more > 0)
    return ", ".join(texts) or "-"


# --- faults ---------------------------------------------------------------------------------------


def overall_table(faulty: Sequence[Result]) -> Table:
    """Every judge on everything."""
    rows = []
    for judge in JUDGES:
        score, subjects = total(faulty, judge), total(faulty, judge, subjects=True)
        numbers = score.precision, score.recall, score.f1, subjects.f1
        rows.append([judge, *(f"{x:.3f}" for x in numbers)])
    return Table(
        f"All faults of {AIM_EFFECT_US:g} us and more",
        ["judge", "precision", "recall", "F1", "F1 of the subject alone"],
        rows,
        "F1 asks for the class (comp-slow, comm-slow, mixed-slow) and the rank or path; the last column for "
        "the rank or path only.",
    )


def fault_tables(faulty: Sequence[Result]) -> list[Table]:
    """By fault: all right by shape; F1 by effect; what is wrong."""
    shapes, effects = list(by(faulty, "shape")), list(by(faulty, "effect_us"))
    of_shape, of_effect, wrong = [], [], []
    for name, results in by(faulty, "scenario").items():
        of_shape.append([name, *(_share(select(results, shape=s)) for s in shapes)])
        of_effect.append([name, *(_f1(select(results, effect_us=e)) for e in effects)])
        numbers = [f"{_windows(results)}", _share(results), *_scores(results, 2)]
        wrong.append([name, *numbers, _mistakes(results)])
    of_shape.append(["all", *(_share(select(faulty, shape=s)) for s in shapes)])
    of_effect.append(["all", *(_f1(select(faulty, effect_us=e)) for e in effects)])
    return [
        Table(
            "Share of windows that are all right, by fault and nodes x ranks per node",
            ["fault", *shapes],
            of_shape,
            "All right: all that was injected is named, and nothing else.",
        ).without(_PERFECT.__contains__, _ALL_RIGHT),
        Table("F1 by fault and effect", ["fault", *(f"{e:g} us" for e in effects)], of_effect),
        Table(
            "What is wrong, by fault",
            ["fault", "windows", "all right", "precision", "recall", "F1", "mistakes"],
            wrong,
        ),
    ]


def small_table(small: Sequence[Result]) -> Table:
    """F1 of small effects, in long windows."""
    shapes = list(by(small, "shape"))
    rows = [
        [name, *(_f1(select(results, shape=s)) for s in shapes), _mistakes(results)]
        for name, results in by(small, "scenario").items()
    ]
    rows.append(["all", *(_f1(select(small, shape=s)) for s in shapes), _mistakes(small)])
    cell = small[0].task.cell
    return Table(
        f"F1 of effects of {cell.effect_us:g} us in {cell.num_operations} operations",
        ["fault", *shapes, "mistakes"],
        rows,
    )


def surroundings_table(field: str, results: Sequence[Result]) -> Table:
    """All right by a property of the cell other than the fault, with each fault."""
    shapes = list(by(results, "shape"))
    rows = [
        [
            value,
            name,
            *(_share(select(found, shape=s)) for s in shapes),
            _f1(found),
            _mistakes(found),
        ]
        for value, of_value in by(results, field).items()
        for name, found in by(of_value, "scenario").items()
    ]
    title = f"Share of windows that are all right, by {_NAMES[field]}"
    table = Table(title, [_NAMES[field], "fault", *shapes, "F1", "mistakes"], rows)
    return table.without(_PERFECT.__contains__, _ALL_RIGHT, named=2)


def field_tables(results: Sequence[Result]) -> list[Table]:
    """Faults and clocks of the field: by fault and clock, by fault and effect, by clock and shape."""
    clocks, shapes = list(by(results, "clock")), list(by(results, "shape"))
    effects = list(by(results, "effect_us"))
    of_fault, wrong = [], []
    for name, of_name in by(results, "scenario").items():
        for family, found in by(of_name, "family").items():
            label = name if family == USUAL else f"{name}, {family}"
            of_fault.append([label, *(_share(select(found, clock=c)) for c in clocks)])
            cells = [_share(select(found, effect_us=e)) for e in effects]
            wrong.append([label, f"{_windows(found)}", *cells, _f1(found), _mistakes(found)])
    of_clock = []
    for label, found in [*by(results, "clock").items(), ("all", list(results))]:
        cells = [_f1(select(found, shape=s)) for s in shapes]
        numbers = [f"{_windows(found)}", *cells, *_scores(found, 3)]
        of_clock.append([label, *numbers, _mistakes(found)])
    return [
        Table(
            "Share of windows that are all right, by fault and age of the clocks",
            ["fault", *clocks],
            of_fault,
        ).without(_PERFECT.__contains__, _ALL_RIGHT),
        Table(
            "Share of windows that are all right, by fault and effect",
            ["fault", "windows", *(f"{e:g} us" for e in effects), "F1", "mistakes"],
            wrong,
        ),
        Table(
            "F1 by age of the clocks and nodes x ranks per node",
            [_NAMES["clock"], "windows", *shapes, "precision", "recall", "F1", "mistakes"],
            of_clock,
            "All faults together, and so to be compared where all are: among clocks as kernels state them.",
        ),
    ]


def normal_table(normal: Sequence[Result]) -> Table:
    """F1 by fault and shape in normal operations; healthy windows; all of a shape together."""
    shapes = list(by(normal, "shape"))
    rows = []
    faulty = [r for r in normal if r.task.cell.scenario != HEALTHY]
    for name, results in by(faulty, "scenario").items():
        cells = [_f1(select(results, shape=s)) for s in shapes]
        numbers = [f"{_windows(results)}", *cells, *_scores(results, 3)]
        rows.append([name, *numbers, _mistakes(results)])
    everything = _scores(faulty, 3)
    of_shapes = zip(*(_scores(select(faulty, shape=s), 3) for s in shapes))
    for place, (what, cells) in enumerate(zip(("precision", "recall", "F1"), of_shapes)):
        own = ["", "", ""]
        own[place] = everything[place]
        rows.append([f"all, {what}", "", *cells, *own, ""])
    healthy = select(normal, scenario=HEALTHY)
    cells = [_of(select(healthy, shape=s)) for s in shapes]
    rows.append(["healthy: false", f"{_windows(healthy)}", *cells, "", "", "", _mistakes(healthy)])
    return Table(
        "Normal operations: F1 by fault and nodes x ranks per node",
        ["fault", "windows", *shapes, "precision", "recall", "F1", "mistakes"],
        rows,
        "Healthy: windows with a false verdict.",
    )


# --- healthy --------------------------------------------------------------------------------------


def alarm_table(healthy: Sequence[Result]) -> Table:
    """Healthy windows with a false verdict."""
    shapes = list(by(healthy, "shape"))
    rows, quiet = [], []
    for label, results in _surroundings(healthy).items():
        cells = [_of(select(results, shape=s)) for s in shapes]
        count, alarms = _windows(results), _alarms(results)
        if not alarms:
            quiet.append(f"{label} ({count:,})")
            continue
        rate = f"{alarms / count * 1e3:.1f}", f"{at_most(alarms, count) * 1e3:.1f}"
        rows.append([label, *cells, *rate, _mistakes(results)])
    return Table(
        "Healthy windows with a false verdict",
        ["machine", *shapes, "per 1,000", "95 % sure below", "mistakes"],
        rows,
        "Verdicts on ranks whose experts truly are in demand do not count. No false verdict, of so many windows: "
        f"{'; '.join(quiet) or 'nowhere'}.",
    )


def waits_tables(runs: Sequence[Result]) -> list[Table]:
    """Waiting alone: false alarms on healthy runs, and what is found, by group."""
    shapes = list(by(runs, "shape"))
    healthy = [r for r in runs if not r.task.cell.effect_us]
    alarms = []
    for family, results in by(healthy, "family").items():
        for judge in generated.WAITS_JUDGES:
            for what in (judge, f"{judge}{generated.IN_DEMAND}"):
                counts = [_of(select(results, shape=s), what) for s in shapes]
                if what == judge or counts != [
                    _of(select(results, shape=s), judge) for s in shapes
                ]:
                    alarms.append([family, what, *counts])
    found = []
    for name, of_name in by([r for r in runs if r.task.cell.effect_us], "scenario").items():
        for effect_us, results in by(of_name, "effect_us").items():
            for judge in generated.WAITS_JUDGES:
                cells = []
                for shape in shapes:
                    of = select(results, shape=shape)
                    right = sum(r.scores[judge].right for r in of)
                    cells.append(f"{right} / {_of(of, judge)}" if of else "-")
                found.append([f"{name} of {effect_us:g} us", judge, *cells])
    return [
        Table(
            "Waiting alone: healthy runs in which anybody is named",
            ["machine", "judge", *shapes],
            alarms,
            "Judged whenever a window has ended, from the fifth on. Ranks whose experts truly are in demand count only "
            "where it says so.",
        ),
        Table(
            "Waiting alone: runs in which the cause is named, by class and subject / anybody else is",
            ["fault", "judge", *shapes],
            found,
        ),
    ]


def _surroundings(results: Sequence[Result]) -> dict[str, list[Result]]:
    """By what is not usual about the cell."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        cell = result.task.cell
        parts = [cell.family] if cell.family != USUAL else []
        parts += [f"clocks {cell.clock}"] if cell.clock != RE_MEASURED else []
        groups[", ".join(parts) or USUAL].append(result)
    return groups


def at_most(count: int, of: int) -> float:
    """Upper 95 % bound of a share seen `count` times (Poisson)."""
    low, high = float(count), count + 10.0 + 10.0 * math.sqrt(count + 1)
    for _ in range(60):
        middle = (low + high) / 2
        below = sum(
            math.exp(-middle + k * math.log(middle) - math.lgamma(k + 1)) for k in range(count + 1)
        )
        low, high = (middle, high) if below > 0.05 else (low, middle)
    return min(high / of, 1.0)


# --- numbers --------------------------------------------------------------------------------------


def interval_table(field: str, faulty: Sequence[Result]) -> Table:
    """How often the stated intervals of effects hold the truth, by a property of the cell."""
    rows = []
    for name, results in by(faulty, field).items():
        effects = [effect for r in results for effect in r.effects]
        if not effects:
            continue
        errors = [abs(named - true) for true, named, _, _ in effects]
        widths = [(high - low) / 2 for _, _, low, high in effects if math.isfinite(high - low)]
        of_shape = {
            s: covered([e for r in of for e in r.effects]) for s, of in by(results, "shape").items()
        }
        known = {s: c for s, c in of_shape.items() if math.isfinite(c)}
        worst = min(known, key=lambda s: known[s], default=None)
        rows.append(
            [
                name,
                f"{len(effects)}",
                f"{covered(effects):.2f}",
                "-" if worst is None else f"{known[worst]:.2f} at {worst}",
                f"{quantile(widths, 0.5):.2f}",
                f"{quantile(errors, 0.5):.2f}",
                f"{quantile(errors, 0.9):.2f}",
            ]
        )
    return Table(
        f"Effects: how often the stated 95 % interval holds what was injected, by {_NAMES[field]}",
        [
            _NAMES[field],
            "verdicts",
            "coverage",
            "worst shape",
            "half width us",
            "error: median us",
            "p90 us",
        ],
        rows,
        "Single causes. A verdict without an interval counts as one that does not hold.",
    )


def covered(effects: Sequence[tuple[float, float, float, float]]) -> float:
    """Share of (injected, named, low, high) whose interval holds what was injected."""
    held = [low <= true <= high for true, _, low, high in effects]
    return sum(held) / len(held) if held else math.nan


def savings_table(faulty: Sequence[Result]) -> Table:
    """How far savings are from the truth."""
    rows = []
    cells = [
        (name if family == USUAL else f"{name}, {family}", results)
        for name, of_name in by(faulty, "scenario").items()
        for family, results in by(of_name, "family").items()
    ]
    for name, results in cells:
        small = [r for r in results if r.task.cell.group.num_ranks <= _SAVINGS_RANKS]
        pairs = [pair for r in small for pair in r.savings]
        if pairs:
            errors = [named - true for true, named in pairs]
            rows.append(
                [
                    name,
                    f"{len(pairs)}",
                    f"{savings_right(pairs):.2f}",
                    *(f"{quantile(errors, q):.1f}" for q in (0.1, 0.5, 0.9)),
                    f"{quantile([true for true, _ in pairs], 0.5):.1f}",
                ]
            )
    return Table(
        f"Without it: how far the stated saving is from the true one, up to {_SAVINGS_RANKS} ranks",
        [
            "fault",
            "windows",
            "within 15 % or 3 us",
            "error p10 us",
            "median",
            "p90",
            "true, median us",
        ],
        rows,
        "True saving: mean operation with the fault minus without it, in the same run with the same random "
        "numbers. Of several faults: with all of them, where all are named, minus without any.",
    )


def savings_right(pairs: Sequence[tuple[float, float]]) -> float:
    """Share of (true, named) savings that are near enough."""
    near = [
        abs(named - true) <= max(_SAVING_US, _SAVING_SHARE * abs(true)) for true, named in pairs
    ]
    return sum(near) / len(near) if near else math.nan


def operations_table(first: Sequence[Result]) -> Table:
    """How long a window must be."""
    shapes = list(by(first, "shape"))
    rows = []
    for name, of_name in by(first, "scenario").items():
        for effect_us, of_effect in by(of_name, "effect_us").items():
            for family, of_family in by(of_effect, "family").items():
                texts = []
                for shape in shapes:
                    needed = [n for r in select(of_family, shape=shape) for n in r.operations]
                    quantiles = (_operations(quantile(needed, q)) for q in (0.5, 0.9))
                    texts.append(" / ".join(quantiles) if needed else "-")
                rows.append([name, f"{effect_us:g}", family, *texts])
    return Table(
        "Operations until all that was injected is named, p50 / p90",
        ["fault", "effect us", "family", *shapes],
        rows,
        "Dispatches and combines counted together; windows of "
        f"{', '.join(str(n) for n in generated.LENGTHS)} operations were judged.",
    )


def quantile(values: Sequence[float], share: float) -> float:
    """One of the values."""
    return float(np.quantile(values, share, method="higher")) if values else math.nan


def _operations(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else f"> {generated.LENGTHS[-1]}"


# --- aims -----------------------------------------------------------------------------------------


def aim_table(results: Results) -> Table:
    """What was aimed at, what came out. A program's exit status does not depend on it."""
    faulty = results["faults"]
    aged = [r for r in results["clocks"] if r.task.cell.effect_us >= AIM_EFFECT_US]
    rows = [
        _aim_f1(f"F1, {AIM_EFFECT_US:g} us and more, all shapes", faulty, 0.985, "shape"),
        _aim_f1("F1, clocks of any age", aged, 0.985, "clock"),
        _aim_f1("F1, causes of different class at once", _mixed(faulty), 0.985, "scenario"),
        _aim_f1("F1, 5 us, 512 operations", results["small"], 0.95, "shape"),
        _aim_recall("path of 50 us and more, clocks of any age", aged),
        _aim_alarms(results["healthy"]),
        *_aim_numbers(faulty),
    ]
    return Table("Aims", ["what", "aim", OURS, "where it is worst", ""], [r for r in rows if r])


def _mixed(faulty: Sequence[Result]) -> list[Result]:
    return [r for r in faulty if r.task.cell.scenario in MIXED_CLASSES]


def _aim_f1(what: str, results: Sequence[Result], aim: float, field: str) -> list[str]:
    worst = min(
        ((total(of, OURS).f1, str(value)) for value, of in by(results, field).items()),
        default=(1.0, "-"),
    )
    where = f"{worst[0]:.3f}: {worst[1]}"
    return _aim(what, total(results, OURS).f1, aim, where) if results else []


def _aim_recall(what: str, results: Sequence[Result]) -> list[str]:
    paths = [r for r in select(results, scenario=PATH) if r.task.cell.effect_us >= 50.0]
    if not paths:
        return []
    recalls = [(total(of, OURS).recall, clock) for clock, of in by(paths, "clock").items()]
    return _aim(what, total(paths, OURS).recall, 0.95, "{:.3f}: {}".format(*min(recalls)))


def _aim_alarms(healthy: Sequence[Result]) -> list[str]:
    groups = _surroundings(healthy)
    if not groups:
        return []
    rates = {label: _alarms(of) / _windows(of) for label, of in groups.items()}
    worst = max(rates, key=lambda label: rates[label])
    alarms, count = _alarms(groups[worst]), _windows(groups[worst])
    bound = at_most(alarms, count) * 1e3
    return [
        "false verdicts per 1,000 healthy windows, each family",
        "at most 1",
        f"{rates[worst] * 1e3:.1f}",
        f"{worst}: {alarms} of {count}; 95 % sure: below {bound:.1f}",
        _met(rates[worst] <= 1e-3),
    ]


def _aim_numbers(faulty: Sequence[Result]) -> list[list[str]]:
    """Of every cause alone, because one cause must not hide another."""
    coverage, savings = {}, {}
    for name, results in by(faulty, "scenario").items():
        coverage[name] = covered([e for r in results for e in r.effects])
        small = [r for r in results if r.task.cell.group.num_ranks <= _SAVINGS_RANKS]
        savings[name] = savings_right([pair for r in small for pair in r.savings])
    rows = []
    for what, shares, aim in (
        ("95 % intervals that hold, each cause", coverage, 0.9),
        (f"savings within 15 % or 3 us, up to {_SAVINGS_RANKS} ranks, each cause", savings, 0.95),
    ):
        known = {name: share for name, share in shares.items() if math.isfinite(share)}
        if known:
            worst = min(known, key=lambda name: known[name])
            rows.append(_aim(what, known[worst], aim, worst))
    return rows


def _aim(what: str, value: float, aim: float, worst: str) -> list[str]:
    return [what, f"at least {aim:g}", f"{value:.3f}", worst, _met(value >= aim)]


def _met(is_met: bool) -> str:
    return "[green]met[/green]" if is_met else "[red]not met[/red]"
