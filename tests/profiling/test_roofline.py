"""Costs of a block against PyTorch's count and against its tensors; the roof; records; figure."""

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lib.core.records import read_records
from lib.model.config import ModelConfig
from lib.model.costs import flops_by_part
from lib.profiling import roofline
from lib.profiling.roofline import (
    Cost,
    Limits,
    MeasuredOperation,
    backward_costs,
    block_costs,
    block_functions,
    matmul_cost,
    measure_block,
    measure_call,
    measure_limits,
    points_of,
    predicted_ms,
    write_records,
)

CPU = torch.device("cpu")
SHAPE = ModelConfig(
    vocab_size=64, context_length=16, d_model=32, num_layers=2, num_heads=4, d_ff=48
)
SIZES = (SHAPE, 3, 16)
LIMITS = Limits(flops_per_s=1e12, bytes_per_s=1e11)
MATMULS = [
    "q, k, v projection",
    "scores",
    "value product",
    "output projection",
    "gate and value",
    "down projection",
]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Flush a small buffer, so that measurements are short."""
    monkeypatch.setattr("lib.profiling.measurement.CPU_CACHE_BYTES", 1 << 16)


def functions():
    return block_functions(*SIZES, device=CPU, dtype=torch.float32)


def test_flops_of_matmuls_are_those_that_pytorch_counts_and_add_up_to_the_models():
    costs = block_costs(*SIZES)
    for name in MATMULS:
        with FlopCounterMode(display=False) as counter:
            functions()[name]()
        assert costs[name].flops == counter.get_total_flops(), name
    parts = flops_by_part(SHAPE)
    per_token = parts["projections"] + parts["attention"] + parts["feed_forward"]
    assert SHAPE.num_layers * sum(costs[name].flops for name in MATMULS) == per_token * 3 * 16
    # fused attention skips what the causal mask hides, and moves less
    parts = [costs["scores"], costs["value product"]]
    # 16 tokens see 8.5 keys on average
    causal = flops_by_part(SHAPE)["attention"] * 3 * 8.5
    assert SHAPE.num_layers * costs["attention, fused"].flops == causal
    assert costs["attention, fused"].num_bytes < sum(part.num_bytes for part in parts)


@pytest.mark.parametrize("name", [*MATMULS, "attention, fused"])
def test_flops_of_a_backward_pass_are_those_that_pytorch_counts(name):
    shapes = {
        "q, k, v projection": ((48, 32), (32, 96)),
        "scores": ((12, 16, 8), (12, 8, 16)),
        "value product": ((12, 16, 16), (12, 16, 8)),
        "output projection": ((48, 32), (32, 32)),
        "gate and value": ((48, 32), (32, 96)),
        "down projection": ((48, 48), (48, 32)),
        "attention, fused": ((12, 16, 8), (12, 8, 16)),
    }[name]
    a, b = (torch.randn(*shape, requires_grad=True) for shape in shapes)
    c = a @ b
    with FlopCounterMode(display=False) as counter:
        c.sum().backward()
    cost = backward_costs(*SIZES)[name]
    if name == "attention, fused":
        # scores, their gradient and those of q, k and v: five matmuls, each with the visible half
        assert cost.flops == 5 * counter.get_total_flops() // 2 * 17 // (2 * 16)
        return
    assert cost.flops == counter.get_total_flops()
    # each of the two reads the result's gradient and a factor, and writes the other's gradient
    assert cost.num_bytes == 4 * 2 * (c.numel() + a.numel() + b.numel())


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [
        ("RMSNorm", [(3, 16, 32)] * 2, [(3, 16, 32)]),
        ("RoPE", [(3, 16, 32)] * 2, [(3, 16, 32)] * 2),
        ("mask and softmax", [(3, 4, 16, 16)] * 2, [(3, 4, 16, 16)]),
        ("attention, fused", [(3, 16, 32)] * 5, [(3, 16, 32)] * 3),
        ("SiLU and gate", [(3, 16, 96), (3, 16, 48)], [(3, 16, 96)]),
    ],
)
def test_bytes_of_a_backward_pass_are_those_read_and_written(name, read, written):
    numbers = sum(math.prod(shape) for shape in [*read, *written])
    assert backward_costs(*SIZES)[name].num_bytes == 4 * numbers
    assert backward_costs(*SIZES, element_bytes=2)[name].num_bytes == 2 * numbers


def test_nothing_reaches_more_than_its_roof_once_the_roof_is_raised_to_it():
    points = [
        operation("fast", Cost(10**10, 10**6)),
        operation("wide", Cost(10, 10**9)),
        operation("slow", Cost(10**8, 10**8)),
    ]
    raised = LIMITS.raised_to(points)
    assert raised == Limits(5e12, 5e11)
    assert [raised.share(point) for point in points] == pytest.approx([1, 1, 0.1])
    assert LIMITS.raised_to(points[2:]) == LIMITS


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("RMSNorm", [(3, 16, 32)]),
        ("residual sum", [(3, 16, 32), (3, 16, 32)]),
        ("scores", [(3, 4, 16, 8), (3, 4, 16, 8)]),
        ("mask and softmax", [(3, 4, 16, 16)]),
        ("value product", [(3, 4, 16, 16), (3, 4, 16, 8)]),
        ("SiLU and gate", [(3, 16, 96)]),
        ("down projection", [(3, 16, 48), (48, 32)]),
    ],
)
def test_bytes_are_those_of_inputs_and_result(name, inputs):
    numbers = sum(math.prod(shape) for shape in inputs) + functions()[name]().numel()
    assert block_costs(*SIZES)[name].num_bytes == 4 * numbers
    assert block_costs(*SIZES, element_bytes=2)[name].num_bytes == 2 * numbers


def test_the_roof_is_the_lower_of_its_two_parts_and_they_meet_at_the_ridge():
    assert LIMITS.ridge == 10
    assert (LIMITS.attainable(1), LIMITS.attainable(100)) == (1e11, 1e12)
    assert LIMITS.attainable(LIMITS.ridge) == pytest.approx(LIMITS.flops_per_s)
    # 2 n³ / (3 n² e)
    assert matmul_cost(300, 300, 300, 4).intensity == pytest.approx(50)
    assert matmul_cost(300, 300, 300, 2, batch=7).intensity == pytest.approx(100)
    # and the least time is that of the slower part
    assert LIMITS.least_ms(Cost(flops=10**9, num_bytes=1)) == pytest.approx(1)
    assert LIMITS.least_ms(Cost(flops=1, num_bytes=10**8)) == pytest.approx(1)


def test_every_operation_is_measured_with_its_cost_unless_it_runs_out_of_memory(monkeypatch):
    def fails():
        raise torch.OutOfMemoryError("CUDA out of memory")

    found = functions() | {"scores": fails}
    monkeypatch.setattr(roofline, "block_functions", lambda *args, **kw: found)
    points = measure_block(*SIZES, device=CPU, dtype=torch.float32, samples=1)
    costs = block_costs(*SIZES)
    del costs["scores"]
    assert {point.name: point.cost for point in points} == costs
    assert all(point.flops_per_s > 0 for point in points)


def test_limits_are_those_of_the_best_sample_and_size(monkeypatch):
    times = iter([[8.0, 4.0], [1.0, 3.0], [2.0, 3.0], [1.0, 5.0]])
    fake = lambda fn, **settings: type("Found", (), {"times_ms": next(times)})  # noqa: E731
    monkeypatch.setattr(roofline, "measure", fake)
    # 2 · 1024³ in 2 ms, 64 MiB read and written in 1 ms
    assert measure_limits(CPU, torch.float32) == Limits(1e3 * 1024**3, 2e3 * (64 << 20))


def test_a_step_is_predicted_from_flops_bytes_and_parameters():
    shape = ModelConfig(vocab_size=1000, d_model=4096, num_layers=2, num_heads=32, d_ff=16384)
    # a machine whose memory is never the limit
    flops = 3 * 8 * 256 * sum(flops_by_part(shape, 257 / 2).values())
    assert predicted_ms(shape, 8, 256, Limits(1e12, 1e30)) == pytest.approx(flops / 1e9, rel=0.01)
    # one whose arithmetic never is: all that is fused, forward and back, and 28 bytes a parameter
    forward, backward = block_costs(*SIZES), backward_costs(*SIZES)
    once = ["q, k, v projection", "RoPE", "attention, fused", "output projection"]
    once += ["gate and value", "SiLU and gate", "down projection"]
    names = [*once, *["RMSNorm", "residual sum"] * 2]
    moved = sum((forward[name] + backward[name]).num_bytes for name in names)
    head = matmul_cost(48, 32, 64, 4).num_bytes
    parameters = 64 * 32 * 2 + 32 + 2 * (2 * 32 + 4 * 32 * 32 + 3 * 32 * 48)
    expected = (2 * moved + 3 * head + 28 * parameters) / 1e6
    assert predicted_ms(*SIZES, Limits(1e30, 1e9)) == pytest.approx(expected)


def test_the_host_adds_to_a_cpu_and_hides_behind_a_gpu():
    base = predicted_ms(*SIZES, LIMITS)
    assert predicted_ms(*SIZES, LIMITS, dispatch_ms=5.0) == pytest.approx(base + 5)
    assert predicted_ms(*SIZES, LIMITS, dispatch_ms=base / 2, runs_ahead=True) == base
    assert predicted_ms(*SIZES, LIMITS, dispatch_ms=5.0, runs_ahead=True) == 5


def test_a_call_returns_before_it_is_done_and_the_best_size_before_the_median():
    a = torch.randn(200, 200)
    returned, done = measure_call(lambda: a @ a, CPU)
    assert 0 < returned <= done
    (row,) = roofline.measure_sizes([16], CPU)
    assert 0 < row["min_ms"] <= row["median_ms"]


def test_records_give_limits_and_points_back(tmp_path, monkeypatch):
    monkeypatch.setattr(roofline, "measure_limits", lambda *args: LIMITS)
    monkeypatch.setattr(roofline, "model_preset", lambda name: SHAPE)
    monkeypatch.setattr(roofline, "measure_sizes", lambda *args: [{"numbers": 4, "median_ms": 1.0}])
    monkeypatch.setattr(roofline, "measure_call", lambda *args: (0.1, 2.0))
    sizes = {"batch_size": 1, "context_length": 8}
    config = roofline.RooflineConfig(**sizes, dtype="float32", device="cpu", output=tmp_path)
    write_records(config)
    records = read_records(tmp_path / "roofline.jsonl")
    tasks = {record["figures"]["task"] for record in records}
    assert tasks == {"limits", "operation", "call", "size"}
    assert records[0]["config"]["context_length"] == 8
    for record in records:
        # costs follow from the settings, whatever was counted when the record was made
        record["figures"].pop("flops", None)
    limits, points = points_of(records)
    assert limits == LIMITS
    assert {point.name: point.cost for point in points} == block_costs(SHAPE, 1, 8)
    # the newest count, and none are none
    newer = {"config": {}, "figures": {"task": "limits", **dataclasses.asdict(Limits(1.0, 2.0))}}
    assert points_of([*records, newer])[0] == Limits(1.0, 2.0)
    assert points_of([]) == (None, [])


def operation(name, cost, milliseconds=2.0):
    return MeasuredOperation(name, cost, milliseconds, 0.1)
