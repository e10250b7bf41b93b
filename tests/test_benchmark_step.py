"""The step benchmark on tiny models: rows, figures, predictions, what is resumed and refused."""

import csv
import dataclasses
import itertools
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import lib
import lib.benchmark_step as benchmark
import lib.model as model_file
from lib.benchmark_step import StepBench, benchmark_step, write_report
from lib.benchmark_step_cases import CPU_SIZES, GPU_SIZES, StepCase, predicted_memory, step_cases
from lib.config import StepBenchmarkConfig
from lib.config_training import ModelConfig
from lib.model import TransformerLM
from lib.model_costs import flops_per_token, num_parameters
from lib.model_presets import MODEL_PRESETS, model_preset
from lib.report import read_records
from lib.train_step import compile_blocks

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
MODES = ("forward", "forward_backward", "full_step")
TINY = ModelConfig(vocab_size=61, context_length=16, d_model=32, num_layers=3, num_heads=4, d_ff=48)
FAST = {"samples": 2, "warmup": 1, "device": "cpu"}


@pytest.fixture(autouse=True, scope="module")
def on_one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODEL_PRESETS, "one", TINY)
        patch.setitem(MODEL_PRESETS, "two", dataclasses.replace(TINY, num_layers=2))
        yield
    torch.set_num_threads(before)


def test_rows_are_all_combinations_with_those_together_that_share_a_model():
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
    ("flags", "dtypes"),
    [
        ({}, ["float32"]),
        ({"mixed_precision": True}, ["bfloat16"]),
        ({"compare_precision": True}, ["float32", "bfloat16"]),
    ],
)
def test_float32_is_measured_unless_a_short_type_is_asked_for(flags, dtypes):
    config = StepBenchmarkConfig(modes=("forward",), seq_lens=(8,), **flags)
    assert [case.dtype for case in step_cases(config, CPU)] == dtypes


def test_sizes_left_out_are_small_on_a_cpu_and_full_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for device, (names, lengths) in (("cpu", CPU_SIZES), ("cuda", GPU_SIZES)):
        cases = step_cases(StepBenchmarkConfig(mixed_precision=True), torch.device(device))
        assert list(dict.fromkeys(case.model for case in cases)) == list(names)
        assert list(dict.fromkeys(case.seq_len for case in cases)) == list(lengths)
    # a GPU without bfloat16
    assert {case.dtype for case in cases} == {"float16"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What a benchmark of two models leaves behind, and its records."""
    folder = tmp_path_factory.mktemp("measured")
    config = StepBenchmarkConfig(
        configs=("one", "two"), seq_lens=(8,), compare_precision=True, output=folder, **FAST
    )
    return folder, benchmark_step(config)


def test_each_row_has_a_record_with_its_figures(measured):
    folder, records = measured
    assert read_records(folder / "step_benchmark.jsonl") == records
    assert len(records) == 2 * 2 * 3
    for record in records:
        case, figures = StepCase(**record["config"]), record["figures"]
        assert figures["status"] == "ok"
        assert figures["samples"] == len(figures["times_ms"]) == 2
        tokens = case.batch_size * case.seq_len
        assert figures["tokens_per_s"] == pytest.approx(tokens / figures["median_ms"] * 1e3)
        flops = flops_per_token(case.shape, backward=case.mode != "forward") * tokens
        assert figures["flops"] == flops
        assert figures["parameters"] == num_parameters(case.shape)
        # nobody promises FLOP/s of a CPU
        assert figures["mfu"] is None
        assert figures["launches"] > 0
        assert record["seed"] == 0


def test_a_step_with_more_in_it_dispatches_more_and_holds_more(measured):
    rows = {}
    for record in measured[1]:
        case = StepCase(**record["config"])
        key = (case.model, case.seq_len, case.dtype)
        rows.setdefault(key, {})[case.mode] = record["figures"]
    for by_mode in rows.values():
        for name in ("launches", "peak_memory_gb"):
            first, second, third = (by_mode[mode][name] for mode in MODES)
            assert first < second < third


def test_records_become_a_table_and_a_figure(measured):
    folder, records = measured
    text = (folder / "step_benchmark.md").read_text()
    assert text.count("| one ") == text.count("| two ") == 6
    assert "| bfloat16 " in text
    assert (folder / "step_benchmark.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((folder / "step_benchmark.csv").open()))
    assert len(rows) == len(records)
    assert not any("times_ms" in key for key in rows[0])


def test_a_second_run_measures_only_what_is_missing(measured, tmp_path, monkeypatch):
    folder, records = measured
    path = tmp_path / "records.jsonl"
    path.write_bytes((folder / "step_benchmark.jsonl").read_bytes())
    seen, measure_one = [], StepBench._measure
    monkeypatch.setattr(
        StepBench, "_measure", lambda self, case: seen.append(case) or measure_one(self, case)
    )
    config = StepBenchmarkConfig(
        configs=("one",), seq_lens=(8, 12), output=tmp_path, output_json=path, **FAST
    )
    again = benchmark_step(config)
    assert [(case.seq_len, case.mode) for case in seen] == [(12, mode) for mode in MODES]
    assert again[:3] == [r for r in records if r in again]
    assert len(read_records(path)) == len(records) + 3
    # the table shows all rows of this machine
    assert (tmp_path / "step_benchmark.md").read_text().count("| one ") == 9


def test_a_model_far_too_large_is_oom_with_its_prediction_and_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "device_memory", lambda device: 1_000_000)
    monkeypatch.setattr(StepBench, "_measure", lambda self, case: pytest.fail("tried"))
    config = StepBenchmarkConfig(configs=("tiny",), seq_lens=(8,), output=tmp_path, **FAST)
    for record in benchmark_step(config):
        figures = record["figures"]
        assert (figures["status"], figures["was_tried"]) == ("oom", False)
        assert figures["predicted_memory_gb"] > 0.001
    assert (tmp_path / "step_benchmark.md").read_text().count("| oom ") == 3


def test_memory_that_runs_out_in_a_row_leaves_later_rows_unaffected(tmp_path, monkeypatch):
    whole = TransformerLM.hidden

    def hidden(self, token_ids, **options):
        if token_ids.shape[1] == 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, token_ids, **options)

    monkeypatch.setattr(TransformerLM, "hidden", hidden)
    config = StepBenchmarkConfig(configs=("one",), seq_lens=(16, 12), output=tmp_path, **FAST)
    records = benchmark_step(config)
    for record in records:
        is_oom = record["config"]["seq_len"] == 16
        assert record["figures"]["status"] == ("oom" if is_oom else "ok")
        assert "predicted_memory_gb" in record["figures"]
        assert record["figures"]["samples"] == (0 if is_oom else 2)


def case_of(name, mode, length, dtype="float32", **changes):
    settings = {"tf32": False, "compile": False, "attention_kernel": "sdpa", "batch_size": 4}
    settings |= {"warmup": 1, "samples": 1, "max_seconds": 1.0, **changes}
    return StepCase(model=name, mode=mode, seq_len=length, dtype=dtype, **settings)


def memory_figures(case, device="cpu"):
    """Predicted and measured, in GB."""
    config = StepBenchmarkConfig(configs=(case.model,), seq_lens=(case.seq_len,), device=device)
    bench = StepBench(config, torch.device(device))
    return bench.expect(case)["predicted_memory_gb"], bench.run(case)["peak_memory_gb"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "length"), [("tiny", 8), ("tiny", 128)])
def test_predicted_memory_is_that_of_the_step(name, length, mode, dtype):
    predicted, measured = memory_figures(case_of(name, mode, length, dtype))
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("mode", ["forward_backward", "full_step"])
def test_predicted_memory_of_scores_is_that_of_the_step(mode):
    case = case_of("tiny", mode, 256, attention_kernel="vectorized_torch")
    predicted, measured = memory_figures(case)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_memory_with_a_compiled_kernel_is_not_predicted_and_the_record_says_why():
    case = case_of("one", "full_step", 8, attention_kernel="vectorized_torch_compiled")
    assert predicted_memory(case, CPU) is None
    figures = StepBench(StepBenchmarkConfig(configs=("one",), seq_lens=(8,)), CPU).expect(case)
    reason = "the compiler decides what vectorized_torch_compiled keeps"
    assert (figures["predicted_memory_gb"], figures["not_predicted"]) == (None, reason)
    figures |= {"median_ms": 1.0, "iqr_ms": 0.1, "tokens_per_s": 9.0, "mfu": None}
    for measured in ({"status": "oom"}, {"status": "ok", "peak_memory_gb": 0.5}):
        record = {"config": dataclasses.asdict(case), "figures": figures | measured}
        assert benchmark._line(record).endswith(f" ({reason})")


def test_float16_is_measured_with_the_loss_scaled_as_in_training(monkeypatch):
    case = case_of("one", "forward_backward", 8, "float16")
    bench = StepBench(StepBenchmarkConfig(configs=("one",), seq_lens=(8,)), CPU)
    step, gradients = bench._train_step(case), []
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
    torch.testing.assert_close(gradients[1], 1024 * gradients[0], rtol=0.02, atol=0.01)


@pytest.mark.parametrize("mode", MODES)
def test_prediction_of_a_large_model_is_about_its_weights(mode):
    times_four_bytes = {"forward": 1, "forward_backward": 2, "full_step": 4}[mode]
    case = case_of("2.7b", mode, 128, batch_size=1)
    weights = times_four_bytes * 4 * num_parameters(case.shape)
    # a CPU's update works on as much again
    weights *= 1.5 if mode == "full_step" else 1
    assert predicted_memory(case, CPU) == pytest.approx(weights, rel=0.05)


@pytest.fixture
def compiled(monkeypatch):
    """Counts what is compiled, and compiles nothing further."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: whole(f, backend=counter, **options))
    yield counter
    torch.compiler.reset()


def test_all_layers_share_one_compilation(compiled):
    model = TransformerLM(TINY)
    token_ids = torch.zeros(2, 8, dtype=torch.int64)
    expected = model(token_ids)
    compile_blocks(model)
    torch.testing.assert_close(model(token_ids), expected)
    assert compiled.frame_count == 1
    with torch.no_grad():
        model(token_ids)
    assert compiled.frame_count == 2


def test_layers_as_they_run_on_a_gpu_share_one_compilation_too(compiled, monkeypatch):
    # the kernels in plain PyTorch, which a CPU can run
    def add_rms_norm(x, branch, weight, eps):
        x = x + branch
        return x, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    kernels = types.ModuleType("lib.model_triton")
    kernels.add_rms_norm = add_rms_norm
    monkeypatch.setitem(sys.modules, "lib.model_triton", kernels)
    monkeypatch.setattr(lib, "model_triton", kernels, raising=False)
    generator = torch.Generator().manual_seed(0)
    model = TransformerLM(TINY, generator=generator)
    token_ids = torch.randint(61, (2, 8), generator=generator)
    expected = model.hidden(token_ids)
    expected.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    # for the whole model's choice, not for that of attention and feed-forward layer
    monkeypatch.setattr(model_file, "has_kernels", lambda x: not torch.compiler.is_compiling())
    compile_blocks(model)
    hidden = model.hidden(token_ids)
    hidden.sum().backward()
    torch.testing.assert_close(hidden, expected)
    for parameter, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(parameter.grad, gradient)
    assert (compiled.frame_count, benchmark._graph_breaks()) == (1, 0)


def test_compiled_rows_are_measured_and_marked(compiled, tmp_path):
    config = StepBenchmarkConfig(
        configs=("one",),
        seq_lens=(8, 16),
        modes=("forward", "full_step"),
        compare_compile=True,
        output=tmp_path,
        **FAST,
    )
    records = benchmark_step(config)
    assert [r["config"]["compile"] for r in records] == [False] * 4 + [True] * 4
    assert [r["figures"].get("graph_breaks") for r in records] == [None] * 4 + [0] * 4
    # for each length, without gradients and with them
    assert compiled.frame_count == 4


def test_the_figure_has_a_place_for_rows_out_of_memory(measured, tmp_path):
    records = [dict(record) for record in measured[1]]
    for record in records[:5]:
        record["figures"] = {"status": "oom", "parameters": 1, "predicted_memory_gb": 3.0}
    write_report(records, tmp_path)
    assert (tmp_path / "step_benchmark.png").exists()
    assert (tmp_path / "step_benchmark.md").read_text().count("| oom ") == 5


def test_the_legend_stands_where_the_lines_are(measured, tmp_path, monkeypatch, recwarn):
    # of the first precision the forward pass alone, which the lower row does not show
    records = [
        record
        for record in measured[1]
        if record["config"]["dtype"] == "bfloat16" or record["config"]["mode"] == "forward"
    ]
    legends = []
    monkeypatch.setattr(Axes, "legend", lambda axes, **options: legends.append(axes))
    write_report(records, tmp_path)
    assert [axes.get_xlabel()[:5] for axes in legends] == ["model", "conte"]
    assert all(len(axes.get_legend_handles_labels()[1]) > 1 for axes in legends)
    assert not [str(warning.message) for warning in recwarn]


def test_float32_by_tf32_is_called_so(measured, tmp_path):
    record = dict(measured[1][0])
    record["config"] = record["config"] | {"tf32": True}
    write_report([record, *measured[1]], tmp_path)
    text = (tmp_path / "step_benchmark.md").read_text()
    assert text.count("| TF32 ") == 1
    assert text.count("| float32 ") == 6


@pytest.mark.parametrize("flag", ["nvtx", "memory_profile"])
def test_what_only_a_gpu_has_is_refused_on_a_cpu(flag, tmp_path):
    config = StepBenchmarkConfig(device="cpu", output=tmp_path, **{flag: True})
    with pytest.raises(ValueError, match=f"{flag} is True with device cpu; right is: a CUDA"):
        benchmark_step(config)


def test_unknown_names_list_the_known(tmp_path):
    for changes, message in (
        ({"configs": ("huge",)}, "model preset is 'huge'; known: tiny"),
        ({"attention_kernel": ("fast",)}, "attention_kernel is 'fast'; right is: .*sdpa"),
    ):
        with pytest.raises(ValueError, match=message):
            benchmark_step(StepBenchmarkConfig(output=tmp_path, device="cpu", **changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seq_lens": (8, 0)}, r"seq_lens is \(8, 0\); right is: each at least 1"),
        ({"modes": ()}, r"modes is \(\)"),
        ({"samples": 0}, "samples is 0"),
        ({"warmup": 0}, "warmup is 0"),
        ({"max_seconds": 0.0}, "max_seconds is 0.0"),
        ({"attention_kernel": ()}, "attention_kernel is"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        StepBenchmarkConfig(**changes)


def test_the_command_measures_and_prints_where_the_table_is(tmp_path):
    flags = ["--configs", "tiny", "--seq_lens", "8", "--modes", "forward", "--mixed_precision"]
    flags += ["--samples", "2", "--warmup", "1", "--device", "cpu", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "lib", "benchmark", "step", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, row, last = done.stdout.splitlines()
    assert "so there is no MFU" in first
    assert row.startswith("tiny forward 8 bfloat16 eager sdpa: ")
    assert last == str(tmp_path / "step_benchmark.md")


# backward passes of many layers alike take a second each
FLOPS = [
    pytest.param(name, backward, marks=[pytest.mark.slow] * (backward and shape.num_layers > 12))
    for name, shape in MODEL_PRESETS.items()
    for backward in (False, True)
    if name not in ("one", "two")
]


@pytest.mark.parametrize(("name", "backward"), FLOPS)
def test_flops_of_presets_are_those_that_pytorch_counts(name, backward):
    # on the meta device nothing is computed, and kernels that PyTorch cannot count are left out
    shape = dataclasses.replace(model_preset(name), attention_kernel="vectorized_torch")
    model = TransformerLM(shape, device="meta")
    token_ids = torch.zeros(2, shape.context_length, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        logits = model(token_ids)
        if backward:
            logits.sum().backward()
    expected = flops_per_token(shape, backward=backward) * token_ids.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_predicted_memory_of_the_committed_records_is_what_was_measured():
    rows = read_records(ROOT / "artifacts/step_benchmark.jsonl")
    rows = [r for r in rows if r["figures"]["status"] == "ok"]
    rows = [r for r in rows if r["figures"]["predicted_memory_gb"] is not None]
    if not rows:
        pytest.skip("no records yet")
    for record in rows:
        predicted, measured = (
            record["figures"][f"{name}_memory_gb"] for name in ("predicted", "peak")
        )
        assert predicted == pytest.approx(measured, rel=0.1), record["config"]


@pytest.mark.gpu
def test_rows_on_a_gpu_have_kernels_ranges_and_snapshots(tmp_path):
    config = StepBenchmarkConfig(
        configs=("tiny",),
        seq_lens=(64,),
        compare_precision=True,
        compare_compile=True,
        nvtx=True,
        memory_profile=True,
        device="cuda",
        output=tmp_path,
        **{key: value for key, value in FAST.items() if key != "device"},
    )
    records = benchmark_step(config)
    assert len(records) == 2 * 2 * 3
    for record in records:
        figures = record["figures"]
        assert figures["status"] == "ok"
        assert figures["launches"] > 10
        assert figures["total_memory_bytes"] >= figures["peak_memory_bytes"] > 0
        assert figures.get("graph_breaks", 0) == 0
    assert len(list((tmp_path / "memory").glob("*.pickle"))) == len(records)


@pytest.mark.gpu
def test_a_model_too_large_for_a_gpu_is_tried_and_leaves_later_rows_unaffected(tmp_path):
    whole = torch.cuda.get_device_properties(0).total_memory
    # what full steps of the 2.7b model and its activations would take, and some
    batch_size = next(
        size
        for size in (2**n for n in range(20))
        if predicted_memory(case_of("2.7b", "full_step", 1024, batch_size=size), CPU) > 2 * whole
    )
    run = StepBench(StepBenchmarkConfig(configs=("2.7b",), seq_lens=(1024,)), torch.device("cuda"))
    large = case_of("2.7b", "full_step", 1024, batch_size=batch_size)
    assert run.run(large) == {"status": "oom", "was_tried": False}
    assert run._measure(large)["status"] == "oom"
    assert torch.cuda.memory_reserved() < whole / 10
    assert run.run(case_of("one", "full_step", 16))["status"] == "ok"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [128, 1024])
@pytest.mark.parametrize("name", ["small", "xl"])
def test_predicted_memory_is_that_of_the_step_on_a_gpu(name, length, mode, dtype):
    case = case_of(name, mode, length, dtype)
    memory = torch.cuda.get_device_properties(0).total_memory
    if predicted_memory(case, torch.device("cuda")) > 0.9 * memory:
        pytest.skip("too large for this GPU")
    predicted, measured = memory_figures(case, "cuda")
    assert predicted == pytest.approx(measured, rel=0.1)
