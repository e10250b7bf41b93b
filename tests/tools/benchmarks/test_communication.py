"""The communication benchmark on real ranks, and reports of planted records."""

import csv
import itertools
import statistics
import time
import typing

import pytest
import torch
import torch.distributed as dist

from lib.core.records import new_record, read_records
from lib.ddp.launcher import launch
from lib.profiling.collectives import COLLECTIVES, bus_bandwidth_gbs, predicted_ms
from lib.tools.benchmarks import ranks as on_ranks
from lib.tools.benchmarks.communication import (
    REPORT,
    CommunicationBenchmarkConfig,
    benchmark_communication,
    communication_groups,
    nvlink_gbs,
    size_name,
)

LINK = {"latency_us": 10.0, "bandwidth_gbs": 100.0}
SIZES = [2**power for power in range(10, 31, 2)]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="checks a machine without GPUs")

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def cases_of(config, ranks, backend):
    return [case for [case] in communication_groups(config, ranks, backend)]


def test_the_names_of_collectives_are_the_same_everywhere():
    kinds = typing.get_type_hints(CommunicationBenchmarkConfig)["collectives"]
    assert typing.get_args(typing.get_args(kinds)[0]) == COLLECTIVES
    assert CommunicationBenchmarkConfig().collectives == COLLECTIVES


@pytest.mark.parametrize(("backend", "largest"), [("gloo", 2**26), ("nccl", 2**30)])
def test_sizes_left_out_go_from_1_kib_in_steps_of_four(backend, largest):
    cases = cases_of(CommunicationBenchmarkConfig(), 2, backend)
    sizes = sorted({case.num_bytes for case in cases})
    assert (sizes[0], sizes[-1]) == (1024, largest)
    assert all(b == 4 * a for a, b in itertools.pairwise(sizes))
    assert len(cases) == 4 * len(sizes)


def test_each_rank_gets_the_same_number_of_elements():
    config = CommunicationBenchmarkConfig(sizes_mb=(0.001, 1.0), dtype="bfloat16")
    sizes = {case.num_bytes for case in cases_of(config, 3, "gloo")}
    assert sizes == {1044, 1_048_572}


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ({}, 1, "ranks must be at least 2"),
        ({"ranks": 4}, 2, "ranks must be None or the group's 2, got 4"),
        ({"backend": "nccl"}, 2, "backend must be None or the group's 'gloo', got 'nccl'"),
        ({"sizes_mb": (2**-20,)}, 2, "sizes_mb must be at least .* one float32 for each of 2"),
    ],
)
def test_what_does_not_fit_the_group_is_named(settings, ranks, words):
    with pytest.raises(ValueError, match=words):
        cases_of(CommunicationBenchmarkConfig(**settings), ranks, "gloo")


@needs_no_gpu
def test_nccl_without_gpus_is_refused_before_processes_start(tmp_path, monkeypatch):
    config = CommunicationBenchmarkConfig(backend="nccl", output=tmp_path)
    monkeypatch.setattr(on_ranks, "launch", None)
    with pytest.raises(ValueError, match="nccl"):
        benchmark_communication(config)


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
    """One with a wrong result, one without memory, and one slow rank."""
    rank = dist.get_rank()
    gather = "all_gather_single"
    if not hasattr(dist, gather):
        gather = "all_gather_into_tensor"
    real_broadcast, real_reduce = dist.broadcast, dist.all_reduce

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

    setattr(dist, gather, wrong_gather)
    dist.broadcast, dist.all_reduce = slow_broadcast, reduce_without_memory


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory):
    """The folder of the runs on three ranks, and what each rank returned."""
    folder = tmp_path_factory.mktemp("three")
    return folder, launch(on_three_ranks, 3, folder, backend="gloo", timeout=60)


def test_rows_that_are_there_are_not_measured_again_and_rank_0_alone_returns_them(three_ranks):
    folder, results = three_ranks
    counts = [[len(records) for records in result] for result in results]
    assert counts == [[4, 4, 4], [0, 0, 0], [0, 0, 0]]
    whole, more, _ = results[0]
    for record in whole:
        figures = record["figures"]
        assert (figures["status"], figures["is_correct"]) == ("ok", True)
        assert figures["median_ms"] == pytest.approx(statistics.median(figures["times_ms"]))
        assert figures["samples"] == len(figures["times_ms"]) >= 3
        speed = figures["bytes"] / figures["median_ms"] * 1e3 / 1e9
        factor = {"all_reduce": 4 / 3, "broadcast": 1}.get(record["config"]["collective"], 2 / 3)
        assert figures["algorithm_bandwidth_gbs"] == pytest.approx(speed)
        assert figures["bus_bandwidth_gbs"] == pytest.approx(factor * speed)
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
        "reduce_scatter": "ok",
        "all_gather": "wrong result",
        "broadcast": "ok",
    }
    text = (folder / "faults" / "communication_benchmark.md").read_text()
    assert all(f"| {word} " in text for word in status.values())
    assert "One size alone gives no fit." in text
    # the slowest rank counts
    assert min(figures["broadcast"]["times_ms"]) >= 30


def planted(*, device="NVIDIA H200", backend="nccl", ranks=2, hosts=1, sizes=SIZES):
    """Records of rows that take what the formula says, on a link of 10 µs and 100 GB/s."""
    records = []
    config = CommunicationBenchmarkConfig(sizes_mb=tuple(size / 2**20 for size in sizes))
    for case in cases_of(config, ranks, backend):
        ms = predicted_ms(case.collective, case.num_bytes, ranks, **LINK)
        figures = {"status": "ok", "is_correct": True, "median_ms": ms, "times_ms": [ms]}
        cost = (case.collective, case.num_bytes, ranks, ms)
        figures["bus_bandwidth_gbs"] = bus_bandwidth_gbs(*cost)
        case.hosts = hosts
        records.append(new_record(figures, config=vars(case)) | {"device": device})
    return records


def test_the_report_compares_with_the_formula_and_shows_the_newest_of_each_row(tmp_path):
    old = planted()
    for record in old:
        record["figures"] = record["figures"] | {"median_ms": 1e6}
        record["config"] = record["config"] | {"samples": 99}
    REPORT.write(old + planted() + planted(ranks=4), tmp_path)
    rows = list(csv.DictReader((tmp_path / "communication_benchmark.csv").open()))
    assert len(rows) == 2 * len(old)
    assert all(float(row["formula_over_measured"]) == pytest.approx(1, 1e-3) for row in rows)


def test_without_a_row_that_worked_there_is_a_table(tmp_path):
    records = [record | {"figures": {"status": "oom"}} for record in planted(sizes=SIZES[:1])]
    REPORT.write(records, tmp_path)
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
    record = planted(sizes=SIZES[:1], **changed)[0]
    assert nvlink_gbs(record["config"] | {"device": record["device"]}) == peak


def test_sizes_have_three_digits():
    assert [size_name(n) for n in (4, 1044, 2**20)] == ["4 B", "1.02 KiB", "1 MiB"]
