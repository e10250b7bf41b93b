"""Memory by category: hand-made events, and real steps against what the model's formulas say."""

import dataclasses

import numpy as np
import pytest
import torch

from lib.model.config import ModelConfig
from lib.model.costs import activation_bytes, num_parameters
from lib.model.transformer import TransformerLM
from lib.profiling.memory_timeline import (
    CATEGORIES,
    MARK,
    memory_timeline,
    profile_memory,
)
from lib.training.config import OptimizerConfig, TrainConfig
from lib.training.step import TrainStep

MODEL = ModelConfig(
    vocab_size=500, context_length=32, d_model=64, num_layers=2, num_heads=4, d_ff=96
)
BATCH = 4


def make_step(model: ModelConfig = MODEL, device: str = "cpu", **changes) -> TrainStep:
    config = TrainConfig(
        model=model, optimizer=OptimizerConfig(warmup_steps=0), batch_size=BATCH, steps=9, **changes
    )
    lm = TransformerLM(model, generator=torch.Generator().manual_seed(0)).to(device)
    step = TrainStep(lm, config, torch.device(device), torch.float32)
    take(step)
    return step


SEQUENCES = torch.zeros(2 * BATCH, MODEL.context_length + 1, dtype=torch.int64)


def take(step: TrainStep) -> None:
    step(SEQUENCES[: BATCH * step.config.gradient_accumulation_steps], 1e-3)


def watched(step: TrainStep):
    return profile_memory(lambda: take(step), step.model, step.optimizer, device=step.device)


def span(name, start, end):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start}


def memory(time, address, num_bytes, device=0):
    args = {"Addr": address, "Bytes": num_bytes, "Device Type": device, "Device Id": 0}
    return {"ph": "i", "name": "[memory]", "ts": time, "args": args}


HELD = {"parameters": {1: 100}, "optimizer state": {2: 200}, "gradients": {}, "other": {3: 7}}
EVENTS = [
    span("training step", 0, 100),
    span("forward", 10, 50),
    span("backward", 50, 90),
    # an activation, and a temporary before it at the same address
    memory(12, 50, 30),
    memory(15, 50, -30),
    memory(20, 50, 40),
    memory(70, 50, -40),
    # a gradient, complete at 65
    memory(60, 60, 100),
    span(f"{MARK}60", 65, 66),
    memory(95, 60, -100),
    # a temporary of backward, and one on another device
    memory(61, 70, 5),
    memory(62, 70, -5),
    memory(63, 80, 999, device=1),
]


def at(timeline, time_us):
    index = np.searchsorted(timeline.times_ms, time_us / 1e3, side="right") - 1
    return {name: int(values[index]) for name, values in timeline.num_bytes.items()}


def highest_of(timeline):
    return {name: int(values.max()) for name, values in timeline.num_bytes.items()}


def test_each_block_has_one_category_for_its_life():
    timeline = memory_timeline(EVENTS, HELD)
    always = {"parameters": 100, "optimizer state": 200, "gradients": 0, "activations": 0}
    assert at(timeline, 0) == always | {"other": 7}
    assert at(timeline, 13) == always | {"other": 37}
    assert at(timeline, 30) == always | {"activations": 40, "other": 7}
    assert at(timeline, 61) == always | {"activations": 40, "gradients": 100, "other": 12}
    assert at(timeline, 80) == always | {"gradients": 100, "other": 7}
    assert at(timeline, 99) == always | {"other": 7}
    assert sum(timeline.peak().values()) == timeline.total.max() == 452
    assert tuple(timeline.peak()) == CATEGORIES
    phases = timeline.phases
    assert [name for name, _, _ in phases] == ["forward", "backward"]
    assert phases[0][1:] == (pytest.approx(0.010), pytest.approx(0.050))


def test_what_the_allocator_holds_besides_is_other_until_it_is_freed():
    events = [span("forward", 0, 9), memory(5, 99, -300)]
    timeline = memory_timeline(events, HELD, allocated=1000)
    assert at(timeline, 0)["other"] == 700
    assert (timeline.total[0], timeline.total[-1]) == (1000, 700)


def test_an_activation_outlives_the_forward_pass_that_it_was_made_in():
    events = [span("forward", 0, 10), span("backward", 10, 30), span("forward", 30, 40)]
    # from the first pass to its backward; a temporary of backward; one of the second pass
    for address, start, end in ((1, 5, 20), (2, 15, 18), (3, 32, 38)):
        events += [memory(start, address, 100), memory(end, address, -100)]
    timeline = memory_timeline(events, {category: {} for category in CATEGORIES})
    found = [at(timeline, time)["activations"] for time in (6, 16, 19, 33)]
    assert found == [100, 100, 100, 0]


def test_a_step_without_forward_or_on_an_untraced_device_is_refused():
    with pytest.raises(ValueError, match="no range 'forward'"):
        memory_timeline([span("training step", 0, 1)], HELD)
    step = make_step()
    with pytest.raises(ValueError, match="device must be"):
        profile_memory(lambda: take(step), step.model, step.optimizer, device="mps")


@pytest.mark.parametrize(
    ("kernel", "tied"),
    [("sdpa", False), ("vectorized_torch", True), ("scaled_dot_prod_attention", False)],
)
def test_categories_are_exact_to_the_byte_on_a_cpu(kernel, tied):
    model = dataclasses.replace(MODEL, attention_kernel=kernel, tied_embeddings=tied)
    timeline = watched(make_step(model))
    highest, parameters = highest_of(timeline), num_parameters(model)
    assert highest["parameters"] == timeline.num_bytes["parameters"].min() == 4 * parameters
    assert highest["gradients"] == 4 * parameters
    num_tensors = len(list(TransformerLM(model).parameters()))
    assert highest["optimizer state"] == 8 * parameters + 4 * num_tensors
    # the gradient that comes with the loss becomes the head's; token ids were there before
    head = 4 * model.vocab_size * model.d_model
    expected = activation_bytes(model, BATCH) - head - 8 * BATCH * model.context_length
    # and a few scalars: the loss, and the scale in each product of attention
    assert 0 <= highest["activations"] - expected <= 512
    assert timeline.total[0] == timeline.total[-1]


def test_accumulated_gradients_stay_through_the_second_pass():
    timeline = watched(make_step(gradient_accumulation_steps=2))
    second = [phase for phase in timeline.phases if phase[0] == "forward"][1]
    inside = (timeline.times_ms >= second[1]) & (timeline.times_ms < second[2])
    assert timeline.num_bytes["gradients"][inside].min() == 4 * num_parameters(MODEL)


def test_no_hook_stays_behind():
    step = make_step()
    watched(step)
    assert not any(p._post_accumulate_grad_hooks for p in step.model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_the_sum_is_what_the_allocator_says_on_a_gpu(compiled):
    torch.compiler.reset()
    step = make_step(device="cuda", compile=compiled)
    take(step)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    timeline = watched(step)
    assert timeline.total[0] == before
    assert timeline.total.max() == torch.cuda.max_memory_allocated()
    highest = highest_of(timeline)
    assert highest["parameters"] == 4 * num_parameters(MODEL)
    # blocks are multiples of 512 bytes
    tensors = len(list(step.model.parameters()))
    assert 0 <= highest["gradients"] - 4 * num_parameters(MODEL) <= 512 * tensors
    assert highest["activations"] > 0
