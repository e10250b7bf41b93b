"""The loss kernel for GPUs with enough shared memory: it reads each row of logits once.

`lib.loss_triton` reads a row twice, and there are more rows in flight than the L2 cache holds. Here
a row stays in shared memory from its log-sum-exp to its gradient. It comes there by asynchronous
copies. Several programs share a multiprocessor, so that one's copies go on during another's
arithmetic. Written in Gluon, Triton's language with explicit layouts and shared memory.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

if not hasattr(gl, "num_warps"):
    raise ImportError(f"Triton is {triton.__version__}; right is: 3.6 or later, for its Gluon")
# Triton 3.6 and 3.7 name it differently
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_LOG2_E = gl.constexpr(1.4426950408889634)

CHUNK = 4096
NUM_WARPS = 8


def programs_per_multiprocessor(logits: Tensor) -> int:
    """How many of the kernel's programs fit the shared memory of a multiprocessor.

    Below 2 these logits are not for this kernel: their rows are too long, they are not 16-bit
    numbers on an NVIDIA GPU of capability 8.0 or later, or their rows are not whole 16 bytes.
    """
    if not (
        logits.is_cuda
        and torch.version.cuda
        and logits.dtype in (torch.bfloat16, torch.float16)
        and logits.is_contiguous()
        and logits.shape[1] % 8 == 0
        and logits.data_ptr() % 16 == 0
    ):
        return 0
    device = torch.cuda.get_device_properties(logits.device)
    row_bytes = triton.cdiv(logits.shape[1], CHUNK) * CHUNK * logits.element_size()
    # a program takes 1 KiB of its own, and its reductions some bytes
    fit = device.shared_memory_per_multiprocessor // (row_bytes + 1280)
    return fit if device.major >= 8 else 0


def loss_and_grad(logits: Tensor, targets: Tensor, z_loss: float, grad_factor: float) -> Tensor:
    """As `lib.loss_triton.loss_and_grad` with a `grad_factor`, for logits this kernel is for."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _loss_kernel[(len(logits),)](
        logits,
        targets,
        losses,
        z_loss,
        grad_factor,
        VOCAB=logits.shape[1],
        CHUNK=CHUNK,
        num_warps=NUM_WARPS,
    )
    return losses


@gluon.jit
def _loss_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    z_loss,
    grad_factor,
    VOCAB: gl.constexpr,
    CHUNK: gl.constexpr,
):
    CHUNKS: gl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    WARPS: gl.constexpr = gl.num_warps()
    # 16 bytes per thread
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    PER_THREAD: gl.constexpr = CHUNK // (256 * WARPS)
    dtype: gl.constexpr = logits_ptr.dtype.element_ty
    kept = gl.allocate_shared_memory(dtype, [CHUNKS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    columns = gl.arange(0, CHUNK, LAYOUT)
    row = gl.program_id(0)
    # int64, as there may be more than 2³¹ logits
    row_ptr = logits_ptr + gl.cast(row, gl.int64) * VOCAB

    for i in gl.static_range(CHUNKS):
        places = i * CHUNK + columns
        async_copy.async_copy_global_to_shared(kept.index(i), row_ptr + places, places < VOCAB)
        async_copy.commit_group()
    target = gl.load(targets_ptr + row)
    # a target outside the vocabulary must not read foreign memory: its loss is NaN
    is_right = (target >= 0) & (target < VOCAB)
    of_target = gl.load(row_ptr + target, is_right, other=float("nan")).to(gl.float32)

    # online softmax (Milakov and Gimelshein 2018), a maximum and a total for each thread
    for i in gl.static_range(CHUNKS):
        async_copy.wait_group(CHUNKS - 1 - i)
        x = kept.index(i).load(LAYOUT).to(gl.float32)
        x = gl.where(i * CHUNK + columns < VOCAB, x, float("-inf"))
        x = gl.reshape(x, [PER_THREAD, 32 * WARPS, 8])
        chunk_highest = gl.max(gl.max(x, 2), 0)
        if i == 0:
            # finite, so that -inf minus it is -inf
            highest = gl.full_like(chunk_highest, -3.0e38)
            total = gl.zeros_like(chunk_highest)
        higher = gl.maximum(highest, chunk_highest)
        e = _exp(x - gl.expand_dims(gl.expand_dims(higher, 0), 2))
        total = total * _exp(highest - higher) + gl.sum(gl.sum(e, 2), 0)
        highest = higher
    top = gl.max(highest, 0)
    lse = gl.log(gl.sum(total * _exp(highest - top), 0)) + top
    gl.store(losses_ptr + row, lse - of_target + z_loss * lse * lse)

    weight = (1 + 2 * z_loss * lse) * grad_factor
    for i in gl.static_range(CHUNKS):
        grad = _exp(kept.index(i).load(LAYOUT).to(gl.float32) - lse) * weight
        places = i * CHUNK + columns
        gl.store(row_ptr + places, grad.to(dtype), places < VOCAB)
    # the target's gradient takes the place of what another thread stored
    _barrier()
    grad = _exp(of_target - lse) * weight - grad_factor
    gl.store(row_ptr + target, grad.to(dtype), is_right)


@gluon.jit
def _exp(x):
    # half of the instructions of gl.exp, which also gives numbers below 2⁻¹²⁶
    return gl.exp2(x * _LOG2_E)
