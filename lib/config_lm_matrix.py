"""What `python -m lib benchmark lm-matrix` measures: a frozen dataclass, checked when made."""

import dataclasses

from lib.config import check
from lib.config_ranks import RanksBenchmarkConfig, check_different
from lib.config_training import ATTENTION_KERNELS, DDP_WRAPPERS, ModelConfig
from lib.model_presets import MODEL_PRESETS, model_preset

SIZES = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length")


@dataclasses.dataclass(frozen=True)
class LmMatrixConfig(RanksBenchmarkConfig):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_different(self, {"kernels": ATTENTION_KERNELS, "wrappers": DDP_WRAPPERS})
        check(self, "wrappers", bool(self.wrappers), "at least one")
        known = ", ".join(MODEL_PRESETS)
        check(self, "model", self.model is None or self.model in MODEL_PRESETS, f"one of {known}")
        if self.model is not None:
            self.shape()

    def shape(self, kernel: str = "sdpa") -> ModelConfig:
        """The model, with an attention kernel."""
        given = {name: getattr(self, name) for name in SIZES if getattr(self, name) is not None}
        preset = model_preset(self.model or "tiny")
        return dataclasses.replace(preset, attention_kernel=kernel, **given)
