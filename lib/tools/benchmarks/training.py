"""Speed of training steps: on a GPU against a peer, on a CPU against their matmuls alone.

The peer is built like nanoGPT: learned positions, LayerNorm, GELU, PyTorch's scaled dot-product
attention, `torch.compile`, fused AdamW, clipping by `torch.nn.utils`, autocast to bfloat16. On a
GPU the benchmark also measures what each optimization contributes, and the loss.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.core.allocator import synchronize
from lib.core.figures import BLUE, ORANGE, SKY, house_figure, save_figure
from lib.core.hardware import local_results, peak_flops, pick_device, pick_dtype
from lib.core.records import Record, append_record, format_value, new_record, to_csv
from lib.core.settings import PositiveInt, check, require, settings
from lib.model.config import ModelConfig, model_preset
from lib.model.costs import flops_per_token, num_parameters
from lib.model.loss import linear_cross_entropy
from lib.model.transformer import TransformerLM
from lib.profiling.measurement import interquartile_range, measure_interleaved
from lib.tools.benchmarks import training_cpu
from lib.tools.benchmarks.sections import Section, Table, measured_on, write_report
from lib.training.config import TrainConfig
from lib.training.step import TrainStep, numerics

log = logging.getLogger(__name__)
PEER = "nanoGPT-style"
# Defaults on a GPU.
MODELS, BATCH_SIZES, SAMPLES = ("gpt2-124m", "matrix"), (32, 8), 7
FASTEST: dict = {"compile": True, "cuda_graph": True, "low_precision_weights": True}
# Tokens of the loss that is measured alone.
LOSS_TOKENS = 32_768
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
    "model": "model",
    "candidate": "candidate",
    "tokens_per_s": "tokens/s",
    "median_ms": "ms per step",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "mfu": "MFU",
    "peak_memory_gb": "peak memory (GB)",
    "ratio_to_peer": "times the peer",
}
LOSS_COLUMNS = ("candidate", "tokens", "vocab_size", "median_ms", "peak_memory_gb")

# Takes sequences, (batch, context_length + 1).
Step = Callable[[Tensor], None]


@settings
class TrainingBenchmarkConfig:
    """Training steps: on a GPU against a peer, on a CPU against their matmuls alone."""

    models: tuple[str, ...] = ()
    """Model presets; if empty, `tiny` on CPU, `gpt2-124m` and `matrix` on GPU."""

    batch_sizes: tuple[PositiveInt, ...] = ()
    """Sequences per step, one number for each model."""

    samples: PositiveInt | None = None
    """Samples per candidate; if not set, 30 on CPU and 7 on GPU. Ablations always have 3."""

    steps: PositiveInt = 30
    """Steps per sample on a GPU; always 1 on a CPU."""

    ablations: bool = True
    """Also measure candidates with one optimization left out (GPU only)."""

    loss: bool = True
    """Also measure the loss, chunked and with all logits at once (GPU only)."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    seed: int = 0
    """Seed of the tokens."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records, table and figure."""

    def __post_init__(self) -> None:
        count = len(self.models)
        is_complete = len(self.batch_sizes) == count
        check(self, "batch_sizes", is_complete, f"one number for each of {count} models")


def benchmark_training(config: TrainingBenchmarkConfig) -> Path:
    """Measure the models of `config`; append records, and write a table and, on a GPU, a figure.

    Returns:
        The path of the table. It shows this run; records of earlier runs stay in the .jsonl.

    Raises:
        ValueError: the device is neither a CUDA device nor a CPU, or a model is unknown.
    """
    device = pick_device(config.device)
    require(device.type in ("cpu", "cuda"), f"device must be cpu or a CUDA device, got {device}")
    return benchmark_on_cpu(config) if device.type == "cpu" else benchmark_with_peer(config, device)


def benchmark_on_cpu(config: TrainingBenchmarkConfig) -> Path:
    """Write training_cpu_benchmark.jsonl and .md."""
    config = _with_defaults(config, ("tiny",), training_cpu.BATCH_SIZES, training_cpu.SAMPLES)
    rows = training_cpu.measure_models(
        config.models, config.batch_sizes, samples=config.samples, seed=config.seed
    )
    records = _record(rows, config, torch.device("cpu"), "training_cpu_benchmark")
    return training_cpu.write_cpu_report(records, config.output)


def benchmark_with_peer(config: TrainingBenchmarkConfig, device: torch.device) -> Path:
    """Write training_benchmark.jsonl, .csv, .md and .png."""
    config = _with_defaults(config, MODELS, BATCH_SIZES, SAMPLES)
    rows = _measure_models(config, device, pick_dtype(device, "bfloat16"))
    records = _record(rows, config, device, "training_benchmark")
    return write_training_report(records, config.output)


def _with_defaults(
    config: TrainingBenchmarkConfig,
    models: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    samples: int,
) -> TrainingBenchmarkConfig:
    if not config.models:
        config = dataclasses.replace(config, models=models, batch_sizes=batch_sizes)
    return dataclasses.replace(config, samples=config.samples or samples)


def _record(
    rows: Iterable[dict[str, Any]], config: TrainingBenchmarkConfig, device: torch.device, name: str
) -> list[Record]:
    """Append a record for each row of figures as soon as it is measured, and print it."""
    for model in config.models:
        model_preset(model)  # raises for an unknown preset
    records = []
    for figures in rows:
        records.append(new_record(figures, config=config, seed=config.seed, device=device))
        append_record(config.output / f"{name}.jsonl", records[-1])
        shown = {k: v for k, v in figures.items() if not isinstance(v, list) and v is not None}
        print(", ".join(f"{key} {format_value(value)}" for key, value in shown.items()), flush=True)
    return records


def _measure_models(
    config: TrainingBenchmarkConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Figures of each model's candidates, then of the loss of the first model."""
    with numerics(tf32=True, deterministic=False):
        for name, batch_size in zip(config.models, config.batch_sizes):
            yield from measure_model(config, name, batch_size, device, dtype)
        if config.loss:
            yield from measure_loss(model_preset(config.models[0]), device, dtype)


def measure_model(
    config: TrainingBenchmarkConfig,
    name: str,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[dict[str, Any]]:
    """Figures of the peer and the fastest, interleaved; then of each ablation."""
    shape = model_preset(name)
    next_batch = training_cpu.random_batches(shape, batch_size, config.seed, device)

    def warm(make: Callable[..., Step], *arguments: Any, **changes: Any) -> WarmStep:
        return warm_up(
            lambda: make(shape, *arguments, device, dtype, **changes), next_batch, device
        )

    def sample(step: WarmStep) -> float:
        return milliseconds_per_step(step.run, config.steps, device)

    def figures(candidate: str, step: WarmStep, times_ms: Sequence[float]) -> dict[str, Any]:
        milliseconds = statistics.median(times_ms)
        rate = batch_size * shape.context_length / milliseconds * 1e3
        limit = peak_flops(device, dtype)
        return {
            "task": "step",
            "model": name,
            "candidate": candidate,
            "parameters": num_parameters(shape),
            "batch_size": batch_size,
            "context_length": shape.context_length,
            "tokens_per_s": rate,
            "median_ms": milliseconds,
            "iqr_ms": interquartile_range(times_ms),
            "samples": len(times_ms),
            "mfu": limit and rate * flops_per_token(shape) / limit,
            "peak_memory_gb": step.peak_memory_gb,
            "first_step_s": step.first_step_s,
        }

    # the peer and the fastest, interleaved
    log.info("%s: compiling and warming up %s and ours", name, PEER)
    peer, fastest = warm(peer_step), warm(our_step, batch_size)
    samples = [(sample(peer), sample(fastest)) for _ in range(config.samples)]
    peer_ms, fastest_ms = zip(*samples)
    yield figures(PEER, peer, peer_ms)
    ratio = statistics.median(a / b for a, b in samples)
    yield figures("all", fastest, fastest_ms) | {"ratio_to_peer": ratio}
    del peer, fastest

    # what is left without each optimization
    for candidate, changes in CANDIDATES.items() if config.ablations else ():
        torch.compiler.reset()
        if changes:
            step = warm(our_step, batch_size, **changes)
            yield figures(candidate, step, [sample(step) for _ in range(3)])
            del step


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
    milliseconds_per_step(run, 5, device)
    seconds = time.perf_counter() - start
    after = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return WarmStep(run, (after - before) / 1e9, seconds)


def milliseconds_per_step(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Average time of `steps` steps in ms, including the host's part."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / steps * 1e3


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
    model = TransformerLM(config, generator=torch.Generator().manual_seed(0)).to(device)
    model.use_kernels(kernels)
    if settings.low_precision_weights:
        model.use_low_precision_weights(dtype)
    train_step = TrainStep(model, settings, device, dtype)
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


def measure_loss(
    shape: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Figures of the loss and its gradients: in chunks, and with all logits at once."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        x = torch.randn(size, generator=generator, device=device)
        return (x / shape.d_model**0.5).to(dtype).requires_grad_()

    hidden, weight = draw(LOSS_TOKENS, shape.d_model), draw(shape.vocab_size, shape.d_model)
    targets = torch.randint(shape.vocab_size, (LOSS_TOKENS,), generator=generator, device=device)
    candidates = {
        "all logits at once": lambda: F.cross_entropy(F.linear(hidden, weight).float(), targets),
        "chunked": lambda: linear_cross_entropy(hidden, weight, targets),
        "chunked, 1,024 tokens": lambda: linear_cross_entropy(
            hidden, weight, targets, chunk_tokens=1024
        ),
    }
    steps = [
        lambda loss_of=loss_of: torch.autograd.grad(loss_of(), (hidden, weight))
        for loss_of in candidates.values()
    ]
    measurements = measure_interleaved(steps, device=device, samples=5)
    for candidate, measured in zip(candidates, measurements):
        memory = measured.peak_memory_bytes
        yield {
            "task": "loss",
            "candidate": candidate,
            "tokens": LOSS_TOKENS,
            "vocab_size": shape.vocab_size,
            "d_model": shape.d_model,
            "median_ms": measured.median_ms,
            "samples": measured.samples,
            "peak_memory_gb": memory and memory / 1e9,
        }


def write_training_report(records: Sequence[Record], output: Path) -> Path:
    """Write training_benchmark.csv, .md and .png; return the path of the .md."""
    rows = [record["figures"] for record in records]
    steps = [row for row in rows if row["task"] == "step"]
    losses = [row for row in rows if row["task"] == "loss"]
    parts: list[str | Table] = [measured_on(records), Table(steps, COLUMNS)]
    sections = [Section("Training speed", parts, level=1)]
    if losses:
        columns = {key: key for key in LOSS_COLUMNS}
        sections.append(Section("The loss and its gradients", [Table(losses, columns)]))
    stem = output / "training_benchmark"
    write_report(stem.with_suffix(".md"), sections)
    to_csv(records, stem.with_suffix(".csv"))
    save_training_figure(steps, stem.with_suffix(".png"))
    return stem.with_suffix(".md")


def save_training_figure(rows: Sequence[dict[str, Any]], path: str | os.PathLike) -> Path:
    """Draw bars of tokens/s by candidate, a panel for each model."""
    models = pd.DataFrame(rows).groupby("model", sort=False)
    size = {"width": 8.0, "height": 2.6 * len(models)}
    with house_figure(nrows=len(models), squeeze=False, **size) as (figure, grid):
        for axes, (name, chosen) in zip(grid[:, 0], models):
            # bars are drawn from the bottom up
            chosen = chosen[::-1]
            colors = chosen["candidate"].map({"all": BLUE, PEER: ORANGE}).fillna(SKY)
            bars = axes.barh(chosen["candidate"], chosen["tokens_per_s"] / 1e3, color=colors)
            axes.bar_label(bars, fmt="{:,.0f}", padding=3)
            axes.set(title=name, xlabel="training speed (1,000 tokens/s)", ylabel="candidate")
            axes.grid(visible=False, axis="y")
            axes.margins(x=0.12)
        return save_figure(figure, path)
