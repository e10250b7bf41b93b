"""One training step: the same result however it is run, nothing lost, nothing updated by NaN."""

import dataclasses
import math
import os
import shutil

import pytest
import torch

from lib.core import hardware
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.training.config import OptimizerConfig, TrainConfig
from lib.training.step import FIRST_LOSS_SCALE, GROWTH_INTERVAL, TrainStep, numerics

MODEL = ModelConfig(
    vocab_size=61, context_length=16, d_model=32, num_layers=2, num_heads=4, d_ff=48
)
CONFIG = TrainConfig(
    model=MODEL, optimizer=OptimizerConfig(warmup_steps=0), batch_size=4, steps=100, log_interval=8
)
CPU = torch.device("cpu")


def make_step(device=CPU, dtype=torch.float32, **changes) -> TrainStep:
    config = dataclasses.replace(CONFIG, **changes)
    model = TransformerLM(config.model, generator=torch.Generator().manual_seed(0)).to(device)
    if config.low_precision_weights:
        model.use_low_precision_weights(dtype)
    return TrainStep(model, config, device, dtype)


def windows(seed=0, count=4):
    """Token ids that can be learned: each is the one before plus 7."""
    starts = torch.randint(61, (count, 1), generator=torch.Generator().manual_seed(seed))
    return (starts + 7 * torch.arange(17)) % 61


def losses(step: TrainStep, steps: int = 40) -> list[float]:
    rows = []
    for index in range(steps):
        step(windows(index).to(step.device), 3e-3)
        if step.unread == step.config.log_interval:
            rows += step.read_log()
    return [row.loss for row in rows]


def weights(step: TrainStep) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in step.model.parameters()]


def test_the_loss_falls():
    values = losses(make_step())
    assert values[0] == pytest.approx(math.log(61), rel=0.2)
    assert values[-1] < 0.5 * values[0]


def test_accumulated_passes_equal_one_large_batch():
    one, four = make_step(), make_step(batch_size=1, gradient_accumulation_steps=4)
    for index in range(3):
        one(windows(index), 1e-3)
        four(windows(index), 1e-3)
    for a, b in zip(weights(one), weights(four)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(one.read_log(), four.read_log()):
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-5)


def test_the_log_keeps_the_order_of_steps_around_its_end():
    step = make_step()
    expected = losses(make_step(), 24)
    rows = []
    for index in range(24):
        step(windows(index), 3e-3)
        # read after 3, 5, 8, 8 steps: the ring of eight rows is crossed at different places
        if index in (2, 7, 15, 23):
            rows += [row.loss for row in step.read_log()]
    assert rows == expected
    # read too late, it has the last eight
    late = []
    for first in (0, 3):
        for index in range(first, 11):
            step(windows(index), 0.0)
        late.append([row.loss for row in step.read_log()])
    assert late[0] == late[1]


def test_a_step_that_is_not_finite_changes_nothing_and_says_so():
    step = make_step()
    losses(step, 8)
    with torch.no_grad():
        step.model.ln_final.weight[0] = math.inf
    before = weights(step)
    state = {
        k: v.clone() for k, v in step.optimizer.state[step.model.token_embeddings.weight].items()
    }
    step(windows(), 1e-3)
    (row,) = step.read_log()
    assert row.is_skipped
    assert not math.isfinite(row.loss)
    for a, b in zip(before, weights(step)):
        assert torch.equal(a, b)
    for name, value in step.optimizer.state[step.model.token_embeddings.weight].items():
        assert torch.equal(value, state[name])


def test_gradients_are_clipped_to_the_norm_asked_for():
    clipped = make_step(optimizer=OptimizerConfig(warmup_steps=0, max_grad_norm=1e-3, eps=1.0))
    free = make_step(optimizer=OptimizerConfig(warmup_steps=0, max_grad_norm=0, eps=1.0))
    before = weights(free)
    clipped(windows(), 1.0)
    free(windows(), 1.0)
    (row,) = free.read_log()
    assert clipped.read_log()[0].grad_norm == pytest.approx(row.grad_norm)
    # with eps = 1 the first update is the gradient, but for a factor near 1, where nothing decays
    index = next(i for i, weight in enumerate(before) if weight.ndim == 1)
    moved = [(w[index] - before[index]).norm().item() for w in (weights(clipped), weights(free))]
    assert moved[0] / moved[1] == pytest.approx(1e-3 / row.grad_norm, rel=0.1)


def test_vectors_are_not_decayed():
    step = make_step(optimizer=OptimizerConfig(warmup_steps=0, weight_decay=0.5))
    decays = {
        tuple(p.shape): group["weight_decay"]
        for group in step.optimizer.param_groups
        for p in group["params"]
    }
    assert all(decay == (0.5 if len(shape) == 2 else 0) for shape, decay in decays.items())
    assert {len(shape) for shape in decays} == {1, 2}


def test_float16_scales_the_loss_and_halves_the_scale_after_an_overflow():
    step = make_step(dtype=torch.float16)
    assert float(step.loss_scale) == FIRST_LOSS_SCALE
    step._adapt_loss_scale(torch.tensor(False))
    assert float(step.loss_scale) == FIRST_LOSS_SCALE / 2
    for _ in range(GROWTH_INTERVAL):
        step._adapt_loss_scale(torch.tensor(True))
    assert float(step.loss_scale) == FIRST_LOSS_SCALE
    assert float(step.good_steps) == 0


def test_the_global_switches_are_restored(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    with numerics(tf32=True, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "high"
        # for matmuls on a GPU, in older releases
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    after = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    assert after == before
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_switch_that_loads_the_compiler_is_left_alone_where_nothing_needs_it(monkeypatch):
    monkeypatch.setattr(torch, "use_deterministic_algorithms", None)
    with numerics(tf32=False, deterministic=False):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "compile True needs Triton on a CUDA GPU, and it is not installed"),
        ("cpu", "compile True needs a C.. compiler on a CPU, and none of c"),
    ],
)
def test_compiling_without_a_compiler_is_refused_by_name(device, message, monkeypatch):
    monkeypatch.setattr(hardware, "HAS_TRITON", False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    config = TrainConfig(model=MODEL, compile=True)
    with pytest.raises(ValueError, match=message):
        TrainStep(TransformerLM(MODEL), config, torch.device(device), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "low"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float16, False),
        (torch.float16, True),
    ],
)
def test_every_way_to_run_a_step_learns_alike_on_a_gpu(dtype, low, compiled, graph):
    expected = losses(make_step())
    settings = {"compile": compiled, "cuda_graph": graph, "low_precision_weights": low}
    torch.compiler.reset()
    step = make_step(torch.device("cuda"), dtype, **settings)
    found = losses(step)
    if dtype == torch.float16:
        # the first steps may overflow and be skipped
        assert found[-1] < 0.7 * expected[0]
        return
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    with_tolerance = pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert found == with_tolerance


@pytest.mark.gpu
def test_a_recorded_step_equals_a_launched_one_bit_for_bit():
    device = torch.device("cuda")
    runs = []
    for graph in (False, True):
        with numerics(tf32=False, deterministic=True):
            step = make_step(device, torch.bfloat16, cuda_graph=graph, deterministic=True)
            runs.append((losses(step), weights(step)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1]))


@pytest.mark.gpu
def test_steps_do_not_wait_for_the_gpu():
    step = make_step(torch.device("cuda"), torch.bfloat16, log_interval=100)
    for index in range(3):
        step(windows(index).cuda(), 1e-3)
    data = windows(9).pin_memory()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(data, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_step_is_evaluated_without_compiling_other_lengths():
    step = make_step()
    inputs, targets = windows()[:, :-1], windows()[:, 1:]
    expected = step.parallel.loss(inputs, targets)
    # what `compile_whole` sets
    step.model._compiled_hidden = lambda *_: pytest.fail("the compiled model runs")
    step.loss.eval()
    assert torch.equal(step.parallel.loss(inputs, targets), expected)
