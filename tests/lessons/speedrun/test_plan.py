"""The speedrun: what is chosen for which machine, training until a deadline, and the outlook."""

import contextlib
import dataclasses
import math
import time
from types import SimpleNamespace

import pytest

from lib.data.prepare import TokenizeConfig, tokenize_corpus
from lib.lessons.speedrun import plan as speedrun
from lib.lessons.speedrun.plan import (
    H100,
    TWO_T4,
    Machine,
    choose,
    compile_gain_of,
    extrapolate,
    memory_rows,
    reached,
    run_training,
)
from lib.model.config import ModelConfig
from lib.profiling.memory_formula import rank_memory
from lib.training.config import OptimizerConfig, TrainConfig
from lib.training.metrics import read_metrics

CPU = Machine("cpu", "a processor")
A100 = Machine("cuda", "NVIDIA A100-SXM4-80GB", 8, (8, 0), 80 * 10**9)

pytestmark = pytest.mark.usefixtures("quick_ranks")


def values(machine, **settings):
    plan = choose(machine, **({"minutes": 20} | settings))
    return {setting.name: setting.value for setting in plan.settings}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (
            TWO_T4,
            {
                "processes": 2,
                "dtype": "float16",
                "attention_kernel": "auto",
                "ddp_wrapper": "flashddp",
                "low_precision_weights": False,
            },
        ),
        (
            H100,
            {
                "dtype": "bfloat16",
                "attention_kernel": "flash_attention_triton",
                "cuda_graph": True,
                "low_precision_weights": True,
            },
        ),
    ],
)
def test_the_chip_decides_dtype_and_kernel(machine, expected):
    assert expected.items() <= values(machine).items()


@pytest.mark.parametrize("machine", [TWO_T4, H100, A100])
@pytest.mark.parametrize("fastest", speedrun.KERNELS)
def test_a_measurement_beats_the_rule_of_thumb(machine, fastest):
    times = dict.fromkeys(speedrun.KERNELS, 2.0) | {fastest: 1.0}
    assert values(machine, attention_ms=times)["attention_kernel"] == fastest


@pytest.mark.parametrize("machine", [CPU, Machine("mps", "Apple M3")])
def test_without_cuda_one_process_trains_a_small_model(machine):
    plan = choose(machine, minutes=1)
    assert (plan.ranks, plan.train.model.d_model) == (1, 128)


@pytest.mark.parametrize("machine", [CPU, TWO_T4, H100, A100])
def test_each_setting_has_a_reason_and_is_what_is_trained(machine):
    plan = choose(machine, minutes=20)
    for name, value, reason in plan.settings:
        assert reason
        if name == "processes":
            assert value == plan.ranks
        elif name == "attention_kernel":
            assert value == plan.train.model.attention_kernel
        elif machine is not CPU:
            assert value == getattr(plan.train, name)


@pytest.mark.parametrize("memory_gb", [2, 3, 4, 8, 16])
def test_the_batch_fits_into_the_memory(memory_gb):
    machine = dataclasses.replace(TWO_T4, memory_bytes=memory_gb * 10**9)
    train = choose(machine, minutes=20).train
    model = dataclasses.replace(train.model, vocab_size=10_000)
    needed = rank_memory(model, ranks=2, batch_size=train.batch_size, dtype="float16").peak
    assert needed < machine.memory_bytes
    assert train.batch_size * train.gradient_accumulation_steps == 128


def test_gradients_of_several_passes_are_not_added_up_in_bfloat16():
    small = Machine("cuda", "NVIDIA A2", 1, (8, 6), 4 * 10**9)
    chosen = values(small)
    assert (chosen["dtype"], chosen["low_precision_weights"]) == ("bfloat16", False)
    assert choose(small, minutes=20).train.gradient_accumulation_steps > 1


def test_the_optimizer_is_sharded_where_it_would_crowd_the_gpu():
    assert values(TWO_T4)["sharded_optimizer"] == "none"
    narrow = values(dataclasses.replace(TWO_T4, memory_bytes=16 * 10**8))
    assert (narrow["sharded_optimizer"], narrow["ddp_wrapper"]) == ("zero1", "none")


def test_compiling_is_for_runs_long_enough_to_pay_for_it():
    assert not values(H100, minutes=20, compile_gain=0.04)["compile"]
    assert values(H100, minutes=60, compile_gain=0.04)["compile"]
    assert values(H100, minutes=None, compile_gain=0.04)["compile"]


def test_without_triton_nothing_is_chosen_that_needs_it():
    chosen = values(dataclasses.replace(H100, has_triton=False), minutes=None, compile_gain=0.04)
    assert (chosen["compile"], chosen["attention_kernel"]) == (False, "sdpa")


def test_the_gain_of_compiling_is_the_largest_on_record():
    def record(model, candidate, speed):
        figures = {"task": "step", "model": model, "candidate": candidate, "tokens_per_s": speed}
        return {"figures": figures}

    records = [record("a", "all", 100), record("a", "without torch.compile", 98)]
    records += [record("b", "all", 50), record("b", "without torch.compile", 45)]
    records += [record("c", "all", 10), {"figures": {"task": "loss"}}]
    assert compile_gain_of(records) == pytest.approx(0.1)
    assert compile_gain_of([]) == 0


@pytest.mark.gpu
def test_each_kernel_is_timed_on_a_gpu():
    times = speedrun.attention_times(ModelConfig(context_length=64), batch_size=2)
    assert "sdpa" in times
    assert all(0 < ms < 1000 for ms in times.values())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    config = TokenizeConfig(corpus_bytes=50_000, vocab_size=300, data_dir=folder, workers=1)
    tokenize_corpus(config, progress_bar=lambda *_: contextlib.nullcontext(lambda count: None))
    return config.output_dir


@pytest.fixture
def config(data, tmp_path):
    return TrainConfig(
        model=ModelConfig(context_length=16, d_model=16, num_layers=1, num_heads=1, d_ff=16),
        optimizer=OptimizerConfig(warmup_steps=2),
        data=data,
        output=tmp_path / "run",
        steps=12,
        batch_size=2,
        log_interval=2,
        eval_interval=0,
        eval_tokens=100,
        device="cpu",
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_stops_at_the_deadline_and_goes_on_with_a_later_one(config, ranks):
    plan = SimpleNamespace(ranks=ranks)
    stopped = run_training(plan, config, time.time())
    # where the first line of metrics is written
    assert (stopped.status, stopped.step) == ("stopped", 2)
    assert [line["step"] for line in read_metrics(config.output / "metrics.jsonl")] == [2]
    assert stopped.checkpoint.name == f"step-{stopped.step:08d}"
    finished = run_training(plan, config, math.inf)
    assert (finished.status, finished.step) == ("finished", 12)


def curve(tokens, a=0.7, b=300.0, c=0.5):
    return [{"tokens": n, "loss": a + b * n**-c} for n in tokens]


def test_a_power_law_is_found_again():
    lines = curve(range(10_000, 200_000, 10_000))
    spoiled = [*lines[:5], {"tokens": 55_000, "loss": math.nan}, *lines[5:]]
    low, high = extrapolate(spoiled, 1_000_000)
    assert low == pytest.approx(high, abs=1e-6) == pytest.approx(0.7 + 300 * 1e-3, abs=1e-6)


def test_a_curve_of_another_form_gives_a_wide_range():
    lines = curve(range(10_000, 200_000, 10_000))
    for line in lines[10:]:
        line["loss"] -= 0.5
    low, high = extrapolate(lines, 1_000_000)
    assert high - low > 0.2


def test_a_curve_that_falls_faster_than_its_first_half_said_fails_the_test():
    lines = curve(range(10_000, 400_000, 10_000))
    for number, line in enumerate(lines):
        line["loss"] += 0.02 * (-1) ** number
    end = reached(lines)
    assert extrapolate(lines[:19], end.tokens).holds(end.loss)
    for line in lines[19:]:
        line["loss"] -= 0.5
    assert not extrapolate(lines[:19], end.tokens).holds(reached(lines).loss)


def test_the_point_reached_is_the_mean_of_the_last_eight_that_are_finite():
    lines = [{"tokens": 10 * n, "loss": float(n)} for n in range(1, 11)]
    assert reached([*lines, {"tokens": 110, "loss": math.nan}]) == (65, 6.5)
    assert reached(lines[:2]) == (15, 1.5)
    with pytest.raises(ValueError, match="at least one finite loss"):
        reached([{"tokens": 5, "validation_loss": 3.0}])


def test_too_few_points_or_nothing_left_give_none():
    lines = curve(range(10_000, 200_000, 10_000))
    assert extrapolate(lines[:7], 10**6) is None
    assert extrapolate(lines, 190_000) is None
    assert extrapolate([{"tokens": 5, "validation_loss": 3.0}], 10**6) is None


def test_sharding_lets_two_t4_train_a_larger_model():
    rows = {row["model"]: row for row in memory_rows(TWO_T4.memory_bytes, 2)}
    fits = {
        way: [name for name, row in rows.items() if "too much" not in row[way]]
        for way in ("one GPU (GB)", "2 GPUs (GB)", "2 GPUs, ZeRO-1 (GB)")
    }
    assert fits["one GPU (GB)"] == fits["2 GPUs (GB)"] == ["tinystories", "small", "medium"]
    assert fits["2 GPUs, ZeRO-1 (GB)"] == ["tinystories", "small", "medium", "large"]
