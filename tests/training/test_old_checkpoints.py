"""Checkpoints of format 1 are still read, bit for bit."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lib.core.files import sha256_file
from lib.training.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from lib.training.loop import train as train_run
from lib.training.tensor_files import pack
from tests.training.runs import assert_same_run
from tests.training.test_checkpoint import assert_same, make_model, train


def trained():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, 3, seed=1)
    return model, optimizer


def as_format_1(path, **changes) -> None:
    """Write the manifest anew, and `changes` into state.json."""
    state = json.loads((path / "state.json").read_text()) | changes
    (path / "state.json").write_text(json.dumps(state))
    listed = [file for file in path.iterdir() if file.name != "manifest.json"]
    files = {file.name: (file.stat().st_size, sha256_file(file)) for file in listed}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))


def assert_loads(path, model, optimizer) -> None:
    other = make_model(seed=9)
    other_optimizer = torch.optim.AdamW(other.parameters())
    assert load_checkpoint(path.parent, model=other, optimizer=other_optimizer).step == 3
    assert_same(model.state_dict(), other.state_dict())
    assert_same(optimizer.state_dict(), other_optimizer.state_dict())


def test_the_state_of_an_optimizer_that_is_not_sharded(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, step=3, model=model)
    tensors = {}
    state = pack(optimizer.state_dict(), "optimizer", tensors)
    save_file(tensors, path / "optimizer.safetensors")
    parameters = [[name, "AdamW", list(p.shape)] for name, p in model.named_parameters()]
    packed = {"parameters": parameters, "on_cpu": [*tensors], "state": state}
    as_format_1(path, optimizer=packed)
    assert_loads(path, model, optimizer)


def test_the_shards_of_two_ranks(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, step=3, model=model)
    whole = optimizer.state_dict()
    sizes = [param.numel() for param in model.parameters()]
    shapes = [tuple(param.shape) for param in model.parameters()]
    # the cut is inside the third parameter
    for rank, cuts in enumerate(
        ([(0, sizes[0]), (0, sizes[1]), (0, 4)], [(0, 0), (0, 0), (4, sizes[2]), (0, sizes[3])])
    ):
        ranges = {number: cut for number, cut in enumerate(cuts) if cut[0] < cut[1]}
        states = {}
        for number, (start, stop) in ranges.items():
            state = dict(whole["state"][number])
            for name in ("exp_avg", "exp_avg_sq"):
                part = state[name].reshape(-1)[start:stop].clone()
                is_whole = stop - start == sizes[number]
                state[name] = part.view(shapes[number]) if is_whole else part
            states[number] = state
        shard = {"param_groups": whole["param_groups"], "state": states, "ranges": ranges}
        shard |= {"shapes": shapes, "rank": rank, "world_size": 2, "save": "0123"}
        torch.save(shard, path / f"shard-{rank:05d}-of-00002.pt")
    as_format_1(path)
    assert_loads(path, model, optimizer)


def test_progress_that_held_more_is_resumed_exactly(stopped, straight):
    path = newest_checkpoint(stopped.output / "checkpoints")
    extra = load_checkpoint(path).extra
    as_format_1(path, extra=extra | {"progress": extra["progress"] | {"metrics_position": 7}})
    assert train_run(stopped).status == "finished"
    assert_same_run(stopped.output, straight)


class Payload(nn.Module):
    """What only a pickle that is run can make."""


def test_a_pickle_that_would_run_is_refused(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, step=3, model=model)
    torch.save({"state": Payload()}, path / "shard-00000-of-00001.pt")
    as_format_1(path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load_checkpoint(path, model=model, optimizer=optimizer)
