"""Benchmarks of trainings on several ranks that take turns, and what becomes of those that fail.

All trainings are measured by one set of processes. Those of one plan take turns, an epoch at a
time, every other round in reverse order, so that all of them see the same machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from lib.allocations import free_memory, is_out_of_memory
from lib.benchmark_lm_matrix_cases import spread
from lib.benchmark_lm_matrix_training import Groups, Training
from lib.distributed import (
    WorkerError,
    current_device,
    init_from_environment,
    rank,
    world_size,
)
from lib.files import write_atomically
from lib.hardware import keep_freed_memory, pick_dtype
from lib.report import Record
from lib.strict_json import to_dict
from lib.train_step import numerics


@dataclasses.dataclass(frozen=True)
class Plan:
    """The trainings that take turns."""

    subject: str
    """What they have in common, such as an attention kernel or a model."""

    names: tuple[str, ...]
    """What they differ in, such as the data-parallel wrapper."""

    is_together: bool = True
    """Whether all their models may be in memory at once."""

    has_reference: bool = True
    """Whether one process trains on the same batches first, for its losses."""


class Turns:
    """The trainings of one plan, as one rank takes part in them.

    A benchmark says in `start` how one begins, in `figures` what is measured of those that ran, and
    in `ends` what to keep of one before it may be dropped.

    Args:
        cases: what is trained, by name.
        is_together: whether trainings are held in memory, and not begun anew for each turn.
        folder: where this rank leaves word of what it is doing.
    """

    def __init__(self, cases: Mapping[str, Any], folder: Path | None, *, is_together: bool) -> None:
        self.cases, self.folder, self.is_together = cases, folder, is_together
        self.held: dict[str, Training] = {}

    def start(self, name: str) -> Training:
        """A training after its warm-up."""
        raise NotImplementedError

    def figures(self, times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
        """The figures of each training that ran, the same on all ranks.

        Args:
            times: for each of them milliseconds a step, turn by turn, on this rank.
        """
        raise NotImplementedError

    def ends(self, name: str, training: Training) -> None:
        """Called when a training's turn is over."""

    def run(self, timed_epochs: int) -> dict[str, dict[str, Any]]:
        """The figures of each training, those that were refused included."""
        times: dict[str, list[float]] = {}
        refused: dict[str, dict[str, Any]] = {}
        for name in self.cases:
            try:
                with self.training(name):
                    times[name] = []
            except ValueError as error:
                # raised on all ranks alike, before they wait for one another
                free_memory(error)
                refused[name] = {"status": "refused", "reason": str(error)}
        for turn in range(timed_epochs):
            for name in times if turn % 2 == 0 else reversed(times):
                with self.training(name) as training:
                    times[name].append(training.epoch_ms())
        rows = self.figures(times)
        done = {name: {"status": "ok", **row} for name, row in rows.items()}
        return {name: (done | refused)[name] for name in self.cases}

    def drop(self) -> None:
        """Free all models."""
        self.held.clear()
        free_memory()

    @contextlib.contextmanager
    def training(self, name: str) -> Iterator[Training]:
        """A warm training: one that is held, or one for the block."""
        with self.noted(self.cases[name], name):
            training = self.held.get(name) or self.start(name)
            if self.is_together:
                self.held[name] = training
            yield training
            self.ends(name, training)
            if not self.is_together:
                # the frame that has it as the block's variable lives on
                training.step = None
                free_memory()

    @contextlib.contextmanager
    def noted(self, case: Any, name: str | None) -> Iterator[None]:
        """Leave word of what is done in the block, and of why it failed."""
        note = {"case": to_dict(case), "name": name}
        leave_note(self.folder, rank(), **note)
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            status = "oom" if is_out_of_memory(error) else "failed"
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            leave_note(self.folder, rank(), **note, status=status, reason=reason)
            raise


def run_on_ranks(
    config: Any,
    settled: Callable[..., Any],
    measure_here: Callable[[Any], None],
    measure_all: Callable[[Any], None],
) -> bool:
    """Measure as one of the ranks that `torchrun` started, or in ranks started for it.

    Args:
        settled: gives `config` for so many ranks, on GPUs or not.
        measure_here: measures as this rank.
        measure_all: starts ranks that measure.

    Returns:
        Whether this process is to report.
    """
    if "RANK" in os.environ or dist.is_initialized():
        with init_from_environment(config.backend, timeout=config.timeout) as device:
            measure_here(settled(config, world_size(), on_gpu=device.type == "cuda"))
            return rank() == 0
    gpus = torch.cuda.device_count() if config.backend != "gloo" else 0
    ranks = config.ranks or gpus or 2
    measure_all(settled(config, ranks, on_gpu=config.backend == "nccl" or gpus >= ranks))
    return True


def launch_plans(
    start: Callable[..., Any],
    plans: Sequence[Plan],
    subject_of: Callable[[dict[str, Any]], str],
    keep: Callable[[dict[str, Any], dict[str, Any]], Any],
) -> None:
    """Measure in ranks started for it; where a training ends them, the rest in new ones.

    Args:
        start: starts ranks that measure plans, given those and the folder for the ranks' notes.
        subject_of: the plan's subject, from the settings of a training.
        keep: adds the record of a training that failed, from its figures and settings.

    Raises:
        WorkerError: a rank failed before the first training.
    """
    while plans:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            try:
                start(plans, Path(folder))
                return
            except WorkerError as error:
                note = read_notes(Path(folder), error.rank)
                if note is None:
                    raise
                first_line = str(error).splitlines()[0]
        subject, name = subject_of(note["case"]), note["name"]
        status, reason = note.get("status", "failed"), note.get("reason", first_line)
        plans, is_over = after_failure(plans, subject, name, status)
        if is_over:
            keep({"status": status, "reason": reason}, note["case"])
        what = f"{subject}, {name or 'one process'}: {status}, {reason}"
        print(what if is_over else f"{what}; again, with less in memory", flush=True)


def measure_plans(
    config: Any,
    plans: Sequence[Plan],
    make_turns: Callable[[Plan, Groups, str], Turns],
    keep: Callable[[dict[str, Any], dict[str, Any]], Record],
    line: Callable[[Record], str],
) -> None:
    """What each rank does; rank 0 keeps and prints the records of each plan once it is done.

    Args:
        make_turns: from plan, groups and the dtype's name.
        keep: adds the record of a training, from its figures and settings.
        line: what is printed of it.
    """
    device = current_device()
    if device.type == "cpu":
        keep_freed_memory()
    dtype = str(pick_dtype(device, config.dtype)).removeprefix("torch.")
    groups = Groups.make(config.timeout)
    started = datetime.now(timezone.utc).isoformat()
    with numerics(tf32=config.tf32, deterministic=False):
        for plan in plans:
            turns = make_turns(plan, groups, dtype)
            for name, figures in turns.run(config.timed_epochs).items():
                if rank() == 0:
                    record = keep({"launch": started, **figures}, to_dict(turns.cases[name]))
                    print(line(record), flush=True)
            turns.drop()
            if config.compile:
                torch.compiler.reset()


def from_all_ranks(value: Any) -> list[Any]:
    """What each rank gave."""
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def time_figures(case: Any, times: list[float]) -> dict[str, Any]:
    """Time and tokens of all ranks, from this rank's milliseconds a step, turn by turn."""
    # a turn's time is the ranks' mean; they differ where each trains alone
    means = [fmean(turn) for turn in zip(*from_all_ranks(times))]
    tokens = case.ranks * case.tr_batch_size * case.context_length
    return {
        "tokens_per_s": tokens / median(means) * 1e3,
        "median_ms": median(means),
        "iqr_ms": spread(means),
        "samples": len(means),
        "times_ms": means,
    }


def communication_figures(
    traced: tuple[float, float, float] | None, device: torch.device
) -> dict[str, Any]:
    """The ranks' mean of what `communication` gave on each; nothing where one does not know."""
    every = from_all_ranks(traced)
    if None in every:
        return {}
    names = ("communication_ms", "exposed_communication_ms", "traced_step_ms")
    figures: dict[str, Any] = {key: fmean(values) for key, values in zip(names, zip(*every))}
    return figures | {"exposed_from": "kernels" if device.type == "cuda" else "operators"}


def leave_note(folder: Path | None, rank: int, **facts: Any) -> None:
    """Write what `rank` is doing, for whoever finds it gone."""
    if folder is not None:
        write_atomically(folder / f"rank-{rank}.json", json.dumps({"time": time.time(), **facts}))


def read_notes(folder: Path, rank: int) -> dict[str, Any] | None:
    """The first note that says why its rank failed, else that of `rank`; None if it left none.

    Later failures come of the first: the others lose a rank that they wait for.
    """
    notes = {path.stem: json.loads(path.read_text()) for path in folder.glob("rank-*.json")}
    said = [note for note in notes.values() if "reason" in note]
    return min(said, key=lambda note: note["time"]) if said else notes.get(f"rank-{rank}")


def after_failure(
    plans: Sequence[Plan], subject: str, name: str | None, status: str
) -> tuple[list[Plan], bool]:
    """What is left to measure after a training of `subject` failed, and whether without it.

    Models that are too large together are tried one at a time, and only then left out. Name None:
    the training of one process failed, and the others are measured without it.
    """
    at = [plan.subject for plan in plans].index(subject)
    plan, later = plans[at], list(plans[at + 1 :])
    if name is None:
        return [dataclasses.replace(plan, has_reference=False), *later], False
    if status == "oom" and plan.is_together and len(plan.names) > 1:
        return [dataclasses.replace(plan, is_together=False), *later], False
    others = tuple(other for other in plan.names if other != name)
    return [dataclasses.replace(plan, names=others)] * bool(others) + later, True
