"""Ranks of checks: threads give what processes give, and name a deadlock at once."""

import contextlib
import linecache
import signal
import threading
import time

import pytest
import torch

from lib.ddp.launcher import launch
from lib.lessons.calls import TimeLimitError, time_limit
from lib.lessons.exercise import Exercise, check
from lib.lessons.ranks import Processes, Threads, run_on_threads
from lib.lessons.sending import function_of, parcel_of


def messages(ranks) -> list[torch.Tensor]:
    part = torch.arange(4.0) + 10 * ranks.number
    after, before = (ranks.number + 1) % ranks.count, (ranks.number - 1) % ranks.count
    for number in range(3):
        ranks.send(part * number, after)
    received = [ranks.receive(before, like=part) for _ in range(3)]
    found = [ranks.all_gather(part), ranks.reduce_scatter(part), ranks.all_reduce(part)]
    return received + found


def messages_of_processes() -> list[torch.Tensor]:
    return messages(Processes())


@pytest.mark.usefixtures("quick_ranks")
def test_threads_get_what_processes_get():
    on_processes = launch(messages_of_processes, 2, backend="gloo")
    for one, other in zip(on_processes, run_on_threads(messages, 2)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def send_to_one_that_is_late() -> float:
    ranks, large = Processes(), torch.ones(4_000_000)
    if ranks.number == 0:
        ranks.send(large, 1)
        ranks.wait_for_messages()
        del ranks
        return 0.0
    time.sleep(1)
    return ranks.receive(0, like=large).sum().item()


@pytest.mark.usefixtures("quick_ranks")
def test_a_message_arrives_though_its_sender_is_done():
    assert launch(send_to_one_that_is_late, 2, backend="gloo", timeout=20) == [0.0, 4e6]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_rank_that_ends_by_any_error_leaves_nobody_waiting(error):
    def job(ranks):
        if ranks.number == 1:
            raise error
        ranks.all_reduce(torch.ones(2))

    with pytest.raises(error), time_limit(2):
        run_on_threads(job, 2)


def test_of_ranks_that_fail_the_lowest_rank_s_error_is_raised_though_others_were_first():
    def job(ranks):
        # rank 0 only waits for the others, in vain
        if ranks.number == 0:
            ranks.all_reduce(torch.ones(2))
        if ranks.number == 1:
            time.sleep(0.2)
        raise KeyError(f"of rank {ranks.number}")

    with pytest.raises(KeyError, match="of rank 1"):
        run_on_threads(job, 3)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (lambda r: r.all_reduce(torch.ones(2 + r.number)), r"of one shape, got the shapes \(2,\)"),
        (lambda r: r.all_gather(torch.ones(2, 2)), "takes flat tensors"),
        (
            lambda r: r.reduce_scatter(torch.ones(5)),
            "2 equal slices, got 5 elements; pad to a multiple",
        ),
        (lambda r: r.all_reduce(2), "all_reduce takes a tensor, got 2"),
        (
            lambda r: (r.all_gather if r.number else r.all_reduce)(torch.ones(2)),
            "ranks call different collectives: all_reduce, all_gather",
        ),
        (
            lambda r: (r.send(torch.ones(3), 1 - r.number), r.receive(1 - r.number, torch.ones(2))),
            r"must have the shape \(2,\), got \(3,\)",
        ),
        (
            lambda r: r.receive(1 - r.number, like=torch.ones(2)),
            "rank 0 waits for message 1 of rank 1, rank 1 waits for message 1 of rank 0",
        ),
        (
            lambda r: [r.all_reduce(torch.ones(2)) for _ in range(1 + r.number)],
            "rank 1 waits in all_reduce, its collective 2, rank 0 has ended",
        ),
    ],
)
def test_calls_that_do_not_fit_and_ranks_that_wait_forever_are_named(job, words):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=words):
        run_on_threads(job, 2)


def never_ends(ranks):
    while True:
        pass


def sleeps_or_waits(ranks):
    if ranks.number:
        time.sleep(1e9)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def asks_again(ranks):
    while True:
        with contextlib.suppress(Exception):
            ranks.receive(1 - ranks.number, like=torch.ones(2))


def one_never_ends(ranks):
    if ranks.number:
        never_ends(ranks)
    return ranks.all_reduce(torch.ones(2))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer on Windows")
@pytest.mark.parametrize(
    "job",
    [one_never_ends, sleeps_or_waits, asks_again],
)
def test_ranks_that_never_end_are_stopped_and_take_no_more_time(job):
    started = time.monotonic()
    with pytest.raises(TimeLimitError), time_limit(0.1):
        run_on_threads(job, 2)
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    # and what comes next works
    assert run_on_threads(lambda ranks: ranks.number, 2) == [0, 1]
    assert time.monotonic() - started < 10


CELL = """
import dataclasses, functools, math
import torch.nn.functional as F
from math import sqrt as root
SCALE, TABLE = 3.0, {"a": [1.0, 2.0]}
half = functools.partial(max, 0.5)
twice = lambda x: 2 * x

@dataclasses.dataclass
class Settings:
    lr: float = SCALE

class Counter:
    def __init__(self):
        self.total = 0.0
    def add(self, x):
        self.total += helper(x)

class Empty:
    pass

SETTINGS = Settings(lr=5.0)

def helper(x):
    return root(x) + math.floor(SCALE)

def attempt(x):
    # not `model`, which can't be sent
    counter = Counter()
    counter.add(x)
    Empty()
    return counter.total + twice(TABLE["a"][1]) + half(0.1) + SETTINGS.lr + len(F.relu.__name__)
"""


def test_processes_get_all_that_a_function_uses_of_its_notebook():
    # as the cells of a kernel are
    linecache.cache["<cell 7>"] = (len(CELL), None, CELL.splitlines(keepends=True), "<cell 7>")
    names: dict = {"__name__": "a notebook", "model": threading.Lock()}
    exec(compile(CELL, "<cell 7>", "exec"), names)
    attempt = function_of(parcel_of(names["attempt"]))
    assert attempt(4) == names["attempt"](4) == 2 + 3 + 4 + 0.5 + 5 + 4
    assert attempt.__globals__ is not names["attempt"].__globals__


def of_ones(ranks):
    return ranks.all_reduce(torch.ones(2))


@pytest.mark.usefixtures("quick_ranks")
def test_what_cannot_be_sent_or_fails_on_processes_alone_is_named(capsys):
    exercise = Exercise(
        of_ones, lambda *_: (2,), trials=1, ranks=True, processes=2, same_calls=False
    )
    names: dict = {"LOCK": threading.Lock(), "ONES": torch.ones(2), "__name__": "a notebook"}
    code = "def uses_a_lock(ranks):\n    LOCK.locked()\n    return ranks.all_reduce(ONES)"
    exec(code, names)

    def fails(ranks):
        return ranks.all_reduce(torch.ones(2 if isinstance(ranks, Threads) else -2))

    for attempt in (names["uses_a_lock"], fails):
        check(exercise, attempt)
    unsent, failed, advice = capsys.readouterr().out.splitlines()
    assert unsent == (
        "not yet: as expected; for processes, `LOCK` can't be sent: "
        "TypeError: cannot pickle '_thread.lock' object"
    )
    assert failed.startswith("not yet: as expected; on processes rank")
    assert advice.startswith("  The processes get this function, and what it uses of the notebook")
