"""Trainings on several ranks: what is interleaved, what is left when one fails, records."""

import dataclasses
import math
import time
import types

import pytest
import torch

from lib.core.allocator import without_stderr
from lib.data.batches import BatchSampler
from lib.ddp.launcher import WorkerError, launch
from lib.ddp.process_group import barrier, rank
from lib.ddp.settings import DDP_WRAPPERS, default_bucket_cap_mb
from lib.model.config import MODEL_PRESETS
from lib.model.transformer import TransformerLM
from lib.sharded_optimizer import flat_slices
from lib.tools.benchmarks import interleaved as module
from lib.tools.benchmarks.interleaved import (
    Trainings,
    communication_figures,
    fits_together,
    loss_difference,
    step_figures,
)
from lib.tools.benchmarks.lm_matrix import (
    LmMatrixConfig,
    benchmark_lm_matrix,
    beside_none,
    measure_wrappers,
)
from lib.tools.benchmarks.rank_training import (
    SHARDING_METHODS,
    Groups,
    Training,
    compared_steps,
    shape_of,
    skewed_tokens,
    train_config,
)
from lib.tools.benchmarks.sharding import ShardingConfig
from lib.tools.benchmarks.sweep import Case
from tests.tools.benchmarks.rank_benchmarks import SMALL, cases_of

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def test_other_ranks_than_there_are_are_refused():
    with pytest.raises(ValueError, match="ranks must be None or the group's 2, got 4"):
        cases_of(ShardingConfig, ranks=4)


def test_given_settings_win_over_defaults():
    [case, *_] = cases_of(LmMatrixConfig, on_gpu=True, tr_batch_size=5, dtype="float32")
    assert (case.tr_batch_size, case.ranks, case.backend, case.model) == (5, 2, "nccl", "matrix")
    on_gpus = cases_of(ShardingConfig, on_gpu=True, dtype="float32")
    assert {case.model for case in on_gpus} == {"large", "xl"}
    assert {case.wrapper for case in cases_of(LmMatrixConfig)} == set(DDP_WRAPPERS)


class Recorded(Trainings):
    """Trainings that only write down what happens to them."""

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

    def figures(self, name, times):
        return {"memory": self.memory[name], "times_ms": times, "is_together": self.is_together}


@pytest.mark.parametrize(
    ("fits", "events", "losses"),
    [
        (True, "start a, start b, a, b, b, a, a, b", [3.0, 6.0, 7.0]),
        # models that do not fit together start anew for each epoch, and the longest losses count
        (
            False,
            "start a, start b, start a, a, start b, b, start b, b, start a, a, start a, a, "
            "start b, b, start a, start b",
            [4.0],
        ),
    ],
)
def test_epochs_are_interleaved_there_and_back_and_a_refused_training_is_left_out(
    monkeypatch, fits, events, losses
):
    monkeypatch.setattr(module, "fits_together", lambda *_: fits)
    monkeypatch.setattr(module, "gather_objects", lambda value, group=None: [value])
    names = ("a", "refused", "b")
    cases = [Case(**vars(cases_of(LmMatrixConfig)[0]) | {"method": name}) for name in names]
    config = LmMatrixConfig(timed_epochs=3, trace_steps=0)
    trainings = Recorded(cases, config, types.SimpleNamespace(hosts=None))
    rows = trainings.run()
    assert ", ".join(trainings.events) == events
    assert list(rows) == ["a", "refused", "b"]
    assert (rows["refused"]["status"], rows["refused"]["reason"]) == ("refused", "not here")
    row = {name: rows["a"][name] for name in ("status", "memory", "times_ms", "is_together")}
    assert [*row.values()] == ["ok", "memory of a", [2.0] * 3, fits]
    assert trainings.losses["a"] == losses
    assert bool(trainings.held) == fits


def test_a_training_that_is_too_large_for_one_rank_is_left_out_by_all(monkeypatch):
    cases = [Case(**vars(cases_of(LmMatrixConfig)[0]) | {"method": name}) for name in "ab"]
    problem = {"status": "oom", "reason": "too large"}
    of_another_rank = {"a": None, "b": problem}
    monkeypatch.setattr(
        module,
        "gather_objects",
        lambda value, group=None: [value, of_another_rank[trainings.events[-1][-1]]],
    )
    config = LmMatrixConfig(timed_epochs=1, trace_steps=0)
    trainings = Recorded(cases, config, types.SimpleNamespace(hosts=None))
    rows = trainings.run()
    assert rows["a"]["status"] == "ok"
    assert (rows["b"]["status"], rows["b"]["reason"]) == ("oom", "too large")
    assert list(trainings.held) == ["a"]


def test_an_epochs_time_is_the_mean_of_the_ranks_and_tokens_are_those_of_all(monkeypatch):
    monkeypatch.setattr(module, "gather_objects", lambda value: [value, [30.0, 50.0, 90.0]])
    case = types.SimpleNamespace(ranks=2, tr_batch_size=4, context_length=8)
    figures = step_figures(case, [10.0, 30.0, 50.0])
    assert figures["times_ms"] == [20.0, 40.0, 70.0]
    assert (figures["median_ms"], figures["iqr_ms"]) == (40.0, 25.0)
    assert figures["tokens_per_s"] == pytest.approx(64 / 0.040)


def test_communication_is_known_only_if_all_ranks_know_it(monkeypatch):
    monkeypatch.setattr(module, "gather_objects", lambda value: [value, (3.0, 2.0, 9.0)])
    found = communication_figures((1.0, 0.0, 7.0), torch.device("cpu"))
    assert found["communication_ms"] == 2.0
    assert found["exposed_communication_ms"] == 1.0
    assert (found["traced_step_ms"], found["exposed_from"]) == (8.0, "operators")
    assert communication_figures(None, torch.device("cpu")) == {}


SEVERAL = ("flashddp", "zero1", "torch_ddp+torch_zero", "fsdp2")


@pytest.mark.parametrize(
    ("memory_gb", "settings", "fits"),
    [
        (130, {"models": ("large",)}, True),
        (110, {"models": ("large",)}, False),
        # graphs keep the memory that their steps work in
        (50, {"models": ("medium",), "methods": SEVERAL}, True),
        (50, {"models": ("medium",), "methods": SEVERAL, "cuda_graph": True}, False),
        # sharded ones need less
        (150, {"models": ("xl",), "methods": SEVERAL}, True),
        (80, {"models": ("xl",), "methods": SEVERAL}, False),
        (150, {"models": ("xl",)}, False),
    ],
)
def test_models_are_held_together_only_where_they_fit(memory_gb, settings, fits):
    cases = cases_of(ShardingConfig, on_gpu=True, dtype="bfloat16", **settings)
    assert fits_together(cases, memory_gb * 1e9) == fits


def full_for_flashddp(group, config, device):
    """`measure_wrappers`, where memory is full on all ranks for `flashddp`."""
    train = Training.train

    def full(self: Training, steps: int) -> None:
        if self.case.wrapper == "flashddp":
            raise torch.OutOfMemoryError("CUDA out of memory: planted")
        train(self, steps)

    Training.train = full
    return measure_wrappers(group, config, device)


def failing(group, config, device):
    raise KeyError("planted")


@pytest.mark.slow
def test_full_memory_ends_its_training_and_no_other_and_a_fault_ends_all_with_its_case(
    tmp_path, caplog
):
    config = LmMatrixConfig(
        kernels=("sdpa",), wrappers=("flashddp", "flat"), output=tmp_path, **QUICK
    )
    benchmark = dataclasses.replace(benchmark_lm_matrix, measure=full_for_flashddp)
    records = benchmark(config)
    rows = {record["config"]["wrapper"]: record["figures"] for record in records}
    assert rows["flashddp"]["status"] == "oom"
    assert "planted" in rows["flashddp"]["reason"]
    assert rows["flat"]["status"] == "ok"
    assert "1 of 2 could not be measured" in caplog.text
    assert "- sdpa, flashddp: oom" in (tmp_path / "lm_matrix_report.md").read_text()
    assert benchmark(config) == records
    benchmark = dataclasses.replace(benchmark, measure=failing)
    with pytest.raises(WorkerError, match=r"(?s)planted.*while this was measured: .*'flat'"):
        benchmark(dataclasses.replace(config, restart=True))


def test_settings_that_are_refused_leave_no_file(tmp_path):
    with pytest.raises(ValueError, match="cuda_graph must be False on a CPU"):
        benchmark_lm_matrix(LmMatrixConfig(cuda_graph=True, output=tmp_path / "new", **SMALL))
    assert not (tmp_path / "new").exists()


QUICK = SMALL | {"loss_steps": 0, "trace_steps": 0, "epochs": 2, "timed_epochs": 1}


@pytest.mark.slow
def test_wrappers_train_as_one_process_on_the_batches_of_all_ranks(tmp_path):
    refused, wrappers = "flash_attention_triton", ("none", "flashddp", "torch_ddp")
    config = LmMatrixConfig(
        kernels=(refused, "sdpa"), wrappers=wrappers, backend="gloo", output=tmp_path, **SMALL
    )
    found = {}
    for record in benchmark_lm_matrix(config):
        figures, wrapper = record["figures"], record["config"]["wrapper"]
        if record["config"]["kernel"] == refused:
            assert figures["status"] == "refused"
            assert "cpu" in figures["reason"]
        else:
            found[wrapper] = figures
    assert list(found) == list(wrappers)
    state = 16 * found["none"]["parameters"]
    for wrapper, figures in found.items():
        assert len(figures["times_ms"]) == SMALL["timed_epochs"]
        seconds = figures["median_ms"] / 1e3
        assert figures["epoch_s"] == pytest.approx(seconds * SMALL["steps_per_epoch"])
        assert state < figures["peak_memory_bytes"] < 6 * state
        # only wrappers communicate
        total, exposed = figures["communication_ms"], figures["exposed_communication_ms"]
        assert (total > 0) == (wrapper != "none")
        assert 0 <= exposed <= total <= figures["traced_step_ms"]
        if wrapper == "none":
            assert "reference_losses" not in figures
            continue
        reference = figures["reference_losses"]
        assert len(reference) == SMALL["epochs"] * SMALL["steps_per_epoch"]
        assert reference[0] == pytest.approx(math.log(MODEL_PRESETS["tiny"].vocab_size), rel=0.1)
        # the comparison says something only if the model learns
        assert reference[-1] < reference[0] - 0.02
        assert figures["losses"] == pytest.approx(reference, abs=1e-5)
        assert figures["loss_difference"] < 1e-5


def test_efficiency_and_overhead_compare_epoch_by_epoch_with_none():
    none = {"times_ms": [10.0, 20.0, 40.0], "peak_memory_bytes": 1000}
    flat = {"times_ms": [20.0, 25.0, 40.0], "peak_memory_bytes": 1100}
    found = beside_none(flat, none)
    assert found["scaling_efficiency"] == 0.8
    assert found["iqr_scaling_efficiency"] == pytest.approx(0.25)
    assert found["memory_overhead"] == pytest.approx(0.1)
    assert beside_none(none, none)["scaling_efficiency"] == 1
    # a baseline that was refused, or not asked for
    for other in ({}, {"status": "refused"}):
        assert beside_none(flat, other) == dict.fromkeys(found)


@pytest.fixture
def case() -> Case:
    [case] = cases_of(LmMatrixConfig, **SMALL, kernels=("sdpa",), wrappers=("flat",))
    return case


def test_settings_reach_the_training(case):
    changes = {"compile": True, "low_precision_weights": True, "bucket_size_mb": 3.0}
    changes["cuda_graph"] = True
    settings = train_config(Case(**vars(case) | changes), gradient_accumulation_steps=3)
    assert {name: getattr(settings, name) for name in changes} == changes
    assert (settings.ddp_wrapper, settings.model.attention_kernel) == ("flat", "sdpa")
    assert settings.model.context_length == SMALL["context_length"]
    assert (settings.batch_size, settings.gradient_accumulation_steps) == (2, 3)
    for method, fields in SHARDING_METHODS.items():
        [case] = cases_of(ShardingConfig, methods=(method,))
        training = train_config(case)
        assert all(getattr(training, name) == value for name, value in fields.items())
        assert training.ddp_wrapper == fields.get("ddp_wrapper", method)


@pytest.mark.parametrize("short", [False, True])
def test_buckets_left_out_are_those_of_training(short):
    settings = {"models": ("large",), "low_precision_weights": short, "dtype": "bfloat16"}
    [case, *_] = cases_of(ShardingConfig, on_gpu=True, **settings)
    model = TransformerLM(shape_of(case), device="meta")
    if short:
        model.use_low_precision_weights(torch.bfloat16)
    gradients = sum(param.nbytes for param in model.parameters())
    assert case.bucket_size_mb == default_bucket_cap_mb(gradients) > 25


def test_losses_are_compared_step_by_step_for_the_steps_that_there_are(case):
    assert loss_difference([3.0, 2.0, 1.0], [3.0, 2.5]) == 0.5
    assert loss_difference([3.0], []) is None
    assert compared_steps(case) == SMALL["epochs"] * SMALL["steps_per_epoch"]
    case.loss_steps = 4
    assert compared_steps(case) == 4


def losses_of_the_warm_up(case, config) -> list[float]:
    """The losses of a training whose warm-up has more steps than its epochs."""
    training = Training(case, config, Groups(None, None))
    training.train(3)
    training.finish_warm_up(config, 3)
    return training.losses


def test_no_loss_of_a_long_warm_up_is_lost():
    short = {**SMALL, "epochs": 2, "timed_epochs": 1, "steps_per_epoch": 1, "trace_steps": 0}
    config = LmMatrixConfig(**short, kernels=("sdpa",), wrappers=("flat",))
    [case] = cases_of(LmMatrixConfig, **short, kernels=("sdpa",), wrappers=("flat",))
    for losses in launch(losses_of_the_warm_up, 2, case, config, backend="gloo", timeout=60):
        assert losses[0] == pytest.approx(math.log(MODEL_PRESETS["tiny"].vocab_size), rel=0.01)
        assert len(losses) == 2


def test_an_epoch_is_one_pass_over_skewed_tokens(case):
    tokens = skewed_tokens(case, seed=0)
    length, batch_size = case.context_length, case.tr_batch_size
    sampler = BatchSampler(len(tokens), length, batch_size, seed=0, world_size=case.ranks)
    assert sampler.num_sequences == case.steps_per_epoch * sampler.sequences_per_step
    assert tokens.min() >= 0
    assert tokens.max() < case.vocab_size
    # half of u⁴ lies below 1/16
    assert (tokens < case.vocab_size / 16).mean() == pytest.approx(0.5, abs=0.15)


def trace_with_a_late_rank(case: Case, config: ShardingConfig) -> list[bool]:
    """Trace steps whose last all-gathers one rank starts late.

    Returns whether these were over whenever a profiler stopped on this rank.
    """
    if rank() == 1:
        gather = flat_slices.all_gather
        flat_slices.all_gather = lambda *args, **kwargs: time.sleep(0.1) or gather(*args, **kwargs)
    training = Training(case, config, Groups(None, None))
    found, stop = [], torch.profiler.profile.stop_trace

    def look_and_stop(profiler: torch.profiler.profile) -> None:
        works = [bucket.gathering for bucket in training.step.optimizer.strategy.buckets]
        found.append(all(work is None or work[0].is_completed() for work in works))
        stop(profiler)

    torch.profiler.profile.stop_trace = look_and_stop
    training.trace_communication(1, None)
    with without_stderr(), torch.profiler.profile():
        training.train(1)
        barrier()
    training.read_losses()
    return found


@pytest.mark.usefixtures("quick_ranks")
def test_no_collective_is_under_way_when_a_profiler_stops():
    # gloo's threads would write into a log that is freed, and the process might die
    settings = SMALL | {"methods": ("zero1",)}
    config, [case] = ShardingConfig(**settings), cases_of(ShardingConfig, **settings)
    assert (
        launch(trace_with_a_late_rank, 2, case, config, backend="gloo", timeout=60)
        == [[True] * 2] * 2
    )
