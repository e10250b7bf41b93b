"""Softmax and cross-entropy against float64: values, gradients, chunks, memory, rounding."""

import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib.loss import cross_entropy, linear_cross_entropy, log_sum_exp, softmax

ROOT = Path(__file__).resolve().parent.parent
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# The tests that take `device` try the kernels: on a GPU, and in a process of their own
# (`test_the_kernels_in_the_interpreter`) on the CPU.
KERNEL_DEVICES = ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]
ON_KERNEL_DEVICES = pytest.mark.parametrize("device", KERNEL_DEVICES)
# The interpreter gets bfloat16 wrong.
SHORT_TYPES = [torch.float16] if INTERPRETING else [torch.float16, torch.bfloat16]


def make_inputs(tokens=13, d_model=8, vocab=11, dtype=torch.float64, device="cpu", scale=1.0):
    """hidden and weight, which want gradients, and targets that name the first and last id too."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, d_model, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(vocab, d_model, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[0], targets[-1] = vocab - 1, 0
    factors = [factor.to(device, dtype).requires_grad_() for factor in (hidden, weight)]
    return *factors, targets.to(device)


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """PyTorch's own, on all logits in float64."""
    logits = hidden.double() @ weight.double().T
    return F.cross_entropy(logits, targets) + z_loss * logits.logsumexp(-1).square().mean()


def with_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, inputs)]


def assert_close(ours: list[Tensor], right: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(ours, right):
        torch.testing.assert_close(a.double(), b.double(), **tolerance)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("scale", [1, 1e4])
def test_softmax_is_pytorchs(dim, scale):
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)) * scale
    torch.testing.assert_close(softmax(x, dim), F.softmax(x, dim))


def test_softmax_gradient_is_right():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(softmax, x)


def test_softmax_of_nothing_but_minus_infinity_is_zero():
    x = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]])
    assert softmax(x).equal(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_softmax_computes_in_float32_or_more(dtype):
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = softmax(x)
    assert out.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(out.double(), F.softmax(x.double(), -1), rtol=1e-5, atol=1e-8)


def test_log_sum_exp_does_not_overflow():
    x = torch.tensor([[1e4, 1e4], [-1e4, -1e4]])
    assert log_sum_exp(x).equal(torch.tensor([1e4, -1e4]) + math.log(2))


@pytest.mark.parametrize("scale", [1, 1e3, 1e4])
def test_cross_entropy_and_its_gradient_are_pytorchs(scale):
    logits = (torch.randn(2, 7, 11, generator=torch.Generator().manual_seed(0)) * scale).double()
    logits.requires_grad_()
    targets = torch.arange(14).view(2, 7) % 11
    ours = with_gradients(cross_entropy(logits, targets), logits)
    right = with_gradients(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)
    assert_close(ours, right)


@pytest.mark.parametrize("scale", [1, 1e3, 1e4])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_linear_cross_entropy_is_that_of_all_logits(scale, z_loss):
    hidden, weight, targets = make_inputs(scale=scale)
    ours = linear_cross_entropy(hidden, weight, targets, z_loss=z_loss)
    right = reference(hidden, weight, targets, z_loss)
    assert_close(with_gradients(ours, hidden, weight), with_gradients(right, hidden, weight))


def test_linear_cross_entropy_gradient_is_the_slope():
    # not gradcheck, which takes the gradients twice
    hidden, weight, targets = make_inputs(tokens=3, d_model=4, vocab=5)
    _, *gradients = with_gradients(
        linear_cross_entropy(hidden, weight, targets, z_loss=0.1), hidden, weight
    )
    step = 1e-6
    with torch.no_grad():
        for tensor, gradient in zip((hidden, weight), gradients):
            for place in range(tensor.numel()):
                losses = []
                for move in (step, -2 * step):
                    tensor.view(-1)[place] += move
                    losses.append(linear_cross_entropy(hidden, weight, targets, z_loss=0.1))
                tensor.view(-1)[place] += step
                slope = (losses[0] - losses[1]) / (2 * step)
                torch.testing.assert_close(slope, gradient.view(-1)[place], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 12, 13, 14, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_change_the_result(chunk_tokens, dtype):
    hidden, weight, targets = make_inputs(dtype=dtype)
    results = [
        with_gradients(
            linear_cross_entropy(hidden, weight, targets, chunk_tokens=size), hidden, weight
        )
        for size in (chunk_tokens, None)
    ]
    # weights' gradients are summed up in another order
    step = torch.finfo(dtype).eps
    assert_close(*results, rtol=4 * step, atol=step)


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_one_input_may_want_gradients(wanted):
    hidden, weight, targets = make_inputs()
    right = with_gradients(reference(hidden, weight, targets), hidden, weight)
    frozen = weight if wanted == "hidden" else hidden
    frozen.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets).backward()
    gradient = hidden.grad if wanted == "hidden" else weight.grad
    assert frozen.grad is None
    torch.testing.assert_close(gradient, right[1 if wanted == "hidden" else 2])


def test_gradients_add_up_over_passes():
    hidden, weight, targets = make_inputs()
    right = with_gradients(reference(hidden, weight, targets), hidden, weight)
    for rows in (slice(0, 5), slice(5, 13)):
        loss = linear_cross_entropy(hidden[rows], weight, targets[rows])
        (loss * len(targets[rows]) / 13).backward()
    assert_close([hidden.grad, weight.grad], right[1:])


def test_gradients_are_scaled_by_what_comes_after():
    hidden, weight, targets = make_inputs()
    (linear_cross_entropy(hidden, weight, targets) * 1024).backward()
    right = with_gradients(reference(hidden, weight, targets) * 1024, hidden, weight)
    assert_close([hidden.grad, weight.grad], right[1:])


def test_a_second_backward_raises():
    loss = linear_cross_entropy(*make_inputs())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients can be taken only once"):
        loss.backward()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_float16_gradients_of_many_tokens_neither_vanish_nor_overflow(device, loss_scale):
    tokens = 32_768
    hidden, weight, targets = make_inputs(tokens, 16, 64, torch.float16, device)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    loss = linear_cross_entropy(hidden, weight, targets) * loss_scale
    ours = with_gradients(loss, hidden, weight)
    right = with_gradients(reference(*wide, targets) * loss_scale, *wide)
    assert all(tensor.isfinite().all() for tensor in ours)
    for a, b in zip(ours[1:], right[1:]):
        assert (a.double() - b).norm() < (0.01 if loss_scale > 1 else 0.05) * b.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [None, 1])
def test_low_precision_error_is_at_most_twice_pytorchs(dtype, chunk_tokens):
    hidden, weight, targets = make_inputs(513, 32, 101, dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    right = with_gradients(reference(*wide, targets), *wide)
    peer = with_gradients(F.cross_entropy(hidden @ weight.T, targets), hidden, weight)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
    for a, b, c in zip(with_gradients(loss, hidden, weight), peer, right):
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_takes_the_product_in_bfloat16_and_the_loss_in_float32(dtype):
    hidden, weight, targets = make_inputs(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    rounded = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets)
    assert loss.equal(rounded)


def test_no_gradient_is_computed_when_none_is_wanted():
    hidden, weight, targets = make_inputs()
    with LargestTensor(torch.float64) as largest, torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=1)
    assert not loss.requires_grad
    # else there would be tensors as large as `weight` or `hidden`
    assert largest.elements < 8 * 11


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor of `dtype` that an operator makes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.elements = dtype, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if torch.is_tensor(t)}
        for tensor in tree_leaves(out):
            is_new = torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known
            if is_new and tensor.dtype == self.dtype:
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
def test_all_logits_are_never_there_at_once(z_loss):
    tokens, d_model, vocab, chunk_tokens = 96, 8, 1024, 16
    hidden, weight, targets = make_inputs(tokens, d_model, vocab, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        with LargestTensor(dtype) as largest:
            loss = linear_cross_entropy(
                hidden, weight, targets, z_loss=z_loss, chunk_tokens=chunk_tokens
            )
            torch.autograd.grad(loss, (hidden, weight))
        assert chunk_tokens * vocab <= largest.elements < tokens * vocab


def test_the_plain_cross_entropy_holds_all_logits_in_float32():
    # what the test above would say of it: that the watch sees them
    hidden, weight, targets = make_inputs(96, 8, 1024, torch.bfloat16)
    with LargestTensor(torch.float32) as largest:
        cross_entropy(hidden @ weight.T, targets)
    assert largest.elements == 96 * 1024


def test_by_default_a_chunk_has_as_many_tokens_as_its_logits_fit(monkeypatch):
    monkeypatch.setattr("lib.loss.CHUNK_BYTES", 5 * 11 * 4)
    hidden, weight, targets = make_inputs(dtype=torch.float32, d_model=2)
    with LargestTensor(torch.float32) as largest:
        linear_cross_entropy(hidden, weight, targets)
    assert largest.elements == 5 * 11


@pytest.mark.parametrize("bad", [-1, 11, -100])
@pytest.mark.parametrize("function", [cross_entropy, linear_cross_entropy])
def test_a_target_outside_the_vocabulary_is_an_error_on_a_cpu(bad, function):
    hidden, weight, targets = make_inputs()
    targets[3] = bad
    inputs = (hidden @ weight.T,) if function is cross_entropy else (hidden, weight)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        function(*inputs, targets)


@pytest.mark.parametrize("num_targets", [0, 12, 14])
def test_as_many_targets_as_tokens_are_wanted(num_targets):
    hidden, weight, _ = make_inputs()
    with pytest.raises(ValueError, match=rf"targets has shape \({num_targets},\) and hidden \(13"):
        linear_cross_entropy(hidden, weight, torch.zeros(num_targets, dtype=torch.int64))


def test_no_tokens_are_an_error():
    hidden, weight, targets = make_inputs()
    with pytest.raises(ValueError, match="at least one token"):
        linear_cross_entropy(hidden[:0], weight, targets[:0])


@pytest.mark.parametrize("chunk_tokens", [0, -1])
def test_a_chunk_holds_at_least_one_token(chunk_tokens):
    with pytest.raises(ValueError, match=f"chunk_tokens is {chunk_tokens}"):
        linear_cross_entropy(*make_inputs(), chunk_tokens=chunk_tokens)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, *SHORT_TYPES], ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 11), (5, 4096), (2, 4097), (2, 8200), (3, 50304)])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("scale", [1, 30])
def test_the_loss_kernel_is_the_formula(device, dtype, shape, z_loss, scale):
    from lib.loss_triton import loss_and_grad

    generator = torch.Generator().manual_seed(0)
    # rising, so that the kernel finds a new maximum in each block
    logits = (torch.randn(*shape, generator=generator) * scale).sort().values.to(device, dtype)
    targets = torch.randint(shape[1], shape[:1], generator=generator).to(device)
    wide = logits.double().requires_grad_()
    right = F.cross_entropy(wide, targets, reduction="none")
    right = right + z_loss * wide.logsumexp(-1).square()
    (gradient,) = torch.autograd.grad(right.sum() / 128, wide)

    losses = loss_and_grad(logits, targets, z_loss, 1 / 128)
    torch.testing.assert_close(losses.double(), right.detach(), rtol=1e-5, atol=1e-5)
    # rounded once
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    tolerance = {"rtol": max(torch.finfo(dtype).eps, 1e-4), "atol": max(smallest, 1e-7)}
    torch.testing.assert_close(logits.double(), gradient, **tolerance)


@ON_KERNEL_DEVICES
def test_the_loss_kernel_takes_rows_with_gaps_and_leaves_the_gaps(device):
    from lib.loss_triton import loss_and_grad

    rows = torch.randn(4, 20, generator=torch.Generator().manual_seed(0)).to(device)
    before, logits = rows.clone(), rows[:, :13]
    targets = torch.tensor([0, 12, 5, 5], device=device)
    right = F.cross_entropy(before[:, :13], targets, reduction="none")
    torch.testing.assert_close(loss_and_grad(logits, targets, 0.0, 1.0), right)
    assert rows[:, 13:].equal(before[:, 13:])
    assert not logits.isclose(before[:, :13]).any()


@ON_KERNEL_DEVICES
def test_the_loss_kernel_leaves_logits_whose_gradient_is_not_wanted(device):
    from lib.loss_triton import loss_and_grad

    logits = torch.randn(4, 13, generator=torch.Generator().manual_seed(0)).to(device)
    before = logits.clone()
    loss_and_grad(logits, torch.zeros(4, dtype=torch.int64, device=device), 0.0, None)
    assert logits.equal(before)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("bad", [-1, 13, -100, 1 << 40])
def test_the_loss_kernel_makes_nan_of_a_target_outside_the_vocabulary(device, bad):
    from lib.loss_triton import loss_and_grad

    logits = torch.randn(3, 13, generator=torch.Generator().manual_seed(0)).to(device)
    losses = loss_and_grad(logits, torch.tensor([0, bad, 1], device=device), 0.0, 1.0)
    assert losses.isnan().tolist() == [False, True, False]


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, *SHORT_TYPES], ids=str)
@pytest.mark.parametrize("size", [1, 4096, 5001])
def test_the_scale_kernel_multiplies_in_place(device, dtype, size):
    from lib.loss_triton import scale_

    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    right = x.float() * 0.37
    out = scale_(x, torch.tensor(0.37, device=device))
    assert out is x
    assert x.equal(right.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_tokens", [None, 100])
def test_the_loss_on_a_gpu_is_at_most_twice_as_far_off_as_pytorchs(chunk_tokens):
    hidden, weight, targets = make_inputs(513, 64, 5003, torch.bfloat16, "cuda")
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    right = with_gradients(reference(*wide, targets), *wide)
    peer = with_gradients(F.cross_entropy((hidden @ weight.T).float(), targets), hidden, weight)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
    for a, b, c in zip(with_gradients(loss, hidden, weight), peer, right):
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm()


@pytest.mark.skipif(INTERPRETING, reason="this is the process inside")
def test_the_kernels_in_the_interpreter(run_in_interpreter):
    run_in_interpreter(__file__)
