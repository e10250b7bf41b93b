"""What every implementation does: the reference, the Triton kernels, the CUDA C++ kernels.

The kernels run on a GPU; `test_triton_attention` runs Triton's in the interpreter, and "emulated"
is CUDA C++ on a CPU.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lib.flash_attention import reference
from tests.flash_attention.cases import (
    EMPTY,
    GROUPED,
    LAYOUTS,
    LONG,
    SCALED,
    SHAPES,
    SMALL,
    STRIDED,
    Case,
    assert_error_at_most_twice_pytorchs,
    formula,
    largest,
    make_inputs,
    new_memory_is_nan,
    right_results,
    with_gradients,
)
from tests.flash_attention.cuda.emulator import NEEDS_COMPILER, emulate
from tests.model.kernels import DTYPES, INTERPRETING, SHORT_TYPES

# On a Hopper GPU heads of 64 and 128 in 16 bits take the kernels of `hopper/`.
ON_WIDTHS = pytest.mark.parametrize("head_dim", [16] if INTERPRETING else [16, 64, 128])
ON_ENTRIES = pytest.mark.parametrize("entry", ["function", "by_the_class"])
PLAIN = Case(33, 33, 16, batch=1)


class Implementation(NamedTuple):
    """Flash attention as a function and as a class, and where it runs."""

    attention: Callable[..., Tensor]
    flash_class: type[torch.autograd.Function]
    device: str
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-4

    def function(self, case: Case) -> Callable[..., Tensor]:
        """The function with the settings of `case`."""
        return lambda q, k, v: self.attention(q, k, v, is_causal=case.is_causal, scale=case.scale)

    def by_the_class(self, case: Case) -> Callable[..., Tensor]:
        """The class on (batch · heads, tokens, head_dim)."""

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = (x.flatten(0, 1) for x in (q, k, v))
            return self.flash_class.apply(*flat, case.is_causal).unflatten(0, q.shape[:2])

        return attention

    def inputs(self, case: Case, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        return make_inputs(case, dtype or self.dtype, self.device)


@pytest.fixture(
    params=["kernels"]
    if INTERPRETING
    else [
        "reference",
        pytest.param("kernels", marks=pytest.mark.gpu),
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("emulated", marks=[pytest.mark.slow, NEEDS_COMPILER]),
    ]
)
def flash(request, monkeypatch) -> Implementation:
    """The implementation under test."""
    if request.param == "reference":
        return Implementation(reference.flash_attention, reference.FlashAttention, "cpu")
    if request.param in ("cuda", "cuda for a T4", "emulated"):
        from lib.flash_attention.cuda import attention

        if request.param == "cuda for a T4":
            monkeypatch.setenv("WORKBOOK_CUDA_ARCHITECTURE", "compute_75")
        device = emulate(monkeypatch) if request.param == "emulated" else "cuda"
        kernels = (attention.flash_attention, attention.FlashAttentionCUDA)
        return Implementation(*kernels, device, torch.float16, tolerance=2e-3)
    from lib.flash_attention import triton_attention as kernels

    device = "cpu" if INTERPRETING else "cuda"
    return Implementation(kernels.flash_attention, kernels.FlashAttentionTriton, device)


# The grid: each implementation in its dtypes, on cases that reach what it has of its own

ODDLY_SCALED = [Case(65, 65, 32, scale=scale) for scale in (0.0, -0.3)]
UNUSUAL_WIDTHS = [
    Case(97, 97, head_dim, is_causal)
    for head_dim in (1, 8, 40, 192, 256)
    for is_causal in (True, False)
]
# a few seconds' worth: each edge once, on heads that share few builds
QUICK = [
    Case(1, 1, 32, batch=1, heads=1, key_heads=1),
    Case(130, 97, 32),
    Case(97, 130, 32, False, heads=6, key_heads=2, batch=1),
    Case(150, 150, 20, batch=1, scale=1.5),
    Case(65, 65, 32, False, heads=3, key_heads=3, layout="packed"),
    Case(40, 70, 24, layout="amid NaN"),
    Case(63, 140, 31, False, batch=1, layout="gaps in head_dim"),
    Case(140, 140, 64, batch=1, key_heads=1),
    Case(129, 66, 64, False, batch=1, heads=1, key_heads=1),
]
SIDES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
# each pair of lengths around the edges of tiles once, with head sizes, masks and groups in turn
EDGES = [
    Case(queries, keys, head_dim, is_causal, heads, key_heads, batch=1)
    for (queries, keys), head_dim, is_causal, (heads, key_heads) in zip(
        itertools.product(SIDES, SIDES),
        itertools.cycle((32, 64, 96, 128, 48)),
        itertools.cycle((True, False, True)),
        itertools.cycle(((1, 1), (2, 1), (3, 3), (4, 2))),
    )
]
# that Hopper's kernels take, or leave to the portable ones for their layout
WIDE = [
    Case(200, 200, head_dim, is_causal, layout=layout)
    for head_dim, is_causal in ((64, True), (128, False))
    for layout in LAYOUTS[1:]
]
# the interpreter is slow, and gets small ones, with dtypes in turn
INTERPRETED = [
    *SMALL,
    *(Case(33, 33, 16, batch=1, layout=case.layout) for case in STRIDED[2:5]),
    Case(33, 20, 16, heads=6, batch=1),
    Case(33, 33, 16, batch=1, scale=0.7),
]
COMMON = [*SHAPES, *GROUPED, *STRIDED, *SCALED]
HALVES = [torch.float16, torch.bfloat16]


def rows(name: str, each: Iterable[tuple], *marks: pytest.MarkDecorator) -> list:
    """Parameters of the grid: an implementation with cases and their dtypes."""
    return [
        pytest.param(name, case, dtype, marks=marks, id=f"{name}-{case}-{dtype}")
        for case, dtype in each
    ]


def grid() -> list:
    if INTERPRETING:
        return rows("kernels", [*zip(INTERPRETED, itertools.cycle(DTYPES)), (SMALL[-1], DTYPES[0])])
    product, on_gpu = itertools.product, pytest.mark.gpu
    return [
        *rows("reference", product([*COMMON, *LONG, *ODDLY_SCALED], [torch.float32])),
        *rows("kernels", product([*COMMON, *LONG, *UNUSUAL_WIDTHS, *WIDE], DTYPES), on_gpu),
        *rows("cuda", product([*COMMON, *LONG, *EDGES], HALVES), on_gpu),
        *rows("cuda for a T4", product([*COMMON, *LONG, *EDGES], HALVES[:1]), on_gpu),
        *rows("emulated", product(QUICK, HALVES[:1]), NEEDS_COMPILER),
        *rows("emulated", product([*COMMON, *EDGES], HALVES), NEEDS_COMPILER, pytest.mark.slow),
    ]


@pytest.mark.parametrize(("flash", "case", "dtype"), grid(), indirect=["flash"])
def test_error_is_at_most_twice_pytorchs(flash, case, dtype):
    if dtype == torch.bfloat16 and os.environ.get("WORKBOOK_CUDA_ARCHITECTURE"):
        pytest.skip("a T4 has no bfloat16")
    # a product of two factors, each in two TF32 parts, leaves out that of the lower ones: 2⁻²²
    roundings = 2 if dtype == torch.float32 and flash.device == "cuda" else 1
    assert_error_at_most_twice_pytorchs(
        flash.attention, case, dtype, flash.device, roundings=roundings
    )


# Properties


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("flash", "dtype"),
    [
        *(("kernels", dtype) for dtype in DTYPES),
        *(("cuda", dtype) for dtype in HALVES),
        ("cuda for a T4", torch.float16),
    ],
    ids=str,
    indirect=["flash"],
)
@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False)])
def test_results_repeat_to_the_bit_whatever_runs_beside(flash, dtype, head_dim, is_causal):
    case = Case(450, 450, head_dim, is_causal, heads=6, key_heads=6, batch=12)
    inputs = flash.inputs(case, dtype)
    first = with_gradients(flash.function(case), inputs)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    again = []
    for i in range(12):
        with torch.cuda.stream(streams[i % 3]):
            again.append(with_gradients(flash.function(case), inputs))
    torch.cuda.synchronize()
    for results in again:
        assert all(a.equal(b) for a, b in zip(results, first))


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_where_there_is_nothing_to_see_there_are_zeros(flash, case):
    inputs = flash.inputs(case, torch.float16)
    with new_memory_is_nan():
        results = with_gradients(flash.function(case), inputs)
    for result, like in zip(results, (inputs[0], *inputs)):
        assert result.shape == like.shape
        assert (result == 0).all()


@pytest.mark.parametrize("sizes", [(64, 64), (33, 49), (97, 63)], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_class_saves_one_natural_log_sum_exp(flash, sizes, is_causal):
    case = Case(*sizes, 32, is_causal, heads=1, key_heads=1)
    inputs = flash.inputs(case, torch.float16)
    q, k, v = (x.squeeze(1) for x in inputs[:3])
    with new_memory_is_nan():
        out = flash.flash_class.apply(q, k, v, is_causal)
    saved = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:2]]
    assert len(saved) == 1
    assert saved[0].dtype == torch.float32
    lse = formula(*(x.detach().double() for x in inputs[:3]), case)[1].squeeze(1)
    torch.testing.assert_close(saved[0].double(), lse, rtol=1e-5, atol=1e-5)


def test_the_class_gives_what_the_function_gives_and_is_not_causal_unless_asked(flash):
    case = Case(63, 40, 32, batch=1)
    inputs = flash.inputs(case)
    right = with_gradients(flash.function(case), inputs)
    results = with_gradients(flash.by_the_class(case), inputs)
    assert all(a.equal(b) for a, b in zip(results, right))
    q, k, v = (x.flatten(0, 1) for x in inputs[:3])
    full = flash.flash_class.apply(q, k, v)
    assert full.equal(flash.flash_class.apply(q, k, v, False))
    assert not full.equal(right[0].flatten(0, 1))


@ON_WIDTHS
def test_keys_that_no_query_sees_have_no_influence(flash, head_dim):
    # keys so far after the last query that no tile of any size on the diagonal holds them
    case = Case(20, 300, head_dim, batch=1)
    inputs = flash.inputs(case, torch.float16)
    right = with_gradients(flash.function(case), inputs)
    with torch.no_grad():
        inputs[1][:, :, 256:], inputs[2][:, :, 256:] = math.nan, math.nan
    again = with_gradients(flash.function(case), inputs)
    assert all(a.equal(b) for a, b in zip(again, right))


@ON_WIDTHS
def test_large_scores_do_not_overflow(flash, head_dim):
    case = Case(160, 160, head_dim, batch=1)
    *leaves, grad_out = (x.detach() for x in flash.inputs(case, torch.float16))
    inputs = (*((100 * x).requires_grad_() for x in leaves), grad_out)
    results = with_gradients(flash.function(case), inputs)
    right = right_results(inputs, case)[0]
    torch.testing.assert_close(results[0].double(), right, rtol=0, atol=0.02 * largest(right))
    assert all(result.isfinite().all() for result in results)


@ON_WIDTHS
@pytest.mark.parametrize(("tokens", "is_causal"), [(63, False), (100, True)])
def test_a_key_of_minus_infinity_has_no_weight_and_no_gradient(flash, tokens, is_causal, head_dim):
    case = Case(tokens, tokens, head_dim, is_causal)
    q, k, v, grad_out = (x.detach() for x in flash.inputs(case, torch.float16))
    q, k = q.abs() + 0.1, k.clone()
    k[:, :, 2] = -torch.inf
    leaves = [x.requires_grad_() for x in (k, v)]
    out = flash.function(case)(q, k, v)
    grads = torch.autograd.grad(out, leaves, grad_out)
    right = formula(q.double(), k.detach().double(), v.detach().double(), case)[0]
    torch.testing.assert_close(out.double(), right, rtol=0, atol=0.02 * largest(v))
    for grad in grads:
        assert grad.isfinite().all()
        assert not grad[:, :, 2].any()


@ON_WIDTHS
def test_where_all_scores_are_minus_infinity_there_are_zeros(flash, head_dim):
    q, v = (
        torch.ones(1, 1, 70, head_dim, device=flash.device).half().requires_grad_()
        for _ in range(2)
    )
    k = torch.zeros_like(q)
    k[:, :, 0] = -torch.inf
    out = flash.attention(q, k, v)
    assert out[0, 0, :, 0].tolist() == [0.0] + 69 * [1.0]
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert grad.isfinite().all()
    assert not grad[0, 0, 0].any()


def test_the_upstream_gradient_may_be_an_expanded_number(flash):
    *leaves, _ = flash.inputs(PLAIN)
    gradients = torch.autograd.grad(flash.function(PLAIN)(*leaves).sum(), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    right = torch.autograd.grad(formula(*wide, PLAIN)[0].sum(), wide)
    tolerance = flash.tolerance
    for a, b in zip(gradients, right):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance / 10)


def test_only_one_input_may_require_gradients(flash):
    inputs = flash.inputs(PLAIN)
    right = with_gradients(flash.function(PLAIN), inputs)
    for wanted in range(3):
        leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs[:3])]
        out = flash.function(PLAIN)(*leaves)
        (gradient,) = torch.autograd.grad(out, leaves[wanted], inputs[3])
        assert gradient.equal(right[1 + wanted])


@ON_WIDTHS
def test_autocast_computes_as_if_the_inputs_had_its_dtype(flash, head_dim):
    case, dtype = Case(97, 97, head_dim, batch=1), SHORT_TYPES[-1]
    *leaves, grad_out = flash.inputs(case, torch.float32)
    short = [x.detach().to(dtype).requires_grad_() for x in leaves]
    grad_out = grad_out.to(dtype)
    right = with_gradients(flash.function(case), (*short, grad_out))
    with torch.autocast(flash.device, dtype):
        # the backward pass, too, must not lose float32 between its tiles
        results = with_gradients(flash.function(case), (*leaves, grad_out))
        mixed = flash.function(case)(leaves[0], short[1], leaves[2])
    assert results[0].equal(right[0])
    assert mixed.equal(right[0])
    for a, b in zip(results[1:], right[1:]):
        assert a.dtype == torch.float32
        assert a.equal(b.float())


@ON_ENTRIES
def test_activation_checkpointing_changes_nothing(flash, entry):
    attention = getattr(flash, entry)(PLAIN)
    inputs = flash.inputs(PLAIN)
    right = with_gradients(attention, inputs)
    q, k, v, grad_out = inputs
    out = checkpoint(attention, q, k, v, use_reentrant=entry == "by_the_class")
    # the reentrant form refuses torch.autograd.grad
    out.backward(grad_out)
    assert all(a.equal(b) for a, b in zip([out, q.grad, k.grad, v.grad], right))


@pytest.mark.parametrize(
    ("entry", "dynamic"),
    [
        ("function", False),
        ("by_the_class", True),
        pytest.param("function", True, marks=pytest.mark.slow),
        pytest.param("by_the_class", False, marks=pytest.mark.slow),
    ],
)
def test_compiles_into_one_graph_also_for_lengths_that_change(flash, entry, dynamic):
    layout = "packed" if entry == "function" and not dynamic else "heads first"
    cases = [Case(n, n, 16, batch=1, layout=layout) for n in ((33, 48) if dynamic else (33,))]
    attention = getattr(flash, entry)(cases[0])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v) + 1

    torch.compiler.reset()
    backend = "inductor" if flash.device == "cuda" else "aot_eager"
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for case in cases:
        inputs = flash.inputs(case)
        for a, b in zip(with_gradients(compiled, inputs), with_gradients(function, inputs)):
            torch.testing.assert_close(a, b)
