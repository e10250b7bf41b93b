"""The sharding benchmark: two real ranks in small, and reports and figures of planted records."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.colors import same_color

from lib.__main__ import main
from lib.core.figures import house_figure
from lib.core.records import read_records
from lib.ddp.settings import default_bucket_cap_mb
from lib.model.config import model_preset
from lib.model.costs import num_parameters
from lib.model.transformer import TransformerLM
from lib.optimizer import AdamW
from lib.sharded_optimizer import ShardedOptimizer
from lib.tools.benchmarks.sharding import bytes_at_marks, held_bytes
from lib.tools.benchmarks.sharding_cases import (
    SHARDING_METHODS,
    ShardingCase,
    ShardingConfig,
    compare_with_base,
    predicted_bytes,
)
from lib.tools.benchmarks.sharding_report import (
    BEYOND_COLOR,
    METHOD_COLORS,
    RankBar,
    accounting,
    comparison_table,
    draw_rank_bars,
    fsdp_table,
    make_settings,
    sharding_rows,
    target_table,
    write_report,
)
from tests.tools.benchmarks.rank_benchmarks import flags
from tests.tools.benchmarks.rank_benchmarks import plant as plant_record

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
REPORTS = ("sharding_benchmark.md", "sharding_benchmark.csv")
FIGURES = ("sharding_memory.png", "sharding_time.png")

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """The folder of four methods on two ranks, as the command leaves it."""
    folder = tmp_path_factory.mktemp("sharding")
    command = ["benchmark", "sharding", "--methods", *METHODS, *flags(**SMALL), "--backend", "gloo"]
    assert main([*command, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def figures_of(measured) -> dict[str, dict]:
    records = read_records(measured / "sharding_benchmark.jsonl")
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


@pytest.mark.slow
def test_tables_and_figures_are_written(measured):
    rows = list(csv.DictReader((measured / "sharding_benchmark.csv").open()))
    assert [row["method"] for row in rows] == list(METHODS)
    report = (measured / "sharding_benchmark.md").read_text()
    assert "2 processes on one CPU" in report
    assert "gloo's own copies are in the bytes" in report
    assert "autocast: `medium` on one, `large` on two with `zero1`" in report
    assert all((measured / name).stat().st_size > 10_000 for name in FIGURES)


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


def test_defaults_are_tiny_on_a_cpu_and_large_models_on_gpus():
    assert ShardingConfig().with_defaults(2, on_gpu=False).models == ("tiny",)
    chosen = ShardingConfig().with_defaults(2, on_gpu=True)
    assert (chosen.models, chosen.tr_batch_size, chosen.backend) == (("large", "xl"), 32, "nccl")


def case_of(method: str, model: str = "tiny", *, on_gpu: bool = False, **settings) -> ShardingCase:
    config = ShardingConfig(**(SMALL | settings)).with_defaults(2, on_gpu=on_gpu)
    return config.case(model, method, "bfloat16" if on_gpu else "float32")


@pytest.mark.parametrize("method", SHARDING_METHODS)
def test_a_method_reaches_the_training(method):
    case = case_of(method, compile=True, low_precision_weights=True, context_length=16)
    training = case.train_config(log_interval=4)
    for field, value in SHARDING_METHODS[method].items():
        assert getattr(training, field) == value
    assert (training.compile, training.low_precision_weights) == (True, True)
    assert training.bucket_size_mb == SMALL["bucket_size_mb"]
    assert training.model.context_length == 16
    assert method in METHOD_COLORS


@pytest.mark.parametrize("short", [False, True])
def test_buckets_left_out_are_those_of_training(short):
    config = ShardingConfig(models=("large",), low_precision_weights=short)
    config = config.with_defaults(2, on_gpu=True)
    case = config.case("large", "zero1", "bfloat16")
    model = TransformerLM(case.shape, device="meta")
    if short:
        model.use_low_precision_weights(torch.bfloat16)
    gradients = sum(param.nbytes for param in model.parameters())
    assert case.bucket_size_mb == default_bucket_cap_mb(gradients) > 25
    assert case.train_config(log_interval=4).bucket_size_mb == case.bucket_size_mb


def test_methods_are_compared_with_flashddp_epoch_by_epoch():
    def row(times, state, peak) -> dict:
        held = {"optimizer_state": state, "peak": peak}
        return {"times_ms": times, "measured": held, "predicted": held, "losses": [2.0, 1.0]}

    rows = {"flashddp": row([10.0, 20.0, 40.0], 8, 90), "zero1": row([20.0], 4, 50)}
    further = compare_with_base(rows)
    assert further["zero1"]["step_ratio"] == 2.0
    assert further["zero1"]["state_share"] == 0.5
    assert further["zero1"]["saved_measured_bytes"] == 40
    assert further["zero1"]["loss_difference"] == 0
    assert compare_with_base({"zero1": row([20.0], 4, 50)})["zero1"]["step_ratio"] is None


def plant(folder: Path, case: ShardingCase, milliseconds: float | None, **figures) -> None:
    """Add the record of a training."""
    predicted = predicted_bytes(case.predicted)
    planted = {"predicted": predicted}
    if milliseconds is not None:
        planted |= {
            "measured": predicted,
            "step_ratio": milliseconds / 10,
            "iqr_step_ratio": 0.01,
            "state_share": 0.5,
            "saved_measured_bytes": 5_000_000,
            "saved_predicted_bytes": 4_000_000,
        }
    path = folder / "sharding_benchmark.jsonl"
    plant_record(path, case, milliseconds, **planted | figures)


@pytest.fixture
def planted(tmp_path) -> Path:
    """Records of GPUs: of three methods of `large`, one of `xl`, and one that failed there."""
    plant(tmp_path, case_of("flashddp", "large", on_gpu=True), 10.0)
    plant(tmp_path, case_of("zero1", "large", on_gpu=True), 10.2)
    plant(tmp_path, case_of("torch_ddp+torch_zero", "large", on_gpu=True), 12.0)
    plant(tmp_path, case_of("flashddp", "xl", on_gpu=True), None)
    plant(tmp_path, case_of("zero1", "xl", on_gpu=True), 20.0)
    return tmp_path


def settings_in(folder: Path) -> list:
    return make_settings(sharding_rows(read_records(folder / "sharding_benchmark.jsonl")))


def test_a_newer_record_replaces_the_older_of_its_training_alone(planted):
    plant(planted, case_of("zero1", "large", on_gpu=True), 11.0)
    plant(planted, case_of("zero1", "large", on_gpu=True, compile=True), 9.0)
    times = [[(r["method"], r.get("median_ms")) for r in s.rows] for s in settings_in(planted)]
    assert times == [
        [("flashddp", 10.0), ("zero1", 11.0), ("torch_ddp+torch_zero", 12.0)],
        [("zero1", 9.0)],
        [("flashddp", None), ("zero1", 20.0)],
    ]


def test_comparisons_are_with_the_same_launch_alone(planted):
    large, xl = settings_in(planted)
    lines = {line["method"]: line for line in comparison_table(large.rows)}
    assert set(lines) == {"zero1", "torch_ddp+torch_zero"}
    assert lines["zero1"]["state · ranks"] == 1
    assert lines["zero1"]["time / torch_zero"] == pytest.approx(0.85)
    assert lines["zero1"]["saved / predicted"] == 1.25
    assert comparison_table([row for row in xl.rows if row["status"] == "ok"]) == []
    plant(planted, case_of("torch_ddp+torch_zero", "large", on_gpu=True), 9.0, launch="second")
    (line,) = comparison_table(settings_in(planted)[0].rows)
    assert line["time / torch_zero"] is None


@pytest.mark.parametrize(
    ("met", "milliseconds", "figures"),
    [
        (4, 10.3, {}),
        (3, 10.4, {}),
        # slower than PyTorch's, too
        (2, 12.1, {}),
        (3, 10.3, {"saved_measured_bytes": 4_300_000}),
        (2, 10.4, {"saved_measured_bytes": 3_700_000}),
        (3, 10.3, {"state_share": 0.51}),
    ],
    ids=str,
)
def test_the_line_of_zero1_counts_the_targets_that_are_met(planted, met, milliseconds, figures):
    figures = {"saved_measured_bytes": 4_100_000} | figures
    plant(planted, case_of("zero1", "large", on_gpu=True), milliseconds, **figures)
    large, xl = target_table(settings_in(planted))
    assert large["targets met"] == f"{met} of 4"
    # there is nothing to compare it with
    assert (xl["status"], xl["targets met"]) == ("not compared", None)


def test_the_report_has_a_line_of_zero1_for_each_setting_and_the_reasons_of_failures(planted):
    case = case_of("zero1", "large", on_gpu=True, attention_kernel="flash_attention_triton")
    plant(planted, case, None)
    lines = {line["setting"]: line for line in target_table(settings_in(planted))}
    assert len(lines) == 3
    [failed] = [line for title, line in lines.items() if title.endswith("_triton")]
    assert (failed["status"], failed["time / flashddp"]) == ("oom", None)
    write_report(read_records(planted / "sharding_benchmark.jsonl"), planted)
    report = (planted / "sharding_benchmark.md").read_text()
    assert "How zero1 compares" in report
    assert "- flashddp: oom: memory is full" in report


def test_the_lines_of_fsdp_compare_it_with_fsdp2_of_the_same_launch_and_with_the_formula(planted):
    assert fsdp_table(settings_in(planted)) == []
    for method, milliseconds in (("fsdp", 9.0), ("fsdp2", 12.0), ("fsdp+checkpoints", 10.0)):
        plant(planted, case_of(method, "large", on_gpu=True), milliseconds)
    lines = {line["method"]: line for line in fsdp_table(settings_in(planted))}
    ratios = {method: line["time / fsdp2"] for method, line in lines.items()}
    assert ratios == {"fsdp": 0.75, "fsdp+checkpoints": pytest.approx(10 / 12)}
    assert {line["peak / formula"] for line in lines.values()} == {1.0}
    assert lines["fsdp+checkpoints"]["peak (GB)"] < lines["fsdp"]["peak (GB)"]
    plant(planted, case_of("fsdp2", "large", on_gpu=True), 9.0, launch="second")
    assert fsdp_table(settings_in(planted))[0]["time / fsdp2"] is None
    write_report(read_records(planted / "sharding_benchmark.jsonl"), planted)
    assert "How fsdp compares" in (planted / "sharding_benchmark.md").read_text()


def test_accounting_has_what_was_measured_in_one_setting_and_predicts_the_rest(planted):
    found = accounting(settings_in(planted))
    assert list(found) == ["small", "medium", "large", "xl", "2.7b"]
    assert {
        (model, bar.group, bar.name)
        for model, bars in found.items()
        for bar in bars
        if bar.measured
    } == {
        ("large", "2 ranks", "flashddp"),
        ("large", "2 ranks", "zero1"),
        ("xl", "2 ranks", "zero1"),
    }
    assert len(found["small"]) == 1 + 3 * 4
    # the setting with most trainings, however old, and nothing of a newer one
    for method in SHARDING_METHODS:
        case = case_of(method, "large", on_gpu=True, low_precision_weights=True)
        plant(planted, case, 9.0, date="2000-01-01")
    bars = accounting(settings_in(planted))
    assert not any(bar.measured for bar in bars["xl"])
    measured = [(bar.group, bar.name) for bar in bars["large"] if bar.measured]
    on_two = [("2 ranks", "flashddp"), ("2 ranks", "zero1"), ("2 ranks", "fsdp2")]
    assert measured == [("1 rank", "flashddp"), *on_two]


def test_a_report_of_failures_alone_has_tables_and_figures(tmp_path):
    plant(tmp_path, case_of("flashddp"), None)
    write_report(read_records(tmp_path / "sharding_benchmark.jsonl"), tmp_path)
    assert all((tmp_path / name).stat().st_size > 500 for name in (*REPORTS, *FIGURES))


def test_bars_are_as_high_as_their_peaks_and_only_predictions_are_hatched():
    held = {"parameters": 2e9, "optimizer_state": 4e9, "gradients": 1e9, "peak": 10e9}
    less = held | {"optimizer_state": 2e9, "peak": 7e9}
    bars = [RankBar("1 rank", "flashddp", held), RankBar("2 ranks", "zero1", less, held)]
    with house_figure() as (_, axes):
        draw_rank_bars(axes, bars)
        pieces = [(p.get_x(), p.get_y() + p.get_height(), p.get_hatch()) for p in axes.patches]
        gray = [p.get_height() for p in axes.patches if same_color(p.get_facecolor(), BEYOND_COLOR)]
        label = axes.get_ylabel()
    tops = [max(top for x, top, _ in pieces if x == place) for place, _, _ in pieces[::4]]
    assert tops == pytest.approx([10, 10, 7])
    assert [hatch is not None for _, _, hatch in pieces[::4]] == [True, False, True]
    assert gray == pytest.approx([3, 3, 2])
    assert label == "peak memory of a rank (GB)"
