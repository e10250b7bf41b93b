"""The backward pass in one kernel, on a Hopper GPU."""

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
    Case(1, 300, 192),
    Case(300, 1, 160, False),
    Case(193, 191, 192, heads=4, key_heads=1),
    Case(500, 500, 136, layout="tokens first"),
    Case(1000, 770, 168, False, heads=4, key_heads=2),
    Case(90, 1000, 160, layout="amid NaN"),
]


@pytest.fixture(scope="module")
def kernels():
    """The door to the kernels, on a Hopper GPU."""
    pytest.importorskip("triton")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from lib.flash_attention import triton_attention

    with pytest.MonkeyPatch.context() as patch:
        # for short sequences, too
        patch.setattr(
            triton_attention.hopper, "_one_kernel_is_faster", lambda q, k, is_causal: True
        )
        yield triton_attention


def attention(kernels, deterministic):
    return lambda q, k, v, *, is_causal, scale: kernels.flash_attention(
        q, k, v, is_causal=is_causal, scale=scale, deterministic=deterministic
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_right(kernels, case, deterministic, dtype):
    attend = attention(kernels, deterministic)
    assert_error_at_most_twice_pytorchs(attend, case, dtype, "cuda")


@pytest.mark.parametrize("cache_bytes", [1, 2**40], ids=["a head a section", "one section"])
@pytest.mark.parametrize(
    ("head_dim", "is_causal"), [(64, True), (128, False), (80, True), (192, True)]
)
def test_gradients_repeat_to_the_bit(kernels, head_dim, is_causal, cache_bytes, monkeypatch):
    monkeypatch.setattr(kernels.hopper, "CACHE_BYTES", cache_bytes)
    case = Case(1500, 1500, head_dim, is_causal, heads=16, key_heads=8)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    out, lse = kernels.flash_forward(q, k, v, is_causal, 0.1)
    tensors = (grad_out, q, k, v, out, lse, is_causal, 0.1)
    first = kernels.flash_backward(*tensors)
    for _ in range(5):
        assert all(a.equal(b) for a, b in zip(kernels.flash_backward(*tensors), first))


@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False)])
def test_only_the_gradient_of_q_may_differ_between_runs(kernels, head_dim, is_causal):
    case = Case(1500, 1500, head_dim, is_causal, heads=8, key_heads=8)
    inputs = make_inputs(case, torch.bfloat16, "cuda")

    def gradients():
        attend = attention(kernels, deterministic=False)
        results = with_gradients(
            lambda q, k, v: attend(q, k, v, is_causal=is_causal, scale=None), inputs
        )
        return results[1:]

    first, right = gradients(), right_results(inputs, case)[1]
    for _ in range(5):
        grad_q, *others = gradients()
        assert all(a.equal(b) for a, b in zip(others, first[1:]))
        assert largest(grad_q - right) <= 1.5 * largest(first[0] - right)


@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False), (160, True)])
def test_gradients_are_rotated_back(kernels, head_dim, is_causal):
    case = Case(450, 300, head_dim, is_causal, heads=6, key_heads=2)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    angles = torch.rand(500, head_dim // 2, device="cuda")
    settings = (is_causal, head_dim**-0.5)
    tensors = (grad_out, q, k, v, *kernels.flash_forward(q, k, v, *settings))
    angles = (angles.cos(), angles.sin())
    found = kernels.flash_backward(*tensors, *settings, angles=angles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.hopper, "_one_kernel_is_faster", lambda q, k, is_causal: False)
        expected = kernels.flash_backward(*tensors, *settings, angles=angles)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.01 * largest(b))


def test_a_recorded_graph_is_right(kernels):
    case = Case(700, 700, heads=43, key_heads=43)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    out, lse = kernels.flash_forward(q, k, v, True, 0.1)
    tensors = (grad_out, q, k, v, out, lse, True, 0.1)
    kernels.flash_backward(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = kernels.flash_backward(*tensors)
    for _ in range(2):
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        for a, b in zip(results, kernels.flash_backward(*tensors)):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.01 * largest(b))
