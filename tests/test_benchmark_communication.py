"""Communication: costs by formula, what times say of a link, and the benchmark on real ranks."""

import csv
import itertools
import math
import os
import statistics
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lib import communication_costs as costs
from lib.__main__ import main
from lib.benchmark_communication import benchmark_communication, communication_cases
from lib.benchmark_communication_report import write_report
from lib.communication_costs import (
    COLLECTIVES,
    default_bucket_cap_mb,
    fit_link,
    predict_scaling,
    predicted_ms,
)
from lib.config_distributed import CommunicationBenchmarkConfig
from lib.distributed import launch
from lib.plots import house_figure
from lib.plots_distributed import NAMES, draw_communication, draw_overlap, nvlink_gbs, size_name
from lib.report import new_record, read_records

ROOT = Path(__file__).resolve().parent.parent
LINK = {"latency_us": 10.0, "bandwidth_gbs": 100.0}
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="checks a machine without GPUs")

pytestmark = pytest.mark.usefixtures("quick_ranks")


def ring_all_reduce(ranks):
    """Each rank's chunks after an all-reduce on a ring, and how many chunks it has sent.

    Before, chunk c of rank r is 10^r * (c + 1). In each step each rank sends a chunk to the next.
    """
    chunks = [[10**r * (c + 1) for c in range(ranks)] for r in range(ranks)]
    sent = [0] * ranks
    for step in range(2 * (ranks - 1)):
        adds_up = step < ranks - 1
        moving = [(r, (r - step) % ranks) for r in range(ranks)]
        values = [chunks[r][c] for r, c in moving]
        for (r, c), value in zip(moving, values):
            to = (r + 1) % ranks
            chunks[to][c] = value + (chunks[to][c] if adds_up else 0)
            sent[r] += 1
    return chunks, sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_messages_and_bytes_are_those_of_a_ring_that_is_played_through(ranks):
    chunks, sent = ring_all_reduce(ranks)
    total = sum(10**r for r in range(ranks))
    assert chunks == [[total * (c + 1) for c in range(ranks)]] * ranks
    assert set(sent) == {costs.messages("all_reduce", ranks)}
    assert costs.bus_factor("all_reduce", ranks) == sent[0] / ranks


@pytest.mark.parametrize(
    ("collective", "milliseconds"),
    # 8 MB on 4 ranks: 10 µs a message, and 8 MB take 80 µs through one link
    [
        ("all_reduce", 6 * 0.010 + 1.5 * 0.080),
        ("reduce_scatter", 3 * 0.010 + 0.75 * 0.080),
        ("all_gather", 3 * 0.010 + 0.75 * 0.080),
        ("broadcast", 3 * 0.010 + 0.080),
    ],
)
def test_costs_are_those_worked_out_by_hand(collective, milliseconds):
    assert predicted_ms(collective, 8e6, 4, **LINK) == pytest.approx(milliseconds)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("num_bytes", [0, 1, 12_345, 1e9])
def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather(ranks, num_bytes):
    parts = [predicted_ms(name, num_bytes, ranks, **LINK) for name in COLLECTIVES[1:3]]
    assert predicted_ms("all_reduce", num_bytes, ranks, **LINK) == pytest.approx(sum(parts))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_has_nothing_to_send(collective):
    assert predicted_ms(collective, 1e9, 1, **LINK) == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 5])
def test_without_latency_the_bus_bandwidth_is_the_links(collective, ranks):
    milliseconds = predicted_ms(collective, 1e8, ranks, latency_us=0, bandwidth_gbs=100)
    assert costs.bus_bandwidth_gbs(collective, 1e8, ranks, milliseconds) == pytest.approx(100)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"collective": "gather"}, "collective is 'gather'"),
        ({"ranks": 0}, "ranks is 0"),
        ({"num_bytes": -1}, "num_bytes is -1"),
        ({"latency_us": -1.0}, "latency_us is -1.0"),
        ({"bandwidth_gbs": 0.0}, "bandwidth_gbs is 0.0"),
    ],
)
def test_a_wrong_argument_of_the_formula_is_named(changed, words):
    right = {"collective": "all_reduce", "num_bytes": 1, "ranks": 2} | LINK
    with pytest.raises(ValueError, match=words):
        predicted_ms(**right | changed)


SIZES = [2**power for power in range(10, 31, 2)]


def times_of(collective, ranks, latency_us, bandwidth_gbs, sizes=SIZES):
    link = (latency_us, bandwidth_gbs)
    return [(size, predicted_ms(collective, size, ranks, *link)) for size in sizes]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("latency", "bandwidth"), [(12.0, 330.0), (300.0, 0.7), (1.0, 3.0)])
def test_the_fit_finds_the_link_again(collective, latency, bandwidth):
    link = fit_link(collective, 3, times_of(collective, 3, latency, bandwidth))
    assert link.latency_us == pytest.approx(latency, rel=1e-3)
    assert link.bandwidth_gbs == pytest.approx(bandwidth, rel=1e-3)


def test_the_fit_finds_that_there_is_no_latency():
    link = fit_link("all_reduce", 2, times_of("all_reduce", 2, 0.0, 5.0))
    assert link == costs.Link(0.0, pytest.approx(5.0))


def test_the_fit_weighs_twice_as_much_as_half_as_much():
    times = times_of("all_reduce", 2, 10.0, 100.0)
    disturbed = [(size, ms * 2 ** (-1) ** number) for number, (size, ms) in enumerate(times)]
    turned = [(size, ms * 2 ** -((-1) ** number)) for number, (size, ms) in enumerate(times)]
    links = [fit_link("all_reduce", 2, given) for given in (disturbed, turned)]
    middle = math.sqrt(links[0].latency_us * links[1].latency_us)
    assert middle == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize(
    "times", [[], [(1024, 1.0)], [(1024, 1.0)] * 3, [(2**10, 1.0), (2**20, 1.0), (2**30, 1.0)]]
)
def test_there_is_no_fit_without_two_sizes_or_where_bytes_cost_nothing(times):
    assert fit_link("all_gather", 2, times) is None


@pytest.mark.parametrize(
    ("ranks", "times", "words"),
    [(1, [(1, 1.0)], "ranks is 1"), (2, [(1024, 0.0)], "times has"), (2, [(0, 1.0)], "times has")],
)
def test_the_fit_refuses_what_has_no_logarithm(ranks, times, words):
    with pytest.raises(ValueError, match=words):
        fit_link("all_reduce", ranks, times)


# Two ranks, 1 GB/s and no latency: an all-reduce takes as many milliseconds as it has MB.
SLOW = {"ranks": 2, "latency_us": 0.0, "bandwidth_gbs": 1.0, "backward_ms": 10.0, "other_ms": 6.0}


def test_buckets_that_are_averaged_faster_than_they_fill_leave_the_last_one_exposed():
    prediction = predict_scaling(8e6, buckets=2, **SLOW)
    times = [(b.ready_ms, b.start_ms, b.end_ms) for b in prediction.buckets]
    assert times == [(5, 5, 9), (10, 10, 14)]
    assert (prediction.exposed_ms, prediction.step_ms) == (4, 20)
    assert prediction.efficiency == 16 / 20


def test_buckets_that_fill_faster_than_they_are_averaged_wait_for_one_another():
    prediction = predict_scaling(16e6, buckets=2, **SLOW)
    times = [(b.ready_ms, b.start_ms, b.end_ms) for b in prediction.buckets]
    assert times == [(5, 5, 13), (10, 13, 21)]
    assert (prediction.exposed_ms, prediction.communication_ms) == (11, 16)


@pytest.mark.parametrize("buckets", [1, 3])
def test_without_overlap_all_communication_is_exposed(buckets):
    prediction = predict_scaling(8e6, buckets=buckets, overlap=False, **SLOW)
    assert prediction.exposed_ms == pytest.approx(prediction.communication_ms) == pytest.approx(8)


@pytest.mark.parametrize("megabytes", [1, 8, 16, 40])
@pytest.mark.parametrize("buckets", [1, 2, 5, 17])
def test_exposed_is_at_least_the_last_bucket_and_what_does_not_fit_behind_the_first(
    megabytes, buckets
):
    prediction = predict_scaling(megabytes * 1e6, buckets=buckets, **SLOW)
    before_first = SLOW["backward_ms"] / buckets
    least = max(megabytes / buckets, megabytes - (SLOW["backward_ms"] - before_first))
    assert prediction.exposed_ms == pytest.approx(least)


def test_with_latency_there_can_be_too_many_buckets():
    slow = SLOW | {"latency_us": 500.0}
    exposed = [predict_scaling(8e6, buckets=n, **slow).exposed_ms for n in (1, 4, 64)]
    assert exposed[1] < min(exposed[0], exposed[2])


def test_one_rank_is_as_fast_as_one_rank():
    prediction = predict_scaling(8e6, buckets=3, **SLOW | {"ranks": 1})
    assert (prediction.exposed_ms, prediction.efficiency) == (0, 1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"buckets": 0}, "buckets is 0"),
        ({"gradient_bytes": -1}, "gradient_bytes is -1"),
        ({"backward_ms": -1.0}, "backward_ms is -1.0"),
        ({"backward_ms": 0.0, "other_ms": 0.0}, "not both 0"),
    ],
)
def test_a_wrong_argument_of_the_prediction_is_named(changed, words):
    with pytest.raises(ValueError, match=words):
        predict_scaling(**{"gradient_bytes": 8e6, "buckets": 1} | SLOW | changed)


@pytest.mark.parametrize(
    ("mebibytes", "cap"), [(0, 25), (800, 25), (801, 25), (3200, 100), (3698, 116), (10**6, 31250)]
)
def test_a_bucket_is_25_mebibytes_or_a_32nd_of_all_gradients(mebibytes, cap):
    assert default_bucket_cap_mb(mebibytes * 2**20) == cap


def test_the_names_of_collectives_are_the_same_everywhere():
    kinds = typing.get_type_hints(CommunicationBenchmarkConfig)["collectives"]
    assert typing.get_args(typing.get_args(kinds)[0]) == COLLECTIVES == tuple(NAMES)
    assert CommunicationBenchmarkConfig().collectives == COLLECTIVES


@pytest.mark.parametrize(("backend", "largest"), [("gloo", 2**26), ("nccl", 2**30)])
def test_sizes_left_out_go_from_1_kib_in_steps_of_four(backend, largest):
    cases = communication_cases(CommunicationBenchmarkConfig(), 2, backend)
    sizes = sorted({case.num_bytes for case in cases})
    assert (sizes[0], sizes[-1]) == (1024, largest)
    assert all(b == 4 * a for a, b in itertools.pairwise(sizes))
    assert len(cases) == len(set(cases)) == 4 * len(sizes)


def test_each_rank_gets_the_same_number_of_elements():
    config = CommunicationBenchmarkConfig(sizes_mb=(0.001, 1.0), dtype="bfloat16")
    sizes = {case.num_bytes for case in communication_cases(config, 3, "gloo")}
    assert sizes == {1044, 1_048_572}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks", 1),
        ("sizes_mb", (1.0, 0.0)),
        ("collectives", ()),
        ("samples", 0),
        ("warmup", 0),
        ("max_seconds", 0.0),
        ("timeout", -1.0),
    ],
)
def test_a_wrong_setting_is_named(field, value):
    with pytest.raises(ValueError, match=f"{field} is "):
        CommunicationBenchmarkConfig(**{field: value})


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ({}, 1, "the group has 1 rank"),
        ({"ranks": 4}, 2, "ranks is 4, but the group has 2"),
        ({"backend": "nccl"}, 2, "backend is 'nccl', but the group's is 'gloo'"),
        ({"sizes_mb": (2**-20,)}, 2, "sizes_mb has 9.5"),
    ],
)
def test_what_does_not_fit_the_group_is_named(settings, ranks, words):
    with pytest.raises(ValueError, match=words):
        communication_cases(CommunicationBenchmarkConfig(**settings), ranks, "gloo")


@needs_no_gpu
def test_nccl_without_gpus_is_refused_before_processes_start(tmp_path):
    config = CommunicationBenchmarkConfig(backend="nccl", output=tmp_path)
    start = time.monotonic()
    with pytest.raises(ValueError, match="backend is 'nccl' for 2 ranks"):
        benchmark_communication(config)
    assert time.monotonic() - start < 1


def flags_for(folder, *flags):
    """Arguments of the command that let it finish soon."""
    soon = ("--samples", "3", "--warmup", "1", "--max_seconds", "0.02", "--backend", "gloo")
    return ["benchmark", "communication", "--output", str(folder), *soon, *flags]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run on two processes."""
    folder = tmp_path_factory.mktemp("communication")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert main(flags_for(folder, "--ranks", "2", "--sizes_mb", "0.0625", "16")) == 0
    return folder


def test_the_command_writes_sane_records(finished):
    records = read_records(finished / "communication_benchmark.jsonl")
    assert [(r["config"]["collective"], r["config"]["num_bytes"]) for r in records] == [
        (name, size) for name in COLLECTIVES for size in (2**16, 2**24)
    ]
    for record in records:
        config, figures = record["config"], record["figures"]
        assert (config["ranks"], config["hosts"], config["backend"]) == (2, 1, "gloo")
        assert (figures["status"], figures["is_correct"]) == ("ok", True)
        assert figures["median_ms"] == pytest.approx(statistics.median(figures["times_ms"]))
        assert figures["samples"] == len(figures["times_ms"]) >= 3
        speed = figures["bytes"] / figures["median_ms"] * 1e3 / 1e9
        factor = {"all_reduce": 1, "broadcast": 1}.get(config["collective"], 0.5)
        assert figures["algorithm_bandwidth_gbs"] == pytest.approx(speed)
        assert figures["bus_bandwidth_gbs"] == pytest.approx(factor * speed)
        # no machine is as fast, and none so slow
        assert 1e-4 < speed < 1000


def test_the_command_writes_tables_and_a_figure_of_its_records(finished):
    records = read_records(finished / "communication_benchmark.jsonl")
    rows = list(csv.DictReader((finished / "communication_benchmark.csv").open()))
    assert [float(row["figures.median_ms"]) for row in rows] == [
        record["figures"]["median_ms"] for record in records
    ]
    text = (finished / "communication_benchmark.md").read_text()
    assert "2 processes on one host's CPU over gloo, float32" in text
    # the fit, and two sizes
    assert text.count("\n| all-reduce ") == 3
    assert (finished / "communication_benchmark.png").stat().st_size > 10_000


def test_under_torchrun_its_ranks_are_measured_and_rank_0_writes(tmp_path):
    by = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lib")
    flags = flags_for(tmp_path, "--sizes_mb", "0.5", "--collectives", "all_reduce")
    done = subprocess.run(
        [sys.executable, *by, *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("communication_benchmark.md") == 1
    [record] = read_records(tmp_path / "communication_benchmark.jsonl")
    assert (record["config"]["ranks"], record["figures"]["status"]) == (2, "ok")


def sweep(folder, *collectives, sizes=(0.01,)):
    """On a rank of three: the records of a short run."""
    soon = {"samples": 3, "warmup": 1, "max_seconds": 0.02, "timeout": 60.0}
    config = CommunicationBenchmarkConfig(
        collectives=collectives, sizes_mb=sizes, dtype="bfloat16", output=folder, **soon
    )
    return benchmark_communication(config)


def on_three_ranks(folder):
    """A run, one that asks for more, and one with faults; the records of each."""
    whole = sweep(folder / "whole", *COLLECTIVES)
    more = sweep(folder / "whole", "broadcast", "all_reduce", sizes=(0.01, 0.02))
    break_collectives()
    return whole, more, sweep(folder / "faults", *COLLECTIVES)


def break_collectives():
    """One that PyTorch lacks, one with a wrong result, one without memory, and one slow rank."""
    rank = dist.get_rank()
    scatter, gather = "reduce_scatter_single", "all_gather_single"
    if not hasattr(dist, scatter):
        scatter, gather = "reduce_scatter_tensor", "all_gather_into_tensor"
    real_broadcast, real_reduce = dist.broadcast, dist.all_reduce

    def no_scatter(*_):
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter\nand so on")

    def wrong_gather(out, x):
        parts = [torch.empty_like(x) for _ in range(3)]
        dist.all_gather(parts, x)
        torch.cat(parts[::-1] if rank == 1 else parts, out=out)

    def slow_broadcast(x, source):
        real_broadcast(x, source)
        time.sleep(0.03 * (rank == 2))

    def reduce_without_memory(x, *options):
        if x.dtype != torch.bfloat16:
            real_reduce(x, *options)
        elif rank == 1:
            raise torch.OutOfMemoryError("out of memory")

    setattr(dist, scatter, no_scatter)
    setattr(dist, gather, wrong_gather)
    dist.broadcast, dist.all_reduce = slow_broadcast, reduce_without_memory


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory):
    """The folder of the runs on three ranks, and what each rank returned."""
    folder = tmp_path_factory.mktemp("three")
    return folder, launch(on_three_ranks, 3, folder, backend="gloo", timeout=60)


def test_only_rank_0_returns_records(three_ranks):
    _, results = three_ranks
    assert [[len(records) for records in result] for result in results] == [
        [4, 4, 4],
        [0, 0, 0],
        [0, 0, 0],
    ]


def test_three_ranks_and_a_short_type_give_right_results(three_ranks):
    _, [(whole, _, _), *_] = three_ranks
    assert [record["figures"]["is_correct"] for record in whole] == [True] * 4


def test_rows_that_are_there_are_not_measured_again_on_any_rank(three_ranks):
    folder, [(whole, more, _), *_] = three_ranks
    records = read_records(folder / "whole" / "communication_benchmark.jsonl")
    assert records[:4] == whole
    assert [(r["config"]["collective"], r["config"]["num_bytes"]) for r in records[4:]] == [
        ("broadcast", 20_970),
        ("all_reduce", 20_970),
    ]
    assert more == [whole[3], records[4], whole[0], records[5]]


def test_a_fault_of_one_rank_is_a_status_of_the_row(three_ranks):
    folder, [(_, _, faulty), *_] = three_ranks
    figures = {record["config"]["collective"]: record["figures"] for record in faulty}
    status = {name: row["status"] for name, row in figures.items()}
    assert status == {
        "all_reduce": "oom",
        "reduce_scatter": "unsupported",
        "all_gather": "wrong result",
        "broadcast": "ok",
    }
    reason = figures["reduce_scatter"]["reason"]
    assert reason == "ProcessGroupGloo does not support reduce_scatter"
    text = (folder / "faults" / "communication_benchmark.md").read_text()
    assert all(f"| {word} " in text for word in status.values())
    assert "One size alone gives no fit." in text


def test_the_slowest_rank_counts(three_ranks):
    _, [(_, _, faulty), *_] = three_ranks
    [row] = [r["figures"] for r in faulty if r["config"]["collective"] == "broadcast"]
    assert min(row["times_ms"]) >= 30


def planted(*, device="NVIDIA H200", backend="nccl", ranks=2, hosts=1, sizes=SIZES):
    """Records of rows that take what the formula says, on a link of 10 µs and 100 GB/s."""
    records = []
    config = CommunicationBenchmarkConfig(sizes_mb=tuple(size / 2**20 for size in sizes))
    for case in communication_cases(config, ranks, backend, hosts):
        ms = predicted_ms(case.collective, case.num_bytes, ranks, **LINK)
        figures = {"status": "ok", "is_correct": True, "median_ms": ms, "times_ms": [ms]}
        cost = (case.collective, case.num_bytes, ranks, ms)
        figures["bus_bandwidth_gbs"] = costs.bus_bandwidth_gbs(*cost)
        records.append(new_record(figures, config=case) | {"device": device})
    return records


def test_the_report_compares_with_the_formula_and_shows_the_newest_of_each_row(tmp_path):
    old = planted()
    for record in old:
        record["figures"] = record["figures"] | {"median_ms": 1e6}
        record["config"] = record["config"] | {"samples": 99}
    write_report(old + planted() + planted(ranks=4), tmp_path)
    rows = list(csv.DictReader((tmp_path / "communication_benchmark.csv").open()))
    assert len(rows) == 2 * len(old)
    assert all(float(row["formula_over_measured"]) == pytest.approx(1, 1e-3) for row in rows)
    text = (tmp_path / "communication_benchmark.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## 2 × NVIDIA H200, NCCL, float32",
        "## 4 × NVIDIA H200, NCCL, float32",
    ]
    assert "gloo" not in text


def test_without_a_row_that_worked_there_is_a_table_and_no_figure(tmp_path):
    records = [record | {"figures": {"status": "oom"}} for record in planted(sizes=SIZES[:1])]
    write_report(records, tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".md"]


@pytest.mark.parametrize(
    ("changed", "peak"),
    [
        ({}, 450),
        ({"device": "NVIDIA H100 80GB HBM3"}, 450),
        ({"device": "NVIDIA H100 PCIe"}, None),
        ({"hosts": 2}, None),
        ({"backend": "gloo"}, None),
    ],
)
def test_the_peak_is_shown_only_where_it_is_known_and_used(changed, peak):
    assert nvlink_gbs(planted(sizes=SIZES[:1], **changed)[0]) == peak


def test_the_figure_has_the_measured_points_and_lines_that_meet_them():
    records = planted()
    with house_figure() as (_, axes):
        draw_communication(axes, records)
        points = [line for line in axes.lines if line.get_linestyle() == "None"]
        fits = [line for line in axes.lines if len(line.get_xdata()) > 100]
        labels = axes.get_legend_handles_labels()[1]
    assert labels == [f"{name}: 10 µs, 100 GB/s" for name in NAMES.values()]
    for name, line, fit in zip(NAMES, points, fits):
        chosen = [r for r in records if r["config"]["collective"] == name]
        assert list(line.get_xdata()) == SIZES
        speeds = [record["figures"]["bus_bandwidth_gbs"] for record in chosen]
        assert list(line.get_ydata()) == speeds
        assert (fit.get_ydata()[0], fit.get_ydata()[-1]) == (
            pytest.approx(speeds[0], 1e-3),
            pytest.approx(speeds[-1], 1e-3),
        )


def test_the_drawn_overlap_has_the_exposed_time_in_its_own_colour():
    prediction = predict_scaling(16e6, buckets=2, **SLOW)
    with house_figure() as (_, axes):
        draw_overlap(axes, prediction, backward_ms=10.0)
        spans = {bars.get_label(): bars.get_paths() for bars in axes.collections}
    lengths = {
        label: sum(path.get_extents().width for path in paths) for label, paths in spans.items()
    }
    assert lengths == pytest.approx(
        {"backward": 10, "all-reduce, hidden": 5, "all-reduce, exposed": 11}
    )


@pytest.mark.parametrize(
    ("num_bytes", "name"),
    [(1, "1 B"), (1023, "1.02e+03 B"), (1024, "1 KiB"), (26_214_400, "25 MiB"), (2**31, "2 GiB")],
)
def test_sizes_are_named_in_powers_of_1024(num_bytes, name):
    assert size_name(num_bytes) == name
