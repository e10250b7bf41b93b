"""The harness: the order of trainings, and what is left when one fails."""

import dataclasses
import pickle
import types

import pytest
import torch

from lib.core.records import read_records
from lib.ddp.launcher import launch
from lib.ddp.process_group import rank
from lib.ddp.settings import DDP_WRAPPERS
from lib.tools.benchmarks import multi_rank
from lib.tools.benchmarks.lm_matrix import LmMatrix, LmMatrixConfig, benchmark_lm_matrix
from lib.tools.benchmarks.multi_rank import (
    Failure,
    Interleaved,
    communication_figures,
    fits_together,
    loss_difference,
    measure,
    plans_after_failure,
    plans_left,
    time_figures,
)
from lib.tools.benchmarks.multi_rank_report import measured
from lib.tools.benchmarks.rank_training import Plan, Training
from lib.tools.benchmarks.sharding_cases import SHARDING_METHODS, ShardingConfig
from tests.tools.benchmarks.rank_benchmarks import SMALL

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


class Recorded(Interleaved):
    """Trainings that only write down what happens to them."""

    compare = staticmethod(lambda rows: {name: {"compared": True} for name in rows})

    def warm_up(self, name):
        if name == "refused":
            raise ValueError("not here")
        self.events = [*getattr(self, "events", []), f"start {name}"]

        def epoch() -> float:
            self.events.append(name)
            training.losses.append(float(len(self.events)))
            return 2.0

        training = types.SimpleNamespace(
            timed_epoch=epoch, losses=[], step=object(), trace_communication=lambda *_: None
        )
        return training, f"memory of {name}"

    def own_figures(self, name, time):
        return {"memory": self.memory[name], "epoch_s": time["median_ms"]}


@pytest.fixture
def interleaved(monkeypatch):
    """Make `Recorded` trainings of one process, all in memory or one at a time."""
    case = types.SimpleNamespace(ranks=1, tr_batch_size=1, context_length=8, known_figures={})

    def make(*, fits: bool) -> Recorded:
        monkeypatch.setattr(multi_rank, "fits_together", lambda *_: fits)
        config = types.SimpleNamespace(timed_epochs=3, trace_steps=0, case=lambda *_: case)
        plan = Plan("subject", ("a", "refused", "b"))
        return Recorded(config, plan, types.SimpleNamespace(hosts=None), "", None)

    return make


def test_epochs_are_interleaved_there_and_back_and_a_refused_training_is_left_out(interleaved):
    trainings = interleaved(fits=True)
    rows = trainings.run()
    assert trainings.events == ["start a", "start b", "a", "b", "b", "a", "a", "b"]
    assert list(rows) == ["a", "refused", "b"]
    assert rows["refused"] == {"status": "refused", "reason": "not here"}
    assert rows["a"]["times_ms"] == [2.0] * 3
    assert (rows["a"]["status"], rows["a"]["memory"]) == ("ok", "memory of a")
    assert (rows["a"]["compared"], rows["a"]["is_together"]) == (True, True)
    assert trainings.finite_losses("a") == [3.0, 6.0, 7.0]


def test_models_that_do_not_fit_together_start_anew_for_each_epoch(interleaved):
    trainings = interleaved(fits=False)
    rows = trainings.run()
    first_round = ["start a", "a", "start b", "b"]
    assert trainings.events[:10] == [
        "start a",
        "start b",
        *first_round,
        *first_round[2:],
        "start a",
        "a",
    ]
    assert not trainings.held
    assert rows["b"]["is_together"] is False
    # the longest, not the last
    assert len(trainings.losses["a"]) == 1


def test_an_epochs_time_is_the_mean_of_the_ranks_and_tokens_are_those_of_all(monkeypatch):
    monkeypatch.setattr(multi_rank, "gather_objects", lambda value: [value, [30.0, 50.0, 90.0]])
    case = types.SimpleNamespace(ranks=2, tr_batch_size=4, context_length=8)
    figures = time_figures(case, [10.0, 30.0, 50.0])
    assert figures["times_ms"] == [20.0, 40.0, 70.0]
    assert (figures["median_ms"], figures["iqr_ms"]) == (40.0, 25.0)
    assert figures["tokens_per_s"] == pytest.approx(64 / 0.040)


def test_communication_is_known_only_if_all_ranks_know_it(monkeypatch):
    monkeypatch.setattr(multi_rank, "gather_objects", lambda value: [value, (3.0, 2.0, 9.0)])
    found = communication_figures((1.0, 0.0, 7.0), torch.device("cpu"))
    assert found["communication_ms"] == 2.0
    assert found["exposed_communication_ms"] == 1.0
    assert (found["traced_step_ms"], found["exposed_from"]) == (8.0, "operators")
    assert communication_figures(None, torch.device("cpu")) == {}


def test_losses_are_compared_step_by_step():
    assert loss_difference([3.0, 2.0, 1.0], [3.0, 2.5]) == 0.5
    assert loss_difference([3.0], []) is None


@pytest.mark.parametrize(
    ("memory_gb", "settings", "fits"),
    [
        (140, {"model": "large"}, True),
        (75, {"model": "large"}, False),
        (140, {"model": "xl"}, False),
        (120, {"model": "medium", "tr_batch_size": 64}, True),
        # graphs keep the memory that their steps work in
        (120, {"model": "medium", "tr_batch_size": 64, "cuda_graph": True}, False),
    ],
)
def test_models_are_held_together_only_where_they_fit(memory_gb, settings, fits):
    config = LmMatrixConfig(**settings).with_defaults(2, on_gpu=True)
    cases = [config.case("sdpa", name, "bfloat16") for name in DDP_WRAPPERS]
    assert fits_together(cases, memory_gb * 1e9) == fits


def test_sharded_models_need_less_to_be_held_together():
    config = ShardingConfig().with_defaults(2, on_gpu=True)
    several = ("flashddp", "zero1", "torch_ddp+torch_zero", "fsdp2")
    for methods, memory, fits in (
        (several, 150e9, True),
        (several, 80e9, False),
        (SHARDING_METHODS, 150e9, False),
    ):
        cases = [config.case("xl", method, "bfloat16") for method in methods]
        assert fits_together(cases, memory) == fits


def test_after_a_failure_the_rest_is_left():
    first, second = Plan("sdpa", ("none", "flat")), Plan("vectorized_torch", ("none",))
    alone = dataclasses.replace(first, is_together=False)
    full = Failure(first, "flat", None, "oom", "")
    assert plans_after_failure([first, second], full) == ([alone, second], False)
    without = dataclasses.replace(alone, names=("none",))
    full = dataclasses.replace(full, plan=alone)
    assert plans_after_failure([alone, second], full) == ([without, second], True)
    # plans before that of the failure are done
    last = Failure(second, "none", None, "failed", "")
    assert plans_after_failure([first, second], last) == ([], True)


def test_the_first_failure_counts(tmp_path):
    for reason in ("memory", "connection closed by rank 1"):
        failure = Failure(Plan("sdpa", ("flat",)), "flat", None, "failed", reason)
        failure.keep(tmp_path / "failure")
    assert pickle.loads((tmp_path / "failure").read_bytes()).reason == "memory"


def measure_with_a_full_rank(*arguments) -> None:
    """`measure`, where memory is full on rank 1 for `flashddp`, while rank 0 waits for it."""
    train = Training.train

    def full(self: Training, steps: int) -> None:
        if rank() == 1 and self.case.wrapper == "flashddp":
            raise torch.OutOfMemoryError("CUDA out of memory: planted")
        train(self, steps)

    Training.train = full
    measure(*arguments)


@pytest.mark.slow
def test_memory_full_on_one_rank_ends_its_training_and_no_other(tmp_path, monkeypatch, capsys):
    def launch_full(fn, *arguments, **options):
        assert fn is measure
        return launch(measure_with_a_full_rank, *arguments, **options)

    monkeypatch.setattr(multi_rank, "launch", launch_full)
    settings = SMALL | {"loss_steps": 0, "trace_steps": 0, "epochs": 2, "timed_epochs": 1}
    config = LmMatrixConfig(
        kernels=("sdpa",), wrappers=("flashddp", "flat"), output=tmp_path, **settings
    )
    records = benchmark_lm_matrix(config)
    rows = {record["config"]["wrapper"]: record["figures"] for record in records}
    assert rows["flashddp"]["status"] == "oom"
    assert "planted" in rows["flashddp"]["reason"]
    assert rows["flashddp"]["parameters"] == rows["flat"]["parameters"] > 0
    assert rows["flat"]["status"] == "ok"
    # retried with one model at a time, then given up
    assert capsys.readouterr().out.count("planted") == 2


def test_settings_that_are_refused_leave_no_file(tmp_path):
    settings = SMALL | {"d_model": 100, "num_heads": 3, "output": tmp_path / "new"}
    with pytest.raises(ValueError, match="d_model"):
        benchmark_lm_matrix(LmMatrixConfig(kernels=("sdpa",), **settings))
    assert not (tmp_path / "new").exists()


def run_twice(config: LmMatrixConfig) -> list[int]:
    """On a rank: the number of records that each of two calls returns; the second resumes."""
    return [len(benchmark_lm_matrix(config)) for _ in range(2)]


def test_ranks_that_are_there_already_measure_and_rank_0_alone_keeps_records(tmp_path):
    settings = SMALL | {"loss_steps": 0, "trace_steps": 0, "epochs": 2, "timed_epochs": 1}
    config = LmMatrixConfig(
        kernels=("sdpa",), wrappers=("none", "naive"), output=tmp_path, **settings
    )
    assert launch(run_twice, 2, config, backend="gloo", timeout=60) == [[2, 2], [0, 0]]
    # nothing is measured twice unless it is asked for
    records = read_records(tmp_path / "lm_matrix.jsonl")
    assert [record["config"]["wrapper"] for record in records] == ["none", "naive"]
    assert plans_left(LmMatrix, config.with_defaults(2, on_gpu=False)) == []
    for change in ({"restart": True}, {"seed": 1}, {"wrappers": ("none", "flat")}):
        other = dataclasses.replace(config, **change).with_defaults(2, on_gpu=False)
        assert plans_left(LmMatrix, other) == other.plans()
    assert (tmp_path / "lm_matrix_report.md").exists()


def test_who_needs_every_training_is_told_which_failed_and_why():
    done = {"model": "tiny", "method": "flashddp", "status": "ok", "reason": None}
    assert measured([done]) == [done]
    lost = done | {
        "method": "zero1",
        "status": "failed",
        "reason": "RuntimeError: connection reset",
    }
    with pytest.raises(RuntimeError, match="tiny, zero1: failed: RuntimeError: connection"):
        measured([done, lost])
