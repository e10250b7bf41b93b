"""The speedrun of notebook 08: what suits a machine best.

`choose` knows a machine by its figures alone, so that it can be asked about machines that are
elsewhere. What differs from chip to chip is measured on the spot, in `lib.speedrun_run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lib.config import TokenizeConfig
from lib.config_training import ModelConfig, OptimizerConfig, TrainConfig
from lib.memory_accounting import RESERVED_BYTES, rank_memory
from lib.model_presets import model_preset

# Windows in a step of the large model, over all GPUs.
WINDOWS = 256
# How much of a GPU's memory a plan fills, by formula.
MEMORY_SHARE = 0.7
# About how long torch.compile takes before the first step.
COMPILE_MINUTES = 1.0


@dataclass(frozen=True)
class Machine:
    """What a choice depends on."""

    device: str
    """`cpu`, `cuda` or `mps`."""

    chip: str
    """Its name."""

    count: int = 1
    """How many of them."""

    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None without CUDA."""

    memory_bytes: int = 0
    """Of one GPU; 0 without."""


# A Kaggle notebook with the accelerator "GPU T4 x2".
TWO_T4 = Machine("cuda", "Tesla T4", 2, (7, 5), 15 * 2**30)
H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", 1, (9, 0), 79 * 2**30)


class Setting(NamedTuple):
    """One decision."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Plan:
    """What `choose` has decided."""

    ranks: int
    """Processes that train together, each with a GPU of its own where there are several."""

    corpus: TokenizeConfig
    """Text, tokenizer and token arrays."""

    train: TrainConfig
    """The full training, without its folders."""

    settings: tuple[Setting, ...]
    """The decisions with their reasons, for a table."""


def choose(
    machine: Machine,
    *,
    minutes: float | None,
    attention_ms: Mapping[str, float] | None = None,
    compile_gain: float = 0.0,
    corpus: str = "stories",
) -> Plan:
    """What `machine` should train, and how, each decision with its reason.

    Args:
        minutes: how long it may take in all; None: as long as the full training takes.
        attention_ms: what `lib.speedrun_run.attention_times` measured there; without it a rule of
            thumb decides.
        compile_gain: which part of a step's time torch.compile saves, from `compile_gain_of`.
        corpus: as in `TokenizeConfig`.
    """
    if machine.device != "cuda":
        return _small_plan(machine, corpus)
    dtype = _dtype(machine)
    kernel = _attention(machine, attention_ms or {})
    model = dataclasses.replace(
        model_preset("tinystories"), vocab_size=None, attention_kernel=kernel.value
    )
    # only its size counts here
    sized = dataclasses.replace(model, vocab_size=10_000)
    weights = _short_weights(machine, sized, dtype.value)
    sharding = _sharding(machine, sized, dtype.value, weights.value)
    batch = _batch_size(machine, sized, dtype.value, weights.value)
    settings = (
        Setting("processes", machine.count, f"one for each {machine.chip}"),
        dtype,
        weights,
        kernel,
        Setting("ddp_wrapper", *_wrapper(machine.count, sharding.value)),
        sharding,
        batch,
        _compile(minutes, compile_gain),
        _cuda_graph(machine, sharding.value),
    )
    values = {setting.name: setting.value for setting in settings[1:]}
    train = TrainConfig(
        model=model,
        optimizer=OptimizerConfig(0.003, 0.0001, warmup_steps=200),
        steps=5000,
        gradient_accumulation_steps=WINDOWS // (batch.value * machine.count),
        log_interval=25,
        eval_interval=500,
        checkpointing_interval=1000,
        **{name: values[name] for name in values if name != "attention_kernel"},
    )
    vocab_size = 4096 if corpus == "stories" else 10_000
    text = TokenizeConfig(corpus=corpus, corpus_bytes=100_000_000, vocab_size=vocab_size)
    return Plan(machine.count, text, train, settings)


def _small_plan(machine: Machine, corpus: str) -> Plan:
    """What a machine without CUDA can do in a minute."""
    train = TrainConfig(
        model=dataclasses.replace(model_preset("tiny"), vocab_size=None),
        optimizer=OptimizerConfig(0.004, 0.0004, warmup_steps=50),
        steps=1600,
        batch_size=8,
        log_interval=4,
        eval_interval=0,
        eval_tokens=50_000,
    )
    # its own fast types need tensor cores, and Triton a GPU
    settings = (
        Setting("processes", 1, "several would share the same cores"),
        Setting("dtype", "float32", f"{machine.chip} is not faster in a shorter type"),
        Setting("attention_kernel", "sdpa", "our kernels need a CUDA GPU"),
        Setting("ddp_wrapper", "none", "there is nobody to average with"),
        Setting("sharded_optimizer", "none", "there is nobody to share with"),
        Setting("batch_size", train.batch_size, "small, so that a minute holds many steps"),
        Setting("compile", False, "compiling would take longer than it saves"),
    )
    text = TokenizeConfig(corpus=corpus, corpus_bytes=5_000_000, vocab_size=1024)
    return Plan(1, text, train, settings)


def _dtype(machine: Machine) -> Setting:
    if machine.capability >= (8, 0):
        return Setting("dtype", "bfloat16", "tensor cores, and the range of float32")
    return Setting("dtype", "float16", "tensor cores here know no bfloat16; the loss is scaled")


def _short_weights(machine: Machine, model: ModelConfig, dtype: str) -> Setting:
    """Weights in the short type, where it has the range, and no gradients are added up in it."""
    name = "low_precision_weights"
    if dtype == "float16":
        return Setting(name, False, "float16 would lose small updates and overflow in large sums")
    if _batch_size(machine, model, dtype, True).value * machine.count < WINDOWS:
        return Setting(name, False, "gradients of several passes are added up in float32")
    return Setting(name, True, "no casts in a step; AdamW keeps float32 masters")


def _cuda_graph(machine: Machine, sharding: str) -> Setting:
    name = "cuda_graph"
    if sharding != "none":
        return Setting(name, False, "not tried with a sharded optimizer")
    if machine.capability < (8, 0):
        return Setting(name, False, "a step is long here: the host keeps ahead of the GPU")
    return Setting(name, True, "the host would launch hundreds of kernels in a few milliseconds")


def _attention(machine: Machine, times: Mapping[str, float]) -> Setting:
    """The kernel that was the fastest on the machine itself, where somebody measured.

    Else a rule of thumb. For Hopper it comes from the records in artifacts/attention_sweep.jsonl.
    For a T4 (sm_75) there is no record: compiled ahead of time, Triton's kernels hold no
    tensor-core instruction for it, while PyTorch's memory-efficient one uses them.
    """
    name = "attention_kernel"
    if times:
        shown = ", ".join(f"{kernel} {ms:.3g} ms" for kernel, ms in times.items())
        return Setting(name, min(times, key=times.__getitem__), f"measured here: {shown}")
    if machine.capability[0] == 9:
        return Setting(name, "flash_attention_triton", "faster than PyTorch's on Hopper")
    if machine.capability < (8, 0):
        return Setting(name, "sdpa", "Triton uses no tensor cores on chips before Ampere")
    return Setting(name, "sdpa", "ours was not measured on this chip")


def _wrapper(ranks: int, sharding: str) -> tuple[str, str]:
    if ranks == 1:
        return "none", "there is nobody to average with"
    if sharding == "zero1":
        return "none", "the sharded optimizer averages the gradients of its own part"
    return "flashddp", "buckets are averaged while backward still computes"


def _sharding(machine: Machine, model: ModelConfig, dtype: str, short: bool) -> Setting:
    """ZeRO-1 where a rank's whole state would crowd its GPU."""
    if machine.count == 1:
        return Setting("sharded_optimizer", "none", "there is nobody to share with")
    memory = rank_memory(
        model, ranks=machine.count, dtype=dtype, low_precision_weights=short, batch_size=1
    )
    share = memory.between_steps / (machine.memory_bytes - RESERVED_BYTES)
    reason = f"weights and optimizer take {share:.1%} of a GPU"
    return Setting("sharded_optimizer", "zero1" if share > MEMORY_SHARE / 2 else "none", reason)


def _batch_size(machine: Machine, model: ModelConfig, dtype: str, short: bool) -> Setting:
    """The most windows in one pass that fit, of a rank's share of the step."""
    usable = MEMORY_SHARE * (machine.memory_bytes - RESERVED_BYTES)
    size = max(1, WINDOWS // machine.count)

    def needed() -> int:
        settings = {"ranks": machine.count, "dtype": dtype, "low_precision_weights": short}
        return rank_memory(model, batch_size=size, **settings).peak

    while size > 1 and needed() > usable:
        size //= 2
    room = f"{needed() / 1e9:.1f} of {machine.memory_bytes / 1e9:.1f} GB by formula"
    return Setting("batch_size", size, f"windows of a process in one pass: {room}")


def _compile(minutes: float | None, gain: float) -> Setting:
    pays = minutes is None or gain * minutes > COMPILE_MINUTES
    span = "the full training" if minutes is None else f"{minutes:g} minutes"
    compared = "more" if pays else "less"
    reason = f"saves {gain:.0%} of a step, in {span} {compared} than the compiling takes"
    return Setting("compile", pays, reason)


def compile_gain_of(records: Sequence[Mapping[str, Any]]) -> float:
    """Which part of a step torch.compile saves at best, in the records of `benchmark training`.

    0 where there are none.
    """
    speed = {}
    for record in records:
        figures = record["figures"]
        if figures.get("task") == "step":
            speed[figures["model"], figures["candidate"]] = figures["tokens_per_s"]
    models = {model for model, _ in speed}
    pairs = [(speed.get((m, "all")), speed.get((m, "without torch.compile"))) for m in models]
    return max([1 - without / best for best, without in pairs if best and without], default=0.0)
