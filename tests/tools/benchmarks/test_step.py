"""The step benchmark on tiny models: cases, figures, predictions, what is resumed and refused."""

import csv
import dataclasses
import itertools

import pytest
import torch

import lib.tools.benchmarks.step as benchmark
from lib.core.records import read_records
from lib.model.config import MODEL_PRESETS, ModelConfig
from lib.model.costs import flops_per_token, num_parameters
from lib.model.transformer import TransformerLM
from lib.tools.benchmarks.step import (
    CPU_SIZES,
    GPU_SIZES,
    StepBench,
    StepBenchmarkConfig,
    StepCase,
    benchmark_step,
    predicted_memory,
    step_cases,
    write_step_report,
)

CPU = torch.device("cpu")
MODES = ("forward", "forward_backward", "full_step")
TINY = ModelConfig(vocab_size=61, context_length=16, d_model=32, num_layers=3, num_heads=4, d_ff=48)
FAST = {"samples": 2, "warmup": 1, "device": "cpu"}


@pytest.fixture(autouse=True, scope="module")
def two_models(one_core):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODEL_PRESETS, "one", TINY)
        patch.setitem(MODEL_PRESETS, "two", dataclasses.replace(TINY, num_layers=2))
        yield


def test_cases_are_all_combinations_with_those_together_that_share_a_model():
    config = StepBenchmarkConfig(
        configs=("one", "two"),
        seq_lens=(8, 16),
        compare_precision=True,
        compare_compile=True,
        attention_kernel=("sdpa", "vectorized_torch"),
    )
    cases = step_cases(config, CPU)
    assert len(cases) == len(set(cases)) == 2 * 2 * 3 * 2 * 2 * 2
    models = [(case.model, case.compile) for case in cases]
    assert sum(a != b for a, b in itertools.pairwise(models)) == 3
    assert {case.dtype for case in cases} == {"float32", "bfloat16"}


@pytest.mark.parametrize(
    ("device", "dtype", "sizes"), [("cpu", "bfloat16", CPU_SIZES), ("cuda", "float16", GPU_SIZES)]
)
def test_default_sizes_are_small_on_a_cpu_and_full_on_a_gpu(device, dtype, sizes, monkeypatch):
    # a GPU of that generation has no bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    cases = step_cases(StepBenchmarkConfig(mixed_precision=True), torch.device(device))
    assert {(case.model, case.seq_len) for case in cases} == set(itertools.product(*sizes))
    assert {case.dtype for case in cases} == {dtype}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder and the records of a benchmark of two models."""
    folder = tmp_path_factory.mktemp("measured")
    config = StepBenchmarkConfig(
        configs=("one", "two"), seq_lens=(8,), compare_precision=True, output=folder, **FAST
    )
    return folder, benchmark_step(config)


def test_each_case_has_a_record_with_its_figures(measured):
    folder, records = measured
    assert read_records(folder / "step_benchmark.jsonl") == records
    assert len(records) == 2 * 2 * 3
    memory = {}
    for record in records:
        case, figures = StepCase(**record["config"]), record["figures"]
        assert figures["status"] == "ok"
        assert figures["samples"] == len(figures["times_ms"]) == 2
        tokens = case.batch_size * case.seq_len
        assert figures["tokens_per_s"] == pytest.approx(tokens / figures["median_ms"] * 1e3)
        flops = flops_per_token(case.shape, backward=case.mode != "forward") * tokens
        assert figures["flops"] == flops
        assert figures["parameters"] == num_parameters(case.shape)
        # the peak FLOP/s of a CPU are not known
        assert figures["mfu"] is None
        memory.setdefault((case.model, case.dtype), []).append(
            (figures["launches"], figures["peak_memory_gb"])
        )
    # each mode launches more than the one before, and holds more
    for by_mode in memory.values():
        for first, second, third in zip(*by_mode):
            assert 0 < first < second < third


def test_the_report_shows_what_ran_out_of_memory_and_tf32(measured, tmp_path, recwarn):
    folder, records = measured
    text = (folder / "step_benchmark.md").read_text()
    assert text.count("| one ") == text.count("| two ") == 6

    oom = {"status": "oom", "parameters": 1, "predicted_memory_gb": 3.0}
    records = [r | {"figures": oom} if i < 5 else r for i, r in enumerate(records)]
    records.append(records[6] | {"config": records[6]["config"] | {"tf32": True}})
    write_step_report(records, tmp_path)
    text = (tmp_path / "step_benchmark.md").read_text()
    assert text.count("| oom ") == 5
    assert text.count("| TF32 ") == text.count("| float32 ") / 6 == 1
    rows = list(csv.DictReader((tmp_path / "step_benchmark.csv").read_text().splitlines()))
    assert len(rows) == len(records)
    assert not any("times_ms" in key for key in rows[0])
    assert (tmp_path / "step_benchmark.png").read_bytes().startswith(b"\x89PNG")
    assert not [str(warning.message) for warning in recwarn]


def test_a_second_run_measures_only_what_is_missing(measured, tmp_path, monkeypatch):
    folder, records = measured
    path = tmp_path / "step_benchmark.jsonl"
    path.write_bytes((folder / "step_benchmark.jsonl").read_bytes())
    seen, measure_one = [], StepBench._measure
    monkeypatch.setattr(
        StepBench, "_measure", lambda self, case: seen.append(case) or measure_one(self, case)
    )
    config = StepBenchmarkConfig(configs=("one",), seq_lens=(8, 12), output=tmp_path, **FAST)
    again = benchmark_step(config)
    assert [(case.seq_len, case.mode) for case in seen] == [(12, mode) for mode in MODES]
    assert again[:3] == [r for r in records if r in again]
    assert len(read_records(path)) == len(records) + 3
    # the table shows all records of this machine
    assert (tmp_path / "step_benchmark.md").read_text().count("| one ") == 9


def test_memory_that_runs_out_in_a_case_leaves_later_ones_unaffected(tmp_path, monkeypatch):
    whole = TransformerLM.hidden

    def hidden(self, token_ids, **options):
        if token_ids.shape[1] == 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, token_ids, **options)

    monkeypatch.setattr(TransformerLM, "hidden", hidden)
    config = StepBenchmarkConfig(
        configs=("one",), seq_lens=(16, 12), modes=("full_step",), output=tmp_path, **FAST
    )
    first, second = (record["figures"] for record in benchmark_step(config))
    assert (first["status"], first["samples"]) == ("oom", 0)
    assert (second["status"], second["samples"]) == ("ok", 2)
    assert "predicted_memory_gb" in first


def case_of(name, mode, length, dtype="float32", **changes):
    settings = {"tf32": False, "compile": False, "attention_kernel": "sdpa", "batch_size": 4}
    settings |= {"warmup": 1, "samples": 1, "max_seconds": 1.0, **changes}
    return StepCase(model=name, mode=mode, seq_len=length, dtype=dtype, **settings)


def bench_for(case, device="cpu"):
    config = StepBenchmarkConfig(configs=(case.model,), seq_lens=(case.seq_len,), device=device)
    return StepBench(config, torch.device(device))


def memory_figures(case, device="cpu"):
    """Predicted and measured, in GB."""
    bench = bench_for(case, device)
    return bench.expect(case)["predicted_memory_gb"], bench.run(case)["peak_memory_gb"]


@pytest.mark.parametrize("mode", MODES)
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


def test_a_model_far_too_large_is_oom_with_its_prediction_and_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "device_memory", lambda device: 1_000_000)
    monkeypatch.setattr(StepBench, "_measure", lambda self, case: pytest.fail("tried"))
    config = StepBenchmarkConfig(configs=("tiny",), seq_lens=(8,), output=tmp_path, **FAST)
    for record in benchmark_step(config):
        figures = record["figures"]
        assert (figures["status"], figures["was_tried"]) == ("oom", False)
        assert figures["predicted_memory_gb"] > 0.001
    assert (tmp_path / "step_benchmark.md").read_text().count("| oom ") == 3


def test_memory_with_a_compiled_kernel_is_not_predicted_and_the_record_says_why():
    case = case_of("one", "full_step", 8, attention_kernel="vectorized_torch_compiled")
    assert predicted_memory(case, CPU) is None
    figures = bench_for(case).expect(case)
    reason = "the compiler decides what vectorized_torch_compiled keeps"
    assert (figures["predicted_memory_gb"], figures["not_predicted"]) == (None, reason)
    record = {"config": dataclasses.asdict(case), "figures": figures | {"status": "oom"}}
    assert benchmark._line(record).endswith(f" ({reason})")


def test_float16_is_measured_with_the_loss_scaled_as_in_training(monkeypatch):
    case = case_of("one", "forward_backward", 8, "float16")
    step, gradients = bench_for(case)._train_step(case), []
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
def test_compiled_cases_are_marked_and_compiled_once_for_each_length(tmp_path, monkeypatch):
    torch.compiler.reset()
    # loads the compiler, for seconds
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, whole = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: whole(f, backend=counter, **options))
    config = StepBenchmarkConfig(
        configs=("two",),
        seq_lens=(8, 16),
        modes=("full_step",),
        compare_compile=True,
        output=tmp_path,
        **FAST,
    )
    records = benchmark_step(config)
    torch.compiler.reset()
    assert [r["config"]["compile"] for r in records] == [False] * 2 + [True] * 2
    assert [r["figures"].get("graph_breaks") for r in records] == [None] * 2 + [0] * 2
    assert counter.frame_count == 2


@pytest.mark.parametrize(("field", "value"), [("configs", "huge"), ("attention_kernel", "fast")])
def test_unknown_names_are_refused(field, value, tmp_path):
    with pytest.raises(ValueError, match=f"['\"]{value}['\"]"):
        benchmark_step(StepBenchmarkConfig(output=tmp_path, device="cpu", **{field: (value,)}))
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_cases_on_a_gpu_have_kernels_and_memory(tmp_path):
    config = StepBenchmarkConfig(
        configs=("tiny",),
        seq_lens=(64,),
        compare_precision=True,
        compare_compile=True,
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
def test_a_model_too_large_for_a_gpu_is_tried_and_leaves_later_cases_unaffected():
    whole = torch.cuda.get_device_properties(0).total_memory
    # more than full steps of the 2.7b model and its activations take
    batch_size = next(
        size
        for size in (2**n for n in range(20))
        if predicted_memory(case_of("2.7b", "full_step", 1024, batch_size=size), CPU) > 2 * whole
    )
    large = case_of("2.7b", "full_step", 1024, batch_size=batch_size)
    bench = bench_for(large, "cuda")
    assert bench.run(large) == {"status": "oom", "was_tried": False}
    assert bench._measure(large)["status"] == "oom"
    assert torch.cuda.memory_reserved() < whole / 10
    assert bench.run(case_of("one", "full_step", 16))["status"] == "ok"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "length"), [("small", 1024), ("xl", 128)])
def test_predicted_memory_is_that_of_the_step_on_a_gpu(name, length, mode, dtype):
    case = case_of(name, mode, length, dtype)
    memory = torch.cuda.get_device_properties(0).total_memory
    if predicted_memory(case, torch.device("cuda")) > 0.9 * memory:
        pytest.skip("too large for this GPU")
    predicted, measured = memory_figures(case, "cuda")
    assert predicted == pytest.approx(measured, rel=0.1)
