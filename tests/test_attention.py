"""Every attention kernel against the formula in float64: outputs, gradients, masks, rounding."""

import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.attention import attention, causal_mask, scaled_dot_product_attention
from lib.config_training import ATTENTION_KERNELS, ModelConfig

EAGER_KERNELS = ("scaled_dot_prod_attention", "vectorized_torch", "sdpa")
NEEDS_COMPILER = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.slow,
]
ON_EAGER_KERNELS = pytest.mark.parametrize("kernel", EAGER_KERNELS)
ON_KERNELS = pytest.mark.parametrize(
    "kernel",
    [*EAGER_KERNELS, pytest.param("vectorized_torch_compiled", marks=NEEDS_COMPILER)],
)
# (batch, heads, queries, keys, head_dim)
SHAPES = [(1, 1, 1, 1, 2), (2, 3, 17, 17, 8), (2, 1, 5, 12, 16), (1, 2, 12, 5, 4), (3, 2, 1, 9, 6)]
ON_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=str)


def make_inputs(shape: tuple[int, ...], dtype=torch.float32, device="cpu") -> list[Tensor]:
    """q, k and v that want gradients."""
    batch, heads, queries, keys, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(batch, heads, tokens, head_dim, generator=generator, dtype=torch.float64)
        for tokens in (queries, keys, keys)
    ]
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The formula, query by query, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    rows = []
    for i in range(q.shape[-2]):
        scores = (k @ q[..., i, :, None]).squeeze(-1) / math.sqrt(q.shape[-1])
        weights = scores.exp()
        if mask is not None:
            weights = weights * mask.expand(*q.shape[:2], q.shape[-2], -1)[..., i, :]
        weights = weights / weights.sum(-1, keepdim=True)
        rows.append((weights[..., None] * v).sum(-2))
    return torch.stack(rows, dim=-2)


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of a sum with unequal weights."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


def unfused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """PyTorch's operators one by one, which round the scores to the dtype of q."""
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return F.softmax(scores, dim=-1) @ v


def top_left(queries: int, keys: int) -> Tensor:
    return torch.tensor([[j <= i for j in range(keys)] for i in range(queries)])


@ON_KERNELS
@ON_SHAPES
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_gradients_are_those_of_the_formula(kernel, shape, is_causal):
    inputs, wide = make_inputs(shape), make_inputs(shape, torch.float64)
    ours = with_gradients(attention(*inputs, kernel=kernel, is_causal=is_causal), inputs)
    mask = top_left(*shape[2:4]) if is_causal else None
    right = with_gradients(reference(*wide, mask), wide)
    for a, b in zip(ours, right):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)


@ON_KERNELS
@pytest.mark.parametrize("mask_shape", [(7, 9), (2, 1, 7, 9), (1, 3, 7, 9), (2, 3, 7, 9), (7, 1)])
def test_masks_broadcast(kernel, mask_shape):
    shape = (2, 3, 7, 9, 4)
    mask = torch.rand(mask_shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 0] = True
    inputs, wide = make_inputs(shape), make_inputs(shape, torch.float64)
    out = attention(*inputs, kernel=kernel, is_causal=False, mask=mask)
    ours = with_gradients(out, inputs)
    for a, b in zip(ours, with_gradients(reference(*wide, mask.expand(2, 3, 7, 9)), wide)):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)


@ON_KERNELS
def test_a_query_that_sees_no_key_gives_zeros_and_finite_gradients(kernel):
    inputs = make_inputs((1, 2, 4, 5, 8))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    out, *gradients = with_gradients(
        attention(*inputs, kernel=kernel, is_causal=False, mask=mask), inputs
    )
    assert (out[:, :, 2] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:, :, 2] == 0).all()


@ON_EAGER_KERNELS
def test_scale_replaces_that_of_the_width(kernel):
    q, k, v = make_inputs((2, 2, 5, 5, 16))
    scaled = attention(q, k, v, kernel=kernel, scale=0.5)
    torch.testing.assert_close(scaled, attention(q * 2, k, v, kernel=kernel), rtol=1e-5, atol=1e-6)


@ON_EAGER_KERNELS
def test_tensors_need_not_be_contiguous(kernel):
    stacked = torch.randn(2, 9, 3, 4, 8, generator=torch.Generator().manual_seed(2))
    views = stacked.transpose(1, 3).unbind(2)
    copies = [view.contiguous() for view in views]
    torch.testing.assert_close(attention(*views, kernel=kernel), attention(*copies, kernel=kernel))


@ON_EAGER_KERNELS
def test_large_scores_do_not_overflow(kernel):
    q, k, v = make_inputs((1, 1, 3, 4, 8))
    out = attention(q * 1e4, k * 1e4, v, kernel=kernel, is_causal=False)
    best = (q @ k.mT).argmax(-1)
    torch.testing.assert_close(out, v[:, :, best[0, 0]])


def assert_error_at_most_twice_pytorchs(kernel: str, dtype, is_causal: bool, device: str) -> None:
    inputs = make_inputs((2, 4, 97, 97, 32), dtype, device)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mask = top_left(97, 97).to(device) if is_causal else None
    right = with_gradients(F.scaled_dot_product_attention(*wide, mask), wide)
    peer = with_gradients(unfused(*inputs, mask), inputs)
    ours = with_gradients(attention(*inputs, kernel=kernel, is_causal=is_causal), inputs)
    for a, b, c in zip(ours, peer, right):
        assert a.dtype == dtype
        error, own = ((x.double() - c).abs().max().item() for x in (a, b))
        # in float32 PyTorch's own may be exact in the last place
        assert error <= 2 * own + torch.finfo(torch.float32).eps * c.abs().max().item()


@pytest.mark.parametrize("kernel", ["scaled_dot_prod_attention", "vectorized_torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_error_is_at_most_twice_pytorchs(kernel, dtype, is_causal):
    assert_error_at_most_twice_pytorchs(kernel, dtype, is_causal, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [name for name in ATTENTION_KERNELS if name != "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_error_on_a_gpu_is_at_most_twice_pytorchs(kernel, dtype, is_causal):
    assert_error_at_most_twice_pytorchs(kernel, dtype, is_causal, "cuda")


@pytest.mark.parametrize("leading", [(), (3,), (2, 3, 4)])
def test_the_textbook_takes_any_leading_dimensions(leading):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(*leading, n, 8, generator=generator) for n in (5, 7, 7))
    mask = top_left(5, 7)
    peer = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), peer)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 5), (5, 3)])
def test_the_causal_mask_is_aligned_top_left(queries, keys):
    assert causal_mask(queries, keys, "cpu").equal(top_left(queries, keys))


def test_unknown_kernel_lists_the_known():
    inputs = make_inputs(SHAPES[0])
    with pytest.raises(
        ValueError, match="kernel is 'flash'; known: " + ", ".join(ATTENTION_KERNELS)
    ):
        attention(*inputs, kernel="flash")


def test_unknown_kernel_is_refused_by_the_config():
    with pytest.raises(ValueError, match="attention_kernel is 'flash'"):
        ModelConfig(attention_kernel="flash")


@ON_KERNELS
def test_mask_and_is_causal_exclude_each_other(kernel):
    with pytest.raises(ValueError, match="is_causal is True and mask is given"):
        attention(*make_inputs(SHAPES[0]), kernel=kernel, mask=top_left(1, 1))


ALL_HERE = (*EAGER_KERNELS, "flash_attention_torch")


@pytest.mark.parametrize("kernel", ALL_HERE)
@pytest.mark.parametrize("shape", [(2, 3, 4, 0, 8), (0, 3, 4, 4, 8), (2, 0, 4, 4, 8)], ids=str)
def test_without_keys_batch_or_heads_there_are_zeros_with_gradients(kernel, shape):
    inputs = make_inputs(shape)
    out, *grads = with_gradients(attention(*inputs, kernel=kernel, is_causal=False), inputs)
    assert out.shape == inputs[0].shape
    assert (out == 0).all()
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("kernel", ALL_HERE)
@pytest.mark.parametrize("scale", [0.0, -0.3, math.nan])
def test_a_scale_that_is_not_above_0_is_refused(kernel, scale):
    with pytest.raises(ValueError, match=r"scale is .*; right is: above 0"):
        attention(*make_inputs((1, 1, 3, 3, 4)), kernel=kernel, scale=scale)


@pytest.mark.parametrize("kernel", ALL_HERE)
def test_heads_of_no_width_are_refused(kernel):
    with pytest.raises(ValueError, match="q has head_dim 0; right is: at least 1"):
        attention(*make_inputs((1, 1, 3, 3, 0)), kernel=kernel)


@pytest.mark.parametrize("kernel", EAGER_KERNELS)
def test_grouped_heads_are_refused_where_they_are_not_known(kernel):
    q = torch.ones(1, 4, 3, 8)
    with pytest.raises(ValueError, match=f"q has 4 heads, k 2, which {kernel} does not group"):
        attention(q, q[:, :2], q[:, :2], kernel=kernel)
