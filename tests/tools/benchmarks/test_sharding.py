"""The sharding benchmark and the matrix: real ranks in small, and their reports."""

import csv
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from lib.core.records import new_record
from lib.model.config import model_preset
from lib.model.costs import num_parameters
from lib.optimizer import AdamW
from lib.sharded_optimizer import ShardedOptimizer
from lib.tools.benchmarks import lm_matrix, ranks_report, sharding
from lib.tools.benchmarks.lm_matrix import LmMatrixConfig
from lib.tools.benchmarks.rank_memory import bytes_at_marks, held_bytes
from lib.tools.benchmarks.sections import to_rows
from lib.tools.benchmarks.sharding import (
    ShardingConfig,
    benchmark_sharding,
    beside_base,
    measured,
)
from lib.tools.benchmarks.sweep import Case
from tests.tools.benchmarks import rank_benchmarks
from tests.tools.benchmarks.rank_benchmarks import cases_of

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

    ours, base = row([20.0], 4, 50), row([10.0, 20.0, 40.0], 8, 90)
    found = beside_base("zero1", ours, base)
    assert (found["step_ratio"], found["state_share"]) == (2.0, 0.5)
    assert (found["saved_measured_bytes"], found["loss_difference"]) == (40, 0)
    # a rank of `none` sees its own batches alone
    assert beside_base("none", ours, base) == {"step_ratio": 2.0, "iqr_step_ratio": None}
    assert beside_base("zero1", ours, {}) == {"step_ratio": None, "iqr_step_ratio": None}


@pytest.mark.parametrize(
    ("report", "config"), [(sharding.REPORT, ShardingConfig), (lm_matrix.REPORT, LmMatrixConfig)]
)
def test_a_report_tells_what_failed_also_where_nothing_was_measured(report, config, tmp_path):
    lost = {"status": "oom", "reason": "memory is full"}
    record = new_record(lost, config=vars(cases_of(config)[0]), device="cpu")
    report.write([record], tmp_path)
    text = (tmp_path / report.name).read_text()
    assert "| oom " in text
    assert ": oom: memory is full" in text


def test_times_are_compared_epoch_by_epoch_and_only_within_a_launch():
    def row(method: str, launch: str, *times_ms: float) -> dict:
        return {"method": method, "launch": launch, "times_ms": times_ms, "status": "ok"}

    rows = [row("naive", "b", 9.0), row("naive", "a", 15.0, 30.0), row("flat", "b", 5.0, 5.0)]
    ours = row("flashddp", "a", 10.0, 20.0)
    found = ranks_report.ratios(ours, rows, {"× naive": "naive", "time / flat": "flat"}, "method")
    assert found == {
        "× naive": 1.5,
        "× naive, IQR": 0.0,
        "time / flat": None,
        "time / flat, IQR": None,
    }
    other = row("flat", "a", 5.0, 10.0)
    found = ranks_report.ratios(ours, [*rows, other], {"time / flat": "flat"}, "method")
    assert found["time / flat"] == 2


def test_who_needs_every_training_is_told_which_failed_and_why():
    done = {"model": "tiny", "method": "flashddp", "status": "ok", "reason": None}
    assert measured([done]) == [done]
    lost = done | {"method": "zero1", "status": "failed", "reason": "RuntimeError: reset"}
    with pytest.raises(RuntimeError, match="tiny, zero1: failed: RuntimeError: reset"):
        measured([done, lost])


def test_each_setting_has_a_title_of_its_own():
    changes = {"dtype": "float16", "tr_batch_size": 3, "context_length": 8, "ranks": 4}
    changes |= {"cuda_graph": True, "low_precision_weights": True, "model": "small"}
    changes |= {"bucket_size_mb": 1.0, "compile": True, "backend": "gloo"}
    [case, *_] = cases_of(LmMatrixConfig, on_gpu=True, **rank_benchmarks.SMALL)
    cases = [case, *(Case(**vars(case) | {name: value}) for name, value in changes.items())]
    rows = pd.DataFrame([vars(each) | {"device": "H"} for each in cases], dtype=object)
    titles = {ranks_report.setting_title(row) for row in to_rows(rows)}
    assert len(titles) == len(cases)
