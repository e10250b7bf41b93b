"""Clipping against torch's bits, and the norm of gradients of any dtype."""

import math

import pytest
import torch

from lib.optimizer.adamw import clip_grad_norm, grad_norm
from tests.optimizer.params import assert_equal, make_params, set_gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("max_norm", "scale"), [(0.0, 1.0), (1.0, 1.0), (100.0, 1.0), (math.inf, 1.0), (1e-6, 1e-7)]
)
def test_clipping_gives_the_bits_of_torch(max_norm, scale, dtype):
    ours, theirs = make_params(dtype=dtype), make_params(dtype=dtype)
    set_gradients(ours, theirs, seed=0, scale=scale)
    for params in (ours, theirs):
        params[1].requires_grad_(False)
        params[1].grad = None
    norm = clip_grad_norm(iter(ours), max_norm)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    grads = ([p.grad for p in params if p.grad is not None] for params in (ours, theirs))
    assert_equal(*grads)


def test_a_single_parameter_is_clipped_as_in_torch():
    (param,) = make_params([(3, 4)])
    param.grad = torch.ones_like(param)
    assert clip_grad_norm(param, 1.0).item() == pytest.approx(math.sqrt(12))
    assert grad_norm(param).item() == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_low_precision_gradients_is_summed_in_float32(dtype):
    # in bfloat16 a sum of ones stops growing at 256; in float16 300² is infinite
    params = make_params([(100, 100), (7,)], dtype=dtype)
    for param in params:
        param.grad = torch.full_like(param, 300)
    norm = clip_grad_norm(params, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(300 * math.sqrt(10_007), rel=1e-6)
    expected = torch.full((), 1 / math.sqrt(10_007)).to(dtype)
    torch.testing.assert_close(params[0].grad, expected.expand(100, 100))


def test_the_norm_joins_gradients_of_several_dtypes():
    params = [*make_params([(3,)]), *make_params([(4,)], dtype=torch.bfloat16)]
    params[0].grad = torch.full_like(params[0], 2.0)
    params[1].grad = torch.ones_like(params[1])
    assert grad_norm(params) == 4
    clip_grad_norm(params, 2.0)
    assert grad_norm(params).item() == pytest.approx(2, rel=1e-2)
    assert params[1].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("params", [[], make_params()], ids=["no parameters", "no gradients"])
def test_without_gradients_the_norm_is_zero(params):
    norm = clip_grad_norm(params, 1.0)
    assert (norm.shape, norm.dtype, norm.item()) == ((), torch.float32, 0)


def test_a_negative_max_norm_is_refused():
    with pytest.raises(ValueError, match=r"max_norm must be at least 0, got -1\.0"):
        clip_grad_norm(make_params(), -1.0)
