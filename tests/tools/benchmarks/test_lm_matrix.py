"""The language-model matrix: real ranks in small, and reports from planted records."""

import csv
import dataclasses
import math
from pathlib import Path

import pytest

from lib.__main__ import main
from lib.core.records import read_records
from lib.core.settings import to_dict
from lib.ddp.settings import DDP_WRAPPERS
from lib.model.costs import num_parameters
from lib.tools.benchmarks.lm_matrix import LmMatrixConfig, compare_with_none
from lib.tools.benchmarks.lm_matrix_report import (
    comparison_table,
    make_settings,
    matrix_rows,
    target_table,
    write_report,
)
from lib.tools.benchmarks.multi_rank_report import Setting
from lib.tools.benchmarks.rank_training import TrainingCase
from tests.tools.benchmarks.rank_benchmarks import SIZES, SMALL, flags
from tests.tools.benchmarks.rank_benchmarks import plant as plant_record

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
    """The cells that run here."""
    return {cell: figures for cell, figures in all_figures.items() if cell[0] != REFUSED}


@pytest.mark.slow
def test_each_cell_is_a_record_and_a_kernel_that_does_not_run_here_is_refused(all_figures):
    assert list(all_figures) == [(k, name) for k in (REFUSED, *KERNELS) for name in WRAPPERS]
    for (kernel, _), figures in all_figures.items():
        assert figures["status"] == ("refused" if kernel == REFUSED else "ok")
        assert kernel != REFUSED or "cpu" in figures["reason"]
        if kernel != REFUSED:
            assert len(figures["times_ms"]) == SMALL["timed_epochs"]
            seconds = figures["median_ms"] / 1e3
            assert figures["epoch_s"] == pytest.approx(seconds * SMALL["steps_per_epoch"])


@pytest.mark.slow
def test_wrappers_train_as_one_process_on_the_batches_of_all_ranks(figures_of):
    for (_, wrapper), figures in figures_of.items():
        if wrapper == "none":
            assert "losses" not in figures
            continue
        reference = figures["reference_losses"]
        assert len(reference) == SMALL["epochs"] * SMALL["steps_per_epoch"]
        assert reference[0] == pytest.approx(math.log(SIZES["vocab_size"]), rel=0.1)
        # the comparison says something only if the model learns
        assert reference[-1] < reference[0] - 0.02
        assert figures["losses"] == pytest.approx(reference, abs=1e-5)
        assert figures["loss_difference"] < 1e-5


@pytest.mark.slow
def test_only_wrappers_communicate_and_memory_holds_weights_gradients_and_moments(figures_of):
    config = LmMatrixConfig(**SMALL).with_defaults(2, on_gpu=False)
    state = 16 * num_parameters(config.shape())
    for (_, wrapper), figures in figures_of.items():
        assert state < figures["peak_memory_bytes"] < 6 * state
        assert figures["exposed_from"] == "operators"
        total, exposed = figures["communication_ms"], figures["exposed_communication_ms"]
        assert (total > 0) == (wrapper != "none")
        assert 0 <= exposed <= total <= figures["traced_step_ms"]


@pytest.mark.slow
def test_tables_and_figures_are_written(measured, all_figures):
    rows = list(csv.DictReader((measured / "lm_matrix_results.csv").open()))
    assert [(row["kernel"], row["wrapper"]) for row in rows] == list(all_figures)
    report = (measured / "lm_matrix_report.md").read_text()
    assert "2 processes on one CPU" in report
    assert report.count("| sdpa ") == len(WRAPPERS) + 1
    reason = all_figures[REFUSED, "none"]["reason"]
    assert f"- {REFUSED}, none: refused: {reason}" in report
    assert all((measured / f"lm_matrix_{name}.png").stat().st_size > 10_000 for name in FIGURES)


def test_defaults_are_tiny_on_a_cpu_and_the_matrix_model_on_gpus():
    chosen = LmMatrixConfig().with_defaults(2, on_gpu=True)
    assert (chosen.model, chosen.tr_batch_size, chosen.backend) == ("matrix", 8, "nccl")
    assert chosen.shape().context_length == 256
    on_cpu = LmMatrixConfig().with_defaults(2, on_gpu=False)
    assert (on_cpu.model, on_cpu.backend, on_cpu.wrappers) == ("tiny", "gloo", DDP_WRAPPERS)
    assert "flash_attention_triton" not in on_cpu.kernels
    with pytest.raises(ValueError, match="d_model"):
        LmMatrixConfig(d_model=30).with_defaults(2, on_gpu=False)


def test_efficiency_and_overhead_compare_epoch_by_epoch_with_none():
    rows = {
        "none": {"times_ms": [10.0, 20.0, 40.0], "peak_memory_bytes": 1000},
        "flat": {"times_ms": [20.0, 25.0, 40.0], "peak_memory_bytes": 1100},
        "naive": {"times_ms": [20.0, 40.0, 80.0], "peak_memory_bytes": None},
    }
    further = compare_with_none(rows)
    assert further["flat"]["scaling_efficiency"] == 0.8
    assert further["flat"]["iqr_scaling_efficiency"] == pytest.approx(0.25)
    assert further["flat"]["memory_overhead"] == pytest.approx(0.1)
    assert further["naive"]["scaling_efficiency"] == 0.5
    assert further["naive"]["memory_overhead"] is None
    assert further["none"]["scaling_efficiency"] == 1
    del rows["none"]
    assert compare_with_none(rows)["flat"] == dict.fromkeys(further["flat"])


@pytest.fixture
def case() -> TrainingCase:
    config = LmMatrixConfig(**SMALL).with_defaults(2, on_gpu=False)
    return config.case("sdpa", "flat", "float32")


def plant(folder: Path, case: TrainingCase, milliseconds: float | None, **figures) -> None:
    """Add the record of a cell."""
    planted = {}
    if milliseconds is not None:
        planted = {
            "parameters": 1234,
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
    plant_record(folder / "lm_matrix.jsonl", case, milliseconds, **planted | figures)


def settings_in(folder: Path) -> list[Setting]:
    return make_settings(matrix_rows(read_records(folder / "lm_matrix.jsonl")))


@pytest.fixture
def planted(tmp_path, case) -> Path:
    """Records of two settings, of a cell measured again, and of one that failed."""
    for wrapper, milliseconds in (("none", 5.0), ("torch_ddp", 12.0), ("flashddp", 11.0)):
        plant(tmp_path, dataclasses.replace(case, wrapper=wrapper), milliseconds)
    plant(tmp_path, dataclasses.replace(case, wrapper="flashddp", epochs=9), 10.0)
    plant(tmp_path, dataclasses.replace(case, wrapper="flashddp", compile=True), 7.0)
    plant(tmp_path, dataclasses.replace(case, wrapper="naive", compile=True), None)
    return tmp_path


def test_settings_are_never_mixed_and_newer_rows_replace_older_ones(planted):
    settings = settings_in(planted)
    times = [[(r["wrapper"], r.get("median_ms")) for r in setting.rows] for setting in settings]
    assert times == [
        [("none", 5.0), ("torch_ddp", 12.0), ("flashddp", 10.0)],
        [("flashddp", 7.0), ("naive", None)],
    ]
    titles = [setting.title.split("; ")[0].split(": ")[1] for setting in settings]
    assert titles == ["float32, eager", "float32, compiled"]


def test_each_setting_has_a_section_with_a_title_of_its_own(case):
    changes = {"dtype": "bfloat16", "tr_batch_size": 3, "context_length": 8, "ranks": 4}
    changes |= {"cuda_graph": True, "low_precision_weights": True, "model": "small", "d_ff": 64}
    changes["bucket_size_mb"] = 1.0
    changed = [dataclasses.replace(case, **{name: value}) for name, value in changes.items()]
    settings = make_settings([to_dict(c) | {"device": "H"} for c in (case, *changed)])
    assert [len(setting.rows) for setting in settings] == [1] * (1 + len(changes))
    assert len({setting.title for setting in settings}) == len(settings)


def test_flashddp_is_compared_with_peers_of_the_same_launch_alone(planted, case):
    first, second = settings_in(planted)
    (line,) = comparison_table(first.rows)
    assert (line["flashddp against"], line["times as fast"]) == ("torch_ddp", 1.2)
    assert comparison_table(second.rows) == []
    plant(planted, dataclasses.replace(case, wrapper="flashddp"), 10.0, launch="second")
    assert comparison_table(settings_in(planted)[0].rows) == []


def test_targets_are_shown_for_gpus_and_not_for_a_cpu(planted, tmp_path, case):
    assert target_table(settings_in(planted)) == []
    folder, on_gpus = tmp_path / "gpus", dataclasses.replace(case, backend="nccl")
    for wrapper, milliseconds in (("torch_ddp", 12.0), ("naive", 15.0), ("flashddp", 10.0)):
        plant(folder, dataclasses.replace(on_gpus, wrapper=wrapper), milliseconds)
    settings = settings_in(folder)
    (line,) = target_table(settings)
    assert list(line.values())[1:] == ["sdpa", 1.2, 0, 1.5, 50.0, 0.1]
    # all are of one machine, so the line does not name it
    assert settings[0].title.startswith(f"{line['setting']}; 2 × ")


def test_the_report_has_a_section_per_setting_comparisons_and_reasons(planted):
    write_report(read_records(planted / "lm_matrix.jsonl"), planted)
    report = (planted / "lm_matrix_report.md").read_text()
    assert report.count("\n## ") == 2
    assert "1,234 parameters" in report
    assert report.count("flashddp against") == 1
    assert "- sdpa, naive: oom: memory is full" in report


def test_a_setting_of_failures_alone_has_figures(tmp_path, case):
    plant(tmp_path, case, None)
    write_report(read_records(tmp_path / "lm_matrix.jsonl"), tmp_path)
    assert all((tmp_path / f"lm_matrix_{name}.png").stat().st_size > 1000 for name in FIGURES)
