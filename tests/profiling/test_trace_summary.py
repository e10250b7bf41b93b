"""Summaries of hand-made traces whose answers are counted by hand."""

import json

import pytest

from lib.profiling.profiler import figures_of, summary_markdown
from lib.profiling.trace import CATEGORIES, parse_trace
from lib.profiling.trace_summary import summarize


def event(category, name, start, end, *, lane=1, **args):
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": lane, **times, "args": args}


def launch(correlation, start):
    return event("cuda_runtime", "cudaLaunchKernel", start, start + 2, correlation=correlation)


def kernel(name, correlation, start, end, stream=7):
    return event("kernel", name, start, end, lane=stream, correlation=correlation)


def gradient_link(number, forward, backward):
    same = {"cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 0, "tid": 1}
    return [{"ph": "s", "ts": forward, **same}, {"ph": "f", "ts": backward, **same}]


# µs 0    10        30        40        50        60        70        80        90
#         |- gemm --|-softmax-|         |------ gemm -------|         |- copy --|
#                             |--- all-reduce ---|
GPU_STEP = [
    event("user_annotation", "training step", 0, 62),
    event("user_annotation", "attention", 20, 30),
    launch(1, 5),
    launch(2, 22),
    launch(3, 35),
    launch(4, 40),
    event("cuda_runtime", "cudaMemcpyAsync", 44, 46, correlation=5),
    event("cuda_runtime", "cudaStreamSynchronize", 50, 60),
    kernel("sm90_xmma_gemm_bf16", 1, 10, 30),
    kernel("vectorized_elementwise_kernel", 2, 30, 40),
    kernel("ncclDevKernel_AllReduce_Sum", 3, 40, 60, stream=8),
    kernel("sm90_xmma_gemm_bf16", 4, 50, 70),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 80, 90, lane=7, correlation=5),
]


def by_category(summary):
    return {row.category: round(row.ms * 1e3, 6) for row in summary.by_category if row.calls}


def test_a_gpu_step_is_busy_idle_and_dispatched_as_drawn():
    summary = summarize(parse_trace(GPU_STEP))
    assert summary.device == "gpu"
    assert summary.steps == 1
    assert summary.wall_ms == pytest.approx(0.090)
    assert summary.busy_ms == pytest.approx(0.070)
    assert summary.idle_ms == pytest.approx(0.020)
    assert summary.dispatch_ms == pytest.approx(0.052)
    assert summary.wait_ms == pytest.approx(0.010)
    assert (summary.kernels, summary.launches) == (5, 4)
    # half of the communication is behind the matmul
    assert summary.communication_ms == pytest.approx(0.020)
    assert summary.exposed_communication_ms == pytest.approx(0.010)
    assert summary.overlapped_communication_ms == pytest.approx(0.010)


def test_kernels_are_added_up_by_name_and_category():
    summary = summarize(parse_trace(GPU_STEP))
    # what was launched in attention is attention
    times = {"matmul": 40, "attention": 10, "communication": 20, "copy": 10}
    assert by_category(summary) == times
    shares = {row.category: row.share for row in summary.by_category}
    assert shares["matmul"] == pytest.approx(0.5)
    assert sum(shares.values()) == pytest.approx(1)
    assert tuple(shares) == CATEGORIES
    top = summary.by_kernel[0]
    assert (top.name, top.calls) == ("sm90_xmma_gemm_bf16", 2)
    assert (top.ms, top.share) == (pytest.approx(0.040), pytest.approx(0.5))


def test_gaps_are_counted_by_their_length():
    gaps = [event("user_annotation", "training step", 0, 2000), launch(1, 0), launch(2, 0)]
    gaps += [launch(3, 0), kernel("k", 1, 0, 1), kernel("k", 2, 6, 7), kernel("k", 3, 500, 501)]
    summary = summarize(parse_trace(gaps))
    # from 1 to 6, from 7 to 500, from 501 to 2,000
    counts = {row.shortest_us: (row.count, round(row.ms * 1e3)) for row in summary.gaps}
    assert counts == {0: (1, 5), 10: (0, 0), 100: (1, 493), 1000: (1, 1499), 10_000: (0, 0)}
    assert sum(row.ms for row in summary.gaps) == pytest.approx(summary.idle_ms)


def test_everything_is_per_step_and_what_is_outside_steps_is_left_out():
    events = [launch(9, 0), kernel("early", 9, 0, 9)]
    for number, start in enumerate((100, 200), start=1):
        events.append(event("user_annotation", "training step", start, start + 50))
        events += [launch(number, start + 1), kernel("k_kernel", number, start + 10, start + 30)]
    # launched behind the last step
    events += [launch(5, 260), kernel("late", 5, 270, 290)]
    summary = summarize(parse_trace(events))
    assert summary.steps == 2
    assert [row.name for row in summary.by_kernel] == ["k_kernel"]
    assert (summary.kernels, summary.launches) == (1, 1)
    assert summary.wall_ms == pytest.approx(0.075)
    assert summary.by_kernel[0].ms == pytest.approx(0.020)


def test_a_cuda_graph_is_one_launch_of_many_kernels():
    call = event("cuda_runtime", "cudaGraphLaunch", 5, 8, correlation=1)
    kernels = [kernel(f"k{i}_kernel", 1, 10 + 10 * i, 18 + 10 * i) for i in range(4)]
    step = event("user_annotation", "training step", 0, 9)
    summary = summarize(parse_trace([step, call, *kernels]))
    assert (summary.kernels, summary.launches) == (4, 1)
    assert summary.busy_ms == pytest.approx(0.032)
    ranges = {row.name: row.device_ms for row in summary.by_range}
    assert ranges == {"training step": pytest.approx(0.032)}


def test_a_kernel_that_runs_when_the_first_step_starts_counts_from_there_on():
    events = [
        launch(1, 80),
        # 0.02 ms before the step, 0.03 in it
        kernel("early_kernel", 1, 80, 130),
        # launched before the step too, and run in it
        launch(2, 85),
        kernel("queued_kernel", 2, 130, 140),
        event("user_annotation", "training step", 100, 200),
        event("user_annotation", "attention", 100, 150),
        launch(3, 150),
        kernel("own_kernel", 3, 160, 180),
        # over before
        kernel("over_kernel", 9, 60, 100, stream=8),
    ]
    summary = summarize(parse_trace(events))
    assert summary.wall_ms == pytest.approx(0.100)
    assert (summary.busy_ms, summary.idle_ms) == (pytest.approx(0.060), pytest.approx(0.040))
    rows = {row.name: row.ms for row in summary.by_kernel}
    assert rows == {
        "early_kernel": pytest.approx(0.030),
        "own_kernel": pytest.approx(0.020),
        "queued_kernel": pytest.approx(0.010),
    }
    # neither was launched in a range of the step
    assert by_category(summary) == {"elementwise": pytest.approx(60)}
    ranges = {row.name: row.device_ms for row in summary.by_range}
    assert ranges == {"training step": pytest.approx(0.020), "attention": 0}
    assert summary.launches == 1


CPU_STEP = [
    event("user_annotation", "ProfilerStep#3", 0, 100),
    event("cpu_op", "aten::matmul", 0, 10),
    event("cpu_op", "aten::mm", 2, 8),
    event("user_annotation", "attention", 20, 40),
    event("cpu_op", "aten::bmm", 22, 32),
    event("user_annotation", "block 0", 15, 45),
    event("user_annotation", "block 1", 45, 46),
    event("cpu_op", "autograd::engine::evaluate_function: BmmBackward0", 60, 80),
    event("cpu_op", "aten::bmm", 62, 72),
    event("cpu_op", "aten::bmm", 85, 90),
    *gradient_link(1, 22, 60),
]


def test_an_operator_counts_without_those_it_calls():
    summary = summarize(parse_trace(CPU_STEP))
    assert summary.device == "cpu"
    rows = {(row.name, row.category): row.ms * 1e3 for row in summary.by_kernel}
    assert rows["aten::matmul", "other"] == pytest.approx(4)
    assert rows["aten::mm", "matmul"] == pytest.approx(6)
    assert sum(rows.values()) == pytest.approx(summary.busy_ms * 1e3) == pytest.approx(45)


LINEAR = [
    event("cpu_op", "aten::linear", 0, 20),
    event("cpu_op", "aten::t", 1, 3),
    event("cpu_op", "aten::transpose", 2, 3),
    event("cpu_op", "aten::addmm", 5, 19),
    event("cpu_op", "aten::mean", 30, 40),
    event("cpu_op", "aten::sum", 31, 37),
    event("cpu_op", "aten::div_", 37, 39),
    # in another thread, at the time of the linear layer
    event("cpu_op", "aten::mm", 6, 9, lane=2),
]


@pytest.mark.parametrize("around", ["attention", "block 0"])
def test_operators_of_one_category_that_call_one_another_count_once(around):
    events = [event("user_annotation", around, 0, 25), *LINEAR]
    summary = summarize(parse_trace(events))
    calls = {row.category: row.calls for row in summary.by_category}
    products = "attention" if around == "attention" else "matmul"
    assert calls[products] == 2
    assert calls["elementwise"] == 2
    assert summary.kernels == sum(calls.values()) - calls["other"] == 4
    # all of their time counts, and each operator stands in the list
    times = {row.category: row.ms for row in summary.by_category}
    assert times["elementwise"] == pytest.approx(0.010)
    # and that of the other thread is not taken off
    assert sum(times.values()) == pytest.approx(0.033)
    assert {row.name: row.calls for row in summary.by_kernel}["aten::linear"] == 1


def test_the_gradients_of_attention_are_attention_and_ranges_of_one_kind_are_added_up():
    summary = summarize(parse_trace(CPU_STEP))
    rows = {(row.name, row.category): row.ms for row in summary.by_kernel}
    # ten forward, ten in the gradient's node; the last product is another's
    assert rows["aten::bmm", "attention"] == pytest.approx(0.020)
    assert rows["aten::bmm", "matmul"] == pytest.approx(0.005)
    row = next(row for row in summary.by_range if row.name == "block")
    assert (row.calls, row.host_ms, row.device_ms) == (2, pytest.approx(0.031), None)


def test_communication_on_a_cpu_is_exposed_where_no_operator_works():
    events = [
        event("cpu_op", "c10d::allreduce_", 0, 3),
        event("user_annotation", "gloo:all_reduce", 0, 20, lane=2),
        event("cpu_op", "aten::mm", 15, 30),
        event("cpu_op", "aten::view", 2, 5),
    ]
    summary = summarize(parse_trace(events))
    assert summary.communication_ms == pytest.approx(0.020)
    assert summary.exposed_communication_ms == pytest.approx(0.015)


def test_a_trace_without_work_is_refused():
    step = event("user_annotation", "training step", 0, 1)
    for events in ([], [step]):
        with pytest.raises(ValueError, match="no kernels and no operators"):
            summarize(parse_trace(events))


def test_figures_are_plain_json_and_the_tables_hold_them():
    summary = summarize(parse_trace(GPU_STEP))
    memory = {"parameters": 4_000_000, "other": 1_000_000}
    figures = figures_of(summary, memory)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["peak_memory_bytes"] == 5_000_000
    text = summary_markdown(summary, memory)
    assert "| … behind other kernels |   50.0 | %    |" in text
    assert "| sm90_xmma_gemm_bf16" in text
    assert "| in all     | 5.00 |" in text
