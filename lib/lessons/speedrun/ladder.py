"""The ladder: from the plain recipe to the fastest known, one idea a step, each an edit.

`python -m lib race ladder` races every recipe with three seeds and records what each idea gains.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from lib.core.files import ROOT
from lib.core.records import read_records
from lib.lessons.speedrun.board import (
    P_VALUE,
    Entry,
    chance_of_faster,
    mean_and_interval,
    times,
    tokens,
)
from lib.lessons.speedrun.race import RECIPES, edited

# Muon (Jordan et al. 2024): for a matrix, the nearest orthogonal one to its averaged gradient.
MUON = """def orthogonal(gradient):
    x = gradient / (gradient.norm() + 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(3):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.T if is_tall else x


@torch.no_grad()
def muon_step(matrices, averages, lr):
    for p, average in zip(matrices, averages):
        average.lerp_(p.grad, 0.05)
        update = orthogonal(p.grad.lerp(average, 0.95))
        p.add_(update, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)
        p.grad = None


def recipe(race, seed):
"""
# What it leaves to AdamW: the embedding, the head, and the gains.
ALL_MATRICES = "    matrices = [p for p in model.parameters() if p.ndim >= 2]\n"
BLOCKS = """    blocks = [p for p in model.layers.parameters() if p.ndim >= 2]
    averages = [torch.zeros_like(p) for p in blocks]
    matrices = [model.token_embeddings.weight, model.lm_head.weight]
"""
COSINE = (
    "        lr = cosine_lr(step, max_lr=1.2e-2, min_lr=1.2e-3, warmup_steps=100, "
    "cosine_steps=1200)\n"
)
LOSS = "        loss = model.loss(x, y)\n"
DRAWS = "    draws = np.random.default_rng(seed)\n"
COMPILE = "    compiled_loss = torch.compile(model.loss{})\n"
COMPILED_LOSS = "        loss = compiled_loss(x, y)\n"
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
ZERO_START = """    for name, weight in model.named_parameters():
        if "output_proj" in name or "w2" in name:
            torch.nn.init.zeros_(weight)
    blocks = ["""
# Idea -> its edit, each on top of those before it.
KEPT: dict[str, dict[str, str]] = {
    "higher rate": {"max_lr=1e-3, min_lr=1e-4": "max_lr=4e-3, min_lr=4e-4"},
    "schedule that ends with the run": {"cosine_steps=3000": "cosine_steps=1200"},
    "vocabulary of 2,048": {"VOCAB_SIZE = 1024": "VOCAB_SIZE = 2048"},
    "two layers": {"num_layers=4": "num_layers=2"},
    "zero start into the residual stream": {
        "    matrices = [": ZERO_START.replace("blocks", "matrices"),
    },
    "QK-norm": {"d_ff=352,": "d_ff=352, qk_norm=True,"},
    "Muon for matrices": {
        "def recipe(race, seed):\n": MUON,
        ALL_MATRICES: BLOCKS,
        "        optimizer.step()\n": """        muon_step(blocks, averages, 7.5 * lr)
        optimizer.step()
""",
        "        clip_grad_norm(model.parameters(), 1.0)\n": "",
        "AdamW, clip_grad_norm, cosine_lr": "AdamW, cosine_lr",
    },
    "rates of their own": {
        "max_lr=4e-3, min_lr=4e-4": "max_lr=1.2e-2, min_lr=1.2e-3",
        "7.5 * lr": "2.5 * lr",
    },
    "linear decay": {
        COSINE: "        lr = 1.2e-2 * min(1, step / 10, max(0.02, (900 - step) / 450))\n",
        "AdamW, cosine_lr": "AdamW",
    },
    "decay that ends at the target": {"(900 - step) / 450": "(780 - step) / 390"},
}
# Tried on top of all that are kept.
TRIED: dict[str, dict[str, str]] = {
    "tied embeddings": {
        "qk_norm=True,": "qk_norm=True, tied_embeddings=True,",
        "[model.token_embeddings.weight, model.lm_head.weight]": "[model.token_embeddings.weight]",
    },
    "batch ramp": {"race.batch(8,": "race.batch(4 if step < 200 else 8,"},
    "short sequences": {"context_length=128": "context_length=64"},
    "vocabulary of 4,096": {"VOCAB_SIZE = 2048": "VOCAB_SIZE = 4096"},
    "three layers": {"num_layers=2": "num_layers=3"},
    "no weight decay": {'"weight_decay": 0.1': '"weight_decay": 0.0'},
    # a step that cost seconds when it came may be needed by a later one
    "all but the zero start": {ZERO_START: "    blocks = ["},
    "all but QK-norm": {"d_ff=352, qk_norm=True,": "d_ff=352,"},
    "all but Muon": {
        "        muon_step(blocks, averages, 2.5 * lr)\n": "",
        "        optimizer.step()\n": CLIP + "        optimizer.step()\n",
        "    matrices = [model.token_embeddings.weight, model.lm_head.weight]\n": ALL_MATRICES,
        "1.2e-2 * min": "4e-3 * min",
    },
    "bfloat16": {
        LOSS: "        with torch.autocast(race.device.type, torch.bfloat16):\n    " + LOSS,
    },
    "FlashAttention of our own": {
        "qk_norm=True,": 'qk_norm=True, attention_kernel="flash_attention_triton",'
    },
    "torch.compile": {DRAWS: DRAWS + COMPILE.format(""), LOSS: COMPILED_LOSS},
    "CUDA graphs": {
        DRAWS: DRAWS + COMPILE.format(", mode='reduce-overhead'"),
        LOSS: COMPILED_LOSS,
    },
}
# These need a GPU.
ON_GPU = ("FlashAttention of our own", "torch.compile", "CUDA graphs")
SEEDS = (1, 2, 3)
RECORDS = ROOT / "artifacts/race_ladder.jsonl"
# A climb that pauses for longer may go on on another machine of the same name.
LONGEST_PAUSE = timedelta(minutes=4)


def start() -> str:
    """The source of the plain recipe."""
    return (RECIPES / "start.py").read_text(encoding="utf-8")


@functools.cache
def recipes() -> dict[str, str]:
    """Idea -> source of the recipe with it: those that are kept, then those that were tried."""
    found = {"start": start()}
    for name, change in KEPT.items():
        found[name] = edited([*found.values()][-1], change)
    best = [*found.values()][-1]
    return found | {name: edited(best, change) for name, change in TRIED.items()}


def before(name: str) -> str:
    """The recipe that an idea changes; the plain one stands beside itself."""
    kept = ["start", *KEPT]
    return kept[max(0, kept.index(name) - 1)] if name in kept else kept[-1]


def best() -> str:
    """The source of the fastest recipe known: all ideas that are kept."""
    return recipes()[[*KEPT][-1]]


def read(path: Path = RECORDS) -> dict[str, list[dict[str, Any]]]:
    """Device -> its records, in the order of the file."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(path):
        found.setdefault(record["device"], []).append(record)
    return found


class Step(NamedTuple):
    """An idea on a device, beside the recipe that it changes."""

    tokens: float
    """To the target, the mean over the seeds."""

    seconds: list[float]
    """Seconds of each seed's run."""

    before: list[float] | None
    """Seconds of the recipe that it changes; None if one climb did not measure both."""

    @property
    def gain(self) -> float | None:
        """Times as fast as the recipe before."""
        return statistics.mean(self.before) / statistics.mean(self.seconds) if self.before else None

    @property
    def chance(self) -> float:
        """That two equally fast recipes differ by so much: p, two-sided."""
        if self.before is None:
            return 1.0
        a, b = self.seconds, self.before
        return 2 * min(chance_of_faster(a, b), chance_of_faster(b, a))


def climbs(records: Sequence[Entry]) -> list[dict[str, Entry]]:
    """The climbs of a device, each idea -> record, the one with most ideas first.

    The records of a climb are of one machine, and follow one another without a long pause.
    """
    found: list[dict[str, Entry]] = []
    last: tuple[Any, datetime] | None = None
    for entry in sorted(records, key=lambda entry: (host_of(entry), entry["date"])):
        ended = datetime.fromisoformat(entry["date"])
        began = ended - timedelta(seconds=sum(run["seconds"] for run in entry["figures"]["runs"]))
        if last is None or host_of(entry) != last[0] or began - last[1] > LONGEST_PAUSE:
            found.append({})
        found[-1][entry["figures"]["entry"]] = entry
        last = host_of(entry), ended
    return sorted(found, key=len, reverse=True)


def host_of(entry: Entry) -> tuple[str, int]:
    """The system and the cores that were given, which tell machines of one name apart."""
    return entry["platform"], entry["cores"]


def steps(records: Sequence[Entry]) -> dict[str, Step]:
    """Idea -> its step on a device, from the largest climb that has the idea."""
    found, measured = {}, climbs(records)
    for name in recipes():
        having = [climb for climb in measured if name in climb]
        if not having:
            continue
        entry, other = having[0][name], having[0].get(before(name))
        its_before = times(other) if other else None
        found[name] = Step(statistics.mean(tokens(entry)), times(entry), its_before)
    return found


def rows(measured: Mapping[str, Sequence[Entry]]) -> list[dict[str, Any]]:
    """The ladder as rows of a table; gains by chance in less than 5% are starred.

    A gain names the seconds that it is over where they are of another climb than those above.
    """
    columns = {
        re.sub(r"\(R\)| Processor|NVIDIA ", "", name): steps(measured[name]) for name in measured
    }
    found = []
    for name in recipes():
        row = {"idea": name, "kept": "–" if name in TRIED else "✓"}
        for device, its in columns.items():
            cells = cells_of(name, its) if name in its else ("", "", "")
            named = zip(("tokens", "seconds", "times as fast"), cells)
            row |= {f"{device}: {what}": cell for what, cell in named}
        if any(name in its for its in columns.values()):
            found.append(row)
    return found


def cells_of(name: str, its: Mapping[str, Step]) -> tuple[str, str, str]:
    """Tokens, seconds and gain of an idea, as text."""
    step, gain = its[name], ""
    if step.gain and step.before and name != "start":
        gain = f"{step.gain:.2f}" + " *" * (step.chance < P_VALUE)
        if step.before not in [one.seconds for one in its.values()]:
            gain += f" (over {statistics.mean(step.before):.1f} s)"
    return f"{step.tokens:,.0f}", mean_and_interval(step.seconds), gain
