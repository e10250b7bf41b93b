"""The communication benchmark on real ranks, and its report."""

import itertools
import statistics
import time

import pytest
import torch
import torch.distributed as dist

from lib.core.records import new_record, read_records
from lib.ddp.launcher import launch
from lib.profiling.collectives import COLLECTIVES
from lib.tools.benchmarks.communication import (
    REPORT,
    CommunicationBenchmarkConfig,
    benchmark_communication,
    communication_cases,
    datasheet_gbs,
    size_name,
)
from lib.tools.benchmarks.harness import for_group

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def cases_of(config, ranks, backend):
    config = for_group(config, ranks, backend)
    return communication_cases(config, torch.device(config.device))


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


def sweep(folder, *collectives, sizes=(0.01,), **options):
    """On a rank of three: the records of a short run."""
    soon = {"samples": 3, "warmup": 1, "max_seconds": 0.02, "timeout": 60.0}
    config = CommunicationBenchmarkConfig(
        collectives=collectives, sizes_mb=sizes, dtype="bfloat16", output=folder, **soon, **options
    )
    return benchmark_communication(config)


def on_three_ranks(folder):
    """A run, one that asks for more, one made again, and one with faults; the records of each."""
    whole = sweep(folder / "whole", *COLLECTIVES)
    more = sweep(folder / "whole", "broadcast", "all_reduce", sizes=(0.01, 0.02))
    again = sweep(folder / "whole", "broadcast", restart=True)
    break_collectives()
    return whole, more, again, sweep(folder / "faults", *COLLECTIVES)


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
    assert counts == [[4, 4, 1, 4], [0] * 4, [0] * 4]
    whole, more, again, _ = results[0]
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
    assert [(r["config"]["collective"], r["config"]["num_bytes"]) for r in records[4:6]] == [
        ("broadcast", 20_970),
        ("all_reduce", 20_970),
    ]
    assert more == [whole[3], records[4], whole[0], records[5]]
    assert again == records[6:]


def test_a_fault_of_one_rank_is_a_status_of_the_row(three_ranks):
    folder, [(*_, faulty), *_] = three_ranks
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


def test_without_a_row_that_worked_there_is_a_table(tmp_path):
    [case, *_] = cases_of(CommunicationBenchmarkConfig(), 2, "nccl")
    REPORT.write([new_record({"status": "oom"}, config=vars(case))], tmp_path)
    assert "| oom " in (tmp_path / REPORT.name).read_text()


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
    row = {"device": "NVIDIA H200", "backend": "nccl", "hosts": 1}
    assert datasheet_gbs(row | changed) == peak


def test_sizes_have_three_digits():
    assert [size_name(n) for n in (4, 1044, 2**20)] == ["4 B", "1.02 KiB", "1 MiB"]
