"""Parameters of a block in one flat buffer, of which each rank holds a slice between uses.

Matrices of 6 and 10 elements on two ranks, each with a slice of 16; `.` aligns starts to 16 bytes:

    whole        | a a a a a a . . b b b b b b b b | b b . . . . . . . . . . . . . . |
    rank 0       | a a a a a a . . b b b b b b b b |
    rank 1                                         | b b . . . . . . . . . . . . . . |

all-gather: slices → whole, in the dtype of computation; reduce-scatter: whole gradients → mean of a
slice. Parameters are views of the gathered buffer, so that nothing is copied after an all-gather.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.ranges import annotate
from lib.ddp.buckets import ALIGNMENT, has_average
from lib.ddp.process_group import all_gather, rank, reduce_scatter, world_size

# A parameter's places in the model: tied ones have several.
Places = list[tuple[nn.Module, str]]


class FlatParameters:
    """Parameters of one dtype, all trained or all frozen, that are gathered together.

    Args:
        named: parameters by name, of one device.
        places: where each is found in the model.
        compute_dtype: of the gathered parameters, and so of what is sent.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        places: list[Places],
        group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype,
    ) -> None:
        self.names, params = list(named), list(named.values())
        self.places, self.group = places, group
        self.ranks, self.is_trained = world_size(group), params[0].requires_grad

        # layout, in elements: parameters, then equal slices
        step = ALIGNMENT // min(2, params[0].element_size())
        lengths = [-(-param.numel() // step) * step for param in params]
        self.starts = [0, *itertools.accumulate(lengths)][:-1]
        self.slice_length = -(-sum(lengths) // (step * self.ranks)) * step
        self.begin = rank(group) * self.slice_length

        # this rank's slice, and the part of each parameter in it, which the optimizer updates
        self.slice = params[0].detach().new_zeros(self.slice_length)
        self.ranges = [self._range(i, param.numel()) for i, param in enumerate(params)]
        self.shards = [
            nn.Parameter(self._of_slice(self.slice, i), requires_grad=self.is_trained)
            for i in range(len(params))
        ]
        for index, param in enumerate(params):
            self.set_whole(index, param.detach())

        # the gathered buffer, and its views; both without memory between uses
        self.buffer = self.slice.new_empty(self.ranks * self.slice_length, dtype=compute_dtype)
        self.whole = [
            nn.Parameter(self._view(self.buffer, i, param.shape), requires_grad=self.is_trained)
            for i, param in enumerate(params)
        ]
        self.num_bytes = self.buffer.untyped_storage().nbytes()
        self.buffer.untyped_storage().resize_(0)
        self.is_gathered = False
        self.gathering: Any = None

        # whole gradients that were added up without being sent, and those that are being sent
        self.added: Tensor | None = None
        self.seen: set[int] = set()
        self.reducing: Any = None

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

    def _view(self, flat: Tensor, index: int, shape: torch.Size) -> Tensor:
        start = self.starts[index]
        return flat[start : start + shape.numel()].view(shape)

    @torch.no_grad()
    def set_whole(self, index: int, value: Tensor) -> None:
        """Keep this rank's part of a whole parameter."""
        start, stop = self.ranges[index]
        self.shards[index].copy_(value.reshape(-1)[start:stop])

    # Parameters: gathered before forward and backward, released after

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Start the all-gather, unless the parameters are there or on their way."""
        if self.is_gathered:
            return
        self.is_gathered = True
        self.buffer.untyped_storage().resize_(self.num_bytes)
        # `.data`: autograd must not notice that memory which it saved is filled again
        buffer, sent = self.buffer.data, self.slice.to(self.buffer.dtype)
        if self.ranks == 1:
            buffer.copy_(sent)
            return
        with annotate("all-gather"):
            work = all_gather(buffer, sent, group=self.group, async_op=True)
        # what is sent lives until it has arrived
        self.gathering = work, sent

    def finish_gathering(self) -> None:
        """Wait for the all-gather (on a GPU only its stream waits), and let the model have it."""
        self.use(self.whole)
        self.start_gathering()
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def release(self) -> None:
        """Free the gathered parameters; autograd's references stay, to be filled again."""
        if self.is_gathered:
            if self.gathering is not None:
                self.finish_gathering()
            self.use(self.shards)
            self.buffer.untyped_storage().resize_(0)
            self.is_gathered = False

    def use(self, params: list[nn.Parameter]) -> None:
        """Let the model have `params`: the whole ones, or the shards."""
        for param, places in zip(params, self.places):
            for module, name in places:
                module._parameters[name] = param

    @torch.no_grad()
    def gathered(self) -> list[Tensor]:
        """Copies of the whole parameters, in their own dtype; on all ranks."""
        flat = self.slice
        if self.ranks > 1:
            flat = self.slice.new_empty(self.ranks * self.slice_length)
            all_gather(flat, self.slice, group=self.group)
        return [self._view(flat, i, whole.shape).clone() for i, whole in enumerate(self.whole)]

    # Gradients: reduce-scattered when backward has passed the block

    @torch.no_grad()
    def take_gradients(self, *, send: bool) -> None:
        """Move the whole gradients into one flat tensor, and send it or keep it for later."""
        grads = {i: whole.grad for i, whole in enumerate(self.whole) if whole.grad is not None}
        self.seen |= grads.keys()
        add = self.added is not None
        if self.added is None and (grads or send):
            # zeros for parameters without a gradient
            make = torch.empty if len(grads) == len(self.whole) else torch.zeros
            self.added = make(len(self.buffer), dtype=torch.float32, device=self.slice.device)
        if grads:
            views = [self._view(self.added, i, grad.shape) for i, grad in grads.items()]
            (torch._foreach_add_ if add else torch._foreach_copy_)(views, list(grads.values()))
            for whole in self.whole:
                whole.grad = None
        if send:
            self._start_reducing(self.added)
            self.added = None

    def _start_reducing(self, flat: Any) -> None:
        mean = flat[: self.slice_length].clone() if self.ranks == 1 else None
        work, is_mean = None, True
        if mean is None:
            mean, is_mean = flat.new_empty(self.slice_length), has_average(flat, self.group)
            op = dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM
            with annotate("reduce-scatter"):
                work = reduce_scatter(mean, flat, op=op, group=self.group, async_op=True)
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
            shard.grad = part if shard.grad is None else shard.grad + part

    def drop_gradients(self) -> None:
        """Forget whole gradients that were not sent."""
        self.added = None
        self.seen.clear()
        for whole in self.whole:
            whole.grad = None
