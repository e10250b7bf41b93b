"""Checkpoints come back exactly as they were, or are refused by name."""

import copy
import errno
import functools
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lib.training.checkpoint
from lib.training.checkpoint import (
    load_checkpoint,
    newest_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from tests.training.runs import ROOT, flip, truncate

FILES = [
    "manifest.json",
    "model.safetensors",
    "shard-00000-of-00001.safetensors",
    "state.json",
    "tensors.safetensors",
]
OPTIMIZERS = {
    "AdamW with a tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW in groups": lambda p: torch.optim.AdamW(
        [{"params": [each], "weight_decay": each.ndim / 8} for each in p], betas=(0.25, 0.5)
    ),
    "LBFGS": functools.partial(torch.optim.LBFGS, max_iter=3),
}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(7, 3, generator=generator).to(next(model.parameters()).dtype)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def assert_same(a, b) -> None:
    """Same types, structure and bits."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        # as bytes, since NaN differs from itself
        assert torch.equal(*(t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)))
    else:
        assert a == b


def save_steps(folder: Path, *steps: int, **arguments) -> list[Path]:
    """One checkpoint for each step; all weights are the step, so that they can be told apart."""
    model = make_model()
    paths = []
    for step in steps:
        for parameter in model.parameters():
            nn.init.constant_(parameter, step)
        paths.append(save_checkpoint(folder, step=step, model=model, **arguments))
    return paths


def visible(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_bit_for_bit(tmp_path, name):
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3, seed=1)
    save_checkpoint(tmp_path, step=3, model=model, optimizer=optimizer)

    resumed = make_model(seed=9)
    resumed_optimizer = OPTIMIZERS[name](resumed.parameters())
    # the saved settings hold, not the optimizer's own
    for group in resumed_optimizer.param_groups:
        group["lr"] = 0.5
    assert load_checkpoint(tmp_path, model=resumed, optimizer=resumed_optimizer).step == 3
    assert_same(optimizer.state_dict(), resumed_optimizer.state_dict())
    for each in ((model, optimizer), (resumed, resumed_optimizer)):
        train(*each, 3, seed=2)
    assert_same(model.state_dict(), resumed.state_dict())
    assert_same(optimizer.state_dict(), resumed_optimizer.state_dict())


def test_float32_state_of_bfloat16_parameters_is_not_rounded(tmp_path):
    model = make_model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"master": torch.rand(parameter.shape)}
    save_checkpoint(tmp_path, step=0, model=model, optimizer=optimizer)
    resumed = torch.optim.SGD(model.parameters(), lr=0.1)
    load_checkpoint(tmp_path, optimizer=resumed)
    assert_same(optimizer.state_dict(), resumed.state_dict())


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    def make(is_tied: bool) -> nn.Module:
        model = nn.ModuleDict({"first": nn.Linear(4, 4), "last": nn.Linear(4, 4)})
        if is_tied:
            model["last"].weight = model["first"].weight
        # a view that is not contiguous
        model.register_buffer("table", torch.randn(3, 5).T)
        return model

    model, tied, untied = make(True), make(True), make(False)
    path = save_checkpoint(tmp_path, step=0, model=model)
    stored = load_file(path / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == 4 * 4 + 2 * 4 + 15
    for other in (tied, untied):
        load_checkpoint(path, model=other)
        assert_same(model.state_dict(), other.state_dict())
    assert tied["last"].weight is tied["first"].weight
    # two weights are refused for a tied pair unless they are equal
    nn.init.zeros_(untied["last"].weight)
    save_checkpoint(tmp_path, step=1, model=untied)
    with pytest.raises(ValueError, match=r"last.weight and first.weight are tied"):
        load_checkpoint(tmp_path, model=tied)


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "bfloat16", "float16", "int64", "uint8", "bool"],
)
def test_every_bit_of_a_tensor_comes_back(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (6, 8), dtype=torch.uint8, generator=generator)
    # random bits: among the floats are NaNs, infinities and subnormal numbers
    full = raw % 2 == 0 if dtype == "bool" else raw.view(getattr(torch, dtype))
    tensors = {
        "full": full,
        "transposed": full.T,
        "every second": full[::2],
        "middle": full[1:3],
        "scalar": full[0, 0],
        "empty": full[:0],
        "also empty": full[:0],
        "expanded": full[:1].expand(3, -1),
    }
    save_checkpoint(tmp_path, step=0, model=nn.Identity(), tensors=tensors)
    loaded = load_checkpoint(tmp_path)
    # what was loaded does not depend on the file any more
    stored = loaded.path / "tensors.safetensors"
    stored.write_bytes(bytes(stored.stat().st_size))
    assert_same(tensors, loaded.tensors)


def test_extra_and_step_come_back(tmp_path):
    extra = {"position": 2**60, "loss": 0.1 + 0.2, "best": float("inf"), "a": [None, True, "é"]}
    path = save_checkpoint(tmp_path / "new" / "folder", step=123, model=nn.Identity(), extra=extra)
    loaded = load_checkpoint(path)
    assert path == tmp_path / "new" / "folder" / "step-00000123"
    assert (loaded.step, loaded.extra, loaded.tensors, loaded.path) == (123, extra, {}, path)
    path.rename(path.with_name("best"))
    assert load_checkpoint(path.with_name("best")).step == 123


def test_a_compiled_model_is_saved_and_loaded_as_the_model_itself(tmp_path):
    model, other = make_model(), make_model(seed=1)
    optimizer = sgd(*model.parameters())
    path = save_checkpoint(tmp_path, step=1, model=torch.compile(model), optimizer=optimizer)
    load_checkpoint(path, model=other, optimizer=sgd(*other.parameters()))
    assert_same(model.state_dict(), other.state_dict())
    load_checkpoint(path, model=torch.compile(make_model(seed=1)))


def test_who_may_read_one_file_of_a_checkpoint_may_read_all(tmp_path):
    (path,) = save_steps(tmp_path, 1, optimizer=sgd(nn.Parameter(torch.ones(1))))
    assert visible(path) == FILES
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, flip) for file in FILES),
        ("model.safetensors", lambda path: path.write_bytes(path.read_bytes() + b"x")),
        ("model.safetensors", Path.unlink),
        ("state.json", truncate),
        ("manifest.json", truncate),
        ("manifest.json", Path.unlink),
        ("manifest.json", lambda path: path.write_text('{"format": 1, "files": {}}')),
        ("manifest.json", lambda path: leave_out(path, "model.safetensors")),
        ("manifest.json", lambda path: (path.parent / "shard-00001-of-00002.safetensors").touch()),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_taken(
    tmp_path, caplog, file, damage
):
    trained = make_model()
    optimizer = torch.optim.AdamW(trained.parameters())
    train(trained, optimizer, 1, seed=0)
    old, new, _ = save_steps(tmp_path, 1, 2, 2, optimizer=optimizer, tensors=rng_state("cpu"))
    assert visible(tmp_path) == [".lock", old.name, new.name]
    damage(new / file)
    with pytest.raises(ValueError, match=f"{new} is damaged"):
        load_checkpoint(new)
    model = make_model()
    assert load_checkpoint(tmp_path, model=model).path == old
    assert model[0].weight.unique().item() == 1
    (warning,) = caplog.messages
    assert str(new) in warning
    # what a flipped byte of the manifest says of another file is believed
    assert file in warning or (file, damage) == ("manifest.json", flip)


def test_a_shard_that_is_missing_is_named(tmp_path):
    model = make_model()
    optimizer = sgd(*model.parameters())
    path = save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
    shard = path / "shard-00000-of-00001.safetensors"
    shard.rename(path / "shard-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"needs shard-00000-of-00001.* got shard-00001-of-00002"):
        load_checkpoint(path, optimizer=optimizer, verify=False)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_checkpoint_that_is_deleted_before_or_while_it_is_read_gives_the_next(
    tmp_path, monkeypatch, caplog, is_read
):
    save_steps(tmp_path, 1, 2)
    name = "read_tensors" if is_read else "list_checkpoints"
    original, is_training = getattr(lib.training.checkpoint, name), True

    def beside_a_training(folder):
        # deletes what was listed, or is read, when a newer one is there
        nonlocal is_training
        found = [] if is_read else original(folder)
        if is_training:
            is_training = False
            save_steps(tmp_path, 3, keep_last=1)
        return original(folder) if is_read else found

    monkeypatch.setattr(lib.training.checkpoint, name, beside_a_training)
    assert load_checkpoint(tmp_path, model=make_model()).step == 3
    assert not caplog.messages


def test_where_there_are_none_the_newest_is_none(tmp_path):
    (tmp_path / "step-by-step").mkdir()
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None
    for path in (tmp_path, tmp_path / "absent", tmp_path / "step-00000007"):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint .*{path}"):
            load_checkpoint(path)
    model = make_model()
    path = save_checkpoint(tmp_path, step=1, model=model)
    with pytest.raises(ValueError, match=f"{path} holds no optimizer state"):
        load_checkpoint(path, model=model, optimizer=sgd(*model.parameters()))


def test_the_newest_is_that_of_the_highest_step(tmp_path):
    save_steps(tmp_path, 99_999_999, 7, 100_000_000, 8)
    assert newest_checkpoint(tmp_path).name == "step-100000000"


def test_a_checkpoint_moved_aside_by_a_killed_save_is_still_found(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    shutil.copytree(path, tmp_path / ".step-00000000.deleted")
    shutil.copytree(path, tmp_path / ".step-00000009.partial")
    path.rename(tmp_path / ".step-00000001.replaced")
    assert load_checkpoint(tmp_path).step == 1
    save_steps(tmp_path, 2)
    assert visible(tmp_path) == [".lock", "step-00000001", "step-00000002"]
    assert load_checkpoint(path).step == 1


def test_another_process_that_saves_is_waited_for(tmp_path, processes):
    with lib.training.checkpoint.files.lock_folder(tmp_path):
        partial = tmp_path / ".step-00000007.partial"
        partial.mkdir()
        process = processes.Process(target=save_steps, args=(tmp_path, 1))
        process.start()
        process.join(0.3)
        assert process.is_alive()
        assert partial.exists()
    process.join(60)
    assert process.exitcode == 0
    assert visible(tmp_path) == [".lock", "step-00000001"]


# functions, and how often each is called to save one checkpoint
@pytest.mark.parametrize(
    ("function", "count"),
    [("write_tensors", 3), ("os.replace", 7), ("files.sync", 5), ("to_json", 1)],
)
def test_an_error_at_any_point_keeps_the_earlier_checkpoints(
    tmp_path, monkeypatch, function, count
):
    save_steps(tmp_path, 1, 2)
    owner, _, name = ("lib.training.checkpoint." + function).rpartition(".")
    owner = functools.reduce(getattr, owner.split(".")[1:], lib)
    original = getattr(owner, name)

    def save(failing: int) -> None:
        calls = itertools.count(1)

        def fail(*arguments, **keywords):
            if next(calls) == failing:
                raise OSError(errno.EIO, "Input/output error")
            return original(*arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            optimizer = sgd(nn.Parameter(torch.ones(1)))
            extra = {"new": 1}
            save_checkpoint(tmp_path, step=2, model=nn.Identity(), optimizer=optimizer, extra=extra)

    for failing in range(1, count + 1):
        with pytest.raises(OSError, match="Input/output error"):
            save(failing)
        assert visible(tmp_path) == [".lock", "step-00000001", "step-00000002"]
        assert [load_checkpoint(path).extra for path in sorted(tmp_path.glob("step-*"))] == [{}, {}]
    save(count + 1)
    assert load_checkpoint(tmp_path / "step-00000002").extra == {"new": 1}


def test_keep_last_deletes_oldest_first_and_hides_before_it_deletes(tmp_path, monkeypatch):
    save_steps(tmp_path, 1, 2, 3)
    renamed, replace = [], os.replace

    def note(source, target):
        renamed.append((Path(source).name, Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "replace", note)
    monkeypatch.setattr(lib.training.checkpoint.files, "sync_folder", renamed.append)
    save_steps(tmp_path, 4, keep_last=2)
    # only once the name of the new one is on the disk
    assert renamed[-4:] == [
        (".step-00000004.partial", "step-00000004"),
        tmp_path,
        *((f"step-0000000{step}", f".step-0000000{step}.deleted") for step in (1, 2)),
    ]
    assert visible(tmp_path) == [".lock", "step-00000003", "step-00000004"]
    # the one just written and later ones stay
    save_steps(tmp_path, 2, keep_last=1)
    assert visible(tmp_path) == [".lock", "step-00000002", "step-00000003", "step-00000004"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"keep_last": 0}, "keep_last must be at least 1, got 0"),
        ({"extra": {"path": ROOT}}, "extra and .* must be JSON values: .*Path"),
        ({"tensors": {"a": torch.ones(1, dtype=torch.complex128)}}, "tensors: a must .*complex128"),
        ({"tensors": {"a": 3}}, "tensors: a must be a dense tensor .*, got int"),
        ({"model": {"a": torch.ones(2).to_sparse()}}, "model: a must be a dense .*_coo"),
        (
            {"optimizer": torch.optim.SGD([{"params": [torch.ones(1)], "odd": {1}}])},
            "settings must",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, **{"step": 1, "model": nn.Identity()} | arguments)
    assert visible(tmp_path) in ([], [".lock"])


def leave_out(manifest: Path, name: str) -> None:
    """Take a file and its entry in the manifest away."""
    content = json.loads(manifest.read_text())
    del content["files"][name]
    manifest.write_text(json.dumps(content))
    (manifest.parent / name).unlink()


def sgd(*parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# A model, or an optimizer of the right one, that does not fit.
MISFITS = {
    "2.weight is torch.float32 (2, 5), not torch.float32 (4, 5)": lambda model: nn.Sequential(
        *model[:2], nn.Linear(5, 4)
    ),
    "3.weight is missing": lambda model: nn.Sequential(*model, nn.Linear(2, 2)),
    "2.weight is not in the model": lambda model: model[:2],
    "0.weight is torch.float32 (5, 3), not torch.bfloat16": lambda model: model.bfloat16(),
    "instead of ['2.bias', 'SGD', [2]]": lambda model: sgd(*reversed([*model.parameters()])),
    "['0.bias', 'SGD', [5]] instead": lambda model: sgd(
        model[0].weight, model[2].bias, model[2].weight, model[0].bias
    ),
    "instead of None": lambda model: sgd(*model[0].parameters()),
    "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
    "must have groups of [1, 1, 1, 1] parameters, got [4]": lambda model: sgd(
        *({"params": p} for p in model.parameters())
    ),
}


@pytest.mark.parametrize("message", MISFITS)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(tmp_path, message):
    saved = make_model()
    path = save_checkpoint(tmp_path, step=1, model=saved, optimizer=sgd(*saved.parameters()))
    model = make_model(seed=1)
    other = MISFITS[message](model)
    if isinstance(other, nn.Module):
        model, optimizer = other, sgd(*other.parameters())
    else:
        optimizer = other
    before = [copy.deepcopy(each.state_dict()) for each in (model, optimizer)]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_checkpoint(path, model=model, optimizer=optimizer)
    assert str(path) in str(caught.value)
    assert_same(before, [each.state_dict() for each in (model, optimizer)])


def test_a_model_without_memory_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, step=1, model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="weight is on device meta, without memory"):
        load_checkpoint(path, model=nn.Linear(1, 1, device="meta"))


def test_random_numbers_continue(tmp_path):
    torch.manual_seed(5)
    torch.rand(3)
    save_checkpoint(tmp_path, step=0, model=nn.Identity(), tensors=rng_state("cpu"))
    expected = torch.rand(4), torch.randn(4)
    torch.manual_seed(6)
    set_rng_state(load_checkpoint(tmp_path).tensors, "cpu")
    assert_same(expected, (torch.rand(4), torch.randn(4)))
    with pytest.raises(ValueError, match=r"rng_state\('cuda'\), but lacks .*rng_cuda"):
        set_rng_state(rng_state("cpu"), "cuda")


@pytest.mark.gpu
def test_training_on_a_gpu_continues_bit_for_bit(tmp_path):
    def make():
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2)).cuda()
        lr = torch.tensor(0.01, device="cuda")
        return model, torch.optim.AdamW(model.parameters(), lr=lr, capturable=True)

    def train_on_gpu(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(7, 3, device="cuda")).square().mean().backward()
            optimizer.step()

    model, optimizer = make()
    train_on_gpu(model, optimizer)
    save_checkpoint(tmp_path, step=3, model=model, optimizer=optimizer, tensors=rng_state("cuda"))
    resumed, resumed_optimizer = make()
    loaded = load_checkpoint(tmp_path, model=resumed, optimizer=resumed_optimizer)
    assert_same(optimizer.state_dict(), resumed_optimizer.state_dict())
    train_on_gpu(model, optimizer)
    set_rng_state(loaded.tensors, "cuda")
    train_on_gpu(resumed, resumed_optimizer)
    assert_same(model.state_dict(), resumed.state_dict())


@pytest.mark.parametrize("state", ["[]", "{}"])
def test_a_state_that_is_no_checkpoints_is_named(tmp_path, state):
    save_checkpoint(tmp_path, step=1, model=make_model())
    path = newest_checkpoint(tmp_path)
    (path / "state.json").write_text(state)
    with pytest.raises(ValueError, match=r"state\.json: not the state of a checkpoint"):
        load_checkpoint(path, model=make_model(), verify=False)
