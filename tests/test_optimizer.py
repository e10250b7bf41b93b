"""AdamW in its three forms against torch's and the paper's, the schedule, and clipping."""

import copy
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from lib.optimizer import AdamW, clip_coefficient, clip_grad_norm, cosine_lr, grad_norm

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# The tests that take `device` try the kernels: on a GPU, and in a process of their own
# (`test_the_kernels_in_the_interpreter`) on the CPU.
KERNEL_DEVICES = ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]
ON_KERNEL_DEVICES = pytest.mark.parametrize("device", KERNEL_DEVICES)
HOST_IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "foreach"])
# The interpreter gets bfloat16 wrong.
LOW_PRECISION = [torch.float16] if INTERPRETING else [torch.float16, torch.bfloat16]
SHAPES = [(33, 65), (64,), (1,), (), (0,), (3, 5, 7)]


def make_params(shapes=SHAPES, dtype=torch.float32, device="cpu", seed=0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    return [Parameter(weight.to(device, dtype)) for weight in weights]


def set_gradients(*models: list[Parameter], seed: int, scale: float = 1.0) -> None:
    """The same random gradients for each list of parameters, whatever its dtype and device."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for params in zip(*models):
        gradient = torch.randn(params[0].shape, generator=generator) * scale
        for param in params:
            # Rounded to the coarsest dtype, so that a float32 run sees what the others see.
            coarse = gradient.to(models[-1][0].dtype)
            param.grad = coarse.to(param.device, param.dtype, copy=True)


def bits(params: list[Parameter], optimizer: AdamW) -> list[torch.Tensor]:
    """Copies of all that a step can change."""
    state = [value for param in params for _, value in sorted(optimizer.state[param].items())]
    return [tensor.detach().clone() for tensor in (*params, *state)]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def groups(params: list[Parameter]) -> list[dict]:
    """Parameters with different settings, some of them left to the defaults."""
    return [
        {"params": params[:2], "weight_decay": 0.1},
        {"params": params[2:4], "lr": 0.03, "betas": (0.8, 0.95)},
        {"params": params[4:], "eps": 1e-4, "weight_decay": 0.0},
    ]


def paper_weights(weight, gradients, *, lr, betas, eps, weight_decay) -> torch.Tensor:
    """Algorithm 2 of Loshchilov and Hutter, line by line, in float64."""
    theta, m, v = weight.double(), 0.0, 0.0
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        theta = theta - lr * m_hat / (v_hat.sqrt() + eps) - lr * weight_decay * theta
    return theta


@HOST_IMPLEMENTATIONS
def test_fifty_steps_give_the_bits_of_torch(implementation):
    ours, theirs = make_params(), make_params()
    ours[1].requires_grad_(False)
    theirs[1].requires_grad_(False)
    optimizer = AdamW(groups(ours), lr=0.01, implementation=implementation)
    peer = torch.optim.AdamW(groups(theirs), lr=0.01, foreach=implementation == "foreach")
    for step in range(50):
        set_gradients(ours, theirs, seed=step)
        for params in (ours, theirs):
            params[1].grad = None
            if step % 3 == 1:
                params[0].grad = None
        optimizer.step()
        peer.step()
    assert_equal(ours, theirs)
    assert ours[1] not in optimizer.state
    assert optimizer.state[ours[0]]["step"] == 33
    assert_equal(bits(ours, optimizer), bits(theirs, peer))


@HOST_IMPLEMENTATIONS
def test_the_update_is_that_of_the_paper(implementation):
    settings = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.3}
    [param] = make_params([(257,)])
    start, gradients = param.detach().clone(), []
    optimizer = AdamW([param], implementation=implementation, **settings)
    for step in range(20):
        set_gradients([param], seed=step)
        gradients.append(param.grad.clone())
        optimizer.step()
    expected = paper_weights(start, gradients, **settings)
    torch.testing.assert_close(param.detach().double(), expected, rtol=2e-6, atol=2e-6)


@HOST_IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_are_rounded_float32_ones(implementation, dtype):
    low = make_params(dtype=dtype)
    full = [Parameter(param.detach().float()) for param in low]
    # Far below the spacing of bfloat16 numbers: without a master no weight would move.
    optimizers = [AdamW(p, lr=1e-4, implementation=implementation) for p in (low, full)]
    for step in range(50):
        set_gradients(full, low, seed=step)
        for optimizer in optimizers:
            optimizer.step()
    for param, exact in zip(low, full):
        state = optimizers[0].state[param]
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert torch.equal(state["master"], exact)
        assert torch.equal(param, exact.to(dtype))
    assert not torch.equal(low[0], make_params(dtype=dtype)[0])


@HOST_IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_scale_equals_scaled_gradients(implementation, dtype):
    scaled, plain = make_params(dtype=dtype), make_params(dtype=dtype)
    optimizers = [AdamW(p, implementation=implementation) for p in (scaled, plain)]
    for step in range(5):
        set_gradients(scaled, plain, seed=step)
        before = [param.grad.clone() for param in scaled]
        optimizers[0].step(grad_scale=torch.tensor(0.25))
        assert_equal([param.grad for param in scaled], before)
        for param in plain:
            param.grad.mul_(0.25)
        optimizers[1].step()
    assert_equal(bits(scaled, optimizers[0]), bits(plain, optimizers[1]))


def check_skip_changes_nothing(implementation, dtype, device):
    params = make_params(dtype=dtype, device=device)
    optimizer = AdamW(params, implementation=implementation)
    set_gradients(params, seed=0)
    optimizer.step()
    before = bits(params, optimizer)
    set_gradients(params, seed=1, scale=math.inf)
    for skip in (torch.tensor(True), torch.tensor(1.0), torch.tensor(math.nan)):
        optimizer.step(skip=skip.to(device), grad_scale=torch.tensor(math.nan, device=device))
    assert_equal(bits(params, optimizer), before)
    set_gradients(params, seed=2)
    optimizer.step(skip=torch.tensor(False, device=device))
    assert not torch.equal(params[0], before[0])
    assert optimizer.state[params[0]]["step"] == 2


@HOST_IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skip_changes_nothing(implementation, dtype):
    check_skip_changes_nothing(implementation, dtype, "cpu")


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION])
def test_skip_changes_nothing_in_the_kernels(dtype, device):
    check_skip_changes_nothing("triton", dtype, device)


def test_a_skipped_first_step_counts_for_nothing():
    params, others = make_params(), make_params()
    first, second = AdamW(params), AdamW(others)
    for step in range(3):
        set_gradients(params, others, seed=step)
        first.step(skip=torch.tensor(step == 0))
        if step:
            second.step()
    assert_equal(bits(params, first), bits(others, second))


def through_json(state_dict: dict) -> dict:
    """What is left of a state dict after tensors became lists of numbers in a JSON text."""

    def pack(value):
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.float32
            return {"shape": list(value.shape), "values": value.flatten().tolist()}
        return value

    def unpack(value):
        if isinstance(value, dict) and "values" in value:
            return torch.tensor(value["values"], dtype=torch.float32).view(value["shape"])
        return value

    state = {k: {n: pack(v) for n, v in s.items()} for k, s in state_dict["state"].items()}
    read = json.loads(json.dumps({**state_dict, "state": state}))
    read["state"] = {int(k): {n: unpack(v) for n, v in s.items()} for k, s in read["state"].items()}
    return read


@HOST_IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", [lambda state: state, through_json], ids=["direct", "json"])
def test_a_loaded_state_goes_on_bit_for_bit(implementation, dtype, way):
    params = make_params(dtype=dtype)
    optimizer = AdamW(groups(params), implementation=implementation)
    for step in range(3):
        set_gradients(params, seed=step)
        optimizer.step()
    copies = [Parameter(param.detach().clone()) for param in params]
    loaded = AdamW(groups(copies), lr=1.0, implementation=implementation)
    loaded.load_state_dict(way(optimizer.state_dict()))
    assert_equal(bits(copies, loaded), bits(params, optimizer))
    for step in range(3, 6):
        set_gradients(params, copies, seed=step)
        optimizer.step()
        # Shared moments would be updated twice.
        loaded.step()
    assert_equal(bits(copies, loaded), bits(params, optimizer))


def test_the_state_of_torch_can_be_loaded():
    ours, theirs = make_params(), make_params()
    optimizer, peer = AdamW(ours), torch.optim.AdamW(theirs)
    for step in range(4):
        set_gradients(ours, theirs, seed=step)
        peer.step()
        if step == 0:
            for a, b in zip(ours, theirs):
                a.data.copy_(b.data)
            optimizer.load_state_dict(peer.state_dict())
        else:
            optimizer.step()
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda state: state.pop("exp_avg"), "state exp_avg of parameter 0 is None"),
        (lambda state: state.update(step=torch.zeros(1)), "state step of parameter 0"),
        (lambda state: state.update(exp_avg_sq=torch.zeros(2)), "a tensor of shape (33, 65)"),
    ],
)
def test_a_state_that_does_not_fit_is_named(spoil, complaint):
    params = make_params()
    optimizer = AdamW(params)
    set_gradients(params, seed=0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    spoil(state["state"][0])
    before = bits(params, optimizer)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        optimizer.load_state_dict(state)
    assert_equal(bits(params, optimizer), before)


@HOST_IMPLEMENTATIONS
def test_a_learning_rate_may_be_a_tensor(implementation):
    ours, theirs = make_params(), make_params()
    lr = torch.tensor(0.5)
    by_tensor = AdamW(ours, lr=lr, implementation=implementation)
    by_number = AdamW(theirs, lr=0.5, implementation=implementation)
    for step, value in enumerate((0.5, 0.25, 0.125)):
        set_gradients(ours, theirs, seed=step)
        lr.fill_(value)
        by_number.param_groups[0]["lr"] = value
        by_tensor.step()
        by_number.step()
    assert_equal(ours, theirs)


def test_loading_keeps_the_learning_rate_a_tensor_and_the_same_one():
    lr = torch.tensor(0.5)
    by_tensor, by_number = AdamW(make_params(), lr=lr), AdamW(make_params(), lr=0.25)
    saved = by_tensor.state_dict()
    by_tensor.load_state_dict(by_number.state_dict())
    assert by_tensor.param_groups[0]["lr"] is lr
    assert lr == 0.25
    saved["param_groups"][0]["lr"] = torch.tensor(0.5)
    by_number.load_state_dict(saved)
    assert by_number.param_groups[0]["lr"] == 0.5
    assert isinstance(by_number.param_groups[0]["lr"], float)


def test_schedulers_of_torch_drive_it():
    ours, theirs = make_params(), make_params()
    optimizers = AdamW(ours), torch.optim.AdamW(theirs)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5) for o in optimizers]
    for step in range(5):
        set_gradients(ours, theirs, seed=step)
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            scheduler.step()
    assert_equal(ours, theirs)


def test_parameters_can_join_later():
    params = make_params()
    optimizer = AdamW(params[:1])
    set_gradients(params, seed=0)
    optimizer.step()
    optimizer.add_param_group({"params": params[1:], "lr": 0.5})
    optimizer.step()
    assert [optimizer.state[param]["step"].item() for param in params[:2]] == [2, 1]
    assert optimizer.param_groups[1]["weight_decay"] == 0.01


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    param = Parameter(torch.tensor([3.0]))
    optimizer = AdamW([param], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 9
    assert param.item() < 3


def test_without_gradients_a_step_does_nothing():
    params = make_params()
    optimizer = AdamW(params)
    optimizer.step()
    assert_equal(params, make_params())
    assert not optimizer.state


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"lr": -1.0}, "lr is -1.0; right is: 0 or more"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": torch.ones(2)}, "0-dim tensor"),
        ({"betas": (0.9, 1.0)}, "betas is (0.9, 1.0)"),
        ({"betas": (-0.1, 0.9)}, "betas is (-0.1, 0.9)"),
        ({"betas": (0.9,)}, "betas is (0.9,)"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"implementation": "fused"}, "one of auto, reference, foreach, triton"),
    ],
)
def test_wrong_settings_are_named(arguments, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        AdamW(make_params(), **arguments)


def test_wrong_settings_of_a_group_are_named():
    with pytest.raises(ValueError, match="eps is -1"):
        AdamW([{"params": make_params(), "eps": -1}])


def test_an_empty_list_is_refused_as_in_torch():
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    AdamW([{"params": []}]).step()


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"torch\.sparse_coo; right is: dense"):
        AdamW(embedding.parameters()).step()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_other_dtypes_are_refused(dtype):
    param = Parameter(torch.ones(2, dtype=dtype))
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="right is: float32, bfloat16 or float16"):
        AdamW([param]).step()


@pytest.mark.parametrize("name", ["grad_scale", "skip"])
def test_scalars_of_another_shape_are_refused(name):
    params = make_params()
    set_gradients(params, seed=0)
    with pytest.raises(ValueError, match=f"{name} is a tensor of shape"):
        AdamW(params).step(**{name: torch.ones(1)})


@pytest.mark.skipif(INTERPRETING, reason="the interpreter runs the kernels on the CPU")
def test_triton_on_a_cpu_is_refused():
    params = make_params()
    set_gradients(params, seed=0)
    with pytest.raises(ValueError, match="'auto' or 'foreach' for parameters on cpu"):
        AdamW(params, implementation="triton").step()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (1, 1 / 7),
        (7, 1.0),
        (8, 0.9887175604818206),
        (14, 0.55),
        (21, 0.1),
        (24, 0.1),
    ],
)
def test_cosine_lr_has_the_values_of_cs336(step, expected):
    lr = cosine_lr(step, max_lr=1, min_lr=0.1, warmup_steps=7, cosine_steps=21)
    assert lr == pytest.approx(expected, rel=1e-15)


def test_cosine_lr_without_a_cosine():
    settings = {"max_lr": 1.0, "min_lr": 0.5, "warmup_steps": 2, "cosine_steps": 2}
    assert [cosine_lr(step, **settings) for step in range(4)] == [0, 0.5, 0.5, 0.5]


def test_cosine_lr_without_a_warm_up_starts_at_the_maximum():
    assert cosine_lr(0, max_lr=0.3, min_lr=0, warmup_steps=0, cosine_steps=4) == 0.3


@pytest.mark.parametrize(
    ("name", "value"), [("step", -1), ("warmup_steps", -1), ("cosine_steps", 1), ("min_lr", 2.0)]
)
def test_cosine_lr_names_what_is_out_of_order(name, value):
    settings = {"step": 0, "max_lr": 1.0, "min_lr": 0.1, "warmup_steps": 2, "cosine_steps": 4}
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        cosine_lr(**(settings | {name: value}))


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 100.0, math.inf])
def test_clipping_gives_the_bits_of_torch(max_norm):
    ours, theirs = make_params(), make_params()
    set_gradients(ours, theirs, seed=0)
    for params in (ours, theirs):
        params[1].requires_grad_(False)
        params[1].grad = None
    norm = clip_grad_norm(iter(ours), max_norm)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    assert_equal(
        [p.grad for p in ours if p.grad is not None], [p.grad for p in theirs if p is not theirs[1]]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_low_precision_gradients_is_summed_in_float32(dtype):
    # In bfloat16 a sum of ones stops growing at 256; in float16 300**2 is infinite.
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
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    assert norm == 0


def test_clipping_inside_the_step_equals_clipping_before_it():
    inside, before = make_params(), make_params()
    first, second = AdamW(inside), AdamW(before)
    set_gradients(inside, before, seed=0)
    first.step(grad_scale=clip_coefficient(grad_norm(inside), 1.0))
    clip_grad_norm(before, 1.0)
    second.step()
    assert_equal(bits(inside, first), bits(before, second))


def test_a_negative_max_norm_is_named():
    with pytest.raises(ValueError, match=r"max_norm is -1\.0"):
        clip_grad_norm(make_params(), -1.0)


# From one element to several blocks, on and off the block's edge.
KERNEL_SHAPES = [(4096,), (4097,), (3, 4095), (1,), (), (0,), (63,), (70, 130)]


@ON_KERNEL_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION])
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
    # A view at an odd element is aligned to 4 bytes only, and has neighbours on both sides.
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
def test_bias_correction_is_exact_at_the_first_step(device):
    # In float32 1 - 0.9999 is wrong in the fourth digit, and the first update with it.
    param = Parameter(torch.zeros(5, device=device))
    param.grad = torch.full_like(param, 3.0)
    optimizer = AdamW([param], lr=1.0, betas=(0.999, 0.9999), implementation="triton")
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full_like(param, -1.0), rtol=1e-6, atol=0)


@ON_KERNEL_DEVICES
def test_betas_may_be_zero_in_the_kernels(device):
    param = Parameter(torch.zeros(5, device=device))
    param.grad = torch.full_like(param, 3.0)
    AdamW([param], lr=1.0, betas=(0.0, 0.0), implementation="triton").step()
    torch.testing.assert_close(param.detach(), torch.full_like(param, -1.0))


@ON_KERNEL_DEVICES
def test_parameters_with_gaps_are_refused_by_the_kernels(device):
    param = Parameter(torch.ones(4, 6, device=device).t())
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="contiguous tensors"):
        AdamW([param], implementation="triton").step()


@pytest.mark.skipif(INTERPRETING, reason="this is the process inside")
def test_the_kernels_in_the_interpreter(quiet_environment):
    pytest.importorskip("triton")
    names = "kernels or first_step_counts or bias_correction"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        names,
    ]
    environment = quiet_environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= 9, done.stdout


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("capability", "dtype"),
    # Triton 3.2 has no bfloat16 for sm_75.
    [(c, d) for c in (75, 80, 90) for d in ("fp32", "fp16", "bf16") if (c, d) != (75, "bf16")],
)
def test_the_kernels_compile_to_wide_accesses(capability, dtype):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lib import optimizer_triton as kernels

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
@pytest.mark.parametrize("count", [3, 700])
def test_the_kernels_agree_with_fused_adamw_of_torch(count):
    shapes = [(64 + index, 67) for index in range(count)]
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
    with pytest.raises(ValueError, match="grad_scale is a tensor of shape"):
        AdamW(params).step(grad_scale=torch.tensor(1.0))


@pytest.mark.parametrize("implementation", ["reference", "foreach"])
def test_the_optimizers_own_norm_is_that_of_all_its_gradients(implementation):
    params = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7).bfloat16())]
    unused = torch.nn.Parameter(torch.randn(2))
    for param in params:
        param.grad = torch.randn_like(param)
    groups = [{"params": params[:1]}, {"params": [params[1], unused]}]
    optimizer = AdamW(groups, implementation=implementation)
    expected = torch.cat([param.grad.double().flatten() for param in params]).norm()
    assert float(optimizer.grad_norm()) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.gpu
def test_the_norm_on_a_gpu_reads_aligned_and_other_gradients():
    params = [torch.nn.Parameter(torch.randn(n, device="cuda").bfloat16()) for n in (4096, 5000, 3)]
    shifted = torch.randn(9000, device="cuda").bfloat16()[1:5001]
    for param in params:
        param.grad = torch.randn_like(param)
    params[1].grad = shifted
    optimizer = AdamW(params, implementation="triton")
    expected = torch.cat([param.grad.double().flatten() for param in params]).norm()
    assert float(optimizer.grad_norm()) == pytest.approx(float(expected), rel=1e-6)
    assert params[1].grad.data_ptr() % 16 != 0
