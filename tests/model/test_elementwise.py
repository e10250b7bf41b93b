"""RMSNorm and SwiGLU against their plain formulas: outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F

from lib.model.elementwise import rms_norm, swiglu
from lib.model.transformer import RMSNorm

ON_SHAPES = pytest.mark.parametrize("shape", [(6,), (2, 1, 5, 6), (0, 6)])


def draw(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def assert_same_with_gradients(ours, plain, inputs, grad):
    found, expected = (torch.autograd.grad(y, inputs, grad) for y in (ours, plain))
    for a, b in zip((ours, *found), (plain, *expected)):
        torch.testing.assert_close(a, b)


@ON_SHAPES
def test_rms_norm_is_its_formula(shape):
    x, weight, grad = draw(*shape), draw(6), draw(*shape).detach()
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert_same_with_gradients(rms_norm(x, weight, 1e-5), plain, (x, weight), grad)


@ON_SHAPES
def test_swiglu_is_its_formula(shape):
    x = draw(*shape)
    gate, value = x.chunk(2, dim=-1)
    plain = F.silu(gate) * value
    assert_same_with_gradients(swiglu(x), plain, (x,), torch.randn_like(plain))


def test_swiglu_takes_inputs_and_gradients_in_any_layout():
    x = draw(5, 4, 6).transpose(0, 1)
    gate, value = x.chunk(2, dim=-1)
    grad = draw(4, 3, 5).detach().transpose(1, 2)  # (4, 5, 3), not contiguous
    assert_same_with_gradients(swiglu(x), F.silu(gate) * value, (x,), grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_stored_in_low_precision_trains(dtype):
    norm, x = RMSNorm(8).to(dtype), draw(3, 8, dtype=torch.float32).to(dtype)
    y = norm(x)
    y.float().square().sum().backward()
    assert y.dtype == norm.weight.grad.dtype == dtype
    wide = RMSNorm(8)
    wide(x.float()).square().sum().backward()
    torch.testing.assert_close(norm.weight.grad.float(), wide.weight.grad, rtol=0.02, atol=0.02)


def test_second_derivatives_are_refused_and_not_wrong():
    x = draw(3, 6)
    for y in (rms_norm(x, draw(6), 1e-5), swiglu(x)):
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError):
            grad.sum().backward()
