"""The rows of the step benchmark: what each measures, and how much memory it should take."""

from __future__ import annotations

import dataclasses
import itertools
import os

import torch

from lib.config import StepBenchmarkConfig
from lib.config_training import ModelConfig
from lib.hardware import pick_dtype
from lib.loss import CHUNK_BYTES, CHUNK_PART
from lib.model_costs import activation_bytes, num_parameters, parameters_by_part
from lib.model_presets import model_preset

# Sizes where none are named: for a laptop, and for a GPU.
CPU_SIZES = (("tiny",), (32, 64, 128))
GPU_SIZES = (("small", "medium", "large", "xl"), (128, 256, 512, 1024))


@dataclasses.dataclass(frozen=True)
class StepCase:
    """What one row of the benchmark measures."""

    model: str
    """A model preset."""

    mode: str
    """`forward`, `forward_backward` or `full_step`."""

    batch_size: int
    """Windows a step."""

    seq_len: int
    """Tokens in a window."""

    dtype: str
    """Of matrix products: `float32`, or a short type by autocast."""

    tf32: bool
    """Whether float32 products may use TF32."""

    compile: bool
    """Whether each layer is compiled."""

    attention_kernel: str
    """Which implementation computes attention."""

    warmup: int
    """Steps before anything counts."""

    samples: int
    """The most samples that are taken."""

    max_seconds: float
    """About how long they may take."""

    @property
    def shape(self) -> ModelConfig:
        """The model, for windows of this length."""
        return dataclasses.replace(
            model_preset(self.model),
            context_length=self.seq_len,
            attention_kernel=self.attention_kernel,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch's."""
        return getattr(torch, self.dtype)


def step_cases(config: StepBenchmarkConfig, device: torch.device) -> list[StepCase]:
    """The rows that `config` asks for; those that can share a model or compiled code are together.

    Raises:
        ValueError: a model preset or an attention kernel is unknown.
    """
    names, lengths = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    # "auto" is float32 on a CPU, which has bfloat16 too
    short = pick_dtype(device, "auto" if device.type == "cuda" else "bfloat16")
    short = str(short).removeprefix("torch.")
    dtypes = [short if config.mixed_precision else "float32"]
    if config.compare_precision:
        dtypes = ["float32", short]
    cases = [
        StepCase(
            model=name,
            mode=mode,
            batch_size=config.batch_size,
            seq_len=length,
            dtype=dtype,
            tf32=config.tf32,
            compile=is_compiled,
            attention_kernel=kernel,
            warmup=config.warmup,
            samples=config.samples,
            max_seconds=config.max_seconds,
        )
        for name, is_compiled, dtype, kernel, length, mode in itertools.product(
            config.configs or names,
            (False, True) if config.compare_compile else (config.compile,),
            dtypes,
            config.attention_kernel,
            config.seq_lens or lengths,
            config.modes,
        )
    ]
    for case in cases:
        _ = case.shape
    return cases


def predicted_memory(case: StepCase, device: torch.device) -> int | None:
    """About the most bytes that a step holds, the model's own included; None: not predictable.

    With P parameters: weights 4 P and, in a full step, AdamW's moments 8 P, all the time; and at
    the worst moment

    - forward: one layer's or the loss's tensors, and the weights' short copies under autocast
    - with gradients: either what is kept for the backward pass (`lib.model_costs`), at its start,
      or the gradients, 4 P, at its end; on a CPU AdamW then works on 8 P more.
    """
    shape, on_gpu = case.shape, device.type == "cuda"
    element_bytes = case.torch_dtype.itemsize
    is_short = element_bytes < 4
    width, vocabulary = shape.d_model, shape.vocab_size
    tokens, weights = case.batch_size * case.seq_len, 4 * num_parameters(shape)
    most_logits = CHUNK_PART * device_memory(device) if on_gpu else CHUNK_BYTES
    logits = min(tokens * vocabulary * element_bytes, int(most_logits))
    if is_short and not on_gpu:
        # there the loss also copies them to float32
        logits *= 3
    # the residual stream and its norm, and what lies between the feed-forward layer's products
    layer = tokens * element_bytes * (4 * width + 3 * shape.ff_width)
    if case.mode == "forward":
        parts = parameters_by_part(shape)
        matrices = parts["attention"] + parts["feed_forward"]
        copies = element_bytes * matrices if is_short and not case.compile else 0
        head = (tokens + is_short * vocabulary) * width * element_bytes
        return weights + copies + max(layer + _scores(case), logits + head)
    try:
        kept = activation_bytes(
            shape,
            case.batch_size,
            element_bytes=element_bytes,
            autocast=is_short,
            cuda=on_gpu,
        )
    except ValueError:
        return None
    if case.mode == "forward_backward":
        return weights + max(kept + max(layer, logits), weights)
    update = weights if on_gpu else 3 * weights
    return 3 * weights + max(kept + max(layer, logits), update)


def _scores(case: StepCase) -> int:
    """What a textbook kernel holds at a time: scores, a masked copy, exponentials, all float32."""
    if case.attention_kernel in ("sdpa", "flash_attention_torch", "flash_attention_triton"):
        return 0
    heads = case.batch_size * case.shape.num_heads
    heads = 1 if case.attention_kernel == "scaled_dot_prod_attention" else heads
    return 12 * heads * case.seq_len**2


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory that `device` has; None where it does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
