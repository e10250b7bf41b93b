"""Inputs for tests of attention kernels, the formula in float64, and PyTorch's own as the peer."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYOUTS = (
    "heads first",
    "tokens first",
    "packed",
    "amid NaN",
    "gaps in head_dim",
    "transposed",
    "one batch for all",
)
RESULTS = ("output", "gradient of q", "gradient of k", "gradient of v")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an attention kernel."""

    queries: int
    keys: int
    head_dim: int = 64
    is_causal: bool = True
    heads: int = 2
    key_heads: int = 2
    batch: int = 2
    scale: float | None = None
    layout: str = "heads first"

    def __str__(self) -> str:
        """The fields that differ from their defaults, for pytest."""
        parts = [f"{self.queries}x{self.keys}", "causal" if self.is_causal else "full"]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default and field.name != "is_causal":
                parts.append(f"{field.name}={value}")
        return "-".join(parts)


SIZES = [(1, 1), (63, 63), (97, 97), (128, 128), (97, 63), (63, 128), (1, 128), (128, 1)]
MASKS = (True, False)
# each size with one head_dim, and each other head_dim with one size
SHAPES = [
    *(Case(*sizes, 32, is_causal) for sizes in SIZES for is_causal in MASKS),
    *(
        Case(97, 63, head_dim, is_causal)
        for head_dim in (16, 64, 80, 96, 128)
        for is_causal in MASKS
    ),
]
LONG = [
    Case(queries, keys, head_dim, is_causal, batch=1)
    for (queries, keys, head_dim) in [(1025, 1025, 64), (1025, 97, 32), (97, 1025, 80)]
    for is_causal in MASKS
]
GROUPED = [
    Case(*sizes, 32, is_causal, heads=6, key_heads=key_heads)
    for sizes, is_causal in [((97, 97), True), ((33, 140), False)]
    for key_heads in (1, 2, 3)
]
# packed: queries, keys and values of one tensor, so there are as many of each
STRIDED = [
    Case(97, 97, 32, is_causal, heads=3, key_heads=3, layout=layout)
    for layout, is_causal in zip(LAYOUTS, itertools.cycle(MASKS))
]
SCALED = [Case(65, 65, 32, scale=scale) for scale in (0.01, 1.0)]
SMALL = [
    Case(1, 1, 16, batch=1, key_heads=1),
    Case(63, 63, 32, False, batch=1, key_heads=1),
    Case(97, 40, 16, batch=1, key_heads=1),
    Case(40, 97, 80, False, batch=1, key_heads=1),
]
EMPTY = [
    Case(*sizes, 16, is_causal, batch=batch)
    for (*sizes, batch) in [(5, 0, 2), (0, 5, 2), (0, 0, 2), (5, 5, 0), (130, 0, 1)]
    for is_causal in MASKS
]


def make_inputs(case: Case, dtype: torch.dtype, device="cpu") -> tuple[Tensor, ...]:
    """q, k and v, which require gradients, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def with_layout(heads: int, tokens: int) -> Tensor:
        batch, head_dim = case.batch, case.head_dim
        if case.layout == "tokens first":
            return random(batch, tokens, heads, head_dim).transpose(1, 2)
        if case.layout == "amid NaN":
            shape = (batch, heads, tokens + 3, head_dim + 8)
            around = torch.full(shape, math.nan, dtype=dtype, device=device)
            inside = around[:, :, 1 : tokens + 1, :head_dim]
            return inside.copy_(random(*inside.shape))
        if case.layout == "gaps in head_dim":
            return random(batch, heads, tokens, 2 * head_dim)[..., ::2]
        if case.layout == "transposed":
            return random(batch, heads, head_dim, tokens).mT
        if case.layout == "one batch for all":
            return random(1, heads, tokens, head_dim).expand(batch, -1, -1, -1)
        return random(batch, heads, tokens, head_dim)

    if case.layout == "packed":
        packed = random(case.batch, case.queries, 3, case.heads, case.head_dim)
        q, k, v = packed.transpose(1, 3).unbind(2)
    else:
        q = with_layout(case.heads, case.queries)
        k, v = (with_layout(case.key_heads, case.keys) for _ in range(2))
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    return *leaves, with_layout(case.heads, case.queries)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE: pairs of neighbors as complex numbers, rotated by the angles of their positions."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angles = angles[: x.shape[2]]
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@contextlib.contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Let `torch.empty` and its like return NaN, so that numbers that are never written show.

    PyTorch does this while deterministic algorithms are enabled.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def with_gradients(attention: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    q, k, v, grad_out = inputs
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


def formula(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of the scores, with the whole score matrix."""
    k, v = (for_each_head(x, case) for x in (k, v))
    scores = scores_of(q, k, case)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None])
    return torch.einsum("bhqk,bhkd->bhqd", weights, v), lse


def scores_of(q: Tensor, k: Tensor, case: Case) -> Tensor:
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    scores = scale * torch.einsum("bhqd,bhkd->bhqk", q, k)
    if not case.is_causal:
        return scores
    query = torch.arange(case.queries, device=q.device)[:, None]
    key = torch.arange(case.keys, device=q.device)
    return torch.where(query >= key, scores, -math.inf)


def for_each_head(x: Tensor, case: Case) -> Tensor:
    """k or v with as many heads as q."""
    return x[:, torch.arange(case.heads, device=x.device) // (case.heads // case.key_heads)]


def right_results(inputs: tuple[Tensor, ...], case: Case) -> list[Tensor]:
    """The output and gradients of the formula in float64, by autograd."""
    *leaves, grad_out = (tensor.detach().double() for tensor in inputs)
    wide = (*[tensor.requires_grad_() for tensor in leaves], grad_out)
    return with_gradients(lambda q, k, v: formula(q, k, v, case)[0], wide)


def pytorchs_results(inputs: tuple[Tensor, ...], case: Case) -> list[Tensor]:
    """The output and gradients of PyTorch's own attention, computed op by op in one dtype."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=case.is_causal, scale=case.scale, enable_gqa=True
            )

    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    # keep float16 and bfloat16 throughout: by default it would compute in float32
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        return with_gradients(attention, inputs)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def rounding_errors(inputs: tuple[Tensor, ...], case: Case) -> list[float]:
    """How much one rounding of each term to float32 may change the output and each gradient.

    Gradients are sums that cancel: for a single key dP - delta is 0, and only its rounding error is
    left. PyTorch's ops subtract equal numbers there and make no error at all. The roundings in a
    dot product are independent: together they are the root of the sum of their squares.
    """
    q, k, v, grad_out = (tensor.detach().double() for tensor in inputs)
    k, v = (for_each_head(x, case) for x in (k, v))
    scores = scores_of(q, k, case)
    weights = scores.softmax(-1)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    errors_of_scores = scores.masked_fill(weights == 0, 0).abs() + abs(scale) * norm_of_products(
        q, k
    )
    # an absolute error of a score is a relative one of its exponential
    weight_errors = weights * (1 + errors_of_scores)
    grad_weights = grad_out @ v.mT
    delta = (weights * grad_weights).sum(-1, keepdim=True)
    differences = grad_weights.abs() + norm_of_products(grad_out, v) + delta.abs()
    score_errors = weights * differences + weight_errors * (grad_weights - delta).abs()
    score_errors = abs(scale) * score_errors
    of_keys = (score_errors.mT @ q.abs(), weight_errors.mT @ grad_out.abs())
    sums = [
        weight_errors @ v.abs(),
        score_errors @ k.abs(),
        *(x.unflatten(1, (case.key_heads, -1)).sum(2) for x in of_keys),
    ]
    return [torch.finfo(torch.float32).eps * largest(x) for x in sums]


def norm_of_products(a: Tensor, b: Tensor) -> Tensor:
    """For each row of a and each row of b, the norm of their elementwise product."""
    return (a.square() @ b.mT.square()).sqrt()


def assert_error_at_most_twice_pytorchs(
    attention: Callable[..., Tensor],
    case: Case,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    roundings: int = 1,
) -> None:
    """Check that the largest error against float64 is at most twice that of PyTorch's own.

    `roundings` roundings of each term are added to PyTorch's error, which may be 0.
    """
    inputs = make_inputs(case, dtype, device)
    with new_memory_is_nan():
        ours = with_gradients(
            lambda q, k, v: attention(q, k, v, is_causal=case.is_causal, scale=case.scale), inputs
        )
    peers, right = pytorchs_results(inputs, case), right_results(inputs, case)
    for name, a, b, c, rounding in zip(RESULTS, ours, peers, right, rounding_errors(inputs, case)):
        assert a.shape == c.shape, name
        assert a.dtype == dtype, name
        error, allowed = largest(a - c), 2 * (largest(b - c) + roundings * rounding)
        assert error <= allowed, f"{name}: error {error:.3g}, and at most {allowed:.3g} is allowed"


def largest(x: Tensor) -> float:
    return x.abs().max().item()
