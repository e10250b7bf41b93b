"""The elementwise Triton kernels against the modules and formulas: outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.model.config import ModelConfig
from lib.model.transformer import RotaryEmbedding, TransformerLM
from tests.model import test_loss_triton
from tests.model.kernels import (
    INTERPRETING,
    ON_DTYPES,
    ON_KERNEL_DEVICES,
    OUTSIDE_THE_INTERPRETER,
    assert_passed,
)

# Whose tests of kernels are tried in the interpreter too.
INTERPRETED = (__file__, test_loss_triton.__file__)

LAYOUTS = ["tokens first", "heads first", "reversed", "expanded"]
# (batch, length, heads, head_dim) of q, and the layout of its gradient
QKV_CASES = [
    ((1, 1, 1, 2), "tokens first"),
    ((2, 5, 3, 20), "heads first"),
    ((2, 3, 1, 80), "reversed"),
    ((3, 2, 5, 6), "expanded"),
]
# The last is of three programs in the backward pass, the third with fewer rows than a tile has;
# the interpreter takes a millisecond for each row.
NORM_SHAPES = [(1, 2), (2, 3, 44), (1, 5, 65), (70, 128) if INTERPRETING else (1500, 8)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_qkv(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    batch, length, heads, head_dim = shape
    return draw(batch, length, 3, heads, head_dim).to(device, dtype).requires_grad_()


def rotated_by_the_module(qkv: Tensor, rope: RotaryEmbedding) -> list[Tensor]:
    """q, k and v, (batch, length, heads, head_dim) each."""
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return [part.transpose(1, 2) for part in (rope(q), rope(k), v)]


def in_layout(gradient: Tensor, layout: str) -> Tensor:
    """The same numbers, laid out as attention kernels leave them."""
    if layout == "heads first":
        return gradient.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "reversed":
        return gradient.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    if layout == "expanded":
        return gradient[:, :, :, :1].expand_as(gradient)
    return gradient.contiguous()


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize(("shape", "layout"), QKV_CASES, ids=str)
def test_the_rope_kernel_is_the_module(device, dtype, shape, layout):
    from lib.model.elementwise_triton import rotated_qkv

    rope = RotaryEmbedding(shape[3], shape[1] + 3, device=device)
    qkv = make_qkv(shape, dtype, device)
    ours, right = rotated_qkv(qkv, rope.cos, rope.sin), rotated_by_the_module(qkv, rope)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for a, b in zip(ours, right):
        torch.testing.assert_close(a, b, **tolerance)

    # gradients of q, k and v each in another layout
    start = LAYOUTS.index(layout)
    upstream = [
        in_layout(draw(*shape, seed=i).to(device, dtype), (LAYOUTS * 2)[start + i])
        for i in range(3)
    ]
    (gradient,) = torch.autograd.grad(ours, qkv, upstream)
    (peer,) = torch.autograd.grad(right, qkv, upstream)
    torch.testing.assert_close(gradient, peer, **tolerance)


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (1, 70, 2, 20)], ids=str)
def test_the_kernel_of_rotated_attention_is_the_module_and_attention(device, dtype, shape):
    from lib.model.elementwise_triton import rotated_attention

    rope = RotaryEmbedding(shape[3], shape[1] + 3, device=device)
    # every other number of memory
    qkv = make_qkv((*shape[:3], 2 * shape[3]), dtype, device).detach()[..., ::2].requires_grad_()
    wide = qkv.detach().double().requires_grad_()
    q, k, v = (part.transpose(1, 2) for part in rotated_by_the_module(wide, rope))
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    ours = rotated_attention(qkv, rope.cos, rope.sin)
    upstream = draw(*shape, seed=1).to(device, dtype)
    (gradient,) = torch.autograd.grad(ours, qkv, upstream)
    (peer,) = torch.autograd.grad(right, wide, upstream.double())
    for a, b in ((ours, right), (gradient, peer)):
        error = (a.double() - b).norm() / b.norm()
        assert error < (4e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


@ON_KERNEL_DEVICES
def test_eager_calls_of_rotated_attention_give_the_bits_of_its_operator(device):
    from lib.model import elementwise_triton

    rope = RotaryEmbedding(16, 40, device=device)
    qkv = make_qkv((2, 33, 2, 16), torch.float16, device)
    upstream = draw(2, 33, 2, 16, seed=1).to(qkv)
    eager = elementwise_triton.rotated_attention(qkv, rope.cos, rope.sin)
    assert "Eager" in type(eager.grad_fn).__name__
    traced = elementwise_triton._rotated_attention.forward(qkv, rope.cos, rope.sin)[0]
    grads = [torch.autograd.grad(out, qkv, upstream)[0] for out in (eager, traced)]
    assert eager.equal(traced)
    assert grads[0].equal(grads[1])


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("name", ["rotated_qkv", "rotated_attention"])
@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 6, 3, 2, 4), torch.float32, "length of qkv must be at most 5, got 6"),
        ((1, 5, 3, 2, 4), torch.float64, "one of torch.bfloat16, .*got .* torch.float64"),
        ((1, 5, 2, 2, 4), torch.float32, r"qkv must be \(batch, length, 3, heads, even head_dim"),
        ((5, 3, 2, 4), torch.float32, r"qkv must be \(batch, length, 3, heads, even head_dim"),
        ((1, 5, 3, 2, 6), torch.float32, r"cos and sin must be .*, got \(5, 2\)"),
    ],
    ids=str,
)
def test_the_rope_kernels_refuse_what_they_would_read_wrongly(device, name, shape, dtype, message):
    from lib.model import elementwise_triton

    rope = RotaryEmbedding(4, 5, device=device)
    qkv = torch.zeros(shape, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=message):
        getattr(elementwise_triton, name)(qkv, rope.cos, rope.sin)


@ON_KERNEL_DEVICES
def test_rotated_attention_refuses_heads_that_its_kernels_are_too_narrow_for(device):
    from lib.model.elementwise_triton import rotated_attention

    rope = RotaryEmbedding(260, 2, device=device)
    with pytest.raises(ValueError, match="head_dim must be from 1 to 256, got 260"):
        rotated_attention(torch.zeros(1, 2, 3, 1, 260, device=device), rope.cos, rope.sin)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_kernels_refuse_dtypes_that_they_would_round(device, dtype):
    from lib.model.elementwise_triton import add_rms_norm, rms_norm, swiglu

    x, right = (torch.ones(2, 4, dtype=each, device=device) for each in (dtype, torch.float32))
    weight = torch.ones(4, device=device)
    for call in (
        lambda: swiglu(x),
        lambda: rms_norm(x, weight, 1e-5),
        lambda: add_rms_norm(right, x, weight, 1e-5),
        lambda: add_rms_norm(x, right, weight, 1e-5),
    ):
        with pytest.raises(ValueError, match=f"must be one of torch.bfloat16, .*, got {dtype}"):
            call()


# Ways to lay out the same numbers, (3, 4, 8), that are not contiguous.
STRIDED = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns first": lambda x: x.mT.contiguous().mT,
    "every other column": lambda x: torch.stack([x, -x], -1).flatten(-2)[..., ::2],
    "every other row": lambda x: torch.cat([x, -x], 1)[:, :4],
    "expanded": lambda x: x[:1].expand(3, 4, 8),
}


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("name", ["swiglu", "rms_norm", "add_rms_norm", "rotated_qkv"])
def test_kernels_take_any_strides(device, name, layout):
    from lib.model import elementwise_triton

    function = getattr(elementwise_triton, name)
    lay_out = STRIDED[layout]
    x, other = (draw(3, 4, 8, seed=i).to(device) for i in range(2))
    weight = torch.cat([draw(8, seed=3), draw(8, seed=4)]).to(device)[::2]
    arguments = {
        "swiglu": lambda x, other: (x,),
        "rms_norm": lambda x, other: (x, weight, 1e-5),
        "add_rms_norm": lambda x, other: (x, other, weight, 1e-5),
        "rotated_qkv": lambda x, other: (x[:, :, None, None].expand(3, 4, 3, 1, 8), *tables),
    }[name]
    tables = [lay_out(draw(3, 4, 8, seed=5).to(device))[0, :, :4] for _ in range(2)]

    def results(lay_out) -> list[Tensor]:
        leaves = [lay_out(tensor).detach().requires_grad_() for tensor in (x, other)]
        out = function(*arguments(*leaves))
        outs = [out] if isinstance(out, Tensor) else list(out)
        upstream = [draw(*tensor.shape, seed=6 + i).to(device) for i, tensor in enumerate(outs)]
        grads = torch.autograd.grad(outs, leaves, upstream, allow_unused=True)
        return [tensor for tensor in (*outs, *grads) if tensor is not None]

    right = results(lambda tensor: lay_out(tensor).contiguous())
    for a, b in zip(results(lay_out), right):
        torch.testing.assert_close(a, b)


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 44), (9, 2 * 257)], ids=str)
def test_the_swiglu_kernel_is_the_formula(device, dtype, shape):
    from lib.model.elementwise_triton import swiglu

    x = draw(*shape).to(device, dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    gate, value = wide.chunk(2, dim=-1)
    right = F.silu(gate) * value
    ours = swiglu(x)
    # a gradient with gaps between its elements
    upstream = draw(*right.shape, 2, seed=1).to(device, dtype)[..., 0]
    (gradient,) = torch.autograd.grad(ours, x, upstream)
    (peer,) = torch.autograd.grad(right, wide, upstream.float())
    tolerance = {"rtol": max(torch.finfo(dtype).eps, 1e-5), "atol": 1e-6}
    torch.testing.assert_close(ours.float(), right, **tolerance)
    torch.testing.assert_close(gradient.float(), peer, **tolerance)


def test_swiglu_takes_more_rows_than_the_second_dimension_of_a_grid_could():
    pytest.importorskip("triton")
    from lib.model import elementwise_triton

    class Kernel(dict):
        def __missing__(self, grid):
            return lambda *tensors, **settings: self.update(grid=grid)

    x, kernel = torch.empty(8 * 70_000 + 1, 2 * 300, device="meta"), Kernel()
    elementwise_triton._launch_swiglu(kernel, x, x, x)
    assert kernel["grid"] == (70_001 * 2,)


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("has_sum", [True, False])
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_the_norm_kernel_is_the_module_and_may_take_a_sum(device, dtype, has_sum, shape):
    from lib.model.elementwise_triton import add_rms_norm, rms_norm

    x, branch, *upstream = (draw(*shape, seed=i).to(device, dtype) for i in range(4))
    # low-precision weights too, for one of the shapes
    weight_dtype = dtype if has_sum and shape == NORM_SHAPES[1] else torch.float32
    weight = (1 + 0.3 * draw(shape[-1], seed=4)).to(device, weight_dtype)
    inputs = [each.requires_grad_() for each in ((x, branch, weight) if has_sum else (x, weight))]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    if has_sum:
        ours = add_rms_norm(*inputs, 1e-5)
        assert ours[0].equal(x + branch)
        # the norm sees the rounded sum
        total = wide[0] + wide[1] + (ours[0].detach().double() - (wide[0] + wide[1]).detach())
        right = [total, F.rms_norm(total, shape[-1:], wide[2], 1e-5)]
    else:
        ours, right = [rms_norm(*inputs, 1e-5)], [F.rms_norm(wide[0], shape[-1:], wide[1], 1e-5)]

    upstream = upstream[: len(ours)]
    gradients = torch.autograd.grad(ours, inputs, upstream)
    peers = torch.autograd.grad(right, wide, [gradient.double() for gradient in upstream])
    step = torch.finfo(dtype).eps
    for a, b in zip((*ours, *gradients), (*right, *peers)):
        atol = 4 * step * b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=4 * step, atol=atol)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize(
    ("changes", "rope_kernel"),
    [
        ({"attention_kernel": "flash_attention_triton"}, "rotated_attention"),
        ({"norm": "post"}, "rotated_qkv"),
        ({"qk_norm": True}, None),
    ],
    ids=str,
)
def test_the_model_with_its_kernels_is_the_model_without(device, changes, rope_kernel, monkeypatch):
    from lib.model import elementwise_triton

    called = []

    def noting(name: str):
        function = getattr(elementwise_triton, name)
        return lambda *args: (called.append(name), function(*args))[1]

    for name in ("rotated_attention", "rotated_qkv", "add_rms_norm", "swiglu"):
        monkeypatch.setattr(elementwise_triton, name, noting(name))
    sizes = {"vocab_size": 61, "context_length": 8, "d_model": 16, "num_heads": 2, "d_ff": 24}
    config = ModelConfig(num_layers=1, **sizes, **changes)
    plain = TransformerLM(config, device=device)
    fused = TransformerLM(config, device=device)
    fused.load_state_dict(plain.state_dict())
    plain.use_kernels(False)
    token_ids = torch.arange(5, device=device)[None] * 7
    with monkeypatch.context() as patch:
        if INTERPRETING:
            patch.setattr(torch.Tensor, "is_cuda", True)
        right = plain.hidden(token_ids)
        assert not called
        ours = fused.hidden(token_ids)

    expected = {"swiglu"} | ({"add_rms_norm"} if config.norm == "pre" else set())
    assert set(called) == expected | ({rope_kernel} if rope_kernel else set())
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    upstream = draw(*ours.shape).to(device)
    weights = [list(model.layers.parameters()) for model in (fused, plain)]
    grads = [torch.autograd.grad(x, w, upstream) for x, w in zip((ours, right), weights)]
    for a, b in zip(*grads):
        assert (a - b).norm() < 1e-4 * b.norm()


@OUTSIDE_THE_INTERPRETER
def test_the_kernels_in_the_interpreter(tried_in_interpreter):
    assert_passed(tried_in_interpreter)
