"""The loss kernel for GPUs with enough shared memory: it reads each row of logits once.

`lib.model.loss_triton` reads a row twice, and the second time it is no longer in the L2 cache. Here
a row stays in shared memory from its log-sum-exp to its gradient; asynchronous copies bring it
there. Several programs share a multiprocessor, so that the copies of one overlap with the
arithmetic of another. Written in Gluon, Triton's language with explicit layouts and shared memory.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

if not hasattr(gl, "num_warps"):
    raise ImportError(f"Triton must be 3.6 or later for its Gluon, got {triton.__version__}")

# Triton 3.6 and 3.7 name it differently
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_LOG2_E = gl.constexpr(1.4426950408889634)
CHUNK = 4096
NUM_WARPS = 8


def programs_per_multiprocessor(logits: Tensor) -> int:
    """The number of programs whose rows fit the shared memory of a multiprocessor together.

    0 where the kernel does not support the logits: it needs 16-bit numbers, on an NVIDIA GPU of
    compute capability 8.0 or later, in rows of a multiple of 16 bytes. Use it where at
    least 2 programs fit: then copies of one overlap with the arithmetic of another.
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
    # the driver reserves 1 KiB for each program, and its reductions take a few bytes
    fit = device.shared_memory_per_multiprocessor // (row_bytes + 1280)
    return fit if device.major >= 8 else 0


def loss_and_grad(logits: Tensor, targets: Tensor, z_loss: float, grad_factor: float) -> Tensor:
    """`lib.model.loss_triton.loss_and_grad` with a `grad_factor`, for logits that are supported."""
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
    """One row: copy to shared memory, log-sum-exp, loss, gradient."""
    CHUNKS: gl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    WARPS: gl.constexpr = gl.num_warps()
    # 16 bytes per thread
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    PER_THREAD: gl.constexpr = CHUNK // (256 * WARPS)
    dtype: gl.constexpr = logits_ptr.dtype.element_ty
    kept = gl.allocate_shared_memory(dtype, [CHUNKS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    columns = gl.arange(0, CHUNK, LAYOUT)
    row = gl.program_id(0)
    # int64, since there may be more than 2³¹ logits
    row_ptr = logits_ptr + gl.cast(row, gl.int64) * VOCAB

    # start copying the whole row, one group for each chunk
    for i in gl.static_range(CHUNKS):
        offsets = i * CHUNK + columns
        async_copy.async_copy_global_to_shared(kept.index(i), row_ptr + offsets, offsets < VOCAB)
        async_copy.commit_group()
    target = gl.load(targets_ptr + row)
    # a target outside the vocabulary must not read out of bounds: its loss is NaN
    is_valid = (target >= 0) & (target < VOCAB)
    target_logit = gl.load(row_ptr + target, is_valid, other=float("nan")).to(gl.float32)

    # online softmax (Milakov and Gimelshein 2018) over the chunks as they arrive, with a running
    # maximum and total for each thread
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
    row_total = gl.sum(total * _exp(highest - top), 0)
    log_total = gl.log(row_total)
    lse = top + log_total
    # not lse - target_logit: lse is rounded to a step of the largest logit
    loss = (top - target_logit) + log_total + z_loss * lse * lse
    gl.store(losses_ptr + row, loss)

    # the gradient, from the copy in shared memory
    weight = (1 + 2 * z_loss * lse) * grad_factor / row_total
    for i in gl.static_range(CHUNKS):
        grad = _exp(kept.index(i).load(LAYOUT).to(gl.float32) - top) * weight
        offsets = i * CHUNK + columns
        gl.store(row_ptr + offsets, grad.to(dtype), offsets < VOCAB)
    # the target's gradient overwrites what another thread has stored
    _barrier()
    grad = _exp(target_logit - top) * weight - grad_factor
    gl.store(row_ptr + target, grad.to(dtype), is_valid)


@gluon.jit
def _exp(x):
    # half the instructions of gl.exp, which also handles results below 2⁻¹²⁶
    return gl.exp2(x * _LOG2_E)
