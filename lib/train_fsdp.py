"""Training with PyTorch's FSDP2, `fully_shard`: ranks share weights, gradients and state.

What ZeRO calls stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3): a rank holds its
rows of each parameter, and the whole of a block only while it computes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lib.distributed import broadcast_module, current_device, rank, reduce_scatter, world_size
from lib.model import TransformerLM

if TYPE_CHECKING:
    from lib.train_step import MeanLoss


class FullySharded(nn.Module):
    """A model's loss whose parameters `fully_shard` divides among ranks.

    The matrices of a block are gathered together, just before it runs, and again in backward, in
    the dtype of matrix products. The rest stays whole from the start of forward to the end of
    backward: embeddings, head, and all norms, since a block's last kernel reads the next one's.

    Raises:
        ValueError: models differ between ranks, or the group's backend cannot average.
    """

    def __init__(self, loss: MeanLoss, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        _check_average(group)
        broadcast_module(loss, group)
        mesh = DeviceMesh.from_group(group or dist.group.WORLD, current_device(group).type)
        # rounded weights and gradients are those of autocast; the mean is taken in float32
        policy = MixedPrecisionPolicy(loss.dtype, torch.float32, cast_forward_inputs=False)
        has_vectors = loss.model.config.qk_norm
        for layer in loss.model.layers:
            options = {"mp_policy": policy} if loss.dtype and not has_vectors else {}
            fully_shard([layer.attn, layer.ffn], mesh=mesh, **options)
        self.module = fully_shard(loss, mesh=mesh)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, as the module gives it."""
        return self.module(inputs, targets)

    def finish_gradient_synchronization(self) -> None:
        """Nothing is left to do after backward."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In the block, backward passes only add up gradients, whole ones, on this rank."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def whole_model(self) -> TransformerLM:
        """A copy that every rank holds all of; all ranks call it.

        Its forward passes send nothing, so that ranks need not run equally many.
        """
        model = self.module.model
        copy = TransformerLM(model.config, device=self.module.device, draw=False)
        with torch.no_grad():
            for own, param in zip(copy.parameters(), model.parameters()):
                own.copy_(param.full_tensor())
        return copy

    def whole_state_dict(self) -> dict[str, Tensor]:
        """The model's on rank 0, put together on its CPU tensor by tensor; nothing elsewhere."""
        found = {}
        for name, tensor in self.module.model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank(self.group) == 0:
                found[name] = whole.cpu()
        return found


def _check_average(group: dist.ProcessGroup | None) -> None:
    """Refuse a backend that cannot do what FSDP2 does with gradients; on all ranks alike.

    Some releases' gloo refuses the operation, and some give the sum in place of the mean.
    """
    ranks, device = world_size(group), current_device(group)
    mean, ones = torch.zeros(1, device=device), torch.ones(ranks, device=device)
    problem, cause = "", None
    try:
        reduce_scatter(mean, ones, op=dist.ReduceOp.AVG, group=group)
    except (RuntimeError, ValueError) as error:
        problem, cause = str(error), error
    if not cause and abs(mean.item() - 1) > 1e-3:
        problem = f"it says that the mean of ones is {mean.item():g}"
    if problem:
        raise ValueError(
            f"ddp_wrapper is 'fsdp2', but {dist.get_backend(group)} of PyTorch "
            f"{torch.__version__} cannot average gradients ({problem}); right is: nccl, a newer "
            "PyTorch, or another wrapper"
        ) from cause
