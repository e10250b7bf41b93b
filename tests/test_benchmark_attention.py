"""The attention benchmark: cases, FLOP, statuses, what is resumed, tables, targets and figures."""

import csv
import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import lib.benchmark_attention as benchmark
from lib.attention import attention
from lib.benchmark_attention import (
    benchmark_attention,
    error_of_rows,
    groups,
    make_inputs,
    measure_case,
    measure_once,
    runs_sdpa,
)
from lib.benchmark_attention_cases import (
    LONGEST,
    SWEEP_KERNELS,
    AttentionCase,
    attention_cases,
    target_cases,
)
from lib.benchmark_attention_report import (
    LONG,
    newest_records,
    remarks,
    targets_report,
    write_report,
)
from lib.config import AttentionBenchmarkConfig
from lib.plots_attention import STYLES, attention_rows, main_rows
from lib.report import read_records

ROOT = Path(__file__).resolve().parent.parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FILES = ("results.csv", "report.md", "forward.png", "heatmap.png", "scaling.png")
TINY = {"tokens": 64, "width": 32, "head_dims": (16,), "warmup": 1, "iters": 2, "device": "cpu"}
CASE = AttentionCase(
    queries=40,
    keys=24,
    head_dim=16,
    is_causal=True,
    direction="forward",
    dtype="float32",
    batch_size=2,
    heads=2,
    kernels=("flash_attention_torch", "vectorized_torch"),
    warmup=1,
    samples=2,
    max_seconds=1.0,
)


@pytest.fixture(autouse=True, scope="module")
def on_one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpu_with_bfloat16(monkeypatch):
    """Choices are made as on a Hopper chip; nothing runs there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_cases_are_all_combinations_with_both_directions_together():
    config = AttentionBenchmarkConfig(
        custom_tiers=("32:32", "16:64"), head_dims=(16, 32), backward=True
    )
    cases = attention_cases(config, CPU)
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 * 2
    for forward, backward in zip(cases[::2], cases[1::2]):
        assert dataclasses.replace(backward, direction="forward") == forward
    assert {(case.queries, case.keys) for case in cases} == {(32, 32), (16, 64)}


def test_all_lengths_have_the_same_tokens_times_width(gpu_with_bfloat16):
    cases = attention_cases(AttentionBenchmarkConfig(), CUDA)
    assert {max(case.queries, case.keys) for case in cases} >= {128, 16384, 32768}
    assert any(case.queries < case.keys for case in cases)
    assert any(case.queries > case.keys for case in cases)
    for case in cases:
        longest = max(case.queries, case.keys)
        assert case.batch_size * case.heads * case.head_dim * longest == 16384 * 2048
        assert case.dtype == "bfloat16"
        assert case.kernels == SWEEP_KERNELS


def test_given_numbers_of_sequences_and_heads_are_taken():
    config = AttentionBenchmarkConfig(custom_tiers=("8:8", "64:64"), batch_size=3, heads=5)
    for case in attention_cases(config, CPU):
        assert (case.batch_size, case.heads) == (3, 5)


def test_left_out_kernels_are_those_that_a_cpu_runs():
    for case in attention_cases(AttentionBenchmarkConfig(), CPU):
        assert "flash_attention_triton" not in case.kernels
        assert {"flash_attention_torch", "vectorized_torch_compiled", "sdpa"} < set(case.kernels)


@pytest.mark.parametrize("sizes", [(6, 6), (3, 7), (7, 3), (1, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_flops_count_the_pairs_that_are_visible(sizes, is_causal):
    case = dataclasses.replace(CASE, queries=sizes[0], keys=sizes[1], is_causal=is_causal)
    pairs = sum(
        not is_causal or key <= query for query in range(sizes[0]) for key in range(sizes[1])
    )
    if is_causal and case.is_square:
        # half of the square, as is customary, and not half of the diagonal more
        pairs -= sizes[0] / 2
    assert case.flops == 4 * 16 * 2 * 2 * pairs
    assert dataclasses.replace(case, direction="backward").flops == 2.5 * case.flops


def test_flops_without_a_mask_are_those_that_pytorch_counts():
    case = dataclasses.replace(CASE, is_causal=False)
    q, k, v, _ = make_inputs(case, CPU, 0)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, kernel="vectorized_torch", is_causal=False)
    assert counter.get_total_flops() == case.flops


def test_targets_have_textbook_float32_and_a_million_tokens(gpu_with_bfloat16):
    config = AttentionBenchmarkConfig(targets=True, batch_size=3, heads=5)
    cases = target_cases(config, CUDA)
    assert attention_cases(config, CUDA)[-len(cases) :] == cases
    assert all("flash_attention_triton" in case.kernels for case in cases)
    longest = [case for case in cases if case.keys == LONGEST]
    assert [case.direction for case in longest] == ["forward", "backward"]
    assert all((case.batch_size, case.heads, case.samples) == (1, 12, 1) for case in longest)
    exact = [case for case in cases if case.dtype == "float32"]
    assert min(case.queries for case in exact) == 1024
    assert {case.direction for case in exact} == {"forward", "backward"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What a benchmark of small cases leaves behind, and its records."""
    folder = tmp_path_factory.mktemp("measured")
    config = AttentionBenchmarkConfig(
        kernels=("scaled_dot_prod_attention", *CASE.kernels, "sdpa", "sdpa_flash", "sdpa_cudnn"),
        custom_tiers=("32:32", "16:64"),
        backward=True,
        output=folder,
        **TINY,
    )
    return folder, config, benchmark_attention(config)


def test_each_case_has_a_record_with_figures_of_each_kernel(measured):
    folder, config, records = measured
    assert read_records(folder / "attention_sweep.jsonl") == records
    assert len(records) == 2 * 2 * 2
    for record in records:
        case, kernels = AttentionCase(**record["config"]), record["figures"]["kernels"]
        assert list(kernels) == list(config.kernels)
        assert record["figures"]["flops"] == case.flops
        for name, row in kernels.items():
            if name == "sdpa_cudnn":
                assert row["status"] == "unsupported"
                assert row["reason"]
                continue
            assert row["status"] == "ok"
            assert row["samples"] == len(row["times_ms"]) == 2
            assert row["tflops"] == pytest.approx(case.flops / row["median_ms"] / 1e9)
            assert row["peak_memory_bytes"] > 0
            assert row["error"] < 1e-5


def test_memory_with_gradients_is_that_of_both_passes(measured):
    rows = attention_rows(measured[2])
    memory = {(row["case"], row["kernel"]): row.get("peak_memory_bytes") for row in rows}
    for (case, kernel), both in memory.items():
        if case.startswith("backward") and both is not None:
            assert both > memory[case.replace("backward", "forward"), kernel]


def test_records_become_tables_and_figures(measured):
    folder, _, records = measured
    rows = list(csv.DictReader((folder / "attention_sweep_results.csv").open()))
    assert len(rows) == sum(len(record["figures"]["kernels"]) for record in records)
    assert not any("times_ms" in row for row in rows)
    assert {row["status"] for row in rows} == {"ok", "unsupported"}
    text = (folder / "attention_sweep_report.md").read_text()
    for words in ("## Forward", "## Backward", "### TFLOP/s", "### Time (ms)", "### Peak memory"):
        assert words in text
    assert "| 16 × 64 " in text
    assert "`sdpa_cudnn` refused 8 cases: " in text
    # those are for the kernel that runs on a GPU
    assert "## Targets" not in text
    for name in FILES[2:]:
        assert (folder / f"attention_sweep_{name}").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_measures_nothing_again(measured, monkeypatch):
    folder, config, records = measured
    before = (folder / "attention_sweep.jsonl").read_bytes()
    monkeypatch.setattr(benchmark, "measure_case", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(benchmark, "write_report", lambda *_: None)
    assert benchmark_attention(config) == records
    assert (folder / "attention_sweep.jsonl").read_bytes() == before


def spoiled(monkeypatch, name: str, spoil):
    """Let `spoil` take the place of the kernel called `name`."""
    whole = benchmark.attention

    def attention(q, k, v, *, kernel, is_causal):
        if kernel == name:
            return spoil(q, k, v)
        return whole(q, k, v, kernel=kernel, is_causal=is_causal)

    monkeypatch.setattr(benchmark, "attention", attention)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernel_out_of_memory_leaves_the_others_unaffected(monkeypatch, direction):
    def spoil(q, k, v):
        raise torch.OutOfMemoryError("CUDA out of memory")

    spoiled(monkeypatch, "vectorized_torch", spoil)
    rows = measure_case(dataclasses.replace(CASE, direction=direction), device=CPU)["kernels"]
    assert rows["vectorized_torch"] == {"status": "oom"}
    assert rows["flash_attention_torch"]["status"] == "ok"


@pytest.mark.parametrize("sizes", [(40, 24), (24, 40)], ids=str)
def test_a_mask_aligned_at_the_last_key_is_wrong_and_has_no_time(monkeypatch, sizes):
    def spoil(q, k, v):
        mask = torch.ones(*sizes, dtype=torch.bool).tril(sizes[1] - sizes[0])
        return F.scaled_dot_product_attention(q, k, v, mask)

    spoiled(monkeypatch, "vectorized_torch", spoil)
    case = dataclasses.replace(CASE, queries=sizes[0], keys=sizes[1])
    rows = measure_case(case, device=CPU)["kernels"]
    assert rows["vectorized_torch"]["status"] == "wrong"
    assert "median_ms" not in rows["vectorized_torch"]
    assert rows["flash_attention_torch"]["error"] < 1e-5


def test_results_that_are_not_finite_are_wrong(monkeypatch):
    spoiled(monkeypatch, "vectorized_torch", lambda q, k, v: q / 0 * 0)
    rows = measure_case(CASE, device=CPU)["kernels"]
    assert rows["vectorized_torch"] == {"status": "wrong", "error": None}


def test_a_fault_in_our_own_kernel_is_no_result(monkeypatch):
    def spoil(q, k, v):
        raise RuntimeError("shared memory")

    spoiled(monkeypatch, "flash_attention_torch", spoil)
    with pytest.raises(RuntimeError, match="shared memory"):
        measure_case(CASE, device=CPU)


def test_scores_too_large_for_the_machine_are_oom_without_a_try(monkeypatch):
    monkeypatch.setattr(benchmark, "device_memory", lambda device: 12 * 4 * 40 * 24 - 1)
    rows = measure_case(CASE, device=CPU)["kernels"]
    assert rows["vectorized_torch"] == {"status": "oom", "was_tried": False}
    assert rows["flash_attention_torch"]["status"] == "ok"


def test_kernels_that_keep_scores_for_the_backward_pass_are_by_themselves():
    case = dataclasses.replace(CASE, kernels=SWEEP_KERNELS)
    forward, *alone = groups(case, CPU)
    assert alone == [["scaled_dot_prod_attention"]]
    assert len(forward) == len(SWEEP_KERNELS) - 1
    together, *alone = groups(dataclasses.replace(case, direction="backward"), CPU)
    held = {"vectorized_torch", "vectorized_torch_compiled", "sdpa_math"}
    assert {kernel for (kernel,) in alone} == {"scaled_dot_prod_attention", *held}
    assert sorted([*together, *(kernel for (kernel,) in alone)]) == sorted(SWEEP_KERNELS)


def test_on_a_gpu_kernels_that_the_host_holds_up_are_by_themselves():
    case = dataclasses.replace(CASE, kernels=SWEEP_KERNELS)
    together, *alone = groups(case, torch.device("cuda"))
    assert alone == [["scaled_dot_prod_attention"], ["flash_attention_torch"]]
    assert len(together) == len(SWEEP_KERNELS) - 2


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (40, 40), (100, 70), (70, 100)], ids=str)
def test_the_error_of_rows_is_that_of_the_first_and_last_queries(sizes, is_causal):
    case = dataclasses.replace(CASE, queries=sizes[0], keys=sizes[1])
    q, k, v, _ = make_inputs(case, CPU, 0)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert error_of_rows(out, q, k, v, is_causal) < 1e-6
    for row in (0, sizes[0] - 1):
        spoiled = out.clone()
        spoiled[:, :, row] += 1
        assert error_of_rows(spoiled, q, k, v, is_causal) > 0.05


def test_inputs_are_the_same_for_the_same_seed():
    first, again, other = (make_inputs(CASE, CPU, seed) for seed in (0, 0, 1))
    assert all(a.equal(b) for a, b in zip(first, again))
    assert not any(a.equal(b) for a, b in zip(first, other))
    assert [tuple(x.shape) for x in first] == [(2, 2, n, 16) for n in (40, 24, 24, 40)]


def test_attention_of_pytorchs_own_is_told_from_products():
    q, k, v, _ = make_inputs(dataclasses.replace(CASE, queries=24), CPU, 0)
    assert runs_sdpa(lambda: F.scaled_dot_product_attention(q, k, v))
    assert not runs_sdpa(lambda: attention(q, k, v, kernel="vectorized_torch"))


def test_a_compiler_that_recognises_attention_is_found_out():
    def textbook(q, k, v):
        return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v

    q, k, v, _ = make_inputs(dataclasses.replace(CASE, queries=24), CPU, 0)
    torch.compiler.reset()
    compiled = torch.compile(textbook)
    torch.testing.assert_close(compiled(q, k, v), textbook(q, k, v))
    assert runs_sdpa(lambda: compiled(q, k, v))


def test_the_record_says_which_attention_the_compiler_ran(monkeypatch):
    # what the compiler makes of it is not this test's matter
    spoiled(monkeypatch, "vectorized_torch_compiled", F.scaled_dot_product_attention)
    case = dataclasses.replace(CASE, is_causal=False, kernels=("vectorized_torch_compiled",))
    figures = measure_case(case, device=CPU)
    assert figures["kernels"]["vectorized_torch_compiled"]["became_sdpa"] is True
    records = [record_of(case, figures["kernels"])]
    assert "in 1 of 1 cases" in remarks(attention_rows(records))


def test_a_long_call_is_timed_once():
    calls = []
    result = measure_once(lambda: calls.append(torch.ones(1000)), CPU)
    assert len(calls) == result.samples == 1
    assert result.median_ms > 0
    assert result.peak_memory_bytes == 4000


def test_a_long_call_without_memory_is_oom():
    def spoil():
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert measure_once(spoil, CPU).status == "oom"


def test_a_kernel_by_itself_that_takes_long_is_timed_once():
    case = dataclasses.replace(
        CASE, kernels=("scaled_dot_prod_attention",), samples=5, max_seconds=1e-6
    )
    (row,) = measure_case(case, device=CPU)["kernels"].values()
    assert row["samples"] == 1
    patient = dataclasses.replace(case, max_seconds=100.0)
    (row,) = measure_case(patient, device=CPU)["kernels"].values()
    assert row["samples"] == 5


def record_of(case: AttentionCase, kernels: dict, status: str = "ok") -> dict:
    """A record as the sweep leaves it."""
    figures = {"status": status, "flops": case.flops, "kernels": kernels}
    rest = {"device": "chip", "versions": {"torch": "2.6"}, "commit": None, "date": "2026-01-01"}
    return {"config": dataclasses.asdict(case), "figures": figures, **rest}


def timed(**milliseconds: float) -> dict:
    """Figures of kernels that take so long; `None` is out of memory."""
    return {
        kernel: {"status": "oom"}
        if ms is None
        else {
            "status": "ok",
            "median_ms": ms,
            "mean_ms": ms,
            "iqr_ms": 0.0,
            "samples": 2,
            "tflops": 1 / ms,
            "peak_memory_bytes": 10**9,
        }
        for kernel, ms in milliseconds.items()
    }


def short_case(length: int, **changes) -> AttentionCase:
    return dataclasses.replace(CASE, queries=length, keys=length, dtype="bfloat16", **changes)


def target_lines(*records) -> list[str]:
    return [line for line in targets_report(attention_rows(records)).splitlines() if "|" in line]


def test_targets_are_met_or_not_by_their_ratios():
    times = {"flash_attention_triton": 1.0, "flex_attention": 0.99, "sdpa_cudnn": 0.91}
    text = targets_report(
        attention_rows(
            [
                record_of(short_case(4096), timed(**times, sdpa_flash=2.0)),
                record_of(short_case(1024), timed(**times | {"flex_attention": 1.5})),
                record_of(short_case(512), timed(**times)),
            ]
        )
    )
    flex, sdpa = (line for line in text.splitlines() if " of " in line and "|" in line)
    assert "| FlexAttention, N ≥ 1,024 " in flex
    assert "| 1 of 2 |" in flex
    assert " 0.990 |" in flex
    assert "causal, 4,096 × 4,096" in flex
    assert "| 1 of 1 |" in sdpa
    assert " 0.910 |" in sdpa
    # two for Flex, one for the backends
    assert text.count("forward, causal, ") - 2 == 3


def test_a_peer_out_of_memory_is_beaten_and_ours_is_not_excused():
    case = dataclasses.replace(short_case(2048), dtype="float32")
    ours = {"flash_attention_triton": 1.0, "vectorized_torch": None}
    assert any("| 1 of 1 |" in line for line in target_lines(record_of(case, timed(**ours))))
    ours = {"flash_attention_triton": None, "vectorized_torch": 1.0}
    assert any("| 0 of 1 |" in line for line in target_lines(record_of(case, timed(**ours))))


@pytest.mark.parametrize(("memory", "is_met"), [(4.0, True), (4.5, False), (None, False)])
def test_a_million_tokens_must_take_memory_linear_in_them(memory, is_met):
    shape = {"batch_size": 1, "heads": 12, "head_dim": 64}
    quarter = record_of(short_case(2**18, **shape), timed(flash_attention_triton=10.0))
    whole = record_of(short_case(2**20, **shape), timed(flash_attention_triton=160.0))
    row = whole["figures"]["kernels"]["flash_attention_triton"]
    row["peak_memory_bytes"] = memory and int(memory * 1e9)
    text = targets_report(attention_rows([quarter, whole]))
    assert f"{LONG}: met in {int(is_met)} of 1 passes" in text


def test_the_report_shows_what_ran_out_of_memory(measured, tmp_path):
    records = [dict(record) for record in measured[2]]
    # one case for want of memory for its inputs, another in one kernel
    records[0]["figures"] = {"status": "oom", "flops": 1.0, "kernels": {}}
    figures = records[4]["figures"]
    records[4]["figures"] = figures | {"kernels": figures["kernels"] | timed(sdpa=None)}
    write_report(records, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"attention_sweep_{f}" for f in FILES}
    lines = (tmp_path / "attention_sweep_report.md").read_text().splitlines()
    assert sum(" oom " in line for line in lines) == 2 * 3


def test_a_report_of_the_backward_pass_alone_has_no_bars(measured, tmp_path):
    records = [r for r in measured[2] if r["config"]["direction"] == "backward"]
    write_report(records, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "attention_sweep_heatmap.png",
        "attention_sweep_scaling.png",
    ]


def test_the_newest_record_of_a_case_counts():
    kernels = ({"sdpa": 1.0}, {"sdpa": 2.0, "flash_attention_torch": 3.0})
    old, new = (
        record_of(dataclasses.replace(CASE, kernels=tuple(times)), timed(**times))
        for times in kernels
    )
    other = record_of(dataclasses.replace(CASE, heads=3), timed(sdpa=4.0))
    assert newest_records([old, other, new]) == [new, other]


def test_figures_are_of_the_sweep_and_not_of_the_targets_own_cases():
    sweep = [record_of(short_case(n, batch_size=512 // n), timed(sdpa=1.0)) for n in (128, 256)]
    other = record_of(short_case(256, batch_size=1, heads=1), timed(sdpa=1.0))
    rows = main_rows(attention_rows([*sweep, other]))
    assert {row["heads"] for row in rows} == {2}


def test_each_kernel_has_a_look_of_its_own():
    assert set(STYLES) == set(SWEEP_KERNELS)
    assert len(set(STYLES.values())) == len(STYLES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"custom_tiers": ("128",)}, "custom_tiers has '128'; right is: QUERIES:KEYS"),
        ({"custom_tiers": ("0:8",)}, "custom_tiers has '0:8'"),
        ({"head_dims": (64, 0)}, r"head_dims is \(64, 0\)"),
        ({"masks": ()}, r"masks is \(\)"),
        ({"tokens": 0}, "tokens is 0; right is: at least 1"),
        ({"heads": -1}, "heads is -1"),
        ({"warmup": 0}, "warmup is 0"),
        ({"iters": 0}, "iters is 0"),
        ({"max_seconds": 0.0}, "max_seconds is 0.0"),
        ({"max_seconds": math.inf}, "max_seconds is inf; right is: more than 0, and finite"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808; right is: from 0 to"),
        ({"custom_tiers": ("9999999999:8",)}, "custom_tiers has '9999999999:8'"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        AttentionBenchmarkConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": ("fast",)}, "kernels has 'fast'; right is one of: scaled_dot_prod_attention"),
        ({"targets": True}, "targets is True with device cpu; right is: a CUDA device"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
    ],
)
def test_what_the_device_does_not_do_is_named(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        benchmark_attention(AttentionBenchmarkConfig(device="cpu", output=tmp_path, **changes))
    assert not list(tmp_path.iterdir())


def test_the_command_measures_and_prints_where_the_report_is(tmp_path):
    flags = ["--custom_tiers", "16:16", "8:16", "--kernels", "flash_attention_torch", "sdpa"]
    flags += ["--masks", "full", "--warmup", "1", "--iters", "2", "--tokens", "32"]
    flags += ["--device", "cpu", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "lib", "benchmark", "attention", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first.startswith("forward, full, 16 × 16, head_dim 64, float32, 2 × 4 heads: flash_att")
    assert second.startswith("forward, full, 8 × 16")
    assert last == str(tmp_path / "attention_sweep_report.md")


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("sizes", [(256, 256), (128, 384), (384, 128)], ids=str)
def test_every_kernel_runs_on_a_gpu_or_is_refused(sizes, direction):
    dtype = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    case = dataclasses.replace(
        CASE,
        queries=sizes[0],
        keys=sizes[1],
        head_dim=64,
        direction=direction,
        dtype=dtype,
        kernels=SWEEP_KERNELS,
    )
    rows = measure_case(case, device=CUDA)["kernels"]
    refused = {name for name, row in rows.items() if row["status"] == "unsupported"}
    assert refused <= {"sdpa_cudnn", "sdpa_flash", "flex_attention"}
    for name in set(rows) - refused:
        assert rows[name]["status"] == "ok", (name, rows[name])
        assert rows[name]["error"] < 0.02
        assert rows[name]["peak_memory_bytes"] > 0


SMALLEST = {"custom_tiers": ("16:16",), "batch_size": 1, "heads": 1, "masks": ("full",), "iters": 2}


def test_where_no_kernel_runs_there_is_a_report_without_figures(tmp_path):
    config = AttentionBenchmarkConfig(
        kernels=("sdpa_cudnn",), backward=True, device="cpu", output=tmp_path, **SMALLEST
    )
    assert len(benchmark_attention(config)) == 2
    report = (tmp_path / "attention_sweep_report.md").read_text()
    assert report.count("None of these kernels runs here.") == 2
    assert not list(tmp_path.glob("*.png"))


def test_the_report_has_what_was_asked_for_last(tmp_path):
    both = AttentionBenchmarkConfig(
        kernels=("sdpa", "vectorized_torch"), device="cpu", output=tmp_path, **SMALLEST
    )
    for config in (both, dataclasses.replace(both, kernels=("sdpa",)), both):
        benchmark_attention(config)
        rows = (tmp_path / "attention_sweep_results.csv").read_text()
        assert ("vectorized_torch" in rows) == (config is both)
    assert len((tmp_path / "attention_sweep.jsonl").read_text().splitlines()) == 2
