"""Inputs of the attention kernels: checks of q, k and v, autocast, and memory layouts."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual

from lib.core.hardware import runs_triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
# Hopper's kernels run with these versions of Triton alone, whose way to pass parameters is known.
HOPPER_TRITON = ("3.6", "3.7")


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast to the dtype of autocast, if enabled, as PyTorch's attention does; float64 stays."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    is_cast = [x.is_floating_point() and x.dtype != torch.float64 for x in tensors]
    return [x.to(dtype) if cast else x for x, cast in zip(tensors, is_cast)]


def check_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor of the scores, 1 / sqrt(head_dim) for None.

    Raises:
        ValueError: it is a tensor, which would get no gradient, or not more than 0 and finite.
    """
    if scale is None:
        return 1 / math.sqrt(head_dim)
    check_is_no_tensor(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be more than 0 and finite, got {scale}")
    return scale


def check_is_no_tensor(scale: object) -> None:
    """Raise ValueError for a scale that is a tensor: it would get no gradient."""
    if isinstance(scale, Tensor):
        raise ValueError(
            "scale must be a number, got a tensor, which would get no gradient; multiply q by it"
        )


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError unless Triton runs on `device` with tensors of `dtype`."""
    if not runs_triton(device):
        raise ValueError(f"q must be on a CUDA device, which Triton needs, got {device}")
    # Triton's interpreter keeps bfloat16 as integers, which a matmul then multiplies
    if device.type == "cpu" and dtype == torch.bfloat16:
        raise ValueError(
            f"q must be float16 or float32 in Triton's interpreter, whose matmuls are wrong in "
            f"bfloat16, got {dtype}"
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor, *, ndim: int = 4) -> None:
    """Check that q, k and v fit together; v may have another head_dim.

    Args:
        q: (batch, heads, queries, head_dim), or with an `ndim` of 3 (batch, queries, head_dim).
        k, v: (batch, key_heads, keys, head_dim); `key_heads` divides `heads`.

    Raises:
        ValueError: they do not fit together.
    """
    if not q.ndim == k.ndim == v.ndim == ndim:
        axes = {3: "batch, tokens, head_dim", 4: "batch, heads, tokens, head_dim"}
        expected = axes.get(ndim, "batch, ..., tokens, head_dim")
        raise ValueError(f"q, k and v must be ({expected}), {_shapes(q, k, v)}")
    # a call's time on the host counts: each look at a shape takes 0.1 µs
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if k_shape != v_shape and k_shape[:-1] != v_shape[:-1]:
        raise ValueError(f"v must have the batch size, heads and keys of k, {_shapes(q, k, v)}")
    if q_shape[0] != k_shape[0] or q_shape[-1] != k_shape[-1]:
        raise ValueError(
            f"q, k and v must have one batch size and one head_dim, {_shapes(q, k, v)}"
        )
    heads, key_heads = q_shape[-3], k_shape[-3]
    if heads != key_heads and (not heads or not key_heads or heads % key_heads):
        raise ValueError(f"heads of q must be divisible by heads of k and v, {_shapes(q, k, v)}")
    if q_shape[-1] < 1:
        raise ValueError("head_dim must be at least 1, got 0")
    if not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
        raise ValueError(
            f"q, k and v must be floating-point numbers, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}"
        )


def check_kernel_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    max_head_dim: int | None = MAX_HEAD_DIM,
    instead: str = "",
    ndim: int = 4,
) -> None:
    """Check as `check_qkv` does, and that a FlashAttention kernel supports q, k and v.

    Args:
        dtypes: those that the kernel supports; q, k and v share one.
        max_head_dim: the widest heads that it supports.
        instead: how an error ends, such as the name of a kernel that supports more.

    Raises:
        ValueError: they do not fit together, or are not supported.
        NotImplementedError: a forward-mode derivative (jvp) is requested.
    """
    check_qkv(q, k, v, ndim=ndim)
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {_shapes(q, k, v)}")
    if max_head_dim is not None and q.shape[-1] > max_head_dim:
        limits = f"from 1 to {max_head_dim}"
        raise ValueError(f"head_dim must be {limits}, got {q.shape[-1]}{instead}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in dtypes:
        known = ", ".join(map(str, dtypes))
        raise ValueError(
            f"q, k and v must have one dtype of {known}, got {q.dtype}, {k.dtype}, {v.dtype}"
            + instead
        )
    # PyTorch silently drops the tangents of an operator that has no formula for them
    if (
        not torch.compiler.is_compiling()
        and forward_ad._current_level >= 0
        and any(unpack_dual(x).tangent is not None for x in (q, k, v))
    ):
        raise NotImplementedError(
            "forward-mode derivatives (jvp) are not supported; take the kernel sdpa, or backward"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def is_called_eagerly(*tensors: Tensor) -> bool:
    """Whether nothing traces or transforms the call: the tensors can go straight to a kernel."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def with_unit_stride(x: Tensor) -> Tensor:
    """x, or a contiguous copy if the kernels cannot address its elements."""
    # offsets within a tile, of at most 256 rows, are 32-bit
    return x if x.stride(-1) == 1 and x.stride(2) < 2**23 else x.contiguous()


def strides(**tensors: Tensor) -> dict[str, int]:
    """The strides of batch, head and token of each tensor x, as x_batch, x_head and x_token."""
    return {
        f"{name}_{axis}": stride
        for name, x in tensors.items()
        for axis, stride in zip(("batch", "head", "token"), x.stride())
    }


def empty_like_heads(x: Tensor) -> Tensor:
    """An empty tensor of the shape of x, (batch, heads, tokens, head_dim), and its memory order."""
    if x.is_contiguous():
        return torch.empty_like(x)
    batch, heads, tokens, head_dim = x.shape
    if x.stride(1) <= x.stride(2):
        return x.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)
    return x.new_empty(x.shape)


def empty_results(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """Memory for the output and the log-sum-exp of queries like q, (batch, heads, queries, d)."""
    return empty_like_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)
