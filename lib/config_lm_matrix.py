"""What `python -m lib benchmark lm-matrix` measures: a frozen dataclass, checked when made."""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from lib.config import check
from lib.config_training import ATTENTION_KERNELS, DDP_WRAPPERS, ModelConfig
from lib.model_presets import MODEL_PRESETS, model_preset

SIZES = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length")


@dataclasses.dataclass(frozen=True)
class LmMatrixConfig:
    """Training of a language model with each attention kernel in each data-parallel wrapper.

    What is left out is chosen for two processes on one CPU, or for all GPUs of the machine.
    """

    kernels: tuple[str, ...] = ()
    """Attention kernels; when left out, four that run on a CPU, or the three fast ones of a GPU."""

    wrappers: tuple[str, ...] = DDP_WRAPPERS
    """Data-parallel wrappers; `none` is the baseline, each rank with a model of its own."""

    model: str | None = None
    """A model preset, such as `small`; `tiny` when left out, and on GPUs `matrix`."""

    d_model: int | None = None
    """Width of the residual stream; the preset's when left out, as the sizes below."""

    d_ff: int | None = None
    """Inner width of SwiGLU."""

    num_layers: int | None = None
    """Transformer blocks."""

    num_heads: int | None = None
    """Attention heads."""

    vocab_size: int | None = None
    """Token ids."""

    context_length: int | None = None
    """Tokens in a window."""

    tr_batch_size: int | None = None
    """Windows that each rank takes in a step; 2 when left out, and on GPUs 8."""

    epochs: int = 6
    """Epochs that each cell trains."""

    timed_epochs: int = 5
    """The last so many of them are timed, each a sample; those before warm up."""

    steps_per_epoch: int | None = None
    """Steps in an epoch, once through the data; 3 when left out, and on GPUs 20."""

    loss_steps: int = 20
    """So many losses are kept, and compared with those of one process."""

    trace_steps: int = 3
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
    """MiB of gradients that `flashddp` and `torch_ddp` send at a time."""

    seed: int = 0
    """Which weights and tokens."""

    output: Path = Path("artifacts")
    """The folder for records, tables and figures; records of other settings there are kept."""

    def __post_init__(self) -> None:
        for field, known in (("kernels", ATTENTION_KERNELS), ("wrappers", DDP_WRAPPERS)):
            given = getattr(self, field)
            right = f"different ones of {', '.join(known)}"
            check(self, field, set(given) <= set(known) and len(set(given)) == len(given), right)
        check(self, "wrappers", bool(self.wrappers), "at least one")
        known = ", ".join(MODEL_PRESETS)
        check(self, "model", self.model is None or self.model in MODEL_PRESETS, f"one of {known}")
        for field in ("tr_batch_size", "steps_per_epoch", "ranks"):
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
        if self.model is not None:
            self.shape()

    def shape(self, kernel: str = "sdpa") -> ModelConfig:
        """The model, with an attention kernel."""
        given = {name: getattr(self, name) for name in SIZES if getattr(self, name) is not None}
        preset = model_preset(self.model or "tiny")
        return dataclasses.replace(preset, attention_kernel=kernel, **given)
