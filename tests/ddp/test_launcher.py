"""Launching ranks: results in order, failures with rank and traceback, and nothing hangs."""

import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lib.ddp import launcher
from lib.ddp.launcher import WorkerError, launch
from tests.ddp import workers

# Well below every timeout that is not the test's subject.
SOON = 45

pytestmark = pytest.mark.usefixtures("quick_ranks")


def failure_of(how: str, *, world_size: int = 2, timeout: float = 60) -> WorkerError:
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        launch(workers.fail, world_size, how, backend="gloo", timeout=timeout)
    assert time.monotonic() - start < SOON
    return caught.value


def test_results_come_in_order_and_each_rank_has_its_own_copy(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    x = torch.zeros(2)
    results = launch(workers.identity, 2, x, backend="gloo", timeout=60)
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    assert [result[2].tolist() for result in results] == [[0, 0], [1, 1]]
    assert x.tolist() == [0, 0]
    assert [result[3] for result in results] == [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in range(2)
    ]
    # no file stays
    assert not list(tmp_path.iterdir())


def test_one_rank_has_a_group():
    # a number of NumPy's counts too
    assert launch(workers.inside_init, np.int64(1), backend="gloo", timeout=60) == ["cpu"]


def test_a_rank_never_looks_for_garbage_in_what_was_loaded_before_it_started():
    (frozen,) = launch(gc.get_freeze_count, 1, backend="gloo", timeout=60)
    assert frozen > 100_000


@pytest.mark.parametrize(
    ("how", "options", "rank", "words"),
    [
        ("raises", {}, 1, "rank 1 of 2 raised KeyError: 'a name that is missing'"),
        ("exits", {}, 1, "SystemExit: 3"),
        ("vanishes", {}, 1, "exit code 0 before its function returned"),
        ("is killed", {}, 1, "rank 1 of 2 was killed by SIGKILL"),
        ("hangs", {"world_size": 3, "timeout": 3}, None, "timeout = 3 s.*not called by rank 1"),
        ("sends another shape", {}, 0, r"asked for \(shapes differ between ranks\)"),
        ("returns early", {}, 0, "had returned by then: rank 1"),
        ("returns before a collective", {"timeout": 3}, 0, r"\(had returned by then: rank 1\)"),
    ],
)
def test_the_rank_that_failed_first_is_the_cause(how, options, rank, words):
    error = failure_of(how, **options)
    assert rank is None or error.rank == rank
    assert re.search(words, str(error))
    assert ('raise KeyError("a name that is missing")' in str(error)) == (how == "raises")


LOST = "RuntimeError: [pair.cc:553] Connection reset by peer [127.0.0.1]:1"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("summary", [LOST, "ValueError: step 7 failed"])
def test_a_rank_that_died_is_named_before_what_others_raised(tmp_path, number, summary):
    record = {"time": 0.0, "has_returned": False, "summary": summary}
    record["traceback"] = f"Traceback\n{summary}\n"
    (tmp_path / "failure-0.json").write_text(json.dumps(record))
    # rank 2 was still running, and so was stopped
    error = launcher._failure(tmp_path, [1, -number, -signal.SIGTERM], ended=[0, 1])
    assert (error.rank, error.has_died) == (1, True)
    assert str(error).startswith(f"rank 1 of 3 was killed by {number.name}")
    # only what says more than that the rank is gone
    assert (summary in str(error)) == (summary != LOST)


def test_a_crash_shows_what_the_rank_was_doing():
    error = failure_of("crashes")
    first, *lines = str(error).splitlines()
    assert first == "rank 1 of 2 was killed by SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in lines
    assert any("workers.py" in line and "in fail" in line for line in lines)
    assert "_end_with_parent" not in str(error)


def test_a_failure_with_a_collective_open_ends_the_job_at_once():
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 of 2 raised ValueError: open"):
        launch(workers.fail_with_collective_open, 2, backend="gloo", timeout=300)
    assert time.monotonic() - start < SOON


def test_a_result_that_cannot_be_saved_is_an_error():
    with pytest.raises(WorkerError, match=r"rank 0 of 1 raised .*lambda"):
        launch(workers.return_what_cannot_be_saved, 1, backend="gloo", timeout=60)


def of_a_cell():
    """A function that only this process has."""


of_a_cell.__module__ = "__main__"


@pytest.mark.parametrize(
    "fn",
    [of_a_cell, lambda: 1, functools.partial(of_a_cell), torch.zeros(1).sum, None],
    ids=["cell", "lambda", "partial", "method", "none"],
)
def test_a_function_that_workers_cannot_import_is_refused(fn):
    with pytest.raises(ValueError, match="fn must be a function at the top level of a file"):
        launch(fn, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 0}, "world_size must be a whole number, at least 1, got 0"),
        ({"world_size": True}, "world_size must be a whole number, at least 1, got True"),
        ({"world_size": "2"}, "world_size must be a whole number, at least 1, got '2'"),
        ({"world_size": 2, "timeout": "5"}, "timeout must be more than 0 and finite, got '5'"),
        ({"world_size": 2, "timeout": 0}, "timeout must be more than 0"),
        ({"world_size": 2, "backend": "mpi"}, "backend must be None or one of nccl"),
        ({"world_size": 99, "backend": "nccl"}, "'nccl' needs a GPU for each of 99 ranks"),
    ],
)
def test_a_wrong_argument_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        launch(workers.inside_init, **options)


INTERRUPTED = """
import os, signal, sys, threading, time, multiprocessing
from multiprocessing import forkserver
from lib.ddp.launcher import launch

def interrupt():
    while not (forkserver._forkserver._forkserver_pid or multiprocessing.active_children()):
        time.sleep(0.001)
    # by now Python runs in the server of ranks or in the rank, and imports
    time.sleep(float(sys.argv[1]))
    os.killpg(0, signal.SIGINT)

# a job in a shell's background begins with interrupts ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt).start()
try:
    launch(time.sleep, 2, 60, backend="gloo")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("seconds", [0.3, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupt_ends_ranks_that_are_starting_without_a_word(seconds):
    command = [sys.executable, "-c", INTERRUPTED, str(seconds)]
    options = {"cwd": workers.ROOT, "capture_output": True, "text": True, "start_new_session": True}
    done = subprocess.run(command, timeout=SOON, **options)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_ranks_end_with_the_process_that_launched_them(tmp_path):
    # too long for the name of a socket
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    code = "import sys; from lib.ddp.launcher import launch; from tests.ddp import workers; "
    code += "launch(workers.write_pid_and_sleep, 2, sys.argv[1], backend='gloo')"
    command = [sys.executable, "-c", code, tmp_path]
    env = os.environ | {"TMPDIR": str(folder)}
    parent = subprocess.Popen(command, cwd=workers.ROOT, env=env)
    deadline = time.monotonic() + 2 * SOON
    while len(files := list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    alive = [int(file.stem) for file in files]
    assert len(alive) == 2
    while alive and time.monotonic() < deadline:
        alive = [pid for pid in alive if Path(f"/proc/{pid}").exists()]
        time.sleep(0.05)
    assert not alive


def test_ranks_have_the_environment_of_each_launch(monkeypatch):
    for value in ("a", "b"):
        monkeypatch.setenv("WORKBOOK_TEST", value)
        assert launch(os.getenv, 1, "WORKBOOK_TEST", backend="gloo") == [value]


def test_where_there_is_a_gpu_ranks_are_spawned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launcher._start_method() == "spawn"


def test_arguments_that_one_rank_refuses_end_all_and_that_rank_says_why():
    assert launch(workers.parsed, 2, backend="gloo", timeout=60) == [
        {"first": "exit 2, bogus is no flag\n", "second": "exit 2, ", "none": "a config, "},
        {
            "first": "exit 2, ",
            "second": "exit 2, rank 1:\nbogus is no flag\n",
            "none": "a config, ",
        },
    ]


def test_a_failure_under_torchrun_ends_the_job():
    start = time.monotonic()
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*agent, "-m", "tests.ddp.workers"],
        env=os.environ | {"PYTHONPATH": str(workers.ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "ValueError: open" in done.stdout + done.stderr
    assert time.monotonic() - start < SOON


def test_a_rank_says_that_it_lost_another():
    # without torchrun's agent, which may end the other rank before it can say anything
    code = "from lib.ddp.launcher import run_as_rank; from tests.ddp import workers; "
    code += "run_as_rank(workers.lose_rank_1, print)"
    ranks = workers.start_ranks("-c", code)
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert ranks[1].returncode == -signal.SIGKILL, errors[1]
    assert "ConnectionError: rank 0 lost another rank" in errors[0]
