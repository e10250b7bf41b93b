"""The attention benchmark: cases, FLOPs, statuses, and what is measured again."""

import dataclasses
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import lib.tools.benchmarks.attention as benchmark
from lib.core.allocator import free_memory
from lib.core.records import read_records
from lib.tools.benchmarks.attention import (
    HOLD_SCORES,
    HOST_BOUND,
    SWEEP_KERNELS,
    AttentionBenchmarkConfig,
    attention_cases,
    benchmark_attention,
    error_of_rows,
    flops,
    groups,
    make_inputs,
)
from lib.tools.benchmarks.attention_report import attention_rows
from lib.tools.benchmarks.sweep import Case

pytestmark = pytest.mark.usefixtures("one_core")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = Case(
    queries=40,
    keys=24,
    head_dim=16,
    is_causal=True,
    direction="forward",
    dtype="float32",
    batch_size=2,
    heads=2,
    kernels=["flash_attention_torch", "vectorized_torch"],
    warmup=1,
    samples=2,
    max_seconds=1.0,
    in_graph=False,
)


def case_with(**changes) -> Case:
    """CASE with other settings."""
    return Case(**vars(CASE) | changes)


def measure_case(case, device):
    return benchmark.measure_case(case, AttentionBenchmarkConfig(), device)


@pytest.fixture
def gpu_with_bfloat16(monkeypatch):
    """Choices are made as on a Hopper chip; nothing runs there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_cases_are_all_combinations_with_both_directions_together():
    config = AttentionBenchmarkConfig(
        custom_tiers=("32:32", "16:64"), head_dims=(16, 32), backward=True, batch_size=3, heads=5
    )
    cases = attention_cases(config, CPU)
    assert len(cases) == 2 * 2 * 2 * 2
    for forward, backward in zip(cases[::2], cases[1::2]):
        assert Case(**vars(backward) | {"direction": "forward"}) == forward
    assert {(case.queries, case.keys) for case in cases} == {(32, 32), (16, 64)}
    assert {(case.batch_size, case.heads) for case in cases} == {(3, 5)}
    # by default the kernels that a CPU runs
    assert "flash_attention_triton" not in cases[0].kernels
    assert {"flash_attention_torch", "vectorized_torch_compiled", "sdpa"} < set(cases[0].kernels)


def test_all_lengths_have_the_same_tokens_times_width(gpu_with_bfloat16):
    cases = attention_cases(AttentionBenchmarkConfig(), CUDA)
    lengths = {(case.queries, case.keys) for case in cases}
    assert lengths >= {(128, 128), (32768, 32768), (1024, 16384), (16384, 1024)}
    for case in cases:
        longest = max(case.queries, case.keys)
        assert case.batch_size * case.heads * case.head_dim * longest == 16384 * 2048
        assert (case.dtype, case.in_graph) == ("bfloat16", False)
        # FlashAttention-4 if it is installed
        assert {*SWEEP_KERNELS} - {*case.kernels} in (set(), {"fa4", "fa4_deterministic"})


@pytest.mark.parametrize("sizes", [(6, 6), (3, 7), (7, 3), (1, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_flops_count_the_visible_pairs(sizes, is_causal):
    case = case_with(queries=sizes[0], keys=sizes[1], is_causal=is_causal)
    pairs = sum(
        not is_causal or key <= query for query in range(sizes[0]) for key in range(sizes[1])
    )
    if is_causal and case.queries == case.keys:
        # half of the square, as is customary, without half of the diagonal
        pairs -= sizes[0] / 2
    assert flops(case) == 4 * 16 * 2 * 2 * pairs
    assert flops(Case(**vars(case) | {"direction": "backward"})) == 2.5 * flops(case)


def test_each_case_has_a_record_with_figures_of_each_kernel(tmp_path):
    config = AttentionBenchmarkConfig(
        kernels=("scaled_dot_prod_attention", *CASE.kernels, "sdpa", "sdpa_cudnn"),
        custom_tiers=("32:32", "16:64"),
        backward=True,
        batch_size=1,
        heads=2,
        head_dims=(16,),
        warmup=1,
        samples=2,
        device="cpu",
        output=tmp_path,
    )
    records = benchmark_attention(config)
    assert read_records(tmp_path / "attention_sweep.jsonl") == records
    assert len(records) == 2 * 2 * 2
    for record in records:
        case, kernels = Case(**record["config"]), record["figures"]["kernels"]
        assert list(kernels) == list(config.kernels)
        assert record["figures"]["flops"] == flops(case)
        # cuDNN needs a GPU
        *others, refused = kernels.values()
        assert (refused["status"], bool(refused["reason"])) == ("unsupported", True)
        for row in others:
            assert row["status"] == "ok"
            assert row["samples"] == len(row["times_ms"]) == 2
            assert row["tflops"] == pytest.approx(flops(case) / row["median_ms"] / 1e9)
            assert row["error"] < 1e-5

    # memory with gradients is that of both passes
    rows = attention_rows(records)
    memory = {(r["case"], r["kernel"]): r["peak_memory_bytes"] for r in rows if r["median_ms"]}
    backward = [key for key in memory if key[0].startswith("backward")]
    assert len(backward) == 4 * 4
    for case, kernel in backward:
        assert memory[case, kernel] > memory[case.replace("backward", "forward"), kernel] > 0

    # a second run measures nothing
    failing = dataclasses.replace(benchmark_attention, measure=lambda *_: pytest.fail("measured"))
    assert failing(config) == records
    assert len(read_records(tmp_path / "attention_sweep.jsonl")) == len(records)


def spoil(monkeypatch, name: str, spoiled):
    """Replace the kernel called `name` by `spoiled`."""
    whole = benchmark.attention

    def attention(q, k, v, *, kernel, is_causal):
        if kernel == name:
            return spoiled(q, k, v)
        return whole(q, k, v, kernel=kernel, is_causal=is_causal)

    monkeypatch.setattr(benchmark, "attention", attention)


def failing(error: Exception):
    """A kernel that raises `error`."""

    def fails(*_):
        raise error

    return fails


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernel_out_of_memory_leaves_others_unaffected_and_a_fault_of_ours_is_raised(
    monkeypatch, direction
):
    spoil(monkeypatch, "vectorized_torch", failing(torch.OutOfMemoryError("out of memory")))
    rows = measure_case(case_with(direction=direction), CPU)["kernels"]
    assert rows["vectorized_torch"] == {"status": "oom"}
    assert rows["flash_attention_torch"]["status"] == "ok"
    spoil(monkeypatch, "flash_attention_torch", failing(RuntimeError("shared memory")))
    with pytest.raises(RuntimeError, match="shared memory"):
        measure_case(case_with(direction=direction), CPU)


@pytest.mark.parametrize("sizes", [(40, 24), (24, 40)], ids=str)
def test_a_mask_aligned_at_the_last_key_is_wrong_and_has_no_time(monkeypatch, sizes):
    def spoiled(q, k, v):
        mask = torch.ones(*sizes, dtype=torch.bool).tril(sizes[1] - sizes[0])
        return F.scaled_dot_product_attention(q, k, v, mask)

    spoil(monkeypatch, "vectorized_torch", spoiled)
    case = case_with(queries=sizes[0], keys=sizes[1])
    rows = measure_case(case, CPU)["kernels"]
    assert rows["vectorized_torch"]["status"] == "wrong"
    assert "median_ms" not in rows["vectorized_torch"]
    assert rows["flash_attention_torch"]["error"] < 1e-5


def test_results_that_are_not_finite_are_wrong(monkeypatch):
    spoil(monkeypatch, "vectorized_torch", lambda q, k, v: q / 0 * 0)
    rows = measure_case(CASE, CPU)["kernels"]
    assert rows["vectorized_torch"] == {"status": "wrong", "error": None}


def test_scores_too_large_for_the_machine_are_oom_without_a_try(monkeypatch):
    needed = 12 * 4 * 40 * 24
    for memory, status in ((needed - 1, "oom"), (needed, "ok")):
        monkeypatch.setattr(benchmark, "device_memory", lambda device, memory=memory: memory)
        rows = measure_case(CASE, CPU)["kernels"]
        assert rows["vectorized_torch"]["status"] == status
        assert rows["flash_attention_torch"]["status"] == "ok"


@pytest.mark.parametrize(
    ("device", "direction", "apart"),
    [
        (CPU, "forward", HOST_BOUND[:1]),
        # slower than the host launches its kernels, and keeping the scores
        (CUDA, "backward", HOST_BOUND + HOLD_SCORES),
    ],
)
def test_kernels_that_would_disturb_others_are_measured_alone(device, direction, apart):
    case = case_with(kernels=list(SWEEP_KERNELS), direction=direction)
    together, *alone = groups(case, device)
    assert {kernel for (kernel,) in alone} == {*apart}
    assert sorted([*together, *apart]) == sorted(SWEEP_KERNELS)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (100, 70), (70, 100)], ids=str)
def test_the_error_of_rows_is_that_of_the_first_and_last_queries(sizes, is_causal):
    case = case_with(queries=sizes[0], keys=sizes[1])
    q, k, v, _ = make_inputs(case, CPU, 0)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert error_of_rows(out, q, k, v, is_causal) < 1e-6
    for row in (0, sizes[0] - 1):
        spoiled = out.clone()
        spoiled[:, :, row] += 1
        assert error_of_rows(spoiled, q, k, v, is_causal) > 0.05


@pytest.mark.parametrize(("max_seconds", "samples"), [(1e-6, 1), (100.0, 5)])
def test_a_kernel_alone_that_takes_long_is_timed_once(max_seconds, samples):
    case = case_with(kernels=["sdpa"], samples=5, max_seconds=max_seconds)
    (row,) = measure_case(case, CPU)["kernels"].values()
    assert row["samples"] == samples


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": ("fast",)}, "kernels must be among scaled_dot_prod_attention.* got 'fast'"),
        ({"cuda_graphs": True}, "cuda_graphs must be False without a GPU, got cpu"),
        ({"dtype": "float8"}, 'dtype .*"float8"'),
    ],
)
def test_a_request_beyond_the_device_is_named(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        benchmark_attention(AttentionBenchmarkConfig(device="cpu", output=tmp_path, **changes))
    assert not list(tmp_path.iterdir())


def test_flash_attention_4_is_asked_for_where_it_is_installed_and_gets_tokens_first(monkeypatch):
    found = {"flash_attn"}
    with monkeypatch.context() as patch:
        patch.setattr(benchmark.importlib.util, "find_spec", lambda name: name in found or None)
        # the package of that name is FlashAttention-2
        assert not benchmark._runs_here("fa4", on_gpu=True)
        found.add("flash_attn.cute")
        assert benchmark._runs_here("fa4", on_gpu=True)
        assert not benchmark._runs_here("fa4", on_gpu=False)

    def flash_attn_func(q, k, v, *, causal, deterministic):
        seen.append((causal, deterministic))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2), None

    seen: list[tuple[bool, bool]] = []
    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    case = case_with(kernels=list(benchmark.FLASH_ATTENTION_4))
    rows = measure_case(case, CPU)["kernels"]
    assert [row["status"] for row in rows.values()] == ["ok", "ok"]
    assert set(seen) == {(True, False), (True, True)}


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("sizes", [(256, 256), (128, 384), (384, 128)], ids=str)
def test_every_kernel_runs_on_a_gpu_or_is_refused(sizes, direction, in_graph):
    dtype = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    case = case_with(
        queries=sizes[0],
        keys=sizes[1],
        head_dim=64,
        direction=direction,
        dtype=dtype,
        kernels=list(SWEEP_KERNELS),
        in_graph=in_graph,
    )
    rows = measure_case(case, CUDA)["kernels"]
    refused = {name for name, row in rows.items() if row["status"] == "unsupported"}
    assert refused <= {"sdpa_cudnn", "sdpa_flash", "flex_attention", "fa4", "fa4_deterministic"}
    for name in set(rows) - refused:
        assert rows[name]["status"] == "ok", (name, rows[name])
        assert rows[name]["peak_memory_bytes"] > 0


@pytest.mark.gpu
def test_a_recorded_backward_pass_keeps_what_it_reads(monkeypatch):
    case = case_with(head_dim=64, direction="backward", dtype="float16")
    *leaves, grad_out = inputs = make_inputs(case, CUDA, seed=0)
    prepare, grads = benchmark._prepare, []

    def prepare_and_keep(*arguments):
        run, figures = prepare(*arguments)

        def run_and_keep() -> None:
            grads[:] = run()

        return run_and_keep, figures

    monkeypatch.setattr(benchmark, "_prepare", prepare_and_keep)
    function, _ = benchmark._prepare_graph("sdpa", case, inputs)
    # the recording computes nothing yet, and memory that nobody holds goes back to the driver
    for grad in grads:
        grad.zero_()
    free_memory()
    function()
    right = torch.autograd.grad(
        F.scaled_dot_product_attention(*leaves, is_causal=True), leaves, grad_out
    )
    torch.testing.assert_close(grads, list(right), rtol=0.01, atol=0.01)
