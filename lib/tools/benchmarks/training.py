"""Speed of training steps on a GPU: against a peer, and with one optimization left out.

The peer is built like nanoGPT: learned positions, LayerNorm, GELU, PyTorch's scaled dot-product
attention, `torch.compile`, fused AdamW, clipping by `torch.nn.utils`, autocast to bfloat16. The
loss is measured alone, too.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.core.hardware import peak_flops, pick_dtype
from lib.core.records import Record, to_frame
from lib.core.settings import PositiveInt, check, require, settings
from lib.data.batches import BatchSampler, random_tokens, read_sequences
from lib.model.config import ModelConfig, PresetName, model_preset
from lib.model.costs import flops_per_token, num_parameters
from lib.profiling.measurement import interleave, time_figures, time_ratio, wall_ms
from lib.tools.benchmarks.harness import Benchmark, BenchmarkConfig, grid
from lib.tools.benchmarks.sections import Report
from lib.tools.benchmarks.sweep import Case
from lib.training.config import TrainConfig
from lib.training.step import new_step, numerics

PEER = "nanoGPT-style"
FASTEST: dict = {"compile": True, "cuda_graph": True, "low_precision_weights": True}
# Each candidate leaves one optimization out of the fastest, `all`.
CANDIDATES: dict[str, dict[str, Any]] = {
    "all": {},
    "without low-precision weights": {"low_precision_weights": False},
    "without CUDA graph": {"cuda_graph": False},
    "without our FlashAttention": {"attention_kernel": "sdpa"},
    "without Triton kernels": {"kernels": False, "attention_kernel": "sdpa"},
    "without torch.compile": {"compile": False},
    "none of these": {
        "low_precision_weights": False,
        "cuda_graph": False,
        "kernels": False,
        "attention_kernel": "sdpa",
        "compile": False,
    },
}
COLUMNS = {
    "candidate": "candidate",
    "tokens": "tokens",
    "vocab_size": "vocabulary",
    "tokens_per_s": "tokens/s",
    "median_ms": "median (ms)",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "mfu": "MFU",
    "peak_memory_gb": "peak memory (GB)",
    "first_step_s": "first step (s)",
    "ratio_to_peer": "times the peer",
}

# Takes sequences, (batch, context_length + 1).
Step = Callable[[Tensor], None]


@settings
class TrainingBenchmarkConfig(BenchmarkConfig):
    """Training steps on a GPU against a peer, and what each optimization contributes."""

    models: tuple[PresetName, ...] = ("gpt2-124m", "matrix")
    """Model presets."""

    batch_sizes: tuple[PositiveInt, ...] = (32, 8)
    """Sequences per step, one number for each model."""

    samples: PositiveInt = 7
    """Samples of the peer and ours. Ablations always have 3."""

    steps: PositiveInt = 30
    """Steps per sample."""

    ablations: bool = True
    """Also measure candidates with one optimization left out."""

    device: str = "auto"
    """`auto`, `cuda` or `cuda:N`."""

    def __post_init__(self) -> None:
        count = len(self.models)
        is_complete = len(self.batch_sizes) == count
        check(self, "batch_sizes", is_complete, f"one number for each of {count} models")


def training_groups(config: TrainingBenchmarkConfig, device: torch.device) -> list[list[Case]]:
    """The peer and ours, which are interleaved, then each ablation.

    Raises:
        ValueError: the device is no CUDA device.
    """
    right = "device must be a CUDA device (`benchmark step` measures a CPU)"
    require(device.type == "cuda", f"{right}, got {device}")
    groups = []
    for model, batch_size in zip(config.models, config.batch_sizes):
        names = {"task": "step", "model": model, "batch_size": batch_size, "steps": config.steps}
        both = (PEER, "all")
        groups.append(grid(**names, candidate=both, samples=config.samples))
        if config.ablations:
            ablations = tuple(name for name, changes in CANDIDATES.items() if changes)
            groups += [[case] for case in grid(**names, candidate=ablations, samples=3)]
    return groups


def measure_group(
    group: Sequence[Case], config: TrainingBenchmarkConfig, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Figures of the candidates of one model, interleaved."""
    shape, batch_size = model_preset(group[0].model), group[0].batch_size
    next_batch = random_batches(shape, batch_size, config.seed, device)
    dtype = pick_dtype(device, "bfloat16")

    def make(case: Case) -> Step:
        if case.candidate == PEER:
            return peer_step(shape, device, dtype)
        return our_step(shape, batch_size, device, dtype, **CANDIDATES[case.candidate])

    torch.compiler.reset()
    with numerics(tf32=True, deterministic=False):
        steps = [warm_up(functools.partial(make, case), next_batch, device) for case in group]
        samplers = [functools.partial(wall_ms, step.run, config.steps, device) for step in steps]
        samples = interleave(samplers, group[0].samples)
    limit = peak_flops(device, dtype)
    for case, step, times_ms in zip(group, steps, samples):
        times = time_figures(times_ms)
        rate = batch_size * shape.context_length / times["median_ms"] * 1e3
        figures = {
            "parameters": num_parameters(shape),
            "context_length": shape.context_length,
            "tokens_per_s": rate,
            **times,
            "mfu": limit and rate * flops_per_token(shape) / limit,
            "peak_memory_gb": step.peak_memory_gb,
            "first_step_s": step.first_step_s,
        }
        if case.candidate == "all" and group[0].candidate == PEER:
            figures["ratio_to_peer"], _ = time_ratio(samples[0], times_ms)
        yield figures


def random_batches(
    shape: ModelConfig, batch_size: int, seed: int, device: torch.device
) -> Callable[[], Tensor]:
    """A function that reads the next batch of random tokens, (batch, context_length + 1)."""
    tokens = random_tokens(2_000_000, shape.vocab_size, seed)
    sampler = BatchSampler(len(tokens), shape.context_length, batch_size, seed=seed)
    return lambda: read_sequences(tokens, sampler.next_starts(), shape.context_length, device)


class WarmStep(NamedTuple):
    """A training step after its first calls; `run` takes a step on the next batch."""

    run: Callable[[], None]
    peak_memory_gb: float  # taken from the device; 0 on a CPU
    first_step_s: float  # until it was warm


def warm_up(
    make_step: Callable[[], Step], next_batch: Callable[[], Tensor], device: torch.device
) -> WarmStep:
    """Make a step and take six, which compile it."""
    before, start = reserved_bytes(device), time.perf_counter()
    step = make_step()

    def run() -> None:
        step(next_batch())

    run()
    wall_ms(run, 5, device)
    seconds = time.perf_counter() - start
    after = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return WarmStep(run, (after - before) / 1e9, seconds)


def reserved_bytes(device: torch.device) -> int:
    """Free unused memory, reset the peak, and return the bytes that PyTorch still reserves."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_reserved(device)


def our_step(
    config: ModelConfig,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    kernels: bool = True,
    attention_kernel: str | None = None,
    **changes: Any,
) -> Step:
    """A training step of this library: the fastest settings, with `changes`.

    Args:
        kernels: run the model's elementwise steps as Triton kernels.
        attention_kernel: the fastest on this device by default.
    """
    default = "flash_attention_triton" if device.type == "cuda" else config.attention_kernel
    config = dataclasses.replace(config, attention_kernel=attention_kernel or default)
    sizes: dict = {"model": config, "batch_size": batch_size, "steps": 10**6}
    settings = TrainConfig(**sizes, **{**FASTEST, **changes})
    train_step = new_step(settings, device, dtype, kernels=kernels)
    return lambda sequences: train_step(sequences, 1e-4)


def peer_step(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Step:
    """A training step of the peer, as nanoGPT takes it."""
    model = PeerLM(config).to(device)
    loss_of = torch.compile(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(sequences: Tensor) -> None:
        with torch.autocast(device.type, dtype):
            loss = loss_of(sequences[:, :-1], sequences[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class PeerLM(nn.Module):
    """The peer's model. Without a gate, d_ff is 3/2 of ours: as many parameters per block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d_model = config.d_model
        self.tokens = nn.Embedding(config.vocab_size, d_model)
        self.positions = nn.Embedding(config.context_length, d_model)
        self.blocks = nn.ModuleList(
            PeerBlock(d_model, config.num_heads, config.d_ff * 3 // 2)
            for _ in range(config.num_layers)
        )
        self.ln = nn.LayerNorm(d_model, bias=False)
        self.head = nn.Linear(d_model, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        if config.tied_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of token ids, (batch, length) each."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(positions)  # (batch, length, d_model)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), targets.flatten())


class PeerBlock(nn.Module):
    """The block of GPT-2 (Radford et al. 2019), without biases."""

    def __init__(self, d_model: int, num_heads: int, d_ff: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ln1 = nn.LayerNorm(d_model, bias=False)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.ln2 = nn.LayerNorm(d_model, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after this block, (batch, length, d_model)."""
        batch, length, d_model = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, self.num_heads, -1).unbind(2)
        heads = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )  # (batch, heads, length, head_dim)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, d_model))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


def training_frame(records: Sequence[Record]) -> pd.DataFrame:
    """The last record of each candidate of a model, and of its loss, which was measured once."""
    frame = to_frame(records)
    frame["of"] = [
        f"{row['model']}, {row['batch_size']} × {row['context_length']:,} tokens"
        if row["task"] == "step"
        else "The loss and its gradients"
        for row in frame.to_dict("records")
    ]
    return frame.drop_duplicates(["of", "candidate"], keep="last")


REPORT = Report("training_benchmark", "Training speed", COLUMNS, by=("of",), rows=training_frame)
benchmark_training = Benchmark(REPORT, training_groups, measure_group)
