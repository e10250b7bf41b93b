"""The machine: devices, dtypes and peaks; ordered work on several processors."""

import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lib.core import hardware
from lib.core.files import ROOT
from lib.core.hardware import ordered_map, peak, pick_device, pick_dtype


def test_cuda_comes_first_then_mps_then_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device().type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device().type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device().type == "cpu"


def test_a_device_that_is_unknown_or_absent_is_rejected_with_the_ones_found(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"one of auto, cpu, cuda:0, cuda:1 .* got 'cuda:2'"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device must be one of auto, cpu on this machine, got"):
        pick_device("cuda")
    with pytest.raises(ValueError, match=r"device must be auto, cpu, cuda, .* got 'gpu'"):
        pick_device("gpu")


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_the_automatic_dtype_is_the_fast_one_of_the_chip(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert pick_dtype("cuda") == dtype
    assert pick_dtype("cpu") == torch.float32
    if capability == (7, 5):
        with pytest.raises(ValueError, match="auto, float32, float16 on Tesla T4, got 'bfloat16'"):
            pick_dtype("cuda", "bfloat16")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", (989.4e12, 4.8e12)),
        ("NVIDIA A100-SXM4-80GB", (312e12, 2.039e12)),
        ("Tesla T4", (None, 320e9)),
        ("NVIDIA GeForce RTX 4090", (165.2e12, 1008e9)),
        *((name, None) for name in ("", "NVIDIA GeForce RTX 4090 Laptop GPU")),
        ("NVIDIA H200 MIG 1g.18gb", None),
    ],
)
def test_peaks_of_known_chips_are_those_quoted_and_others_are_not_guessed(name, found):
    chip = peak(name)
    assert (chip and (chip.bfloat16, chip.bandwidth)) == found


def test_no_dtype_is_quoted_faster_than_a_shorter_one():
    for name, chip in hardware.PEAKS.items():
        known = [p for p in (chip.float16, chip.bfloat16, chip.tf32, chip.float32) if p]
        assert known == sorted(known, reverse=True), name


def test_results_keep_the_order_of_their_jobs_and_an_error_comes_out():
    with ThreadPoolExecutor(4) as executor:
        squares = list(ordered_map(executor, lambda k: k * k, range(50), 5))
        assert squares == [k * k for k in range(50)]
        with pytest.raises(ZeroDivisionError):
            list(ordered_map(executor, lambda k: 1 // k, [1, 0, 2], 2))


def test_jobs_are_taken_only_so_far_ahead():
    taken, lock = [], threading.Lock()

    def jobs():
        for k in range(100):
            with lock:
                taken.append(k)
            yield k

    with ThreadPoolExecutor(2) as executor:
        results = ordered_map(executor, lambda k: k, jobs(), 3)
        assert next(results) == 0
        assert len(taken) == 3
        results.close()


KEPT = """
from lib.core.hardware import keep_freed_memory

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

def kept_mib():
    before = resident_mib()
    blocks = [bytearray(2**20) for _ in range(200)]
    del blocks
    return resident_mib() - before

before = kept_mib()
keep_freed_memory()
print(before > 150, kept_mib() > 150)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_kept_on_request():
    done = subprocess.run([sys.executable, "-c", KEPT], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
