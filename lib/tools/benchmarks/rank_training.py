"""One training of a multi-rank benchmark: its settings, and one rank's part in it.

`multi_rank.py` interleaves several of these. A `TrainingCase` is what a record keeps as
its config, and `Training` runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from lib.core import ranges as core_ranges
from lib.core.allocator import synchronize, without_stderr
from lib.core.hardware import DtypeName, local_results
from lib.core.settings import NonNegativeInt, PositiveFloat, PositiveInt, check, settings
from lib.data.batches import BatchSampler, random_tokens, read_sequences
from lib.ddp.process_group import barrier, current_device, rank
from lib.model.config import ModelConfig, model_preset
from lib.model.costs import num_parameters
from lib.model.transformer import TransformerLM
from lib.profiling.memory_formula import RankMemory, default_cap_mb, rank_memory
from lib.profiling.trace import read_trace
from lib.profiling.trace_summary import summarize
from lib.training.config import OptimizerConfig, TrainConfig
from lib.training.step import TrainStep

log = logging.getLogger(__name__)
LEARNING_RATE = 5e-4
SIZES = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length")
Config = TypeVar("Config", bound="RanksBenchmarkConfig")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Trainings that are interleaved."""

    subject: str
    """The setting they share, such as an attention kernel or a model."""

    names: tuple[str, ...]
    """The setting that differs, such as the data-parallel wrapper."""

    is_together: bool = True
    """Whether all their models may be in memory at once."""


@settings
class RanksBenchmarkConfig:
    """Settings that the benchmarks of training on several ranks share."""

    context_length: PositiveInt | None = None
    """Tokens per sequence; the preset's by default."""

    tr_batch_size: PositiveInt | None = None
    """Sequences per rank and step; 2 by default on a CPU, more on GPUs."""

    epochs: int = 6
    """Epochs that each training runs."""

    timed_epochs: PositiveInt = 5
    """How many of them, the last ones, are timed; each is one sample. The others warm up."""

    steps_per_epoch: PositiveInt | None = None
    """Steps in an epoch, one pass over the data; 3 by default on a CPU, more on GPUs."""

    loss_steps: NonNegativeInt = 20
    """Compare the losses of this many first steps."""

    trace_steps: NonNegativeInt = 3
    """Trace this many further steps with PyTorch's profiler to time communication; 0: none."""

    ranks: PositiveInt | None = None
    """Processes; 2 by default on a CPU, or one per GPU. Under `torchrun`, as many as it started."""

    backend: Literal["nccl", "gloo"] | None = None
    """Communication backend: `nccl` by default on GPUs, `gloo` on CPUs."""

    timeout: PositiveFloat = 300.0
    """Seconds that a rank waits for the others."""

    dtype: DtypeName = "auto"
    """`auto` (the narrowest dtype fast on the device), `float32`, `bfloat16` or `float16`."""

    tf32: bool = True
    """Let float32 matmuls use TF32 on GPUs that have it."""

    compile: bool = False
    """Fuse the model with `torch.compile`."""

    cuda_graph: bool = False
    """Record the whole step as a CUDA graph and replay it."""

    low_precision_weights: bool = False
    """Hold the model's matrices in `dtype`, and their float32 masters in AdamW."""

    bucket_size_mb: PositiveFloat | None = None
    """MiB per gradient bucket, where gradients are sent in buckets.

    By default 25, or a 32nd of all gradients where that is more.
    """

    seed: NonNegativeInt = 0
    """Seed of weights and tokens."""

    restart: bool = False
    """Measure again what already has a record."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records, tables and figures; records of other settings there are kept."""

    cpu_defaults: ClassVar[dict[str, Any]] = {}
    gpu_defaults: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        right = f"more than timed_epochs ({self.timed_epochs}), as the first epoch warms up"
        check(self, "epochs", self.epochs > self.timed_epochs, right)

    def plans(self) -> list[Plan]:
        """The groups that are measured together, of a config `with_defaults`."""
        raise NotImplementedError

    def case(self, subject: str, name: str, dtype: str) -> TrainingCase:
        """One training of a plan, of a config `with_defaults`."""
        raise NotImplementedError

    def with_defaults(self: Config, ranks: int, *, on_gpu: bool) -> Config:
        """This config for `ranks` processes, with everything chosen that it leaves out but `dtype`.

        Raises:
            ValueError: the config asks for another number of ranks, or for something that only
                GPUs have.
        """
        check_ranks(self.ranks, ranks)
        if self.cuda_graph and not on_gpu:
            raise ValueError("cuda_graph must be False on a CPU, got True")
        defaults = self.gpu_defaults if on_gpu else self.cpu_defaults
        defaults = {"backend": "nccl" if on_gpu else "gloo", **defaults}
        chosen = {name: getattr(self, name) or value for name, value in defaults.items()}
        return dataclasses.replace(self, ranks=ranks, **chosen)


def check_ranks(asked: int | None, started: int) -> None:
    """Raise a `ValueError` if a number of ranks was asked for and another was started."""
    if asked not in (None, started):
        raise ValueError(f"ranks must be {started}, as torchrun started {started}, got {asked}")


def check_choices(config: Any, choices: Mapping[str, Any]) -> None:
    """Refuse unknown and repeated names; `choices` maps a field to the names that it may hold."""
    for field, known in choices.items():
        given = getattr(config, field)
        is_right = set(given) <= set(known) and len(set(given)) == len(given)
        check(config, field, is_right, f"different names out of {', '.join(known)}")


@dataclasses.dataclass(frozen=True)
class TrainingCase:
    """One training: the config of its record."""

    kernel: str
    """Attention kernel."""

    wrapper: str
    """Data-parallel wrapper."""

    model: str
    """Model preset; the sizes below may differ from its own."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int
    context_length: int

    tr_batch_size: int
    """Sequences per rank and step."""

    ranks: int
    backend: str
    dtype: str
    """Data type of matmuls."""

    tf32: bool
    compile: bool
    cuda_graph: bool
    low_precision_weights: bool
    bucket_size_mb: float
    epochs: int
    timed_epochs: int
    steps_per_epoch: int
    loss_steps: int

    @property
    def shape(self) -> ModelConfig:
        """The model."""
        sizes = {name: getattr(self, name) for name in SIZES}
        preset = model_preset(self.model)
        return dataclasses.replace(preset, attention_kernel=self.kernel, **sizes)

    @property
    def compared_steps(self) -> int:
        """How many of the first steps have their losses kept."""
        return min(self.loss_steps, self.epochs * self.steps_per_epoch)

    @property
    def label(self) -> str:
        """Its subject and name in a plan."""
        return f"{self.kernel}, {self.wrapper}"

    @property
    def known_figures(self) -> dict[str, Any]:
        """Figures that need no measurement; failed trainings have them, too."""
        return {"parameters": num_parameters(self.shape)}

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return 0

    @property
    def checkpoints(self) -> bool:
        """Whether backward computes every block again."""
        return False

    @property
    def predicted(self) -> RankMemory:
        """A rank's memory by formula."""
        # the compiler keeps no more than the eager kernel
        kernel = self.kernel.removesuffix("_compiled")
        return rank_memory(
            dataclasses.replace(self.shape, attention_kernel=kernel),
            ranks=self.ranks if self.stage or self.wrapper != "none" else 1,
            stage=self.stage,
            batch_size=self.tr_batch_size,
            dtype=self.dtype,
            low_precision_weights=self.low_precision_weights,
            checkpoints=self.checkpoints,
            ddp_wrapper="none" if self.stage == 3 else self.wrapper,
            bucket_cap_mb=self.bucket_size_mb,
            cuda=self.backend == "nccl",
            outer_stays=self.wrapper == "fsdp2",
        )

    def train_config(self, **changes: Any) -> TrainConfig:
        """The settings for `lib.training`."""
        return TrainConfig(
            model=self.shape,
            optimizer=OptimizerConfig(warmup_steps=0),
            steps=10**6,
            batch_size=self.tr_batch_size,
            dtype=self.dtype,
            compile=self.compile,
            cuda_graph=self.cuda_graph,
            low_precision_weights=self.low_precision_weights,
            ddp_wrapper=self.wrapper,
            bucket_size_mb=self.bucket_size_mb,
            **changes,
        )


def case_fields(config: RanksBenchmarkConfig, shape: ModelConfig, dtype: str) -> dict[str, Any]:
    """The fields of a case that follow from a config `with_defaults` and the model's shape."""
    names = {field.name for field in dataclasses.fields(TrainingCase)} & vars(config).keys()
    fields = {name: getattr(config, name) for name in names}
    fields |= {name: getattr(shape, name) for name in SIZES}
    if config.bucket_size_mb is None:
        fields["bucket_size_mb"] = default_cap_mb(
            shape, dtype=dtype, low_precision_weights=config.low_precision_weights
        )
    return fields | {"kernel": shape.attention_kernel, "dtype": dtype}


def skewed_tokens(case: TrainingCase, seed: int) -> np.ndarray:
    """Token ids for one epoch; low ids are the most frequent, so there is something to learn."""
    sequences = case.steps_per_epoch * case.tr_batch_size * case.ranks
    # one more, as the sampler shifts the start of each epoch by up to a sequence
    num_tokens = (sequences + 1) * case.context_length
    uniform = random_tokens(num_tokens, 1 << 16, seed) / (1 << 16)
    return (uniform**4 * case.vocab_size).astype(np.int32)


class Training:
    """One rank's part in a training.

    Args:
        group: the ranks that train together; None: all of them.
        ranks_in_one: this many ranks' batches are accumulated in each step, by a process that
            trains alone.
    """

    def __init__(
        self,
        case: TrainingCase,
        config: RanksBenchmarkConfig,
        group: dist.ProcessGroup | None,
        *,
        ranks_in_one: int = 1,
    ) -> None:
        self.case, self.device = case, current_device()
        self.tokens = skewed_tokens(case, config.seed)
        share = {"rank": rank(), "world_size": case.ranks} if ranks_in_one == 1 else {}
        batch_size = case.tr_batch_size * ranks_in_one
        self.sampler = BatchSampler(
            len(self.tokens), case.context_length, batch_size, seed=config.seed, **share
        )
        generator = torch.Generator(self.device).manual_seed(config.seed)
        model = TransformerLM(case.shape, device=self.device, generator=generator)
        dtype = getattr(torch, case.dtype)
        if case.low_precision_weights:
            model.use_low_precision_weights(dtype)
        # losses are read after at most this many steps
        log_interval = max(case.epochs * case.steps_per_epoch, config.trace_steps + 1, 3)
        settings = case.train_config(
            log_interval=log_interval, gradient_accumulation_steps=ranks_in_one
        )
        self.step = TrainStep(model, settings, self.device, dtype, group=group)
        # eager until `finish_warm_up`, so that memory is measured step by step
        self.step.use_cuda_graph(False)
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        """Run `steps` training steps without waiting for the device."""
        length = self.case.context_length
        for _ in range(steps):
            sequences = read_sequences(self.tokens, self.sampler.next_starts(), length, self.device)
            self.step(sequences, LEARNING_RATE)

    def finish_warm_up(self, config: RanksBenchmarkConfig, steps_done: int) -> None:
        """Run the other steps of the warm-up, at least one, as a CUDA graph if the case asks."""
        self.step.use_cuda_graph(self.case.cuda_graph)
        steps = (config.epochs - config.timed_epochs) * self.case.steps_per_epoch
        self.train(max(1, steps - steps_done))
        self.read_losses()

    def read_losses(self) -> None:
        """Fetch the losses since the last call, and keep those of the compared steps."""
        self.losses += [step.loss for step in self.step.read_log()]
        del self.losses[self.case.compared_steps :]

    def timed_epoch(self) -> float:
        """Train for an epoch that all ranks start together, and return milliseconds per step."""
        barrier()
        synchronize(self.device)
        start = time.perf_counter()
        self.train(self.case.steps_per_epoch)
        synchronize(self.device)
        milliseconds = (time.perf_counter() - start) / self.case.steps_per_epoch * 1e3
        self.read_losses()
        return milliseconds

    def trace_communication(
        self, steps: int, hosts: dist.ProcessGroup | None
    ) -> tuple[float, ...] | None:
        """Milliseconds per step of communication, of its exposed part, and of the traced step.

        None without steps to trace, and where the trace holds nothing to time.

        Args:
            hosts: all ranks over gloo, for a barrier that is in no GPU's trace.
        """
        if steps == 0:
            return None
        # only kernels on a GPU: tracing operators too would slow down the host that launches them
        activity = getattr(torch.profiler.ProfilerActivity, self.device.type.upper())
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        with tempfile.TemporaryDirectory() as folder, without_stderr():
            path = Path(folder) / "trace.json"
            with torch.profiler.profile(activities=[activity], schedule=schedule) as profiler:
                self.train(1)
                self.step.wait()
                profiler.step()
                dist.barrier(hosts)
                is_cpu = self.device.type == "cpu"
                with core_ranges.enabled() if is_cpu else contextlib.nullcontext():
                    self.train(steps)
                self.step.wait()
                profiler.step()
            profiler.export_chrome_trace(str(path))
            self.read_losses()
            trace = read_trace(path)
        try:
            summary = summarize(trace)
        except ValueError as error:
            # the epochs are timed already, so the record stays
            log.warning("communication is unknown: %s", error)
            return None
        # a GPU's trace has no ranges and counts as one step
        per_step = summary.steps / steps
        times = (summary.communication_ms, summary.exposed_communication_ms, summary.wall_ms)
        return tuple(value * per_step for value in times)
