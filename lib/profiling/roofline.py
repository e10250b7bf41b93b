"""The roofline of a machine, and where the operations of a Transformer block lie below it.

An operation of F floating-point operations that moves B bytes takes at least
max(F / peak, B / bandwidth) (Williams, Waterman and Patterson 2009). Its *arithmetic intensity* is
F / B: left of the ridge, peak / bandwidth, it is bound by memory, right of it by arithmetic.

`python -m lib roofline` measures a GPU and writes `roofline.jsonl`.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor

from lib.core.allocator import synchronize
from lib.core.charts import roofline
from lib.core.figures import BLUE, MARKERS, ORANGE, VERMILLION
from lib.core.hardware import DtypeName, local_results, pick_device, pick_dtype
from lib.core.records import Record, append_record, new_record
from lib.core.settings import PositiveInt, settings
from lib.model.attention import causal_mask
from lib.model.config import ModelConfig, PresetName, model_preset
from lib.model.costs import num_parameters
from lib.model.loss import softmax
from lib.model.transformer import RMSNorm, RotaryEmbedding
from lib.profiling.measurement import measure

# AdamW reads weight, gradient and two moments, and writes all but the gradient: float32 each.
UPDATE_BYTES = 7 * 4
# Of a call, and of a size of tensors.
SAMPLES = 10
# Parts of the names below: matmuls with weights, and what belongs to attention.
MATMULS = ("projection", "gate and value")
ATTENTION = ("scores", "softmax", "value product", "attention")
NAIVE = ("scores", "mask and softmax", "value product")


@dataclasses.dataclass(frozen=True)
class Limits:
    """The best that a machine reaches."""

    flops_per_s: float
    """In a large matmul."""

    bytes_per_s: float
    """Read plus written, in a large copy."""

    @property
    def ridge(self) -> float:
        """The arithmetic intensity in FLOP/byte from which on arithmetic is the limit."""
        return self.flops_per_s / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        """Return the FLOP/s of the roof at `intensity` (FLOP/byte)."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def least_ms(self, cost: Cost) -> float:
        """Return the least time that an operation of this cost can take."""
        return 1e3 * max(cost.flops / self.flops_per_s, cost.num_bytes / self.bytes_per_s)

    def share(self, point: MeasuredOperation) -> float:
        """Return how much of its roof an operation reaches: its least time over its own."""
        return self.least_ms(point.cost) / point.median_ms

    def raised_to(self, points: Sequence[MeasuredOperation]) -> Limits:
        """Return limits that none of `points` exceeds: what was reached can be reached."""
        flops_per_s = [point.flops_per_s for point in points]
        bytes_per_s = [point.bytes_per_s for point in points]
        return Limits(max(self.flops_per_s, *flops_per_s), max(self.bytes_per_s, *bytes_per_s))


@dataclasses.dataclass(frozen=True)
class Cost:
    """The least work of one operation."""

    flops: int
    """Floating-point operations; a multiply-add is two."""

    num_bytes: int
    """Bytes of its inputs and its result, each moved once."""

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        return self.flops / self.num_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.num_bytes + other.num_bytes)


@dataclasses.dataclass(frozen=True)
class MeasuredOperation:
    """An operation's cost and time."""

    name: str
    cost: Cost
    median_ms: float
    iqr_ms: float

    @property
    def flops_per_s(self) -> float:
        """The FLOP/s reached."""
        return self.cost.flops / self.median_ms * 1e3

    @property
    def bytes_per_s(self) -> float:
        """The bytes/s reached."""
        return self.cost.num_bytes / self.median_ms * 1e3


def matmul_cost(m: int, k: int, n: int, element_bytes: int, *, batch: int = 1) -> Cost:
    """Return the cost of `batch` matmuls (m, k) @ (k, n) that share no operand."""
    return Cost(2 * batch * m * k * n, batch * element_bytes * (m * k + k * n + m * n))


def block_costs(
    config: ModelConfig, batch_size: int, context_length: int, *, element_bytes: int = 4
) -> dict[str, Cost]:
    """Return the cost of each operation of a block's forward pass, by name.

    Both forms of attention are included: naive ("scores" to "value product"), which computes all T²
    scores of a head, and fused, which skips those that the causal mask hides and computes
    T (T + 1) / 2.
    """
    costs = _costs(config, batch_size, context_length, element_bytes)
    return {name: forward for name, (forward, _) in costs.items()}


def backward_costs(
    config: ModelConfig, batch_size: int, context_length: int, *, element_bytes: int = 4
) -> dict[str, Cost]:
    """Return the cost of each operation of a block's backward pass, named as in `block_costs`.

    A matmul has two of its size, one for the gradient of each factor. Fused attention has five
    where the forward pass has two: it computes the scores again (Dao et al. 2022). The others read
    the incoming gradient and what the forward pass kept, and write gradients of their inputs; the
    residual sum costs the addition of the gradients of its two branches.
    """
    costs = _costs(config, batch_size, context_length, element_bytes)
    return {name: backward for name, (_, backward) in costs.items()}


def _costs(
    config: ModelConfig, batch_size: int, length: int, element_bytes: int
) -> dict[str, tuple[Cost, Cost]]:
    """Return the costs of each operation, forward and backward."""
    d, f, head_dim = config.d_model, config.ff_width, config.head_dim
    tokens, heads = batch_size * length, batch_size * config.num_heads
    # numbers in an activation as wide as the model, in one of the feed-forward layer, in the scores
    width, inner, scores = tokens * d, tokens * f, heads * length * length

    def matmul(m: int, k: int, n: int, batch: int = 1) -> tuple[Cost, Cost]:
        shapes = [(m, k, n), (m, n, k), (k, m, n)]
        forward, left, right = (matmul_cost(*s, element_bytes, batch=batch) for s in shapes)
        return forward, left + right

    def others(forward: tuple[int, int], backward: tuple[int, int]) -> tuple[Cost, Cost]:
        costs = [Cost(flops, moved * element_bytes) for flops, moved in (forward, backward)]
        return costs[0], costs[1]

    fused_flops = 2 * heads * length * (length + 1) * head_dim
    return {
        "RMSNorm": others((4 * width, 2 * width), (8 * width, 3 * width)),
        "q, k, v projection": matmul(tokens, d, 3 * d),
        "RoPE": others((6 * width, 4 * width), (6 * width, 4 * width)),
        "scores": matmul(length, head_dim, length, heads),
        "mask and softmax": others((5 * scores, 2 * scores), (4 * scores, 3 * scores)),
        "value product": matmul(length, length, head_dim, heads),
        "attention, fused": others((fused_flops, 4 * width), (5 * fused_flops // 2, 8 * width)),
        "output projection": matmul(tokens, d, d),
        "residual sum": others((width, 3 * width), (width, 3 * width)),
        "gate and value": matmul(tokens, d, 2 * f),
        "SiLU and gate": others((5 * inner, 3 * inner), (10 * inner, 5 * inner)),
        "down projection": matmul(tokens, f, d),
    }


def block_functions(
    config: ModelConfig,
    batch_size: int,
    context_length: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Callable[[], Tensor]]:
    """Return the operations of `block_costs` as functions without arguments, on random tensors.

    RMSNorm, RoPE, mask and softmax, and SiLU and gate run as PyTorch runs their formulas in eager
    mode: on a GPU a kernel for each operator, not the fused kernels of `lib.model`.
    """
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

    def masked_softmax() -> Tensor:
        return softmax(scores.masked_fill(hidden_keys, -torch.inf), dim=-1).to(dtype)

    def gated() -> Tensor:
        gate, value = gate_value.chunk(2, dim=-1)
        return F.silu(gate) * value

    return {
        "RMSNorm": lambda: norm(x),
        "q, k, v projection": lambda: F.linear(x, qkv_weight),
        "RoPE": lambda: (rope(q), rope(k)),
        "scores": lambda: q @ k.transpose(-2, -1),
        "mask and softmax": masked_softmax,
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
) -> list[MeasuredOperation]:
    """Time each operation of `block_costs` on `device`, with inputs in memory, not in a cache.

    Operations that run out of memory are left out.
    """
    sizes = (config, batch_size, context_length)
    functions = block_functions(*sizes, device=device, dtype=dtype)
    costs = block_costs(*sizes, element_bytes=dtype.itemsize)
    points = []
    for name, function in functions.items():
        found = measure(function, device=device, samples=samples, flush_l2=True)
        if found.status == "ok":
            points.append(MeasuredOperation(name, costs[name], found.median_ms, found.iqr_ms))
    return points


@torch.no_grad()
def measure_limits(device: torch.device, dtype: torch.dtype, *, samples: int = 5) -> Limits:
    """Measure the best that `device` reaches in matmuls of square matrices and in a copy.

    The best sample counts, since other load only makes a machine look slower.
    """
    on_gpu = device.type == "cuda"
    rates = []
    for size in (4096, 8192) if on_gpu else (256, 512, 1024):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        # as the model multiplies: on a CPU another library may compute `a @ b`
        matmul = measure(lambda a=a, b=b: F.linear(a, b), device=device, samples=samples)
        rates.append(2e3 * size**3 / min(matmul.times_ms))
    # more than the caches hold
    copied_bytes = 1 << 30 if on_gpu else 64 << 20
    source, target = (torch.ones(copied_bytes, dtype=torch.int8, device=device) for _ in range(2))
    copy = measure(lambda: target.copy_(source), device=device, samples=samples)
    return Limits(max(rates), 2e3 * copied_bytes / min(copy.times_ms))


@torch.no_grad()
def measure_call(fn: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Return median ms until `fn()` returns, and until the device has finished its work."""
    returned, done = [], []
    fn()
    for _ in range(SAMPLES):
        synchronize(device)
        start = time.perf_counter()
        fn()
        returned.append(time.perf_counter() - start)
        synchronize(device)
        done.append(time.perf_counter() - start)
    return 1e3 * statistics.median(returned), 1e3 * statistics.median(done)


@torch.no_grad()
def measure_sizes(sizes: Sequence[int], device: torch.device) -> list[dict[str, float]]:
    """Time one elementwise operation on float32 tensors of each of `sizes`."""
    rows = []
    for size in sizes:
        x = torch.zeros(size, device=device)
        found = measure(lambda x=x: x.add_(1), device=device, samples=SAMPLES)
        times = {"median_ms": found.median_ms, "iqr_ms": found.iqr_ms}
        rows.append({"numbers": size, "min_ms": min(found.times_ms), **times})
    return rows


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
    """Predict the time of a training step as the sum of the least times of its operations.

    Counts `block_costs` and `backward_costs` for each block, the head's three matmuls, the update,
    which moves 28 bytes per parameter, and the host.

    Args:
        limits: of a machine, in the dtype of the matmuls.
        dispatch_ms: time the host takes to issue the step's operations.
        runs_ahead: whether the host issues them while the device works (a GPU), not before each
            operation (a CPU).
    """
    sizes = (config, batch_size, context_length)
    block_ms = 0.0
    for costs_of in (block_costs, backward_costs):
        for name, cost in costs_of(*sizes, element_bytes=element_bytes).items():
            # of the two forms of attention the fused one; two norms and two sums in each block
            times = 0 if name in NAIVE else 2 if name in ("RMSNorm", "residual sum") else 1
            block_ms += times * limits.least_ms(cost)

    # logits, and their gradients with respect to weights and input
    tokens, d, vocab_size = batch_size * context_length, config.d_model, config.vocab_size
    head = [(tokens, d, vocab_size), (tokens, vocab_size, d), (vocab_size, tokens, d)]
    head_ms = sum(limits.least_ms(matmul_cost(*shape, element_bytes)) for shape in head)
    update_ms = UPDATE_BYTES * num_parameters(config) / limits.bytes_per_s * 1e3
    device_ms = config.num_layers * block_ms + head_ms + update_ms
    return max(device_ms, dispatch_ms) if runs_ahead else device_ms + dispatch_ms


def draw_roofline(
    axes: Axes, limits: Limits, points: Sequence[MeasuredOperation], *, title: str
) -> None:
    """Draw the roof and `points` below it: colors are kinds of operation, markers its members."""
    markers = {color: itertools.cycle(MARKERS) for color in (VERMILLION, BLUE, ORANGE)}
    colors = {point.name: _color(point.name) for point in points}
    roofline(
        limits.flops_per_s,
        limits.bytes_per_s,
        {point.name: (point.cost.intensity, point.flops_per_s) for point in points},
        axes=axes,
        title=title,
        styles={n: {"color": color, "marker": next(markers[color])} for n, color in colors.items()},
        legend="direct",
    )


def _color(name: str) -> str:
    """Return the color of an operation: attention, matmuls with weights, everything else."""
    if any(word in name for word in ATTENTION):
        return VERMILLION
    return BLUE if any(word in name for word in MATMULS) else ORANGE


def points_of(
    records: Sequence[Mapping[str, Any]],
) -> tuple[Limits | None, list[MeasuredOperation]]:
    """Return the newest limits and operations in records of `write_records`.

    Times are the recorded ones; costs follow from the settings, by `block_costs`.
    """
    limits, points = None, {}
    for record in records:
        figures, asked = record["figures"], record["config"]
        if figures["task"] == "limits":
            limits = Limits(figures["flops_per_s"], figures["bytes_per_s"])
        elif figures["task"] == "operation":
            sizes = (model_preset(asked["model"]), asked["batch_size"], asked["context_length"])
            element_bytes = getattr(torch, asked["dtype"]).itemsize
            costs = block_costs(*sizes, element_bytes=element_bytes)
            name, times = figures["name"], (figures["median_ms"], figures["iqr_ms"])
            points[name] = MeasuredOperation(name, costs[name], *times)
    return limits, list(points.values())


@settings
class RooflineConfig:
    """A machine's limits, and the operations of a block against them."""

    model: PresetName = "gpt2-124m"
    """The preset whose block is measured."""

    batch_size: PositiveInt = 32
    """Sequences that the block is given."""

    context_length: PositiveInt = 1024
    """Tokens per sequence."""

    dtype: DtypeName = "auto"
    """`auto` (the narrowest dtype fast on the device), `float32`, `bfloat16` or `float16`."""

    device: str = "cuda"
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for `roofline.jsonl`, which is added to."""


def write_records(config: RooflineConfig) -> list[Record]:
    """Measure limits, a block, calls with and without waiting, and one operation by its size.

    `task` in a record's figures is one of `limits`, `operation`, `call`, `size`.
    """
    chip = pick_device(config.device)
    kind = pick_dtype(chip, config.dtype)
    model, batch_size, context_length = config.model, config.batch_size, config.context_length
    asked = {"model": model, "batch_size": batch_size, "context_length": context_length}
    asked["dtype"] = str(kind).removeprefix("torch.")
    limits = dataclasses.asdict(measure_limits(chip, kind))
    rows: list[dict[str, Any]] = [{"task": "limits", **limits}]
    sizes = (model_preset(model), batch_size, context_length)
    for point in measure_block(*sizes, device=chip, dtype=kind):
        times = {"median_ms": point.median_ms, "iqr_ms": point.iqr_ms}
        cost = dataclasses.asdict(point.cost)
        rows.append({"task": "operation", "name": point.name, **cost, **times})
    for size in (256, 1024, 4096):
        a = torch.randn(size, size, device=chip, dtype=kind)
        returned, done = measure_call(lambda a=a: a @ a, chip)
        rows.append({"task": "call", "size": size, "returned_ms": returned, "done_ms": done})
    powers = [4**power for power in range(4, 14)]
    rows += [{"task": "size", **row} for row in measure_sizes(powers, chip)]
    records = [new_record(row, config=asked, seed=0, device=chip) for row in rows]
    for record in records:
        append_record(config.output / "roofline.jsonl", record)
    return records
