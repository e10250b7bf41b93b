"""The extra sections of notebook 12: plan a training for this machine, and run it until a deadline.

`choose` sees a machine only by its description, so that it also answers for machines elsewhere;
`this_machine` describes the one at hand.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lib.data.prepare import TokenizeConfig
from lib.model.config import model_preset
from lib.model.costs import num_parameters
from lib.profiling.memory_formula import RESERVED_BYTES, SIZES, rank_memory
from lib.training.config import OptimizerConfig, TrainConfig

if TYPE_CHECKING:
    from lib.profiling.memory_formula import RankMemory
    from lib.training.loop import TrainResult

# (batch_size, …) -> the memory of a rank, by formula.
Memory = Callable[..., "RankMemory"]
# Sequences in a step of the large model, over all GPUs.
SEQUENCES = 256
# The share of a GPU's memory that a plan fills, by formula.
MEMORY_SHARE = 0.7


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that a plan depends on."""

    device: str
    """`cpu`, `cuda` or `mps`."""

    chip: str
    count: int = 1
    """GPUs."""

    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None without CUDA."""

    memory_bytes: int = 0
    """Memory of one GPU; 0 without a GPU."""

    has_triton: bool = True
    """Whether Triton is installed, with which our kernels and `torch.compile` compile for a GPU."""


# A Kaggle notebook with the accelerator "GPU T4 x2".
TWO_T4 = Machine("cuda", "Tesla T4", 2, (7, 5), 15 * 2**30)
H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", 1, (9, 0), 79 * 2**30)


class Setting(NamedTuple):
    """One decision of a plan."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Plan:
    """A training that suits a machine."""

    ranks: int
    """Processes that train together, one per GPU."""

    corpus: TokenizeConfig
    train: TrainConfig
    """The full training, without its folders."""

    settings: tuple[Setting, ...]


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    import torch

    from lib.core.hardware import device_name, pick_device, runs_triton

    device = pick_device()
    if device.type != "cuda":
        return Machine(device.type, device_name(device))
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    count = torch.cuda.device_count()
    memory, has_triton = properties.total_memory, runs_triton(device)
    return Machine("cuda", properties.name, count, capability, memory, has_triton)


def choose(
    machine: Machine,
    *,
    minutes: float | None,
    corpus: str = "stories",
) -> Plan:
    """Plan what to train on `machine`, and how, with a reason for each decision.

    Args:
        minutes: the time limit for everything; None: as long as the full training takes.
        corpus: as in `TokenizeConfig`.
    """
    if machine.device != "cuda":
        return _small_plan(machine, corpus)
    dtype = _dtype(machine)
    model = dataclasses.replace(
        model_preset("tinystories"), vocab_size=None, attention_kernel="auto"
    )
    # the memory of a rank, whose formula needs a vocabulary size
    memory = functools.partial(
        rank_memory,
        dataclasses.replace(model, vocab_size=10_000),
        ranks=machine.count,
        dtype=dtype.value,
    )
    weights = _low_precision_weights(machine, dtype.value, memory)
    memory = functools.partial(memory, low_precision_weights=weights.value)
    sharding = _sharding(machine, memory)
    batch = _batch_size(machine, memory)
    settings = (
        Setting("processes", machine.count, f"one for each {machine.chip}"),
        dtype,
        weights,
        Setting("attention_kernel", "auto", "the fastest on record, named when training starts"),
        _wrapper(machine, sharding.value),
        sharding,
        batch,
        _compile(machine, minutes),
        _cuda_graph(machine, sharding.value),
    )
    values = {setting.name: setting.value for setting in settings}
    del values["processes"], values["attention_kernel"]
    train = TrainConfig(
        model=model,
        optimizer=OptimizerConfig(0.003, 0.0001, warmup_steps=200),
        steps=5000,
        gradient_accumulation_steps=SEQUENCES // (batch.value * machine.count),
        log_interval=25,
        eval_interval=500,
        checkpointing_interval=1000,
        **values,
    )
    vocab_size = 4096 if corpus == "stories" else 10_000
    text = TokenizeConfig(corpus=corpus, corpus_bytes=100_000_000, vocab_size=vocab_size)
    return Plan(machine.count, text, train, settings)


def _small_plan(machine: Machine, corpus: str) -> Plan:
    """Plan a minute on a machine without CUDA."""
    train = TrainConfig(
        model=dataclasses.replace(model_preset("tiny"), vocab_size=None),
        optimizer=OptimizerConfig(0.004, 0.0004, warmup_steps=50),
        steps=1600,
        batch_size=8,
        log_interval=4,
        eval_interval=0,
        eval_tokens=50_000,
        checkpointing_interval=400,
    )
    settings = (
        Setting("processes", 1, "several would share the same cores"),
        Setting("dtype", "float32", f"{machine.chip} is no faster in a 16-bit dtype"),
        Setting("attention_kernel", "sdpa", "our kernels need a CUDA GPU"),
        Setting("ddp_wrapper", "none", "there is only one process"),
        Setting("sharded_optimizer", "none", "there is only one process"),
        Setting("batch_size", train.batch_size, "small, so that a minute holds many steps"),
        Setting("compile", False, "compiling would take longer than it saves"),
    )
    text = TokenizeConfig(corpus=corpus, corpus_bytes=5_000_000, vocab_size=1024)
    return Plan(1, text, train, settings)


def _dtype(machine: Machine) -> Setting:
    if machine.capability >= (8, 0):
        return Setting("dtype", "bfloat16", "tensor cores, and the range of float32")
    return Setting("dtype", "float16", "no tensor cores for bfloat16 here; the loss is scaled")


def _low_precision_weights(machine: Machine, dtype: str, memory: Memory) -> Setting:
    """bf16 parameters, unless gradients of several passes would be added up in bf16."""
    name = "low_precision_weights"
    if dtype == "float16":
        return Setting(name, False, "float16 would lose small updates and overflow in large sums")
    batch = _batch_size(machine, functools.partial(memory, low_precision_weights=True))
    if batch.value * machine.count < SEQUENCES:
        return Setting(name, False, "gradients of several passes are added up in float32")
    return Setting(name, True, "no casts in a step; AdamW keeps float32 masters")


def _wrapper(machine: Machine, sharding: str) -> Setting:
    name = "ddp_wrapper"
    if machine.count == 1:
        return Setting(name, "none", "there is only one process")
    if sharding == "zero1":
        return Setting(name, "none", "the sharded optimizer averages the gradients of its shard")
    return Setting(name, "flashddp", "buckets are averaged while backward still computes")


def _sharding(machine: Machine, memory: Memory) -> Setting:
    """ZeRO-1 where a rank's whole state would crowd its GPU."""
    name = "sharded_optimizer"
    if machine.count == 1:
        return Setting(name, "none", "there is only one process")
    usable = machine.memory_bytes - RESERVED_BYTES
    share = memory(batch_size=1).between_steps / usable
    reason = f"weights and optimizer take {share:.1%} of a GPU"
    return Setting(name, "zero1" if share > MEMORY_SHARE / 2 else "none", reason)


def _batch_size(machine: Machine, memory: Memory) -> Setting:
    """The largest share of a rank's sequences that fits in one pass."""
    usable = MEMORY_SHARE * (machine.memory_bytes - RESERVED_BYTES)
    size = max(1, SEQUENCES // machine.count)
    while memory(batch_size=size).peak > usable and size > 1:
        size //= 2
    needed = memory(batch_size=size).peak
    room = f"{needed / 1e9:.1f} of {machine.memory_bytes / 1e9:.1f} GB by formula"
    return Setting("batch_size", size, f"sequences of a process in one pass: {room}")


def _compile(machine: Machine, minutes: float | None) -> Setting:
    if not machine.has_triton:
        return Setting("compile", False, "it needs Triton, which is not installed")
    if minutes is None:
        return Setting("compile", True, "it saves a few percent of each step")
    return Setting("compile", False, "it saves a few percent of a step, and takes a minute")


def _cuda_graph(machine: Machine, sharding: str) -> Setting:
    name = "cuda_graph"
    if sharding != "none":
        return Setting(name, False, "not tried with a sharded optimizer")
    if machine.capability < (8, 0):
        return Setting(name, False, "a step is long here: the host keeps ahead of the GPU")
    return Setting(name, True, "the host would launch hundreds of kernels in a few milliseconds")


def memory_rows(memory_bytes: int, ranks: int) -> list[dict[str, Any]]:
    """The memory that a GPU needs to train each preset: rows of a table.

    By `rank_memory`, with float32 weights, float16 matmuls, and one sequence per GPU.

    Args:
        memory_bytes: of one GPU.
        ranks: GPUs in the last two columns.
    """
    rows = []
    ways = {"one GPU": (1, 0), f"{ranks} GPUs": (ranks, 0), f"{ranks} GPUs, ZeRO-1": (ranks, 1)}
    for name in ("tinystories", *SIZES):
        config = model_preset(name)
        row: dict[str, Any] = {"model": name, "weights": num_parameters(config)}
        for way, (count, stage) in ways.items():
            needed = rank_memory(config, ranks=count, stage=stage, dtype="float16").peak
            fits = needed + RESERVED_BYTES <= memory_bytes
            row[f"{way} (GB)"] = f"{needed / 1e9:.1f}" + ("" if fits else ", too much")
        rows.append(row)
    return rows


def run_training(
    plan: Plan,
    config: TrainConfig,
    deadline: float,
    on_metrics: Callable[[dict[str, Any]], None] | None = None,
) -> TrainResult:
    """Train with `config` in the processes of `plan` until `time.time()` reaches `deadline`.

    The same call with a later deadline resumes the run. However slow the machine, the run gets a
    line of metrics. With several processes, which are launched here, `on_metrics` is not called.
    """
    result = _train_until(plan, config, deadline, on_metrics)
    if result.status == "stopped" and result.step < config.log_interval:
        # too early for a line of metrics: take one more step, and log it with those before
        config = dataclasses.replace(config, log_interval=1)
        result = _train_until(plan, config, deadline, on_metrics)
    return result


def _train_until(
    plan: Plan,
    config: TrainConfig,
    deadline: float,
    on_metrics: Callable[[dict[str, Any]], None] | None,
) -> TrainResult:
    from lib.ddp.launcher import launch
    from lib.training.loop import train

    # the smallest value that counts as a limit
    seconds = max(1e-3, deadline - time.time())
    config = dataclasses.replace(config, max_seconds=0.0 if math.isinf(seconds) else seconds)
    if plan.ranks == 1:
        return train(config, on_metrics=on_metrics)
    return launch(train, plan.ranks, config)[0]
