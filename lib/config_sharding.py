"""What `python -m lib benchmark sharding` measures: a frozen dataclass, checked when made."""

import dataclasses
from typing import Any

from lib.config import check
from lib.config_ranks import RanksBenchmarkConfig, check_different
from lib.config_training import ATTENTION_KERNELS, ModelConfig
from lib.model_presets import MODEL_PRESETS, model_preset

# How each way to train is called, and its fields of `lib.config_training.TrainConfig`.
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
    "fsdp2": {"ddp_wrapper": "fsdp2", "sharded_optimizer": "none"},
}


@dataclasses.dataclass(frozen=True)
class ShardingConfig(RanksBenchmarkConfig):
    """Memory and time of training with the optimizer's state on every rank, and divided among them.

    What is left out is chosen for two processes on one CPU, or for all GPUs of the machine.
    """

    models: tuple[str, ...] = ()
    """Model presets; `tiny` when left out, and on GPUs `large` and `xl`."""

    methods: tuple[str, ...] = tuple(SHARDING_METHODS)
    """Ways to train; `none` is one rank alone, `flashddp` the one that the others are compared to.

    `zero1` averages gradients itself. Those with a + shard the optimizer behind a wrapper.
    """

    attention_kernel: str = "sdpa"
    """Which implementation computes attention."""

    loss_steps: int = 10
    """So many losses are kept, and compared with those of `flashddp`."""

    trace_steps: int = 2
    """Steps watched by PyTorch's profiler, for communication; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_different(self, {"models": MODEL_PRESETS, "methods": SHARDING_METHODS})
        check(self, "methods", bool(self.methods), "at least one")
        # what a compiled one keeps is up to the compiler, and no formula says it
        kernels = [name for name in ATTENTION_KERNELS if not name.endswith("_compiled")]
        known = ", ".join(kernels)
        check(self, "attention_kernel", self.attention_kernel in kernels, known)

    def shape(self, model: str) -> ModelConfig:
        """The model called `model`, with this attention kernel and context."""
        preset = model_preset(model)
        length = self.context_length or preset.context_length
        return dataclasses.replace(
            preset, context_length=length, attention_kernel=self.attention_kernel
        )
