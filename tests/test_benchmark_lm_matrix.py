"""The language-model matrix: real ranks in small, failures, and reports from planted records."""

import csv
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
from rank_benchmarks import flags

from lib import benchmark_turns
from lib.__main__ import main
from lib.benchmark_lm_matrix import benchmark_lm_matrix
from lib.benchmark_lm_matrix_cases import (
    LmMatrixCase,
    fits_together,
    loss_difference,
    make_case,
    paired_figures,
    settled,
    skewed_tokens,
)
from lib.benchmark_lm_matrix_report import make_sections, matrix_rows, section_title, write_report
from lib.benchmark_lm_matrix_training import Training
from lib.benchmark_turns import Plan, after_failure, leave_note, measure, read_notes
from lib.config_lm_matrix import LmMatrixConfig
from lib.config_training import DDP_WRAPPERS
from lib.data import BatchSampler
from lib.distributed import launch, rank
from lib.model_costs import num_parameters
from lib.report import append_record, new_record, read_records
from lib.strict_json import to_dict

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
SMALL = {
    **SIZES,
    "context_length": 16,
    "tr_batch_size": 2,
    "epochs": 3,
    "timed_epochs": 2,
    "steps_per_epoch": 2,
    "trace_steps": 1,
    "timeout": 60.0,
}
REFUSED, KERNELS = "flash_attention_triton", ("sdpa", "vectorized_torch")
WRAPPERS = ("none", "flashddp", "torch_ddp")
FIGURES = ("time", "memory", "throughput", "losses")


pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """The folder of a matrix of two kernels that run here after one that does not, on two ranks."""
    folder = tmp_path_factory.mktemp("matrix")
    cells = ["--kernels", REFUSED, *KERNELS, "--wrappers", *WRAPPERS]
    command = ["benchmark", "lm-matrix", *cells, *flags(**SMALL, output=folder)]
    assert main([*command, "--backend", "gloo"]) == 0
    return folder


@pytest.fixture(scope="module")
def all_figures(measured) -> dict[tuple[str, str], dict]:
    records = read_records(measured / "lm_matrix.jsonl")
    return {(r["config"]["kernel"], r["config"]["wrapper"]): r["figures"] for r in records}


@pytest.fixture(scope="module")
def figures_of(all_figures) -> dict[tuple[str, str], dict]:
    """Of the cells that run."""
    return {cell: figures for cell, figures in all_figures.items() if cell[0] != REFUSED}


def test_each_cell_is_measured_once(all_figures, figures_of):
    assert list(all_figures) == [(k, name) for k in (REFUSED, *KERNELS) for name in WRAPPERS]
    assert {figures["status"] for figures in figures_of.values()} == {"ok"}


def test_a_kernel_that_does_not_run_here_is_refused_with_its_reason(measured, all_figures):
    report = (measured / "lm_matrix_report.md").read_text()
    for name in WRAPPERS:
        figures = all_figures[REFUSED, name]
        assert figures["status"] == "refused"
        assert "runs on a CUDA GPU and not on cpu" in figures["reason"]
        assert f"- {REFUSED}, {name}: refused: {figures['reason']}" in report


def test_tokens_and_epochs_follow_from_the_time_of_a_step(figures_of):
    for figures in figures_of.values():
        assert figures["samples"] == len(figures["times_ms"]) == SMALL["timed_epochs"]
        seconds = figures["median_ms"] / 1e3
        tokens = 2 * SMALL["tr_batch_size"] * SMALL["context_length"]
        assert figures["tokens_per_s"] == pytest.approx(tokens / seconds)
        assert figures["epoch_s"] == pytest.approx(seconds * SMALL["steps_per_epoch"])


def test_wrappers_train_as_one_process_on_the_union_of_the_batches(figures_of):
    for (_, wrapper), figures in figures_of.items():
        if wrapper == "none":
            assert "losses" not in figures
            continue
        reference = figures["reference_losses"]
        assert len(reference) == SMALL["epochs"] * SMALL["steps_per_epoch"]
        assert reference[0] == pytest.approx(math.log(SIZES["vocab_size"]), rel=0.1)
        assert figures["losses"] == pytest.approx(reference, abs=1e-5)
        assert figures["loss_difference"] < 1e-5


def test_losses_fall_so_that_the_comparison_says_something(figures_of):
    losses = figures_of["sdpa", "flashddp"]["losses"]
    assert losses[-1] < losses[0] - 0.02


def test_only_wrappers_communicate_and_no_more_is_exposed_than_there_is(figures_of):
    for (_, wrapper), figures in figures_of.items():
        assert figures["exposed_from"] == "operators"
        total, exposed = figures["communication_ms"], figures["exposed_communication_ms"]
        assert (total > 0) == (wrapper != "none")
        assert 0 <= exposed <= total <= figures["traced_step_ms"]


def test_memory_holds_weights_gradients_and_moments(figures_of):
    config = settled(LmMatrixConfig(**SMALL), 2, on_gpu=False)
    state = 16 * num_parameters(config.shape())
    for figures in figures_of.values():
        assert state < figures["peak_memory_bytes"] < 6 * state


def test_efficiency_is_that_of_the_turns(figures_of):
    for kernel in KERNELS:
        rows = {name: figures_of[kernel, name] for name in WRAPPERS}
        assert rows["none"]["scaling_efficiency"] == 1
        assert paired_figures(rows)["flashddp"].items() <= rows["flashddp"].items()


def test_tables_and_figures_are_written(measured):
    rows = list(csv.DictReader((measured / "lm_matrix_results.csv").open()))
    assert [(row["kernel"], row["wrapper"]) for row in rows] == [
        (kernel, name) for kernel in (REFUSED, *KERNELS) for name in WRAPPERS
    ]
    report = (measured / "lm_matrix_report.md").read_text()
    assert "2 processes on one CPU" in report
    assert report.count("| sdpa ") == len(WRAPPERS) + 1
    for name in FIGURES:
        image = matplotlib.image.imread(measured / f"lm_matrix_{name}.png")
        assert min(image.shape[:2]) > 300
        assert image[..., :3].std() > 0.02


def test_one_rank_is_measured_alone(tmp_path, capsys):
    config = LmMatrixConfig(("sdpa",), ("none", "flashddp"), ranks=1, output=tmp_path, **SMALL)
    alone, wrapped = (record["figures"] for record in benchmark_lm_matrix(config))
    assert alone["losses"] == wrapped["losses"] == wrapped["reference_losses"]
    assert wrapped["communication_ms"] == 0


def measure_with_a_full_rank(*arguments) -> None:
    """`measure`, where memory is full on rank 1 for `flashddp`, while rank 0 waits for it."""
    take = Training.take

    def full(self: Training, steps: int) -> None:
        if rank() == 1 and self.case.wrapper == "flashddp":
            raise torch.OutOfMemoryError("CUDA out of memory: planted")
        take(self, steps)

    Training.take = full
    measure(*arguments)


def test_memory_full_on_one_rank_ends_its_cell_and_no_other(tmp_path, monkeypatch, capsys):
    def launch_full(fn, *arguments, **options):
        assert fn is measure
        return launch(measure_with_a_full_rank, *arguments, **options)

    monkeypatch.setattr(benchmark_turns, "launch", launch_full)
    settings = SMALL | {"loss_steps": 0, "trace_steps": 0, "epochs": 2, "timed_epochs": 1}
    config = LmMatrixConfig(("sdpa",), ("flashddp", "flat"), output=tmp_path, **settings)
    records = benchmark_lm_matrix(config)
    rows = {record["config"]["wrapper"]: record["figures"] for record in records}
    assert rows["flashddp"]["status"] == "oom"
    assert "planted" in rows["flashddp"]["reason"]
    assert rows["flat"]["status"] == "ok"
    # tried again with one model at a time, then without it
    assert capsys.readouterr().out.count("planted") == 2


def test_under_torchrun_rank_0_alone_writes_and_prints(tmp_path, quiet_environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "lib"]
    command += ["benchmark", "lm-matrix", "--kernels", "sdpa", "--wrappers", "none", "naive"]
    done = subprocess.run(
        [*command, *flags(**SMALL, output=tmp_path), "--backend", "gloo"],
        cwd=ROOT,
        env=quiet_environment | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(read_records(tmp_path / "lm_matrix.jsonl")) == 2
    assert done.stdout.count("lm_matrix_report.md") == 1
    assert done.stdout.count("sdpa, naive: ") == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kernels": ("sdpa", "fast")}, "kernels is ('sdpa', 'fast'); right is: different ones of"),
        ({"wrappers": ("ddp",)}, "wrappers is ('ddp',); right is: different ones of none, naive"),
        ({"wrappers": ("flat", "flat")}, "different ones"),
        ({"wrappers": ()}, "at least one"),
        ({"model": "huge"}, "model is 'huge'; right is: one of tiny"),
        ({"model": "small", "num_heads": 7}, "d_model 768 is not divisible by num_heads 7"),
        ({"epochs": 5, "timed_epochs": 5}, "epochs is 5; right is: more than timed_epochs 5"),
        ({"ranks": 0}, "ranks is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_a_wrong_setting_is_named(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        LmMatrixConfig(**settings)


def test_what_does_not_fit_the_machine_is_refused_before_it_starts():
    with pytest.raises(ValueError, match="ranks is 4, but torchrun started 2"):
        settled(LmMatrixConfig(ranks=4), 2, on_gpu=False)
    with pytest.raises(ValueError, match="cuda_graph is True on a CPU"):
        settled(LmMatrixConfig(cuda_graph=True), 2, on_gpu=False)
    with pytest.raises(ValueError, match="d_model 30 is not divisible by num_heads 4"):
        settled(LmMatrixConfig(d_model=30), 2, on_gpu=False)


def test_defaults_are_tiny_on_a_cpu_and_the_matrix_model_on_gpus():
    chosen = settled(LmMatrixConfig(), 2, on_gpu=True)
    assert (chosen.model, chosen.tr_batch_size, chosen.backend) == ("matrix", 8, "nccl")
    assert chosen.shape().context_length == 256
    on_cpu = settled(LmMatrixConfig(), 2, on_gpu=False)
    assert (on_cpu.model, on_cpu.backend, on_cpu.wrappers) == ("tiny", "gloo", DDP_WRAPPERS)
    assert "flash_attention_triton" not in on_cpu.kernels


@pytest.fixture
def case() -> LmMatrixCase:
    return make_case(settled(LmMatrixConfig(**SMALL), 2, on_gpu=False), "sdpa", "flat", "float32")


def test_settings_reach_the_training(case):
    changes = {"compile": True, "low_precision_weights": True, "bucket_size_mb": 3.0}
    training = dataclasses.replace(case, cuda_graph=True, **changes).training(log_interval=4)
    assert training.cuda_graph
    assert {name: getattr(training, name) for name in changes} == changes
    assert training.ddp_wrapper == "flat"
    assert training.model.attention_kernel == "sdpa"
    assert {name: getattr(training.model, name) for name in SIZES} == SIZES
    assert training.batch_size == SMALL["tr_batch_size"]


def test_an_epoch_is_once_through_the_tokens(case):
    tokens = skewed_tokens(case, seed=0)
    sampler = BatchSampler(
        len(tokens), case.context_length, case.tr_batch_size, seed=0, world_size=case.ranks
    )
    assert sampler.num_windows == case.steps_per_epoch * sampler.windows_per_step
    assert tokens.min() >= 0
    assert tokens.max() < case.vocab_size
    # half of u⁴ lies below 1/16
    assert (tokens < case.vocab_size / 16).mean() == pytest.approx(0.5, abs=0.15)


def test_models_are_held_together_only_where_they_fit():
    def cases(model: str, **settings) -> list[LmMatrixCase]:
        config = settled(LmMatrixConfig(model=model, **settings), 2, on_gpu=True)
        return [make_case(config, "sdpa", name, "bfloat16") for name in DDP_WRAPPERS]

    assert fits_together(cases("large"), 140e9)
    assert not fits_together(cases("large"), 80e9)
    assert not fits_together(cases("xl"), 140e9)
    # graphs keep what their steps work on
    assert fits_together(cases("medium", tr_batch_size=64), 120e9)
    assert not fits_together(cases("medium", tr_batch_size=64, cuda_graph=True), 120e9)


def test_efficiency_and_overhead_compare_turn_by_turn_with_none():
    rows = {
        "none": {"times_ms": [10.0, 20.0, 40.0], "peak_memory_bytes": 1000},
        "flat": {"times_ms": [20.0, 25.0, 40.0], "peak_memory_bytes": 1100},
        "naive": {"times_ms": [20.0, 40.0, 80.0], "peak_memory_bytes": None},
    }
    further = paired_figures(rows)
    assert further["flat"]["scaling_efficiency"] == 0.8
    assert further["flat"]["iqr_scaling_efficiency"] == pytest.approx(0.25)
    assert further["flat"]["memory_overhead"] == pytest.approx(0.1)
    assert further["naive"]["scaling_efficiency"] == 0.5
    assert further["naive"]["memory_overhead"] is None
    assert further["none"]["scaling_efficiency"] == 1
    del rows["none"]
    assert paired_figures(rows)["flat"] == dict.fromkeys(further["flat"])


def test_losses_are_compared_step_by_step():
    assert loss_difference([3.0, 2.0, 1.0], [3.0, 2.5]) == 0.5
    assert loss_difference([3.0], []) is None


def test_after_a_failure_the_rest_is_left():
    first, second = Plan("sdpa", ("none", "flat")), Plan("vectorized_torch", ("none",))
    alone = dataclasses.replace(first, is_together=False)
    assert after_failure([first, second], "sdpa", "flat", "oom") == ([alone, second], False)
    without = dataclasses.replace(alone, names=("none",))
    assert after_failure([alone, second], "sdpa", "flat", "oom") == ([without, second], True)
    assert after_failure([first, second], "vectorized_torch", "none", "failed") == ([], True)
    unreferenced = dataclasses.replace(first, has_reference=False)
    assert after_failure([first], "sdpa", None, "oom") == ([unreferenced], False)


def test_the_first_reason_counts_else_what_the_lost_rank_did(tmp_path):
    assert read_notes(tmp_path, 1) is None
    leave_note(tmp_path, 0, wrapper="flat")
    leave_note(tmp_path, 1, wrapper="naive")
    assert read_notes(tmp_path, 1)["wrapper"] == "naive"
    leave_note(tmp_path, 1, wrapper="naive", reason="memory")
    leave_note(tmp_path, 0, wrapper="naive", reason="connection closed by rank 1")
    assert read_notes(tmp_path, 0)["reason"] == "memory"


def plant(path: Path, case: LmMatrixCase, milliseconds: float | None, **figures) -> None:
    """Add a record of a cell: of three turns, or of a failed one."""
    planted = {"status": "oom", "reason": "memory is full"}
    if milliseconds is not None:
        planted = {
            "status": "ok",
            "launch": "first",
            "parameters": 1234,
            "tokens_per_s": 64 / milliseconds * 1e3,
            "median_ms": milliseconds,
            "iqr_ms": 0.0,
            "samples": 3,
            "times_ms": [milliseconds] * 3,
            "epoch_s": milliseconds / 500,
            "peak_memory_bytes": 10**6,
            "scaling_efficiency": 0.5,
            "memory_overhead": 0.001,
            "communication_ms": 2.0,
            "exposed_communication_ms": 1.0,
            "losses": [4.0, 3.0],
            "reference_losses": [4.0, 3.001],
            "loss_difference": 0.001,
        }
    append_record(path, new_record(planted | figures, config=to_dict(case), device="cpu"))


@pytest.fixture
def planted(tmp_path, case) -> Path:
    """Records of two settings, of a cell measured again, and of one that failed."""
    path = tmp_path / "lm_matrix.jsonl"
    for wrapper, milliseconds in (("none", 5.0), ("torch_ddp", 12.0), ("flashddp", 11.0)):
        plant(path, dataclasses.replace(case, wrapper=wrapper), milliseconds)
    plant(path, dataclasses.replace(case, wrapper="flashddp", epochs=9), 10.0)
    plant(path, dataclasses.replace(case, wrapper="flashddp", compile=True), 7.0)
    plant(path, dataclasses.replace(case, wrapper="naive", compile=True), None)
    write_report(read_records(path), tmp_path)
    return tmp_path


def test_settings_are_never_mixed_and_newer_rows_replace_older_ones(planted):
    sections = make_sections(matrix_rows(read_records(planted / "lm_matrix.jsonl")))
    times = [[(r["wrapper"], r.get("median_ms")) for r in section.rows] for section in sections]
    assert times == [
        [("none", 5.0), ("torch_ddp", 12.0), ("flashddp", 10.0)],
        [("flashddp", 7.0), ("naive", None)],
    ]
    titles = [section.title.split("; ")[0].split(": ")[1] for section in sections]
    assert titles == ["float32, eager", "float32, compiled"]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"tr_batch_size": 3},
        {"context_length": 8},
        {"ranks": 4},
        {"cuda_graph": True},
        {"low_precision_weights": True},
        {"model": "small"},
        {"d_ff": 64},
        {"bucket_size_mb": 1.0},
    ],
)
def test_each_setting_has_a_section_with_a_title_of_its_own(tmp_path, case, change):
    path = tmp_path / "records.jsonl"
    plant(path, case, 5.0)
    plant(path, dataclasses.replace(case, **change), 6.0)
    first, second = make_sections(matrix_rows(read_records(path)))
    assert len(first.rows) == len(second.rows) == 1
    assert first.title != second.title


def test_the_report_compares_with_peers_of_the_same_launch_alone(planted, case):
    path = planted / "lm_matrix.jsonl"
    report = (planted / "lm_matrix_report.md").read_text()
    assert report.count("flashddp against") == 1
    (line,) = [line for line in report.splitlines() if "| torch_ddp        |" in line]
    assert "1.20" in line
    plant(path, dataclasses.replace(case, wrapper="flashddp"), 10.0, launch="second")
    write_report(read_records(path), planted)
    assert "flashddp against" not in (planted / "lm_matrix_report.md").read_text()


def test_a_line_says_how_flashddp_stands_on_gpus_and_none_on_a_cpu(tmp_path, planted, case):
    assert "How flashddp stands" not in (planted / "lm_matrix_report.md").read_text()
    path, on_gpus = tmp_path / "gpus.jsonl", dataclasses.replace(case, backend="nccl", ranks=2)
    for wrapper, milliseconds in (("torch_ddp", 12.0), ("naive", 15.0), ("flashddp", 10.0)):
        plant(path, dataclasses.replace(on_gpus, wrapper=wrapper), milliseconds)
    write_report(read_records(path), tmp_path)
    report = (tmp_path / "lm_matrix_report.md").read_text()
    table = report.split("turn by turn.\n\n")[1].split("\n\n")[0].splitlines()
    (line,) = table[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == ["1.20", "0", "1.50", "50.0", "0.100"]


def test_a_cell_that_failed_is_a_row_with_its_reason(planted):
    report = (planted / "lm_matrix_report.md").read_text()
    assert "- sdpa, naive: oom: memory is full" in report
    rows = list(csv.DictReader((planted / "lm_matrix_results.csv").open()))
    assert [row["status"] for row in rows] == ["ok"] * 4 + ["oom"]
    assert json.dumps(rows).count("memory is full") == 1


def test_a_section_of_failures_alone_has_figures(tmp_path, case):
    plant(tmp_path / "lm_matrix.jsonl", case, None)
    write_report(read_records(tmp_path / "lm_matrix.jsonl"), tmp_path)
    assert all((tmp_path / f"lm_matrix_{name}.png").stat().st_size > 1000 for name in FIGURES)


def test_a_title_names_sizes_that_are_not_the_presets(case):
    row = to_dict(case) | {"device": "H"}
    assert section_title(row).startswith("tiny, d_model 32, d_ff 48, num_layers 2, vocab_size 61:")
    gpus = row | {"backend": "nccl", "device": "NVIDIA H200", "dtype": "bfloat16"}
    assert section_title(gpus).endswith("bfloat16, eager; 2 × 2 × 16 tokens; 2 × NVIDIA H200")


def test_settings_that_are_refused_leave_no_file(tmp_path):
    settings = SMALL | {"d_model": 100, "num_heads": 3, "output": tmp_path / "new"}
    config = LmMatrixConfig(("sdpa",), **settings)
    with pytest.raises(ValueError, match="d_model 100 is not divisible"):
        benchmark_lm_matrix(config)
    assert not config.output.exists()
