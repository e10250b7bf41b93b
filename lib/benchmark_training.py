"""Training speed of whole steps, in turns with a peer; and what each optimisation contributes.

The peer is built the way nanoGPT is: learned positions, LayerNorm, GELU, PyTorch's scaled dot
product attention, `torch.compile`, fused AdamW, clipping by `torch.nn.utils`, autocast to bfloat16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib import model as model_file
from lib.allocations import synchronise
from lib.config import TrainingBenchmarkConfig
from lib.config_training import ModelConfig, TrainConfig
from lib.data import BatchSampler, random_tokens, read_windows
from lib.files import write_atomically
from lib.hardware import peak_flops, pick_device, pick_dtype
from lib.loss import linear_cross_entropy
from lib.model import TransformerLM
from lib.model_costs import flops_per_token, num_parameters
from lib.model_presets import model_preset
from lib.plots import save_training_figure
from lib.report import append_record, new_record, read_records, to_csv, to_markdown
from lib.train_step import TrainStep, numerics

PEER = "nanoGPT-style"
# What is measured where the config names none.
MODELS, BATCH_SIZES, SAMPLES = ("gpt2-124m", "matrix"), (32, 8), 7
FASTEST = {"compile": True, "cuda_graph": True, "low_precision_weights": True}
# Each leaves one thing out of the fastest; `all` is the fastest itself.
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
    "median_ms": "ms a step",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "mfu": "MFU",
    "peak_memory_gb": "peak memory (GB)",
    "ratio_to_peer": "times the peer",
}


class PeerBlock(nn.Module):
    """GPT-2's block (Radford et al. 2019) without biases."""

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
        batch, length, d_model = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, self.num_heads, -1).unbind(2)
        heads = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, d_model))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class PeerLM(nn.Module):
    """The peer's model: as many parameters in each block as ours, 3/2 d_ff without a gate."""

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
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), targets.flatten())


Step = Callable[[Tensor], None]


def peer_step(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Step:
    """A training step of the peer, as nanoGPT takes it."""
    model = PeerLM(config).to(device)
    loss_of = torch.compile(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(windows: Tensor) -> None:
        with torch.autocast(device.type, dtype):
            loss = loss_of(windows[:, :-1], windows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_step(
    config: ModelConfig, batch_size: int, device: torch.device, dtype: torch.dtype, **changes: Any
) -> Step:
    """A training step of this library: the fastest settings, with `changes`."""
    has_kernels = changes.pop("kernels", True)
    # the one kernel of the library that needs a GPU
    default = "flash_attention_triton" if device.type == "cuda" else config.attention_kernel
    kernel = changes.pop("attention_kernel", default)
    config = dataclasses.replace(config, attention_kernel=kernel)
    settings = TrainConfig(
        model=config, batch_size=batch_size, steps=10**6, **{**FASTEST, **changes}
    )
    model = TransformerLM(config, generator=torch.Generator().manual_seed(0)).to(device)
    if settings.low_precision_weights:
        model.use_low_precision_weights(dtype)
    train_step = TrainStep(model, settings, device, dtype)

    def step(windows: Tensor) -> None:
        with contextlib.nullcontext() if has_kernels else without_kernels():
            train_step(windows, 1e-4)

    return step


def without_kernels() -> contextlib.AbstractContextManager:
    """The model's elementwise steps as PyTorch operations, on a GPU too."""
    return mock.patch.object(model_file, "has_kernels", _no_kernels)


def _no_kernels(x: Tensor) -> bool:
    return False


def benchmark_training(config: TrainingBenchmarkConfig) -> Path:
    """Measure what `config` names, on a GPU here and on a CPU in `lib.benchmark_training_cpu`.

    Returns:
        The path of the table.

    Raises:
        ValueError: the device is neither a CUDA device nor a CPU, or a model is not known.
    """
    device = pick_device(config.device)
    if device.type == "cpu":
        from lib.benchmark_training_cpu import benchmark_on_cpu

        return benchmark_on_cpu(config)
    if device.type != "cuda":
        raise ValueError(f"device is {device}; right is: a CUDA device, or cpu")
    return benchmark_with_peer(config, device)


def benchmark_with_peer(config: TrainingBenchmarkConfig, device: torch.device) -> Path:
    """Measure what `config` names on `device`; write training_benchmark.jsonl, .csv, .md and .png.

    Records of an earlier run stay in the .jsonl; table and figure are of this one.
    """
    if not config.models:
        config = dataclasses.replace(config, models=MODELS, batch_sizes=BATCH_SIZES)
    config = dataclasses.replace(config, samples=config.samples or SAMPLES)
    dtype = pick_dtype(device, "bfloat16")
    path = config.output / "training_benchmark.jsonl"
    start = len(read_records(path))

    def keep(figures: dict[str, Any]) -> None:
        append_record(path, new_record(figures, config=config, seed=config.seed, device=device))
        print({key: figures[key] for key in COLUMNS if key in figures}, flush=True)

    with numerics(tf32=True, deterministic=False):
        for name, batch_size in zip(config.models, config.batch_sizes):
            for figures in benchmark_model(config, name, batch_size, device, dtype):
                keep(figures)
        if config.loss:
            for figures in benchmark_loss(model_preset(config.models[0]), device, dtype):
                keep(figures)
    write_report(read_records(path)[start:], config)
    return path.with_suffix(".md")


def benchmark_model(
    config: TrainingBenchmarkConfig,
    name: str,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[dict[str, Any]]:
    """Figures of the peer and the fastest, in turns; then of what is left without each part."""
    shape = model_preset(name)
    tokens = random_tokens(2_000_000, shape.vocab_size, config.seed)
    sampler = BatchSampler(len(tokens), shape.context_length, batch_size, seed=config.seed)

    def take(step: Step) -> None:
        step(read_windows(tokens, sampler.next_starts(), shape.context_length, device))

    def figures(candidate: str, memory: float, seconds: float, times: list[float]) -> dict:
        milliseconds = statistics.median(times)
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
            "iqr_ms": float(np.subtract(*np.percentile(times, [75, 25]))),
            "samples": len(times),
            "mfu": limit and rate * flops_per_token(shape) / limit,
            "peak_memory_gb": memory,
            "first_step_s": seconds,
        }

    def prepared(make: Callable[[], Step]) -> tuple[Step, float, float]:
        """A warm step, the memory in GB that it took from the device, and how long that lasted."""
        before, start = reserved_bytes(device), time.perf_counter()
        step = make()
        take(step)
        milliseconds_a_step(functools.partial(take, step), 5, device)
        seconds = time.perf_counter() - start
        after = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
        return step, (after - before) / 1e9, seconds

    peer, *of_peer = prepared(lambda: peer_step(shape, device, dtype))
    fastest, *of_fastest = prepared(lambda: our_step(shape, batch_size, device, dtype))
    turns = [
        [
            milliseconds_a_step(functools.partial(take, step), config.steps, device)
            for step in (peer, fastest)
        ]
        for _ in range(config.samples)
    ]
    peer_times, times = map(list, zip(*turns))
    yield figures(PEER, *of_peer, peer_times)
    ratio = statistics.median(a / b for a, b in turns)
    yield figures("all", *of_fastest, times) | {"ratio_to_peer": ratio}
    del peer, fastest
    for candidate, changes in CANDIDATES.items() if config.ablations else ():
        torch.compiler.reset()
        if changes:
            make = functools.partial(our_step, shape, batch_size, device, dtype, **changes)
            step, *of_step = prepared(make)
            again = functools.partial(take, step)
            times = [milliseconds_a_step(again, config.steps, device) for _ in range(3)]
            yield figures(candidate, *of_step, times)
            del step, again


def benchmark_loss(
    shape: ModelConfig, device: torch.device, dtype: torch.dtype, num_tokens: int = 32_768
) -> Iterator[dict[str, Any]]:
    """Time and memory of the loss and its gradients: in chunks, and with all logits at once."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        x = torch.randn(size, generator=generator, device=device)
        return (x / shape.d_model**0.5).to(dtype).requires_grad_()

    hidden, weight = draw(num_tokens, shape.d_model), draw(shape.vocab_size, shape.d_model)
    targets = torch.randint(shape.vocab_size, (num_tokens,), generator=generator, device=device)
    candidates = {
        "all logits at once": lambda: F.cross_entropy(F.linear(hidden, weight).float(), targets),
        "chunked": lambda: linear_cross_entropy(hidden, weight, targets),
        "chunked, 1,024 tokens": lambda: linear_cross_entropy(
            hidden, weight, targets, chunk_tokens=1024
        ),
    }
    for candidate, loss_of in candidates.items():

        def step(loss_of: Callable[[], Tensor] = loss_of) -> None:
            torch.autograd.grad(loss_of(), (hidden, weight))

        step()
        before = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        times = [milliseconds_a_step(step, 3, device) for _ in range(5)]
        memory = None
        if device.type == "cuda":
            memory = (torch.cuda.max_memory_allocated(device) - before) / 1e9
        yield {
            "task": "loss",
            "candidate": candidate,
            "tokens": num_tokens,
            "vocab_size": shape.vocab_size,
            "d_model": shape.d_model,
            "median_ms": statistics.median(times),
            "samples": len(times),
            "peak_memory_gb": memory,
        }


def milliseconds_a_step(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """How long each of `steps` steps takes, the host's part of it included."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise(device)
    return (time.perf_counter() - start) / steps * 1e3


def reserved_bytes(device: torch.device) -> int:
    """What PyTorch has taken of the device's memory and needs; the peak is counted from here."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_reserved(device)


def write_report(records: list[dict[str, Any]], config: TrainingBenchmarkConfig) -> None:
    """Table and figure of `records`."""
    stem = config.output / "training_benchmark"
    steps = [r for r in records if r["figures"]["task"] == "step"]
    losses = [r for r in records if r["figures"]["task"] == "loss"]
    machine = f"{records[-1]['device']}, torch {records[-1]['versions']['torch']}"
    text = f"# Training speed\n\n{machine}, {records[-1]['date']}\n\n"
    text += to_markdown([r["figures"] for r in steps], COLUMNS)
    if losses:
        columns = ("candidate", "tokens", "vocab_size", "median_ms", "peak_memory_gb")
        text += "\n## The loss and its gradients\n\n"
        text += to_markdown([r["figures"] for r in losses], {key: key for key in columns})
    write_atomically(f"{stem}.md", text)
    write_atomically(f"{stem}.csv", to_csv(records))
    save_training_figure(steps, f"{stem}.png")
