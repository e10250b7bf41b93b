"""Stand-ins for whole parameters that are not gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# What may be asked of a stand-in without gathering.
DESCRIPTIONS = {
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "shape", "ndim", "is_cuda", "requires_grad", "layout")
} | {
    getattr(torch.Tensor, name)
    for name in ("size", "dim", "numel", "nelement", "element_size", "is_floating_point")
}


class Gathered(nn.Parameter):
    """A whole parameter: a view of the gathered buffer, which has no memory between uses."""

    def __repr__(self) -> str:  # type: ignore[override]
        if self.untyped_storage().nbytes():
            return super().__repr__()
        return f"Parameter of shape {tuple(self.shape)}, which is not gathered"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._require_memory()
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._require_memory()
        return super().__reduce_ex__(protocol)

    def _require_memory(self) -> None:
        if not self.untyped_storage().nbytes():
            raise TypeError(f"copied must be what FSDP.full_parameters() returns, got a {self!r}")


class StandIn(nn.Parameter):
    """A parameter that tells its shape and dtype, and gathers its block when it is used."""

    read_whole: Callable[[], Tensor]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(StandIn, _whole, (args, kwargs))
        return function(*args, **kwargs)


def stand_in_for(whole: Tensor) -> StandIn:
    """A stand-in of a parameter's shape, dtype and device, without its memory."""
    empty = whole.detach().new_empty(()).expand(whole.shape)
    return StandIn(empty, requires_grad=whole.requires_grad)


def _whole(stand_in: StandIn) -> Tensor:
    return stand_in.read_whole()
