"""Which attention kernel trains fastest on a chip: known from the records in artifacts/.

Nothing is timed here, so every process of a run, and every later one, picks the same kernel.
"""

import logging

import torch

from lib.core.hardware import device_name, runs_triton
from lib.flash_attention.cuda.build import pick_architecture
from lib.flash_attention.inputs import HOPPER_TRITON
from lib.model.config import AttentionKernel, ModelConfig

SHORT = (torch.bfloat16, torch.float16)
# Those of Hopper's own kernels, and 32, where the portable ones run.
HOPPER_HEAD_DIMS = range(32, 257, 8)
log = logging.getLogger(__name__)


def pick_attention_kernel(
    model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> AttentionKernel:
    """Return the model's attention kernel; where that is `auto`, the fastest for the device.

    One line of the log then says which and why.
    """
    if model.attention_kernel != "auto":
        return model.attention_kernel
    kernel, reason = fastest_attention_kernel(device, dtype, model.head_dim)
    log.info("attention_kernel %s on %s: %s", kernel, device_name(device), reason)
    return kernel


def fastest_attention_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[AttentionKernel, str]:
    """Return the kernel that trains fastest with causal attention, and why.

    Both passes count, on record in artifacts/attention_sweep.jsonl and, of whole steps with heads
    of 32, in training_benchmark.jsonl. What a T4 runs was timed on an H200, in float16, with heads
    of 64 and 128 (artifacts/cuda_attention/compute_75). On other chips nothing of ours is known to
    be faster than PyTorch's.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return "sdpa", "our kernels are faster on NVIDIA GPUs alone"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] == 9 and dtype in SHORT and head_dim in HOPPER_HEAD_DIMS:
        if not _has_kernels(device, head_dim):
            known = " or ".join(HOPPER_TRITON)
            return "sdpa", f"flash_attention_triton is faster, and needs Triton {known}"
        return "flash_attention_triton", "1.0 to 1.7 times as fast as PyTorch's on record"
    if capability == (7, 5) and dtype == torch.float16 and head_dim <= 128:
        try:
            pick_architecture(capability)
        except RuntimeError as error:
            return "sdpa", f"flash_attention_cuda is faster, but {error}"
        return "flash_attention_cuda", "1.2 to 1.8 times as fast as PyTorch's on record"
    name = str(dtype).removeprefix("torch.")
    return "sdpa", f"none of ours is known to be faster with heads of {head_dim} in {name}"


def _has_kernels(device: torch.device, head_dim: int) -> bool:
    """Whether the kernels for heads of this size on a Hopper GPU can be compiled here."""
    if not runs_triton(device):
        return False
    from lib.flash_attention import triton_attention

    return head_dim == HOPPER_HEAD_DIMS[0] or triton_attention.hopper is not None
