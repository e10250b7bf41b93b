"""The step benchmark on tiny models: cases, figures, predictions, what is resumed and refused."""

import itertools

import pytest
import torch

import lib.tools.benchmarks.step as benchmark
from lib.core.allocator import free_memory
from lib.core.records import read_records
from lib.model.costs import flops_per_token, num_parameters
from lib.model.transformer import TransformerLM
from lib.tools.benchmarks.harness import grid
from lib.tools.benchmarks.step import (
    CPU_SIZES,
    GPU_SIZES,
    StepBenchmarkConfig,
    benchmark_step,
    measure_step,
    predicted_memory,
    shape_of,
    step_cases,
)
from lib.tools.benchmarks.sweep import Case

CPU = torch.device("cpu")
MODES = ("forward", "forward_backward", "full_step")
FAST = {"models": ("tiny",), "samples": 2, "warmup": 1, "device": "cpu"}
pytestmark = pytest.mark.usefixtures("one_core")


def test_cases_are_all_combinations_with_those_together_that_share_a_model():
    config = StepBenchmarkConfig(
        models=("tiny", "small"),
        seq_lens=(8, 16),
        precisions=("float32", "tf32", "mixed"),
        compiled=(False, True),
        attention_kernel=("sdpa", "vectorized_torch"),
    )
    cases = step_cases(config, CPU)
    assert len(cases) == 2 * 3 * 2 * 3 * 2 * 2
    assert {(case.dtype, case.tf32) for case in cases} == {
        ("float32", False),
        ("float32", True),
        ("bfloat16", False),
    }


@pytest.mark.parametrize(
    ("device", "dtype", "sizes"), [("cpu", "bfloat16", CPU_SIZES), ("cuda", "float16", GPU_SIZES)]
)
def test_default_sizes_are_small_on_a_cpu_and_full_on_a_gpu(device, dtype, sizes, monkeypatch):
    # a GPU of that generation has no bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    cases = step_cases(StepBenchmarkConfig(precisions=("mixed",)), torch.device(device))
    assert {(case.model, case.seq_len) for case in cases} == set(itertools.product(*sizes))
    assert {case.dtype for case in cases} == {dtype}


def test_each_case_has_a_record_with_its_figures(tmp_path):
    config = StepBenchmarkConfig(
        seq_lens=(8,), precisions=("float32", "mixed"), output=tmp_path, **FAST
    )
    records = benchmark_step(config)
    assert read_records(tmp_path / "step_benchmark.jsonl") == records
    assert len(records) == 2 * 3
    memory = {}
    for record in records:
        case, figures = Case(**record["config"]), record["figures"]
        assert figures["status"] == "ok"
        assert figures["samples"] == len(figures["times_ms"]) == 2
        tokens = case.batch_size * case.seq_len
        assert figures["tokens_per_s"] == pytest.approx(tokens / figures["median_ms"] * 1e3)
        flops = flops_per_token(shape_of(case), backward=case.mode != "forward") * tokens
        assert figures["flops"] == flops
        assert figures["parameters"] == num_parameters(shape_of(case))
        # the peak FLOP/s of a CPU are not known
        assert figures["mfu"] is None
        memory.setdefault(case.dtype, []).append((figures["launches"], figures["peak_memory_gb"]))
    # each mode launches more than the one before, and holds more
    for by_mode in memory.values():
        for first, second, third in zip(*by_mode):
            assert 0 < first < second < third


def case_of(name, mode, length, dtype="float32", **changes):
    settings = {"tf32": False, "compile": False, "attention_kernel": "sdpa", "batch_size": 4}
    settings |= {"warmup": 1, "samples": 1, "max_seconds": 1.0, **changes}
    [case] = grid(model=name, mode=mode, seq_len=length, dtype=dtype, **settings)
    return case


def memory_figures(case, device="cpu"):
    """Predicted and measured, in GB."""
    figures = measure_step(case, StepBenchmarkConfig(), torch.device(device))
    return figures["predicted_memory_gb"], figures["peak_memory_gb"]


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize(
    ("length", "dtype", "kernel"),
    [
        (8, "float32", "sdpa"),
        (64, "bfloat16", "sdpa"),
        (128, "float32", "vectorized_torch"),
    ],
)
def test_predicted_memory_is_that_of_the_step(mode, length, dtype, kernel):
    case = case_of("tiny", mode, length, dtype, attention_kernel=kernel)
    predicted, measured = memory_figures(case)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_memory_that_runs_out_is_a_status(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TransformerLM, "hidden", full)
    figures = measure_step(case_of("tiny", "full_step", 8), StepBenchmarkConfig(), CPU)
    assert (figures["status"], figures["was_tried"], figures["samples"]) == ("oom", True, 0)


def test_a_model_far_too_large_is_oom_with_its_prediction_and_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "device_memory", lambda device: 1_000_000)
    monkeypatch.setattr(benchmark, "_train_step", lambda *_: pytest.fail("tried"))
    config = StepBenchmarkConfig(seq_lens=(8,), modes=MODES[1:], output=tmp_path, **FAST)
    with pytest.raises(ValueError, match=r"nothing could be measured .*: mode forward_backward: o"):
        benchmark_step(config)
    for record in read_records(tmp_path / "step_benchmark.jsonl"):
        figures = record["figures"]
        assert (figures["status"], figures["was_tried"]) == ("oom", False)
        assert figures["predicted_memory_gb"] > 0.001


def test_memory_of_a_forward_pass_and_with_a_compiled_kernel_is_not_predicted():
    # the compiler decides what it keeps
    case = case_of("tiny", "full_step", 8, attention_kernel="vectorized_torch_compiled")
    assert predicted_memory(case, CPU) is None
    assert predicted_memory(case_of("tiny", "forward", 8), CPU) is None


def test_float16_is_measured_with_the_loss_scaled_as_in_training(monkeypatch):
    case = case_of("tiny", "forward_backward", 8, "float16")
    step, gradients = benchmark._train_step(case, 0, CPU), []
    fn = benchmark._function(step, case, seed=0)
    weight = step.model.layers[0].ln1.weight
    zero_grad = step.model.zero_grad
    monkeypatch.setattr(
        step.model,
        "zero_grad",
        lambda **options: gradients.append(weight.grad.clone()) or zero_grad(**options),
    )
    for scale in (1.0, 1024.0):
        step.loss_scale.fill_(scale)
        fn()
    assert gradients[0].any()
    # not element by element: unscaled, the smallest gradients underflow
    error = (gradients[1] - 1024 * gradients[0]).norm() / gradients[1].norm()
    assert error < 0.02


@pytest.mark.slow
def test_compiled_cases_are_marked(tmp_path, monkeypatch):
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: whole(f, backend="aot_eager"))
    config = StepBenchmarkConfig(
        seq_lens=(8,), modes=("full_step",), compiled=(False, True), output=tmp_path, **FAST
    )
    records = benchmark_step(config)
    torch.compiler.reset()
    assert [r["config"]["compile"] for r in records] == [False, True]
    assert [r["figures"].get("graph_breaks") for r in records] == [None, 0]


@pytest.mark.gpu
def test_cases_on_a_gpu_have_kernels_and_memory(tmp_path):
    config = StepBenchmarkConfig(
        seq_lens=(64,),
        precisions=("float32", "mixed"),
        compiled=(False, True),
        output=tmp_path,
        **FAST | {"device": "cuda"},
    )
    records = benchmark_step(config)
    assert len(records) == 2 * 2 * 3
    for record in records:
        figures = record["figures"]
        assert figures["status"] == "ok"
        assert figures["launches"] > 10
        assert figures["total_memory_bytes"] >= figures["peak_memory_bytes"] > 0
        assert figures.get("graph_breaks", 0) == 0


@pytest.mark.gpu
def test_a_model_too_large_for_a_gpu_is_tried_and_leaves_later_cases_unaffected(monkeypatch):
    whole = torch.cuda.get_device_properties(0).total_memory
    # more than full steps of the 2.7b model and its activations take
    batch_size = next(
        size
        for size in (2**n for n in range(20))
        if predicted_memory(case_of("2.7b", "full_step", 1024, batch_size=size), CPU) > 2 * whole
    )
    large = case_of("2.7b", "full_step", 1024, batch_size=batch_size)
    cuda = torch.device("cuda")
    run = lambda case: measure_step(case, StepBenchmarkConfig(), cuda)  # noqa: E731
    assert run(large)["was_tried"] is False
    monkeypatch.setitem(benchmark.TRIED_UP_TO, "cuda", 10)
    assert run(large)["status"] == "oom"
    free_memory()
    assert torch.cuda.memory_reserved() < whole / 10
    assert run(case_of("tiny", "full_step", 16))["status"] == "ok"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "length"), [("small", 1024), ("xl", 128)])
def test_predicted_memory_is_that_of_the_step_on_a_gpu(name, length, mode, dtype):
    case = case_of(name, mode, length, dtype)
    memory = torch.cuda.get_device_properties(0).total_memory
    if predicted_memory(case, torch.device("cuda")) > 0.9 * memory:
        pytest.skip("too large for this GPU")
    predicted, measured = memory_figures(case, "cuda")
    assert predicted == pytest.approx(measured, rel=0.1)
