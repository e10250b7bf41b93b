"""One training of a benchmark on several ranks: its settings, and one rank's part in it.

`interleaved.py` interleaves several of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from lib.core import ranges as core_ranges
from lib.core.allocator import without_stderr
from lib.core.hardware import DtypeName, pick_dtype
from lib.core.settings import NonNegativeInt, PositiveFloat, PositiveInt, check, settings
from lib.data.batches import BatchSampler, random_tokens, read_sequences
from lib.ddp.process_group import barrier, current_device, rank, world_size
from lib.model.config import AttentionKernel, ModelConfig, model_preset
from lib.profiling.measurement import wall_ms
from lib.profiling.memory_formula import RankMemory, default_cap_mb, rank_memory
from lib.profiling.trace import events_of, parse_trace
from lib.profiling.trace_summary import summarize
from lib.tools.benchmarks.harness import RanksConfig
from lib.tools.benchmarks.sweep import Case
from lib.training.config import OptimizerConfig, TrainConfig
from lib.training.step import new_step

log = logging.getLogger(__name__)
LEARNING_RATE = 5e-4
SIZES = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length")
# Fields of a case that are those of the config.
SAME = ("tf32", "compile", "cuda_graph", "low_precision_weights")
LENGTH = ("epochs", "timed_epochs", "steps_per_epoch", "loss_steps")
# Way to train -> its fields of `lib.training.config.TrainConfig`, beside a wrapper of that name.
SHARDING_METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "flashddp": {},
    "flashddp+zero1": {"ddp_wrapper": "flashddp", "sharded_optimizer": "zero1"},
    "flashddp+zero1_parameters": {
        "ddp_wrapper": "flashddp",
        "sharded_optimizer": "zero1",
        "zero1_strategy": "parameters",
    },
    "zero1": {"ddp_wrapper": "none", "sharded_optimizer": "zero1"},
    "torch_ddp+torch_zero": {"ddp_wrapper": "torch_ddp", "sharded_optimizer": "torch_zero"},
    "fsdp": {},
    "fsdp2": {},
    "fsdp+checkpoints": {"ddp_wrapper": "fsdp", "activation_checkpointing": "input"},
}


@settings
class RanksTrainingConfig(RanksConfig):
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

    together: bool = True
    """Hold all models that are compared in memory at once, where they fit by formula."""

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
    """MiB per gradient bucket; by default 25, or a 32nd of all gradients where that is more."""

    defaults: ClassVar[dict[str, tuple[Any, Any]]] = {}
    """Fields that may be left out -> what they are on a CPU, and on GPUs."""

    def __post_init__(self) -> None:
        right = f"more than timed_epochs ({self.timed_epochs}), as the first epoch warms up"
        check(self, "epochs", self.epochs > self.timed_epochs, right)

    def given(self, name: str) -> Any:
        """The field, or its default for the ranks' devices."""
        return getattr(self, name) or self.defaults[name][self.backend == "nccl"]


def training_case(
    config: RanksTrainingConfig, model: str, kernel: AttentionKernel, **names: str
) -> Case:
    """The training of a model that `config`, which has ranks and a backend, asks for.

    Args:
        names: the `wrapper`, or the `method`, which has one.

    Raises:
        ValueError: the config asks for something that only GPUs have.
    """
    if "method" in names:
        fields = SHARDING_METHODS.get(names["method"], {})
        names["wrapper"] = fields.get("ddp_wrapper", names["method"])
    preset = model_preset(model)
    length = config.context_length or preset.context_length
    shape = dataclasses.replace(preset, attention_kernel=kernel, context_length=length)
    device = torch.device(config.device)
    is_right = device.type == "cuda" or not config.cuda_graph
    check(config, "cuda_graph", is_right, "False on a CPU")
    dtype = str(pick_dtype(device, config.dtype)).removeprefix("torch.")
    low = config.low_precision_weights
    cap_mb = default_cap_mb(shape, dtype=dtype, low_precision_weights=low)
    return Case(
        kernel=kernel,
        model=model,
        **names,
        **{name: getattr(shape, name) for name in SIZES},
        tr_batch_size=config.given("tr_batch_size"),
        ranks=config.ranks,
        backend=config.backend,
        dtype=dtype,
        **{name: getattr(config, name) for name in SAME},
        bucket_size_mb=config.bucket_size_mb or cap_mb,
        **{name: getattr(config, name) for name in LENGTH if name != "steps_per_epoch"},
        steps_per_epoch=config.given("steps_per_epoch"),
    )


def shape_of(case: Case) -> ModelConfig:
    """The model of a case."""
    sizes = {name: getattr(case, name) for name in SIZES}
    return dataclasses.replace(model_preset(case.model), attention_kernel=case.kernel, **sizes)


def method_of(case: Case) -> str:
    """The way to train: in the benchmark of wrappers, a wrapper."""
    return getattr(case, "method", case.wrapper)


def stage_of(case: Case) -> int:
    """The stage of ZeRO."""
    if case.wrapper in ("fsdp", "fsdp2"):
        return 3
    return int("sharded_optimizer" in SHARDING_METHODS.get(method_of(case), {}))


def compared_steps(case: Case) -> int:
    """How many of the first steps have their losses kept."""
    return min(case.loss_steps, case.epochs * case.steps_per_epoch)


def train_config(case: Case, **changes: Any) -> TrainConfig:
    """The settings for `lib.training`."""
    fields = {"ddp_wrapper": case.wrapper, **SHARDING_METHODS.get(method_of(case), {})}
    return TrainConfig(
        model=shape_of(case),
        optimizer=OptimizerConfig(warmup_steps=0),
        steps=10**6,
        batch_size=case.tr_batch_size,
        dtype=case.dtype,
        compile=case.compile,
        cuda_graph=case.cuda_graph,
        low_precision_weights=case.low_precision_weights,
        bucket_size_mb=case.bucket_size_mb,
        **fields,
        **changes,
    )


def predicted_memory(case: Case) -> RankMemory:
    """A rank's memory by formula."""
    stage = stage_of(case)
    # the compiler keeps no more than the eager kernel
    kernel = case.kernel.removesuffix("_compiled")
    return rank_memory(
        dataclasses.replace(shape_of(case), attention_kernel=kernel),
        ranks=case.ranks if stage or case.wrapper != "none" else 1,
        stage=stage,
        batch_size=case.tr_batch_size,
        dtype=case.dtype,
        low_precision_weights=case.low_precision_weights,
        checkpoints="activation_checkpointing" in SHARDING_METHODS.get(method_of(case), {}),
        ddp_wrapper="none" if stage == 3 else case.wrapper,
        bucket_cap_mb=case.bucket_size_mb,
        cuda=case.backend == "nccl",
        outer_stays=case.wrapper == "fsdp2",
    )


def skewed_tokens(case: Case, seed: int) -> np.ndarray:
    """Token ids for one epoch; low ids are the most frequent, so there is something to learn."""
    sequences = case.steps_per_epoch * case.tr_batch_size * case.ranks
    # one more, as the sampler shifts the start of each epoch by up to a sequence
    num_tokens = (sequences + 1) * case.context_length
    uniform = random_tokens(num_tokens, 1 << 16, seed) / (1 << 16)
    return (uniform**4 * case.vocab_size).astype(np.int32)


class Groups(NamedTuple):
    """Process groups beside that of all ranks."""

    own: dist.ProcessGroup
    """This rank alone."""

    hosts: dist.ProcessGroup | None
    """All ranks over gloo; None: the group of all ranks is over gloo itself."""


def make_groups(timeout: float) -> Groups:
    """Make the groups; every rank must call this, as each takes part in making every group."""
    own = [dist.new_group([index]) for index in range(world_size())][rank()]
    if current_device().type == "cpu":
        return Groups(own, None)
    return Groups(own, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))


class Training:
    """One rank's part in a training.

    In `none` each rank trains alone, in a group of its own.

    Args:
        ranks_in_one: this many ranks' batches are accumulated in each step, by a process that
            trains alone.
    """

    def __init__(
        self,
        case: Case,
        config: RanksTrainingConfig,
        groups: Groups,
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
        # losses are read after at most this many steps; the warm-up has at least four
        log_interval = max(case.epochs * case.steps_per_epoch, config.trace_steps + 1, 4)
        settings = train_config(
            case, log_interval=log_interval, gradient_accumulation_steps=ranks_in_one
        )
        dtype = getattr(torch, case.dtype)
        group = groups.own if method_of(case) == "none" else None
        self.step = new_step(settings, self.device, dtype, seed=config.seed, group=group)
        # eager until `finish_warm_up`, so that memory is measured step by step
        self.step.use_cuda_graph(False)
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        """Run `steps` training steps without waiting for the device."""
        length = self.case.context_length
        for _ in range(steps):
            sequences = read_sequences(self.tokens, self.sampler.next_starts(), length, self.device)
            self.step(sequences, LEARNING_RATE)

    def finish_warm_up(self, config: RanksTrainingConfig, steps_done: int) -> None:
        """Run the other steps of the warm-up, at least one, as a CUDA graph if the case asks."""
        self.step.use_cuda_graph(self.case.cuda_graph)
        steps = (config.epochs - config.timed_epochs) * self.case.steps_per_epoch
        self.train(max(1, steps - steps_done))
        self.read_losses()

    def read_losses(self) -> None:
        """Fetch the losses since the last call, and keep those of the compared steps."""
        self.losses += [step.loss for step in self.step.read_log()]
        del self.losses[compared_steps(self.case) :]

    def timed_epoch(self) -> float:
        """Train for an epoch that all ranks start together, and return milliseconds per step."""
        barrier()
        milliseconds = wall_ms(lambda: self.train(1), self.case.steps_per_epoch, self.device)
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
        with without_stderr():
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
            self.read_losses()
            trace = parse_trace(events_of(profiler))
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
