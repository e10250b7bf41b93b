"""What `python -m lib benchmark sharding` measures: a frozen dataclass, checked when made."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from lib.config import check
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
class ShardingConfig:
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

    context_length: int | None = None
    """Tokens in a window; the preset's when left out."""

    tr_batch_size: int | None = None
    """Windows that each rank takes in a step; 2 when left out, and on GPUs 32."""

    epochs: int = 6
    """Epochs that each method trains."""

    timed_epochs: int = 5
    """The last so many of them are timed, each a sample; those before warm up."""

    steps_per_epoch: int | None = None
    """Steps in an epoch, once through the data; 3 when left out, and on GPUs 10."""

    loss_steps: int = 10
    """So many losses are kept, and compared with those of `flashddp`."""

    trace_steps: int = 2
    """Steps watched by PyTorch's profiler, for communication; 0: none."""

    ranks: int | None = None
    """Processes; 2 on a CPU when left out, or one for each GPU. Under `torchrun` it is its own."""

    backend: Literal["nccl", "gloo"] | None = None
    """How ranks talk: `nccl` on GPUs, `gloo` on CPUs; by what there is when left out."""

    timeout: float = 300.0
    """Seconds that a rank waits for the others."""

    dtype: str = "auto"
    """Of matrix products: `auto` (the shortest that the device is fast in), or its name."""

    tf32: bool = True
    """Whether float32 products may use TF32 on GPUs that have it."""

    compile: bool = False
    """Whether `torch.compile` fuses the model."""

    cuda_graph: bool = False
    """Whether the whole step is recorded once and replayed."""

    low_precision_weights: bool = False
    """Whether the model holds its matrices in `dtype`, and AdamW the float32 masters."""

    bucket_size_mb: float = 25.0
    """MiB of gradients that are sent at a time."""

    seed: int = 0
    """Which weights and tokens."""

    output: Path = Path("artifacts")
    """The folder for records, tables and figures; records of other settings there are kept."""

    def __post_init__(self) -> None:
        for field, known in (("models", MODEL_PRESETS), ("methods", SHARDING_METHODS)):
            given = getattr(self, field)
            right = f"different ones of {', '.join(known)}"
            check(self, field, set(given) <= set(known) and len(set(given)) == len(given), right)
        check(self, "methods", bool(self.methods), "at least one")
        # what a compiled one keeps is up to the compiler, and no formula says it
        kernels = [name for name in ATTENTION_KERNELS if not name.endswith("_compiled")]
        known = ", ".join(kernels)
        check(self, "attention_kernel", self.attention_kernel in kernels, known)
        for field in ("context_length", "tr_batch_size", "steps_per_epoch", "ranks"):
            value = getattr(self, field)
            check(self, field, value is None or value > 0, "at least 1")
        check(self, "timed_epochs", self.timed_epochs > 0, "at least 1")
        right = f"more than timed_epochs {self.timed_epochs}, as the first epoch warms up"
        check(self, "epochs", self.epochs > self.timed_epochs, right)
        for field in ("loss_steps", "trace_steps", "seed"):
            check(self, field, getattr(self, field) >= 0, "0 or more")
        for field in ("timeout", "bucket_size_mb"):
            check(self, field, 0 < getattr(self, field) < math.inf, "more than 0, and finite")
        right = "auto, float32, bfloat16 or float16"
        check(self, "dtype", self.dtype in right.replace(" or", ",").split(", "), right)

    def shape(self, model: str) -> ModelConfig:
        """The model called `model`, with this attention kernel and context."""
        preset = model_preset(model)
        length = self.context_length or preset.context_length
        return dataclasses.replace(
            preset, context_length=length, attention_kernel=self.attention_kernel
        )
