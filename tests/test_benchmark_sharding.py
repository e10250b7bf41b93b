"""The sharding benchmark: two real ranks in small, and reports and figures of planted records."""

import csv
import dataclasses
import re
from pathlib import Path

import matplotlib.image
import pytest
import torch
from matplotlib.colors import same_color
from rank_benchmarks import flags

from lib import benchmark_turns
from lib.__main__ import main
from lib.benchmark_lm_matrix_training import Training
from lib.benchmark_sharding import benchmark_sharding
from lib.benchmark_sharding_accounting import accounting
from lib.benchmark_sharding_cases import (
    ShardingCase,
    compared,
    fits_together,
    make_case,
    predicted_bytes,
    settled,
)
from lib.benchmark_sharding_memory import bytes_at_marks
from lib.benchmark_sharding_report import (
    comparisons,
    make_sections,
    sharding_rows,
    standing,
    write_report,
)
from lib.benchmark_turns import measure
from lib.communication_costs import default_bucket_cap_mb
from lib.config_sharding import SHARDING_METHODS, ShardingConfig
from lib.distributed import launch, rank
from lib.model import TransformerLM
from lib.model_costs import num_parameters
from lib.model_presets import model_preset
from lib.plots import house_figure
from lib.plots_sharding import BEYOND_COLOR, METHOD_COLORS, RankBar, draw_rank_bars
from lib.report import append_record, new_record, read_records
from lib.strict_json import to_dict

METHODS = ("none", "flashddp", "zero1", "torch_ddp+torch_zero")
SMALL = {
    # so many tokens that activations are most of the peak
    "tr_batch_size": 4,
    "epochs": 2,
    "timed_epochs": 1,
    "steps_per_epoch": 2,
    "trace_steps": 1,
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


def test_each_method_is_measured_once(figures_of):
    assert tuple(figures_of) == METHODS
    assert {figures["status"] for figures in figures_of.values()} == {"ok"}
    assert {figures["samples"] for figures in figures_of.values()} == {SMALL["timed_epochs"]}


def test_the_state_of_a_rank_is_its_share_within_one_percent(figures_of):
    for method, ranks in (("none", 1), ("flashddp", 1), ("zero1", 2), ("torch_ddp+torch_zero", 2)):
        by_rank = figures_of[method]["optimizer_state_by_rank"]
        assert len(by_rank) == 2
        assert by_rank == pytest.approx([8 * WEIGHTS / ranks] * 2, rel=0.01)
        if method != "none":
            assert figures_of[method]["state_share"] == pytest.approx(1 / ranks, rel=0.01)


def test_what_is_counted_is_what_the_formulas_say(figures_of):
    for method, figures in figures_of.items():
        held, predicted = figures["measured"], figures["predicted"]
        assert held["parameters"] == pytest.approx(4 * WEIGHTS, rel=0.001)
        for kind in ("gradients", "optimizer_state"):
            assert held[kind] == pytest.approx(predicted[kind], rel=0.01), (method, kind)


def test_what_is_allocated_is_what_the_formulas_say(figures_of):
    for method, figures in figures_of.items():
        held, predicted = figures["measured"], figures["predicted"]
        assert held["peak"] == pytest.approx(predicted["peak"], rel=0.03), method
        # gloo's copies of what DDP broadcasts, and of what is under way between two steps of zero1
        if method in ("none", "flashddp"):
            assert held["initialised"] == pytest.approx(predicted["initialised"], rel=0.01)
        kinds = ("before_step", "after_step", "activations") if method != "zero1" else ()
        for kind in kinds:
            assert held[kind] == pytest.approx(predicted[kind], rel=0.02), (method, kind)


def test_what_is_saved_is_what_the_formulas_say(figures_of):
    figures = figures_of["zero1"]
    assert figures["saved_predicted_bytes"] == pytest.approx(4 * WEIGHTS, rel=0.001)
    assert figures["saved_measured_bytes"] == pytest.approx(4 * WEIGHTS, rel=0.1)


def test_sharding_leaves_the_losses_as_they_are(figures_of):
    assert len(figures_of["flashddp"]["losses"]) == SMALL["epochs"] * SMALL["steps_per_epoch"]
    for method in METHODS[1:]:
        assert figures_of[method]["loss_difference"] < 1e-5
    # there a rank sees its own batches alone
    assert "loss_difference" not in figures_of["none"]


def test_only_groups_communicate(figures_of):
    for method, figures in figures_of.items():
        assert (figures["communication_ms"] > 0) == (method != "none")


def test_tables_and_figures_are_written(measured):
    rows = list(csv.DictReader((measured / "sharding_benchmark.csv").open()))
    assert [row["method"] for row in rows] == list(METHODS)
    report = (measured / "sharding_benchmark.md").read_text()
    assert "2 processes on one CPU" in report
    assert "gloo's own copies are in the bytes" in report
    assert "autocast: `medium` on one, `large` on two with `zero1`" in report
    for name in FIGURES:
        image = matplotlib.image.imread(measured / name)
        assert min(image.shape[:2]) > 300
        assert image[..., :3].std() > 0.02


def event(name: str, time: int, **arguments: int) -> dict:
    return {"name": name, "ts": time, "args": arguments}


def test_bytes_at_marks_count_what_is_there_and_the_peak_since_the_step_began():
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
        # freed, but handed out before
        event("[memory]", 10, Addr=900, Bytes=-20),
    ]
    found = bytes_at_marks(reversed(events))
    assert found == {"begin": 50, "after_forward": 70, "after_step": 50, "peak": 70}


def test_memory_that_is_handed_out_anew_was_freed_before():
    events = [
        event("[memory]", 1, Addr=100, Bytes=50),
        event("[memory]", 2, Addr=150, Bytes=50),
        event("[memory]", 3, Addr=200, Bytes=50),
        # in the place of the first two
        event("[memory]", 4, Addr=140, Bytes=20),
        event("moment: begin", 5),
    ]
    assert bytes_at_marks(events)["begin"] == 50 + 20


def measure_with_a_full_rank(*arguments) -> None:
    """`measure`, where memory is full on rank 1 for `zero1`, while rank 0 waits for it."""
    take = Training.take

    def full(self: Training, steps: int) -> None:
        if rank() == 1 and self.case.method == "zero1":
            raise torch.OutOfMemoryError("CUDA out of memory: planted")
        take(self, steps)

    Training.take = full
    measure(*arguments)


@pytest.mark.slow
def test_memory_full_on_one_rank_ends_its_method_and_no_other(tmp_path, monkeypatch):
    def launch_full(fn, *arguments, **options):
        assert fn is measure
        return launch(measure_with_a_full_rank, *arguments, **options)

    monkeypatch.setattr(benchmark_turns, "launch", launch_full)
    settings = SMALL | {"tr_batch_size": 1, "trace_steps": 0}
    config = ShardingConfig(methods=("zero1", "flashddp"), output=tmp_path, **settings)
    rows = {r["config"]["method"]: r["figures"] for r in benchmark_sharding(config)}
    assert rows["zero1"]["status"] == "oom"
    assert "planted" in rows["zero1"]["reason"]
    assert rows["flashddp"]["status"] == "ok"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"models": ("huge",)}, "models is ('huge',); right is: different ones of tiny"),
        ({"methods": ("zero3",)}, "methods is ('zero3',); right is: different ones of none"),
        ({"methods": ("zero1", "zero1")}, "different ones"),
        ({"methods": ()}, "at least one"),
        ({"attention_kernel": "vectorized_torch_compiled"}, "attention_kernel is"),
        ({"epochs": 5, "timed_epochs": 5}, "epochs is 5; right is: more than timed_epochs 5"),
        ({"context_length": 0}, "context_length is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_a_wrong_setting_is_named(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ShardingConfig(**settings)


def test_what_does_not_fit_the_machine_is_refused_before_it_starts():
    with pytest.raises(ValueError, match="ranks is 4, but torchrun started 2"):
        settled(ShardingConfig(ranks=4), 2, on_gpu=False)
    with pytest.raises(ValueError, match="cuda_graph is True on a CPU"):
        settled(ShardingConfig(cuda_graph=True), 2, on_gpu=False)


def test_defaults_are_tiny_on_a_cpu_and_large_models_on_gpus():
    assert settled(ShardingConfig(), 2, on_gpu=False).models == ("tiny",)
    chosen = settled(ShardingConfig(), 2, on_gpu=True)
    assert (chosen.models, chosen.backend) == (("large", "xl"), "nccl")


def case_of(method: str, model: str = "tiny", *, on_gpu: bool = False, **settings) -> ShardingCase:
    config = settled(ShardingConfig(**(SMALL | settings)), 2, on_gpu=on_gpu)
    return make_case(config, model, method, "bfloat16" if on_gpu else "float32")


@pytest.mark.parametrize("method", SHARDING_METHODS)
def test_a_method_reaches_the_training(method):
    case = case_of(method, compile=True, low_precision_weights=True, context_length=16)
    training = case.training(log_interval=4)
    for field, value in SHARDING_METHODS[method].items():
        assert getattr(training, field) == value
    assert (training.compile, training.low_precision_weights) == (True, True)
    assert training.bucket_size_mb == SMALL["bucket_size_mb"]
    assert training.model.context_length == 16
    assert method in METHOD_COLORS


@pytest.mark.parametrize("short", [False, True])
def test_buckets_left_out_are_those_of_training(short):
    config = ShardingConfig(models=("large",), low_precision_weights=short)
    case = make_case(settled(config, 2, on_gpu=True), "large", "zero1", "bfloat16")
    model = TransformerLM(case.shape, device="meta")
    if short:
        model.use_low_precision_weights(torch.bfloat16)
    gradients = sum(param.nbytes for param in model.parameters())
    assert case.bucket_size_mb == default_bucket_cap_mb(gradients) > 25
    assert case.training(log_interval=4).bucket_size_mb == case.bucket_size_mb


def test_models_are_held_together_only_where_they_fit():
    def cases(model: str, methods: tuple[str, ...]) -> list[ShardingCase]:
        return [case_of(method, model, on_gpu=True, tr_batch_size=32) for method in methods]

    several = ("flashddp", "zero1", "torch_ddp+torch_zero", "fsdp2")
    assert fits_together(cases("large", tuple(SHARDING_METHODS)), 150e9)
    assert fits_together(cases("xl", several), 150e9)
    assert not fits_together(cases("xl", tuple(SHARDING_METHODS)), 150e9)
    assert not fits_together(cases("xl", several), 80e9)


def test_methods_are_compared_with_flashddp_turn_by_turn():
    def row(times, state, peak) -> dict:
        held = {"optimizer_state": state, "peak": peak}
        return {"times_ms": times, "measured": held, "predicted": held, "losses": [2.0, 1.0]}

    further = compared({"flashddp": row([10.0, 20.0, 40.0], 8, 90), "zero1": row([20.0], 4, 50)})
    assert further["zero1"]["step_ratio"] == 2.0
    assert further["zero1"]["state_share"] == 0.5
    assert further["zero1"]["saved_measured_bytes"] == 40
    assert further["zero1"]["loss_difference"] == 0
    assert compared({"zero1": row([20.0], 4, 50)})["zero1"]["step_ratio"] is None


def plant(folder: Path, case: ShardingCase, milliseconds: float | None, **figures) -> None:
    """Add the record of a training of three turns, or of a failed one."""
    predicted = predicted_bytes(case.predicted)
    planted = {"status": "oom", "reason": "memory is full", "predicted": predicted}
    if milliseconds is not None:
        planted = {
            "status": "ok",
            "launch": "first",
            "tokens_per_s": 64 / milliseconds * 1e3,
            "median_ms": milliseconds,
            "iqr_ms": 0.2,
            "samples": 3,
            "times_ms": [milliseconds] * 3,
            "measured": predicted,
            "predicted": predicted,
            "step_ratio": milliseconds / 10,
            "iqr_step_ratio": 0.01,
            "state_share": 0.5,
            "saved_measured_bytes": 5_000_000,
            "saved_predicted_bytes": 4_000_000,
        }
    record = new_record(planted | figures, config=to_dict(case), device="cpu")
    append_record(folder / "sharding_benchmark.jsonl", record)


@pytest.fixture
def planted(tmp_path) -> Path:
    """Records of GPUs: of three methods of `large`, one of `xl`, and one that failed there."""
    for method, milliseconds in (
        ("flashddp", 10.0),
        ("zero1", 10.2),
        ("torch_ddp+torch_zero", 12.0),
    ):
        plant(tmp_path, case_of(method, "large", on_gpu=True), milliseconds)
    plant(tmp_path, case_of("flashddp", "xl", on_gpu=True), None)
    plant(tmp_path, case_of("zero1", "xl", on_gpu=True), 20.0)
    write_report(read_records(tmp_path / "sharding_benchmark.jsonl"), tmp_path)
    return tmp_path


def sections_in(folder: Path) -> list:
    return make_sections(sharding_rows(read_records(folder / "sharding_benchmark.jsonl")))


def test_a_newer_record_replaces_the_older_of_its_training_alone(planted):
    plant(planted, case_of("zero1", "large", on_gpu=True), 11.0)
    plant(planted, case_of("zero1", "large", on_gpu=True, compile=True), 9.0)
    times = [[(r["method"], r.get("median_ms")) for r in s.rows] for s in sections_in(planted)]
    assert times == [
        [("flashddp", 10.0), ("zero1", 11.0), ("torch_ddp+torch_zero", 12.0)],
        [("zero1", 9.0)],
        [("flashddp", None), ("zero1", 20.0)],
    ]


def test_comparisons_are_with_the_same_launch_alone(planted):
    large, xl = sections_in(planted)
    lines = {line["method"]: line for line in comparisons(large.rows)}
    assert set(lines) == {"zero1", "torch_ddp+torch_zero"}
    assert lines["zero1"]["state · ranks"] == 1
    assert lines["zero1"]["time / torch_zero"] == pytest.approx(0.85)
    assert lines["zero1"]["saved / predicted"] == 1.25
    assert comparisons([row for row in xl.rows if row["status"] == "ok"]) == []
    plant(planted, case_of("torch_ddp+torch_zero", "large", on_gpu=True), 9.0, launch="second")
    (line,) = comparisons(sections_in(planted)[0].rows)
    assert "time / torch_zero" not in line


@pytest.mark.parametrize(
    ("met", "milliseconds", "figures"),
    [
        (4, 10.3, {}),
        (3, 10.4, {}),
        # slower than PyTorch's
        (3, 10.3, {"times_ms": [12.1] * 3}),
        (3, 10.3, {"saved_measured_bytes": 4_300_000}),
        (2, 10.4, {"saved_measured_bytes": 3_700_000}),
        (3, 10.3, {"state_share": 0.51}),
    ],
    ids=str,
)
def test_the_line_of_zero1_says_how_many_targets_are_met(planted, met, milliseconds, figures):
    figures = {"saved_measured_bytes": 4_100_000} | figures
    plant(planted, case_of("zero1", "large", on_gpu=True), milliseconds, **figures)
    large, xl = standing(sections_in(planted))
    assert large["targets met"] == f"{met} of 4"
    # nothing there to compare it with
    assert (xl["status"], xl["targets met"]) == ("not compared", None)
    write_report(read_records(planted / "sharding_benchmark.jsonl"), planted)
    assert "How zero1 stands" in (planted / "sharding_benchmark.md").read_text()


def test_the_line_of_zero1_names_the_setting_whole(planted):
    case = case_of("zero1", "large", on_gpu=True, attention_kernel="flash_attention_triton")
    plant(planted, case, None)
    lines = {line["setting"]: line for line in standing(sections_in(planted))}
    assert len(lines) == 3
    (failed,) = (
        lines[setting] for setting in lines if setting.endswith("; flash_attention_triton")
    )
    assert (failed["status"], failed["time / flashddp"]) == ("oom", None)
    # they are all of one machine, which is not said
    assert not lines.keys() & {section.title for section in sections_in(planted)}


def test_a_training_that_failed_is_a_row_with_its_reason(planted):
    assert "- flashddp: oom: memory is full" in (planted / "sharding_benchmark.md").read_text()
    rows = list(csv.DictReader((planted / "sharding_benchmark.csv").open()))
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["oom", "ok"]


def test_accounting_has_what_was_measured_in_one_setting_and_predicts_the_rest(planted):
    found = accounting(sections_in(planted))
    assert list(found) == ["small", "medium", "large", "xl", "2.7b"]
    is_measured = {
        (model, bar.group, bar.name)
        for model, bars in found.items()
        for bar in bars
        if bar.measured
    }
    assert is_measured == {
        ("large", "2 ranks", "flashddp"),
        ("large", "2 ranks", "zero1"),
        ("xl", "2 ranks", "zero1"),
    }
    groups = [bar.group for bar in found["small"]]
    assert {group: groups.count(group) for group in groups} == {
        "1 rank": 1,
        "2 ranks": 4,
        "4 ranks": 4,
        "8 ranks": 4,
    }
    # the newest setting alone
    plant(planted, case_of("zero1", "large", on_gpu=True, low_precision_weights=True), 9.0)
    bars = accounting(sections_in(planted))["large"]
    assert [(bar.group, bar.name) for bar in bars if bar.measured] == [("2 ranks", "zero1")]


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
        grey = [p.get_height() for p in axes.patches if same_color(p.get_facecolor(), BEYOND_COLOR)]
        label = axes.get_ylabel()
    tops = [max(top for x, top, _ in pieces if x == place) for place, _, _ in pieces[::4]]
    assert tops == pytest.approx([10, 10, 7])
    assert [hatch is not None for _, _, hatch in pieces[::4]] == [True, False, True]
    assert grey == pytest.approx([3, 3, 2])
    assert label == "peak memory of a rank (GB)"


def test_a_case_survives_its_record():
    case = case_of("zero1")
    assert ShardingCase(**to_dict(case)) == case
    assert dataclasses.replace(case, method="flashddp", wrapper="flashddp") == case_of("flashddp")
