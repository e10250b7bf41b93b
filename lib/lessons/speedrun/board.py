"""The board of a race: entries as records, what may be claimed of them, a picture to share."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lib.core.files import ROOT, write_atomically
from lib.core.records import new_record, read_records, to_markdown
from lib.core.settings import require
from lib.lessons.speedrun.race import (
    CLASSES,
    RaceClass,
    at_target,
    changes,
    digest,
    program_of,
)
from lib.lessons.speedrun.referee import FEWEST_SEEDS, SAME, Run, has_repeated

FOLDER = ROOT / "artifacts/race"
LEADERBOARD = FOLDER / "LEADERBOARD.md"
# The chance of a difference between equals from which on nothing is claimed.
P_VALUE = 0.05
# How much slower the same file was on one machine under load, in processor time.
SAME_SPEED = 1.15
# Lines of a recipe that a card has room for.
CHANGES_SHOWN = 22
Entry = Mapping[str, Any]


def entry_of(
    name: str, which: RaceClass, source: str, runs: Sequence[Run], device: Any
) -> dict[str, Any]:
    """The record of an entry."""
    figures: dict[str, Any] = {"entry": name, "class": asdict(which), "source": source}
    figures |= {"source_sha256": digest(source), "runs": [asdict(run) for run in runs]}
    figures["changed"], figures["diff"] = changes(source)
    return new_record(figures, device=device)


def read_entries(path: Path = FOLDER) -> list[dict[str, Any]]:
    """The entries in a folder, a file each, or in one file.

    Raises:
        ValueError: a file holds another kind of record.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    found = [(file, record) for file in files for record in read_records(file)]
    for file, record in found:
        is_entry = {"entry", "class", "runs"} <= record.get("figures", {}).keys()
        require(is_entry, f"{file} holds a record that is none of a race; take it away")
    return [record for _, record in found]


# What may be claimed


def clock_of(entry: Entry) -> str:
    """The seconds that count: on a CPU the processor's, which other work hardly changes."""
    return "seconds" if "NVIDIA" in entry["device"] else "processor_s"


def times(entry: Entry) -> list[float]:
    """The seconds that count, of each run."""
    return [run[clock_of(entry)] for run in entry["figures"]["runs"]]


def tokens(entry: Entry) -> list[float]:
    """The tokens to the target, of each run."""
    return [run["tokens"] for run in entry["figures"]["runs"]]


def machine_of(entry: Entry) -> str:
    """The machine class, within which entries are compared."""
    on_gpu = clock_of(entry) == "seconds"
    return f"{entry['device']}, {'wall clock' if on_gpu else 'processor time of one thread a rank'}"


def tail(t: float, degrees: float) -> float:
    """The probability that Student's t exceeds `t`, by integrating its density."""
    angle = math.atan(abs(t) / math.sqrt(degrees))
    # with t = √n · tan(angle) the density is cos(angle)^(n - 1)
    angles = np.linspace(0, math.pi / 2, 20_001)
    inside = np.cos(angles) ** (degrees - 1)
    upper = float(inside[angles >= angle].sum() / inside.sum() / 2)
    return upper if t > 0 else 1 - upper


def chance_of_faster(a: Sequence[float], b: Sequence[float]) -> float:
    """The chance that means of `a` lie this far below those of `b` where both are equally fast.

    Welch's t-test, one-sided (Welch 1947, "The generalization of 'Student's' problem"). 1 where one
    of them is a single value.
    """
    if min(len(a), len(b)) < 2:
        return 1.0
    parts = [statistics.variance(values) / len(values) for values in (a, b)]
    if sum(parts) == 0:
        return float(statistics.mean(a) >= statistics.mean(b))
    t = (statistics.mean(b) - statistics.mean(a)) / math.sqrt(sum(parts))
    degrees = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (a, b)))
    return tail(t, degrees)


def doubt(entry: Entry, other: Entry, *, in_turns: bool = False) -> str:
    """Why an entry may not be called faster than another one; empty if it may.

    Entries are raced at different times, and other work slows a processor by up to SAME_SPEED. So a
    smaller gain in seconds counts only if the tokens to the target, which no load changes, fell, or
    if both were raced `in_turns`.
    """
    if program_of(entry["figures"]["source"]) == program_of(other["figures"]["source"]):
        return "it is the same recipe"
    if machine_of(entry) != machine_of(other):
        return f"the other was raced on {machine_of(other)}"
    mine, its = times(entry), times(other)
    if min(len(mine), len(its)) < FEWEST_SEEDS:
        return f"a claim needs {FEWEST_SEEDS} seeds of each"
    gain = statistics.mean(its) / statistics.mean(mine)
    if gain <= 1:
        return "its mean is no lower"
    p = chance_of_faster(mine, its)
    if p >= P_VALUE:
        return f"p = {p:.2f}, so luck may explain it"
    if in_turns or gain > SAME_SPEED or chance_of_faster(tokens(entry), tokens(other)) < P_VALUE:
        return ""
    return f"it gains {gain - 1:.0%}, which load may explain, and its tokens did not clearly fall"


def comparison(entry: Entry, other: Entry, *, in_turns: bool) -> str:
    """An entry beside another one, and the verdict: three lines."""
    when = "raced in turns with it" if in_turns else f"raced on {other['date'][:10]}"
    names = [one["figures"]["entry"] for one in (entry, other)]
    wide = max(map(len, names))
    lines = [
        f"{name:{wide}}  {mean_and_interval(times(one))} s, "
        f"{statistics.mean(tokens(one)):,.0f} tokens"
        for name, one in zip(names, (entry, other))
    ]
    reason = doubt(entry, other, in_turns=in_turns)
    verdict = f"not shown to be faster: {reason}"
    if not reason:
        p = chance_of_faster(times(entry), times(other))
        p_of = f"= {p:.3f}" if p >= 0.001 else "< 0.001"
        verdict = f"faster: equally fast recipes seldom differ so much (p {p_of})"
    return f"{lines[0]}\n{lines[1]} ({when})\n{verdict}"


def fastest(which: str, entries: Sequence[Entry], machine: str = "") -> Entry | None:
    """The fastest entry of a class, of `machine` if it has one."""
    its = [one for one in entries if one["figures"]["class"]["name"] == which]
    here = [one for one in its if machine_of(one) == machine]
    return min(here or its, key=lambda one: statistics.mean(times(one)), default=None)


def mean_and_interval(values: Sequence[float]) -> str:
    """The mean with its 95% interval, as "46.6 ± 5.2"; of a single value, the value."""
    mean = f"{statistics.mean(values):.1f}"
    return f"{mean} ± {half_width(values):.1f}" if len(values) > 1 else mean


def half_width(values: Sequence[float]) -> float:
    """Half of the 95% interval of the mean of at least two values."""
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, len(values) - 1) > 0.025 else (low, middle)
    return high * statistics.stdev(values) / math.sqrt(len(values))


def faults(entry: Entry) -> list[str]:
    """The faults of an entry's claim, as phrases; none if the claim holds."""
    figures, found = entry["figures"], []
    which, runs = figures["class"], figures["runs"]
    current = CLASSES.get(which["name"])
    if current is None or asdict(current) != which:
        found.append(f"the rules of {which['name']!r} are others")
    if digest(figures["source"]) != figures["source_sha256"]:
        found.append("the recipe is not the one that ran")
    seeds = {run["seed"] for run in runs}
    if len(seeds) < FEWEST_SEEDS:
        found.append(f"{len(seeds)} of {FEWEST_SEEDS} seeds")
    if has_repeated([run["curve"] for run in runs]):
        found.append("two seeds gave the same curve")
    for run in runs:
        where = at_target(run["curve"], which["target"])
        if where is None:
            found.append(f"seed {run['seed']} did not reach the target")
        elif not np.allclose((run["tokens"], run["seconds"]), where[:2], rtol=0.01):
            found.append(f"seed {run['seed']}: tokens or seconds are not those of its curve")
        elif run["fresh_bits"] is not None and run["fresh_bits"] > SAME * run["curve"][-1][2]:
            found.append(f"seed {run['seed']} is worse on fresh text")
    return found


def board_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Entries of one class and machine as rows of a table, the fastest first.

    An entry is called faster than another only if the chance of that between equals is below 5%.
    """
    ranked = sorted(entries, key=lambda entry: statistics.mean(times(entry)))
    rows = []
    for number, entry in enumerate(ranked):
        figures, mine = entry["figures"], times(entry)
        runs = figures["runs"]
        slower = [
            other["figures"]["entry"] for other in ranked[number + 1 :] if not doubt(entry, other)
        ]
        wall = statistics.mean(run["seconds"] for run in runs)
        processor = statistics.mean(run["processor_s"] for run in runs)
        rows.append(
            {
                "entry": figures["entry"],
                "seconds": mean_and_interval(mine),
                "wall (s)": f"{wall:.1f}",
                "processor (s)": f"{processor:.1f}",
                "tokens": f"{statistics.mean(tokens(entry)):,.0f}",
                "seeds": len(runs),
                "faster than": ", ".join(slower[:1]) or "–",
                "date": entry["date"][:10],
                "source": figures["source_sha256"][:8],
                "claim": "; ".join(faults(entry)) or "✓",
            }
        )
    return rows


def leaderboard(entries: Sequence[Entry]) -> str:
    """The board as Markdown: a table for each class and machine."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        key = (entry["figures"]["class"]["name"], machine_of(entry))
        groups.setdefault(key, []).append(entry)
    lines = [
        "# Leaderboard",
        "",
        "Made by `python -m lib race board` from the records beside it, a file for each entry.",
        "Seconds are means over seeds that the referee drew, with 95% intervals. *Faster than*",
        "names the next entry that is slower with p < 0.05 (Welch's t-test, one-sided), and needs",
        "more tokens or 15% more seconds, which load can explain. Those between are not told",
        "apart.",
    ]
    for (name, machine), group in sorted(groups.items()):
        lines += ["", f"## {name}: {machine}", "", to_markdown(board_rows(group)).rstrip()]
    return "\n".join(lines) + "\n"


def write_leaderboard(folder: Path = FOLDER) -> Path:
    """Write the board of a folder's entries."""
    path = folder / LEADERBOARD.name
    write_atomically(path, leaderboard(read_entries(folder)))
    return path


# A picture to share


def counted(run: Mapping[str, Any], clock: str) -> dict[float, float]:
    """Seconds that count -> bits per byte; processor time passes evenly with the wall's."""
    scale = run[clock] / run["seconds"]
    return {scale * seconds: bits for _, seconds, bits in run["curve"]}


def draw_card(entry: Entry, path: Path) -> Path:
    """Draw an entry: its curves, the story at the target, seconds, and what it changes of ours."""
    from lib.core.charts import lines
    from lib.core.figures import house_figure, save_figure

    figures = entry["figures"]
    story = re.sub(r"\s+", " ", figures["runs"][0]["story"])
    if not re.search(r'[.!?]"?$', story):
        story += " …"
    parent, changed = changes(figures["source"])
    changed = [f"{line[0]} {line[1:].strip()}"[:70] for line in changed if line.strip("+- ")]
    if len(changed) > CHANGES_SHOWN:
        changed[CHANGES_SHOWN:] = [f"… and {len(changed) - CHANGES_SHOWN} lines more"]
    text = [
        f"{figures['class']['name']} on {machine_of(entry)}",
        *figures.get("compared", "").split("\n"),
        "",
        *textwrap.wrap(textwrap.shorten(story, 600, placeholder=" …"), 70),
    ]
    text += ["", f"What differs from {parent}.py:", *changed]
    with house_figure(width=12, height=6.3, ncols=2) as (figure, (left, right)):
        lines(
            {
                f"run {number}": counted(run, clock_of(entry))
                for number, run in enumerate(figures["runs"], start=1)
            },
            axes=left,
            title=f"{figures['entry']}: {mean_and_interval(times(entry))} s",
            xlabel="seconds",
            ylabel="bits per byte",
            levels={"target": figures["class"]["target"]},
        )
        right.axis("off")
        look: dict = {"va": "top", "family": "monospace", "fontsize": 8.5, "parse_math": False}
        right.text(0, 1, "\n".join(text), **look)
        return save_figure(figure, path)
