"""Softmax and cross-entropy against float64: values, gradients, chunks, memory, rounding."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.model.loss import cross_entropy, linear_cross_entropy, softmax
from tests.operators import Operators


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


@pytest.mark.parametrize(("dim", "scale"), [(0, 1), (1, 1e4), (-1, 1e4)])
def test_softmax_and_its_gradient_are_pytorchs(dim, scale):
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (x * scale).requires_grad_()
    weights = torch.linspace(-1, 1, 6)
    results = [with_gradients((f(x, dim) * weights).sum(), x) for f in (softmax, F.softmax)]
    assert_close(*results)


def test_softmax_of_nothing_but_minus_infinity_is_zero():
    x = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]])
    assert softmax(x).equal(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_softmax_computes_in_float32_or_more(dtype):
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = softmax(x)
    assert out.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(out.double(), F.softmax(x.double(), -1), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("scale", [1, 1e4])
def test_cross_entropy_and_its_gradient_are_pytorchs(scale):
    logits = (torch.randn(2, 7, 11, generator=torch.Generator().manual_seed(0)) * scale).double()
    logits.requires_grad_()
    targets = torch.arange(14).view(2, 7) % 11
    ours = with_gradients(cross_entropy(logits, targets), logits)
    right = with_gradients(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)
    assert_close(ours, right)


@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 13, 1000])
@pytest.mark.parametrize(("scale", "z_loss"), [(1, 0.0), (1, 1e-2), (1e4, 1e-2)])
def test_linear_cross_entropy_is_that_of_all_logits(scale, z_loss, chunk_tokens):
    hidden, weight, targets = make_inputs(scale=scale)
    options = {"z_loss": z_loss, "chunk_tokens": chunk_tokens}
    ours = linear_cross_entropy(hidden, weight, targets, **options)
    right = reference(hidden, weight, targets, z_loss)
    assert_close(with_gradients(ours, hidden, weight), with_gradients(right, hidden, weight))


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


def test_gradients_are_scaled_by_what_comes_after_and_add_up_over_passes():
    hidden, weight, targets = make_inputs()
    right = with_gradients(reference(hidden, weight, targets) * 1024, hidden, weight)
    for rows in (slice(0, 5), slice(5, 13)):
        loss = linear_cross_entropy(hidden[rows], weight, targets[rows])
        (loss * 1024 * len(targets[rows]) / 13).backward()
    assert_close([hidden.grad, weight.grad], right[1:])


def test_a_second_backward_raises():
    loss = linear_cross_entropy(*make_inputs())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be taken only once"):
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "chunk_tokens"),
    [(torch.float16, None), (torch.bfloat16, None), (torch.bfloat16, 1), (torch.bfloat16, 100)],
)
def test_low_precision_error_is_at_most_twice_pytorchs(dtype, chunk_tokens, device):
    hidden, weight, targets = make_inputs(513, 32, 101 if device == "cpu" else 5003, dtype, device)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    right = with_gradients(reference(*wide, targets), *wide)
    peer = with_gradients(F.cross_entropy(hidden @ weight.T, targets), hidden, weight)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
    for a, b, c in zip(with_gradients(loss, hidden, weight), peer, right):
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm()


def test_gradients_of_weights_are_summed_over_chunks_in_float32():
    hidden, weight, targets = make_inputs(513, 32, 101, torch.bfloat16)
    losses = [linear_cross_entropy(hidden, weight, targets, chunk_tokens=n) for n in (1, 513)]
    chunked, whole = (torch.autograd.grad(loss, weight)[0].double() for loss in losses)
    assert (chunked - whole).norm() < torch.finfo(torch.bfloat16).eps / 2 * whole.norm()


def test_autocast_runs_the_matmul_in_bfloat16_and_the_loss_in_float32():
    hidden, weight, targets = make_inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    rounded = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets)
    assert loss.equal(rounded)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_float64_stays_float64_under_autocast_and_on_a_gpu(device):
    hidden, weight, targets = make_inputs(device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets) * 3
    right = with_gradients(reference(hidden, weight, targets) * 3, hidden, weight)
    for a, b in zip(with_gradients(loss, hidden, weight), right):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b)


def test_no_gradient_is_computed_when_none_is_wanted():
    hidden, weight, targets = make_inputs()
    with Operators() as operators, torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=1)
    assert not loss.requires_grad
    # else there would be tensors as large as `weight` or `hidden`
    assert operators.made[torch.float64] < 8 * 11


def test_all_logits_are_never_there_at_once():
    tokens, d_model, vocab, chunk_tokens = 96, 8, 1024, 16
    hidden, weight, targets = make_inputs(tokens, d_model, vocab, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        with Operators() as operators:
            loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
            torch.autograd.grad(loss, (hidden, weight))
        assert chunk_tokens * vocab <= operators.made[dtype] < tokens * vocab
    # the watch sees them where they are
    with Operators() as operators:
        cross_entropy(hidden @ weight.T, targets)
    assert operators.made[torch.float32] == tokens * vocab


@pytest.mark.parametrize("bad", [-1, 11])
@pytest.mark.parametrize("function", [cross_entropy, linear_cross_entropy])
def test_a_target_outside_the_vocabulary_is_an_error_on_a_cpu(bad, function):
    hidden, weight, targets = make_inputs()
    targets[3] = bad
    inputs = (hidden @ weight.T,) if function is cross_entropy else (hidden, weight)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        function(*inputs, targets)


@pytest.mark.parametrize("shape", [(2, 1), (1,), (2, 2), (3, 2)])
def test_targets_of_another_shape_than_the_rows_are_refused(shape):
    with pytest.raises(ValueError, match=r"targets must have shape \(2, 3\) .*, got"):
        cross_entropy(torch.zeros(2, 3, 5), torch.zeros(shape, dtype=torch.int64))


def test_infinite_logits_are_as_in_pytorch():
    inf = math.inf
    rows = torch.tensor([[-inf, -inf], [0, -inf], [0, -inf], [inf, 0], [inf, 0]])
    targets = torch.tensor([0, 0, 1, 0, 1])
    for row, target in zip(rows, targets):
        ours, right = (f(row[None], target[None]) for f in (cross_entropy, F.cross_entropy))
        torch.testing.assert_close(ours, right, equal_nan=True)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_losses_and_gradients_are_exact_where_logits_are_large(z_loss):
    logits = torch.tensor([[1e8, 1e8 - 8, 1e8 - 16], [1e8] * 3, [-1e8, -1e8, -1e8 - 8]])
    targets = torch.tensor([1, 0, 0])
    logits.requires_grad_()
    wide, one = logits.detach().double().requires_grad_(), torch.eye(3)
    right = with_gradients(reference(wide, one, targets, z_loss), wide)
    ours = [linear_cross_entropy(logits, one, targets, z_loss=z_loss)]
    if not z_loss:
        ours.append(cross_entropy(logits, targets))
    for loss in ours:
        assert_close(with_gradients(loss, logits), right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("num_tokens", "num_targets", "options", "message"),
    [
        (13, 13, {"z_loss": -1.0}, "z_loss must be at least 0, got -1.0"),
        (13, 13, {"z_loss": math.nan}, "z_loss must be at least 0, got nan"),
        (13, 12, {}, r"at least one token, got \(12,\) and \(13, 8\)"),
        (0, 0, {}, "at least one token"),
        (13, 13, {"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
    ],
)
def test_wrong_sizes_are_refused(num_tokens, num_targets, options, message):
    hidden, weight, targets = make_inputs()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden[:num_tokens], weight, targets[:num_targets], **options)
