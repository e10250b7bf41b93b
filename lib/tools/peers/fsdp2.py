"""ZeRO stage 3 by PyTorch's FSDP2, `fully_shard`: ranks share weights, gradients and state.

A rank holds its rows of each parameter, and the whole of a block only while it computes with it
(Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lib.ddp.process_group import broadcast_module, current_device, rank, reduce_scatter, world_size
from lib.sharded_optimizer.shards import Shard, make_shard

if TYPE_CHECKING:
    from lib.model.transformer import MeanLoss


class FullySharded(nn.Module):
    """A model's loss whose parameters `fully_shard` divides among ranks, as `FSDP` does.

    The matrices of a block are gathered together, just before it runs and again in backward, in
    the dtype of the matmuls. Embeddings, head and all norms stay whole from the start of forward
    to the end of backward: norms because a block's last kernel reads the next block's.

    Raises:
        ValueError: models differ between ranks, or the group's backend cannot average.
    """

    def __init__(self, loss: MeanLoss, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        _check_average(group)
        broadcast_module(loss, group)
        mesh = DeviceMesh.from_group(group or dist.group.WORLD, current_device(group).type)
        # weights and gradients are rounded as by autocast; the mean is taken in float32
        policy = MixedPrecisionPolicy(loss.dtype, torch.float32, cast_forward_inputs=False)
        has_vectors = loss.model.config.qk_norm
        for layer in loss.model.layers:
            options: dict = {"mp_policy": policy} if loss.dtype and not has_vectors else {}
            parts: list[Any] = [layer.attn, layer.ffn]
            fully_shard(parts, mesh=mesh, **options)
        # fully_shard changes the class of `loss`, to a mix of its own and FSDPModule
        self.module: Any = fully_shard(loss, mesh=mesh)
        # this rank's rows of each parameter, which an optimizer updates
        self.shards: list[Shard] = []

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The module's loss."""
        loss = self.module(inputs, targets)
        if not torch.is_grad_enabled():
            # what would stay whole for backward
            self.module.reshard()
        return loss

    def shards_of(self, params: list[nn.Parameter], first: int) -> list[Shard]:
        """This rank's rows of parameters, numbered from `first`; assigned as by `torch.chunk`.

        Raises:
            ValueError: a parameter is not sharded.
        """
        added = []
        for number, param in enumerate(params, start=first):
            if not isinstance(param, DTensor):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} must be sharded by fully_shard "
                    "before the optimizer is created"
                )
            weight = param.to_local().detach().view(-1)  # (rows · elements of a row,)
            if weight.numel():
                rows = -(-param.shape[0] // param.device_mesh.size())
                start = rank(self.group) * rows * math.prod(param.shape[1:])
                added.append(make_shard(param, number, start, start + weight.numel(), weight))
        self.shards += added
        return added

    def finish_gradient_synchronization(self) -> None:
        """Move the gradients, which FSDP2 has averaged in backward, into the shards.

        They are added to those that are there already. Called again, it changes nothing.
        """
        for shard in self.shards:
            grad: Any
            grad, shard.param.grad = shard.param.grad, None
            if grad is not None:
                part, before = grad.to_local().view(shard.leaf.shape), shard.leaf.grad
                shard.leaf.grad = part if before is None else before + part

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In the block, backward passes only add up gradients, whole ones, on this rank."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def whole_parameters(self) -> list[nn.Parameter]:
        """All parameters, as `FSDP.whole_parameters`."""
        return list(self.module.parameters())

    def full_parameters(self, *, on_first_only: bool) -> dict[str, Tensor]:
        """Copies of the whole parameters by the module's names, on CPUs, gathered one by one.

        Args:
            on_first_only: other ranks than the first get none.
        """
        found = {}
        for name, tensor in self.module.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank(self.group) == 0 or not on_first_only:
                found[name] = whole.to("cpu", copy=True)
        return found


def _check_average(group: dist.ProcessGroup | None) -> None:
    """Refuse a backend that cannot average in a reduce-scatter, as FSDP2 does; on all ranks alike.

    gloo refuses the operation in some releases, and returns the sum in others.
    """
    ranks, device = world_size(group), current_device(group)
    mean, ones = torch.zeros(1, device=device), torch.ones(ranks, device=device)
    problem, cause = "", None
    try:
        reduce_scatter(mean, ones, op=dist.ReduceOp.AVG, group=group)
    except (RuntimeError, ValueError) as error:
        problem, cause = str(error), error
    if not cause and abs(mean.item() - 1) > 1e-3:
        problem = f"the mean of ones is {mean.item():g}"
    if problem:
        raise ValueError(
            f"ddp_wrapper must not be 'fsdp2' here: {dist.get_backend(group)} of PyTorch "
            f"{torch.__version__} cannot average gradients ({problem}); use nccl, a newer "
            "PyTorch or another wrapper"
        ) from cause
