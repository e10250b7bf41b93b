"""Parameters of a block in one flat buffer, of which each rank holds a slice between uses.

Matrices of 6 and 10 elements on two ranks, each with a slice of 16; `.` aligns starts to 16 bytes:

    whole        | a a a a a a . . b b b b b b b b | b b . . . . . . . . . . . . . . |
    rank 0       | a a a a a a . . b b b b b b b b |
    rank 1                                         | b b . . . . . . . . . . . . . . |

all-gather: slices → whole, in the dtype of computation; reduce-scatter: whole gradients → mean of a
slice. Parameters are views of the gathered buffer, so that nothing is copied after an all-gather.

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
from lib.fsdp.stand_ins import Gathered, StandIn, stand_in_for

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
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        places: list[Places],
        group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.names, self.shards = list(named), list(named.values())
        self.shapes = [param.shape for param in self.shards]
        self.places, self.group, self.compute_dtype = places, group, compute_dtype
        self.ranks = world_size(group)
        self.is_trained = any(param.requires_grad for param in self.shards)
        self.setters = [
            (_setter(module), name, index)
            for index, found in enumerate(places)
            for module, name in found
        ]

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
        """Make the gathered buffer and its views, both without memory between uses."""
        own = self.slice.dtype
        dtype = self.compute_dtype if own.is_floating_point and self.compute_dtype else own
        # gradients are sums: in float32, or in the parameter's dtype if that has more digits
        is_narrow = own.is_floating_point and own.itemsize < 4
        self.grad_dtype = torch.float32 if is_narrow else own
        self.buffer = self.slice.new_empty(self.ranks * self.slice_length, dtype=dtype)
        self.whole = [
            Gathered(self._view(self.buffer, i), requires_grad=shard.requires_grad)
            for i, shard in enumerate(self.shards)
        ]
        self.stand_ins: list[StandIn] = [stand_in_for(whole) for whole in self.whole]
        self.num_bytes = self.buffer.untyped_storage().nbytes()
        self.buffer.untyped_storage().resize_(0)
        self.is_gathered = self.is_in_pass = False
        self.gathering: Any = None
        # of the shards when they were gathered last, and what the buffer's own is but for changes
        self.shards_version, self.buffer_version = -1, self.buffer._version

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
        for shard, whole in zip(self.shards, self.whole):
            if whole.requires_grad != shard.requires_grad:
                whole.requires_grad_(shard.requires_grad)
                self.is_trained = any(shard.requires_grad for shard in self.shards)

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
    def gathered(self) -> list[Tensor]:
        """Copies of the whole parameters, in their own dtype; on all ranks."""
        flat = self.slice
        if self.ranks > 1:
            flat = self.slice.new_empty(self.ranks * self.slice_length)
            all_gather(as_sent(flat), as_sent(self.slice), group=self.group)
        return [self._view(flat, i).clone() for i in range(len(self.shards))]

    # Parameters: gathered before forward and backward, released after

    def show(self, *, in_pass: bool) -> None:
        """Let the model have whole parameters or their stand-ins in a pass, else the shards."""
        self.is_in_pass = in_pass
        is_ready = self.is_gathered and self.gathering is None
        self._use(self.whole if in_pass and is_ready else self._resting())

    def _resting(self) -> list[Any]:
        return self.stand_ins if self.is_in_pass else self.shards

    def _use(self, params: list[Any]) -> None:
        for set_parameter, name, index in self.setters:
            set_parameter(name, params[index])

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Start the all-gather, unless the parameters are there or on their way."""
        if self.is_gathered:
            return
        self.is_gathered = True
        self.buffer.untyped_storage().resize_(self.num_bytes)
        self.notice_updates()
        # `.data`: autograd must not notice that memory which it saved is filled again
        buffer, sent = self.buffer.data, self.slice.to(self.buffer.dtype)
        if self.ranks == 1:
            buffer.copy_(sent)
            return
        with annotate("all-gather"):
            work = all_gather(as_sent(buffer), as_sent(sent), group=self.group, async_op=True)
        # what is sent lives until it has arrived
        self.gathering = work, sent

    def notice_updates(self) -> None:
        """Let autograd notice that the shards are not those anymore which an older graph saved."""
        version = sum(shard._version for shard in self.shards)
        if version != self.shards_version:
            self.shards_version = version
            torch.autograd.graph.increment_version(self.buffer)
            self.buffer_version += 1

    def finish_gathering(self) -> None:
        """Wait for the all-gather (on a GPU only its stream waits), and let the model have it."""
        self._use(self.whole)
        self.start_gathering()
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def release(self) -> None:
        """Free the gathered parameters; autograd's references stay, to be filled again.

        Raises:
            RuntimeError: they were changed in place, which would be lost.
        """
        if self.is_gathered:
            if self.gathering is not None:
                self.finish_gathering()
            self._use(self._resting())
            self.buffer.untyped_storage().resize_(0)
            self.is_gathered = False
            if self.buffer._version != self.buffer_version:
                raise RuntimeError(
                    f"a forward pass changed one of {', '.join(self.names)} in place, in memory "
                    "that is gathered for the pass alone; change parameters between steps"
                )

    # Gradients: reduce-scattered when backward has passed the block

    @torch.no_grad()
    def take_gradients(self, *, send: bool) -> None:
        """Move the whole gradients into one flat tensor, and send it or keep it for later."""
        grads = {i: whole.grad for i, whole in enumerate(self.whole) if whole.grad is not None}
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
            self.added = make(len(self.buffer), dtype=self.grad_dtype, device=self.slice.device)
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


def _setter(module: nn.Module) -> Callable[[str, Any], Any]:
    """Return a function that sets a module's parameter, quickly where nothing depends on it."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        return module._parameters.__setitem__
    is_recurrent = isinstance(module, nn.RNNBase)
    return functools.partial(_set_recurrent if is_recurrent else setattr, module)


def _set_recurrent(module: Any, name: str, param: Any) -> None:
    """Set a parameter of a module that holds them twice, and moves those that it finds changed."""
    setattr(module, name, param)
    module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in module._flat_weights]


def as_real(flat: Tensor) -> Tensor:
    """A view of a 1-dim tensor in a dtype that every backend adds up."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
