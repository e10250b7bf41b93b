"""AdamW's Triton kernels against the reference: interpreted on a CPU, compiled, and on a GPU."""

import copy
import math
import re

import pytest
import torch
from torch.nn import Parameter

from lib.optimizer.adamw import AdamW, clip_coefficient, clip_grad_norm, grad_norm
from tests.model.kernels import (
    INTERPRETING,
    ON_DTYPES,
    ON_KERNEL_DEVICES,
    OUTSIDE_THE_INTERPRETER,
    assert_passed,
)
from tests.optimizer.params import check_skip_changes_nothing, groups, make_params, set_gradients

# Whose tests of kernels are tried in the interpreter too.
INTERPRETED = (__file__,)

# From one element to several blocks, on and off the block's edge.
KERNEL_SHAPES = [(4096,), (4097,), (3, 4095), (1,), (), (0,), (63,), (70, 130)]


@ON_KERNEL_DEVICES
@ON_DTYPES
def test_the_kernels_agree_with_the_reference(dtype, device):
    params = make_params(KERNEL_SHAPES, dtype, device)
    expected = make_params(KERNEL_SHAPES, dtype, device)
    settings = {"betas": (0.9, 0.95), "eps": 1e-6}
    lr = torch.tensor(0.01, device=device)
    kernels = AdamW(groups(params), lr=lr, implementation="triton", **settings)
    reference = AdamW(groups(expected), lr=0.01, implementation="reference", **settings)
    scale = torch.tensor(0.3, device=device)
    for step in range(4 if INTERPRETING else 50):
        set_gradients(params, expected, seed=step)
        params[-1].grad = expected[-1].grad = params[-1].grad if step % 2 else None
        kernels.step(grad_scale=scale)
        reference.step(grad_scale=scale)
    for ours, theirs in zip(params, expected):
        ours, theirs = kernels.state[ours], reference.state[theirs]
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(params, expected):
        if dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(ours, kernels.state[ours]["master"].to(dtype))


@ON_KERNEL_DEVICES
def test_the_kernels_write_only_the_parameters(device):
    # A view at an odd element is aligned to 4 bytes only, and has neighbors on both sides.
    storage = torch.full((10_000,), math.nan, device=device)
    gradients = torch.ones(10_001, device=device)
    parts = [slice(1, 4200), slice(4201, 9999)]
    params = [Parameter(storage[part].fill_(1.0)) for part in parts]
    for param, part in zip(params, parts):
        param.grad = gradients[part]
    AdamW(params, lr=0.5, weight_decay=0.0, implementation="triton").step()
    changed = torch.full_like(storage, math.nan)
    for part in parts:
        changed[part] = 0.5
    torch.testing.assert_close(storage, changed, equal_nan=True)


@ON_KERNEL_DEVICES
def test_the_kernels_follow_tensors_that_move(device):
    params, expected = make_params(device=device), make_params(device=device)
    kernels = AdamW(params, implementation="triton")
    reference = AdamW(expected, implementation="reference")
    kept = []
    for step in range(4):
        set_gradients(params, expected, seed=step)
        # What is still alive keeps the next gradients from landing on the same address.
        kept.extend(param.grad for param in params)
        if step == 2:
            kernels.load_state_dict(copy.deepcopy(kernels.state_dict()))
            params[0].data = params[0].data.clone()
        kernels.step()
        reference.step()
    for ours, theirs in zip(params, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("betas", [(0.999, 0.9999), (0.0, 0.0)])
def test_the_kernels_bias_correction_is_exact_at_the_first_step(device, betas):
    # In float32 1 - 0.9999 is wrong in the fourth digit, and the first update with it.
    param = Parameter(torch.zeros(5, device=device))
    param.grad = torch.full_like(param, 3.0)
    AdamW([param], lr=1.0, betas=betas, implementation="triton").step()
    torch.testing.assert_close(param.detach(), torch.full_like(param, -1.0), rtol=1e-6, atol=0)


@ON_KERNEL_DEVICES
def test_parameters_with_gaps_are_refused_by_the_kernels(device):
    param = Parameter(torch.ones(4, 6, device=device).t())
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="must have contiguous tensors"):
        AdamW([param], implementation="triton").step()


@ON_KERNEL_DEVICES
@ON_DTYPES
def test_skip_changes_nothing_in_the_kernels(dtype, device):
    check_skip_changes_nothing("triton", dtype, device)


@ON_KERNEL_DEVICES
def test_the_norm_of_the_kernels_reads_aligned_and_other_gradients(device):
    dtype = torch.float16 if INTERPRETING else torch.bfloat16
    params = make_params([(4096,), (5000,), (3,)], dtype, device)
    shifted = torch.randn(9000, device=device).to(dtype)[1:5001]
    for param in params:
        param.grad = torch.randn_like(param)
    params[1].grad = shifted
    optimizer = AdamW(params, implementation="triton")
    expected = torch.cat([param.grad.double().flatten() for param in params]).norm()
    assert float(optimizer.grad_norm()) == pytest.approx(float(expected), rel=1e-6)
    assert params[1].grad.data_ptr() % 16 != 0


@OUTSIDE_THE_INTERPRETER
def test_the_kernels_in_the_interpreter(tried_in_interpreter):
    assert_passed(tried_in_interpreter)


@OUTSIDE_THE_INTERPRETER
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [(75, "fp16"), (80, "fp32"), (90, "bf16")],
)
def test_the_kernels_compile_to_wide_accesses(capability, dtype):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lib.optimizer import adamw_triton as kernels

    element = {"fp32": triton.language.float32, "bf16": triton.language.bfloat16}
    element = element.get(dtype, triton.language.float16)
    constants = {
        "PARAM_DTYPE": element,
        "GRAD_DTYPE": element,
        "PARAM_ALIGNMENT": 16 if dtype == "fp32" else 8,
        "GRAD_ALIGNMENT": 16 if dtype == "fp32" else 8,
        "HAS_MASTER": dtype != "fp32",
        "BLOCK": kernels.BLOCK,
    }
    pointers = {"table": "*i64", "work": "*i32", "coefficients": "*fp32"}
    scalars = ("beta1_complement", "beta2", "beta2_complement", "eps")
    signature = pointers | dict.fromkeys(scalars, "fp32") | dict.fromkeys(constants, "constexpr")
    compiled = triton.compile(
        ASTSource(kernels.adamw_kernel, signature, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": kernels.NUM_WARPS},
    )
    # Elements stay in the thread that loads them: 16 bytes of float32, 8 of the others, at a time.
    assert compiled.metadata.shared == 0
    accesses = kernels.BLOCK // (32 * kernels.NUM_WARPS * 4)
    ptx = compiled.asm["ptx"]
    low = 0 if dtype == "fp32" else 1
    assert len(re.findall(r"ld\.global\.v4\.[bf]32", ptx)) == (4 - low) * accesses
    assert len(re.findall(r"st\.global\.v4\.[bf]32", ptx)) == 3 * accesses
    assert len(re.findall(r"st\.global\.v2\.[bf]32", ptx)) == low * accesses


@pytest.mark.gpu
def test_the_kernels_agree_with_fused_adamw_of_torch_for_many_tensors():
    shapes = [(64 + index, 67) for index in range(700)]
    ours, theirs = make_params(shapes, device="cuda"), make_params(shapes, device="cuda")
    optimizer = AdamW(ours, lr=0.01)
    peer = torch.optim.AdamW(theirs, lr=0.01, fused=True)
    for step in range(5):
        set_gradients(ours, theirs, seed=step)
        optimizer.step()
        peer.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_clipping_and_step_never_wait_for_the_gpu():
    params = [*make_params(device="cuda"), *make_params(dtype=torch.bfloat16, device="cuda")]
    optimizer = AdamW(params, lr=torch.tensor(0.01, device="cuda"))
    skip = torch.zeros((), dtype=torch.bool, device="cuda")
    for seed in range(3):
        set_gradients(params[:6], params[6:], seed=seed)
        torch.cuda.set_sync_debug_mode("error" if seed else "default")
        try:
            norm = clip_grad_norm(params, 1.0)
            optimizer.step(grad_scale=clip_coefficient(norm, 1.0), skip=skip)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def train_step(model, optimizer, inputs, skip) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step(grad_scale=clip_coefficient(grad_norm(model.parameters()), 1.0), skip=skip)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_replays_steps_with_a_changing_rate_and_skip(dtype):
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Linear(65, 129), torch.nn.Linear(129, 3)).to("cuda", dtype)
    graphed = copy.deepcopy(eager)
    inputs = torch.randn(16, 65, device="cuda", dtype=dtype)
    skip = torch.ones((), dtype=torch.bool, device="cuda")
    lr = torch.zeros((), device="cuda")
    # A large eps: updates proportional to gradients, whose last bits may then differ.
    optimizer = AdamW(graphed.parameters(), lr=lr, eps=0.1)
    reference = AdamW(eager.parameters(), lr=0.1, eps=0.1, implementation="reference")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train_step(graphed, optimizer, inputs, skip)
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    # The second capture follows the first without a step between them.
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train_step(graphed, optimizer, inputs, skip)
        graphs.append(graph)

    for step in range(12):
        lr.fill_(0.02 * step)
        skip.fill_(step % 4 == 3)
        reference.param_groups[0]["lr"] = 0.02 * step
        inputs.copy_(torch.randn_like(inputs))
        if step % 5 == 4:
            # A step outside the graph between replays, with gradients elsewhere.
            train_step(graphed, optimizer, inputs, skip)
        else:
            graphs[step % 2].replay()
        train_step(eager, reference, inputs, skip)
    for ours, theirs in zip(graphed.parameters(), eager.parameters()):
        assert optimizer.state[ours]["step"] == 9
        # A weight at the border of two bfloat16 numbers may be rounded to either.
        tolerance = 1e-4 if dtype == torch.float32 else 2e-3
        ours = optimizer.state[ours].get("master", ours)
        theirs = reference.state[theirs].get("master", theirs)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.gpu
def test_a_first_step_inside_a_capture_is_refused():
    params = make_params(device="cuda")
    set_gradients(params, seed=0)
    optimizer = AdamW(params)
    with (
        pytest.raises(RuntimeError, match="step once before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


@pytest.mark.gpu
def test_scalars_on_another_device_are_refused():
    params = make_params(device="cuda")
    set_gradients(params, seed=0)
    with pytest.raises(ValueError, match="grad_scale must be a tensor of shape"):
        AdamW(params).step(grad_scale=torch.tensor(1.0))
