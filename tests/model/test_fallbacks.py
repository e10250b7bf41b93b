"""Whatever runs in place of something faster is right, and says so in one line, once."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lib.core import hardware
from lib.core.terminal import warn_once
from lib.model.attention import FLASH_KERNELS, attention, kernel_function
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.optimizer import AdamW

CONFIG = ModelConfig(vocab_size=61, context_length=8, d_model=16, num_heads=2, num_layers=1)
GPU = torch.device("cuda")


@pytest.fixture
def said(caplog):
    """The lines so far."""
    warn_once.cache_clear()
    yield lambda: caplog.messages
    warn_once.cache_clear()


@pytest.mark.parametrize("kernel", FLASH_KERNELS)
def test_a_mask_takes_sdpa(kernel, said):
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.eye(5, dtype=torch.bool)
    for _ in range(2):
        out = attention(q, q, q, kernel=kernel, is_causal=False, mask=mask)
        assert out.equal(F.scaled_dot_product_attention(q, q, q, mask))
    assert said() == [f"{kernel} takes no mask but the causal one: sdpa runs instead"]


@pytest.fixture
def gpu_without_triton(monkeypatch, said):
    """A GPU as Windows has it, for which the CPU stands in; and the lines so far."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(hardware, "HAS_TRITON", False)
    return said


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": True, "norm": "post"}, {"attention_kernel": "vectorized_torch"}]
)
def test_a_model_on_a_gpu_without_triton_runs_as_pytorchs_operators(gpu_without_triton, changes):
    config = dataclasses.replace(CONFIG, **changes)
    model, token_ids = TransformerLM(config), torch.arange(14).view(2, 7)
    losses = [model.loss(token_ids, token_ids)]
    losses[0].backward()
    grads = [weight.grad for weight in model.parameters()]
    model.use_kernels(False)
    losses.append(model.loss(token_ids, token_ids))
    assert losses[0].equal(losses[1])
    for ours, right in zip(grads, torch.autograd.grad(losses[1], list(model.parameters()))):
        assert ours.equal(right)
    (line,) = gpu_without_triton()
    assert line.startswith("Triton is not installed: norms, SwiGLU, RoPE and the loss run as")


def test_adamw_on_a_gpu_without_triton_takes_foreach(gpu_without_triton):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizers = [AdamW([weight], implementation=name) for name in ("auto", "triton")]
    assert [optimizers[0]._implementation_on(GPU) for _ in range(2)] == ["foreach", "foreach"]
    assert gpu_without_triton() == ["Triton is not installed: AdamW takes foreach, which is slower"]
    with pytest.raises(ValueError, match="on cuda, where Triton is not installed, got 'triton'"):
        optimizers[1]._implementation_on(GPU)


@pytest.mark.parametrize("kernel", ["flash_attention_triton", "vectorized_torch_compiled"])
@pytest.mark.usefixtures("gpu_without_triton")
def test_a_kernel_that_lacks_triton_is_refused(kernel):
    with pytest.raises(ValueError, match=f"{kernel} needs Triton, which is not installed; use sd"):
        kernel_function(kernel, GPU)


# A Hopper GPU, for which tensors on the meta device stand in


@pytest.fixture
def on_hopper(monkeypatch, said):
    """The module whose kernels are portable; those for Hopper, and the lines so far."""
    portable = pytest.importorskip("lib.flash_attention.triton_attention")
    launch = pytest.importorskip("lib.flash_attention.hopper.launch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(portable, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    return SimpleNamespace(portable=portable, launch=launch, said=said, patch=monkeypatch)


@pytest.mark.parametrize(
    ("shape", "dtype", "line"),
    [
        ((1, 2, 70, 64), torch.bfloat16, None),
        ((1, 2, 70, 36), torch.bfloat16, "take head_dim 40 to 256 in steps of 8, got 36"),
        # the portable kernels are the fastest for these, or there is nothing to do
        ((1, 2, 70, 32), torch.bfloat16, None),
        ((1, 2, 70, 64), torch.float32, None),
        ((0, 2, 70, 36), torch.bfloat16, None),
    ],
    ids=str,
)
def test_portable_kernels_on_hopper(on_hopper, shape, dtype, line):
    x = torch.empty(shape, dtype=dtype)
    for _ in range(2):
        on_hopper.portable._uses_hopper(x, x, x)
    assert len(on_hopper.said()) == (line is not None)
    assert line is None or line in on_hopper.said()[0]


def test_hoppers_kernels_on_another_triton(on_hopper):
    on_hopper.patch.setattr(on_hopper.portable, "hopper", None)
    x = torch.empty(1, 2, 70, 64, dtype=torch.bfloat16)
    for _ in range(2):
        assert not on_hopper.portable._uses_hopper(x, x, x)
    (line,) = on_hopper.said()
    assert "for Hopper GPUs, which need Triton 3.6 or 3.7, got 3." in line


def test_hoppers_kernels_without_nvrtc(on_hopper):
    on_hopper.patch.setattr(on_hopper.launch, "has_nvrtc", lambda: False)
    x = torch.empty(32, 12, 4096, 64, device="meta")
    for _ in range(2):
        assert not on_hopper.launch._one_kernel_is_faster(x, x, True)
    (line,) = on_hopper.said()
    assert "which need NVRTC: pip install nvidia-cuda-nvrtc" in line


def test_the_loss_without_gluon(on_hopper):
    loss_triton = pytest.importorskip("lib.model.loss_triton")
    on_hopper.patch.setattr(loss_triton, "loss_gluon", None)
    on_hopper.patch.setattr(loss_triton, "_loss_kernel", {(2,): lambda *args, **options: None})
    for _ in range(2):
        loss_triton.loss_and_grad(torch.zeros(2, 5), torch.zeros(2).long(), 0.0, 1.0)
    assert on_hopper.said() == [
        "the loss reads logits twice; Triton 3.6 or later has a faster kernel"
    ]
