"""A step's timeline from traces made by hand: phases, communication, and what of it is exposed."""

import pytest

from lib.profiling.timeline import timelines
from lib.profiling.trace import Span, Trace

STEP = Span("step", 1000, 11_000, "main")
RANGES = (
    STEP,
    Span("forward", 1000, 3000, "main"),
    Span("backward", 3000, 8000, "main"),
    Span("all-reduce", 4000, 4500, "main"),
    Span("all-reduce", 8000, 10_000, "main"),
    Span("optimizer", 10_000, 11_000, "main"),
)


def on_cpu(*communication, operators=(), ranges=RANGES):
    spans = (
        Span("aten::addmm", 1000, 1500, "main"),
        # what only looks at a tensor in another way
        Span("aten::view", 1500, 2500, "main"),
        Span("autograd::engine::evaluate_function: AddmmBackward0", 3000, 6000, "main"),
        Span("aten::mm", 3100, 5900, "main"),
        Span("aten::cat", 4100, 4300, "main"),
        Span("aten::div_", 9500, 9600, "main"),
        Span("aten::sub_", 10_100, 10_900, "main"),
        *operators,
    )
    talks = tuple(Span("gloo:all_reduce", a, b, "gloo") for a, b in communication)
    ordered = sorted((*spans, *talks), key=lambda span: span.start)
    return timelines(Trace((), tuple(ordered), (), ranges, ()), "step")


def test_times_are_in_ms_from_the_start_of_the_step():
    (line,) = on_cpu()
    assert line.step_ms == 10
    assert line.backward == (2, 7)
    assert line.backward_ms == 5
    assert line.communication == line.exposed == ()


def test_work_belongs_to_the_innermost_phase():
    (line,) = on_cpu()
    compute = dict(line.compute)
    assert compute["forward"] == ((0, 0.5),)
    assert compute["backward"] == ((2.1, 4.9),)
    assert compute["copies of the wrapper"] == (
        pytest.approx((3.1, 3.3)),
        pytest.approx((8.5, 8.6)),
    )
    assert compute["update"] == (pytest.approx((9.1, 9.9)),)


def test_on_a_cpu_nodes_of_backward_hide_and_waiting_exposes():
    # 1 ms under a node; in backward, but behind the last node; then after backward, with a division
    (line,) = on_cpu((3500, 4500), (6500, 7000), (8000, 10_000))
    assert line.communication_ms == pytest.approx(3.5)
    assert line.exposed_ms == pytest.approx(0.5 + 2.0 - 0.1)
    # Python in forward hides, and collectives that overlap count once
    (line,) = on_cpu((2600, 2900), (8000, 9000), (8500, 9200))
    assert line.communication[1:] == ((7, pytest.approx(8.2)),)
    assert line.exposed_ms == pytest.approx(1.2)


def test_on_a_gpu_kernels_count_and_belong_to_where_they_were_launched():
    kernels = (
        # of the step before, still running
        Span("ampere_sgemm", 900, 1200, "gpu 7", 1),
        Span("ampere_sgemm", 2000, 9000, "gpu 7", 2),
        Span("ncclDevKernel_AllReduce", 8000, 12_000, "gpu 9", 3),
        Span("elementwise_kernel", 12_000, 12_500, "gpu 7", 4),
    )
    places = {1: 500, 2: 3500, 3: 4200, 4: 10_500}
    calls = tuple(Span("cudaLaunchKernel", t, t + 5, "main", c) for c, t in places.items())
    (line,) = timelines(Trace(kernels, (), calls, RANGES, ()), "step")
    assert line.step_ms == 11.5
    assert dict(line.compute)["backward"] == ((1, 8),)
    # as its kernels run, of which the host knows nothing
    assert line.backward == (1, 8)
    assert dict(line.compute)["update"] == ((11, 11.5),)
    assert line.exposed == ((8, 11),)


def test_each_range_gives_a_timeline_of_its_own():
    shifted = tuple(Span(s.name, s.start + 1e5, s.end + 1e5, s.lane) for s in RANGES)
    late = (Span("gloo:all_reduce", 108_000, 109_000, "gloo"),)
    first, second = on_cpu((8000, 8200), operators=late, ranges=RANGES + shifted)
    assert first.communication_ms == pytest.approx(0.2)
    assert second.communication_ms == pytest.approx(1.0)


def test_a_missing_range_is_named():
    with pytest.raises(ValueError, match="no range 'step'"):
        on_cpu(ranges=RANGES[1:])
    with pytest.raises(ValueError, match="has no range 'backward'"):
        on_cpu(ranges=(STEP,))
