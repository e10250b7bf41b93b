"""Checkpoints come back exactly as they were, or are refused by name."""

import contextlib
import errno
import functools
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_server import LOADED
from safetensors.torch import load_file
from torch import nn

import lib.checkpoint
from lib.checkpoint import (
    load_checkpoint,
    newest_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
)

FILES = [
    "manifest.json",
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "tensors.safetensors",
]
OPTIMIZERS = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95)),
    "AdamW with a tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "SGD without state": functools.partial(torch.optim.SGD, lr=0.01),
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": functools.partial(torch.optim.LBFGS, max_iter=3),
}


class Tied(nn.Module):
    """Embedding and output share one weight; a buffer is a transposed, so not contiguous, view."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.hidden = nn.Linear(4, 4)
        self.output = nn.Linear(4, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("table", torch.randn(3, 5).T)

    def forward(self, ids):
        return self.output(self.hidden(self.embedding(ids)))


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
        assert (
            a.detach().cpu().numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
            if (a.dtype != torch.bfloat16)
            else torch.equal(a.view(torch.int16), b.view(torch.int16))
        )
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


def test_groups_with_their_own_settings_come_back(tmp_path):
    model = make_model()

    def make(decay):
        groups = [
            {"params": [model[0].weight, model[2].weight], "weight_decay": decay},
            {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": decay},
        ]
        return torch.optim.AdamW(groups, betas=(decay, 0.5))

    saved, loaded = make(0.25), make(0.5)
    save_checkpoint(tmp_path, step=0, model=model, optimizer=saved)
    load_checkpoint(tmp_path, model=model, optimizer=loaded)
    assert loaded.param_groups[0]["betas"] == (0.25, 0.5)
    assert_same(saved.state_dict(), loaded.state_dict())


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model = Tied()
    path = save_checkpoint(tmp_path, step=0, model=model)
    stored = load_file(path / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == 11 * 4 + 4 * 4 + 4 + 15
    resumed = Tied()
    load_checkpoint(path, model=resumed)
    assert resumed.output.weight is resumed.embedding.weight
    assert_same(model.state_dict(), resumed.state_dict())


def test_tied_weights_load_into_a_model_that_ties_nothing(tmp_path):
    model, untied = Tied(), Tied()
    untied.output.weight = nn.Parameter(torch.zeros(11, 4))
    save_checkpoint(tmp_path, step=0, model=model)
    load_checkpoint(tmp_path, model=untied)
    assert_same(model.state_dict(), untied.state_dict())


def test_different_weights_for_a_tied_pair_are_refused(tmp_path):
    untied, tied = Tied(), Tied()
    untied.output.weight = nn.Parameter(torch.zeros(11, 4))
    save_checkpoint(tmp_path, step=0, model=untied)
    with pytest.raises(ValueError, match=r"output.weight and embedding.weight are tied"):
        load_checkpoint(tmp_path, model=tied)


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool"],
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
    loaded = load_checkpoint(tmp_path).tensors
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (tensor, loaded[name])]
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(*bits)


def test_bfloat16_models_come_back(tmp_path):
    model, resumed = make_model().bfloat16(), make_model(seed=1).bfloat16()
    save_checkpoint(tmp_path, step=0, model=model)
    load_checkpoint(tmp_path, model=resumed)
    assert_same(model.state_dict(), resumed.state_dict())


def test_extra_and_step_come_back(tmp_path):
    extra = {"position": 2**60, "loss": 0.1 + 0.2, "best": float("inf"), "a": [None, True, "é"]}
    path = save_checkpoint(tmp_path / "new" / "folder", step=123, model=nn.Identity(), extra=extra)
    loaded = load_checkpoint(path)
    assert path == tmp_path / "new" / "folder" / "step-00000123"
    assert (loaded.step, loaded.extra, loaded.tensors, loaded.path) == (123, extra, {}, path)


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    (path,) = save_steps(tmp_path, 1, tensors={"a": torch.arange(9)})
    loaded = load_checkpoint(path)
    size = (path / "tensors.safetensors").stat().st_size
    (path / "tensors.safetensors").write_bytes(bytes(size))
    assert torch.equal(loaded.tensors["a"], torch.arange(9))


def test_the_manifest_tells_size_and_hash_of_every_other_file(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert visible(path) == FILES
    assert sorted(listed) == FILES[1:]
    for name, (size, sha256) in listed.items():
        told = subprocess.run(["sha256sum", path / name], capture_output=True, text=True).stdout
        assert (size, sha256) == ((path / name).stat().st_size, told.split()[0])


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lengthened(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncated, emptied, flipped, lengthened, missing])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_taken(
    tmp_path, caplog, file, damage
):
    trained = make_model()
    optimizer = torch.optim.AdamW(trained.parameters())
    train(trained, optimizer, 1, seed=0)
    old, new = save_steps(tmp_path, 1, 2, optimizer=optimizer, tensors=rng_state("cpu"))
    damage(new / file)
    with pytest.raises(ValueError, match=f"{new} is damaged"):
        load_checkpoint(new)
    model = make_model()
    assert load_checkpoint(tmp_path, model=model).path == old
    assert model[0].weight.unique().item() == 1
    (warning,) = caplog.messages
    assert str(new) in warning
    assert damage not in (truncated, lengthened) or re.search(r"bytes and not|manifest", warning)
    # what a flipped byte of the manifest says of another file is believed
    assert file in warning or (file, damage) == ("manifest.json", flipped)


def test_a_manifest_that_lists_nothing_is_refused(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    (path / "manifest.json").write_text('{"format": 1, "files": {}}')
    with pytest.raises(ValueError, match=r"manifest.json does not list state.json"):
        load_checkpoint(path)


@pytest.mark.parametrize("at", range(0, 400, 7))
def test_no_flipped_bit_in_the_manifest_is_an_unnamed_error(tmp_path, at):
    (path,) = save_steps(tmp_path, 1)
    content = bytearray((path / "manifest.json").read_bytes())
    content[at] ^= 1 << at % 8
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        load_checkpoint(path)


def test_when_all_are_damaged_the_error_names_them(tmp_path):
    for path in save_steps(tmp_path, 1, 2):
        truncated(path / "model.safetensors")
    with pytest.raises(ValueError, match=r"is whole: step-00000002, step-00000001"):
        newest_checkpoint(tmp_path)


def test_where_there_are_none_the_newest_is_none(tmp_path):
    (tmp_path / "step-by-step").mkdir()
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None
    for path in (tmp_path, tmp_path / "absent", tmp_path / "step-00000007"):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint .*{path}"):
            load_checkpoint(path)


def test_the_newest_is_that_of_the_highest_step(tmp_path):
    save_steps(tmp_path, 99_999_999, 7, 100_000_000, 8)
    assert newest_checkpoint(tmp_path).name == "step-100000000"


def test_a_renamed_checkpoint_loads(tmp_path):
    (path,) = save_steps(tmp_path, 5)
    path.rename(tmp_path / "best")
    assert load_checkpoint(tmp_path / "best").step == 5


def test_a_step_saved_again_is_replaced(tmp_path):
    save_checkpoint(tmp_path, step=1, model=make_model(), extra={"run": "first"})
    save_checkpoint(tmp_path, step=1, model=make_model(), extra={"run": "second"})
    assert load_checkpoint(tmp_path).extra == {"run": "second"}
    assert visible(tmp_path) == [".lock", "step-00000001"]


def test_a_checkpoint_moved_aside_by_a_killed_save_is_still_found(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    path.rename(tmp_path / ".step-00000001.replaced")
    (tmp_path / ".step-00000001.partial").mkdir()
    assert load_checkpoint(tmp_path).step == 1
    save_steps(tmp_path, 2)
    assert visible(tmp_path) == [".lock", "step-00000001", "step-00000002"]
    assert load_checkpoint(path).step == 1


def test_what_killed_saves_left_goes_at_the_next(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    for name in (".step-00000001.replaced", ".step-00000000.deleted", ".step-00000009.partial"):
        shutil.copytree(path, tmp_path / name)
    save_steps(tmp_path, 2)
    assert visible(tmp_path) == [".lock", "step-00000001", "step-00000002"]


@pytest.fixture(scope="module")
def processes():
    """Starts processes fast, from one that has torch loaded."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs a fork server")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def test_another_process_that_saves_is_waited_for(tmp_path, processes):
    with lib.checkpoint.files.lock_folder(tmp_path):
        partial = tmp_path / ".step-00000007.partial"
        partial.mkdir()
        process = processes.Process(target=save_steps, args=(tmp_path, 1))
        process.start()
        process.join(2)
        assert process.is_alive()
        assert partial.exists()
    process.join(60)
    assert process.exitcode == 0
    assert visible(tmp_path) == [".lock", "step-00000001"]


def save_forever(folder: Path) -> None:
    model, tensors = nn.Linear(300, 300), {"a": torch.zeros(300, 300)}
    for turn in range(10**9):
        # each step is saved twice, so that replacing is interrupted as well
        save_checkpoint(folder, step=turn // 2, model=model, tensors=tensors, keep_last=2)


def test_a_kill_at_any_moment_leaves_only_whole_checkpoints(tmp_path, processes):
    for delay in random.Random(0).sample(range(300), 10):
        shutil.rmtree(tmp_path)
        process = processes.Process(target=save_forever, args=(tmp_path,))
        process.start()
        started = time.monotonic()
        while not list(tmp_path.glob("step-*")):
            assert time.monotonic() < started + 60
        time.sleep(delay / 1000)
        process.kill()
        process.join()
        for path in tmp_path.glob("step-*"):
            load_checkpoint(path)
        step = load_checkpoint(tmp_path).step
        save_steps(tmp_path, step + 1, keep_last=1)
        assert visible(tmp_path) == [".lock", f"step-{step + 1:08d}"]


@pytest.mark.parametrize("function", ["save_file", "os.replace", "files.sync", "to_json"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_at_any_point_keeps_the_earlier_checkpoints(tmp_path, monkeypatch, function, call):
    save_steps(tmp_path, 1, 2)
    owner, _, name = ("lib.checkpoint." + function).rpartition(".")
    owner = functools.reduce(getattr, owner.split(".")[1:], lib)
    original, calls = getattr(owner, name), []

    def fail(*arguments, **keywords):
        calls.append(1)
        if len(calls) == call:
            raise OSError(errno.EIO, "Input/output error")
        return original(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with contextlib.suppress(OSError):
            save_checkpoint(tmp_path, step=2, model=nn.Identity(), extra={"new": 1})
    assert visible(tmp_path) == [".lock", "step-00000001", "step-00000002"]
    assert load_checkpoint(tmp_path / "step-00000001").step == 1
    extra = load_checkpoint(tmp_path / "step-00000002").extra
    assert extra == ({} if len(calls) >= call else {"new": 1})


def test_keep_last_deletes_the_oldest(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    save_steps(tmp_path, 4, keep_last=2)
    assert visible(tmp_path) == [".lock", "step-00000003", "step-00000004"]


def test_keep_last_counts_steps_as_numbers(tmp_path):
    save_steps(tmp_path, 99_999_999, 100_000_000)
    save_steps(tmp_path, 100_000_001, keep_last=2)
    assert visible(tmp_path) == [".lock", "step-100000000", "step-100000001"]


def test_keep_last_keeps_the_one_just_written_and_later_ones(tmp_path):
    save_steps(tmp_path, 1, 2, 7, 8)
    save_steps(tmp_path, 3, keep_last=1)
    assert visible(tmp_path) == [".lock", "step-00000003", "step-00000007", "step-00000008"]


def test_keep_last_deletes_oldest_first_and_hides_before_it_deletes(tmp_path, monkeypatch):
    save_steps(tmp_path, 1, 2, 3)
    renamed, replace = [], os.replace

    def note(source, target):
        renamed.append((Path(source).name, Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "replace", note)
    save_steps(tmp_path, 4, keep_last=1)
    assert renamed[-3:] == [
        (f"step-0000000{step}", f".step-0000000{step}.deleted") for step in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1}, "step is -1; right is: 0 or more"),
        ({"step": 1, "keep_last": 0}, "keep_last is 0; right is: 1 or more"),
        ({"step": 1, "tensors": {"a": 3}}, "tensors: a is a int; right is: a tensor"),
    ],
)
def test_bad_arguments_are_refused_by_name(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, model=nn.Identity(), **arguments)
    assert visible(tmp_path) == []


def test_extra_that_is_no_json_is_refused(tmp_path):
    with pytest.raises(TypeError, match="Tensor is not JSON"):
        save_checkpoint(tmp_path, step=1, model=nn.Identity(), extra={"a": torch.zeros(1)})
    assert visible(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("free", [0, 1_000, 40_000, 150_000])
def test_a_full_disk_keeps_the_earlier_checkpoints(small_disk, free):
    save_steps(small_disk, 1)
    left = shutil.disk_usage(small_disk).free - free
    (small_disk / "filler").write_bytes(bytes(max(left // 4096 * 4096, 0)))
    big = nn.Linear(200, 200)
    with pytest.raises(OSError, match=r"step-00000002.* 0\.2 MB more .* MB are free") as caught:
        save_checkpoint(small_disk, step=2, model=big)
    assert caught.value.errno == errno.ENOSPC
    assert visible(small_disk) == [".lock", "filler", "step-00000001"]
    assert load_checkpoint(small_disk).step == 1


@pytest.mark.parametrize("limit", [100_000, 300])
def test_a_file_that_grows_too_large_is_named(tmp_path, limit):
    save_steps(tmp_path, 1)
    code = (
        "import resource, signal, sys, torch\nfrom lib.checkpoint import save_checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "save_checkpoint(sys.argv[1], step=2, model=torch.nn.Linear(200, 200))"
    )
    root = Path(lib.checkpoint.__file__).parents[1]
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert "File too large" in done.stderr.splitlines()[-1]
    assert ".step-00000002.partial/model.safetensors" in done.stderr
    assert visible(tmp_path) == [".lock", "step-00000001"]
    assert load_checkpoint(tmp_path).step == 1


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    def refuse(dir):
        raise OSError(errno.EROFS, "Read-only file system", str(dir / "x"))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(OSError, match=r"cannot be written to .*Read-only.*here'"):
        save_steps(tmp_path / "here", 1)


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match=r"not a folder.*file'"):
        save_steps(tmp_path / "file", 1)


WRONG_MODELS = {
    "2.weight is torch.float32 (2, 5), not torch.float32 (4, 5)": lambda: nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)
    ),
    "3.weight is missing": lambda: nn.Sequential(*make_model(), nn.Linear(2, 2)),
    "2.weight is not in the model": lambda: make_model()[:2],
    "0.weight is torch.float32 (5, 3), not torch.bfloat16": lambda: make_model().bfloat16(),
}


@pytest.mark.parametrize("message", WRONG_MODELS)
def test_a_model_that_does_not_fit_is_refused_unchanged(tmp_path, message):
    saved = make_model()
    optimizer = torch.optim.AdamW(saved.parameters())
    train(saved, optimizer, 1, seed=0)
    path = save_checkpoint(tmp_path, step=1, model=saved, optimizer=optimizer)
    model = WRONG_MODELS[message]()
    own = torch.optim.AdamW(model.parameters(), lr=0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        load_checkpoint(path, model=model, optimizer=own)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert_same(before, dict(model.state_dict()))
    assert own.param_groups[0]["lr"] == 0.5
    assert not own.state


def swapped(model):
    return torch.optim.SGD(reversed(list(model.parameters())), lr=0.1)


def renamed(model):
    return torch.optim.SGD([model[0].weight, model[2].bias, model[2].weight, model[0].bias])


def fewer(model):
    return torch.optim.SGD(model[0].parameters(), lr=0.1)


def other_class(model):
    return torch.optim.AdamW(model.parameters())


def other_groups(model):
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("make", [swapped, renamed, fewer, other_class, other_groups])
def test_an_optimizer_that_does_not_fit_is_refused_and_nothing_is_changed(tmp_path, make):
    saved = make_model()
    save_checkpoint(tmp_path, step=1, model=saved, optimizer=torch.optim.SGD(saved.parameters()))
    model = make_model(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = make(model)
    settings = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"does not fit the optimizer|number of parameter groups"):
        load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert_same(before, dict(model.state_dict()))
    assert_same(settings, optimizer.state_dict())


def test_parameters_of_one_shape_in_another_order_are_refused(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    forward = [model["a"].weight, model["b"].weight]
    save_checkpoint(tmp_path, step=0, model=model, optimizer=torch.optim.SGD(forward))
    with pytest.raises(ValueError, match=r"'a.weight'.* in place of .*'b.weight'"):
        load_checkpoint(tmp_path, model=model, optimizer=torch.optim.SGD(forward[::-1]))


def test_an_optimizer_is_not_loaded_where_none_was_saved(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    model = make_model()
    with pytest.raises(ValueError, match=f"{path} holds no optimizer state"):
        load_checkpoint(path, model=model, optimizer=torch.optim.SGD(model.parameters()))


def test_without_strict_the_names_in_common_are_loaded(tmp_path):
    save_steps(tmp_path, 7)
    larger = nn.Sequential(*make_model(), nn.Linear(2, 2)).bfloat16()
    load_checkpoint(tmp_path, model=larger, strict=False)
    assert larger[0].weight.unique().item() == 7
    assert larger[3].weight.unique().numel() > 1
    with pytest.raises(ValueError, match="does not fit the model"):
        load_checkpoint(tmp_path, model=nn.Sequential(nn.Linear(9, 5)), strict=False)


def test_random_numbers_continue(tmp_path):
    torch.manual_seed(5)
    torch.rand(3)
    save_checkpoint(tmp_path, step=0, model=nn.Identity(), tensors=rng_state("cpu"))
    expected = torch.rand(4), torch.randn(4)
    torch.manual_seed(6)
    set_rng_state(load_checkpoint(tmp_path).tensors, "cpu")
    assert_same(expected, (torch.rand(4), torch.randn(4)))


def test_a_state_without_the_generator_is_refused():
    with pytest.raises(ValueError, match=r"state lacks .*rng_cuda.*rng_state\('cuda'\)"):
        set_rng_state(rng_state("cpu"), "cuda")


def test_nothing_is_pickled(tmp_path, monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("pickle is used")

    for name in ("torch.save", "torch.load", "pickle.dump", "pickle.dumps", "pickle.Pickler"):
        monkeypatch.setattr(name, refuse)
    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler"):
        monkeypatch.setattr(name, refuse)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1, seed=0)
    path = save_checkpoint(
        tmp_path, step=1, model=model, optimizer=optimizer, tensors=rng_state("cpu")
    )
    load_checkpoint(path, model=model, optimizer=optimizer)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


@pytest.mark.gpu
def test_training_on_a_gpu_continues_bit_for_bit(tmp_path):
    def make(seed):
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2)).cuda()
        lr = torch.tensor(0.01, device="cuda")
        return model, torch.optim.AdamW(model.parameters(), lr=lr, capturable=True)

    def train_on_gpu(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(7, 3, device="cuda")).square().mean().backward()
            optimizer.step()

    model, optimizer = make(0)
    train_on_gpu(model, optimizer)
    save_checkpoint(tmp_path, step=3, model=model, optimizer=optimizer, tensors=rng_state("cuda"))
    resumed, resumed_optimizer = make(1)
    loaded = load_checkpoint(tmp_path, model=resumed, optimizer=resumed_optimizer)
    assert_same(optimizer.state_dict(), resumed_optimizer.state_dict())
    train_on_gpu(model, optimizer)
    set_rng_state(loaded.tensors, "cuda")
    train_on_gpu(resumed, resumed_optimizer)
    assert_same(model.state_dict(), resumed.state_dict())


@pytest.mark.gpu
def test_step_counts_stay_on_the_device_they_were_on(tmp_path):
    model = make_model().cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for parameter in model.parameters():
        state = {"step": torch.ones((), device="cuda"), "count": torch.ones(())}
        optimizer.state[parameter] = state
    save_checkpoint(tmp_path, step=0, model=model, optimizer=optimizer)
    load_checkpoint(tmp_path, optimizer=optimizer)
    assert all(state["step"].is_cuda for state in optimizer.state.values())


def test_whoever_may_read_one_file_may_read_all(tmp_path):
    path = save_checkpoint(tmp_path, step=1, model=torch.nn.Linear(2, 2))
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1
