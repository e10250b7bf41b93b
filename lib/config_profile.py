"""What a profile is taken of: a frozen dataclass, checked when made."""

import dataclasses
from pathlib import Path

from lib.config import check
from lib.config_training import ATTENTION_KERNELS


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """A few training steps of a model, watched by PyTorch's profiler."""

    model: str = "tiny"
    """A model preset, such as `tiny`, `small` or `gpt2-124m`."""

    batch_size: int = 8
    """Windows a step."""

    context_length: int | None = None
    """Tokens in a window; the preset's when left out."""

    attention_kernel: str = "sdpa"
    """Which implementation computes attention."""

    dtype: str = "auto"
    """Of activations and matrix products: `auto`, `float32`, `bfloat16` or `float16`."""

    low_precision_weights: bool = False
    """Whether the model holds its matrices in `dtype`, and AdamW the float32 masters."""

    compile: bool = False
    """Whether `torch.compile` fuses the model."""

    cuda_graph: bool = False
    """Whether the whole step is recorded once and replayed."""

    warmup_steps: int = 3
    """Steps before the profile, in which things are compiled and memory is taken."""

    steps: int = 3
    """Steps in the profile."""

    memory: bool = True
    """Whether a further step is watched for its memory."""

    nvtx: bool = False
    """Only run the steps, with NVTX ranges, between the marks that `nsys profile` waits for."""

    nsys: bool = True
    """Whether `nsys profile` is run too where it is installed and there is a CUDA device."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    seed: int = 0
    """Which weights and tokens."""

    output: Path = Path("artifacts/profile")
    """The folder for trace, tables and figures; files of an earlier profile are replaced."""

    def __post_init__(self) -> None:
        for field in ("batch_size", "warmup_steps", "steps"):
            check(self, field, getattr(self, field) > 0, "at least 1")
        length = self.context_length
        check(self, "context_length", length is None or length > 0, "at least 1")
        known = ", ".join(ATTENTION_KERNELS)
        check(self, "attention_kernel", self.attention_kernel in ATTENTION_KERNELS, known)
        check(self, "seed", self.seed >= 0, "0 or more")
