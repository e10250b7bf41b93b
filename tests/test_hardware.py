"""What the machine is, and where figures come from."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lib import hardware
from lib.config import TokenizeConfig
from lib.hardware import peak, pick_device, pick_dtype, provenance, seed_everything


def test_auto_device_is_one_that_works():
    assert torch.ones(2, device=pick_device()).sum().item() == 2


def test_cuda_comes_first_then_mps_then_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device().type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device().type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device().type == "cpu"


def test_unknown_device_is_named():
    with pytest.raises(ValueError, match="device is 'gpu'; right is: auto, cpu, cuda"):
        pick_device("gpu")


def test_absent_device_is_refused_with_what_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"'cuda:2', .* sees 2 of type cuda.*cuda:0, cuda:1"):
        pick_device("cuda:2")


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_auto_dtype_is_what_the_chip_has_in_hardware(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert pick_dtype("cuda") == dtype
    assert pick_dtype("cpu") == torch.float32


def test_bfloat16_is_refused_on_a_t4_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(
        ValueError, match="'bfloat16'; right on Tesla T4 is: auto, float32, float16"
    ):
        pick_dtype("cuda", "bfloat16")


def test_same_seed_gives_the_same_numbers_everywhere():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(draw(), first))


@pytest.mark.parametrize(
    ("name", "bfloat16", "bandwidth"),
    [
        ("NVIDIA H200", 989.4e12, 4.8e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 3.35e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12),
        ("NVIDIA L4", 121e12, 300e9),
        ("Tesla T4", None, 320e9),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 1008e9),
    ],
)
def test_peaks_of_known_chips(name, bfloat16, bandwidth):
    assert peak(name).bfloat16 == bfloat16
    assert peak(name).bandwidth == bandwidth


@pytest.mark.parametrize(
    "name", ["AMD EPYC", "", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 MIG 1g.18gb"]
)
def test_peaks_of_other_chips_are_not_guessed(name):
    assert peak(name) is None


def test_no_precision_is_promised_faster_than_a_shorter_one():
    for name, chip in hardware.PEAKS.items():
        known = [p for p in (chip.float16, chip.bfloat16, chip.tf32, chip.float32) if p]
        assert known == sorted(known, reverse=True), name


def test_provenance_survives_json_and_names_what_made_the_figure():
    record = provenance(seed=3, config=TokenizeConfig(), device="cpu")
    assert json.loads(json.dumps(record)) == record
    assert (record["seed"], record["config"]["vocab_size"]) == (3, 4096)
    assert record["device"] == record["cpu"]
    assert record["cores"] >= 1
    assert record["versions"]["numpy"] == np.__version__
    assert record["versions"]["torch"] == torch.__version__
    assert record["date"].endswith("+00:00")


def test_provenance_names_the_gpu_when_torch_is_loaded_and_sees_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert provenance()["device"] == "NVIDIA H200"
    assert provenance(device="cpu")["device"] == provenance()["cpu"]


def test_provenance_does_not_import_torch():
    code = (
        "import sys; from lib.hardware import provenance; record = provenance();"
        "print('torch' in sys.modules, record['versions']['torch'])"
    )
    root = Path(hardware.__file__).parents[1]
    output = subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True)
    assert output.split() == ["False", torch.__version__]


def test_commit_is_the_checkouts_and_dirty_looks_at_the_code_only(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

    monkeypatch.setattr(hardware, "ROOT", tmp_path.resolve())
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "result.csv").write_text("1")
    assert hardware._git_state() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "lib" / "a.py").write_text("2")
    assert hardware._git_state()["dirty"] is True
    # a folder inside of somebody else's checkout
    monkeypatch.setattr(hardware, "ROOT", (tmp_path / "lib").resolve())
    assert hardware._git_state() == {"commit": None, "dirty": None}


def test_outside_of_git_commit_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    assert hardware._git_state() == {"commit": None, "dirty": None}
