"""The cells of the language-model matrix: what each trains, on which tokens, in how much memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from lib.config_lm_matrix import SIZES, LmMatrixConfig
from lib.config_ranks import RanksBenchmarkConfig, check_ranks
from lib.config_training import ModelConfig, OptimizerConfig, TrainConfig
from lib.data import random_tokens
from lib.memory_accounting import default_cap_mb
from lib.model_costs import activation_bytes, num_parameters
from lib.model_presets import model_preset

CPU_KERNELS = ("scaled_dot_prod_attention", "vectorized_torch", "flash_attention_torch", "sdpa")
GPU_KERNELS = ("vectorized_torch", "flash_attention_triton", "sdpa")
# Of a float32 weight: itself, its gradient, AdamW's two moments. One held in 2 bytes has a float32
# master, and the sum is the same.
BYTES_PER_PARAMETER = 16


@dataclasses.dataclass(frozen=True)
class LmMatrixCase:
    """One cell: a training with one kernel in one wrapper."""

    kernel: str
    """Which implementation computes attention."""

    wrapper: str
    """How gradients are averaged."""

    model: str
    """The preset that the sizes below come from, those apart that were given."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int
    context_length: int

    tr_batch_size: int
    """Windows that each rank takes in a step."""

    ranks: int
    """Processes that train together."""

    backend: str
    """How they talk: `nccl` or `gloo`."""

    dtype: str
    """Of matrix products."""

    tf32: bool
    compile: bool
    cuda_graph: bool
    low_precision_weights: bool
    bucket_size_mb: float
    epochs: int
    timed_epochs: int
    steps_per_epoch: int
    loss_steps: int

    @property
    def shape(self) -> ModelConfig:
        """The model."""
        sizes = {name: getattr(self, name) for name in SIZES}
        preset = model_preset(self.model)
        return dataclasses.replace(preset, attention_kernel=self.kernel, **sizes)

    @property
    def compared_steps(self) -> int:
        """The first so many steps, whose losses are kept."""
        return min(self.loss_steps, self.epochs * self.steps_per_epoch)

    def training(self, *, parts: int = 1, log_interval: int) -> TrainConfig:
        """The training, with a step's batch in so many `parts` one after another."""
        return TrainConfig(
            model=self.shape,
            optimizer=OptimizerConfig(warmup_steps=0),
            steps=10**6,
            batch_size=self.tr_batch_size,
            gradient_accumulation_steps=parts,
            dtype=self.dtype,
            compile=self.compile,
            cuda_graph=self.cuda_graph,
            low_precision_weights=self.low_precision_weights,
            ddp_wrapper=self.wrapper,
            bucket_size_mb=self.bucket_size_mb,
            log_interval=log_interval,
        )


def settled(config: LmMatrixConfig, ranks: int, *, on_gpu: bool) -> LmMatrixConfig:
    """`config` with what it leaves out, but `dtype`, chosen for so many ranks on such devices.

    Raises:
        ValueError: `ranks` is another number in `config`, or the model's sizes do not fit together.
    """
    check_ranks(config.ranks, ranks)
    chosen = dataclasses.replace(
        config,
        ranks=ranks,
        backend=config.backend or ("nccl" if on_gpu else "gloo"),
        model=config.model or ("matrix" if on_gpu else "tiny"),
        kernels=config.kernels or (GPU_KERNELS if on_gpu else CPU_KERNELS),
        tr_batch_size=config.tr_batch_size or (8 if on_gpu else 2),
        steps_per_epoch=config.steps_per_epoch or (20 if on_gpu else 3),
    )
    if chosen.cuda_graph and not on_gpu:
        raise ValueError("cuda_graph is True on a CPU; right is: False, or GPUs")
    chosen.shape()
    return chosen


def make_case(config: LmMatrixConfig, kernel: str, wrapper: str, dtype: str) -> LmMatrixCase:
    """The cell of a `settled` config."""
    shape = config.shape(kernel)
    names = {field.name for field in dataclasses.fields(LmMatrixCase)}
    values = {name: getattr(config, name) for name in names & vars(config).keys()}
    values |= {name: getattr(shape, name) for name in SIZES}
    values |= {"kernel": kernel, "wrapper": wrapper, "dtype": dtype}
    return LmMatrixCase(**values | {"bucket_size_mb": bucket_size_mb(config, shape, dtype)})


def bucket_size_mb(config: RanksBenchmarkConfig, shape: ModelConfig, dtype: str) -> float:
    """MiB in a bucket, as `config` says or as training chooses."""
    if config.bucket_size_mb is not None:
        return config.bucket_size_mb
    short = config.low_precision_weights
    return default_cap_mb(shape, dtype=dtype, low_precision_weights=short)


def skewed_tokens(case: LmMatrixCase, seed: int) -> np.ndarray:
    """Token ids for one epoch, low ones the most frequent, so that there is something to learn."""
    windows = case.steps_per_epoch * case.tr_batch_size * case.ranks
    # the sampler begins each epoch elsewhere in the first window
    num_tokens = (windows + 1) * case.context_length
    uniform = random_tokens(num_tokens, 1 << 16, seed) / (1 << 16)
    return (uniform**4 * case.vocab_size).astype(np.int32)


def fits_together(cases: Sequence[LmMatrixCase], memory: float) -> bool:
    """Whether models and optimizers of all `cases` are likely to fit into `memory` bytes at once.

    A recorded CUDA graph keeps what its step works on; otherwise one step works at a time.
    """
    shape = cases[0].shape
    if shape.attention_kernel.endswith("_compiled"):
        # what the compiler keeps is no more
        shape = dataclasses.replace(shape, attention_kernel="vectorized_torch")
    size = 4 if cases[0].dtype == "float32" else 2
    autocast = size < 4 and not cases[0].low_precision_weights
    working = activation_bytes(
        shape, cases[0].tr_batch_size, element_bytes=size, autocast=autocast, cuda=True
    )
    states = len(cases) * BYTES_PER_PARAMETER * num_parameters(shape)
    return states + (len(cases) if cases[0].cuda_graph else 1) * working < 0.8 * memory


def paired_figures(figures: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each wrapper's figures the further ones that compare it with `none`, turn by turn."""
    alone = figures.get("none", {})
    memory = alone.get("peak_memory_bytes")
    further = {}
    for wrapper, row in figures.items():
        ratios = turn_ratios(alone.get("times_ms", []), row.get("times_ms", []))
        own = row.get("peak_memory_bytes")
        further[wrapper] = {
            "scaling_efficiency": median(ratios) if ratios else None,
            "iqr_scaling_efficiency": spread(ratios),
            "memory_overhead": own / memory - 1 if own and memory else None,
        }
    return further


def turn_ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Times of the first over those of the second, turn by turn: above 1, the second is faster."""
    return [a / b for a, b in zip(first, second)]


def spread(values: Sequence[float]) -> float | None:
    """The interquartile range; None of nothing."""
    return float(np.subtract(*np.percentile(values, [75, 25]))) if len(values) else None


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    """The largest difference between losses of the same step; None where there are none."""
    return max((abs(a - b) for a, b in zip(losses, reference)), default=None)
