"""How much of the speed of its matmuls training keeps on a CPU: a step against a bare loop.

The bare loop runs the matmuls of one training step, of the same shapes, and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lib.core.files import ROOT
from lib.core.hardware import keep_freed_memory
from lib.core.records import Record
from lib.core.settings import from_json
from lib.data.batches import BatchSampler, random_tokens, read_sequences
from lib.model.config import ModelConfig, model_preset
from lib.model.costs import num_parameters
from lib.model.loss import CHUNK_BYTES
from lib.model.transformer import TransformerLM
from lib.profiling.measurement import PairMeasurement, measure_interleaved
from lib.tools.benchmarks.sections import Section, Table, write_report
from lib.training.config import PipelineConfig, TrainConfig
from lib.training.loop import learning_rate
from lib.training.step import TrainStep, numerics

log = logging.getLogger(__name__)
CPU = torch.device("cpu")
TINY = ROOT / "lib/presets/tiny.json"
# Defaults: the batch size of the tiny pipeline, and samples for about a minute.
BATCH_SIZES, SAMPLES = (32,), 30
# Candidates.
STEP, LOOP = "training step", "training loop"
BARE, BARE_WEIGHTS = "bare loop", "bare loop without attention"
COLUMNS = {
    "model": "model",
    "batch_size": "sequences",
    "candidate": "candidate",
    "products": "matmuls",
    "gflop": "GFLOP",
    "median_ms": "ms per step",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "gflop_per_s": "GFLOP/s",
    "tokens_per_s": "tokens/s",
    "share": "share",
    "iqr_share": "IQR (share)",
    "share_without_attention": "share without attention",
}
NOTE = """The bare loop runs the matmuls of one training step in float32, with `torch.mm` and
`torch.bmm` into preallocated tensors. The training step is the one that `train` takes, with
embedding, norms, softmax, loss and AdamW; the training loop also reads batches, sets the learning
rate and reads the log. The share is the bare loop's time over the candidate's, sample by sample:
how much of the speed of its matmuls training keeps. Attention's matmuls count in full, even where a
fused kernel skips scores that the causal mask hides. In the last column the bare loop leaves out
all of attention's matmuls, and the candidate leaves out nothing."""


def measure_models(
    models: Sequence[str], batch_sizes: Sequence[int], *, samples: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Figures of each candidate, for each model preset with its batch size.

    The other settings are those of the preset pipeline `tiny`.

    Raises:
        ValueError: a model is unknown.
    """
    tiny = from_json(PipelineConfig, TINY).train
    shapes = [model_preset(name) for name in models]
    keep_freed_memory()
    with numerics(tf32=tiny.tf32, deterministic=tiny.deterministic):
        for name, shape, batch_size in zip(models, shapes, batch_sizes):
            log.info("%s: %d samples of each candidate, which take turns", name, samples)
            config = dataclasses.replace(tiny, model=shape, batch_size=batch_size, seed=seed)
            yield from measure_model(config, name, samples=samples)


def measure_model(config: TrainConfig, name: str, *, samples: int) -> list[dict[str, Any]]:
    """Figures of each candidate; all of them are interleaved."""
    matmuls = step_matmuls(config.model, config.batch_size)
    bare = {BARE: matmuls, BARE_WEIGHTS: [m for m in matmuls if len(m.first) == 2]}
    functions = {candidate: bare_loop(made) for candidate, made in bare.items()}
    functions |= training_functions(config)
    measurements = measure_interleaved(list(functions.values()), device=CPU, samples=samples)
    results = dict(zip(functions, measurements))
    tokens = config.batch_size * config.model.context_length
    rows = []
    for candidate, result in results.items():
        made = bare.get(candidate, matmuls)
        row = {
            "model": name,
            "parameters": num_parameters(config.model),
            "batch_size": config.batch_size,
            "context_length": config.model.context_length,
            "threads": torch.get_num_threads(),
            "candidate": candidate,
            "products": len(made),
            "gflop": sum(matmul.flops for matmul in made) / 1e9,
            **result.figures(),
        }
        if result.status == "ok":
            row["gflop_per_s"] = row["gflop"] / row["median_ms"] * 1e3
            if candidate not in bare:
                row["tokens_per_s"] = tokens / row["median_ms"] * 1e3
                # the bare loop's time over this one's, sample by sample
                whole, weights = (PairMeasurement(results[name], result) for name in bare)
                row |= {"share": whole.median_ratio, "iqr_share": whole.iqr_ratio}
                row["share_without_attention"] = weights.median_ratio
        rows.append(row)
    return rows


def random_batches(
    shape: ModelConfig, batch_size: int, seed: int, device: torch.device
) -> Callable[[], Tensor]:
    """A function that reads the next batch of random tokens, (batch, context_length + 1)."""
    tokens = random_tokens(2_000_000, shape.vocab_size, seed)
    sampler = BatchSampler(len(tokens), shape.context_length, batch_size, seed=seed)
    return lambda: read_sequences(tokens, sampler.next_starts(), shape.context_length, device)


def training_functions(config: TrainConfig) -> dict[str, Callable[[], None]]:
    """The step of `train` on the same batch again and again, and the body of its loop."""
    model = TransformerLM(config.model, generator=torch.Generator().manual_seed(config.seed))
    train_step = TrainStep(model, config, CPU, torch.float32)
    next_batch = random_batches(config.model, config.batch_size, config.seed, CPU)
    batch = next_batch()

    def step() -> None:
        train_step(batch, config.optimizer.min_learning_rate)

    def loop() -> None:
        train_step(next_batch(), learning_rate(config, 1))
        if train_step.unread >= config.log_interval:
            train_step.read_log()

    return {STEP: step, LOOP: loop}


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul, or a batch of them, in float32."""

    first: tuple[int, ...]
    """Shape of the first factor in memory: (rows, columns) or (batch, rows, columns)."""

    second: tuple[int, ...]
    """Shape of the second factor in memory."""

    transposed: Literal["neither", "first", "second"] = "neither"
    """Which of the two is transposed before they are multiplied."""

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        columns = self.second[-2 if self.transposed == "second" else -1]
        return 2 * math.prod(self.first) * columns


def step_matmuls(config: ModelConfig, batch_size: int) -> list[Matmul]:
    """All matmuls of one training step on `batch_size` sequences, in its order.

    Each weight matrix has one in the forward pass and two in the backward pass, for the gradients
    of its input and of itself; the language-model head has them for each chunk of
    `lib.model.loss.linear_cross_entropy`. Attention has two in the forward pass and four in the
    backward pass, each a batch over sequences and heads.
    """
    # the forward and the backward pass of a layer
    tokens, d_model = batch_size * config.context_length, config.d_model
    gates = 2 if config.feed_forward == "swiglu" else 1
    qkv = linear_matmuls(tokens, d_model, 3 * d_model)
    output = linear_matmuls(tokens, d_model, d_model)
    up = linear_matmuls(tokens, d_model, gates * config.ff_width)
    down = linear_matmuls(tokens, config.ff_width, d_model)
    heads = batch_size * config.num_heads
    attention = attention_matmuls(heads, config.context_length, config.head_dim)
    forward = [qkv[0], *attention[:2], output[0], up[0], down[0]]
    backward = [*down[1:], *up[1:], *output[1:], *attention[2:], *qkv[1:]]

    # the head, chunk by chunk
    head = []
    chunk_tokens = max(1, CHUNK_BYTES // (4 * config.vocab_size))
    for start in range(0, tokens, chunk_tokens):
        rows = min(chunk_tokens, tokens - start)
        head += linear_matmuls(rows, d_model, config.vocab_size)
    return config.num_layers * forward + head + config.num_layers * backward


def linear_matmuls(tokens: int, d_in: int, d_out: int) -> list[Matmul]:
    """x Wᵀ for a weight (d_out, d_in), and the gradients of x and of W."""
    x, weight, y = (tokens, d_in), (d_out, d_in), (tokens, d_out)
    return [Matmul(x, weight, "second"), Matmul(y, weight), Matmul(y, x, "first")]


def attention_matmuls(heads: int, length: int, head_dim: int) -> list[Matmul]:
    """Q Kᵀ and P V; the gradients of V, P, Q and Kᵀ."""
    head, scores = (heads, length, head_dim), (heads, length, length)
    return [
        Matmul(head, head, "second"),
        Matmul(scores, head),
        Matmul(scores, head, "first"),
        Matmul(head, head, "second"),
        Matmul(scores, head),
        Matmul(head, scores, "first"),
    ]


def bare_loop(matmuls: Sequence[Matmul]) -> Callable[[], None]:
    """A function that runs `matmuls` into preallocated tensors.

    Factors of one shape are one tensor; those of a layer together exceed most caches.
    """

    @functools.cache
    def tensor(role: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape)

    calls = []
    for matmul in matmuls:
        first, second = tensor("first", matmul.first), tensor("second", matmul.second)
        first = first.mT if matmul.transposed == "first" else first
        second = second.mT if matmul.transposed == "second" else second
        result = tensor("result", (*first.shape[:-1], second.shape[-1]))
        calls.append((torch.mm if first.ndim == 2 else torch.bmm, first, second, result))

    def loop() -> None:
        for multiply, first, second, result in calls:
            multiply(first, second, out=result)

    return loop


def write_cpu_report(records: Sequence[Record], output: Path) -> Path:
    """Write training_cpu_benchmark.md, and return its path."""
    last = records[-1]
    threads, version = last["figures"]["threads"], last["versions"]["torch"]
    machine = f"{last['device']}, {threads} threads, torch {version}, {last['date']}"
    table = Table([record["figures"] for record in records], COLUMNS)
    path = output / "training_cpu_benchmark.md"
    write_report(path, [Section("Training speed on a CPU", [machine, NOTE, table], level=1)])
    return path
