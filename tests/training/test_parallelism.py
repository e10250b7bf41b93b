"""Training on ranks, sharded or not: as in one process, written once, and nothing lost."""

import builtins
import dataclasses
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from lib.core.files import lock_folder
from lib.core.settings import to_json
from lib.ddp.launcher import WorkerError, launch
from lib.ddp.settings import DDP_WRAPPERS
from lib.ddp.wrappers import WRAPPERS
from lib.training import parallelism
from lib.training.checkpoint import load_checkpoint, newest_checkpoint
from lib.training.config import TrainConfig, TrainingWrapper
from lib.training.generation import load_model
from lib.training.metrics import read_metrics
from lib.training.parallelism import check_wrapper
from tests.ddp.workers import start_ranks
from tests.training import ranks as workers
from tests.training.runs import (
    CONFIG,
    ROOT,
    assert_close_run,
    assert_same_run,
    checkpoint_names,
    lines,
    small_pipeline,
)

pytestmark = pytest.mark.usefixtures("quick_ranks")

STEPS = 12
GLOO = {"backend": "gloo", "timeout": 60}
# For processes that start from nothing: deterministic algorithms load torch's compiler for seconds.
LIGHT = {"deterministic": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def config(data):
    fields = {"steps": STEPS, "log_interval": 2, "checkpointing_interval": 4, "eval_interval": 6}
    config = dataclasses.replace(CONFIG, data=data, batch_size=6, bucket_size_mb=0.005, **fields)
    return dataclasses.replace(config, eval_tokens=100)


@pytest.fixture(scope="module")
def one_process(config, folder):
    """The run of one process with the whole batch; its folder."""
    output = folder / "one"
    workers.train(dataclasses.replace(config, output=output))
    return output


@pytest.fixture(scope="module")
def three_ranks(config, folder):
    return launch(workers.three_ranks, 3, config, folder, **GLOO)


@pytest.fixture(scope="module")
def ranks(config, folder, one_process, three_ranks):
    """What two ranks found and left in `folder`, after three ranks and one began some runs."""
    assert workers.stop_before(2, dataclasses.replace(config, output=folder / "chain")) == 2
    return launch(workers.two_ranks, 2, config, folder, **GLOO)


def result_of(found):
    """What a worker found, unless it is a traceback."""
    if isinstance(found, str):
        if "ddp_wrapper" in found and "cannot average" in found:
            pytest.skip(found.splitlines()[-1])
        pytest.fail(found)
    return found


# Steps


def assert_learned(found: dict, expected: dict) -> None:
    """Reports and weights are those of one process with all sequences."""
    for one, other in zip(found["rows"], expected["rows"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        # Adam's first steps turn rounding of a gradient near 0 into a part of the learning rate
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", workers.WAYS)
def test_two_ranks_learn_what_one_process_learns_and_stay_alike_to_the_bit(ranks, name):
    first, second = (result_of(found["ways"][name]) for found in ranks)
    passes = 1 if name == "one pass" else workers.PASSES
    assert_learned(first, workers.steps_of_one_process(2, passes))
    assert first["rows"] == second["rows"]
    assert all(map(torch.equal, first["weights"], second["weights"]))
    # sharded state adds up to the whole: two moments of each weight
    total = sum(weight.numel() for weight in first["weights"])
    states = [found["state"] for found in (first, second)]
    if any(way in name for way in workers.SHARDED):
        # every rank has FSDP's norms
        norms = sum(weight.numel() for weight in first["weights"] if weight.ndim == 1)
        assert sum(states) == 2 * (
            total + (norms if name.startswith("fsdp,") or name == "fsdp" else 0)
        )
        # whole parameters balance as far as the largest one lets them
        largest = max(weight.numel() for weight in first["weights"])
        is_even = name.startswith(("zero1", "fsdp")) and name != "zero1, naive"
        limit = 0.02 if is_even else largest / total
        assert abs(states[0] - states[1]) / sum(states) < limit
    else:
        assert states == [2 * total] * 2


@pytest.mark.parametrize("name", ["parameters", "torch_zero"])
def test_three_ranks_learn_what_one_process_learns(three_ranks, name):
    for found in three_ranks:
        assert_learned(result_of(found[name]), workers.steps_of_one_process(3))


@pytest.mark.parametrize(("setting", "name"), workers.SETTING_CASES)
def test_settings_give_what_they_give_without_sharding(ranks, setting, name):
    for found in ranks:
        expected, result = (result_of(found["settings"][setting, n]) for n in ("none", name))
        for one, other in zip(result["rows"], expected["rows"], strict=True):
            assert one == pytest.approx(other, rel=1e-3)
        # one rounding in the short type moves a weight by the learning rate at most
        for one, other in zip(result["weights"], expected["weights"], strict=True):
            assert (one - other).abs().mean() < 1e-4


def test_a_group_of_one_rank_trains_as_one_process(ranks):
    expected = workers.steps_of_one_process(2)
    for found in ranks:
        assert found["alone"]["rows"] == expected["rows"]
        assert all(map(torch.equal, found["alone"]["weights"], expected["weights"]))


@pytest.mark.parametrize("name", ["flashddp", *workers.SHARDED])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks, name):
    for found in ranks:
        (row,), is_same = result_of(found["gradients"][name])
        assert row.is_skipped
        assert is_same


def test_a_loss_that_is_not_finite_on_one_rank_alone_is_reported_and_not_skipped(ranks):
    for found in ranks:
        (row,), is_same = found["loss"]
        assert row.loss == math.inf
        assert not row.is_skipped
        assert not is_same


def test_wrappers_are_those_that_a_config_takes():
    assert (*WRAPPERS, "torch_ddp") == DDP_WRAPPERS
    assert tuple(parallelism.KINDS) == get_args(TrainingWrapper)
    # and what loads a peer finds it
    assert [peer.load().__name__ for peer in parallelism.PEERS.values()] == [
        "TorchDDP", "FullySharded", "TorchZero"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_steps_learn_what_one_process_learns():
    names = ("flat", "flashddp", "torch_ddp")
    ways = {name: {"ddp_wrapper": name} for name in names} | workers.SHARDED
    expected = workers.steps_of_one_process(2)["rows"]
    for found in launch(workers.compiled, 2, ways, backend="gloo", timeout=600):
        for result in map(result_of, found.values()):
            for one, other in zip(result["rows"], expected, strict=True):
                assert one == pytest.approx(other, rel=1e-4)


def test_zero1_gathers_under_the_next_forward_pass(ranks):
    for found in ranks:
        eager, recorded = result_of(found["gathers"])
        # a CUDA graph begins and ends its gathers itself
        assert eager["pending"] > recorded["pending"] == 0
        assert eager["rows"] == recorded["rows"]
        assert all(map(torch.equal, eager["weights"], recorded["weights"]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_steps_recorded_on_two_gpus_are_those_launched(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    results = launch(workers.launched_and_recorded, 2, workers.SHARDED[name], backend="nccl")
    for launched, recorded in results:
        for one, other in zip(launched, recorded):
            assert other == pytest.approx(one, rel=1e-5)


# Settings that cannot be combined


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ddp_wrapper": "none"}, "ddp_wrapper 'none' on 2 ranks averages no gradients; use"),
        ({"ddp_wrapper": "none", **workers.PARAMETERS}, "zero1_strategy must be 'flat'"),
        ({"ddp_wrapper": "fsdp2", "cuda_graph": True}, "cuda_graph must .* 'fsdp2'.* flashddp can"),
        (
            workers.TORCH_ZERO | {"low_precision_weights": True},
            "low_precision_weights must be False .* 'torch_zero'.* zero1 can",
        ),
    ],
)
def test_what_cannot_be_combined_on_ranks_is_refused(changes, message):
    config = TrainConfig(**changes)
    check_wrapper(config, 1)
    with pytest.raises(ValueError, match=message):
        check_wrapper(config, 2)


# Runs


def test_evaluations_are_those_of_one_process(ranks):
    expected = workers.evaluations()
    assert [found["evaluations"] for found in ranks] == [expected, expected]


@pytest.mark.parametrize("name", workers.EVALUATED)
def test_a_model_in_training_is_evaluated_as_by_one_process(ranks, name):
    expected = workers.evaluations()
    # a divided model computes its losses from other layouts
    tolerance = 1e-6 if name.startswith("fsdp") else 0
    for found in ranks:
        for one, other in zip(result_of(found["evaluated in training"][name]), expected):
            right = pytest.approx(dataclasses.astuple(other), rel=tolerance, abs=0)
            assert dataclasses.astuple(one) == right


@pytest.mark.parametrize("name", ["fsdp", "fsdp2"])
def test_a_divided_model_is_evaluated_a_block_at_a_time(ranks, name):
    for found in ranks:
        held = result_of(found["held in evaluation"][name])
        # two blocks of eight, the part outside of blocks, and activations
        taken = held["most"] - held["before"]
        outside = held["model"] - 8 * held["block"]
        assert taken < 2 * held["block"] + outside + 30_000
        # half of the weights and of two moments
        assert held["before"] < 3 * held["model"] / 2 + 30_000


def test_a_run_is_that_of_one_process_written_once_and_known_to_all(ranks, folder, one_process):
    assert_close_run(folder / "run", one_process)
    first, second = (found["run"] for found in ranks)
    assert first["saved"] == [4, 8, 12]
    assert first["logs"] == 1
    assert first["records"] == read_metrics(folder / "run" / "metrics.jsonl")
    assert (second["saved"], second["logs"], second["records"]) == ([], 0, [])
    assert (first["groups left"], second["groups left"]) == (0, 0)
    assert checkpoint_names(folder / "run") == ["step-00000008", "step-00000012"]
    result = first["result"]
    assert result == second["result"]
    assert (result.status, result.step, result.output) == ("finished", STEPS, folder / "run")
    assert result.evaluation.loss == lines(folder / "run")[-1]["validation_loss"]
    assert [found["again"] for found in ranks] == ["up to date"] * 2
    record = json.loads((folder / "run" / "run.json").read_text())
    assert (record["batch_size"], record["world_size"]) == (3, 2)


def test_a_signal_to_one_rank_ends_all_where_they_log_and_the_run_resumes_exactly(ranks, folder):
    assert [found["signal"] for found in ranks] == [6] * 2
    assert [found["resumed"] for found in ranks] == ["finished"] * 2
    assert_same_run(folder / "stopped", folder / "run", STEPS)


def sharded_state(folder) -> list[torch.Tensor]:
    """Weights and the optimizer's state in a run's last checkpoint."""
    checkpoint = folder / "checkpoints" / f"step-{STEPS:08d}"
    parts = [load_file(path) for path in sorted(checkpoint.glob("[ms]*.safetensors"))]
    return [value for part in parts for value in part.values()]


@pytest.mark.parametrize("name", workers.SHARDED)
def test_a_stopped_sharded_run_resumes_exactly_and_its_model_loads(
    ranks, folder, one_process, name
):
    for found in ranks:
        assert result_of(found["exact"][name]) == [STEPS, 6, STEPS]
    assert_close_run(folder / name, one_process)
    one, other = (sharded_state(path) for path in (folder / name, folder / f"{name} stopped"))
    assert len(one) > 20
    assert all(map(torch.equal, one, other))
    assert lines(folder / name) == lines(folder / f"{name} stopped")
    load_model(folder / name, device="cpu")


def test_each_way_resumes_the_run_of_another_or_of_one_process(ranks, folder, one_process):
    for found in ranks:
        assert result_of(found["chain"]) == [4, 6, 8, 10, STEPS]
    assert_close_run(folder / "chain", one_process)


@pytest.mark.parametrize("name", ["from zero1", "from fsdp"])
def test_a_run_of_three_ranks_is_resumed_by_two_and_by_one(
    ranks, config, folder, one_process, name
):
    assert [result_of(found[name]) for found in ranks] == [8, 8]
    run = dataclasses.replace(config, output=folder / name)
    assert workers.train(run).status == "finished"
    assert_close_run(folder / name, one_process)


def test_one_process_resumes_the_run_of_ranks_with_as_many_sequences(
    ranks, config, folder, one_process
):
    output = folder / "to one"
    assert load_checkpoint(output / "checkpoints").step == 6
    with pytest.raises(ValueError, match=r"a step was 6 sequences = .* world_size 2, now 3 = "):
        workers.train(dataclasses.replace(config, output=output, batch_size=3))
    changes = {"output": output, "batch_size": 1, "gradient_accumulation_steps": 6}
    assert workers.train(dataclasses.replace(config, **changes)).status == "finished"
    assert_close_run(output, one_process)


def test_a_damaged_shard_makes_the_checkpoint_before_the_newest(ranks, folder, tmp_path):
    shutil.copytree(folder / "zero1" / "checkpoints", tmp_path / "run")
    newest = newest_checkpoint(tmp_path / "run")
    assert newest.name == "step-00000012"
    (newest / "shard-00001-of-00002.safetensors").unlink()
    older = newest_checkpoint(tmp_path / "run")
    assert older.name == "step-00000008"
    shard = older / "shard-00000-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole"):
        newest_checkpoint(tmp_path / "run")


def test_a_rank_killed_in_saving_leaves_the_checkpoint_before(config, folder, one_process):
    run = dataclasses.replace(config, output=folder / "killed", batch_size=3, **workers.ALONE)
    with pytest.raises(WorkerError):
        launch(workers.dies_in_saving, 2, run, **GLOO)
    assert checkpoint_names(run.output) == ["step-00000004"]
    again = dataclasses.replace(config, output=run.output)
    assert workers.train(again).status == "finished"
    assert_close_run(run.output, one_process)
    assert not any((run.output / "checkpoints").glob(".step-*"))


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("none", ValueError, "ddp_wrapper 'none' on 2 ranks averages no gradients"),
        ("no data on rank 1", FileNotFoundError, "which has no bpe.json"),
        ("not as rank 0", ValueError, "log_interval"),
        ("other run", ValueError, "= batch_size 4 × gradient_accumulation_steps 1 × world_size 2"),
        ("one device", ValueError, "device must be auto on several ranks"),
        ("too high", FloatingPointError, "consecutive non-finite step 3"),
        ("not shared", FileNotFoundError, "on a disk that all hosts share"),
        ("no tokens", ValueError, "tokens must have at least 2 ids, got 1"),
        ("fewer tokens", ValueError, "number of batches must be the same on all ranks"),
        ("resuming", OSError, "no such disk"),
    ],
)
def test_what_ends_a_run_is_known_on_all_ranks(ranks, case, kind, message):
    for found in ranks:
        name, text = found["errors"][case]
        assert issubclass(getattr(builtins, name), kind)
        assert message in text


def test_ranks_wait_for_a_folder_in_use_longer_than_for_one_another(config, folder):
    output = folder / "in use"
    output.mkdir()
    run = dataclasses.replace(config, output=output, steps=5, batch_size=3)
    timeout, begun = 1, folder / "begun"
    with lock_folder(output):
        done = threading.Event()
        results = []

        def start() -> None:
            options = {"backend": "gloo", "timeout": timeout}
            results.extend(launch(workers.note_and_train, 2, run, begun, **options))
            done.set()

        thread = threading.Thread(target=start)
        thread.start()
        while not (begun.exists() or done.wait(0.05)):
            pass
        # ranks take a moment to reach the lock, and then wait longer than `timeout`
        assert not done.wait(timeout + 1)
    thread.join()
    assert [result.status for result in results] == ["finished", "finished"]


# Under torchrun


def torchrun(*arguments: object) -> subprocess.Popen:
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(agent: subprocess.Popen) -> str:
    output, _ = agent.communicate(timeout=180)
    assert agent.returncode == 0, output
    return output


def config_file(folder, config):
    path = folder / "config.json"
    path.write_text(to_json(config))
    return path


@pytest.mark.slow
def test_two_hosts_train_as_one_and_a_killed_rank_loses_nothing(config, tmp_path):
    run = dataclasses.replace(config, output=tmp_path / "run", batch_size=3, steps=18, **LIGHT)
    straight = dataclasses.replace(run, output=tmp_path / "straight")
    path = config_file(tmp_path, straight)
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        port = listener.getsockname()[1]
    hosts = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.2", f"--master_port={port}")
    agents = [
        torchrun(*hosts, f"--node_rank={n}", "-m", "tests.training.ranks", path) for n in (0, 1)
    ]
    first, second = map(output_of, agents)
    assert first.count("finished 18\n") == 1
    assert "step 18/18" in first
    assert "finished" not in second
    assert "step 18/18" not in second
    # the same on one host, where rank 1 is killed in step 13; the one restart fails where ranks
    # still find addresses of the first start
    program = ("-m", "tests.training.ranks", config_file(tmp_path, run), tmp_path / "killed")
    output = output_of(torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=1", *program))
    assert (tmp_path / "killed").exists()
    assert "finished 18\n" in output
    weights = [
        (path / "checkpoints" / "step-00000018" / "model.safetensors").read_bytes()
        for path in (run.output, straight.output)
    ]
    assert (weights[0] == weights[1]) is True
    assert lines(run.output) == lines(straight.output)


def test_a_pipeline_of_ranks_makes_data_trains_and_prints_once(tmp_path):
    pipeline = small_pipeline(tmp_path, "The cat", output=tmp_path / "run")
    path = config_file(tmp_path, pipeline)
    ranks = start_ranks("-m", "lib", "pipeline", "--config", str(path))
    output = "".join(text for rank in ranks for text in rank.communicate(timeout=180))
    assert [rank.returncode for rank in ranks] == [0, 0], output
    for text in ("finished at step 8", "| tokenizer ", "step 8/8", "\nThe cat"):
        assert output.count(text) == 1, output
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["world_size"] == 2
