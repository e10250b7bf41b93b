"""AdamW on a CPU: the bits of torch's, the paper's algorithm, low precision, state, bad input."""

import copy
import math
import pickle
import re

import pytest
import torch
from torch.nn import Parameter

from lib.optimizer.adamw import AdamW
from tests.optimizer.params import (
    assert_equal,
    bits,
    check_skip_changes_nothing,
    groups,
    make_params,
    set_gradients,
)

ON_IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "foreach"])


@ON_IMPLEMENTATIONS
def test_thirty_steps_give_the_bits_of_torch(implementation):
    ours, theirs = make_params(), make_params()
    ours[1].requires_grad_(False)
    theirs[1].requires_grad_(False)
    # a learning rate that is a tensor, and changes
    lr = torch.tensor(2.0**-7)
    optimizer = AdamW(groups(ours), lr=lr, implementation=implementation)
    peer = torch.optim.AdamW(groups(theirs), lr=2.0**-7, foreach=implementation == "foreach")
    for step in range(30):
        set_gradients(ours, theirs, seed=step)
        for params in (ours, theirs):
            params[1].grad = None
            if step % 3 == 1:
                params[0].grad = None
        if step == 20:
            lr.fill_(0.5)
            for index in (0, 2):
                peer.param_groups[index]["lr"] = 0.5
        optimizer.step()
        peer.step()
    assert ours[1] not in optimizer.state
    assert optimizer.state[ours[0]]["step"] == 20
    assert_equal(bits(ours, optimizer), bits(theirs, peer))


@ON_IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_are_rounded_float32_ones(implementation, dtype):
    low = make_params(dtype=dtype)
    full = [Parameter(param.detach().float()) for param in low]
    # far below the spacing of bfloat16 numbers: without a master no weight would move
    optimizers = [AdamW(p, lr=1e-4, implementation=implementation) for p in (low, full)]
    for step in range(20):
        set_gradients(full, low, seed=step)
        for optimizer in optimizers:
            optimizer.step()
    for param, exact in zip(low, full):
        state = optimizers[0].state[param]
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert torch.equal(state["master"], exact)
        assert torch.equal(param, exact.to(dtype))
    assert not torch.equal(low[0], make_params(dtype=dtype)[0])


@ON_IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_scale_equals_scaled_gradients(implementation, dtype):
    scaled, plain = make_params(dtype=dtype), make_params(dtype=dtype)
    optimizers = [AdamW(p, implementation=implementation) for p in (scaled, plain)]
    for step in range(3):
        set_gradients(scaled, plain, seed=step)
        before = [param.grad.clone() for param in scaled]
        optimizers[0].step(grad_scale=torch.tensor(0.25))
        assert_equal([param.grad for param in scaled], before)
        for param in plain:
            param.grad.mul_(0.25)
        optimizers[1].step()
    assert_equal(bits(scaled, optimizers[0]), bits(plain, optimizers[1]))


@ON_IMPLEMENTATIONS
def test_skip_changes_nothing(implementation):
    check_skip_changes_nothing(implementation, torch.bfloat16, "cpu")


@ON_IMPLEMENTATIONS
def test_the_norm_is_that_of_all_gradients_of_all_groups(implementation):
    params = [Parameter(torch.randn(5, 3)), Parameter(torch.randn(7).bfloat16())]
    unused = Parameter(torch.randn(2))
    for param in params:
        param.grad = torch.randn_like(param)
    parts = [{"params": params[:1]}, {"params": [params[1], unused]}]
    optimizer = AdamW(parts, implementation=implementation)
    expected = torch.cat([param.grad.double().flatten() for param in params]).norm()
    assert float(optimizer.grad_norm()) == pytest.approx(float(expected), rel=1e-6)


@ON_IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_bit_for_bit(implementation, dtype):
    params = make_params(dtype=dtype)
    optimizer = AdamW(groups(params), implementation=implementation)
    for step in range(3):
        set_gradients(params, seed=step)
        optimizer.step()
    copies = [Parameter(param.detach().clone()) for param in params]
    loaded = AdamW(groups(copies), lr=1.0, implementation=implementation)
    loaded.load_state_dict(optimizer.state_dict())
    assert_equal(bits(copies, loaded), bits(params, optimizer))
    for step in range(3, 6):
        set_gradients(params, copies, seed=step)
        optimizer.step()
        # moments that are shared would be updated twice
        loaded.step()
    assert_equal(bits(copies, loaded), bits(params, optimizer))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda state: state.pop("exp_avg"), "state exp_avg of parameter 0 must be a tensor"),
        (lambda state: state.update(step=torch.zeros(1)), "state step of parameter 0"),
        (
            lambda state: state.update(exp_avg_sq=torch.zeros(2)),
            "of shape (33, 65), got shape (2,)",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(spoil, complaint):
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


@ON_IMPLEMENTATIONS
def test_a_parameter_made_float32_after_a_step_goes_on_from_its_own_value(implementation):
    narrow, wide = Parameter(torch.ones(2, dtype=torch.bfloat16)), Parameter(torch.ones(2))
    optimizer = AdamW([wide, narrow], lr=0.25, implementation=implementation)
    for param in (wide, narrow):
        param.grad = torch.ones_like(param)
    optimizer.step()
    with torch.no_grad():
        narrow.data = wide.clone()
    narrow.grad = torch.ones(2)
    optimizer.step()
    assert narrow.equal(wide)


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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_on_as_the_original_and_apart_from_it(copied):
    params = make_params(dtype=torch.bfloat16)
    optimizer = AdamW(groups(params), implementation="reference")
    set_gradients(params, seed=0)
    # a scheduler puts a step of its own into the optimizer
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    before = bits(params, optimizer)
    twins, twin = copied((params, optimizer))
    assert twin.implementation == "reference"
    set_gradients(twins, seed=1)
    twin.step()
    assert_equal(bits(params, optimizer), before)
    set_gradients(params, seed=1)
    optimizer.step()
    assert_equal(bits(twins, twin), bits(params, optimizer))


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


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"lr": -1.0}, "lr must be at least 0, or a 0-dim tensor, got -1.0"),
        ({"lr": math.nan}, "lr must be"),
        ({"lr": torch.ones(2)}, "lr must be"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"betas": (-0.1, 0.9)}, "betas must be"),
        ({"betas": (0.9,)}, "betas must be"),
        ({"eps": -1e-8}, "eps must be"),
        ({"weight_decay": -1}, "weight_decay must be"),
        ({"amsgrad": True}, "amsgrad must be False for AdamW here, got True"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay must be True for AdamW here"),
    ],
)
def test_wrong_settings_of_a_group_are_refused_also_when_loaded(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        AdamW([{"params": make_params(), **changes}])
    optimizer = AdamW(make_params())
    before, saved = optimizer.state_dict(), optimizer.state_dict()
    saved["param_groups"][0] |= changes
    with pytest.raises(ValueError, match=complaint):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict() == before
    # and what has no settings of AdamW at all
    del saved["param_groups"][0]["betas"]
    with pytest.raises(ValueError, match="a group must have lr, betas, eps, weight_decay, got"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("peer", "assert_same"),
    [(torch.optim.AdamW, assert_equal), (torch.optim.Adam, torch.testing.assert_close)],
)
def test_a_state_of_pytorchs_goes_on_where_the_algorithm_is_the_same(peer, assert_same):
    ours, theirs = make_params(), make_params()
    loaded, saved = AdamW(ours), peer(theirs, weight_decay=0.0)
    for step in range(3):
        set_gradients(ours, theirs, seed=step)
        saved.step()
        if step:
            loaded.step()
            assert_same(ours, theirs)
            continue
        with torch.no_grad():
            torch._foreach_copy_(ours, theirs)
        loaded.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_parameters_without_an_update_are_refused(dtype):
    param = Parameter(torch.ones(2, dtype=dtype))
    param.grad = torch.ones_like(param)
    first = Parameter(torch.ones(2))
    first.grad = torch.ones(2)
    with pytest.raises(ValueError, match="parameters must be float32, bfloat16 or float16"):
        AdamW([first, param]).step()
    # nor is another one updated before the error
    assert first.equal(torch.ones(2))


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"must be dense .*, got torch\.sparse_coo"):
        AdamW(embedding.parameters()).step()


@pytest.mark.parametrize("name", ["grad_scale", "skip"])
def test_scalars_of_another_shape_are_refused(name):
    params = make_params()
    set_gradients(params, seed=0)
    with pytest.raises(ValueError, match=f"{name} must be a tensor of shape"):
        AdamW(params).step(**{name: torch.ones(1)})


def test_triton_on_a_cpu_and_an_unknown_implementation_are_refused():
    params = make_params()
    set_gradients(params, seed=0)
    with pytest.raises(ValueError, match="'auto' or 'foreach' for parameters on cpu"):
        AdamW(params, implementation="triton").step()
    with pytest.raises(ValueError, match="one of auto, reference, foreach, triton, got 'fused'"):
        AdamW(params, implementation="fused")
