"""Training on several ranks: as in one process, written once, and nothing lost with a rank."""

import builtins
import dataclasses
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_ranks as workers
from safetensors.torch import load_file

from lib import communication_costs, distributed, sharded_optimizer, train_optimizer
from lib.checkpoint import load_checkpoint
from lib.config import TokenizeConfig
from lib.config_training import (
    DDP_WRAPPERS,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    SampleConfig,
    TrainConfig,
)
from lib.ddp import WRAPPERS
from lib.distributed_restart import store_of_this_start
from lib.files import lock_folder
from lib.metrics import read_metrics
from lib.model import TransformerLM
from lib.strict_json import to_json
from lib.tokenizer import SEPARATOR
from lib.train_step import TrainStep, check_wrapper

ROOT = Path(__file__).resolve().parent.parent
CLOCK = ("seconds", "tokens_per_s", "mfu")
CONFIG = TrainConfig(
    model=ModelConfig(context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=32),
    optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=4),
    steps=18,
    batch_size=2,
    device="cpu",
    deterministic=True,
    log_interval=4,
    eval_interval=10,
    eval_tokens=200,
    checkpointing_interval=5,
    bucket_size_mb=0.005,
)

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def config(folder):
    from test_train import tokenized

    return dataclasses.replace(CONFIG, data=tokenized(folder / "data"))


@pytest.fixture(scope="module")
def one_process(config, folder):
    """The run of one process with the whole batch; its folder."""
    output = folder / "one"
    workers.train(dataclasses.replace(config, output=output, batch_size=4))
    return output


@pytest.fixture(scope="module")
def ranks(config, folder, one_process):
    """What two ranks found and left in `folder`."""
    half = dataclasses.replace(config, output=folder / "half", batch_size=4)
    with workers.before_step(9, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert workers.train(half).step == 9
    return distributed.launch(workers.everything, 2, config, folder, backend="gloo", timeout=60)


def lines(folder: Path) -> list[dict]:
    """The lines of metrics, but for what a clock decides."""
    records = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in records]


def final_bits(folder: Path) -> list[bytes]:
    path = folder / "checkpoints" / "step-00000018"
    return [(path / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


def assert_close_run(folder: Path, expected: Path) -> None:
    """Weights and metrics are equal up to rounding."""
    weights, others = (
        load_file(load_checkpoint(path / "checkpoints").path / "model.safetensors")
        for path in (folder, expected)
    )
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-3, atol=1e-5)
    assert len(lines(folder)) == len(lines(expected))
    for one, other in zip(lines(folder), lines(expected)):
        assert one == pytest.approx(other, rel=1e-4)


# One step


def reference(accumulated: int) -> tuple[list, list]:
    """One process on the windows of both ranks."""
    config = dataclasses.replace(workers.STEP, batch_size=2 * accumulated * workers.BATCH)
    parts = lambda step: [workers.part(step, rank, accumulated) for rank in (0, 1)]  # noqa: E731
    return workers.steps_with(config, lambda step: torch.cat(parts(step)))


@pytest.mark.parametrize(("name", "accumulated"), workers.WAYS)
def test_ranks_learn_what_one_process_learns_from_all_windows(ranks, name, accumulated):
    rows, weights = reference(accumulated)
    for found in ranks:
        other_rows, other_weights = found["ways"][name, accumulated]
        for one, other in zip(other_rows, rows, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        for one, other in zip(other_weights, weights, strict=True):
            # Adam's first steps turn rounding of a gradient near 0 into a part of the learning rate
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "accumulated"), workers.WAYS)
def test_ranks_stay_alike_to_the_bit_and_report_alike(ranks, name, accumulated):
    (rows, weights), (other_rows, others) = (found["ways"][name, accumulated] for found in ranks)
    assert rows == other_rows
    assert workers.digest(weights) == workers.digest(others)


def test_a_group_of_one_rank_trains_as_one_process(ranks):
    rows, weights = workers.steps_with(workers.STEP, lambda step: workers.part(step, 0, 1))
    for found in ranks:
        assert found["alone"][0] == rows
        assert workers.digest(found["alone"][1]) == workers.digest(weights)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks):
    for found in ranks:
        ((row,), is_same) = found["gradient"]
        assert row.is_skipped
        assert is_same


def test_a_loss_that_is_not_finite_on_one_rank_alone_is_reported_and_not_skipped(ranks):
    for found in ranks:
        ((row,), is_same) = found["loss"]
        assert row.loss == math.inf
        assert not row.is_skipped
        assert not is_same


def operations(**changes) -> list[str]:
    """The names of all operations of a step in one process."""
    config = dataclasses.replace(workers.STEP, gradient_accumulation_steps=2, **changes)
    model = TransformerLM(config.model, generator=torch.Generator().manual_seed(0))
    step = TrainStep(model, config, workers.CPU, torch.float32)
    step(workers.part(0, 0, 2), 1e-2)
    with torch.profiler.profile() as profiler:
        step(workers.part(1, 0, 2), 1e-2)
        step.read_log()
    return [event.name for event in profiler.events() if event.name.startswith("aten::")]


def test_one_rank_computes_nothing_for_the_sake_of_others():
    expected = operations(ddp_wrapper="none")
    for name in workers.WRAPPERS:
        assert operations(ddp_wrapper=name) == expected


def test_wrappers_are_those_that_a_config_takes():
    assert tuple(WRAPPERS) == DDP_WRAPPERS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ddp_wrapper": "none"}, "ddp_wrapper is 'none', but there are 2 ranks"),
        (
            {"ddp_wrapper": "torch_ddp", "cuda_graph": True},
            "ddp_wrapper is 'torch_ddp' and cuda_graph is True, which do not go together on 2",
        ),
    ],
)
def test_wrappers_that_cannot_train_on_ranks_are_refused(changes, message):
    config = dataclasses.replace(CONFIG, **changes)
    check_wrapper(config, 1)
    with pytest.raises(ValueError, match=message):
        check_wrapper(config, 2)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_blocks_learn_what_the_model_as_a_whole_learns():
    found = distributed.launch(workers.blocks_and_whole, 2, backend="gloo", timeout=600)
    rows, _ = reference(1)
    for results in found:
        for other_rows, _ in results.values():
            for one, other in zip(other_rows, rows, strict=True):
                assert one == pytest.approx(other, rel=1e-4)


# Evaluation


def test_evaluations_are_those_of_one_process(ranks):
    expected = workers.evaluations()
    assert [found["evaluations"] for found in ranks] == [expected, expected]


# Runs


def test_a_run_is_that_of_one_process(ranks, folder, one_process):
    assert_close_run(folder / "run", one_process)


def test_a_run_is_written_and_told_of_once(ranks, folder):
    first, second = (found["run"] for found in ranks)
    assert first["saved"] == [5, 10, 15, 18]
    assert first["logs"] == 1
    assert first["told"] == read_metrics(folder / "run" / "metrics.jsonl")
    assert (second["saved"], second["logs"], second["told"]) == ([], 0, [])
    names = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000015", "step-00000018"]


def test_all_ranks_know_what_became_of_a_run(ranks, folder):
    first, second = (found["run"]["result"] for found in ranks)
    assert first == second
    assert (first.status, first.step, first.output) == ("finished", 18, folder / "run")
    assert first.evaluation.loss == lines(folder / "run")[-1]["validation_loss"]
    assert [found["again"] for found in ranks] == ["up to date"] * 2


def test_run_json_tells_how_a_step_is_split(ranks, folder):
    record = json.loads((folder / "run" / "run.json").read_text())
    assert (record["batch_size"], record["world_size"]) == (2, 2)


def test_a_signal_to_one_rank_ends_all_where_they_log_and_the_run_goes_on_exactly(ranks, folder):
    assert [found["signal"] for found in ranks] == [("stopped", 8)] * 2
    assert [found["resumed"] for found in ranks] == ["finished"] * 2
    assert (final_bits(folder / "stopped") == final_bits(folder / "run")) is True
    assert lines(folder / "stopped") == lines(folder / "run")


def test_ranks_go_on_with_the_run_of_one_process(ranks, folder, one_process):
    assert [found["from one"] for found in ranks] == ["finished"] * 2
    assert_close_run(folder / "half", one_process)


def test_one_process_goes_on_with_the_run_of_ranks(ranks, config, folder, one_process):
    output = folder / "to one"
    changes = {"output": output, "batch_size": 1, "gradient_accumulation_steps": 4}
    assert load_checkpoint(output / "checkpoints").step == 8
    assert workers.train(dataclasses.replace(config, **changes)).status == "finished"
    assert_close_run(output, one_process)


def test_ranks_do_not_go_on_with_another_number_of_windows(ranks, config, folder):
    with pytest.raises(ValueError, match=r"a step was 4 windows = .* world_size 2, now 2 = "):
        workers.train(dataclasses.replace(config, output=folder / "run"))


def test_how_a_step_is_split_does_not_change_a_runs_folder(config, folder):
    from lib.train_folder import run_folder

    def name(num_ranks, **changes):
        changed = dataclasses.replace(config, runs_dir=folder, **changes)
        return run_folder(changed, {"train": "0"}, num_ranks)

    assert name(2) == name(1, batch_size=4) == name(1, gradient_accumulation_steps=2)
    assert name(2) != name(1)


# Errors: the same on all ranks, and at once


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("none", ValueError, "ddp_wrapper is 'none', but there are 2 ranks"),
        ("no data", FileNotFoundError, "which has no tokenizer.json"),
        ("no data on rank 1", FileNotFoundError, "which has no tokenizer.json"),
        ("not as rank 0", ValueError, "log_interval is 4 on rank 0, but 5 on rank 1"),
        (
            "other run",
            ValueError,
            "= batch_size 3 × gradient_accumulation_steps 1 × world_size 2",
        ),
        ("no folder", OSError, "/proc/run"),
        ("one device", ValueError, "device is 'cuda:0', but the ranks' group works on cpu"),
        ("too high", FloatingPointError, "the 3th step in a row"),
        ("not shared", FileNotFoundError, "on a disk that all hosts share"),
    ],
)
def test_what_ends_a_run_is_known_on_all_ranks(ranks, case, kind, message):
    for found in ranks:
        name, text = found["errors"][case]
        assert issubclass(getattr(builtins, name), kind)
        assert message in text


def test_an_error_of_another_rank_names_it(ranks):
    first, second = (found["errors"]["no data on rank 1"][1] for found in ranks)
    assert first == f"rank 1: {second}"


def test_ranks_of_a_second_start_find_each_other_and_not_those_of_the_first():
    store = dist.HashStore()
    # what a rank 1 that is gone left, answered and not
    for left in ("drawn/1", "known/name/1"):
        store.set(left, "gone")
    found = {}

    def join(rank):
        part = store_of_this_start(store, rank, 2)
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


def test_a_checkpoint_that_rank_0_cannot_write_ends_all_ranks(ranks):
    for found in ranks:
        kind, text = found["full disk"]
        assert kind == "OSError"
        assert "no space left to write a checkpoint" in text


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


def config_file(folder: Path, config) -> Path:
    path = folder / "config.json"
    path.write_text(to_json(config))
    return path


def test_a_run_whose_rank_was_killed_ends_with_the_bits_of_one_left_alone(
    ranks, config, folder, tmp_path
):
    path = config_file(tmp_path, dataclasses.replace(config, output=tmp_path / "run"))
    program = ("-m", "train_ranks", path, tmp_path / "killed")
    agent = torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=2", *program)
    output = output_of(agent)
    assert (tmp_path / "killed").exists()
    assert "rank 0 lost another rank" in output
    assert "finished 18\n" in output
    assert (final_bits(tmp_path / "run") == final_bits(folder / "run")) is True
    assert lines(tmp_path / "run") == lines(folder / "run")


def test_two_hosts_train_as_one(ranks, config, folder, tmp_path):
    path = config_file(tmp_path, dataclasses.replace(config, output=tmp_path / "run"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        port = listener.getsockname()[1]
    place = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.2", f"--master_port={port}")
    agents = [torchrun(*place, f"--node_rank={n}", "-m", "train_ranks", path) for n in (0, 1)]
    first, second = map(output_of, agents)
    assert first.count("finished 18\n") == 1
    assert "step 18/18" in first
    assert "finished" not in second
    assert "step 18/18" not in second
    assert (final_bits(tmp_path / "run") == final_bits(folder / "run")) is True


@pytest.fixture
def pipeline(tmp_path):
    """A pipeline of a second, as a file."""
    (tmp_path / "book.txt").write_text(f"The cat sat on the mat.\n\n{SEPARATOR}\n" * 300)
    corpus = TokenizeConfig(
        corpus=str(tmp_path / "book.txt"),
        vocab_size=280,
        data_dir=tmp_path,
        output=tmp_path / "tokens",
        workers=1,
    )
    training = dataclasses.replace(CONFIG, output=tmp_path / "run")
    sample = SampleConfig(prompts=("The cat",), max_new_tokens=6)
    return config_file(tmp_path, PipelineConfig(corpus=corpus, train=training, sample=sample))


def test_a_pipeline_of_ranks_makes_data_trains_and_speaks_once(pipeline):
    command = ("--standalone", "--nproc_per_node=2", "-m", "lib", "pipeline", "--config", pipeline)
    output = output_of(torchrun(*command))
    for text in ("finished at step 18", "| tokenizer ", "step 18/18", "\nThe cat"):
        assert output.count(text) == 1, output
    record = json.loads((pipeline.parent / "run" / "run.json").read_text())
    assert record["world_size"] == 2


def test_an_error_of_all_ranks_is_one_line(tmp_path):
    command = ("--standalone", "--nproc_per_node=2", "-m", "lib", "train", "--data", tmp_path)
    agent = torchrun(*command)
    output, _ = agent.communicate(timeout=120)
    assert agent.returncode != 0
    assert output.count("error: ") == output.count("has no tokenizer.json") == 1
    assert "exitcode: 2" in output.replace(" ", "").replace("exitcode:", "exitcode: ")


@pytest.mark.parametrize(
    ("on_rank", "told"),
    [
        (0, ["exit 2, bogus is no flag\n", "exit 2, "]),
        (1, ["exit 2, ", "exit 2, rank 1:\nbogus is no flag\n"]),
        (2, ["a config, ", "a config, "]),
    ],
)
def test_arguments_that_one_rank_refuses_end_all_and_are_told_there(on_rank, told):
    assert distributed.launch(workers.refuse, 2, on_rank, backend="gloo", timeout=60) == told


def test_ranks_wait_for_a_folder_in_use_longer_than_for_one_another(config, folder):
    output = folder / "in use"
    output.mkdir()
    run = dataclasses.replace(config, output=output, steps=5)
    timeout, begun = 4, folder / "begun"
    with lock_folder(output):
        done = threading.Event()
        results = []

        def start() -> None:
            results.extend(
                distributed.launch(
                    workers.tell_and_train, 2, run, begun, backend="gloo", timeout=timeout
                )
            )
            done.set()

        thread = threading.Thread(target=start)
        thread.start()
        while not (begun.exists() or done.wait(0.05)):
            pass
        # ranks take a moment to reach the lock, and then wait longer than `timeout`
        assert not done.wait(timeout + 3)
    thread.join()
    assert [result.status for result in results] == ["finished", "finished"]


@pytest.mark.parametrize("sharded", ["none", "zero1"])
def test_buckets_left_out_are_of_a_32nd_of_the_gradients(sharded, monkeypatch):
    caps = []
    monkeypatch.setattr(train_optimizer, "world_size", lambda group=None: 2)
    monkeypatch.setattr(communication_costs, "LEAST_CAP_MB", 0.0)
    monkeypatch.setattr(
        train_optimizer, "wrap", lambda *args, bucket_cap_mb, **options: caps.append(bucket_cap_mb)
    )
    monkeypatch.setattr(
        sharded_optimizer,
        "ShardedOptimizer",
        lambda *args, bucket_cap_mb, **options: caps.append(bucket_cap_mb),
    )
    loss = torch.nn.Linear(2**20, 200, bias=False, device="meta")
    loss.model = torch.nn.Linear(2**20, 160, bias=False, device="meta")
    config = TrainConfig(ddp_wrapper="flashddp", sharded_optimizer=sharded)
    train_optimizer.parallelise(loss, config, torch.zeros(()), None)
    # 1,440 MiB with its model, of which 640 are sharded
    assert caps == [45.0] + [20.0] * (sharded == "zero1")
    caps.clear()
    explicit = dataclasses.replace(config, bucket_size_mb=3.0)
    train_optimizer.parallelise(loss, explicit, torch.zeros(()), None)
    assert set(caps) == {3.0}
