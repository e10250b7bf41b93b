"""Costs of a block against PyTorch's count and against its tensors; the roof; records; figure."""

import dataclasses
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lib import plots, roofline
from lib.config_training import ModelConfig
from lib.hardware import pick_device
from lib.model_costs import flops_by_part
from lib.plots_roofline import draw_roofline
from lib.report import read_records
from lib.roofline import (
    Cost,
    Limits,
    Point,
    block_costs,
    block_functions,
    measure_block,
    measure_call,
    measure_limits,
    points_of,
    predicted_ms,
    product_cost,
    write_records,
)

CPU = torch.device("cpu")
SHAPE = ModelConfig(
    vocab_size=64, context_length=16, d_model=32, num_layers=2, num_heads=4, d_ff=48
)
SIZES = (SHAPE, 3, 16)
LIMITS = Limits(flops_per_s=1e12, bytes_per_s=1e11)
PRODUCTS = [
    "q, k, v projection",
    "scores",
    "value product",
    "output projection",
    "gate and value",
    "down projection",
]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Measurements of one short sample each, on a small buffer for the cache."""
    monkeypatch.setattr("lib.benchmark.CPU_CACHE_BYTES", 1 << 16)


def functions():
    return block_functions(*SIZES, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_a_product_are_those_that_pytorch_counts(name):
    with FlopCounterMode(display=False) as counter:
        functions()[name]()
    assert block_costs(*SIZES)[name].flops == counter.get_total_flops()


def test_the_products_of_a_block_are_the_flops_of_the_model():
    costs = block_costs(*SIZES)
    parts = flops_by_part(SHAPE)
    expected = (parts["projections"] + parts["attention"] + parts["feed_forward"]) * 3 * 16
    assert SHAPE.num_layers * sum(costs[name].flops for name in PRODUCTS) == expected


def test_fused_attention_does_the_flops_of_its_parts_and_moves_less():
    costs = block_costs(*SIZES)
    parts = [costs["scores"], costs["value product"]]
    assert costs["attention, fused"].flops == sum(part.flops for part in parts)
    assert costs["attention, fused"].num_bytes < sum(part.num_bytes for part in parts)


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


def test_costs_and_functions_are_of_the_same_operations():
    assert functions().keys() == block_costs(*SIZES).keys()


def test_intensity_of_a_square_product_grows_with_its_size():
    # 2 n³ / (3 n² e)
    assert product_cost(300, 300, 300, 4).intensity == pytest.approx(50)
    assert product_cost(300, 300, 300, 2).intensity == pytest.approx(100)
    assert product_cost(300, 300, 300, 4, batch=7).intensity == pytest.approx(50)


def test_the_roof_is_the_lower_of_its_two_parts_and_they_meet_at_the_ridge():
    assert LIMITS.ridge == 10
    assert LIMITS.attainable(1) == 1e11
    assert LIMITS.attainable(100) == 1e12
    assert LIMITS.attainable(LIMITS.ridge) == pytest.approx(LIMITS.flops_per_s)


def test_the_least_time_is_that_of_the_slower_part():
    assert LIMITS.least_ms(Cost(flops=10**9, num_bytes=1)) == pytest.approx(1)
    assert LIMITS.least_ms(Cost(flops=1, num_bytes=10**8)) == pytest.approx(1)


def test_every_operation_is_measured_with_its_cost():
    points = measure_block(*SIZES, device=CPU, dtype=torch.float32, samples=1)
    assert {point.name: point.cost for point in points} == block_costs(*SIZES)
    assert all(point.flops_per_s > 0 for point in points)


def test_an_operation_without_memory_is_left_out(monkeypatch):
    def fails():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(
        roofline, "block_functions", lambda *args, **kw: {"scores": fails, "RMSNorm": lambda: None}
    )
    points = measure_block(*SIZES, device=CPU, dtype=torch.float32, samples=1)
    assert [point.name for point in points] == ["RMSNorm"]


def test_limits_are_those_of_the_best_product(monkeypatch):
    times = iter([[8.0, 4.0], [2.0], [1.0, 5.0]])
    monkeypatch.setattr(
        roofline,
        "measure",
        lambda fn, **settings: type("Found", (), {"times_ms": next(times)}),
    )
    limits = measure_limits(CPU, torch.float32, sizes=(100, 200), copied_bytes=10**6)
    # 2 · 200³ in 2 ms, 2 MB in 1 ms
    assert limits == Limits(8e9, 2e9)


def test_more_of_anything_takes_longer_by_prediction():
    base = predicted_ms(*SIZES, LIMITS)
    assert predicted_ms(SHAPE, 6, 16, LIMITS) > base
    assert predicted_ms(SHAPE, 3, 32, LIMITS) > base
    assert predicted_ms(dataclasses.replace(SHAPE, num_layers=4), 3, 16, LIMITS) > base
    assert predicted_ms(*SIZES, LIMITS, element_bytes=2) < base


def test_the_host_counts_beside_a_cpu_and_hides_behind_a_gpu():
    base = predicted_ms(*SIZES, LIMITS)
    assert predicted_ms(*SIZES, LIMITS, dispatch_ms=5.0) == pytest.approx(base + 5)
    assert predicted_ms(*SIZES, LIMITS, dispatch_ms=base / 2, runs_ahead=True) == base
    assert predicted_ms(*SIZES, LIMITS, dispatch_ms=5.0, runs_ahead=True) == 5


def test_a_large_model_is_predicted_near_its_flops():
    shape = ModelConfig(vocab_size=1000, d_model=4096, num_layers=2, num_heads=32, d_ff=16384)
    # a machine whose memory is never the limit
    limits = Limits(1e12, 1e30)
    flops = 3 * 8 * 256 * sum(flops_by_part(shape).values())
    assert predicted_ms(shape, 8, 256, limits) == pytest.approx(flops / 1e9, rel=0.01)


def test_a_call_on_a_cpu_returns_when_it_is_done():
    a = torch.randn(200, 200)
    returned, done = measure_call(lambda: a @ a, CPU, samples=5)
    assert 0 < returned <= done


def test_records_give_limits_and_points_back(tmp_path, monkeypatch):
    monkeypatch.setattr(roofline, "measure_limits", lambda *args: LIMITS)
    monkeypatch.setattr(roofline, "model_preset", lambda name: SHAPE)
    monkeypatch.setattr(roofline, "measure_sizes", lambda *args: [{"numbers": 4, "median_ms": 1.0}])
    monkeypatch.setattr(roofline, "measure_call", lambda *args: (0.1, 2.0))
    settings = {"batch_size": 1, "context_length": 8, "dtype": "float32", "device": "cpu"}
    path = tmp_path / "roofline.jsonl"
    write_records(path, **settings)
    records = read_records(path)
    tasks = {record["figures"]["task"] for record in records}
    assert tasks == {"limits", "operation", "call", "size"}
    assert records[0]["config"]["context_length"] == 8
    limits, points = points_of(records)
    assert limits == LIMITS
    assert {point.name: point.cost for point in points} == block_costs(SHAPE, 1, 8)


def test_no_records_are_no_points():
    assert points_of([]) == (None, [])


def test_the_device_must_be_there(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("has one")
    with pytest.raises(ValueError, match="device is 'cuda'"):
        write_records(tmp_path / "roofline.jsonl")
    assert pick_device("cpu") == CPU


def test_the_figure_numbers_its_points_and_says_what_they_are(tmp_path):
    points = [Point("scores", Cost(10**9, 10**8), 2.0, 0.1), Point("RMSNorm", Cost(4, 8), 1.0, 0.1)]
    with plots.house_figure() as (figure, axes):
        draw_roofline(axes, LIMITS, points, title="A block")
        names = axes.get_legend_handles_labels()[1]
        assert names == ["1 scores", "2 RMSNorm"]
        low, high = axes.get_xlim()
        assert low < 0.5 < LIMITS.ridge < high
        assert axes.get_ylabel() == "performance (GFLOP/s)"
        assert plots.save_figure(figure, tmp_path / "roofline.png").exists()


def test_numbers_of_points_in_one_place_stay_apart():
    points = [Point("scores", Cost(10**9, 10**8), 2.0, 0.1) for _ in range(4)]
    with plots.house_figure() as (figure, axes):
        draw_roofline(axes, LIMITS, points, title="A block")
        figure.canvas.draw()
        numbers = [text for text in axes.texts if text.get_text().isdigit()]
        boxes = [text.get_window_extent() for text in numbers]
    assert len(boxes) == 4
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_numbers_stand_off_the_roof_and_far_ones_have_a_line_to_their_point():
    # all at the roof, beside one another
    cost = Cost(10**9, 10**5)
    least = LIMITS.least_ms(cost)
    points = [Point("down projection", cost, least * (1 + i / 50), 0.1) for i in range(6)]
    with plots.house_figure() as (figure, axes):
        draw_roofline(axes, LIMITS, points, title="A block")
        figure.canvas.draw()
        numbers = [text for text in axes.texts if text.get_text().isdigit()]
        middles = [np.mean(text.get_window_extent().get_points(), axis=0) for text in numbers]
        roof = axes.transData.transform(axes.lines[0].get_xydata())
        for text, middle in zip(numbers, middles):
            assert np.linalg.norm(roof - middle, axis=1).min() > 8
            is_far = np.linalg.norm(text.xyann) > 13
            assert (text.arrow_patch is not None) == is_far
        assert any(text.arrow_patch is not None for text in numbers)


def test_a_fast_machine_is_drawn_in_tflops():
    with plots.house_figure() as (_, axes):
        draw_roofline(axes, Limits(1e15, 4e12), [], title="A machine")
        assert axes.get_ylabel() == "performance (TFLOP/s)"
        assert max(axes.lines[0].get_ydata()) == pytest.approx(1e3)


def test_the_best_time_of_a_size_is_no_longer_than_the_median():
    (row,) = roofline.measure_sizes([16], CPU, samples=5)
    assert 0 < row["min_ms"] <= row["median_ms"]


def test_the_figure_of_limits_alone_has_a_roof():
    with plots.house_figure() as (_, axes):
        draw_roofline(axes, LIMITS, [], title="A machine")
        assert max(axes.lines[0].get_ydata()) == pytest.approx(1e3)
    assert not plt.get_fignums()
