"""How much of the matrix products' own speed a CPU keeps in training: a step against a bare loop.

The bare loop makes the matrix products of one training step, of the same shapes, and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lib.benchmark import Measurement, interquartile_range, take_turns
from lib.config import TrainingBenchmarkConfig
from lib.config_training import ModelConfig, PipelineConfig, TrainConfig
from lib.data import BatchSampler, random_tokens, read_windows
from lib.files import make_folder, write_atomically
from lib.hardware import keep_freed_memory
from lib.loss import CHUNK_BYTES
from lib.model import TransformerLM
from lib.model_costs import num_parameters
from lib.model_presets import model_preset
from lib.report import append_record, new_record, to_markdown
from lib.strict_json import from_json
from lib.train import learning_rate
from lib.train_step import TrainStep, numerics

CPU = torch.device("cpu")
TINY = Path(__file__).parent / "presets" / "tiny.json"
STEP, LOOP = "training step", "training loop"
BARE, BARE_WEIGHTS = "bare loop", "bare loop without attention"
# Turns of each candidate where the config names no number: about a minute.
SAMPLES = 30
COLUMNS = {
    "model": "model",
    "batch_size": "windows",
    "candidate": "candidate",
    "products": "products",
    "gflop": "GFLOP",
    "median_ms": "ms a step",
    "iqr_ms": "IQR (ms)",
    "samples": "samples",
    "gflop_per_s": "GFLOP/s",
    "tokens_per_s": "tokens/s",
    "share": "share",
    "iqr_share": "IQR (share)",
    "share_without_attention": "share without attention",
}
TEXT = """
The bare loop makes the matrix products of one training step in float32, with `torch.mm` and
`torch.bmm` into tensors that are there before. The training step is the one that `train` takes,
with embedding, norms, softmax, loss and AdamW; the training loop also reads windows, sets the
learning rate and reads the log. The share is the bare loop's time over the candidate's, turn by
turn: that of the products' own speed which training keeps. Attention's products count in full, also
where a fused kernel skips scores that the causal mask hides. In the last column the bare loop
leaves out all of attention's products, and the candidate nothing.

"""


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, or a batch of them, of float32 factors."""

    first: tuple[int, ...]
    """The first factor's shape as it lies in memory: (rows, columns) or (batch, rows, columns)."""

    second: tuple[int, ...]
    """The second factor's."""

    transposed: Literal["neither", "first", "second"] = "neither"
    """Which of them is transposed before they are multiplied."""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        columns = self.second[-2 if self.transposed == "second" else -1]
        return 2 * math.prod(self.first) * columns


def matrix_products(config: ModelConfig, batch_size: int) -> list[Product]:
    """All matrix products of one training step on `batch_size` windows, in its order.

    For each weight matrix that of the forward pass, and those of the gradients of its input and of
    itself; the language-model head for each chunk of `lib.loss.linear_cross_entropy`. Attention has
    two in the forward pass and four in the backward pass, in one batch over windows and heads.
    """
    tokens, d_model = batch_size * config.context_length, config.d_model
    gates = 2 if config.feed_forward == "swiglu" else 1
    qkv = linear_products(tokens, d_model, 3 * d_model)
    output = linear_products(tokens, d_model, d_model)
    up = linear_products(tokens, d_model, gates * config.ff_width)
    down = linear_products(tokens, config.ff_width, d_model)
    heads = batch_size * config.num_heads
    attention = attention_products(heads, config.context_length, config.head_dim)
    forward = [qkv[0], *attention[:2], output[0], up[0], down[0]]
    backward = [*down[1:], *up[1:], *output[1:], *attention[2:], *qkv[1:]]
    head = []
    chunk_tokens = max(1, CHUNK_BYTES // (4 * config.vocab_size))
    for start in range(0, tokens, chunk_tokens):
        rows = min(chunk_tokens, tokens - start)
        head += linear_products(rows, d_model, config.vocab_size)
    return config.num_layers * forward + head + config.num_layers * backward


def linear_products(tokens: int, d_in: int, d_out: int) -> list[Product]:
    """x Wᵀ for a weight (d_out, d_in), and the gradients of x and of W."""
    x, weight, y = (tokens, d_in), (d_out, d_in), (tokens, d_out)
    return [Product(x, weight, "second"), Product(y, weight), Product(y, x, "first")]


def attention_products(heads: int, length: int, head_dim: int) -> list[Product]:
    """Q Kᵀ and P V; the gradients of V, P, Q and Kᵀ."""
    head, scores = (heads, length, head_dim), (heads, length, length)
    return [
        Product(head, head, "second"),
        Product(scores, head),
        Product(scores, head, "first"),
        Product(head, head, "second"),
        Product(scores, head),
        Product(head, scores, "first"),
    ]


def bare_loop(products: Sequence[Product]) -> Callable[[], None]:
    """A function that makes `products`, each into a tensor that is there before.

    Factors of one shape are one tensor; a layer's together are larger than most caches.
    """

    @functools.cache
    def tensor(role: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape)

    calls = []
    for product in products:
        first, second = tensor("first", product.first), tensor("second", product.second)
        first = first.mT if product.transposed == "first" else first
        second = second.mT if product.transposed == "second" else second
        result = tensor("result", (*first.shape[:-1], second.shape[-1]))
        calls.append((torch.mm if first.ndim == 2 else torch.bmm, first, second, result))

    def loop() -> None:
        for multiply, first, second, result in calls:
            multiply(first, second, out=result)

    return loop


def training_functions(config: TrainConfig) -> dict[str, Callable[[], None]]:
    """The step that `train` takes again and again, alone; and with what its loop does beside it."""
    shape = config.model
    model = TransformerLM(shape, generator=torch.Generator().manual_seed(config.seed))
    train_step = TrainStep(model, config, CPU, torch.float32)
    tokens = random_tokens(2_000_000, shape.vocab_size, config.seed)
    sampler = BatchSampler(len(tokens), shape.context_length, config.batch_size, seed=config.seed)

    def read() -> Tensor:
        return read_windows(tokens, sampler.next_starts(), shape.context_length, CPU)

    windows = read()

    def step() -> None:
        train_step(windows, config.optimizer.min_learning_rate)

    def loop() -> None:
        train_step(read(), learning_rate(config, 1))
        if train_step.unread >= config.log_interval:
            train_step.read_log()

    return {STEP: step, LOOP: loop}


def benchmark_model(config: TrainConfig, name: str, *, samples: int) -> list[dict[str, Any]]:
    """Figures of each candidate; all of them take `samples` turns."""
    products = matrix_products(config.model, config.batch_size)
    bare = {BARE: products, BARE_WEIGHTS: [p for p in products if len(p.first) == 2]}
    functions = {candidate: bare_loop(made) for candidate, made in bare.items()}
    functions |= training_functions(config)
    measured = take_turns(list(functions.values()), device=CPU, samples=samples)
    results = dict(zip(functions, measured))
    tokens = config.batch_size * config.model.context_length
    rows = []
    for candidate, result in results.items():
        made = bare.get(candidate, products)
        row = {
            "model": name,
            "parameters": num_parameters(config.model),
            "batch_size": config.batch_size,
            "context_length": config.model.context_length,
            "threads": torch.get_num_threads(),
            "candidate": candidate,
            "products": len(made),
            "gflop": sum(product.flops for product in made) / 1e9,
            **result.figures(),
        }
        if result.status == "ok":
            row["gflop_per_s"] = row["gflop"] / row["median_ms"] * 1e3
        if result.status == "ok" and candidate not in bare:
            row["tokens_per_s"] = tokens / row["median_ms"] * 1e3
            shares = _shares(results[BARE], result)
            row |= {"share": _median(shares), "iqr_share": interquartile_range(shares)}
            row["share_without_attention"] = _median(_shares(results[BARE_WEIGHTS], result))
        rows.append(row)
    return rows


def _shares(bare: Measurement, other: Measurement) -> list[float]:
    """The time of `bare` over that of `other`, turn by turn; none where memory ran out."""
    return [a / b for a, b in zip(bare.times_ms, other.times_ms)]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def benchmark_on_cpu(config: TrainingBenchmarkConfig) -> Path:
    """Measure what `config` names; add to training_cpu_benchmark.jsonl, and write the .md.

    Returns:
        The table's path. It shows this run; records of an earlier one stay in the .jsonl.

    Raises:
        ValueError: a model that is not known.
        OSError: `output` cannot be written to; found out before anything is measured.
    """
    tiny = from_json(PipelineConfig, TINY).train
    if not config.models:
        config = dataclasses.replace(config, models=("tiny",), batch_sizes=(tiny.batch_size,))
    config = dataclasses.replace(config, samples=config.samples or SAMPLES)
    shapes = [model_preset(name) for name in config.models]
    path = config.output / "training_cpu_benchmark.jsonl"
    make_folder(path.parent)
    keep_freed_memory()
    records = []
    with numerics(tf32=tiny.tf32, deterministic=tiny.deterministic):
        for name, shape, batch_size in zip(config.models, shapes, config.batch_sizes):
            training = dataclasses.replace(
                tiny, model=shape, batch_size=batch_size, seed=config.seed
            )
            for row in benchmark_model(training, name, samples=config.samples):
                records.append(new_record(row, config=config, seed=config.seed, device=CPU))
                append_record(path, records[-1])
                print({key: row[key] for key in COLUMNS if key in row}, flush=True)
    machine = f"{records[-1]['device']}, {torch.get_num_threads()} threads"
    text = f"# Training speed on a CPU\n\n{machine}, torch {torch.__version__}, "
    text += f"{records[-1]['date']}\n{TEXT}"
    text += to_markdown([record["figures"] for record in records], COLUMNS)
    write_atomically(path.with_suffix(".md"), text)
    return path.with_suffix(".md")
