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
    launch,
    rank,
    world_size,
)
from lib.files import make_folder, write_atomically
from lib.hardware import keep_freed_memory, pick_dtype
from lib.report import Record, append_record, new_record, read_records
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


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What a benchmark consists of: functions of a file, which its ranks import by their names."""

    records: str
    """The file's name in the folder `output`."""

    subject: str
    """The setting of a case that is the subject of its plan."""

    settled: Callable[..., Any]
    """`(config, ranks, on_gpu=)`: the config for so many ranks, on GPUs or not."""

    make_plans: Callable[[Any], list[Plan]]
    """`(config)`: what is measured together."""

    make_turns: Callable[..., Turns]
    """`(config, plan, groups, dtype, folder)`: a plan's trainings, as one rank takes part."""

    line: Callable[[Record], str]
    """What is printed of a record."""

    write_report: Callable[[Sequence[Record], Path], Any]
    """`(records, folder)`: tables and figures."""

    known: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Figures of a case that need no measurement."""

    def records_before(self, config: Any) -> int:
        """How many records are there; it is found out now if they cannot be written."""
        make_folder(config.output)
        path = config.output / self.records
        with open(path, "ab"):
            pass
        return len(read_records(path))

    def keep(self, figures: dict[str, Any], case: dict[str, Any], config: Any) -> Record:
        """Add the record of a training to those in `output`."""
        device = torch.device("cuda" if case["backend"] == "nccl" else "cpu")
        figures = {**self.known(case), **figures}
        record = new_record(figures, config=case, seed=config.seed, device=device)
        append_record(config.output / self.records, record)
        return record


def run_benchmark(benchmark: Benchmark, config: Any) -> list[Record]:
    """Measure what `config` names, and write tables and figures of all records in its `output`.

    Starts its ranks itself, or is one of those that `torchrun` started, of which rank 0 writes. A
    training that fails is a record of status `refused`, `oom` or `failed` with its reason; of ranks
    started here the rest is measured by new ones.

    Returns:
        The records of this call; under `torchrun` those of rank 0, none elsewhere.

    Raises:
        ValueError: settings that do not fit together or this machine.
        OSError: `output` cannot be written; found out before anything is measured.
        WorkerError: a rank failed before the first training.
    """
    if "RANK" in os.environ or dist.is_initialized():
        with init_from_environment(config.backend, timeout=config.timeout) as device:
            config = benchmark.settled(config, world_size(), on_gpu=device.type == "cuda")
            before = benchmark.records_before(config)
            measure(benchmark, config, benchmark.make_plans(config), None)
            if rank() != 0:
                return []
    else:
        gpus = torch.cuda.device_count() if config.backend != "gloo" else 0
        ranks = config.ranks or gpus or 2
        on_gpu = config.backend == "nccl" or gpus >= ranks
        config = benchmark.settled(config, ranks, on_gpu=on_gpu)
        before = benchmark.records_before(config)
        launch_plans(benchmark, config)
    records = read_records(config.output / benchmark.records)
    benchmark.write_report(records, config.output)
    return records[before:]


def launch_plans(benchmark: Benchmark, config: Any) -> None:
    """Measure in ranks started for it; where a training ends them, the rest in new ones."""
    plans = benchmark.make_plans(config)
    options = {"backend": config.backend, "timeout": config.timeout}
    while plans:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            try:
                launch(measure, config.ranks, benchmark, config, plans, Path(folder), **options)
                return
            except WorkerError as error:
                note = read_notes(Path(folder), error.rank)
                if note is None:
                    raise
                first_line = str(error).splitlines()[0]
        subject, name = note["case"][benchmark.subject], note["name"]
        status, reason = note.get("status", "failed"), note.get("reason", first_line)
        plans, is_over = after_failure(plans, subject, name, status)
        if is_over:
            benchmark.keep({"status": status, "reason": reason}, note["case"], config)
        what = f"{subject}, {name or 'one process'}: {status}, {reason}"
        print(what if is_over else f"{what}; again, with less in memory", flush=True)


def measure(benchmark: Benchmark, config: Any, plans: Sequence[Plan], folder: Path | None) -> None:
    """What each rank does; rank 0 keeps and prints the records of each plan once it is done.

    Args:
        folder: where each rank leaves word of what it is doing.
    """
    device = current_device()
    if device.type == "cpu":
        keep_freed_memory()
    dtype = str(pick_dtype(device, config.dtype)).removeprefix("torch.")
    groups = Groups.make(config.timeout)
    started = datetime.now(timezone.utc).isoformat()
    with numerics(tf32=config.tf32, deterministic=False):
        for plan in plans:
            turns = benchmark.make_turns(config, plan, groups, dtype, folder)
            for name, figures in turns.run(config.timed_epochs).items():
                if rank() == 0:
                    case = to_dict(turns.cases[name])
                    record = benchmark.keep({"launch": started, **figures}, case, config)
                    print(benchmark.line(record), flush=True)
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
