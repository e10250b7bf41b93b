"""Whole parameters: what a model has while nothing is gathered; reading one gathers its block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Properties and methods of a whole parameter that gather nothing.
PROPERTIES = ("dtype", "device", "shape", "ndim", "is_cuda", "requires_grad", "layout", "grad")
PROPERTIES += ("is_leaf", "retains_grad")
METHODS = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex")
METHODS += ("untyped_storage",)
DESCRIPTIONS = {getattr(torch.Tensor, name) for name in METHODS}
DESCRIPTIONS |= {getattr(torch.Tensor, name).__get__ for name in PROPERTIES}
DESCRIPTIONS |= {torch.Tensor.grad.__set__, torch.Tensor.__repr__}  # type: ignore[attr-defined]


class WholeParameter(nn.Parameter):
    """A parameter with a shape and a gradient, but no memory; reading it gathers its block."""

    flat: Any
    number: int

    def __new__(cls, flat: Any, index: int) -> WholeParameter:
        """Make it for parameter `index` of `flat`."""
        shard, shape = flat.shards[index], flat.shapes[index]
        empty = shard.detach().new_empty((), dtype=flat.gathered_dtype).expand(shape)
        whole = super().__new__(cls, empty, requires_grad=shard.requires_grad)
        whole.flat, whole.number = flat, index
        return whole

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(WholeParameter, _gathered, (args, kwargs))
        return function(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter of shape {tuple(self.shape)}, which is not gathered"


def _gathered(whole: WholeParameter) -> Tensor:
    if not whole.flat.gathered:
        whole.flat.before_forward()
    return whole.flat.gathered[whole.number]


class _WithGradients(torch.autograd.Function):
    """Gathered parameters, whose gradients are those of the whole parameters."""

    @staticmethod
    def forward(ctx: Any, gathered: list[Tensor], *whole: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.before_backward = whole[0].flat.before_backward
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.before_backward()
        return None, *grads


def with_gradients_of(whole: list[WholeParameter], gathered: list[Tensor]) -> list[Tensor]:
    """Return the tensors `gathered` as parameters, for which backward gives `whole` gradients."""
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        trained = [i for i, param in enumerate(whole) if param.requires_grad]
        if trained:
            given = [gathered[i] for i in trained]
            given = _WithGradients.apply(given, *(whole[i] for i in trained))
            for i, tensor in zip(trained, given):
                gathered[i] = tensor
    return gathered
