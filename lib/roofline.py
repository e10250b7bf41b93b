"""The roofline of a machine, and where the operations of a Transformer block lie below it.

An operation of F floating-point operations that moves B bytes takes at least
max(F / peak, B / bandwidth) (Williams, Waterman and Patterson 2009). Its *arithmetic intensity* is
F / B: left of the ridge, peak / bandwidth, the memory decides, right of it the arithmetic.

`python -m lib.roofline` measures a GPU and writes `artifacts/roofline.jsonl`.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.allocations import synchronise
from lib.attention import causal_mask
from lib.benchmark import measure
from lib.config_training import ModelConfig
from lib.hardware import pick_device, pick_dtype
from lib.loss import softmax
from lib.model import RMSNorm, RotaryEmbedding
from lib.model_costs import num_parameters
from lib.model_presets import model_preset
from lib.report import Record, append_record, new_record

# AdamW reads weight, gradient and two moments, and writes all but the gradient: float32 each.
UPDATE_BYTES = 7 * 4
# A forward product has two of its size in the backward pass; other work is about as much again.
WITH_BACKWARD = 3


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a machine reaches at best."""

    flops_per_s: float
    """In a large matrix product."""

    bytes_per_s: float
    """Read and written, in a large copy."""

    @property
    def ridge(self) -> float:
        """The FLOP/byte from which on arithmetic decides."""
        return self.flops_per_s / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        """The most FLOP/s at so many FLOP/byte: the height of the roof there."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def least_ms(self, cost: Cost) -> float:
        """The least time that an operation of this cost can take."""
        return 1e3 * max(cost.flops / self.flops_per_s, cost.num_bytes / self.bytes_per_s)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one operation does, at least."""

    flops: int
    """Floating-point operations; a multiply-add is two."""

    num_bytes: int
    """Of its inputs and its result, each moved once."""

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        return self.flops / self.num_bytes


@dataclasses.dataclass(frozen=True)
class Point:
    """An operation that was measured."""

    name: str
    cost: Cost
    median_ms: float
    iqr_ms: float

    @property
    def flops_per_s(self) -> float:
        """What it reaches."""
        return self.cost.flops / self.median_ms * 1e3


def product_cost(m: int, k: int, n: int, element_bytes: int, *, batch: int = 1) -> Cost:
    """Of `batch` matrix products (m, k) @ (k, n), whose factors are all different."""
    return Cost(2 * batch * m * k * n, batch * element_bytes * (m * k + k * n + m * n))


def block_costs(
    config: ModelConfig, batch_size: int, context_length: int, *, element_bytes: int = 4
) -> dict[str, Cost]:
    """Each operation of a block's forward pass by its name, with textbook attention and with SDPA.

    Causal attention counts in full, as in `lib.model_costs`.
    """
    d, f, length, e = config.d_model, config.ff_width, context_length, element_bytes
    tokens, heads = batch_size * length, batch_size * config.num_heads
    width, scores = tokens * d, heads * length * length
    head_dim = config.head_dim
    return {
        "RMSNorm": Cost(4 * width, 2 * e * width),
        "q, k, v projection": product_cost(tokens, d, 3 * d, e),
        "RoPE": Cost(6 * width, 4 * e * width),
        "scores": product_cost(length, head_dim, length, e, batch=heads),
        "mask and softmax": Cost(5 * scores, 2 * e * scores),
        "value product": product_cost(length, length, head_dim, e, batch=heads),
        "attention, fused": Cost(4 * scores * head_dim, 4 * e * width),
        "output projection": product_cost(tokens, d, d, e),
        "residual sum": Cost(width, 3 * e * width),
        "gate and value": product_cost(tokens, d, 2 * f, e),
        "SiLU and gate": Cost(5 * tokens * f, 3 * e * tokens * f),
        "down projection": product_cost(tokens, f, d, e),
    }


def block_functions(
    config: ModelConfig,
    batch_size: int,
    context_length: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Callable[[], Tensor]]:
    """The operations of `block_costs`, each as a function of nothing, on random tensors."""
    d, f, heads, length = config.d_model, config.ff_width, config.num_heads, context_length
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    x, other, inner = normal(batch_size, length, d), normal(batch_size, length, d), 2 * f
    q, k, v = (normal(batch_size, heads, length, config.head_dim) for _ in range(3))
    scores = normal(batch_size, heads, length, length)
    gate_value, hidden = normal(batch_size, length, inner), normal(batch_size, length, f)
    matrices = [normal(rows, columns) for rows, columns in ((3 * d, d), (d, d), (inner, d), (d, f))]
    qkv_weight, out_weight, up_weight, down_weight = matrices
    hidden_keys = ~causal_mask(length, length, device)
    norm = RMSNorm(d, config.norm_eps, device=device)
    rope = RotaryEmbedding(config.head_dim, length, config.rope_theta, device=device)

    def gated() -> Tensor:
        gate, value = gate_value.chunk(2, dim=-1)
        return F.silu(gate) * value

    return {
        "RMSNorm": lambda: norm(x),
        "q, k, v projection": lambda: F.linear(x, qkv_weight),
        "RoPE": lambda: (rope(q), rope(k)),
        "scores": lambda: q @ k.transpose(-2, -1),
        "mask and softmax": lambda: softmax(scores.masked_fill(hidden_keys, -torch.inf), dim=-1).to(
            dtype
        ),
        "value product": lambda: scores @ v,
        "attention, fused": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "output projection": lambda: F.linear(x, out_weight),
        "residual sum": lambda: x + other,
        "gate and value": lambda: F.linear(x, up_weight),
        "SiLU and gate": gated,
        "down projection": lambda: F.linear(hidden, down_weight),
    }


@torch.no_grad()
def measure_block(
    config: ModelConfig,
    batch_size: int,
    context_length: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    samples: int = 10,
) -> list[Point]:
    """Time each operation of `block_costs` on `device`, with its inputs in memory, not in a cache.

    One that runs out of memory is left out.
    """
    sizes = (config, batch_size, context_length)
    functions = block_functions(*sizes, device=device, dtype=dtype)
    costs = block_costs(*sizes, element_bytes=dtype.itemsize)
    points = []
    for name, function in functions.items():
        found = measure(function, device=device, samples=samples, flush_l2=True)
        if found.status == "ok":
            points.append(Point(name, costs[name], found.median_ms, found.iqr_ms))
    return points


@torch.no_grad()
def measure_limits(
    device: torch.device,
    dtype: torch.dtype,
    *,
    sizes: Sequence[int] = (),
    copied_bytes: int | None = None,
    samples: int = 5,
) -> Limits:
    """The best that `device` reaches: in products of square matrices, and in a copy.

    The best sample counts, since whatever else runs only makes a machine look slower.

    Args:
        sizes: of the matrices, of which the best counts too; up to 1,024 on a CPU and 8,192 on a
            GPU when left out.
        copied_bytes: more than fit its caches; 64 MiB and 1 GiB when left out.
    """
    on_gpu = device.type == "cuda"
    rates = []
    for size in sizes or ((4096, 8192) if on_gpu else (256, 512, 1024)):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        # as the model multiplies: on a CPU that may be another library's code than `a @ b`
        product = measure(lambda a=a, b=b: F.linear(a, b), device=device, samples=samples)
        rates.append(2e3 * size**3 / min(product.times_ms))
    copied_bytes = copied_bytes or (1 << 30 if on_gpu else 64 << 20)
    source, target = (torch.ones(copied_bytes, dtype=torch.int8, device=device) for _ in range(2))
    copy = measure(lambda: target.copy_(source), device=device, samples=samples)
    return Limits(max(rates), 2e3 * copied_bytes / min(copy.times_ms))


def predicted_ms(
    config: ModelConfig,
    batch_size: int,
    context_length: int,
    limits: Limits,
    *,
    element_bytes: int = 4,
    dispatch_ms: float = 0.0,
    runs_ahead: bool = False,
) -> float:
    """The time of a training step as the sum of what its operations take at least.

    Every operation of the blocks and the head three times, forward and backward; the update, which
    moves 28 bytes a parameter; and the host.

    Args:
        limits: of a machine, in the type of the products.
        dispatch_ms: how long the host takes to issue the step's operations.
        runs_ahead: whether the host does so while the device works (a GPU), and not before each
            operation (a CPU).
    """
    sizes = (config, batch_size, context_length)
    costs = block_costs(*sizes, element_bytes=element_bytes)
    # of the two forms of attention, the fused one
    for name in ("scores", "mask and softmax", "value product"):
        del costs[name]
    again = ("RMSNorm", "residual sum")
    block = sum(limits.least_ms(cost) * (2 if n in again else 1) for n, cost in costs.items())
    tokens, vocab_size = batch_size * context_length, config.vocab_size
    head = limits.least_ms(product_cost(tokens, config.d_model, vocab_size, element_bytes))
    update = UPDATE_BYTES * num_parameters(config) / limits.bytes_per_s * 1e3
    device_ms = WITH_BACKWARD * (config.num_layers * block + head) + update
    return max(device_ms, dispatch_ms) if runs_ahead else device_ms + dispatch_ms


@torch.no_grad()
def measure_call(
    fn: Callable[[], Any], device: torch.device, *, samples: int = 10
) -> tuple[float, float]:
    """Median ms until `fn()` returns, and until the device has done what it asked for."""
    returned, done = [], []
    fn()
    for _ in range(samples):
        synchronise(device)
        start = time.perf_counter()
        fn()
        returned.append(time.perf_counter() - start)
        synchronise(device)
        done.append(time.perf_counter() - start)
    return 1e3 * statistics.median(returned), 1e3 * statistics.median(done)


@torch.no_grad()
def measure_sizes(
    sizes: Sequence[int], device: torch.device, *, samples: int = 10
) -> list[dict[str, float]]:
    """ms of one elementwise operation on tensors of so many float32 numbers, and the best ms."""
    rows = []
    for size in sizes:
        x = torch.zeros(size, device=device)
        found = measure(lambda x=x: x.add_(1), device=device, samples=samples)
        times = {"median_ms": found.median_ms, "iqr_ms": found.iqr_ms}
        rows.append({"numbers": size, "min_ms": min(found.times_ms), **times})
    return rows


def write_records(
    path: str | os.PathLike,
    *,
    model: str = "gpt2-124m",
    batch_size: int = 32,
    context_length: int = 1024,
    dtype: str = "bfloat16",
    device: str = "cuda",
) -> list[Record]:
    """Measure limits, a block, calls with and without waiting, and one operation by its size.

    Each record's figures say in `task` which of them it is: `limits`, `operation`, `call`, `size`.

    Raises:
        ValueError: an unknown model, device or dtype.
    """
    chip = pick_device(device)
    kind = pick_dtype(chip, dtype)
    asked = {"model": model, "batch_size": batch_size, "context_length": context_length}
    asked["dtype"] = str(kind).removeprefix("torch.")
    config = model_preset(model)
    limits = measure_limits(chip, kind)
    rows: list[dict[str, Any]] = [{"task": "limits", **dataclasses.asdict(limits)}]
    for point in measure_block(config, batch_size, context_length, device=chip, dtype=kind):
        times = {"median_ms": point.median_ms, "iqr_ms": point.iqr_ms}
        cost = dataclasses.asdict(point.cost)
        rows.append({"task": "operation", "name": point.name, **cost, **times})
    for size in (256, 1024, 4096):
        a = torch.randn(size, size, device=chip, dtype=kind)
        returned, done = measure_call(lambda a=a: a @ a, chip)
        rows.append({"task": "call", "size": size, "returned_ms": returned, "done_ms": done})
    sizes = [4**power for power in range(4, 14)]
    rows += [{"task": "size", **row} for row in measure_sizes(sizes, chip)]
    records = [new_record(row, config=asked, seed=0, device=chip) for row in rows]
    for record in records:
        append_record(path, record)
    return records


def points_of(records: Sequence[Mapping[str, Any]]) -> tuple[Limits | None, list[Point]]:
    """The limits and the block's operations in records of `write_records`; the newest of each."""
    limits, points = None, {}
    for figures in (record["figures"] for record in records):
        if figures["task"] == "limits":
            limits = Limits(figures["flops_per_s"], figures["bytes_per_s"])
        elif figures["task"] == "operation":
            cost = Cost(figures["flops"], figures["num_bytes"])
            times = (figures["median_ms"], figures["iqr_ms"])
            points[figures["name"]] = Point(figures["name"], cost, *times)
    return limits, list(points.values())


def main() -> int:
    """Write the records of this machine's GPU."""
    try:
        records = write_records(Path("artifacts/roofline.jsonl"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(records)} records in artifacts/roofline.jsonl, of {records[0]['device']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
