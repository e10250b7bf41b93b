"""A step's timeline from traces made by hand: phases, communication, and what of it is exposed."""

import pytest

from lib.profiling.timeline import step_timeline
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


def line_of(kernels=(), calls=(), ranges=RANGES):
    return step_timeline(Trace(tuple(kernels), (), tuple(calls), ranges, ()), "step")


def test_kernels_count_and_belong_to_the_innermost_phase_in_which_they_were_launched():
    kernels = (
        # of the step before, still running
        Span("ampere_sgemm", 900, 1200, "gpu 7", 1),
        Span("ampere_sgemm", 2000, 9000, "gpu 7", 2),
        Span("ncclDevKernel_AllReduce", 8000, 12_000, "gpu 9", 3),
        Span("elementwise_kernel", 12_000, 12_500, "gpu 7", 4),
        Span("elementwise_kernel", 12_500, 12_600, "gpu 7", 5),
    )
    places = {1: 500, 2: 3500, 3: 4200, 4: 10_500, 5: 4300}
    calls = [Span("cudaLaunchKernel", t, t + 5, "main", c) for c, t in places.items()]
    line = line_of(kernels, calls)
    assert line.step_ms == 11.6
    assert dict(line.compute)["backward"] == ((1, 8),)
    # as its kernels run, of which the host knows nothing
    assert line.backward == (1, 8)
    assert line.backward_ms == 7
    assert dict(line.compute)["update"] == ((11, 11.5),)
    assert dict(line.compute)["copies of the wrapper"] == ((11.5, 11.6),)
    assert line.communication == ((7, 11),)
    assert line.exposed == ((8, 11),)
    assert (line.communication_ms, line.exposed_ms) == (4, 3)


def on_cpu(*communication):
    operators = (
        Span("aten::addmm", 1000, 1500, "main"),
        # what only looks at a tensor in another way
        Span("aten::view", 1500, 2500, "main"),
        Span("autograd::engine::evaluate_function: AddmmBackward0", 3000, 6000, "main"),
        Span("c10d::allreduce_", 3050, 3060, "main"),
        Span("aten::mm", 3100, 5900, "main"),
        Span("aten::cat", 4100, 4300, "main"),
        Span("aten::div_", 9500, 9600, "main"),
        Span("aten::sub_", 10_100, 10_900, "main"),
        *(Span("gloo:all_reduce", start, end, "gloo") for start, end in communication),
    )
    return step_timeline(Trace((), operators, (), RANGES, ()), "step")


def test_on_a_cpu_operators_stand_for_kernels():
    line = on_cpu()
    assert line.step_ms == 10
    assert line.communication == line.exposed == ()
    compute = dict(line.compute)
    assert compute["forward"] == ((0, 0.5),)
    assert compute["backward"] == ((2.1, 4.9),)
    assert line.backward == (2.1, 4.9)
    assert compute["copies of the wrapper"] == ((3.1, 3.3), (8.5, 8.6))
    assert compute["update"] == ((9.1, 9.9),)


def test_on_a_cpu_operators_hide_communication_and_waiting_exposes_it():
    # 1 ms under an operator; behind the last one of backward; then with a division in it
    line = on_cpu((3500, 4500), (6500, 7000), (8000, 10_000))
    assert line.communication_ms == pytest.approx(3.5)
    assert line.exposed_ms == pytest.approx(0.5 + 2.0 - 0.1)
    line = on_cpu((8000, 9000), (8500, 9200))
    assert line.communication == ((7, pytest.approx(8.2)),)


def test_a_missing_range_is_named():
    with pytest.raises(ValueError, match="no range 'step'"):
        line_of(ranges=RANGES[1:])
    with pytest.raises(ValueError, match="has no kernels of a range 'backward'"):
        line_of()
