"""The trainings of the sharding benchmark: its methods, and the memory each should take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any, ClassVar

from lib.core.settings import NonEmpty, NonNegativeInt, check, settings
from lib.model.config import ATTENTION_KERNELS, MODEL_PRESETS, model_preset
from lib.profiling.measurement import interquartile_range
from lib.profiling.memory_formula import RankMemory
from lib.tools.benchmarks.multi_rank import epoch_ratios, loss_difference
from lib.tools.benchmarks.rank_training import (
    Plan,
    RanksBenchmarkConfig,
    TrainingCase,
    case_fields,
    check_choices,
)
from lib.training.config import TrainConfig

# Method -> its fields of `lib.training.config.TrainConfig`.
SHARDING_METHODS: dict[str, dict[str, Any]] = {
    "none": {"ddp_wrapper": "none", "sharded_optimizer": "none"},
    "flashddp": {"ddp_wrapper": "flashddp", "sharded_optimizer": "none"},
    "flashddp+zero1": {"ddp_wrapper": "flashddp", "sharded_optimizer": "zero1"},
    "flashddp+zero1_parameters": {
        "ddp_wrapper": "flashddp",
        "sharded_optimizer": "zero1",
        "zero1_strategy": "parameters",
    },
    "zero1": {"ddp_wrapper": "none", "sharded_optimizer": "zero1"},
    "torch_ddp+torch_zero": {"ddp_wrapper": "torch_ddp", "sharded_optimizer": "torch_zero"},
    "fsdp": {"ddp_wrapper": "fsdp", "sharded_optimizer": "none"},
    "fsdp2": {"ddp_wrapper": "fsdp2", "sharded_optimizer": "none"},
    "fsdp+checkpoints": {
        "ddp_wrapper": "fsdp",
        "sharded_optimizer": "none",
        "activation_checkpointing": "input",
    },
}
# The method that the others are compared with.
BASE = "flashddp"
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


@settings
class ShardingConfig(RanksBenchmarkConfig):
    """Measure memory and time of training with the optimizer's state replicated and sharded.

    Defaults are chosen for two processes on one CPU, or for all GPUs of the machine.
    """

    models: tuple[str, ...] = ()
    """Model presets; `tiny` by default on a CPU, `large` and `xl` on GPUs."""

    methods: Annotated[tuple[str, ...], NonEmpty] = tuple(SHARDING_METHODS)
    """Ways to train; `none` is each rank alone, and `flashddp` what the others are compared with.

    `zero1` averages gradients itself; `WRAPPER+zero1` leaves that to the wrapper. `+checkpoints`
    recomputes every block in backward.
    """

    attention_kernel: str = "sdpa"
    """Attention kernel."""

    loss_steps: NonNegativeInt = 10
    """Compare the losses of this many first steps with those of `flashddp`."""

    trace_steps: NonNegativeInt = 2
    """Trace this many further steps with PyTorch's profiler to time communication; 0: none."""

    cpu_defaults: ClassVar[dict[str, Any]] = {
        "models": ("tiny",),
        "tr_batch_size": 2,
        "steps_per_epoch": 3,
    }
    gpu_defaults: ClassVar[dict[str, Any]] = {
        "models": ("large", "xl"),
        "tr_batch_size": 32,
        "steps_per_epoch": 10,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"models": MODEL_PRESETS, "methods": SHARDING_METHODS})
        # no formula predicts what the compiler keeps
        kernels = [name for name in ATTENTION_KERNELS if not name.endswith("_compiled")]
        is_known = self.attention_kernel in kernels
        check(self, "attention_kernel", is_known, f"one of {', '.join(kernels)}")

    def plans(self) -> list[Plan]:
        return [Plan(model, self.methods) for model in self.models]

    def case(self, subject: str, name: str, dtype: str) -> ShardingCase:
        preset = model_preset(subject)
        length = self.context_length or preset.context_length
        shape = dataclasses.replace(
            preset, context_length=length, attention_kernel=self.attention_kernel
        )
        fields = case_fields(self, shape, dtype) | {"model": subject, "method": name}
        return ShardingCase(**fields, wrapper=SHARDING_METHODS[name]["ddp_wrapper"])


@dataclasses.dataclass(frozen=True)
class ShardingCase(TrainingCase):
    """One training: a model trained by one method."""

    method: str
    """One of `SHARDING_METHODS`."""

    @property
    def label(self) -> str:
        return f"{self.model}, {self.method}"

    @property
    def known_figures(self) -> dict[str, Any]:
        return super().known_figures | {"predicted": predicted_bytes(self.predicted)}

    @property
    def stage(self) -> int:
        fields = SHARDING_METHODS[self.method]
        if fields["ddp_wrapper"] in ("fsdp", "fsdp2"):
            return 3
        return int(fields["sharded_optimizer"] != "none")

    @property
    def checkpoints(self) -> bool:
        return "activation_checkpointing" in SHARDING_METHODS[self.method]

    def train_config(self, **changes: Any) -> TrainConfig:
        """The settings for `lib.training`, with those of the method."""
        return dataclasses.replace(super().train_config(**changes), **SHARDING_METHODS[self.method])


def predicted_bytes(memory: RankMemory) -> dict[str, int]:
    """A rank's bytes by kind and moment, as they are measured."""
    kinds = {kind: getattr(memory, kind) for kind in KINDS}
    if not memory.gradients_stay:
        # measured before the optimizer's step, when only averaged ones are left
        kinds["gradients"] = memory.averaged_gradients
    # measured when forward ends, before a block is computed again
    kinds["activations"] -= memory.recomputed
    return kinds | {
        # the first step makes the optimizer's state
        "initialized": memory.between_steps - memory.optimizer_state,
        "before_step": memory.before_step,
        "after_step": memory.between_steps,
        "peak": memory.peak,
    }


def compare_with_base(rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Further figures of each method that compare it with `flashddp`, epoch by epoch.

    `step_ratio` is its time over that of `flashddp`, `state_share` its optimizer state over that of
    `flashddp`, and `saved_*_bytes` how far its peak is below, measured and predicted.
    """
    base = rows.get(BASE, {})
    further = {}
    for method, row in rows.items():
        ratios = epoch_ratios(row["times_ms"], base.get("times_ms", []))
        further[method] = {
            "step_ratio": median(ratios) if ratios else None,
            "iqr_step_ratio": interquartile_range(ratios),
        }
        if base and method != "none":
            state = row["measured"]["optimizer_state"] / base["measured"]["optimizer_state"]
            further[method]["state_share"] = state
            further[method]["loss_difference"] = loss_difference(row["losses"], base["losses"])
            for source in ("measured", "predicted"):
                saved = base[source]["peak"] - row[source]["peak"]
                further[method][f"saved_{source}_bytes"] = saved
    return further
