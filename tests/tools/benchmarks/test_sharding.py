"""The sharding benchmark and the matrix: real ranks in small, and reports of planted records."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from lib.core.records import read_records
from lib.model.config import model_preset
from lib.model.costs import num_parameters
from lib.optimizer import AdamW
from lib.sharded_optimizer import ShardedOptimizer
from lib.tools.benchmarks import lm_matrix, ranks_report, sharding
from lib.tools.benchmarks.harness import Case
from lib.tools.benchmarks.lm_matrix import LmMatrixConfig
from lib.tools.benchmarks.rank_memory import bytes_at_marks, held_bytes, predicted_bytes
from lib.tools.benchmarks.rank_training import predicted_memory
from lib.tools.benchmarks.sections import to_rows
from lib.tools.benchmarks.sharding import (
    ShardingConfig,
    benchmark_sharding,
    compare_with_base,
    comparisons,
    measured,
    sharding_frame,
)
from tests.tools.benchmarks import rank_benchmarks
from tests.tools.benchmarks.rank_benchmarks import cases_of, plant
from tests.tools.benchmarks.tables import rows_of

METHODS = ("none", "flashddp", "zero1", "torch_ddp+torch_zero")
SMALL = {
    # enough tokens that activations are most of the peak
    "tr_batch_size": 4,
    "epochs": 2,
    "timed_epochs": 1,
    "steps_per_epoch": 2,
    "trace_steps": 0,
    "bucket_size_mb": 1.0,
    "timeout": 60.0,
}
WEIGHTS = num_parameters(model_preset("tiny"))

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.fixture(scope="module")
def figures_of(tmp_path_factory) -> dict[str, dict]:
    """The figures of each method on two ranks."""
    folder = tmp_path_factory.mktemp("sharding")
    config = ShardingConfig(methods=METHODS, backend="gloo", output=folder, **SMALL)
    records = benchmark_sharding(config)
    rows = list(csv.DictReader((folder / "sharding_benchmark.csv").open()))
    assert [row["method"] for row in rows] == list(METHODS)
    assert "gloo's own copies are in the bytes" in (folder / "sharding_benchmark.md").read_text()
    return {record["config"]["method"]: record["figures"] for record in records}


@pytest.mark.slow
def test_the_state_of_a_rank_is_its_share_within_one_percent(figures_of):
    for method, ranks in (("none", 1), ("flashddp", 1), ("zero1", 2), ("torch_ddp+torch_zero", 2)):
        by_rank = figures_of[method]["optimizer_state_by_rank"]
        assert by_rank == pytest.approx([8 * WEIGHTS / ranks] * 2, rel=0.01)
        if method != "none":
            assert figures_of[method]["state_share"] == pytest.approx(1 / ranks, rel=0.01)


@pytest.mark.slow
def test_measured_bytes_are_those_of_the_formulas(figures_of):
    assert figures_of["zero1"]["saved_predicted_bytes"] == pytest.approx(4 * WEIGHTS, rel=0.001)
    assert figures_of["zero1"]["saved_measured_bytes"] == pytest.approx(4 * WEIGHTS, rel=0.1)
    for method, figures in figures_of.items():
        held, predicted = figures["measured"], figures["predicted"]
        assert held["parameters"] == pytest.approx(4 * WEIGHTS, rel=0.001)
        for kind in ("gradients", "optimizer_state"):
            assert held[kind] == pytest.approx(predicted[kind], rel=0.01), (method, kind)
        # PyTorch's ZeRO may still hold what it broadcasts when the next forward pass begins
        late = 4 * WEIGHTS if method.endswith("torch_zero") else 0
        assert 0.97 * predicted["peak"] <= held["peak"] <= 1.03 * predicted["peak"] + late, method
        # gloo copies what DDP broadcasts, and what zero1 sends between two steps
        if method in ("none", "flashddp"):
            assert held["initialized"] == pytest.approx(predicted["initialized"], rel=0.01)
        if method != "zero1":
            for kind in ("before_step", "after_step"):
                assert 0.98 * predicted[kind] <= held[kind] <= 1.02 * predicted[kind] + late, (
                    method,
                    kind,
                )
            # what is freed during the forward pass is missing from the activations
            low = 0.98 * predicted["activations"] - late
            assert low <= held["activations"] <= 1.02 * predicted["activations"], method


@pytest.mark.slow
def test_sharding_keeps_the_losses(figures_of):
    assert len(figures_of["flashddp"]["losses"]) == SMALL["epochs"] * SMALL["steps_per_epoch"]
    for method in METHODS[1:]:
        assert figures_of[method]["loss_difference"] < 1e-5
    # a rank of `none` sees its own batches alone
    assert "loss_difference" not in figures_of["none"]


def event(name: str, time: int, **arguments: int) -> dict:
    return {"name": name, "ts": time, "args": arguments}


@pytest.mark.parametrize("settings", [{}, {"strategy": "flat", "reduces_gradients": True}])
def test_gradients_of_shards_are_held_too(settings):
    model = torch.nn.Linear(4, 4)
    optimizer = ShardedOptimizer(model.parameters(), AdamW, lr=0.1, **settings)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.finish_gradient_synchronization()
    parallel = SimpleNamespace(is_sharded=True)
    held = held_bytes(SimpleNamespace(model=model, optimizer=optimizer, parallel=parallel))
    assert held == {"parameters": 80, "gradients": 80, "optimizer_state": 0}


def test_bytes_at_marks_are_the_live_blocks_and_the_peak_since_the_step_began():
    events = [
        event("[memory]", 1, Addr=100, Bytes=50),
        event("[memory]", 2, Addr=200, Bytes=30),
        event("[memory]", 3, Addr=200, Bytes=-30),
        event("moment: begin", 4),
        event("[memory]", 5, Addr=300, Bytes=20),
        event("aten::mm", 6),
        event("moment: after_forward", 7),
        event("[memory]", 8, Addr=300, Bytes=-20),
        event("moment: after_step", 9),
        # freed, but allocated before the trace
        event("[memory]", 10, Addr=900, Bytes=-20),
    ]
    found = bytes_at_marks(reversed(events))
    assert found == {"begin": 50, "after_forward": 70, "after_step": 50, "peak": 70}


def test_a_block_that_overlaps_a_new_one_was_freed_before():
    events = [
        event("[memory]", 1, Addr=100, Bytes=50),
        event("[memory]", 2, Addr=150, Bytes=50),
        event("[memory]", 3, Addr=200, Bytes=50),
        # over the first two
        event("[memory]", 4, Addr=140, Bytes=20),
        event("moment: begin", 5),
    ]
    assert bytes_at_marks(events)["begin"] == 50 + 20


def test_methods_are_compared_with_flashddp_epoch_by_epoch():
    def row(times, state, peak) -> dict:
        held = {"optimizer_state": state, "peak": peak}
        return {
            "status": "ok",
            "times_ms": times,
            "measured": held,
            "predicted": held,
            "losses": [2.0, 1.0],
        }

    rows = {"flashddp": row([10.0, 20.0, 40.0], 8, 90), "zero1": row([20.0], 4, 50)}
    further = compare_with_base(rows)
    assert further["zero1"]["step_ratio"] == 2.0
    assert further["zero1"]["state_share"] == 0.5
    assert further["zero1"]["saved_measured_bytes"] == 40
    assert further["zero1"]["loss_difference"] == 0
    assert compare_with_base({"zero1": row([20.0], 4, 50)})["zero1"]["step_ratio"] is None


def plant_method(
    path: Path, method: str, ms: float | None, model: str = "large", **figures
) -> None:
    """Add the record of a training on GPUs."""
    settings = {"models": (model,), "methods": (method,), "dtype": "bfloat16"}
    [case] = cases_of(ShardingConfig, on_gpu=True, **SMALL | settings)
    predicted = predicted_bytes(predicted_memory(case))
    planted = {}
    if ms is not None:
        planted |= {"predicted": predicted, "measured": predicted, "step_ratio": ms / 10}
        planted |= {"iqr_step_ratio": 0.01, "state_share": 0.5}
        planted |= {"saved_measured_bytes": 5_000_000, "saved_predicted_bytes": 4_000_000}
    plant(path, case, ms, **planted | figures)


def test_a_report_tells_what_failed_and_compares_only_within_a_launch(tmp_path):
    path = tmp_path / "sharding_benchmark.jsonl"
    plant_method(path, "flashddp", None)
    sharding.REPORT.write(read_records(path), tmp_path)
    report = path.with_suffix(".md").read_text()
    assert "| oom " in report
    assert "- flashddp: oom: memory is full" in report
    plant_method(path, "torch_ddp+torch_zero", 9.0, launch="second")
    plant_method(path, "zero1", 20.0)
    lines = comparisons(sharding_frame(read_records(path)))
    [line] = [line for line in lines if line["method"] == "zero1"]
    assert line["time / flashddp"] is line["time / torch_zero"] is None
    assert (line["state · ranks"], line["saved / predicted"], line["peak / formula"]) == (
        1,
        1.25,
        1,
    )


def test_who_needs_every_training_is_told_which_failed_and_why():
    done = {"model": "tiny", "method": "flashddp", "status": "ok", "reason": None}
    assert measured([done]) == [done]
    lost = done | {"method": "zero1", "status": "failed", "reason": "RuntimeError: reset"}
    with pytest.raises(RuntimeError, match="tiny, zero1: failed: RuntimeError: reset"):
        measured([done, lost])


@pytest.fixture
def matrix(tmp_path) -> Path:
    """Records of wrappers on GPUs, one measured again, and of a compiled setting, one failed."""
    path = tmp_path / "lm_matrix.jsonl"
    settings = rank_benchmarks.SMALL | {"kernels": ("sdpa",), "dtype": "bfloat16"}

    def add(wrapper: str, ms: float | None, **changes) -> None:
        [case] = cases_of(LmMatrixConfig, on_gpu=True, wrappers=(wrapper,), **settings | changes)
        figures = {"scaling_efficiency": 0.5, "memory_overhead": 0.001}
        figures |= {"peak_memory_bytes": 10**6, "loss_difference": 0.001}
        plant(path, case, ms, **figures if ms else {})

    for wrapper, ms in (("none", 5.0), ("torch_ddp", 12.0), ("naive", 15.0), ("flashddp", 11.0)):
        add(wrapper, ms)
    add("flashddp", 10.0, epochs=9)
    add("flashddp", 7.0, compile=True)
    add("naive", None, compile=True)
    return path


def test_settings_of_the_matrix_are_never_mixed_and_newer_rows_replace_older_ones(matrix):
    frame = lm_matrix.matrix_frame(read_records(matrix))
    found = [(row["wrapper"], row["median_ms"]) for row in to_rows(frame)]
    assert found == [
        ("none", 5.0),
        ("torch_ddp", 12.0),
        ("naive", 15.0),
        ("flashddp", 10.0),
        ("flashddp", 7.0),
        ("naive", None),
    ]
    assert frame["setting"].nunique() == 2
    [section] = lm_matrix.overview(frame)
    first, second = rows_of(section)
    ratios = (first["× torch_ddp"], first["× torch_ddp, IQR"], first["× naive"])
    assert ratios == ("1.20", "0", "1.50")
    assert (first["efficiency (%)"], first["memory overhead (%)"]) == ("50.0", "0.100")
    assert second["× naive"] == "–"
    lm_matrix.REPORT.write(read_records(matrix), matrix.parent)
    report = (matrix.parent / "lm_matrix_report.md").read_text()
    assert "- sdpa, naive: oom: memory is full" in report
    for name in ("time", "memory", "throughput", "losses"):
        assert (matrix.parent / f"lm_matrix_{name}.png").stat().st_size > 10_000


def test_each_setting_has_a_title_of_its_own():
    changes = {"dtype": "float16", "tr_batch_size": 3, "context_length": 8, "ranks": 4}
    changes |= {"cuda_graph": True, "low_precision_weights": True, "model": "small", "d_ff": 64}
    changes |= {"bucket_size_mb": 1.0, "compile": True, "backend": "gloo"}
    [case, *_] = cases_of(LmMatrixConfig, on_gpu=True, **rank_benchmarks.SMALL)
    cases = [case, *(Case(**vars(case) | {name: value}) for name, value in changes.items())]
    rows = pd.DataFrame([vars(each) | {"device": "H"} for each in cases], dtype=object)
    titles = {ranks_report.setting_title(row) for row in to_rows(rows)}
    assert len(titles) == len(cases)
