"""All that a host's GPUs share: real ranks in small, and predictions beside planted records."""

import pytest
import torch

from lib.core.records import append_record, new_record, read_records
from lib.ddp.settings import DDP_WRAPPERS
from lib.model.config import model_preset
from lib.tools.benchmarks.harness import for_group
from lib.tools.benchmarks.rank_training import SHARDING_METHODS, predicted_memory
from lib.tools.benchmarks.sections import to_rows
from lib.tools.benchmarks.sweep import Case
from lib.tools.predict import GPUS, Run, predict
from lib.tools.scaling import (
    METHODS,
    ScalingConfig,
    benchmark_scaling,
    scaling_groups,
)
from lib.tools.scaling_report import overview, scaling_frame

SMALL: dict = {
    "backend": "gloo",
    "sizes_mb": (0.01,),
    "context_length": 8,
    "epochs": 2,
    "timed_epochs": 1,
    "steps_per_epoch": 3,
    "tokens": (6,),
    "compile": False,
    "timeout": 60.0,
}


@pytest.mark.usefixtures("one_thread_a_rank")
def test_every_way_to_train_equals_one_process_and_a_second_call_measures_what_is_missing(tmp_path):
    foreseen = ScalingConfig(predict=True, parts=("ring",), ranks=8, output=tmp_path)
    predictions = benchmark_scaling(foreseen)
    config = ScalingConfig(parts=("collective",), output=tmp_path, **SMALL)
    assert [record["figures"]["is_correct"] for record in benchmark_scaling(config)] == [True] * 3
    first = (tmp_path / "scaling.jsonl").read_text()
    config = ScalingConfig(parts=("collective", "equality"), output=tmp_path, **SMALL)
    records = benchmark_scaling(config)
    text = (tmp_path / "scaling.jsonl").read_text()
    assert text.startswith(first)
    assert len(text.splitlines()) == len(predictions) + len(records)

    off = {r["config"]["method"]: r["figures"] for r in records if "method" in r["config"]}
    assert off.keys() == {*SHARDING_METHODS, *DDP_WRAPPERS}
    alone = off.pop("none")
    assert (alone["loss_off"], alone["norm_off"]) > (1e-3, 1e-2)
    for method, figures in off.items():
        assert figures["loss_off"] < 1e-5, method
        # a CPU's norm of a long tensor is this exact
        assert figures["norm_off"] < 1e-3, method
    report = (tmp_path / "scaling.md").read_text()
    assert "Of 12 trainings, none is farther" in report
    # predictions are made on any machine
    assert "## ring; 8 × NVIDIA H200" in report


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread_a_rank")
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_rings_and_pipelines_are_measured_on_any_number_of_ranks(tmp_path, ranks):
    parts = ("step", "pipeline", "ring")
    config = ScalingConfig(parts=parts, ranks=ranks, output=tmp_path, **SMALL)
    records = benchmark_scaling(config)
    # the four blocks of `tiny` are no multiple of three stages
    whats = ["step"] * 6 + ["pipeline"] * 2 * (ranks == 2) + ["ring"]
    assert [record["config"]["what"] for record in records] == whats
    rows = {row["name"]: row for row in to_rows(scaling_frame(records))}
    assert all(row["status"] == "ok" and row["median_ms"] > 0 for row in rows.values())
    flashddp, other = (rows[f"tiny, 2 × 8, {name}"] for name in ("flashddp", "torch_ddp"))
    assert flashddp["time_ratio"] == flashddp["median_ms"] / other["median_ms"]
    assert flashddp["tokens_per_s"] == pytest.approx(ranks * 16e3 / flashddp["median_ms"])
    assert flashddp["peak_ratio"] == pytest.approx(1, abs=0.03)


def groups_of(ranks: int, **settings) -> list[list[Case]]:
    """The cases that are measured on GPUs."""
    config = for_group(ScalingConfig(**settings), ranks, "nccl")
    return scaling_groups(config, torch.device("cuda"))


@pytest.fixture
def predictions(tmp_path) -> list[dict]:
    """Predictions for eight GPUs, made on a machine without one."""
    config = ScalingConfig(predict=True, ranks=8, output=tmp_path)
    records = benchmark_scaling(config)
    # what is predicted once stays
    assert benchmark_scaling(config) == records
    assert len(benchmark_scaling(ScalingConfig(predict=True, ranks=2, output=tmp_path))) == 2 * len(
        records
    )
    return records


def test_predictions_are_those_of_the_predictor_and_stand_beside_what_was_measured(
    tmp_path, predictions
):
    cases = {
        (case.what, getattr(case, "method", None)): case
        for group in groups_of(8, models=("xl",))
        for case in group
    }
    assert {method for what, method in cases if what == "step"} == {m for g in METHODS for m in g}
    found = {str(record["config"]): record["figures"] for record in predictions}
    case = cases["step", "flashddp"]
    here = found[str(vars(case))]
    formula = predict(Run(model_preset("xl"), GPUS["H200"], 8, 32, 1, low_precision_weights=False))
    assert here["tokens_per_s"] == pytest.approx(formula.tokens_per_s)
    assert here["peak_memory_bytes"] == predicted_memory(case).peak
    # sharded, a rank updates an eighth of the weights
    assert found[str(vars(cases["step", "zero1"]))]["median_ms"] < here["median_ms"]
    # each of eight steps of a ring computes as long as each of two
    assert 30 < found[str(vars(cases["ring", None]))]["median_ms"] < 36

    path, bytes_of = tmp_path / "scaling.jsonl", here["peak_memory_bytes"]
    for method, factor in (("none", 0.5), ("torch_ddp", 2.0), ("flashddp", 1.25)):
        took = here["median_ms"] * factor
        figures = {"status": "ok", "median_ms": took, "tokens_per_s": 1e6 / took}
        figures |= {"measured": {"peak": 0.9 * bytes_of}, "predicted": {"peak": bytes_of}}
        record = new_record(figures, config=vars(cases["step", method]))
        append_record(path, record | {"device": "NVIDIA H200"})
    frame = scaling_frame(read_records(path))
    rows = {(row["ranks"], row["name"]): row for row in to_rows(frame)}
    row = rows[8, "xl, 32 × 256, flashddp"]
    assert row["error"] == pytest.approx(1 / 1.25)
    assert (row["time_ratio"], row["speed"], row["peak_ratio"]) == pytest.approx(
        (1.25 / 2, 0.5 / 1.25, 0.9)
    )
    assert row["predicted_tokens_per_s"] == here["tokens_per_s"]
    # nothing was measured on two GPUs, nor of FSDP
    for key in ((2, "xl, 32 × 256, flashddp"), (8, "xl, 32 × 256, fsdp")):
        assert (rows[key]["median_ms"], rows[key]["tokens_per_s"]) == (None, None)
        assert rows[key]["predicted_ms"] > 0
    text = "\n".join(overview(frame))
    assert "0 of 3 peaks are within 3% of the formula; the farthest is -10.0%" in text
    assert "| step; 8 × NVIDIA H200 |    3 |" in text


def test_a_refitted_step_of_fsdp_takes_as_long_a_block_as_the_other_models_did(tmp_path):
    config = ScalingConfig(predict=True, parts=("step",), ranks=2, output=tmp_path)
    benchmark_scaling(config)
    path = tmp_path / "scaling.jsonl"
    cases = [case for group in groups_of(2, parts=("step",)) for case in group]
    took = {"gpt2-124m": 12 * 10.0, "large": 36 * 10.0, "xl": 48 * 12.0}
    for case in cases:
        if case.method == "fsdp" and case.model in took:
            figures = {"status": "ok", "median_ms": took[case.model], "tokens_per_s": 1.0}
            figures |= {"measured": {"peak": 1e9}, "predicted": {"peak": 1e9}}
            record = new_record(figures, config=vars(case))
            append_record(path, record | {"device": "NVIDIA H200"})
    frame = scaling_frame(read_records(path)).set_index(["model", "method"])
    # the model itself does not count: neither 12 ms of `xl`, nor 10 ms of `large`
    assert frame.loc[("xl", "fsdp"), "refitted_ms"] == 48 * 10
    assert frame.loc[("xl", "fsdp"), "refitted_error"] == pytest.approx(10 / 12)
    assert frame.loc[("large", "fsdp"), "refitted_ms"] == 36 * 11
    # what was not measured has one, too; a GPU that is slower than the host counts
    assert frame.loc[("gpt2-354m", "fsdp"), "refitted_ms"] == 24 * 10
    assert not frame.loc[("xl", "fsdp2"), "refitted_ms"] > 0
