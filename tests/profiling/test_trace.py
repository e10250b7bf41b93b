"""Traces read from files, categories by name, and arithmetic of intervals against a grid."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.core.figures import house_figure
from lib.profiling import trace
from lib.profiling.figures import draw_trace
from lib.profiling.trace import (
    Span,
    Trace,
    category_of,
    parse_trace,
    read_trace,
    step_events,
)


def event(category, name, start, duration, **args):
    times = {"ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 2, **times, "args": args}


EVENTS = [
    event("cpu_op", "aten::mm", 2, 3),
    event("cpu_op", "aten::matmul", 2, 4),
    event("user_annotation", "gloo:all_reduce", 1, 9),
    event("user_annotation", "step", 0, 20),
    event("cuda_runtime", "cudaLaunchKernel", 3, 1, correlation=7),
    event("kernel", "sgemm", 12, 5, correlation=7),
    event("gpu_memset", "Memset", 11, 1),
    event("python_function", "not ours", 0, 1),
    {"ph": "s", "cat": "fwdbwd", "id": 4, "ts": 2},
    {"ph": "f", "cat": "fwdbwd", "id": 4, "ts": 15},
    {"ph": "s", "cat": "fwdbwd", "id": 5, "ts": 3},
]
READ = Trace(
    kernels=(Span("Memset", 11, 12, "1/2"), Span("sgemm", 12, 17, "1/2", 7)),
    # gloo's work is an operator's, and of two that start together the outer one comes first
    operators=(
        Span("gloo:all_reduce", 1, 10, "1/2"),
        Span("aten::matmul", 2, 6, "1/2"),
        Span("aten::mm", 2, 5, "1/2"),
    ),
    calls=(Span("cudaLaunchKernel", 3, 4, "1/2", 7),),
    ranges=(Span("step", 0, 20, "1/2"),),
    backward_of=((2, 15),),
)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_trace_is_read_compressed_or_not(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    data = json.dumps({"traceEvents": EVENTS}).encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    assert read_trace(path) == READ


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"events": []}', b'{"traceEvents": [1]}'])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_file_that_is_no_trace_is_named(tmp_path, content, suffix):
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name} must be a trace"):
        read_trace(path)


# two steps of a GPU that lags behind the host: a kernel of the first runs during the second
LAGGING = [
    event("user_annotation", "training step", 0, 10),
    event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=1),
    event("kernel", "sgemm", 9, 15, correlation=1),
    event("user_annotation", "training step", 20, 30),
    event("user_annotation", "forward", 21, 9),
    event("user_annotation", "forward", 31, 9),
    event("cpu_op", "aten::mm", 21, 3),
    event("cuda_runtime", "cudaLaunchKernel", 22, 1, correlation=2),
    event("cuda_runtime", "cudaDeviceSynchronize", 40, 8, correlation=3),
    event("kernel", "sgemm", 60, 5, correlation=2),
]


def test_a_step_is_cut_out_with_the_kernels_that_it_launched():
    step = parse_trace(step_events(LAGGING, "training step"))
    # and the one of the step before, which still runs when this one begins
    assert [(span.name, span.start) for span in step.kernels] == [("sgemm", -11), ("sgemm", 40)]
    assert [(span.name, span.start) for span in step.calls] == [
        ("cudaLaunchKernel", 2),
        ("cudaDeviceSynchronize", 20),
    ]
    assert [span.start for span in step.ranges] == [0, 1, 11]
    # operators only where there are no kernels
    assert not step.operators
    on_cpu = [e for e in LAGGING if e["cat"] not in ("kernel", "cuda_runtime")]
    assert len(parse_trace(step_events(on_cpu, "training step")).operators) == 1
    with pytest.raises(ValueError, match="no range 'another'"):
        step_events(LAGGING, "another")


def test_a_timeline_has_a_lane_for_code_what_is_inside_host_and_device():
    events = step_events([*LAGGING, event("user_annotation", "loss", 25, 4)], "training step")
    with house_figure() as (_, axes):
        draw_trace(axes, parse_trace(events), title="")
        lanes = [label.get_text() for label in axes.get_yticklabels()]
        boxes = [path.get_extents() for c in axes.collections for path in c.get_paths()]
        edges = sorted((round(box.x0, 4), round(box.x1, 4)) for box in boxes)
        assert [text.get_text() for text in axes.texts] == ["forward", "forward", "loss"]
        assert "launched before this step" in axes.get_legend_handles_labels()[1]
    assert lanes == ["code", "inside", "host launches", "GPU"]
    # a kernel of the step before, forward, a launch, the loss, forward, a wait, a kernel, in ms
    assert edges == [
        *((-0.011, 0.004), (0.001, 0.01), (0.002, 0.003), (0.005, 0.009)),
        *((0.011, 0.02), (0.02, 0.028), (0.04, 0.045)),
    ]


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("_backward_queries_kernel", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor>", "elementwise"),
        ("triton_poi_fused_mul_silu_3", "elementwise"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_clone_2", "elementwise"),
        ("triton_tem_fused_mm_1", "matmul"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<long>", "elementwise"),
        ("triton_red_fused__to_copy_mean_pow_0", "elementwise"),
        ("adamw_kernel", "elementwise"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("Memset (Device)", "copy"),
        ("aten::addmm", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_softmax", "elementwise"),
        ("aten::as_strided", "other"),
        ("aten::copy_", "copy"),
        ("c10d::allreduce_", "other"),
        ("gloo:all_reduce", "communication"),
        ("autograd::engine::evaluate_function: MmBackward0", "other"),
    ],
)
def test_a_name_means_a_category(name, category):
    assert category_of(name) == category


SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: tuple(sorted(pair))),
    max_size=12,
)
GRID = np.arange(31) + 0.5


def on_grid(spans) -> np.ndarray:
    """Which of the unit cells 0 … 30 the spans cover."""
    cells = np.zeros(len(GRID), dtype=bool)
    for start, end in spans:
        cells |= (start < GRID) & (end > GRID)
    return cells


@given(SPANS, SPANS)
def test_sets_of_intervals_agree_with_a_grid(first, second):
    a, b = trace.union(first), trace.union(second)
    in_first, in_second = on_grid(first), on_grid(second)
    expected = [
        (a, in_first),
        (trace.intersection(a, b), in_first & in_second),
        (trace.difference(a, b), in_first & ~in_second),
    ]
    for found, covered in expected:
        # disjoint, ascending, none empty
        assert found.shape[1:] == (2,)
        assert (np.diff(found.ravel()) > 0).all()
        assert (on_grid(found) == covered).all()
    assert trace.total(a) == in_first.sum()
    assert (trace.contains(a, GRID) == in_first).all()


def test_a_start_is_inside_and_an_end_is_not():
    inside = trace.contains(trace.union([(1, 2)]), np.array([0.9, 1, 1.9, 2]))
    assert inside.tolist() == [False, True, True, False]
