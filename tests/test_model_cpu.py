"""The CPU's elementwise steps equal their plain formulas, outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F

from lib import model_cpu
from lib.model import RMSNorm

SHAPES = [(6,), (1, 6), (3, 6), (2, 1, 5, 6), (0, 6)]


def draw(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_its_formula(shape):
    x, weight, grad = draw(*shape), draw(6), draw(*shape).detach()
    ours = model_cpu.rms_norm(x, weight, 1e-5)
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    found = torch.autograd.grad(ours, (x, weight), grad)
    expected = torch.autograd.grad(plain, (x, weight), grad)
    for a, b in zip((ours, *found), (plain, *expected)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_equals_its_formula(shape):
    x = draw(*shape)
    gate, value = x.chunk(2, dim=-1)
    plain = F.silu(gate) * value
    ours = model_cpu.swiglu(x)
    grad = torch.randn_like(plain)
    torch.testing.assert_close(ours, plain)
    (found,), (expected,) = (torch.autograd.grad(y, x, grad) for y in (ours, plain))
    torch.testing.assert_close(found, expected)


def test_what_stands_in_memory_in_another_order_is_right_too():
    x = draw(5, 4, 6).transpose(0, 1)
    torch.testing.assert_close(model_cpu.swiglu(x), model_cpu.swiglu(x.contiguous()))
    grad = draw(4, 3, 5).detach().transpose(1, 2)  # (4, 5, 3), not contiguous
    (found,) = torch.autograd.grad(model_cpu.swiglu(x), x, grad)
    (expected,) = torch.autograd.grad(model_cpu.swiglu(x), x, grad.contiguous())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_held_in_a_short_type_trains(dtype):
    norm, x = RMSNorm(8).to(dtype), draw(3, 8, dtype=torch.float32).to(dtype)
    y = norm(x)
    y.float().square().sum().backward()
    assert y.dtype == norm.weight.grad.dtype == dtype
    wide = RMSNorm(8)
    wide(x.float()).square().sum().backward()
    torch.testing.assert_close(norm.weight.grad.float(), wide.weight.grad, rtol=0.02, atol=0.02)


def test_second_derivatives_are_refused_and_not_wrong():
    x = draw(3, 6)
    for y in (model_cpu.rms_norm(x, draw(6), 1e-5), model_cpu.swiglu(x)):
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError):
            grad.sum().backward()
