"""Training with a sharded optimizer, or a sharded model: as unsharded, saved and gone on with."""

import contextlib
import dataclasses
import shutil
import sys
import types

import pytest
import torch
import torch.distributed as dist
import train_ranks
import train_sharded_cases as workers
from safetensors.torch import load_file
from test_train_ranks import CONFIG, assert_close_run, lines, one_thread  # noqa: F401

from lib import distributed
from lib.checkpoint import find_checkpoint, newest_checkpoint, save_checkpoint
from lib.config_training import TrainConfig
from lib.distributed import WorkerError
from lib.generate import load_model
from lib.optimizer import AdamW
from lib.sharded_optimizer import ShardedOptimizer
from lib.sharded_optimizer_state import read_shards
from lib.train_optimizer import check_wrapper

STEPS = 12

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def config(folder):
    from test_train import tokenized

    fields = {"steps": STEPS, "log_interval": 2, "checkpointing_interval": 4, "eval_interval": 6}
    data = tokenized(folder / "data")
    return dataclasses.replace(CONFIG, data=data, batch_size=4, **fields)


@pytest.fixture(scope="module")
def one_process(config, folder):
    """The run of one process with the whole batch; its folder."""
    output = folder / "one"
    train_ranks.train(dataclasses.replace(config, output=output))
    return output


@pytest.fixture(scope="module")
def ranks(config, folder, one_process):
    """What two ranks found and left in `folder`, after four ranks and one began some runs."""
    launch = {"backend": "gloo", "timeout": 60}
    distributed.launch(workers.four_ranks, 4, config, folder, **launch)
    for name in workers.FEW:
        half = dataclasses.replace(config, output=folder / f"one, {name}")
        assert workers.stop_before(5, half) == 5
    return distributed.launch(workers.two_ranks, 2, config, folder, **launch)


@pytest.fixture(scope="module")
def three_ranks():
    return distributed.launch(workers.three_ranks, 3, backend="gloo", timeout=60)


def told(result):
    """The result, unless it is a traceback."""
    if isinstance(result, str):
        if "ddp_wrapper is 'fsdp2', " in result:
            pytest.skip(result.splitlines()[-1])
        pytest.fail(result)
    return result


# Steps


def assert_learned(found: dict, num_ranks: int) -> None:
    """What ranks found, in passes of their part, is what one process finds with all windows."""
    accumulated = workers.PASSES
    batch = num_ranks * accumulated * train_ranks.BATCH
    config = dataclasses.replace(train_ranks.STEP, batch_size=batch)
    parts = lambda step: [  # noqa: E731
        train_ranks.part(step, rank, accumulated) for rank in range(num_ranks)
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(train_ranks, "STEPS", 3)
        rows, weights = train_ranks.steps_with(config, lambda step: torch.cat(parts(step)))
    for one, other in zip(found["rows"], rows, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for one, other in zip(found["weights"], weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", workers.WAYS)
def test_two_ranks_learn_what_one_process_learns(ranks, name):
    for found in ranks:
        assert_learned(told(found["ways"][name]), 2)


@pytest.mark.parametrize("name", workers.FEW)
def test_three_ranks_learn_what_one_process_learns(three_ranks, name):
    for found in three_ranks:
        assert_learned(told(found[name]), 3)


@pytest.mark.parametrize("name", workers.WAYS)
def test_ranks_stay_alike_to_the_bit_and_report_alike(ranks, name):
    first, second = (found["ways"][name] for found in ranks)
    assert first["rows"] == second["rows"]
    assert all(map(torch.equal, first["weights"], second["weights"]))


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (setting, name)
        for setting in workers.SETTINGS
        for name in workers.FEW
        if setting != "short weights" or name not in ("torch_zero", "fsdp2")
    ],
)
def test_settings_give_what_they_give_without_sharding(ranks, setting, name):
    for found in ranks:
        expected, result = (told(found["settings"][setting, n]) for n in ("none", name))
        # one rounding in the short type moves a weight by the learning rate at most
        for one, other in zip(result["rows"], expected["rows"], strict=True):
            assert one == pytest.approx(other, rel=1e-3)
        for one, other in zip(result["weights"], expected["weights"], strict=True):
            assert (one - other).abs().mean() < 1e-4


@pytest.mark.parametrize("name", workers.WAYS)
def test_ranks_divide_the_state_among_themselves(ranks, name):
    states = [found["ways"][name]["state"] for found in ranks]
    model = train_ranks.TransformerLM(train_ranks.MODEL)
    sizes = [param.numel() for param in model.parameters()]
    assert sum(states) == 2 * sum(sizes)
    # whole parameters balance as far as the largest one lets them
    limit = 0.02 if name in ("zero1", "fsdp2") else max(sizes) / sum(sizes)
    assert abs(states[0] - states[1]) / sum(states) < limit


@pytest.mark.parametrize("name", workers.FEW)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks, name):
    for found in ranks:
        (row,), is_same = told(found["not finite"][name])
        assert row.is_skipped
        assert is_same


def test_zero1_gathers_under_the_next_forward_pass(ranks):
    for found in ranks:
        eager, recorded = told(found["gathers"])
        first, second, end, later, latest, last, read = eager["counts"]
        # nothing is under way in the first step; each layer waits for its own
        assert (first, second) == (0, 0)
        assert end > later > latest > 0
        assert (last, read) == (end, 0)
        # what a CUDA graph holds begins and ends in it
        first, second, end, later, latest, last, read = recorded["counts"]
        assert later > latest > 0
        assert (first, second, end, last, read) == (0, 0, 0, 0, 0)
        assert eager["rows"] == recorded["rows"]
        assert all(map(torch.equal, eager["weights"], recorded["weights"]))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_steps_are_those_without_sharding():
    for found in distributed.launch(workers.compiled, 2, backend="gloo", timeout=600):
        expected = told(found.pop("none"))
        for result in map(told, found.values()):
            for one, other in zip(result["rows"], expected["rows"], strict=True):
                assert one == pytest.approx(other, rel=1e-4)


# Checkpoints


def final_state(path) -> list:
    """Weights and the optimizer's state in a run's last checkpoint."""
    checkpoint = path / "checkpoints" / f"step-{STEPS:08d}"
    weights = load_file(checkpoint / "model.safetensors")
    states = [shard["state"] for shard in read_shards(checkpoint)]
    tensors = [value for s in states for state in s.values() for value in state.values()]
    return [*weights.values(), *tensors]


@pytest.mark.parametrize("name", workers.FEW)
def test_a_stopped_run_goes_on_exactly(ranks, folder, one_process, name):
    for found in ranks:
        assert told(found["exact"][name]) == [STEPS, 6, STEPS]
    assert_close_run(folder / name, one_process)
    one, other = (final_state(path) for path in (folder / name, folder / f"{name} stopped"))
    assert len(one) > 20
    assert all(map(torch.equal, one, other))
    assert lines(folder / name) == lines(folder / f"{name} stopped")


def test_each_way_goes_on_with_the_run_of_another(ranks, folder, one_process):
    for found in ranks:
        assert told(found["chain"]) == [2, 4, 6, 8, 10, 12]
    assert_close_run(folder / "chain", one_process)


@pytest.mark.parametrize("name", ["from zero1", "from fsdp2"])
def test_a_run_of_four_ranks_goes_on_with_two_and_with_one(
    ranks, config, folder, one_process, name
):
    assert [told(found[name]) for found in ranks] == [8, 8]
    run = dataclasses.replace(config, output=folder / name)
    assert train_ranks.train(run).status == "finished"
    assert_close_run(folder / name, one_process)


@pytest.mark.parametrize("name", workers.FEW)
def test_ranks_go_on_with_the_run_of_one_process(ranks, folder, one_process, name):
    assert [told(found[f"one, {name}"]) for found in ranks] == [STEPS] * 2
    assert_close_run(folder / f"one, {name}", one_process)


@pytest.mark.parametrize("name", workers.FEW)
def test_a_model_is_loaded_from_a_sharded_run(ranks, folder, name):
    told(ranks[0]["exact"][name])
    model, _, _ = load_model(folder / name, device="cpu")
    weights = load_file(find_checkpoint(folder / name / "checkpoints") / "model.safetensors")
    assert all(torch.equal(param, weights[n]) for n, param in model.state_dict().items())


def test_a_damaged_shard_makes_the_checkpoint_before_the_newest(ranks, folder, tmp_path):
    shutil.copytree(folder / "zero1" / "checkpoints", tmp_path / "run")
    newest = newest_checkpoint(tmp_path / "run")
    assert newest.name == "step-00000012"
    (newest / "shard-00001-of-00002.pt").unlink()
    older = newest_checkpoint(tmp_path / "run")
    assert older.name == "step-00000008"
    shard = older / "shard-00000-of-00002.pt"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole"):
        newest_checkpoint(tmp_path / "run")


def test_a_rank_killed_in_saving_leaves_the_checkpoint_before(config, folder, one_process):
    run = dataclasses.replace(config, output=folder / "killed", batch_size=2, **workers.ALONE)
    with pytest.raises(WorkerError):
        distributed.launch(workers.dies_in_saving, 2, run, backend="gloo", timeout=60)
    assert [p.name for p in (run.output / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert any((run.output / ".shards").iterdir())
    again = dataclasses.replace(config, output=run.output)
    assert train_ranks.train(again).status == "finished"
    assert_close_run(run.output, one_process)
    assert not (run.output / ".shards").exists()


def test_a_sharded_optimizer_is_not_saved_as_a_whole(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    optimizer.load_shards = None
    with pytest.raises(ValueError, match="optimizer is sharded; right is: shards, a folder"):
        save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="which holds none; right is: what save_shard filled"):
        save_checkpoint(tmp_path, step=1, model=model, shards=tmp_path)


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ddp_wrapper": "none"}, "right is: flashddp, another one, or sharded_optimizer zero1"),
        (
            {"ddp_wrapper": "none", "sharded_optimizer": "torch_zero"},
            "ddp_wrapper is 'none', but there are 2 ranks",
        ),
        (
            {"ddp_wrapper": "none", **workers.PARAMETERS},
            "zero1_strategy is 'parameters' and ddp_wrapper 'none'.* right is: flat, or a ddp_",
        ),
        (
            {"ddp_wrapper": "fsdp2", "cuda_graph": True},
            "ddp_wrapper is 'fsdp2' and cuda_graph is True.* right is: flashddp, or cuda_graph F",
        ),
        (
            {"ddp_wrapper": "fsdp2", "low_precision_weights": True},
            "ddp_wrapper is 'fsdp2' and low_precision_weights is True",
        ),
        (
            {"sharded_optimizer": "torch_zero", "cuda_graph": True},
            "sharded_optimizer is 'torch_zero' and cuda_graph is True.* right is: zero1, or",
        ),
        (
            {"sharded_optimizer": "torch_zero", "low_precision_weights": True},
            "sharded_optimizer is 'torch_zero' and low_precision_weights is True",
        ),
    ],
)
def test_what_does_not_go_together_on_ranks_is_refused(changes, message):
    config = TrainConfig(**changes)
    check_wrapper(config, 1)
    with pytest.raises(ValueError, match=message):
        check_wrapper(config, 2)


def test_an_old_pytorch_has_no_fsdp2(monkeypatch):
    empty = types.ModuleType("torch.distributed.fsdp")
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", empty)
    with pytest.raises(ValueError, match=r"fsdp2', which PyTorch .* right is: PyTorch 2\.6"):
        check_wrapper(TrainConfig(ddp_wrapper="fsdp2"), 2)


def test_a_backend_that_adds_up_where_it_should_average_is_refused(monkeypatch):
    from lib import train_fsdp

    def add_up(mean, ones, **options):
        mean.copy_(ones.sum())

    monkeypatch.setattr(train_fsdp, "world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, add_up, raising=False)
    with pytest.raises(ValueError, match=r"gloo of .* cannot average gradients .* of ones is 2"):
        train_fsdp._check_average(None)


def test_the_strategy_of_fsdp2_wants_sharded_parameters():
    params = torch.nn.Linear(2, 2).parameters()
    with pytest.raises(ValueError, match="is not sharded; right is: fully_shard before"):
        ShardedOptimizer(params, AdamW, strategy="fsdp2")
