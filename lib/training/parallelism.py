"""The work of a `TrainConfig` on several ranks: who averages gradients, who holds which state.

`ddp_wrapper` and `sharded_optimizer` together mean, on several ranks:

- a wrapper of `lib.ddp.wrappers` alone: it averages gradients, and every rank holds all of AdamW;
- a wrapper with `zero1`: the wrapper averages, and only the optimizer's state is sharded;
- a wrapper with `torch_zero`: the same by PyTorch's ZeroRedundancyOptimizer, the peer;
- `none` with `zero1`: ZeRO stage 1 on flat slices averages gradients itself, during backward, and
  gathers the parameters under the next forward pass;
- `fsdp`: parameters and gradients are sharded too (`lib.fsdp`);
- `fsdp2`: the same by PyTorch's fully_shard (`lib.peers.fsdp2`), the peer.

A single rank has the plain optimizer in any case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp.process_group import broadcast_module, world_size
from lib.ddp.settings import default_bucket_cap_mb
from lib.ddp.wrappers import wrap
from lib.optimizer.adamw import AdamW
from lib.training.config import TrainConfig

if TYPE_CHECKING:
    from lib.model.transformer import MeanLoss
    from lib.peers.torch_zero import TorchZero
    from lib.sharded_optimizer.optimizer import ShardedOptimizer
    from lib.sharded_optimizer.shards import ShardingStrategy

# Wrappers that average gradients while backward computes others; with "none" zero1 does so.
OVERLAPPING = ("none", "overlap", "flashddp", "torch_ddp", "fsdp", "fsdp2")
# Those that also shard parameters, gradients and the optimizer's state.
FULLY_SHARDED = ("fsdp", "fsdp2")
# Options that exclude each other on several ranks: (field, value) -> options, and a value that
# works with them.
EXCLUDED = {
    ("ddp_wrapper", "torch_ddp"): (("cuda_graph",), "flashddp"),
    ("ddp_wrapper", "fsdp2"): (("cuda_graph", "low_precision_weights"), "flashddp"),
    ("sharded_optimizer", "torch_zero"): (("cuda_graph", "low_precision_weights"), "zero1"),
}


def check_wrapper(config: TrainConfig, num_ranks: int) -> None:
    """Refuse settings that can't be combined on this many ranks."""
    if num_ranks == 1:
        return
    if config.ddp_wrapper == "none" and config.sharded_optimizer != "zero1":
        raise ValueError(
            f"ddp_wrapper must be another one than 'none' on {num_ranks} ranks, such as flashddp, "
            "unless sharded_optimizer is zero1: nothing would average gradients"
        )
    if config.ddp_wrapper == "none" and config.zero1_strategy == "parameters":
        raise ValueError(
            "zero1_strategy must be 'flat' with ddp_wrapper 'none', got 'parameters', which "
            "leaves averaging gradients to a wrapper"
        )
    for (field, value), (options, alternative) in EXCLUDED.items():
        for option in options:
            if getattr(config, field) == value and getattr(config, option):
                raise ValueError(
                    f"{option} must be False with {field} {value!r} on {num_ranks} ranks, got "
                    f"True; {field} {alternative} can do it"
                )


def parallelize(
    loss: MeanLoss, config: TrainConfig, lr: Tensor, group: dist.ProcessGroup | None
) -> tuple[nn.Module, AdamW | ShardedOptimizer | TorchZero]:
    """Wrap the loss in a module that averages its gradients, and make the optimizer of its model.

    All ranks get the weights of the group's rank 0.

    Args:
        lr: the learning rate, a 0-dim tensor that the caller fills before each step.

    Raises:
        ValueError: models or settings differ between ranks.
    """
    name, model = config.ddp_wrapper, loss.model
    if world_size(group) == 1:
        # all wrappers do nothing here; those that shard the model are not among them
        name = "none" if name in FULLY_SHARDED else name
        parallel = wrap(name, loss, group=group)
        return parallel, make_optimizer(list(model.parameters()), config, lr, group)
    if name == "fsdp":
        from lib.fsdp.language_model import FSDPShards, ShardedLoss

        sharded = ShardedLoss(loss, group)
        shards = FSDPShards(sharded)
        return sharded, make_optimizer(shards.whole_parameters(), config, lr, group, shards)
    if name == "fsdp2":
        from lib.peers.fsdp2 import FullySharded, FullyShardedParameters

        fully_sharded = FullySharded(loss, group)
        rows = FullyShardedParameters(group)
        return fully_sharded, make_optimizer(list(model.parameters()), config, lr, group, rows)
    # not before: whole parameters that FSDP has divided are freed
    params = list(model.parameters())
    if name == "none":
        broadcast_module(loss, group)
        optimizer: Any = make_optimizer(params, config, lr, group)
        # The all-gather of later parts runs while earlier ones compute. The norms, which have a
        # bucket of their own, are complete when the optimizer's step returns.
        parts = [model.token_embeddings, *model.layers, model.head]
        model.before_part = optimizer.overlap_gather_with_forward(parts, in_graph=config.cuda_graph)
        return AveragedByOptimizer(loss, optimizer), optimizer
    parallel = wrap(name, loss, group=group, bucket_cap_mb=_bucket_cap_mb(config, params))
    return parallel, make_optimizer(params, config, lr, group)


def make_optimizer(
    params: list[nn.Parameter],
    config: TrainConfig,
    lr: Tensor,
    group: dist.ProcessGroup | None,
    strategy: ShardingStrategy | None = None,
) -> AdamW | ShardedOptimizer | TorchZero:
    """AdamW over `params`, its state sharded over `group` as `config` says.

    Args:
        strategy: of parameters that `lib.fsdp` has divided.
    """
    settings = config.optimizer
    # weight decay for matrices only
    matrices = [param for param in params if param.ndim >= 2]
    vectors = [param for param in params if param.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (settings.beta1, settings.beta2)
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": settings.eps}
    is_whole = strategy is None and config.sharded_optimizer == "none"
    if world_size(group) == 1 or is_whole:
        return AdamW(groups, **options)
    if config.sharded_optimizer == "torch_zero":
        from lib.peers.torch_zero import TorchZero

        return TorchZero(groups, AdamW, process_group=group, **options)
    # imported here since a single process needs none of it
    from lib.sharded_optimizer.optimizer import ShardedOptimizer

    if strategy is not None:
        return ShardedOptimizer(groups, AdamW, group=group, strategy=strategy, **options)
    reduces_gradients = config.ddp_wrapper == "none"
    return ShardedOptimizer(
        groups,
        AdamW,
        group=group,
        strategy=config.zero1_strategy,
        reduces_gradients=reduces_gradients,
        overlap=reduces_gradients,
        bucket_cap_mb=_bucket_cap_mb(config, params),
        **options,
    )


def _bucket_cap_mb(config: TrainConfig, params: list[nn.Parameter]) -> float:
    trained_bytes = (param.nbytes for param in params if param.requires_grad)
    return config.bucket_size_mb or default_bucket_cap_mb(sum(trained_bytes))


class EvaluatedTogether:
    """A fully sharded model for `evaluate`: a forward pass gathers a block at a time.

    All ranks call it together, as often.
    """

    def __init__(self, loss: MeanLoss, parallel: nn.Module) -> None:
        self.config, self.parallel = loss.model.config, parallel

    def modules(self) -> Iterator[nn.Module]:
        """All modules, with the wrapper's."""
        return self.parallel.modules()

    def eval(self) -> None:
        """Evaluate from here on; the loss has no z-loss then."""
        self.parallel.eval()

    def loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of this rank's tokens, (batch, length) int64."""
        return self.parallel(token_ids, targets)


class AveragedByOptimizer(nn.Module):
    """A module whose sharded optimizer averages its gradients, with the interface of a wrapper."""

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer) -> None:
        super().__init__()
        self.module, self.optimizer = module, optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Wait for the reduce-scatters, and give each shard its averaged gradient."""
        self.optimizer.finish_gradient_synchronization()

    def no_sync(self) -> contextlib.AbstractContextManager:
        """In the block, backward passes only add up gradients on this rank."""
        return self.optimizer.no_sync()
