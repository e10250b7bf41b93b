"""What the attention kernels take: checks of q, k and v, and their layouts."""

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from lib.hardware import runs_triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Under autocast they become its dtype, as for PyTorch's own attention; float64 stays."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    is_cast = [x.is_floating_point() and x.dtype != torch.float64 for x in tensors]
    return [x.to(dtype) if cast else x for x, cast in zip(tensors, is_cast)]


def check_device(device: torch.device) -> None:
    """Refuse a device on which Triton cannot run."""
    if not runs_triton(device):
        raise ValueError(f"q is on {device}; right is: a CUDA device, which Triton needs")


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what the kernels cannot do.

    Raises:
        ValueError: shapes, dtypes or devices; names them.
        NotImplementedError: a forward-mode derivative is asked for.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"{shapes}; right is: four dimensions, (batch, heads, tokens, head_dim)")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}; right is: one batch, one head_dim, and v shaped like k")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{shapes}; right is: heads of q divisible by heads of k and v")
    if not 1 <= q.shape[3] <= 256:
        raise ValueError(f"head_dim is {q.shape[3]}; right is: from 1 to 256")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        kinds = ", ".join(str(x.dtype) for x in (q, k, v))
        known = ", ".join(map(str, DTYPES))
        raise ValueError(
            f"dtypes of q, k and v are {kinds}; right is: the same for all, of {known}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}; right is: one")
    # PyTorch lets the tangents of an operator without a gradient go, and says nothing
    if not torch.compiler.is_compiling() and any(
        unpack_dual(x).tangent is not None for x in (q, k, v)
    ):
        raise NotImplementedError("forward-mode derivatives (jvp); right is: sdpa, or backward")


def with_unit_stride(x: Tensor) -> Tensor:
    """x, or a copy of it where the kernels cannot reach its elements."""
    # within a tile, of at most 256 rows, offsets are of 32 bits
    return x if x.stride(-1) == 1 and x.stride(2) < 2**23 else x.contiguous()


def strides(*tensors: Tensor) -> list[int]:
    """Of batch, head and token; the last is 1."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def empty_like_heads(x: Tensor) -> Tensor:
    """An empty (batch, heads, tokens, head_dim) whose tokens stand outside the heads as in x."""
    batch, heads, tokens, head_dim = x.shape
    if x.stride(1) <= x.stride(2):
        return x.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)
    return x.new_empty(x.shape)
