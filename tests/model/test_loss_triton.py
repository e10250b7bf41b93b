"""The loss kernels against PyTorch in float64; `test_elementwise_triton` runs them interpreted."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.kernels import INTERPRETING, ON_DTYPES, ON_KERNEL_DEVICES

# Rows below, at and above the kernel's block, with z-loss and scale of the logits.
CASES = [
    ((1, 2), 0.0, 1),
    ((3, 11), 0.01, 30),
    ((5, 4096), 0.01, 1),
    ((2, 4097), 0.0, 30),
    # of Gluon's kernel
    *([] if INTERPRETING else [((3, 50_304), 0.01, 30)]),
]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize(("shape", "z_loss", "scale"), CASES, ids=str)
def test_the_loss_kernel_is_the_formula(device, dtype, shape, z_loss, scale):
    from lib.model.loss_triton import loss_and_grad

    # rising, so that the kernel finds a new maximum in each block
    logits = (draw(*shape) * scale).sort().values.to(device, dtype)
    targets = torch.randint(shape[1], shape[:1], generator=torch.Generator().manual_seed(1))
    assert_is_the_formula(loss_and_grad, logits, targets.to(device), z_loss)


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_the_loss_kernel_is_exact_where_logits_are_large(device, dtype, z_loss):
    from lib.model.loss_triton import loss_and_grad

    size = 6e4 if dtype == torch.float16 else 1e8
    lower = 1 - torch.finfo(dtype).eps
    logits = torch.full((4, 16), -size)
    logits[1], logits[2, 3:5], logits[3, 7], logits[3, 8] = size, size, size, size * lower
    targets = torch.tensor([0, 1, 4, 8], device=device)
    assert_is_the_formula(loss_and_grad, logits.to(device, dtype), targets, z_loss)


def assert_is_the_formula(
    loss_and_grad: Callable[..., Tensor], logits: Tensor, targets: Tensor, z_loss: float
) -> None:
    """Check losses and gradients against PyTorch's in float64."""
    dtype, wide = logits.dtype, logits.double().requires_grad_()
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
    from lib.model.loss_triton import loss_and_grad

    rows = draw(4, 20).to(device)
    before, logits = rows.clone(), rows[:, :13]
    targets = torch.tensor([0, 12, 5, 5], device=device)
    right = F.cross_entropy(before[:, :13], targets, reduction="none")
    torch.testing.assert_close(loss_and_grad(logits, targets, 0.0, 1.0), right)
    assert rows[:, 13:].equal(before[:, 13:])
    assert not logits.isclose(before[:, :13]).any()


@ON_KERNEL_DEVICES
def test_the_loss_kernel_takes_every_other_target(device):
    from lib.model.loss_triton import loss_and_grad

    logits, targets = draw(4, 13).to(device), torch.arange(8, device=device)
    right = F.cross_entropy(logits, targets[::2], reduction="none")
    torch.testing.assert_close(loss_and_grad(logits, targets[::2], 0.0, None), right)


@ON_KERNEL_DEVICES
def test_the_loss_kernel_leaves_logits_whose_gradient_is_not_wanted(device):
    from lib.model.loss_triton import loss_and_grad

    logits = draw(4, 13).to(device)
    before = logits.clone()
    loss_and_grad(logits, torch.zeros(4, dtype=torch.int64, device=device), 0.0, None)
    assert logits.equal(before)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("bad", [-1, 13, 1 << 40])
def test_the_loss_kernel_makes_nan_of_a_target_outside_the_vocabulary(device, bad):
    from lib.model.loss_triton import loss_and_grad

    losses = loss_and_grad(draw(3, 13).to(device), torch.tensor([0, bad, 1]).to(device), 0.0, 1.0)
    assert losses.isnan().tolist() == [False, True, False]


@ON_KERNEL_DEVICES
@ON_DTYPES
@pytest.mark.parametrize("size", [1, 4096, 5001])
def test_the_scale_kernel_multiplies_in_place(device, dtype, size):
    from lib.model.loss_triton import scale_

    x = draw(size).to(device, dtype)
    right = x.float() * 0.37
    assert scale_(x, torch.tensor(0.37, device=device)) is x
    assert x.equal(right.to(dtype))
