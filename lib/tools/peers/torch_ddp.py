"""PyTorch's `DistributedDataParallel` behind the interface of our wrappers: the peer."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.ddp.flat import GradientSync, add_hook, checked_cap
from lib.ddp.process_group import before_leaving, broadcast_module, world_size
from lib.ddp.wrapper_base import Wrapper, check_not_wrapped, inner_module


class TorchDDP(GradientSync, Wrapper):
    """PyTorch's `DistributedDataParallel` behind the interface of `lib.ddp.wrappers`.

    It averages during backward, which must reach every trained parameter, and needs no
    `finish_gradient_synchronization()`. Gradients are views of its buckets. PyTorch's may hang when
    it is freed after `destroy_process_group`, so `init_from_environment` and `launch` free it
    before. Then, or after `free()`, the module is left as on a single rank.
    """

    overlaps = True

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        super().__init__()
        self.module, self.group = module, group
        # PyTorch's wrapper, if there is one; in a list, so that it is no part of this module
        self.inner: list[Any] = []
        self.params = list(module.parameters())
        self.dtypes = [param.dtype for param in self.params]
        # whether the last forward pass was in no_sync, and whether a backward pass followed it
        self.is_held_back = self.was_averaged = False
        # whether parts were compiled by themselves, such as a model's blocks
        self.has_compiled_parts = any(
            part._compiled_call_impl for part in module.modules() if part is not module
        )
        broadcast_module(module, group, lambda: self._facts(bucket_cap_mb))
        self.note_parameters(inner_module(module))
        if world_size(group) > 1:
            # renamed in newer PyTorch; the old name warns
            names = inspect.signature(DistributedDataParallel).parameters
            sync_buffers = max({"forward_sync_buffers", "broadcast_buffers"} & names.keys())
            options: dict[str, Any] = {sync_buffers: False}
            self.inner.append(
                DistributedDataParallel(
                    module,
                    process_group=group,
                    bucket_cap_mb=bucket_cap_mb,
                    gradient_as_bucket_view=True,
                    **options,
                )
            )
            before_leaving(self.free)
            # a hook on one parameter is enough, since each backward pass must reach all
            add_hook(next(param for param in self.params if param.requires_grad), self)

    def _facts(self, bucket_cap_mb: float) -> dict[str, str]:
        check_not_wrapped(self.module)
        return {"ddp_wrapper": "TorchDDP", "bucket_cap_mb": checked_cap(bucket_cap_mb)}

    def gradient_arrived(self, param: Tensor) -> None:
        """Called in backward; refuse a second pass, which would not be averaged."""
        if not self.inner or not self.inner[0].require_backward_grad_sync:
            return
        if self.was_averaged:
            raise RuntimeError(
                "torch_ddp would not average a second backward pass after the last forward pass; "
                "add up the losses and run one, or run those before the last in no_sync()"
            )
        self.was_averaged = True

    def free(self) -> None:
        """Take PyTorch's wrapper off the module."""
        self.inner.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            RuntimeError: the module has been cast since; PyTorch would average nothing then.
        """
        if self.inner and [param.dtype for param in self.params] != self.dtypes:
            raise RuntimeError("the module was cast after it was wrapped; wrap it again")
        # nothing will be averaged
        if not self.inner or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self.is_held_back = not self.inner[0].require_backward_grad_sync
        self.was_averaged = False
        if not self.has_compiled_parts:
            return self.inner[0](*args, **kwargs)
        # the compiler would split their graphs at PyTorch's buckets, which are larger
        with torch._dynamo.config.patch(optimize_ddp=False):
            return self.inner[0](*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Check that gradients were averaged, as they are when backward ends.

        Raises:
            RuntimeError: they were not, or some of them.
        """
        if not self.inner:
            return
        self.check_parameters()
        if self.is_held_back:
            raise RuntimeError(
                "the last backward pass ran in no_sync(), and torch_ddp averages gradients in "
                "backward only; run the last one outside of it"
            )
        named = self.named.items()
        trained = [(name, param) for name, param in named if param.requires_grad]
        missed = [name for name, param in trained if param.grad is None]
        if missed and len(missed) < len(trained):
            raise RuntimeError(
                f"backward did not reach parameter {missed[0]}, and torch_ddp averages nothing "
                "unless it reaches all; another wrapper, such as flashddp, can do without"
            )

    def no_sync(self) -> Any:  # a context manager
        """In the block, forward and backward passes only add up gradients on this rank."""
        return self.inner[0].no_sync() if self.inner else contextlib.nullcontext()
