"""One training of the language-model matrix, as one rank takes part in it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lib import profiling
from lib.allocations import allocate_workspaces, allocated_bytes, synchronise, without_stderr
from lib.benchmark_lm_matrix_cases import LmMatrixCase, skewed_tokens
from lib.config_lm_matrix import LmMatrixConfig
from lib.data import BatchSampler, read_windows
from lib.distributed import barrier, current_device, rank, world_size
from lib.model import TransformerLM
from lib.trace_file import read_trace
from lib.trace_summary import summarise
from lib.train_step import TrainStep

log = logging.getLogger(__name__)

LEARNING_RATE = 5e-4


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups beside that of all ranks."""

    own: dist.ProcessGroup
    """Of this rank alone."""

    hosts: dist.ProcessGroup | None
    """Of all ranks, through their hosts; None is the group of all."""

    @classmethod
    def make(cls, timeout: float) -> Groups:
        """Called by all ranks, each of which takes part in making each group."""
        own = [dist.new_group([index]) for index in range(world_size())][rank()]
        if current_device().type == "cpu":
            return cls(own, None)
        limit = datetime.timedelta(seconds=timeout)
        return cls(own, dist.new_group(backend="gloo", timeout=limit))


class Training:
    """One rank's part in the training of a cell.

    Args:
        group: the ranks that train together; None: all of them.
        parts: of a single process that trains on the batches of so many ranks, one after another.
    """

    def __init__(
        self,
        case: LmMatrixCase,
        config: LmMatrixConfig,
        group: dist.ProcessGroup | None,
        *,
        parts: int = 1,
    ) -> None:
        self.case, self.device = case, current_device()
        self.tokens = skewed_tokens(case, config.seed)
        place = {"rank": rank(), "world_size": case.ranks} if parts == 1 else {}
        batch_size = case.tr_batch_size * parts
        self.sampler = BatchSampler(
            len(self.tokens), case.context_length, batch_size, seed=config.seed, **place
        )
        generator = torch.Generator(self.device).manual_seed(config.seed)
        model = TransformerLM(case.shape, device=self.device, generator=generator)
        dtype = getattr(torch, case.dtype)
        if case.low_precision_weights:
            model.use_low_precision_weights(dtype)
        longest = max(case.epochs * case.steps_per_epoch, config.trace_steps + 1, 3)
        settings = case.training(parts=parts, log_interval=longest)
        self.step = TrainStep(model, settings, self.device, dtype, group=group)
        # recorded later, by `record`
        self.step.config = dataclasses.replace(settings, cuda_graph=False)
        self.losses: list[float] = []

    def take(self, steps: int) -> None:
        """Train for so many steps, without waiting for the device."""
        length = self.case.context_length
        for _ in range(steps):
            windows = read_windows(self.tokens, self.sampler.next_starts(), length, self.device)
            self.step(windows, LEARNING_RATE)

    def record(self) -> None:
        """From here on replay steps as a CUDA graph, if the cell is to."""
        changed = {"cuda_graph": self.case.cuda_graph}
        self.step.config = dataclasses.replace(self.step.config, **changed)

    def read_losses(self) -> None:
        """Keep the losses of the steps since the last call, of those that are to be compared."""
        self.losses += [step.loss for step in self.step.read_log()]
        del self.losses[self.case.compared_steps :]

    def epoch_ms(self) -> float:
        """Train for an epoch that all ranks begin together; milliseconds a step."""
        barrier()
        synchronise(self.device)
        start = time.perf_counter()
        self.take(self.case.steps_per_epoch)
        synchronise(self.device)
        milliseconds = (time.perf_counter() - start) / self.case.steps_per_epoch * 1e3
        self.read_losses()
        return milliseconds


def warmed_up(
    case: LmMatrixCase, config: LmMatrixConfig, group: dist.ProcessGroup | None, steps: int
) -> tuple[Training, int | None]:
    """A training after `steps` steps, at least three, and the most bytes that it has allocated.

    Of itself alone, whatever else is in memory. On a GPU without the first step, in which code is
    compiled and tuned; on a CPU of the first two.
    """
    device = current_device()
    made: list[Training] = []

    def begin(steps: int) -> None:
        made.append(Training(case, config, group))
        made[0].take(steps)

    if device.type == "cpu":
        peak, _ = allocated_bytes(functools.partial(begin, 2), device)
    else:
        allocate_workspaces(device)
        before = torch.cuda.memory_allocated(device)
        begin(1)
        synchronise(device)
        torch.cuda.reset_peak_memory_stats(device)
        made[0].take(1)
    made[0].record()
    made[0].take(max(1, steps - 2))
    made[0].read_losses()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - before
    return made[0], peak


def communication(
    training: Training, steps: int, hosts: dist.ProcessGroup | None
) -> tuple[float, float, float] | None:
    """ms a step in which gradients travel, those in which nothing else runs, and of all.

    Args:
        steps: so many are watched; 0: none, and the result is None, as where a trace holds nothing.
        hosts: as in `Groups`.
    """
    if steps == 0:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with without_stderr():
            trace_steps(training, steps, hosts, path)
        training.read_losses()
        try:
            summary = summarise(read_trace(path))
        except ValueError as error:
            # the times are measured already, and stay
            log.warning("communication is not known: %s", error)
            return None
    # a GPU's trace has no ranges, and counts as one step
    per_step = summary.steps / steps
    times = (summary.communication_ms, summary.exposed_communication_ms, summary.wall_ms)
    return tuple(value * per_step for value in times)


def trace_steps(
    training: Training, steps: int, hosts: dist.ProcessGroup | None, path: Path
) -> None:
    """Write the trace of so many steps, which all ranks begin together, to `path`."""
    # on a GPU kernels alone: to watch operators too would slow down the host that launches them
    activity = getattr(torch.profiler.ProfilerActivity, training.device.type.upper())
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(activities=[activity], schedule=schedule) as profiler:
        training.take(1)
        synchronise(training.device)
        profiler.step()
        # in no trace on a GPU, and before the steps in one on a CPU
        dist.barrier(hosts)
        with profiling.enabled() if training.device.type == "cpu" else contextlib.nullcontext():
            training.take(steps)
        synchronise(training.device)
        profiler.step()
    profiler.export_chrome_trace(str(path))
