"""Time and memory of the kernels of attention, ours and PyTorch's, in turns on the same inputs."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib.allocations import (
    Function,
    allocated_bytes,
    free_memory,
    is_out_of_memory,
    synchronise,
    without_stderr,
)
from lib.attention import attention
from lib.benchmark import Measurement, run_sweep, take_turns
from lib.benchmark_attention_cases import PEERS, AttentionCase, attention_cases
from lib.benchmark_attention_report import line, write_report
from lib.benchmark_step_cases import device_memory
from lib.config import AttentionBenchmarkConfig
from lib.hardware import keep_freed_memory, pick_device
from lib.report import Record, read_records
from lib.train_step import numerics

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

BACKENDS = {
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
# These hold the scores, and keep them for the backward pass: two at a time may not fit.
HOLD_SCORES = ("vectorized_torch", "vectorized_torch_compiled", "sdpa_math")
# These launch thousands of small kernels, slower than a GPU does them: whoever came next would
# find nothing queued, and its own launch would count.
HOST_BOUND = ("scaled_dot_prod_attention", "flash_attention_torch")
# How far from the formula a result may be: several times what bfloat16 costs.
LARGEST_ERROR = 0.03
# Compilers put whole programs into their messages.
REASON_LENGTH = 200
# Of these rows of the output, the first ones and the last.
CHECKED_ROWS = 32


def benchmark_attention(config: AttentionBenchmarkConfig) -> list[Record]:
    """Measure what `config` names, unless its records are there; write tables and figures.

    The folder `output` gets attention_sweep.jsonl, attention_sweep_results.csv,
    attention_sweep_report.md, and attention_sweep_forward.png, _heatmap.png and _scaling.png of
    all records of this device and these versions.

    Returns:
        The records of the cases that `config` names.
    """
    device = pick_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    cases = attention_cases(config, device)
    path = config.output / "attention_sweep.jsonl"

    def run(case: AttentionCase) -> dict[str, Any]:
        return measure_case(case, device=device, seed=config.seed)

    records = run_sweep(
        path,
        cases,
        run,
        expect=lambda case: {"flops": case.flops, "kernels": {}},
        show=line,
        seed=config.seed,
        device=device,
        restart=config.restart,
    )
    same = ("device", "versions", "threads") if device.type == "cpu" else ("device", "versions")
    shown = [r for r in read_records(path) if all(r.get(key) == records[0][key] for key in same)]
    # of each case the last counts, which is to be the one that was asked for
    write_report([*shown, *records], config.output)
    return records


def measure_case(case: AttentionCase, *, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """The figures of a case: for each of its kernels those of `Measurement`, and more.

    `tflops` counts as `AttentionCase.flops`. `error` is how far a sample of rows of the output is
    from the formula. With the backward pass, `peak_memory_bytes` is that of both passes beyond
    inputs and the gradient of the output. A kernel's `status` is also `unsupported` (then `reason`
    says why) or `wrong`. `became_sdpa`: the compiler put PyTorch's own attention in its place.
    """
    # compiled code of other shapes would make that of this one dynamic
    torch.compiler.reset()
    inputs = make_inputs(case, device, seed)
    results = {}
    with numerics(tf32=False, deterministic=False), backward_repeats():
        for group in groups(case, device):
            results |= _measure_group(case, group, inputs)
    return {"kernels": {kernel: results[kernel] for kernel in case.kernels}}


def groups(case: AttentionCase, device: torch.device) -> list[list[str]]:
    """Kernels that take turns: all of them, but for those that must or should be by themselves."""
    alone = HOST_BOUND if device.type == "cuda" else HOST_BOUND[:1]
    if case.direction == "backward":
        alone += HOLD_SCORES
    together = [kernel for kernel in case.kernels if kernel not in alone]
    return [together] * bool(together) + [[k] for k in case.kernels if k in alone]


def make_inputs(case: AttentionCase, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output: (batch, heads, tokens, head_dim), standard normal."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"device": device, "dtype": getattr(torch, case.dtype), "generator": generator}
    tokens = (case.queries, case.keys, case.keys, case.queries)
    size = (case.batch_size, case.heads)
    *leaves, grad_out = (torch.randn(*size, n, case.head_dim, **options) for n in tokens)
    if case.direction == "backward":
        leaves = [leaf.requires_grad_() for leaf in leaves]
    return *leaves, grad_out


def _measure_group(
    case: AttentionCase, group: Sequence[str], inputs: tuple[Tensor, ...]
) -> dict[str, dict[str, Any]]:
    device = inputs[0].device
    results, functions, attentions = {}, {}, {}
    for kernel in group:
        if device.type == "cpu" and _score_bytes(case, kernel) > (
            device_memory(device) or math.inf
        ):
            # the system might end this process
            results[kernel] = {"status": "oom", "was_tried": False}
            continue
        try:
            attentions[kernel] = named_attention(kernel, case, device)
            functions[kernel], distance = _function(attentions[kernel], case, inputs)
            results[kernel] = {
                "status": "ok" if distance <= LARGEST_ERROR else "wrong",
                "error": distance if math.isfinite(distance) else None,
            }
            if kernel == "vectorized_torch_compiled":
                results[kernel]["became_sdpa"] = runs_sdpa(functions[kernel])
        except Exception as error:
            results[kernel] = _failure(kernel, error)
            free_memory(error)
    # what is wrong has no speed
    right = [kernel for kernel in functions if results[kernel]["status"] == "ok"]
    measurements = _take_turns([functions[kernel] for kernel in right], case, device)
    # what they keep for the backward pass must not count as another's memory
    functions.clear()
    for kernel, measured in zip(right, measurements):
        results[kernel] |= measured.figures()
        if measured.status == "ok":
            results[kernel]["tflops"] = case.flops / measured.median_ms / 1e9
            if case.direction == "backward":
                results[kernel] |= _memory_of_both(attentions[kernel], inputs)
    return results


def _function(
    attention: Attention, case: AttentionCase, inputs: tuple[Tensor, ...]
) -> tuple[Function, float]:
    """What is measured, called once already, and the error of the output."""
    *leaves, grad_out = inputs
    out = attention(*leaves)
    error = error_of_rows(out.detach(), *(leaf.detach() for leaf in leaves), case.is_causal)
    if case.direction == "forward":
        return lambda: attention(*leaves), error

    def backward() -> None:
        torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    backward()
    return backward, error


def _take_turns(
    functions: Sequence[Function], case: AttentionCase, device: torch.device
) -> list[Measurement]:
    # alone are those that may take seconds
    if case.samples == 1 or len(functions) == 1:
        once = [measure_once(fn, device) for fn in functions]
        if case.samples == 1 or (once[0].median_ms or 0) > 250 * case.max_seconds:
            return once
    return take_turns(
        functions,
        device=device,
        warmup=case.warmup,
        samples=case.samples,
        max_seconds=case.max_seconds,
    )


def measure_once(fn: Function, device: torch.device) -> Measurement:
    """Time and memory of a single call, the second or later one, for calls that take seconds."""
    milliseconds = 0.0

    def timed() -> None:
        nonlocal milliseconds
        synchronise(device)
        start = time.perf_counter_ns()
        fn()
        synchronise(device)
        milliseconds = (time.perf_counter_ns() - start) / 1e6

    try:
        memory = allocated_bytes(timed, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free_memory(error)
        return Measurement("oom")
    return Measurement("ok", (milliseconds,), 1, *memory)


def _memory_of_both(attention: Attention, inputs: tuple[Tensor, ...]) -> dict[str, int | None]:
    """The most that a forward and backward pass allocate; None where memory does not do for it."""
    *leaves, grad_out = inputs

    def both() -> None:
        torch.autograd.grad(attention(*leaves), leaves, grad_out)

    memory = (None, None)
    try:
        memory = allocated_bytes(both, grad_out.device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free_memory(error)
    return dict(zip(("peak_memory_bytes", "total_memory_bytes"), memory))


def named_attention(kernel: str, case: AttentionCase, device: torch.device) -> Attention:
    """The function of q, k and v that `kernel` names, with the mask of `case`."""
    if kernel == "flex_attention":
        return flex_attention(case, device)
    if kernel not in BACKENDS:
        return functools.partial(attention, kernel=kernel, is_causal=case.is_causal)

    def by_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[kernel]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal)

    return by_backend


def flex_attention(case: AttentionCase, device: torch.device) -> Attention:
    """PyTorch's FlexAttention, compiled for this shape; its map of the mask is made here, once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = None
    if case.is_causal:
        size = (None, None, case.queries, case.keys)
        block_mask = create_block_mask(lambda b, h, query, key: query >= key, *size, device=device)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return functools.partial(compiled, block_mask=block_mask)


def error_of_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> float:
    """How far `out` is from the formula in float32, relative, in the first and last queries.

    They tell which way a mask is aligned. Of the first sequence alone.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    last = max(num_queries - CHECKED_ROWS, 0)
    rows = torch.arange(num_queries, device=q.device)
    rows = torch.cat([rows[: min(CHECKED_ROWS, last)], rows[last:]])
    q, k, v, out = q[0, :, rows].float(), k[0].float(), v[0].float(), out[0, :, rows].float()
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (heads, rows, keys)
    if is_causal:
        hidden = torch.arange(num_keys, device=q.device) > rows[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    right = scores.softmax(-1) @ v
    return float((out - right).norm() / right.norm())


def runs_sdpa(fn: Function) -> bool:
    """Whether a call of `fn` comes to PyTorch's own attention."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with without_stderr(), torch.profiler.profile(activities=activities) as profiler:
        fn()
    return any("scaled_dot_product" in event.key for event in profiler.key_averages())


@contextlib.contextmanager
def backward_repeats() -> Iterator[None]:
    """Compiled code keeps what its backward pass reads, so that the pass can be run again."""
    from torch._functorch import config

    if not hasattr(config, "donated_buffer"):
        yield
        return
    with config.patch(donated_buffer=False):
        yield


def _failure(kernel: str, error: Exception) -> dict[str, Any]:
    """The figures of a kernel that did not run; raises `error` where that is a fault."""
    if is_out_of_memory(error):
        return {"status": "oom"}
    if kernel not in (*PEERS, "vectorized_torch_compiled"):
        raise error
    reason = " ".join(str(error).split()) or type(error).__name__
    return {"status": "unsupported", "reason": reason[:REASON_LENGTH]}


def _score_bytes(case: AttentionCase, kernel: str) -> int:
    """About what a textbook kernel holds: scores, a masked copy, exponentials, all float32."""
    if kernel not in (*HOLD_SCORES, "scaled_dot_prod_attention"):
        return 0
    return 12 * case.batch_size * case.heads * case.queries * case.keys
