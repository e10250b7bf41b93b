"""Traces read from files, categories by name, and arithmetic of intervals against a grid."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.profiling import trace
from lib.profiling.trace import Span, Trace, category_of, launch_times, read_trace


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


def test_a_kernel_is_launched_by_the_call_of_its_correlation():
    # the Memset has none
    assert launch_times(READ.kernels, READ.calls) == [11, 3]


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
        (trace.gaps(a, 5, 20), on_grid([(5, 20)]) & ~in_first),
    ]
    for found, covered in expected:
        # disjoint, ascending, none empty
        assert found.shape[1:] == (2,)
        assert (np.diff(found.ravel()) > 0).all()
        assert (on_grid(found) == covered).all()
    assert trace.total(a) == in_first.sum()
    assert (trace.contains(a, GRID) == in_first).all()


def test_a_start_is_inside_and_an_end_is_not():
    assert trace.contains(trace.union([(1, 2)]), np.array([0.9, 1, 1.9, 2])).tolist() == [
        False,
        True,
        True,
        False,
    ]
