"""What the data-parallel wrappers share: forward, hooks on parameters, and their contract."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp_buckets import GradientSync, MeanReduction
from lib.distributed import broadcast_module, check_same, world_size
from lib.profiling import annotate


class Wrapper(nn.Module):
    """A module around another one, `module`, whose state is that of the other."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """That of the module, under its names, compiled or not."""
        return inner_module(self.module).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module; every rank must load the same."""
        return inner_module(self.module).load_state_dict(*args, **kwargs)


class DataParallel(GradientSync, Wrapper):
    """What the wrappers share; alone, the wrapper `none` of a single rank.

    Parameters and buffers start as those of the group's rank 0. Buffers that change in training
    (batch norm's) stay each rank's own. On a single rank nothing is hooked and nothing costs.

    Elsewhere backward raises where a gradient is sparse, or grows after it was given away, naming
    the parameter. An exception in backward must be handled, or not, on all ranks alike; the next
    forward pass first ends what was begun.

    Args:
        module: on its device, in its dtype, with the parameters frozen that stay so.
        group: the ranks that share the work; all by default.
        reduce_dtype: what gradients are sent in, such as torch.bfloat16 for half the bytes of
            float32; their own dtype by default.

    Raises:
        ValueError: module or settings differ between ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module, self.group, self.reduce_dtype = module, group, reduce_dtype
        named = list(inner_module(module).named_parameters())
        self.names = [name for name, param in named if param.requires_grad]
        self.params = [param for _, param in named if param.requires_grad]
        self.frozen = [(name, param) for name, param in named if not param.requires_grad]
        # gradients that are there since the last synchronization, in order of arrival
        self.arrived: dict[int, None] = {}
        self.is_in_backward = False
        if world_size(group) > 1:
            facts = {"ddp_wrapper": type(self).__name__, "reduce_dtype": str(reduce_dtype)}
            check_same(facts, group)
            broadcast_module(module, group)
            self._register_hooks()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns.

        Raises:
            RuntimeError: the gradients of the backward pass before were not synchronised.
        """
        if self.arrived:
            if not self.is_in_backward:
                raise RuntimeError(
                    "forward after a backward pass whose gradients were not averaged; right is: "
                    "finish_gradient_synchronization() between backward() and optimizer.step(), "
                    "or no_sync() around all backward passes but the last"
                )
            # An exception ended that backward pass. The ranks may have come to different points of
            # it, and are in step again when all have sent everything.
            self.finish_gradient_synchronization()
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Make every gradient its mean over the ranks; between backward and the optimizer's step.

        Every rank must come here, also one whose backward pass touched no parameter.

        Raises:
            RuntimeError: a parameter was frozen when the module was wrapped and is not now.
        """
        for name, param in self.frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen when the module was wrapped and is trained now; "
                    "right is: wrap again"
                )
        if world_size(self.group) > 1 and self.params:
            with torch.no_grad(), annotate("all-reduce"):
                self._synchronize()
        self.arrived.clear()
        self.is_in_backward = False

    def _synchronize(self) -> None:
        """Make every gradient its mean, in a group of several ranks."""
        raise NotImplementedError(f"{type(self).__name__} averages no gradients")

    def _gradient_arrived(self, index: int) -> None:
        """Called in backward, when the gradient of that parameter is there."""

    def _register_hooks(self) -> None:
        # through a weak reference, so that a module can outlive its wrapper and be wrapped again
        this = weakref.ref(self)
        for index, param in enumerate(self.params):
            hook = functools.partial(_on_gradient, this, index)
            param.register_post_accumulate_grad_hook(hook)

    def _on_gradient(self, index: int) -> None:
        if index in self.arrived:
            raise RuntimeError(
                f"the gradient of {self.names[index]} grew again after it was given to be "
                "averaged; right is: one backward pass before finish_gradient_synchronization(), "
                "and those before it in no_sync()"
            )
        layout = self.params[index].grad.layout
        if layout != torch.strided:
            raise ValueError(
                f"the gradient of {self.names[index]} is {layout}; right is: dense, as with "
                "sparse=False"
            )
        if not self.is_syncing:
            return
        if not self.arrived and not self.is_in_backward:
            self.is_in_backward = True
            # not called where an exception ends the backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        self.arrived[index] = None
        self._gradient_arrived(index)

    def _on_backward_end(self) -> None:
        self.is_in_backward = False

    def _reduce(self, tensors: list[Tensor]) -> MeanReduction:
        return MeanReduction(tensors, self.group, self.reduce_dtype)

    def _fill_in_absent(self) -> list[int]:
        """Give a gradient of zeros to the parameters without one; return which those are."""
        absent = [index for index, param in enumerate(self.params) if param.grad is None]
        for index in absent:
            self.params[index].grad = torch.zeros_like(self.params[index])
        return absent

    def _presence(self, absent: Sequence[int], like: Tensor) -> Tensor:
        """For each parameter 1, or 0 where this rank has no gradient; its mean says who has."""
        presence = like.new_ones(len(self.params))
        for index in absent:
            presence[index] = 0
        return presence

    def _drop_unused(self, absent: list[int], presence: Tensor) -> None:
        """Take the gradients from `absent` away again that no rank has."""
        if absent:
            for index, share in zip(absent, presence[absent].tolist()):
                if share == 0:
                    self.params[index].grad = None


def inner_module(module: nn.Module) -> nn.Module:
    """The module itself, also of one that `torch.compile` wrapped."""
    return getattr(module, "_orig_mod", module)


def _on_gradient(wrapper: Callable[[], DataParallel | None], index: int, param: Tensor) -> None:
    this = wrapper()
    if this is not None:
        this._on_gradient(index)
