"""The speedrun: what is chosen for which machine, and training until a deadline."""

import dataclasses
import math
import time
from types import SimpleNamespace

import pytest

from lib.lessons.speedrun import plan as speedrun
from lib.lessons.speedrun.plan import H100, TWO_T4, Machine, choose, memory_rows, run_training
from lib.profiling.memory_formula import rank_memory
from lib.training.metrics import read_metrics
from tests.training.runs import small_pipeline, tokenized

CPU = Machine("cpu", "a processor")
A100 = Machine("cuda", "NVIDIA A100-SXM4-80GB", 8, (8, 0), 80 * 10**9)
SMALL = Machine("cuda", "NVIDIA A2", 1, (8, 6), 4 * 10**9)
NARROW = dataclasses.replace(TWO_T4, memory_bytes=16 * 10**8)

pytestmark = pytest.mark.usefixtures("quick_ranks")


def values(machine, minutes):
    return {setting.name: setting.value for setting in choose(machine, minutes=minutes).settings}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (TWO_T4, {"processes": 2, "dtype": "float16", "low_precision_weights": False}),
        (TWO_T4, {"ddp_wrapper": "flashddp"}),
        (H100, {"dtype": "bfloat16", "cuda_graph": True, "low_precision_weights": True}),
        # the optimizer is sharded where it would crowd the GPU
        (TWO_T4, {"sharded_optimizer": "none"}),
        (NARROW, {"sharded_optimizer": "zero1", "ddp_wrapper": "none"}),
        # gradients of several passes are not added up in bfloat16
        (SMALL, {"dtype": "bfloat16", "low_precision_weights": False}),
        # compiling is for full runs where Triton is
        (H100, {"compile": False}),
        (H100, {"minutes": None, "compile": True}),
        (dataclasses.replace(H100, has_triton=False), {"minutes": None, "compile": False}),
    ],
)
def test_the_machine_decides_the_settings(machine, expected):
    minutes = expected.get("minutes", 20)
    chosen = {"minutes": minutes} | values(machine, minutes=minutes)
    assert expected.items() <= chosen.items()


def test_a_small_gpu_takes_several_passes():
    assert choose(SMALL, minutes=20).train.gradient_accumulation_steps > 1


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
    passes = plan.train.gradient_accumulation_steps
    sequences = plan.train.batch_size * passes * plan.ranks
    assert sequences == (8 if machine is CPU else speedrun.SEQUENCES)


@pytest.mark.parametrize("memory_gb", [2, 4, 16])
def test_the_batch_fits_into_the_memory(memory_gb):
    machine = dataclasses.replace(TWO_T4, memory_bytes=memory_gb * 10**9)
    train = choose(machine, minutes=20).train
    model = dataclasses.replace(train.model, vocab_size=10_000)
    needed = rank_memory(model, ranks=2, batch_size=train.batch_size, dtype="float16").peak
    assert needed < machine.memory_bytes
    assert train.batch_size * train.gradient_accumulation_steps == 128


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_stops_at_the_deadline_and_goes_on_with_a_later_one(tmp_path, ranks):
    folders = {"data": tokenized(tmp_path, corpus_bytes=50_000), "output": tmp_path / "run"}
    settings = {"steps": 12, "log_interval": 2, "eval_interval": 0}
    config = small_pipeline(tmp_path, "A", **folders, **settings).train
    plan = SimpleNamespace(ranks=ranks)
    stopped = run_training(plan, config, time.time())
    # where the first line of metrics is written, which notebook 12 reads
    assert (stopped.status, stopped.step) == ("stopped", 2)
    assert [line["step"] for line in read_metrics(config.output / "metrics.jsonl")] == [2]
    assert stopped.checkpoint.name == f"step-{stopped.step:08d}"
    finished = run_training(plan, config, math.inf)
    assert (finished.status, finished.step) == ("finished", 12)


def test_sharding_lets_two_t4_train_a_larger_model():
    rows = {row["model"]: row for row in memory_rows(TWO_T4.memory_bytes, 2)}
    fits = {
        way: [name for name, row in rows.items() if "too much" not in row[way]]
        for way in ("one GPU (GB)", "2 GPUs (GB)", "2 GPUs, ZeRO-1 (GB)")
    }
    assert fits["one GPU (GB)"] == fits["2 GPUs (GB)"] == ["tinystories", "small", "medium"]
    assert fits["2 GPUs, ZeRO-1 (GB)"] == ["tinystories", "small", "medium", "large"]
