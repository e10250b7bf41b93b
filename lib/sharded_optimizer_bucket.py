"""Buckets of the flat strategy: buffers that parameters are views of, and what is sent of them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp_buckets import ALIGNMENT, has_average
from lib.distributed import all_gather, rank, reduce_scatter, world_size
from lib.sharded_optimizer_parts import Shard, make_shard


class FlatBucket:
    """Parameters of one dtype and device that become views of one buffer, and its slices.

    Each begins at a multiple of 16 bytes, and slices are as long as one another, so there are gaps
    of zeros between the parameters and at the end, which belong to no shard.
    """

    def __init__(self, params: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.params, self.group = params, group
        step = max(1, ALIGNMENT // params[0].element_size())
        self.lengths = [-(-param.numel() // step) * step for param in params]
        self.starts = [0, *itertools.accumulate(self.lengths)]
        ranks, here = world_size(group), rank(group)
        self.slice_length = -(-self.starts[-1] // (step * ranks)) * step
        self.begin = here * self.slice_length
        # zeros behind each parameter, and at the end; None where there are none anywhere
        gaps = [length - param.numel() for param, length in zip(params, self.lengths)]
        gaps[-1] += ranks * self.slice_length - self.starts[-1]
        zeros = params[0].detach().new_zeros(max(gaps))
        self.gaps = [zeros[:gap] for gap in gaps] if any(gaps) else None
        self.flat = self._packed([param.detach() for param in params])
        for param, place in zip(params, self.starts):
            param.data = self.flat[place : place + param.numel()].view(param.shape)
        self.addresses = [param.data_ptr() for param in params]
        # this rank's parts, and where each begins in its slice
        self.shards: list[Shard] = []
        self.shard_starts: list[int] = []
        # the parameters whose gradients came in backward, and of how many that is expected
        self.arrived: set[int] = set()
        self.num_expected = 0
        # those that were trained at the last reduction: ranks know alike which that were
        self.were_trained = {id(param) for param in params if param.requires_grad}
        # the parameters without a gradient when the others were sent
        self.absent: list[nn.Parameter] = []
        # whether shards have gradients, on whichever ranks
        self.has_means = False
        self.sent: Tensor | None = None
        self.mean: Tensor | None = None
        self.reduction: Any = None
        self.gathering: Any = None

    def make_shards(self, numbers: dict[int, int], *, master_weights: bool) -> list[Shard]:
        """This rank's part of each parameter; `numbers` has their places by id."""
        for param, place in zip(self.params, self.starts):
            start = max(0, self.begin - place)
            stop = min(param.numel(), self.begin + self.slice_length - place)
            if start < stop:
                weight = self.flat[place + start : place + stop]
                number = numbers[id(param)]
                shard = make_shard(
                    param, number, start, stop, weight, master_weights=master_weights
                )
                self.shards.append(shard)
                self.shard_starts.append(place + start - self.begin)
        return self.shards

    @property
    def is_trained(self) -> bool:
        # one that was frozen since is still updated where it has a gradient
        used = (param.requires_grad or param.grad is not None for param in self.params)
        return self.has_means or bool(self.were_trained) or any(used)

    @property
    def is_full(self) -> bool:
        # never one that was frozen when the hooks were made
        return 0 < self.num_expected == len(self.arrived)

    def check_places(self) -> None:
        """Raise a `RuntimeError` where a parameter has left the buffer."""
        for param, address in zip(self.params, self.addresses):
            if param.data_ptr() != address:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} was given other memory after the "
                    "optimizer was made, as by module.to(); right is: move and convert before"
                )

    def start_reduction(self) -> None:
        """Send off the gradients, which are taken from the parameters."""
        grads, absent = [], []
        for param in self.params:
            grad = param.grad
            if grad is None:
                absent.append(param)
                grad = torch.zeros_like(param)
            elif grad.layout != torch.strided:
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(param.shape)} is {grad.layout}; "
                    "right is: dense, as with sparse=False"
                )
            grads.append(grad.detach())
        self.absent, self.sent = absent, self._packed(grads)
        del grad, grads
        for param in self.params:
            param.grad = None
        self.mean = self.sent.new_empty(self.slice_length)
        op = dist.ReduceOp.AVG if has_average(self.sent, self.group) else dist.ReduceOp.SUM
        self.reduction = reduce_scatter(
            self.mean, self.sent, op=op, group=self.group, async_op=True
        )

    def free_sent(self) -> None:
        """Wait until the mean is there, on a GPU as its next kernel, and free what was sent."""
        if self.sent is not None:
            self.reduction.wait()
            self.sent = None

    def finish_reduction(self, unused: set[int]) -> None:
        """Add the mean gradients to those of the shards, but for parameters that no rank used."""
        self.free_sent()
        if not has_average(self.mean, self.group):
            self.mean.div_(world_size(self.group))
        for shard, start in zip(self.shards, self.shard_starts):
            if id(shard.param) not in unused:
                grad = self.mean[start : start + shard.stop - shard.start].view_as(shard.weight)
                shard.grad = grad if shard.grad is None else shard.grad.add_(grad)
        self.has_means |= not unused or any(id(param) not in unused for param in self.params)
        self.mean = self.reduction = None
        self.arrived.clear()

    def start_gathering(self) -> None:
        mine = self.flat[self.begin : self.begin + self.slice_length]
        self.gathering = all_gather(self.flat, mine, group=self.group, async_op=True)

    def finish_gathering(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def _packed(self, tensors: list[Tensor]) -> Tensor:
        """The tensors and the gaps behind them in one buffer; the tensor itself if that is all."""
        if len(tensors) == 1 and not self.gaps and tensors[0].is_contiguous():
            return tensors[0].view(-1)
        pieces = [tensor.reshape(-1) for tensor in tensors]
        if self.gaps:
            pieces = [piece for pair in zip(pieces, self.gaps) for piece in pair]
        return torch.cat(pieces)
