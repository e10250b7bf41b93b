"""The harness for trainings on several ranks: interleaved, so that all see the same machine.

`run_benchmark` measures a benchmark, a subclass of `Interleaved`, plan by plan: a `Plan` is a few
trainings that are compared with one another. One set of ranks measures all plans. Within a plan the
trainings are interleaved: an epoch of each, then an epoch of each in reverse order, and so on.

A training that fails becomes a record with a status and a reason. If it ends its ranks, as one does
that runs out of memory while others wait for it, new ranks measure the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from lib.core.allocator import free_memory, is_out_of_memory
from lib.core.files import make_folder
from lib.core.hardware import keep_freed_memory, pick_dtype
from lib.core.records import Record, append_record, new_record, read_records, remaining
from lib.ddp.launcher import WorkerError, launch
from lib.ddp.process_group import (
    current_device,
    gather_objects,
    init_from_environment,
    rank,
    world_size,
)
from lib.profiling.measurement import interquartile_range
from lib.tools.benchmarks.rank_training import Plan, RanksBenchmarkConfig, Training, TrainingCase
from lib.tools.benchmarks.step import device_memory
from lib.tools.benchmarks.sweep import code_version
from lib.training.step import numerics

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Failure:
    """How a training ended the ranks."""

    plan: Plan
    name: str
    case: TrainingCase
    status: str
    reason: str

    def keep(self, path: Path) -> None:
        """Write this to `path` unless another rank did: later failures follow from the first."""
        with contextlib.suppress(FileExistsError), open(path, "xb") as file:
            pickle.dump(self, file)


def run_benchmark(
    benchmark: type[Interleaved], config: Any, *, report: bool = True
) -> list[Record]:
    """Measure what `config` asks for, then write tables and figures of all records in its `output`.

    A plan is skipped if all its trainings have a record by this machine, seed and code, so that the
    same call resumes an interrupted one; with `restart` all are measured.

    Starts the ranks itself, or is one of those that `torchrun` started, where rank 0 writes. A
    training that fails becomes a record of status `refused`, `oom` or `failed` with its reason.
    Under `torchrun` a rank that dies ends the benchmark; otherwise new ranks measure the rest.

    Returns:
        All records in `output` by this machine, seed and code; none on ranks other than 0.

    Raises:
        ValueError: settings that do not fit together or this machine.
        OSError: `output` cannot be written; found before anything is measured.
        WorkerError: a rank failed outside of a training.
    """
    if "RANK" in os.environ or dist.is_initialized():
        with init_from_environment(config.backend, timeout=config.timeout) as device:
            config = config.with_defaults(world_size(), on_gpu=device.type == "cuda")
            make_folder(config.output)
            # rank 0 decides for all, as folders differ between hosts
            plans = [plans_left(benchmark, config) if rank() == 0 else None]
            dist.broadcast_object_list(plans, device=device)
            measure(benchmark, config, plans[0], None)
            if rank() != 0:
                return []
    else:
        gpus = torch.cuda.device_count() if config.backend != "gloo" else 0
        ranks = config.ranks or gpus or 2
        on_gpu = config.backend == "nccl" or gpus >= ranks
        config = config.with_defaults(ranks, on_gpu=on_gpu)
        make_folder(config.output)
        _launch_until_done(benchmark, config, plans_left(benchmark, config))
    if report:
        benchmark.write_report(read_records(config.output / benchmark.records), config.output)
    return records_here(benchmark, config)


def plans_left(benchmark: type[Interleaved], config: RanksBenchmarkConfig) -> list[Plan]:
    """The plans with a training that has no record by this machine; all of them with `restart`."""
    done = [] if config.restart else records_here(benchmark, config)
    dtype = str(pick_dtype(_device(config.backend), config.dtype)).removeprefix("torch.")
    return [
        plan
        for plan in config.plans()
        if remaining([config.case(plan.subject, name, dtype) for name in plan.names], done)
    ]


def records_here(benchmark: type[Interleaved], config: RanksBenchmarkConfig) -> list[Record]:
    """The records in `output` that this machine, seed and code made."""
    here = new_record({}, seed=config.seed, device=_device(config.backend))
    same = {key: here[key] for key in ("device", "cores", "versions", "seed")}
    same |= {"code": _code(benchmark)}
    records = read_records(config.output / benchmark.records)
    return [record for record in records if same.items() <= record.items()]


@functools.cache
def _code(benchmark: type[Interleaved]) -> str:
    return code_version(benchmark.__module__)


def _device(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "nccl" else "cpu")


def _keep(
    benchmark: type[Interleaved], config: RanksBenchmarkConfig, case: TrainingCase, figures: dict
) -> None:
    """Append the record of one training, and print it."""
    figures = {**case.known_figures, **figures}
    record = new_record(figures, config=case, seed=config.seed, device=_device(case.backend))
    append_record(config.output / benchmark.records, record | {"code": _code(benchmark)})
    if figures["status"] == "ok":
        words = f"{figures['median_ms']:.2f} ms ± {figures['iqr_ms'] / 2:.2f}"
        words += benchmark.describe(figures)
    else:
        words = f"{figures['status']}, {figures['reason']}"
    print(f"{case.label}: {words}", flush=True)


def _launch_until_done(
    benchmark: type[Interleaved], config: RanksBenchmarkConfig, plans: list[Plan]
) -> None:
    """Start ranks that measure; where a training ends them, start new ones for the rest."""
    options: dict = {"backend": config.backend, "timeout": config.timeout}
    while plans:
        log.info("starting %d ranks", config.ranks)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            path = Path(folder) / "failure.pickle"
            try:
                level = logging.getLogger("lib").level
                launch(measure, config.ranks, benchmark, config, plans, path, level, **options)
                return
            except WorkerError as error:
                if not path.exists():
                    raise
                failure = pickle.loads(path.read_bytes())
                # what others raised follows from a rank that died
                if error.has_died and failure.status != "oom":
                    log.error("%s", error)
                    reason = str(error).split("\n")[0]
                    failure = dataclasses.replace(failure, reason=reason)
        plans, is_given_up = plans_after_failure(plans, failure)
        if is_given_up:
            figures = {"status": failure.status, "reason": failure.reason}
            _keep(benchmark, config, failure.case, figures)
        else:
            words = f"{failure.status}, {failure.reason}; again with less in memory"
            print(f"{failure.case.label}: {words}", flush=True)


def plans_after_failure(plans: Sequence[Plan], failure: Failure) -> tuple[list[Plan], bool]:
    """The plans that are left after a training failed, and whether that training is given up.

    Models that are too large together are tried one at a time before one is given up.
    """
    plan, later = failure.plan, list(plans[plans.index(failure.plan) + 1 :])
    if failure.status == "oom" and plan.is_together and len(plan.names) > 1:
        return [dataclasses.replace(plan, is_together=False), *later], False
    others = tuple(other for other in plan.names if other != failure.name)
    return [dataclasses.replace(plan, names=others)] * bool(others) + later, True


def measure(
    benchmark: type[Interleaved],
    config: Any,
    plans: Sequence[Plan],
    failure: Path | None,
    log_level: int | None = None,
) -> None:
    """Measure the plans on each rank; rank 0 keeps and prints the records after each plan.

    Args:
        failure: the file for the first training that ends its rank; None: nowhere.
        log_level: of rank 0; None: as it is.
    """
    if rank() != 0:
        log.setLevel(logging.WARNING)
    elif log_level is not None:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("lib").setLevel(log_level)
    device = current_device()
    if device.type == "cpu":
        keep_freed_memory()
    dtype = str(pick_dtype(device, config.dtype)).removeprefix("torch.")
    groups = Groups.make(config.timeout)
    launched = datetime.now(UTC).isoformat()
    with numerics(tf32=config.tf32, deterministic=False):
        for plan in plans:
            trainings = benchmark(config, plan, groups, dtype, failure)
            for name, figures in trainings.run().items():
                if rank() == 0:
                    case = trainings.cases[name]
                    _keep(benchmark, config, case, {"launch": launched, **figures})
            trainings.held.clear()
            free_memory()
            if config.compile:
                torch.compiler.reset()


@dataclasses.dataclass(frozen=True)
class Groups:
    """Process groups beside that of all ranks."""

    own: dist.ProcessGroup
    """This rank alone."""

    hosts: dist.ProcessGroup | None
    """All ranks over gloo; None: the group of all ranks is over gloo itself."""

    @classmethod
    def make(cls, timeout: float) -> Groups:
        """Make the groups; every rank must call this, as each takes part in making every group."""
        own = [dist.new_group([index]) for index in range(world_size())][rank()]
        if current_device().type == "cpu":
            return cls(own, None)
        return cls(own, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))


class Interleaved:
    """A benchmark, and as an instance the trainings of one of its plans on one rank.

    A benchmark overrides everything up to `__init__`. Ranks import it by name.

    Args:
        dtype: the data type of matmuls.
        failure: the file for the first training that ends its rank.
    """

    records: str
    """Name of the record file in the folder `output`."""

    @staticmethod
    def compare(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Further figures of each training that compare it with the others."""
        raise NotImplementedError

    @staticmethod
    def describe(figures: dict[str, Any]) -> str:
        """The text about a measured training that is printed after its time."""
        raise NotImplementedError

    @staticmethod
    def write_report(records: Sequence[Record], output: Path) -> None:
        """Write tables and figures."""
        raise NotImplementedError

    def warm_up(self, name: str) -> tuple[Training, Any]:
        """A training after its warm-up, and the memory measured on the way."""
        raise NotImplementedError

    def own_figures(self, name: str, time: dict[str, Any]) -> dict[str, Any]:
        """Figures of one training beside its `time` and communication, the same on all ranks."""
        raise NotImplementedError

    def __init__(
        self, config: Any, plan: Plan, groups: Groups, dtype: str, failure: Path | None
    ) -> None:
        self.config, self.plan, self.groups, self.failure = config, plan, groups, failure
        self.device = current_device()
        self.cases = {name: config.case(plan.subject, name, dtype) for name in plan.names}
        memory = device_memory(self.device) or math.inf
        if self.device.type == "cpu":
            memory /= world_size()
        self.is_together = plan.is_together and fits_together(list(self.cases.values()), memory)
        self.held: dict[str, Training] = {}
        self.losses: dict[str, list[float]] = {}
        self.memory: dict[str, Any] = {}

    def run(self) -> dict[str, dict[str, Any]]:
        """The figures of each training, including those that were refused."""
        times: dict[str, list[float]] = {}
        refused: dict[str, dict[str, Any]] = {}
        # warm up
        for name in self.cases:
            log.info("%s: warming up %s", self.plan.subject, name)
            try:
                with self.training(name):
                    times[name] = []
            except ValueError as error:
                # raised on all ranks alike, before they wait for one another
                free_memory(error)
                refused[name] = {"status": "refused", "reason": str(error)}
        # time: there and back, so that no training always follows the same other one
        log.info("%s: timing %d epochs of each", self.plan.subject, self.config.timed_epochs)
        for turn in range(self.config.timed_epochs):
            for name in times if turn % 2 == 0 else reversed(times):
                with self.training(name) as training:
                    times[name].append(training.timed_epoch())
        # trace afterwards, so that the profiler disturbs no timed epoch
        rows = {name: self._figures(name, times[name]) for name in times}
        further = self.compare(rows)
        return {
            name: refused[name] if name in refused else {**rows[name], **further[name]}
            for name in self.cases
        }

    def _figures(self, name: str, times: list[float]) -> dict[str, Any]:
        """Time, memory, losses and communication of one training, the same on all ranks."""
        with self.training(name) as training:
            traced = training.trace_communication(self.config.trace_steps, self.groups.hosts)
        case = self.cases[name]
        time = time_figures(case, times)
        return {
            "status": "ok",
            **case.known_figures,
            **time,
            **self.own_figures(name, time),
            "is_together": self.is_together,
            **communication_figures(traced, self.device),
        }

    def finite_losses(self, name: str) -> list[float]:
        """The losses of a training's compared steps, up to the first that is not finite."""
        return list(itertools.takewhile(math.isfinite, self.losses[name]))

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The ranks that train together: each alone in `none`, else all of them."""
        return self.groups.own if name == "none" else None

    @contextlib.contextmanager
    def training(self, name: str) -> Iterator[Training]:
        """A warm training: the one in memory, or where only one fits, one for this block."""
        try:
            training = self.held.get(name)
            if training is None:
                training, memory = self.warm_up(name)
                self.memory.setdefault(name, memory)
            if self.is_together:
                self.held[name] = training
            yield training
            # the longest losses: a training may start anew for each epoch
            self.losses[name] = max(self.losses.get(name, []), training.losses, key=len)
            if not self.is_together:
                # the caller's frame still holds the training itself
                training.step = None
                free_memory()
        except ValueError:
            raise
        except Exception as error:
            status = "oom" if is_out_of_memory(error) else "failed"
            reason = f"{type(error).__name__}: {str(error).split(chr(10))[0]}"
            if self.failure:
                case = self.cases[name]
                Failure(self.plan, name, case, status, reason).keep(self.failure)
            raise


def fits_together(cases: Sequence[TrainingCase], memory: float) -> bool:
    """Whether the trainings probably fit into `memory` bytes of a rank at once; one always counts.

    Each holds its memory between steps. What its peak adds is needed by one training at a time, but
    by all of them if their steps are recorded as CUDA graphs.
    """
    if len(cases) == 1:
        return True
    predicted = [case.predicted for case in cases]
    held = sum(rank.between_steps for rank in predicted)
    working = [rank.peak - rank.between_steps for rank in predicted]
    return held + (sum(working) if cases[0].cuda_graph else max(working)) < 0.8 * memory


def time_figures(case: TrainingCase, times: list[float]) -> dict[str, Any]:
    """Time per step and tokens/s of all ranks, from this rank's milliseconds per step and epoch."""
    # ranks differ where each trains alone
    means = [fmean(epoch) for epoch in zip(*gather_objects(times))]
    tokens = case.ranks * case.tr_batch_size * case.context_length
    return {
        "tokens_per_s": tokens / median(means) * 1e3,
        "median_ms": median(means),
        "iqr_ms": interquartile_range(means),
        "samples": len(means),
        "times_ms": means,
    }


def communication_figures(
    traced: tuple[float, float, float] | None, device: torch.device
) -> dict[str, Any]:
    """The ranks' mean of what was traced; nothing if it is unknown on one of them."""
    every = gather_objects(traced)
    if None in every:
        return {}
    names = ("communication_ms", "exposed_communication_ms", "traced_step_ms")
    means: dict[str, Any] = {key: fmean(values) for key, values in zip(names, zip(*every))}
    return means | {"exposed_from": "kernels" if device.type == "cuda" else "operators"}


def epoch_ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Times of the first over the second, epoch by epoch: above 1, the second is faster."""
    return [a / b for a, b in zip(first, second)]


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    """The largest difference between losses of the same step; None where there are none."""
    return max((abs(a - b) for a, b in zip(losses, reference)), default=None)
