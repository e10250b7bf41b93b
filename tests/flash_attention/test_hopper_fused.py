"""The backward pass in one kernel, which need not repeat to the bit, on a Hopper GPU."""

import pytest
import torch

from tests.flash_attention.cases import (
    Case,
    assert_error_at_most_twice_pytorchs,
    largest,
    make_inputs,
    right_results,
    with_gradients,
)

pytestmark = pytest.mark.gpu
CASES = [
    Case(1, 300, 64),
    Case(300, 1, 128),
    Case(63, 65, 64, False, heads=4, key_heads=1),
    Case(193, 191, 128, heads=4, key_heads=1),
    Case(256, 256, 64, False, layout="tokens first"),
    Case(90, 1000, 128, heads=4, layout="amid NaN"),
    Case(1000, 90, 64, heads=4, key_heads=1),
    Case(1000, 1000, 64, heads=4, key_heads=2),
    Case(1000, 770, 128, False),
    Case(193, 191, 40, heads=4, key_heads=1),
    Case(300, 200, 80, False, heads=4, key_heads=2),
    Case(257, 257, 96, scale=0.5),
    Case(500, 500, 88, layout="tokens first"),
]


@pytest.fixture(scope="module")
def kernels():
    """The door to the kernels, on a Hopper GPU."""
    pytest.importorskip("triton")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from lib.flash_attention import triton_attention

    return triton_attention


def unordered(kernels):
    return lambda q, k, v, *, is_causal, scale: kernels.flash_attention(
        q, k, v, is_causal=is_causal, scale=scale, deterministic=False
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("programs", [3, None])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_right(kernels, case, programs, dtype, monkeypatch):
    if programs:
        # several items of work for each
        monkeypatch.setattr(kernels.hopper, "_multiprocessors", lambda device: programs)
    assert_error_at_most_twice_pytorchs(unordered(kernels), case, dtype, "cuda")


@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False)])
def test_only_the_gradient_of_q_may_differ_between_runs(kernels, head_dim, is_causal):
    case = Case(1500, 1500, head_dim, is_causal, heads=8, key_heads=8)
    inputs = make_inputs(case, torch.bfloat16, "cuda")

    def gradients():
        attention = unordered(kernels)
        results = with_gradients(
            lambda q, k, v: attention(q, k, v, is_causal=is_causal, scale=None), inputs
        )
        return results[1:]

    first, right = gradients(), right_results(inputs, case)[1]
    for _ in range(5):
        grad_q, *others = gradients()
        assert all(a.equal(b) for a, b in zip(others, first[1:]))
        assert largest(grad_q - right) <= 1.5 * largest(first[0] - right)


@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False)])
def test_gradients_are_rotated_back(kernels, head_dim, is_causal):
    case = Case(450, 300, head_dim, is_causal, heads=6, key_heads=2)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    angles = torch.rand(500, head_dim // 2, device="cuda")
    settings = (is_causal, head_dim**-0.5)
    tensors = (grad_out, q, k, v, *kernels.flash_forward(q, k, v, *settings))
    angles = (angles.cos(), angles.sin())
    found, expected = (
        kernels.flash_backward(*tensors, *settings, angles=angles, deterministic=deterministic)
        for deterministic in (False, True)
    )
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.01 * largest(b))


def test_a_recorded_graph_is_right(kernels):
    case = Case(700, 700, heads=43, key_heads=43)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    out, lse = kernels.flash_forward(q, k, v, True, 0.1)
    tensors = (grad_out, q, k, v, out, lse, True, 0.1)
    kernels.flash_backward(*tensors, deterministic=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = kernels.flash_backward(*tensors, deterministic=False)
    for _ in range(2):
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        for a, b in zip(results, kernels.flash_backward(*tensors)):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.01 * largest(b))
