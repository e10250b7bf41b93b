"""Time and memory of attention kernels, ours and PyTorch's, interleaved on the same inputs.

`benchmark_attention` sweeps lengths, head sizes, masks and directions; the report is in
`lib.tools.benchmarks.attention_report`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib.core.allocator import (
    Function,
    allocated_bytes,
    free_memory,
    is_out_of_memory,
)
from lib.core.hardware import DtypeName, pick_dtype
from lib.core.settings import NonEmpty, PositiveInt, require, settings
from lib.core.terminal import one_line
from lib.model.attention import attention
from lib.model.config import ATTENTION_KERNELS
from lib.profiling.measurement import Measurement, measure_interleaved
from lib.tools.benchmarks.attention_report import REPORT
from lib.tools.benchmarks.harness import Benchmark, SamplingConfig, grid, sampling
from lib.tools.benchmarks.step import device_memory
from lib.tools.benchmarks.sweep import Case
from lib.training.step import numerics

# PyTorch's own: FlexAttention, compiled, and each backend that `sdpa` chooses from (`sdpa_flash` is
# FlashAttention-2). FlashAttention-4, in two modes, if the package flash-attn-4 is installed.
BACKENDS = {
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
FLASH_ATTENTION_4 = ("fa4", "fa4_deterministic")
PEERS = ("flex_attention", *FLASH_ATTENTION_4, *BACKENDS)
# Ours with gradients that need not repeat to the bit: added up in any order on Hopper GPUs.
UNORDERED = "flash_attention_triton_unordered"
SWEEP_KERNELS = (*ATTENTION_KERNELS, UNORDERED, *PEERS)
GPU_ONLY = (
    "flash_attention_triton",
    UNORDERED,
    "flash_attention_cuda",
    "flex_attention",
    *FLASH_ATTENTION_4,
    "sdpa_cudnn",
    "sdpa_efficient",
)
# These refuse some dtypes and head sizes.
LIMITED = (*PEERS, "flash_attention_cuda")

# Defaults of a sweep: queries and keys, then head_dims, tokens and width.
CPU_TIERS = ("128:128", "256:256", "512:512", "128:512", "512:128")
GPU_TIERS = tuple(f"{2**n}:{2**n}" for n in range(7, 16))
GPU_TIERS += ("1024:4096", "4096:1024", "1024:16384", "16384:1024")
CPU_SIZES = ((64,), 1024, 256)
GPU_SIZES = ((64, 128), 16384, 2048)
DIRECTIONS = ("forward", "backward")

# These keep the scores for the backward pass; two of them at a time may not fit.
HOLD_SCORES = ("vectorized_torch", "vectorized_torch_compiled", "sdpa_math")
# These launch thousands of small kernels, more slowly than a GPU runs them. The kernel measured
# next would find an empty queue, and its launch latency would count.
HOST_BOUND = ("scaled_dot_prod_attention", "flash_attention_torch")
# The largest relative error of a correct result: several times what bfloat16 costs.
LARGEST_ERROR = 0.03
# Rows of the output that are checked, at its beginning and at its end.
CHECKED_ROWS = 32
# Compilers put whole programs into their messages.
REASON_LENGTH = 200

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@settings
class AttentionBenchmarkConfig(SamplingConfig):
    """Attention kernels by length, head_dim, mask and direction."""

    kernels: tuple[str, ...] = ()
    """Kernels to compare; if empty, all that the device runs."""

    custom_tiers: tuple[str, ...] = ()
    """Lengths as QUERIES:KEYS, like 1024:4096; if empty, 128 to 512 on CPU, to 32768 on GPU."""

    head_dims: tuple[PositiveInt, ...] = ()
    """Head sizes; if empty, 64 on CPU, 64 and 128 on GPU."""

    masks: Annotated[tuple[Literal["causal", "full"], ...], NonEmpty] = ("causal", "full")
    """Keys a query attends to: those up to its own position, or all."""

    backward: bool = False
    """Measure the backward pass too."""

    cuda_graphs: bool = False
    """Replay each call from a CUDA graph, so that the host does not count (GPU only)."""

    dtype: DtypeName = "auto"
    """`auto` (the narrowest dtype fast on the device), `float32`, `bfloat16` or `float16`."""

    batch_size: PositiveInt | None = None
    """Sequences; if not set, as many as have 1024 tokens on CPU, 16384 on GPU."""

    heads: PositiveInt | None = None
    """Heads; if not set, 256 / head_dim on CPU, 2048 / head_dim on GPU."""

    def __post_init__(self) -> None:
        for tier in self.custom_tiers:
            is_tier = re.fullmatch(r"[1-9][0-9]{0,8}:[1-9][0-9]{0,8}", tier)
            require(is_tier, f"custom_tiers must be QUERIES:KEYS as in 1024:4096, got {tier!r}")


def flops(case: Case) -> float:
    """FLOPs of the matmuls: 4 · head_dim per head and visible (query, key) pair, forward.

    The forward pass has two matmuls; the five of the backward pass cost 2.5 times as much. With a
    causal mask, N queries and N keys count as N² / 2 pairs, as is customary; for unequal numbers
    the visible pairs are counted one by one.
    """
    pairs = case.queries * case.keys
    if case.is_causal and case.queries == case.keys:
        pairs /= 2
    elif case.is_causal:
        short = min(case.queries, case.keys)
        pairs = short * (short + 1) // 2 + (case.queries - short) * case.keys
    passes = {"forward": 1, "backward": 2.5}[case.direction]
    return 4 * case.head_dim * case.batch_size * case.heads * pairs * passes


def attention_cases(config: AttentionBenchmarkConfig, device: torch.device) -> list[Case]:
    """List the cases of `config`, neighbors sharing compiled code.

    A case is one record: `kernels`, interleaved on the same inputs. q is (batch_size, heads,
    queries, head_dim); k and v are (batch_size, heads, keys, head_dim). With `is_causal`, query i
    attends to keys 0 to i. The `direction` is `forward`, or `backward`: the gradients of q, k and v
    from that of the output. With `in_graph` a call is the replay of a CUDA graph; without, Python
    launches the kernels.

    Raises:
        ValueError: a kernel is unknown, the device lacks the dtype, or `cuda_graphs` is set without
            a GPU.
    """
    on_gpu = device.type == "cuda"
    known = ", ".join(SWEEP_KERNELS)
    for kernel in config.kernels:
        require(kernel in SWEEP_KERNELS, f"kernels must be among {known}, got {kernel!r}")
    is_right = on_gpu or not config.cuda_graphs
    require(is_right, f"cuda_graphs must be False without a GPU, got {device}")
    head_dims, tokens, width = GPU_SIZES if on_gpu else CPU_SIZES
    cases = []
    for tier in config.custom_tiers or (GPU_TIERS if on_gpu else CPU_TIERS):
        queries, keys = map(int, tier.split(":"))
        found = grid(
            queries=queries,
            keys=keys,
            head_dim=config.head_dims or head_dims,
            is_causal=tuple(mask == "causal" for mask in config.masks),
            direction=DIRECTIONS if config.backward else DIRECTIONS[:1],
            dtype=str(pick_dtype(device, config.dtype)).removeprefix("torch."),
            # a list is no axis: these are interleaved
            kernels=list(config.kernels) or [k for k in SWEEP_KERNELS if _runs_here(k, on_gpu)],
            **sampling(config),
            in_graph=config.cuda_graphs,
        )
        longest = max(queries, keys)
        for case in found:
            # without sizes, tokens × width are the same for all lengths
            case.batch_size = config.batch_size or max(1, tokens // longest)
            heads = width // case.head_dim * min(tokens, longest) // longest
            case.heads = config.heads or max(1, heads)
        cases += found
    return cases


def _runs_here(kernel: str, on_gpu: bool) -> bool:
    """Whether the device runs a kernel, and its package is installed."""
    is_installed = kernel not in FLASH_ATTENTION_4 or (
        # the package of FlashAttention-2 has the same name and lacks `cute`
        importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    )
    return bool(is_installed) and (on_gpu or kernel not in GPU_ONLY)


def measure_case(
    case: Case, config: AttentionBenchmarkConfig, device: torch.device
) -> dict[str, Any]:
    """Measure each kernel of a case: the figures of its `Measurement`, and more.

    - `status`: also `unsupported` (with a `reason`) or `wrong`
    - `tflops`: by `flops`
    - `error`: relative error of some rows of the output
    - `peak_memory_bytes`: in the case of a backward pass, of both passes
    """
    from torch._functorch import config as functorch

    # otherwise code compiled for other shapes would make this case's code dynamic
    torch.compiler.reset()
    inputs = make_inputs(case, device, config.seed)
    results = {}
    # compiled code keeps what its backward pass reads, so that the pass can be repeated
    repeats = functorch.patch(donated_buffer=False)
    with numerics(tf32=False, deterministic=False), repeats:
        for group in groups(case, device):
            results |= measure_group(group, case, inputs, device)
    kernels = {kernel: results[kernel] for kernel in case.kernels}
    return {"flops": flops(case), "kernels": kernels}


def groups(case: Case, device: torch.device) -> list[list[str]]:
    """Group the kernels to interleave: all of them, except those that must be measured alone."""
    alone = HOST_BOUND if device.type == "cuda" else HOST_BOUND[:1]
    if case.direction == "backward":
        alone += HOLD_SCORES
    together = [kernel for kernel in case.kernels if kernel not in alone]
    return [together] * bool(together) + [[k] for k in case.kernels if k in alone]


def make_inputs(case: Case, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output: (batch, heads, tokens, head_dim), standard normal."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"device": device, "dtype": getattr(torch, case.dtype), "generator": generator}
    tokens = (case.queries, case.keys, case.keys, case.queries)
    size = (case.batch_size, case.heads)
    *leaves, grad_out = (torch.randn(*size, n, case.head_dim, **options) for n in tokens)
    if case.direction == "backward":
        leaves = [leaf.requires_grad_() for leaf in leaves]
    return *leaves, grad_out


def measure_group(
    kernels: Sequence[str], case: Case, inputs: tuple[Tensor, ...], device: torch.device
) -> dict[str, dict[str, Any]]:
    """Check each kernel, then interleave the ones that are right; return their figures.

    One that raises is `oom`, or `unsupported` if it is a peer.
    """
    prepare = _prepare_graph if case.in_graph else _prepare
    results, functions = {}, {}
    for name in kernels:
        if not _fits_memory(case, name, device):
            results[name] = {"status": "oom", "was_tried": False}
            continue
        try:
            function, figures = prepare(name, case, inputs)
        except Exception as error:
            results[name] = _failure(name, error)
            free_memory(error)
            continue
        error = figures["error"]
        status = "ok" if error <= LARGEST_ERROR else "wrong"
        error = error if math.isfinite(error) else None
        results[name] = figures | {"status": status, "error": error}
        if status == "ok":
            functions[name] = function
    for name, measured in zip(functions, _interleave(list(functions.values()), case, device)):
        # memory that is known already is that of both passes
        results[name] = measured.figures() | results[name] | {"status": measured.status}
        if measured.status == "ok":
            results[name]["tflops"] = flops(case) / measured.median_ms / 1e9
    return results


def _prepare(
    kernel: str, case: Case, inputs: tuple[Tensor, ...]
) -> tuple[Function, dict[str, Any]]:
    """The function to measure, already called once, and what is known about it before."""
    *leaves, grad_out = inputs
    attention = named_attention(kernel, case, grad_out.device)
    out = attention(*leaves)
    q, k, v = (leaf.detach() for leaf in leaves)
    error = error_of_rows(out.detach(), q, k, v, case.is_causal)
    figures: dict[str, Any] = {"error": error}
    if case.direction == "forward":

        def run() -> Any:
            return attention(*leaves)

    else:

        def both_passes() -> None:
            torch.autograd.grad(attention(*leaves), leaves, grad_out)

        def run() -> Any:
            return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

        # free what the forward pass kept, so that it is not there twice
        out = None
        both_passes()
        figures |= _memory(both_passes, grad_out.device)
        out = attention(*leaves)
    return run, figures


def _memory(fn: Function, device: torch.device) -> dict[str, Any]:
    return dict(zip(("peak_memory_bytes", "total_memory_bytes"), allocated_bytes(fn, device)))


def _prepare_graph(
    kernel: str, case: Case, inputs: tuple[Tensor, ...]
) -> tuple[Function, dict[str, Any]]:
    """Do as `_prepare`, but return a function that replays a CUDA graph of a call."""
    # a backward pass runs in the stream of the forward pass, which must be that of the recording
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run, figures = _prepare(kernel, case, inputs)
        for _ in range(case.warmup):
            run()
        if case.direction == "forward":
            # a replay allocates nothing: its memory is the call's
            figures |= _memory(run, inputs[0].device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    # `run` holds the tensors that the graph reads
    return lambda _held=run: graph.replay(), figures


def _fits_memory(case: Case, kernel: str, device: torch.device) -> bool:
    """Whether the scores of a naive kernel fit; on a CPU the system might kill this process.

    They are about three float32 copies: the scores, a masked copy and exponentials.
    """
    if device.type != "cpu" or kernel not in (*HOLD_SCORES, "scaled_dot_prod_attention"):
        return True
    num_bytes = 12 * case.batch_size * case.heads * case.queries * case.keys
    return num_bytes <= (device_memory(device) or math.inf)


def _failure(kernel: str, error: Exception) -> dict[str, Any]:
    """The figures of a kernel that raised `error`; re-raises what is a bug of ours."""
    if is_out_of_memory(error):
        return {"status": "oom"}
    if kernel not in (*LIMITED, "vectorized_torch_compiled"):
        raise error
    return {"status": "unsupported", "reason": one_line(error)[:REASON_LENGTH]}


def _interleave(
    functions: Sequence[Function], case: Case, device: torch.device
) -> list[Measurement]:
    """Interleave the functions; a slow one that is alone is sampled once."""
    if len(functions) == 1:
        once = measure_interleaved(functions, device=device, warmup=1, samples=1)
        if (once[0].median_ms or math.inf) > 250 * case.max_seconds:
            return once
    return measure_interleaved(functions, device=device, **sampling(case))


def named_attention(kernel: str, case: Case, device: torch.device) -> Attention:
    """The function of q, k and v called `kernel`, with the mask of `case`."""
    if kernel == "flex_attention":
        return flex_attention(case, device)
    if kernel in FLASH_ATTENTION_4:
        return flash_attention_4(case, deterministic=kernel == "fa4_deterministic")
    if kernel == UNORDERED:
        from lib.flash_attention.triton_attention import flash_attention

        return functools.partial(flash_attention, is_causal=case.is_causal, deterministic=False)
    if kernel not in BACKENDS:
        return functools.partial(attention, kernel=kernel, is_causal=case.is_causal)

    def with_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[kernel]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal)

    return with_backend


def flex_attention(case: Case, device: torch.device) -> Attention:
    """PyTorch's FlexAttention, compiled for this shape, with its block mask made in advance."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = None
    if case.is_causal:
        size = (None, None, case.queries, case.keys)
        block_mask = create_block_mask(lambda b, h, query, key: query >= key, *size, device=device)
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return functools.partial(compiled, block_mask=block_mask)


def flash_attention_4(case: Case, *, deterministic: bool) -> Attention:
    """FlashAttention-4; `deterministic` adds dQ in one order, the default in any."""
    from flash_attn.cute import flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # it takes and returns (batch, tokens, heads, head_dim)
        tokens_first = (x.transpose(1, 2) for x in (q, k, v))
        out = flash_attn_func(*tokens_first, causal=case.is_causal, deterministic=deterministic)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2)

    return attend


def error_of_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> float:
    """Relative error of `out` in the first and last queries of the first sequence.

    The reference is the formula in float32. These rows show how the mask is aligned.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    last = max(num_queries - CHECKED_ROWS, 0)
    rows = torch.arange(num_queries, device=q.device)
    rows = torch.cat([rows[: min(CHECKED_ROWS, last)], rows[last:]])
    q, k, v, out = q[0, :, rows].float(), k[0].float(), v[0].float(), out[0, :, rows].float()
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (heads, rows, keys)
    if is_causal:
        hidden = torch.arange(num_keys, device=q.device) > rows[:, None]  # (rows, keys)
        scores = scores.masked_fill(hidden, -math.inf)
    expected = scores.softmax(-1) @ v  # (heads, rows, head_dim)
    return float((out - expected).norm() / expected.norm())


benchmark_attention = Benchmark(REPORT, attention_cases, measure_case)
