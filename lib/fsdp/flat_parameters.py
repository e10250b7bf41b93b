"""Parameters of a block in one flat buffer, of which each rank holds a slice between uses.

Matrices of 6 and 10 elements on two ranks, each with a slice of 16; `.` aligns starts to 16 bytes:

    whole        | a a a a a a . . b b b b b b b b | b b . . . . . . . . . . . . . . |
    rank 0       | a a a a a a . . b b b b b b b b |
    rank 1                                         | b b . . . . . . . . . . . . . . |

all-gather: slices → whole, in the dtype of computation; reduce-scatter: whole gradients → mean of a
slice. Parameters are views of the gathered buffer, so that nothing is copied after an all-gather.
The buffer is new each time. Autograd keeps none of it from forward to backward (`saved`), but a
weight that the caller has kept is whole and right as long as it is kept.

The module's own parameters become the **shards**, this rank's part of each. They alone hold state:
what is gathered is made from them anew in each pass, and freed.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.ranges import annotate
from lib.core.settings import require
from lib.ddp.flat import ALIGNMENT, has_average
from lib.ddp.process_group import (
    all_gather,
    as_sent,
    mark_sharded,
    rank,
    reduce_scatter,
    world_size,
)
from lib.fsdp.stand_ins import WholeParameter, with_gradients_of

# A parameter's places in the model: tied ones have several.
Places = list[tuple[nn.Module, str]]


class Unsent(NamedTuple):
    """The gradient that a shard shows while whole gradients wait to be averaged."""

    grad: Tensor
    version: int

    is_own: bool
    """Whether it is this rank's part of what waits, not a mean of before."""


class FlatParameters:
    """Parameters of one dtype that are gathered together.

    Args:
        named: parameters by name, of one device; they become this rank's shards.
        places: where each is found in the model.
        compute_dtype: of the gathered parameters, and so of what is sent; None: their own.

    Attributes:
        before_forward: called when a parameter is read that is not gathered.
        before_backward: called when backward needs a parameter, or has a gradient of one.
        flat_at: which flat parameters are gathered where, by their storage; shared by all.
    """

    before_forward: Callable[[], None]
    before_backward: Callable[[], None]

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        places: list[Places],
        group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.flat_at: dict[int, FlatParameters] = {}
        self.names, self.shards = list(named), list(named.values())
        self.shapes = [param.shape for param in self.shards]
        self.places, self.group, self.compute_dtype = places, group, compute_dtype
        self.ranks = world_size(group)
        self.is_trained = any(param.requires_grad for param in self.shards)

        # layout, in elements: parameters, then equal slices
        step = ALIGNMENT // min(2, self.shards[0].element_size())
        lengths = [-(-param.numel() // step) * step for param in self.shards]
        self.starts = [0, *itertools.accumulate(lengths)][:-1]
        self.slice_length = -(-sum(lengths) // (step * self.ranks)) * step
        self.begin = rank(group) * self.slice_length
        self.ranges = [self._range(i, param.numel()) for i, param in enumerate(self.shards)]

        # this rank's slice; each parameter becomes its part of it, which the optimizer updates
        parts = [
            param.detach().reshape(-1)[start:stop]
            for param, (start, stop) in zip(self.shards, self.ranges)
        ]
        self._fill_slice(parts)
        for param in self.shards:
            mark_sharded(param)
        self._make_whole()

        # whole gradients that were added up without being sent, and those that are being sent
        self.added: Tensor | None = None
        self.unsent: dict[int, Unsent] = {}
        self.reducing: Any = None
        # parameters with a gradient here since the last synchronization, and those whose shard got
        # one from other ranks alone
        self.seen: set[int] = set()
        self.from_others: set[int] = set()

    def _range(self, index: int, length: int) -> tuple[int, int]:
        """First element of a parameter in this rank's slice, and one past the last."""
        first = self.begin - self.starts[index]
        start, stop = (min(length, max(0, x)) for x in (first, first + self.slice_length))
        return start, stop

    def _of_slice(self, flat: Tensor, index: int) -> Tensor:
        """The elements of a parameter in a tensor of this rank's slice."""
        start, stop = self.ranges[index]
        offset = max(0, self.starts[index] - self.begin) if stop > start else 0
        return flat[offset : offset + stop - start]

    def _view(self, flat: Tensor, index: int) -> Tensor:
        """A parameter in a tensor of all slices, in its own shape."""
        start, shape = self.starts[index], self.shapes[index]
        return flat[start : start + shape.numel()].view(shape)

    @torch.no_grad()
    def _fill_slice(self, parts: list[Tensor]) -> None:
        """Put the shards' elements into a new slice, and make the shards views of it."""
        self.slice = parts[0].new_zeros(self.slice_length)
        for index, (shard, part) in enumerate(zip(self.shards, parts)):
            own = self._of_slice(self.slice, index)
            own.copy_(part)
            shard.data = own
        self.addresses = [shard.data_ptr() for shard in self.shards]

    def _make_whole(self) -> None:
        """Make the whole parameters, which have no memory."""
        own = self.slice.dtype
        self.dtype = self.compute_dtype if own.is_floating_point and self.compute_dtype else own
        # gradients are sums: in float32, or in the parameter's dtype if that has more digits
        is_narrow = own.is_floating_point and own.itemsize < 4
        self.grad_dtype = torch.float32 if is_narrow else own
        self.whole = [WholeParameter(self, i) for i in range(len(self.shards))]
        self.is_gathered = self.is_in_pass = False
        self._forget()

    def _forget(self) -> None:
        """Let go of gathered memory, which lives on if the caller has kept a weight."""
        self.buffer = self.slice.new_empty(0)
        self.gathered: list[Tensor] = []
        self.gathering: Any = None

    # Shards: what a caller may have done to them between passes

    def follow_shards(self) -> None:
        """Take over changes of the shards: new values, `.to(dtype)`, `param.data = …`, freezing.

        Raises:
            RuntimeError: one was replaced in the module, or does not fit the others anymore.
        """
        is_moved = False
        for shard, address, places in zip(self.shards, self.addresses, self.places):
            is_moved |= shard.data_ptr() != address or shard.dtype != self.slice.dtype
            for module, name in places:
                if module._parameters.get(name) is not shard:
                    raise RuntimeError(
                        f"{name} of a {type(module).__name__} was replaced after FSDP had divided "
                        "it; change it by load_state_dict(), or make a new FSDP of a whole module"
                    )
        if is_moved:
            self._follow_data()
        self.is_trained = any(shard.requires_grad for shard in self.shards)
        with torch._C.DisableTorchFunctionSubclass():
            for shard, whole in zip(self.shards, self.whole):
                whole.requires_grad_(shard.requires_grad)

    def _follow_data(self) -> None:
        kinds = {(shard.dtype, shard.device) for shard in self.shards}
        if len(kinds) > 1:
            found = ", ".join(f"{n}: {s.dtype}" for n, s in zip(self.names, self.shards))
            raise RuntimeError(f"parameters of one block must keep one dtype, got {found}")
        for name, shard, (start, stop) in zip(self.names, self.shards, self.ranges):
            if shard.shape != (stop - start,):
                raise RuntimeError(
                    f"{name} must keep the shape of this rank's shard, ({stop - start},), got "
                    f"{tuple(shard.shape)}; whole values are set by load_state_dict()"
                )
        before = self.slice
        self._fill_slice([shard.detach() for shard in self.shards])
        if (before.dtype, before.device) != (self.slice.dtype, self.slice.device):
            self._make_whole()

    @torch.no_grad()
    def copies(self) -> list[Tensor]:
        """Copies of the whole parameters, in their own dtype; on all ranks."""
        flat = self.slice
        if self.ranks > 1:
            flat = self.slice.new_empty(self.ranks * self.slice_length)
            all_gather(as_sent(flat), as_sent(self.slice), group=self.group)
        return [self._view(flat, i).clone() for i in range(len(self.shards))]

    # Parameters: gathered before forward and backward, dropped after

    def show(self, *, in_pass: bool) -> None:
        """Let the model have whole parameters in a pass, else the shards."""
        self.is_in_pass = in_pass
        self._put_into_model()

    def _put_into_model(self) -> None:
        params: list[Any] = (self.gathered or self.whole) if self.is_in_pass else self.shards
        for param, found in zip(params, self.places):
            for module, name in found:
                _put(module, name, param)

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Start the all-gather, unless the parameters are there or on their way."""
        if self.is_gathered:
            return
        self.is_gathered, self.version = True, self.shards_version()
        with torch.inference_mode(False):
            # memory of its own each time: what else refers to the last one may go on
            self.buffer = self.slice.new_empty(self.ranks * self.slice_length, dtype=self.dtype)
        sent = self.slice.to(self.dtype)
        if self.ranks == 1:
            self.buffer.copy_(sent)
            return
        with annotate("all-gather"):
            work = all_gather(as_sent(self.buffer), as_sent(sent), group=self.group, async_op=True)
        # what is sent lives until it has arrived
        self.gathering = work, sent

    def shards_version(self) -> int:
        """A number that grows when a shard is changed in place."""
        return sum(shard._version for shard in self.shards)

    def gather(self) -> None:
        """Wait for the all-gather (on a GPU only its stream waits), and let the model have it."""
        self.start_gathering()
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None
        if not self.gathered:
            buffer = self.buffer.detach()
            views = [self._view(buffer, i) for i in range(len(self.shards))]
            self.gathered = with_gradients_of(self.whole, views)
            self.gathered_version = self.buffer._version
            self.flat_at[self.buffer.untyped_storage()._cdata] = self
            self._put_into_model()

    def drop(self) -> None:
        """Free the gathered parameters.

        Raises:
            RuntimeError: they were changed in place, which would be lost.
        """
        if not self.is_gathered:
            return
        if self.gathering is not None:
            self.gathering[0].wait()
        is_changed = self.gathered and self.buffer._version != self.gathered_version
        self.flat_at.pop(self.buffer.untyped_storage()._cdata, None)
        self.is_gathered = False
        self._forget()
        self._put_into_model()
        if is_changed:
            raise RuntimeError(
                f"a forward pass changed one of {', '.join(self.names)} in place, in memory "
                "that is gathered for the pass alone; change parameters between steps"
            )

    def saved(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What autograd keeps of a gathered parameter or a view of one: how to gather it again."""
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        return functools.partial(self._gathered_again, self.version, tensor.dtype, *layout)

    def _gathered_again(self, version: int, dtype: torch.dtype, *layout: Any) -> Tensor:
        self.before_backward()
        if self.shards_version() != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: one of {', '.join(self.names)} is not as in the forward pass"
            )
        return self.buffer.new_empty(0, dtype=dtype).set_(self.buffer.untyped_storage(), *layout)

    # Gradients: reduce-scattered when backward has passed the block

    @torch.no_grad()
    def take_gradients(self, *, send: bool) -> None:
        """Move the whole gradients into one flat tensor, and send it or keep it for later."""
        grads = {i: grad for i, whole in enumerate(self.whole) if (grad := whole.grad) is not None}
        self._forget_cleared()
        for index, grad in grads.items():
            require(
                grad.layout == torch.strided,
                f"the gradient of {self.names[index]} must be dense (sparse=False), got "
                f"{grad.layout}",
            )
        self.seen |= grads.keys()
        add = self.added is not None
        if self.added is None and (grads or send):
            # zeros for parameters without a gradient
            make = torch.empty if len(grads) == len(self.whole) else torch.zeros
            self.added = make(
                self.ranks * self.slice_length, dtype=self.grad_dtype, device=self.slice.device
            )
        if grads:
            views = [self._view(self.added, i) for i in grads]
            (torch._foreach_add_ if add else torch._foreach_copy_)(views, list(grads.values()))
            for whole in self.whole:
                whole.grad = None
        if send:
            self._start_reducing(self.added)
            self.added = None
        elif self.added is not None:
            self._show_unsent()

    def _show_unsent(self) -> None:
        """Give shards this rank's own gradient, so that clearing it clears what waits."""
        own = self.added[self.begin : self.begin + self.slice_length]  # type: ignore[index]
        for index in self.seen:
            shard, before = self.shards[index], self.unsent.get(index)
            is_own = shard.grad is None or (before is not None and before.is_own)
            if is_own:
                part = self._of_slice(own, index).to(shard.dtype)
                shard.grad = part if part.numel() else part.clone()
            self.unsent[index] = Unsent(shard.grad, shard.grad._version, is_own)

    def _forget_cleared(self) -> None:
        """Drop what waits for parameters whose gradient was cleared or replaced since.

        Raises:
            RuntimeError: one was changed in place.
        """
        changed = [
            index
            for index, (grad, version, _) in self.unsent.items()
            if self.shards[index].grad is not grad or grad._version != version
        ]
        for index in changed:
            grad = self.shards[index].grad
            if grad is not self.unsent[index].grad:
                del self.unsent[index]
                self.seen.discard(index)
            elif grad.any():
                raise RuntimeError(
                    f"the gradient of {self.names[index]} was changed before it was averaged; call "
                    "finish_gradient_synchronization() first"
                )
        for index in changed:
            self._view(self.added, index).zero_()  # type: ignore[arg-type]

    def _start_reducing(self, flat: Any) -> None:
        mean = flat[: self.slice_length].clone() if self.ranks == 1 else None
        work, is_mean = None, True
        if mean is None:
            mean, is_mean = flat.new_empty(self.slice_length), has_average(flat, self.group)
            op = dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM
            with annotate("reduce-scatter"):
                work = reduce_scatter(
                    as_real(mean), as_real(flat), op=op, group=self.group, async_op=True
                )
        # what is sent lives until it has arrived
        self.reducing = work, mean, is_mean, flat

    @torch.no_grad()
    def finish_reducing(self) -> None:
        """Wait for the reduce-scatter, and add the mean to the gradients of the shards."""
        if self.reducing is None:
            return
        work, mean, is_mean, _ = self.reducing
        if work is not None:
            work.wait()
        if not is_mean:
            mean.div_(self.ranks)
        self.reducing = None
        for index, shard in enumerate(self.shards):
            part = self._of_slice(mean, index).to(shard.dtype)
            if not shard.numel():
                # one that nobody clears must not keep the mean's memory
                part = part.clone()
            unsent = self.unsent.pop(index, None)
            is_first = shard.grad is None or (unsent is not None and unsent.is_own)
            if is_first and index not in self.seen:
                self.from_others.add(index)
            shard.grad = part if is_first else shard.grad + part

    def has_gradients(self) -> list[bool]:
        """Which parameters have a gradient of this rank's, or a mean of before."""
        return [
            i in self.seen or (shard.grad is not None and i not in self.from_others)
            for i, shard in enumerate(self.shards)
        ]

    def forget_who_had_gradients(self) -> None:
        """Begin anew, after a synchronization."""
        self.seen.clear()
        self.from_others.clear()

    def drop_gradients(self) -> None:
        """Forget whole gradients that were not sent."""
        for index, (grad, _, is_own) in self.unsent.items():
            if is_own and self.shards[index].grad is grad:
                self.shards[index].grad = None
        self.added = None
        self.unsent.clear()
        self.forget_who_had_gradients()
        for whole in self.whole:
            whole.grad = None


def _put(module: nn.Module, name: str, param: Any) -> None:
    """Put a shard, a whole or a gathered parameter where a module finds its own."""
    module._parameters[name] = param
    if isinstance(module, nn.RNNBase):
        # which holds them twice, and moves those that it finds changed
        module._flat_weights = [module._parameters[own] for own in module._flat_weights_names]
        module._flat_weight_refs = [weakref.ref(weight) for weight in module._flat_weights]


def as_real(flat: Tensor) -> Tensor:
    """A view of a 1-dim tensor in a dtype that every backend adds up."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
