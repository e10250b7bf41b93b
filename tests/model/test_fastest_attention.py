"""The attention kernel of `auto`: known by chip, dtype and head_dim, and named in a line."""

import json
import logging
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from lib.core import hardware
from lib.flash_attention.cuda import build
from lib.model import fastest_attention
from lib.model.config import ModelConfig
from lib.model.fastest_attention import (
    HOPPER_HEAD_DIMS,
    fastest_attention_kernel,
    pick_attention_kernel,
)

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
GPU = torch.device("cuda")
TRITON, CUDA, SDPA = "flash_attention_triton", "flash_attention_cuda", "sdpa"
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def on_chip(monkeypatch):
    """A machine with a GPU of some compute capability, with all compilers but those taken away."""

    def switch(capability: tuple[int, int], *, without: str = "") -> None:
        monkeypatch.setattr(torch.version, "cuda", None if without == "CUDA" else "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a chip")
        monkeypatch.setattr(hardware, "HAS_TRITON", without != "Triton")
        if without != "Triton":
            triton_attention = pytest.importorskip("lib.flash_attention.triton_attention")
            found = None if without == "its Triton" else "Hopper's kernels"
            monkeypatch.setattr(triton_attention, "hopper", found)

        def architectures() -> list[int]:
            if without == "NVRTC":
                raise RuntimeError("there is no NVRTC")
            return [75, 80, 90] if without != "NVRTC for it" else [80, 90]

        monkeypatch.setattr(build, "nvrtc_architectures", architectures)
        monkeypatch.setattr(build, "nvrtc_version", lambda: (14, 0))
        monkeypatch.delenv("WORKBOOK_CUDA_ARCHITECTURE", raising=False)

    return switch


@pytest.mark.parametrize(
    ("capability", "without", "dtype", "head_dim", "right", "reason"),
    [
        ((9, 0), "", BF16, 64, TRITON, "1.0 to 1.7 times as fast"),
        ((9, 0), "", BF16, 256, TRITON, "1.0 to 1.7 times as fast"),
        ((9, 0), "", BF16, 32, TRITON, "1.0 to 1.7 times as fast"),
        ((9, 0), "NVRTC", BF16, 64, TRITON, "1.0 to 1.7 times as fast"),
        ((9, 0), "", BF16, 36, SDPA, "none of ours is known to be faster with heads of 36 in bf"),
        ((9, 0), "", FP32, 64, SDPA, "heads of 64 in float32"),
        ((9, 0), "Triton", BF16, 64, SDPA, "flash_attention_triton is faster, and needs Triton"),
        ((9, 0), "its Triton", BF16, 64, SDPA, "needs Triton 3.6 or 3.7"),
        # the portable kernels run on any
        ((9, 0), "its Triton", BF16, 32, TRITON, "1.0 to 1.7 times as fast"),
        # an AMD GPU reports 9.x too
        ((9, 4), "CUDA", BF16, 64, SDPA, "faster on NVIDIA GPUs alone"),
        ((8, 0), "", BF16, 64, SDPA, "heads of 64 in bfloat16"),
        ((7, 5), "", FP16, 64, CUDA, "1.2 to 1.8 times as fast"),
        ((7, 5), "", FP16, 160, SDPA, "heads of 160 in float16"),
        ((7, 5), "", FP32, 64, SDPA, "heads of 64 in float32"),
        ((7, 5), "NVRTC", FP16, 64, SDPA, "flash_attention_cuda is faster, but there is no NVRTC"),
        ((7, 5), "NVRTC for it", FP16, 64, SDPA, "NVRTC 14.0 does not compile for sm_75"),
    ],
)
def test_auto_is_the_fastest_that_runs(
    on_chip, capability, without, dtype, head_dim, right, reason
):
    on_chip(capability, without=without)
    kernel, why = fastest_attention_kernel(GPU, dtype, head_dim)
    assert kernel == right
    assert reason in why


def test_it_is_named_in_one_line_and_a_given_kernel_wins(on_chip, caplog):
    on_chip((9, 0))
    auto = ModelConfig(attention_kernel="auto", d_model=64, num_heads=1)
    with caplog.at_level(logging.INFO):
        assert pick_attention_kernel(auto, GPU, BF16) == TRITON
        assert pick_attention_kernel(auto, torch.device("cpu"), FP32) == SDPA
        given = ModelConfig(attention_kernel="vectorized_torch")
        assert pick_attention_kernel(given, GPU, BF16) == "vectorized_torch"
    first, second = caplog.messages
    assert first.startswith("attention_kernel flash_attention_triton on a chip: 1.0 to 1.7 times")
    assert second.startswith("attention_kernel sdpa on ")


def test_heads_are_those_of_hoppers_kernels_and_of_the_portable_ones_at_32():
    launch = pytest.importorskip("lib.flash_attention.hopper.launch")
    assert [*HOPPER_HEAD_DIMS] == [32, *launch.HEAD_DIMS]


@pytest.mark.parametrize(
    ("folder", "ours", "peer", "dtype", "least", "most"),
    [
        ("", TRITON, "sdpa_cudnn", "bfloat16", 0.95, 1.75),
        ("cuda_attention/compute_75", CUDA, "sdpa_efficient", "float16", 1.15, 1.85),
    ],
)
def test_the_records_say_so(folder, ours, peer, dtype, least, most):
    both = defaultdict(list)
    path = ARTIFACTS / folder / "attention_sweep.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines():
        config, figures = (json.loads(line)[key] for key in ("config", "figures"))
        kernels = figures.get("kernels", {})
        times = [kernels.get(name, {}).get("median_ms") for name in (ours, peer)]
        is_square = config["queries"] == config["keys"]
        if config["is_causal"] and is_square and config["dtype"] == dtype and all(times):
            shape = (config["head_dim"], config["queries"], config["heads"])
            both[(*shape, config["batch_size"], config.get("in_graph"))].append(times)
    ratios = [sum(peer for _, peer in t) / sum(our for our, _ in t) for t in both.values()]
    assert len(ratios) >= 6
    assert least < min(ratios) <= max(ratios) < most


@pytest.mark.gpu
def test_auto_runs_on_this_gpu():
    from lib.model.attention import attention

    device = torch.device("cuda", torch.cuda.current_device())
    dtype = hardware.pick_dtype(device)
    for head_dim in (16, 32, 64, 128, 256):
        kernel, _ = fastest_attention_kernel(device, dtype, head_dim)
        q = torch.randn(1, 2, 64, head_dim, device=device, dtype=dtype, requires_grad=True)
        attention(q, q, q, kernel=kernel).sum().backward()
        assert q.grad.isfinite().all()
    if torch.cuda.get_device_capability(device)[0] == 9:
        assert fastest_attention._has_kernels(device, 64)
