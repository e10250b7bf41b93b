"""Process groups: what ranks share, and how they agree and fail together."""

import logging
import threading

import pytest
import torch
import torch.distributed as dist

from lib.core.hardware import available_cpus
from lib.ddp import process_group
from lib.ddp.launcher import launch
from tests.ddp import workers

CASES = ["broadcast", "means", "settings", "failures_of_one", "results_of_calls"]
CASES += ["modules_that_differ"]

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def ranks():
    """What each case gave on each of three ranks: {case: [on rank 0, on rank 1, on rank 2]}."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        results = launch(
            workers.run_cases, 3, "tests.ddp.workers", CASES, backend="gloo", timeout=60
        )
    return {name: [result[name] for result in results] for name in CASES}


def test_parameters_and_buffers_become_those_of_rank_0_and_tied_ones_are_sent_once(ranks):
    # the transposed matrix, the tied one, and the two buffers, of which an integer is sent as bytes
    expected = {"is broadcast": True, "is tied": True, "sent": [8, 9, 8, 2]}
    assert ranks["broadcast"] == [expected] * 3


def test_means_are_the_same_on_all_ranks_in_their_own_dtype(ranks):
    for number, short, wide in ranks["means"]:
        assert number == 2.0**24 + 1
        assert (short.dtype, short.tolist()) == (torch.bfloat16, [1.0, 2.0])
        assert (wide.dtype, wide.item()) == (torch.float64, 2.0**24 + 1)


def test_ranks_share_the_cores_and_only_rank_0_logs_more_than_errors(ranks):
    first, *others = ranks["settings"]
    assert first["log level"] < logging.ERROR
    assert [found["log level"] for found in others] == [logging.ERROR] * 2
    threads = {found["threads"] for found in ranks["settings"]}
    assert threads == {max(1, available_cpus() // 3)}


def test_an_error_of_one_rank_is_raised_on_all_by_kind_and_text(ranks):
    for rank, failures in enumerate(ranks["failures_of_one"]):
        texts = [text for text, _, _ in failures]
        if rank == 1:
            assert texts[:2] == ["OSError: disk", "KeyError: 'name'"]
        else:
            bad = "'utf-8' codec can't decode bytes in position 0-0: bad"
            assert texts == [
                "OSError: rank 1: disk",
                "KeyError: \"rank 1: 'name'\"",
                # which takes more than a text
                f"RuntimeError: rank 1: {bad}",
                # which only torch has
                "RuntimeError: rank 1: full",
            ]
        assert [is_original for _, is_original, _ in failures] == [rank == 1] * 4
        assert all(is_marked for _, _, is_marked in failures)


def test_a_call_on_rank_0_alone_gives_its_result_to_all(ranks):
    assert ranks["results_of_calls"] == [(10 * rank, [0], [0, 10, 20]) for rank in range(3)]


def test_modules_that_differ_between_ranks_are_refused_on_all(ranks):
    first, *others = ranks["modules_that_differ"]
    assert all(messages == first for messages in others)
    expected = [
        "weight must be the same on all ranks, but is float32 (5, 3) on cpu, trained on rank 0 and "
        "float32 (4, 3) on cpu, trained on rank 2",
        "is float32 (4, 3) on cpu, trained on rank 0 and bfloat16 (4, 3)",
        "float32 (4, 3) on cpu, trained on rank 0 and float32 (4, 3) on cpu, not trained",
        "1.weight must be the same on all ranks, but is missing on rank 0",
        "the order must be the same on all ranks, but at position 0 is a.weight on rank 0 and "
        "c.weight on rank 2",
        "weight must have memory",
    ]
    for message, words in zip(first, expected, strict=True):
        assert words in message


def test_without_a_group_this_process_is_rank_0_of_1(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    module = torch.nn.Linear(2, 2)
    before = module.weight.clone()
    with process_group.init_from_environment("gloo") as device:
        assert device == torch.device("cpu")
        assert (process_group.rank(), process_group.world_size()) == (0, 1)
        assert process_group.mean_over_ranks(3.0) == 3.0
        assert process_group.on_first_rank(lambda: "own") == "own"
        process_group.barrier()
        process_group.broadcast_module(module)
    assert torch.equal(module.weight, before)


def test_what_holds_the_group_lets_go_before_it_is_destroyed(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
        monkeypatch.setenv(f"LOCAL_{name}", str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    class Holder:
        had_group = None

        def let_go(self):
            self.had_group = dist.is_initialized()

    holder = Holder()
    with process_group.init_from_environment("gloo"):
        process_group.before_leaving(holder.let_go)
        # one that is gone by then
        process_group.before_leaving(Holder().let_go)
        assert holder.had_group is None
    assert holder.had_group
    assert not dist.is_initialized()


def test_an_incomplete_environment_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(ValueError, match=r"MASTER_ADDR.* must be set, since RANK is '1'"),
        process_group.init_from_environment(),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "abc", "RANK must be a whole number, as torchrun sets it, got 'abc'"),
        ("WORLD_SIZE", "-1", "WORLD_SIZE must be a whole number, as torchrun sets it, got '-1'"),
        ("LOCAL_RANK", "", "LOCAL_RANK must be a whole number, as torchrun sets it, got ''"),
        ("LOCAL_WORLD_SIZE", "1.5", "LOCAL_WORLD_SIZE must be a whole number, .* got '1.5'"),
        ("MASTER_PORT", "http", "MASTER_PORT must be a whole number, .* got 'http'"),
        ("RANK", "7", "RANK must be below WORLD_SIZE = 2, got 7"),
        ("LOCAL_RANK", "2", "LOCAL_RANK must be below LOCAL_WORLD_SIZE = 2, got 2"),
    ],
)
def test_a_wrong_variable_of_torchrun_is_named(monkeypatch, name, value, words):
    right = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, text in (
        right | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", name: value}
    ).items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=words), process_group.init_from_environment("gloo"):
        pass


def test_ranks_of_a_second_start_find_each_other_and_not_those_of_the_first():
    store = dist.HashStore()
    # what a rank 1 that is gone left, answered and not
    for left in ("drawn/1", "confirmed/prefix/1"):
        store.set(left, "gone")
    found = {}

    def join(rank):
        part = process_group.store_of_this_start(store, rank, 2)
        part.set(f"here/{rank}", "")
        part.wait([f"here/{1 - rank}"])
        found[rank] = True

    for _ in range(2):
        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == {0: True, 1: True}
        found.clear()
