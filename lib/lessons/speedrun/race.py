"""The race of notebook 12: its rules, how a recipe is edited, and the leaderboard.

A recipe is a generator, `recipe(race, seed)`. It builds a model, and after each training step
yields it with the number of tokens of that step.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import linecache
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lib.core.files import ROOT
from lib.core.hardware import pick_device
from lib.core.records import append_record, new_record, read_records
from lib.core.settings import require
from lib.data.batches import get_batch
from lib.data.prepare import TokenizeConfig
from lib.data.token_array import load_token_array
from lib.lessons.notebook import workspace
from lib.tokenizer import Tokenizer
from lib.training.evaluation import bytes_of_token, evaluate

if TYPE_CHECKING:
    from IPython.display import Markdown

    from lib.model import TransformerLM

RECORDS = ROOT / "artifacts/speedrun_race.jsonl"
# A claim needs as many runs, each with a seed of its own.
FEWEST_SEEDS = 3
# Sequences that are judged at a time.
JUDGED_AT_ONCE = 16

Recipe = Callable[["Race", int], Iterator[tuple["TransformerLM", int]]]


class Judged(NamedTuple):
    """A point of a run: the model was judged."""

    tokens: float
    """That were trained on."""

    seconds: float
    """Training time; judging does not count."""

    bits: float
    """Per byte of the validation text."""


@dataclass(frozen=True)
class Race:
    """The rules of a race, and its data."""

    train_tokens: np.ndarray
    validation_tokens: np.ndarray
    """One more than there are targets."""

    bytes_of_token: np.ndarray
    """Bytes of text of each token id."""

    target: float
    """Bits per byte on the validation tokens that end a run."""

    judged_every: int
    """Training tokens from one judgment to the next."""

    limit: float
    """Seconds of training after which a run ends without the target."""

    device: torch.device

    by_processor: bool = False
    """Count the processor time of this process, which other work hardly changes, not seconds on
    the wall; for one thread on a CPU."""

    board: Path | None = None
    """The leaderboard that entries go to; None: the reader's own, `board_file()`."""

    handed_out: list[int] = field(default_factory=list)
    """The tokens of each batch so far."""

    @classmethod
    def on(
        cls,
        text: TokenizeConfig,
        *,
        validation_tokens: int,
        target: float,
        judged_every: int,
        limit: float,
    ) -> Race:
        """Return a race on the tokens in `text.output_dir`.

        Args:
            validation_tokens: how many are predicted, from the start of the held-out text.
        """
        tokenizer = Tokenizer.load(text.output_dir)
        parts = [
            load_token_array(text.output_dir / f"{part}.npy", tokenizer=tokenizer)
            for part in ("train", "validation")
        ]
        held_out = parts[1][: validation_tokens + 1]
        found = len(held_out) - 1
        require(found == validation_tokens, f"validation_tokens must be at most {found}")
        sizes = bytes_of_token(tokenizer)
        return cls(parts[0], held_out, sizes, target, judged_every, limit, pick_device("auto"))

    @property
    def vocab_size(self) -> int:
        return len(self.bytes_of_token)

    def batch(
        self, size: int, length: int, generator: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Training sequences from places that `generator` draws: x and y, both (size, length)."""
        x, y = get_batch(self.train_tokens, size, length, self.device, generator=generator)
        self.handed_out.append(x.numel())
        return x, y

    def clock(self) -> float:
        """The time in seconds, once the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.process_time() if self.by_processor else time.perf_counter()

    def judge(self, model: TransformerLM) -> float:
        """The bits per byte of `model` on the validation tokens.

        Raises:
            ValueError: they are not finite.
        """
        bits = evaluate(
            model,
            self.validation_tokens,
            self.bytes_of_token,
            batch_size=JUDGED_AT_ONCE,
            device=self.device,
        ).bits_per_byte
        require(math.isfinite(bits), f"the model is at {bits} bits per byte; try a lower rate")
        return bits

    def rules(self) -> dict[str, Any]:
        """The settings that two runs must share to be compared."""
        targets = self.validation_tokens[1:]
        content = np.ascontiguousarray(self.validation_tokens, dtype=np.int64)
        return {
            "target": self.target,
            "judged_every": self.judged_every,
            "validation_tokens": len(targets),
            "validation_bytes": int(self.bytes_of_token[targets].sum()),
            "validation_sha256": hashlib.sha256(content.tobytes()).hexdigest()[:16],
        }


def at_target(curve: Sequence[tuple], target: float) -> Judged | None:
    """Where the line through the judged points first reaches `target`; None if it does not."""
    before = None
    for point in map(Judged._make, curve):
        if point.bits <= target:
            if before is None:
                return point
            share = (before.bits - target) / (before.bits - point.bits)
            return Judged(*(a + share * (b - a) for a, b in zip(before, point)))
        before = point
    return None


# Recipes as text


def edit(recipe: Recipe, *changes: Mapping[str, str]) -> Recipe:
    """`recipe` with texts of its source replaced: old -> new, each old text occurring once.

    Raises:
        ValueError: an old text does not occur exactly once.
    """
    source = source_of(recipe)
    for old, new in (pair for change in changes for pair in change.items()):
        count = source.count(old)
        require(count == 1, f"{old!r} must occur once in the recipe, found {count} times")
        source = source.replace(old, new)
    return compiled(source, recipe.__globals__, recipe.__name__)


def compiled(source: str, names: Mapping[str, Any], name: str) -> Any:
    """The function `name` that `source` defines; its source can be read again."""
    file = f"<{name} {hashlib.sha256(source.encode()).hexdigest()[:8]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = dict(names)
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


def source_of(recipe: Recipe) -> str:
    """The source of `recipe`, as it is in its cell."""
    return textwrap.dedent(inspect.getsource(recipe))


def digest(recipe: Recipe) -> str:
    """A short hash of the source of `recipe`."""
    return hashlib.sha256(source_of(recipe).encode()).hexdigest()[:16]


def show_diff(before: Recipe, after: Recipe) -> Markdown:
    """The lines that differ between two recipes."""
    from IPython.display import Markdown

    old, new = (source_of(one).split("\n") for one in (before, after))
    lines = difflib.unified_diff(old, new, n=0)
    shown = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return Markdown("```diff\n" + "\n".join(shown) + "\n```")


# The leaderboard


def board_file() -> Path:
    """The reader's own leaderboard; git ignores it."""
    return workspace() / "artifacts/local/speedrun_leaderboard.jsonl"


def entry_of(
    race: Race,
    name: str,
    recipe: Recipe,
    curves: Mapping[int, Sequence[tuple]],
) -> dict[str, Any]:
    """An entry for the leaderboard: one run for each seed.

    Args:
        name: the recipe, or what it changes.
        curves: seed -> what `run_to_target` returned.
    """
    runs = []
    for seed, curve in curves.items():
        found = at_target(curve, race.target)
        runs.append(
            {
                "seed": seed,
                "tokens": found and found.tokens,
                "seconds": found and found.seconds,
                "curve": [[round(value, 4) for value in point] for point in curve],
            }
        )
    figures: dict[str, Any] = {"recipe": name, "source": source_of(recipe)}
    figures["source_sha256"] = digest(recipe)
    clock = "processor" if race.by_processor else "wall"
    figures |= {"rules": race.rules(), "threads": torch.get_num_threads(), "clock": clock}
    figures["runs"] = runs
    return new_record(figures, device=race.device)


def enter(
    race: Race,
    name: str,
    recipe: Recipe,
    curves: Mapping[int, Sequence[tuple]],
) -> dict[str, Any]:
    """Write `entry_of` the same arguments into the race's leaderboard, and return it."""
    entry = entry_of(race, name, recipe, curves)
    append_record(race.board or board_file(), entry)
    return entry


def faults(entry: Mapping[str, Any], race: Race) -> list[str]:
    """The faults of an entry's claim, as phrases; none if the claim holds."""
    figures, found = entry["figures"], []
    rules, runs = race.rules(), figures["runs"]
    for name, value in rules.items():
        if figures["rules"].get(name) != value:
            found.append(f"{name} is {figures['rules'].get(name)}, not {value}")
    if hashlib.sha256(figures["source"].encode()).hexdigest()[:16] != figures["source_sha256"]:
        found.append("the recipe is not the one that ran")
    seeds = {run["seed"] for run in runs if isinstance(run["seed"], int)}
    if len(seeds) < FEWEST_SEEDS:
        found.append(f"{len(seeds)} of {FEWEST_SEEDS} seeds")
    scores = {tuple(bits for _, _, bits in run["curve"]) for run in runs}
    if len(scores) < len(runs):
        found.append("two seeds gave the same curve; draw weights and batches with `seed`")
    for run in runs:
        curve = [Judged(*point) for point in run["curve"]]
        where = at_target(curve, rules["target"])
        if where is None:
            found.append(f"seed {run['seed']} did not reach the target")
            continue
        if not np.allclose((run["tokens"], run["seconds"]), where[:2], rtol=0.01):
            found.append(f"seed {run['seed']}: tokens or seconds are not those of its curve")
        steps = zip([Judged(0, 0.0, 0.0), *curve], curve)
        if not all(b.tokens - a.tokens >= rules["judged_every"] for a, b in steps):
            found.append(f"seed {run['seed']} was judged too often")
    return found


def summary(entry: Mapping[str, Any]) -> dict[str, float] | None:
    """Medians over the seeds: tokens to the target, tokens/s and seconds; None if it failed."""
    runs = [run for run in entry["figures"]["runs"] if run["seconds"] is not None]
    if len(runs) < len(entry["figures"]["runs"]):
        return None
    return {
        "tokens to target": median(run["tokens"] for run in runs),
        "tokens/s": median(run["tokens"] / run["seconds"] for run in runs),
        "seconds": median(run["seconds"] for run in runs),
        "fastest": min(run["seconds"] for run in runs),
        "slowest": max(run["seconds"] for run in runs),
    }


def threads_of(entry: Mapping[str, Any]) -> str:
    """Say how many threads computed, and by which clock."""
    count = entry["figures"]["threads"]
    clock = ", processor time" if entry["figures"]["clock"] == "processor" else ""
    return f"{count} thread{'s' if count > 1 else ''}{clock}"


def reference_entries() -> dict[str, dict[str, Any]]:
    """The committed entries, which `python -m lib lessons race` made: recipe -> entry."""
    return {entry["figures"]["recipe"]: entry for entry in read_records(RECORDS)}


def board_rows(race: Race, mine: Sequence[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The leaderboard as rows of a table, the fastest first: the committed entries and `mine`.

    Entries under other rules are left out.

    Args:
        mine: by default those of the race's board.
    """
    mine = read_records(race.board or board_file()) if mine is None else mine
    entries: list[tuple[str, Mapping[str, Any]]]
    entries = [("committed", entry) for entry in reference_entries().values()]
    entries += [("yours", entry) for entry in mine]
    rows = []
    for whose, entry in entries:
        if entry["figures"]["rules"] != race.rules() or (found := summary(entry)) is None:
            continue
        wrong = faults(entry, race)
        rows.append(
            {
                "recipe": entry["figures"]["recipe"],
                "seconds": round(found["seconds"], 1),
                "tokens to target": round(found["tokens to target"], -2),
                "tokens/s": round(found["tokens/s"], -1),
                "device": f"{entry['device']}, {threads_of(entry)}",
                "seeds": ", ".join(str(run["seed"]) for run in entry["figures"]["runs"]),
                "whose": whose,
                "claim": "; ".join(wrong) or "✓",
            }
        )
    return sorted(rows, key=lambda row: row["seconds"])
