"""Training of a language model with each attention kernel in each data-parallel wrapper, in turns.

All cells are measured by one set of processes. With each kernel the wrappers take turns, an epoch
at a time, every other round in reverse order, so that all of them see the same machine. In the
baseline `none` each rank trains alone, in a group of its own, while the others do the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from lib.allocations import free_memory, is_out_of_memory
from lib.benchmark_lm_matrix_cases import (
    LmMatrixCase,
    Plan,
    after_failure,
    fits_together,
    leave_note,
    loss_difference,
    make_case,
    paired_figures,
    read_notes,
    settled,
    spread,
)
from lib.benchmark_lm_matrix_report import line, write_report
from lib.benchmark_lm_matrix_training import Groups, Training, communication, warmed_up
from lib.benchmark_step_cases import device_memory
from lib.config_lm_matrix import LmMatrixConfig
from lib.distributed import (
    WorkerError,
    current_device,
    init_from_environment,
    launch,
    rank,
    world_size,
)
from lib.files import make_folder
from lib.hardware import keep_freed_memory, pick_dtype
from lib.model_costs import num_parameters
from lib.report import Record, append_record, new_record, read_records
from lib.strict_json import to_dict
from lib.train_step import numerics

RECORDS = "lm_matrix.jsonl"


def benchmark_lm_matrix(config: LmMatrixConfig) -> list[Record]:
    """Measure what `config` names, and write tables and figures of all records in its `output`.

    Starts its ranks itself, or is one of those that `torchrun` started, of which rank 0 writes. A
    cell that fails is a record of status `refused`, `oom` or `failed` with its reason; of ranks
    started here the rest is measured by new ones.

    Returns:
        The records of this call; under `torchrun` those of rank 0, none elsewhere.

    Raises:
        ValueError: settings that do not fit together or this machine.
        OSError: `output` cannot be written; found out before anything is measured.
        WorkerError: a rank failed before the first cell.
    """
    make_folder(config.output)
    path = config.output / RECORDS
    # found out now and not after the first kernel
    with open(path, "ab"):
        pass
    before = len(read_records(path))
    if "RANK" in os.environ or dist.is_initialized():
        with init_from_environment(config.backend, timeout=config.timeout) as device:
            config = settled(config, world_size(), on_gpu=device.type == "cuda")
            measure(config, make_plans(config), None)
            if rank() != 0:
                return []
    else:
        gpus = torch.cuda.device_count() if config.backend != "gloo" else 0
        ranks = config.ranks or gpus or 2
        config = settled(config, ranks, on_gpu=config.backend == "nccl" or gpus >= ranks)
        measure_all(config)
    records = read_records(path)
    write_report(records, config.output)
    return records[before:]


def make_plans(config: LmMatrixConfig) -> list[Plan]:
    """What is measured together: a kernel in all wrappers."""
    has_reference = config.loss_steps > 0
    return [Plan(kernel, config.wrappers, True, has_reference) for kernel in config.kernels]


def measure_all(config: LmMatrixConfig) -> None:
    """Measure in ranks started for it; where a cell ends them, the rest in new ones."""
    plans = make_plans(config)
    while plans:
        with tempfile.TemporaryDirectory(prefix="lm-matrix-") as folder:
            options = {"backend": config.backend, "timeout": config.timeout}
            try:
                launch(measure, config.ranks, config, plans, Path(folder), **options)
                return
            except WorkerError as error:
                note = read_notes(Path(folder), error.rank)
                if note is None:
                    raise
                first_line = str(error).splitlines()[0]
        kernel, wrapper = note["case"]["kernel"], note["wrapper"]
        status, reason = note.get("status", "failed"), note.get("reason", first_line)
        plans, is_over = after_failure(plans, kernel, wrapper, status)
        if is_over:
            keep({"status": status, "reason": reason}, note["case"], config)
        what = f"{kernel}, {wrapper or 'one process'}: {status}, {reason}"
        print(what if is_over else f"{what}; again, with less in memory", flush=True)


def measure(config: LmMatrixConfig, plans: Sequence[Plan], folder: Path | None) -> None:
    """What each rank does; rank 0 adds the records of each kernel once it is done.

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
            cases = {name: make_case(config, plan.kernel, name, dtype) for name in plan.wrappers}
            turns = Turns(config, plan, cases, groups, folder)
            for name, figures in turns.run().items():
                if rank() == 0:
                    record = keep({"launch": started, **figures}, to_dict(cases[name]), config)
                    print(line(record), flush=True)
            turns.drop()
            if config.compile:
                torch.compiler.reset()


def keep(figures: dict[str, Any], case: dict[str, Any], config: LmMatrixConfig) -> Record:
    """Add the record of a cell to those in `output`."""
    device = torch.device("cuda" if case["backend"] == "nccl" else "cpu")
    record = new_record(figures, config=case, seed=config.seed, device=device)
    append_record(config.output / RECORDS, record)
    return record


class Turns:
    """The wrappers of one plan, as one rank measures them.

    Args:
        folder: as in `measure`.
    """

    def __init__(
        self,
        config: LmMatrixConfig,
        plan: Plan,
        cases: dict[str, LmMatrixCase],
        groups: Groups,
        folder: Path | None,
    ) -> None:
        self.config, self.plan, self.cases = config, plan, cases
        self.groups, self.folder = groups, folder
        self.device = current_device()
        memory = device_memory(self.device) or float("inf")
        if self.device.type == "cpu":
            memory /= world_size()
        self.is_together = plan.is_together and fits_together(list(cases.values()), memory)
        self.held: dict[str, Training] = {}
        self.losses: dict[str, list[float]] = {}
        self.memory: dict[str, int | None] = {}

    def run(self) -> dict[str, dict[str, Any]]:
        """The figures of each wrapper, the same on all ranks."""
        reference = self._reference() if self.plan.has_reference else []
        times: dict[str, list[float]] = {}
        refused: dict[str, str] = {}
        for name in self.cases:
            try:
                with self._training(name):
                    times[name] = []
            except ValueError as error:
                # raised on all ranks alike, before they wait for one another
                free_memory(error)
                refused[name] = str(error)
        for turn in range(self.config.timed_epochs):
            for name in times if turn % 2 == 0 else reversed(times):
                with self._training(name) as training:
                    times[name].append(training.epoch_ms())
        rows = {}
        for name in times:
            with self._training(name) as training:
                traced = communication(training, self.config.trace_steps, self.groups.hosts)
            rows[name] = self._figures(name, times[name], reference, traced)
        further = paired_figures(rows)
        shared = {"parameters": num_parameters(next(iter(self.cases.values())).shape)}
        done = {n: {"status": "ok", **shared, **rows[n], **further[n]} for n in rows}
        failed = {n: {"status": "refused", "reason": refused[n], **shared} for n in refused}
        return {name: (done | failed)[name] for name in self.cases}

    def drop(self) -> None:
        """Free all models."""
        self.held.clear()
        free_memory()

    @contextlib.contextmanager
    def _noted(self, case: LmMatrixCase, wrapper: str | None) -> Iterator[None]:
        """Leave word of what is done in the block, and of why it failed."""
        note = {"case": to_dict(case), "wrapper": wrapper}
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

    @contextlib.contextmanager
    def _training(self, name: str) -> Iterator[Training]:
        """A warm training in the wrapper `name`: one that is held, or one for the block."""
        with self._noted(self.cases[name], name):
            training = self.held.get(name) or self._start(name)
            if self.is_together:
                self.held[name] = training
            yield training
            self.losses[name] = max(self.losses.get(name, []), training.losses, key=len)
            if not self.is_together:
                # the frame that has it as the block's variable lives on
                training.step = None
                free_memory()

    def _start(self, name: str) -> Training:
        """A training after its epochs of warm-up; the first one's memory is kept."""
        case, group = self.cases[name], self.groups.own if name == "none" else None
        epochs = self.config.epochs - self.config.timed_epochs
        training, peak = warmed_up(case, self.config, group, epochs * case.steps_per_epoch)
        self.memory.setdefault(name, peak)
        return training

    def _reference(self) -> list[float]:
        """Losses of one process that trains on the batches of all ranks, as all ranks do here."""
        case = dataclasses.replace(next(iter(self.cases.values())), wrapper="none")
        with self._noted(case, None), contextlib.suppress(ValueError):
            training = Training(case, self.config, self.groups.own, parts=case.ranks)
            training.take(case.compared_steps)
            training.read_losses()
            losses = training.losses
            del training
            free_memory()
            return losses
        return []

    def _figures(
        self,
        name: str,
        times: list[float],
        reference: list[float],
        traced: tuple[float, float, float] | None,
    ) -> dict[str, Any]:
        """A wrapper's own figures, of all ranks."""
        every: list[Any] = [None] * world_size()
        dist.all_gather_object(every, (times, self.memory[name], traced))
        all_times, memory, all_traced = zip(*every)
        # a turn's time is the ranks' mean; they differ where each trains alone
        means = [fmean(turn) for turn in zip(*all_times)]
        case, middle = self.cases[name], median(means)
        tokens = case.ranks * case.tr_batch_size * case.context_length
        figures = {
            "tokens_per_s": tokens / middle * 1e3,
            "median_ms": middle,
            "iqr_ms": spread(means),
            "samples": len(means),
            "times_ms": means,
            "epoch_s": middle * case.steps_per_epoch / 1e3,
            "peak_memory_bytes": max(memory) if None not in memory else None,
            "is_together": self.is_together,
        }
        if None not in all_traced:
            names = ("communication_ms", "exposed_communication_ms", "traced_step_ms")
            figures |= {key: fmean(values) for key, values in zip(names, zip(*all_traced))}
            figures["exposed_from"] = "kernels" if self.device.type == "cuda" else "operators"
        if name != "none" or case.ranks == 1:
            losses = list(itertools.takewhile(math.isfinite, self.losses[name]))
            figures |= {"losses": losses, "reference_losses": reference}
            figures["loss_difference"] = loss_difference(losses, reference)
        return figures
