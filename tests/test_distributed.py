"""Groups and launching: results in order, failures with rank and traceback, and nothing hangs."""

import functools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import distributed_workers as workers
import pytest
import torch

from lib import distributed
from lib.parallel import available_cpus

ROOT = Path(__file__).resolve().parent.parent
# Longer than any failure may take to be reported; a machine that others use may be slow.
SOON = 45


@pytest.fixture(scope="module")
def helpers():
    """What the helpers gave on each of three ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        return distributed.launch(workers.helpers, 3, timeout=60)


def failure_of(how: str, *, world_size: int = 2, timeout: float = 60) -> distributed.WorkerError:
    start = time.monotonic()
    with pytest.raises(distributed.WorkerError) as caught:
        distributed.launch(workers.fail, world_size, how, timeout=timeout)
    assert time.monotonic() - start < SOON
    return caught.value


def test_results_come_in_order_each_rank_has_its_own_copy_and_rank_0_prints(capfd):
    x = torch.zeros(2)
    results = distributed.launch(workers.identity, 2, x, timeout=60)
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    assert [result[2].tolist() for result in results] == [[0, 0], [1, 1]]
    assert x.tolist() == [0, 0]
    assert capfd.readouterr().out == "printed by rank 0\n"


def test_launch_of_one_rank_has_a_group():
    assert distributed.launch(workers.inside_init, 1, timeout=60) == ["cpu"] or (
        torch.cuda.is_available()
    )


def test_an_exception_comes_back_with_rank_and_traceback():
    error = failure_of("raises")
    assert error.rank == 1
    assert str(error).startswith("rank 1 of 2 raised KeyError: 'a name that is missing'")
    assert 'raise KeyError("a name that is missing")' in error.worker_traceback


def test_an_exit_is_a_failure():
    error = failure_of("exits")
    assert error.rank == 1
    assert "SystemExit: 3" in str(error)


@pytest.mark.parametrize(
    ("how", "words"),
    [("vanishes", "exit code 0 before its function returned"), ("is killed", "ended by SIGKILL")],
)
def test_a_rank_that_ends_without_a_word_is_the_cause(how, words):
    error = failure_of(how)
    assert error.rank == 1
    assert words in str(error)


def test_a_rank_that_hangs_ends_the_job_and_the_timeout_is_named():
    error = failure_of("hangs", world_size=3, timeout=3)
    assert "longer than timeout = 3 s" in str(error)
    assert "never came: rank 1" in str(error)


def test_a_rank_that_returned_too_early_is_named():
    assert "had returned by then: rank 1" in str(failure_of("returns early"))


def test_a_failure_with_a_collective_open_ends_the_job_at_once():
    start = time.monotonic()
    with pytest.raises(distributed.WorkerError, match="rank 0 of 2 raised ValueError: open"):
        distributed.launch(workers.fail_with_collective_open, 2, timeout=300)
    assert time.monotonic() - start < SOON


def test_a_result_that_cannot_be_saved_is_an_error():
    with pytest.raises(distributed.WorkerError, match=r"rank 0 of 1 raised .*lambda"):
        distributed.launch(workers.return_what_cannot_be_saved, 1, timeout=60)


def of_a_cell():
    """Stands for a function that only this process knows."""


of_a_cell.__module__ = "__main__"


@pytest.mark.parametrize(
    "fn",
    [of_a_cell, lambda: 1, functools.partial(of_a_cell), torch.zeros(1).sum],
    ids=["cell", "lambda", "partial", "method"],
)
def test_a_function_that_workers_cannot_import_is_refused(fn):
    with pytest.raises(ValueError, match="which new processes cannot import; right is: a function"):
        distributed.launch(fn, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 2, "timeout": 0}, "timeout 0"),
        ({"world_size": 2, "backend": "mpi"}, "backend is 'mpi'; right is: None or one of nccl"),
        ({"world_size": 99, "backend": "nccl"}, "'nccl' for 99 ranks on this host, which has"),
    ],
)
def test_wrong_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        distributed.launch(workers.inside_init, **options)


def test_means_are_the_same_on_all_ranks(helpers):
    assert [result["float"] for result in helpers] == [1.0] * 3
    for result in helpers:
        assert result["tensor"].dtype == torch.bfloat16
        assert result["tensor"].tolist() == [1.0, 2.0]


def test_parameters_and_buffers_are_those_of_rank_0(helpers):
    assert all(result["is broadcast"] and result["is tied"] for result in helpers)


def test_tied_parameters_are_sent_once(helpers):
    # the transposed matrix, the tied one, and the two buffers
    assert helpers[0]["sent"] == [8, 9, 1, 2]


def test_cores_are_shared_out(helpers):
    assert {result["threads"] for result in helpers} == {max(1, available_cpus() // 3)}


def test_other_ranks_log_errors_only(helpers):
    levels = [result["log level"] for result in helpers]
    assert levels[0] < logging.ERROR
    assert levels[1:] == [logging.ERROR] * 2


def test_progress_gives_the_steps_on_all_ranks_and_shows_them_on_one(helpers):
    assert [result["has bar"] for result in helpers] == [True, False, False]
    assert all(result["steps"] == [0, 1, 2] for result in helpers)


def test_workers_know_their_place(helpers):
    assert [result["environment"] for result in helpers] == [
        {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank)} for rank in range(3)
    ]


def test_modules_that_differ_between_ranks_are_refused_on_all():
    first, second = distributed.launch(workers.all_differences, 2, timeout=60)
    assert first == second
    for error, words in zip(
        first,
        [
            r"weight is float32 (5, 3) on cpu, trained on rank 0, but float32 (4, 3)",
            r"weight is float32 (4, 3) on cpu, trained on rank 0, but bfloat16 (4, 3)",
            r"weight is float32 (4, 3) on cpu, trained on rank 0, but float32 (4, 3) on cpu, fixed",
            r"1.weight is missing on rank 0",
            r"weight is on device meta",
        ],
    ):
        assert words in error


def test_without_a_group_this_process_is_rank_0_of_1(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    module = torch.nn.Linear(2, 2)
    before = module.weight.clone()
    with distributed.init_from_environment("gloo") as device:
        assert device == torch.device("cpu")
        assert (distributed.rank(), distributed.world_size()) == (0, 1)
        assert distributed.mean_over_ranks(3.0) == 3.0
        distributed.barrier()
        distributed.broadcast_module(module)
        distributed.print_once("here")
    assert torch.equal(module.weight, before)
    assert capsys.readouterr().out == "here\n"


def test_an_incomplete_environment_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(ValueError, match=r"RANK is '1', but .*MASTER_ADDR.* not set"),
        distributed.init_from_environment(),
    ):
        pass


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }


def torchrun(*options: str) -> subprocess.Popen:
    """Start the torchrun of this Python on the program of `distributed_workers`."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def records(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_torchrun_on_one_host(tmp_path):
    agent = torchrun(
        "--standalone", "--nproc-per-node=2", "-m", "distributed_workers", str(tmp_path)
    )
    output, _ = agent.communicate(timeout=120)
    assert agent.returncode == 0, output
    assert [(r["rank"], r["world_size"], r["mean"]) for r in records(tmp_path)] == [
        (0, 2, 0.5),
        (1, 2, 0.5),
    ]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("open", "ValueError: open"),
        pytest.param(
            "hangs", "waited for other ranks longer than timeout = 4 s", marks=pytest.mark.slow
        ),
    ],
)
def test_a_failure_under_torchrun_ends_the_job(how, words, tmp_path):
    timeout = "4" if how == "hangs" else "300"
    program = ("-m", "distributed_workers", str(tmp_path), "--fail", how, "--timeout", timeout)
    start = time.monotonic()
    agent = torchrun("--standalone", "--nproc-per-node=2", *program)
    output, _ = agent.communicate(timeout=120)
    assert agent.returncode != 0
    assert words in output
    assert time.monotonic() - start < SOON


@pytest.mark.slow
def test_torchrun_on_two_hosts(tmp_path):
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    agents = [
        torchrun(
            "--nnodes=2",
            "--nproc-per-node=1",
            *rendezvous,
            "--local-addr=127.0.0.1",
            "--rdzv-id=two",
            "-m",
            "distributed_workers",
            str(tmp_path),
        )
        for _ in range(2)
    ]
    for agent in agents:
        output, _ = agent.communicate(timeout=120)
        assert agent.returncode == 0, output
    assert [(r["rank"], r["local rank"], r["mean"]) for r in records(tmp_path)] == [
        (0, "0", 0.5),
        (1, "0", 0.5),
    ]


def test_a_worker_whose_parent_is_gone_ends_without_working(tmp_path):
    code = "import sys; from pathlib import Path; from lib.distributed_launch import _work; "
    code += "_work(0, 1, Path(sys.argv[1]), 'gloo', 5.0, parent=1)"
    command = [sys.executable, "-c", code, tmp_path]
    assert subprocess.run(command, cwd=ROOT).returncode == 1
    assert not list(tmp_path.iterdir())
