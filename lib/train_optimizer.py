"""AdamW of a training step, whole or sharded, and what averages the gradients that it takes.

On several ranks `ddp_wrapper` and `sharded_optimizer` of a `TrainConfig` mean together:

- `zero1` without a wrapper: ZeRO stage 1 of flat slices averages gradients itself, during backward,
  and puts weights together again under the next forward pass;
- `zero1` with a wrapper: the wrapper averages, and only the optimizer's state is sharded;
- `torch_zero` with a wrapper: the same by PyTorch's ZeroRedundancyOptimizer, the peer;
- `fsdp2`: PyTorch's fully_shard (`lib.train_fsdp`).

A group of one rank has the plain optimizer in any case.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.communication_costs import default_bucket_cap_mb
from lib.config_training import TrainConfig
from lib.ddp import wrap
from lib.distributed import broadcast_module, world_size
from lib.optimizer import AdamW

if TYPE_CHECKING:
    from lib.sharded_optimizer import ShardedOptimizer
    from lib.sharded_optimizer_torch import TorchZero
    from lib.train_step import MeanLoss

# The wrappers that average gradients while backward computes others; zero1 needs none to do so.
OVERLAPPING = ("none", "overlap", "flashddp", "torch_ddp", "fsdp2")


def check_wrapper(config: TrainConfig, num_ranks: int) -> None:
    """Refuse ways to train on so many ranks that do not go together.

    Raises:
        ValueError: nothing would average gradients, `ddp_wrapper` or `sharded_optimizer` cannot do
            what else `config` asks for, or this PyTorch has no FSDP2.
    """
    if num_ranks == 1:
        return
    if config.ddp_wrapper == "none" and config.sharded_optimizer != "zero1":
        raise ValueError(
            f"ddp_wrapper is 'none', but there are {num_ranks} ranks, which would each train a "
            "model of their own; right is: flashddp, another one, or sharded_optimizer zero1"
        )
    if config.ddp_wrapper == "none" and config.zero1_strategy == "parameters":
        raise ValueError(
            "zero1_strategy is 'parameters' and ddp_wrapper 'none', but the owner of a parameter "
            "needs its gradient averaged by others; right is: flat, or a ddp_wrapper"
        )
    if config.ddp_wrapper == "fsdp2":
        try:
            from torch.distributed.fsdp import fully_shard  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"ddp_wrapper is 'fsdp2', which PyTorch {torch.__version__} does not have; right "
                "is: PyTorch 2.6 or newer, or another wrapper"
            ) from error
    options = {
        ("ddp_wrapper", "torch_ddp"): ("cuda_graph",),
        ("ddp_wrapper", "fsdp2"): ("cuda_graph", "low_precision_weights"),
        ("sharded_optimizer", "torch_zero"): ("cuda_graph", "low_precision_weights"),
    }
    others = {"ddp_wrapper": "flashddp", "sharded_optimizer": "zero1"}
    for (field, value), refused in options.items():
        for option in refused:
            if getattr(config, field) == value and getattr(config, option):
                raise ValueError(
                    f"{field} is {value!r} and {option} is True, which do not go together on "
                    f"{num_ranks} ranks; right is: {others[field]}, or {option} False"
                )


def parallelise(
    loss: MeanLoss, config: TrainConfig, lr: Tensor, group: dist.ProcessGroup | None
) -> tuple[nn.Module, AdamW | ShardedOptimizer | TorchZero]:
    """The loss in what averages its gradients, and the optimizer of its model.

    All ranks get the weights of the group's rank 0.

    Raises:
        ValueError: models or settings differ between ranks.
    """
    name = config.ddp_wrapper
    if world_size(group) == 1:
        # all wrappers do nothing here, and fsdp2 is none of them
        name = "none" if name == "fsdp2" else name
        return wrap(name, loss, group=group), make_optimizer(loss.model, config, lr)
    if name == "fsdp2":
        from lib.train_fsdp import FullySharded

        parallel = FullySharded(loss, group)
        return parallel, make_optimizer(loss.model, config, lr, group)
    if name == "none":
        broadcast_module(loss, group)
        optimizer = make_optimizer(loss.model, config, lr, group)
        return AveragedByOptimizer(loss, optimizer), optimizer
    parallel = wrap(name, loss, group=group, bucket_cap_mb=_bucket_cap_mb(config, loss))
    return parallel, make_optimizer(loss.model, config, lr, group)


def make_optimizer(
    model: nn.Module, config: TrainConfig, lr: Tensor, group: dist.ProcessGroup | None = None
) -> AdamW | ShardedOptimizer | TorchZero:
    """AdamW over `model`: weight decay for matrices, none for vectors; `lr` is a 0-dim tensor.

    Args:
        group: the ranks that `config.sharded_optimizer` divides the state among; in one process
            nothing is divided.
    """
    settings = config.optimizer
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {
        "lr": lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
    }
    is_whole = config.ddp_wrapper != "fsdp2" and config.sharded_optimizer == "none"
    if world_size(group) == 1 or is_whole:
        return AdamW(groups, **options)
    if config.sharded_optimizer == "torch_zero":
        from lib.sharded_optimizer_torch import TorchZero

        return TorchZero(groups, AdamW, process_group=group, **options)
    # which loads much that one process does not need
    from lib.sharded_optimizer import ShardedOptimizer

    if config.ddp_wrapper == "fsdp2":
        return ShardedOptimizer(groups, AdamW, group=group, strategy="fsdp2", **options)
    averages = config.ddp_wrapper == "none"
    return ShardedOptimizer(
        groups,
        AdamW,
        group=group,
        strategy=config.zero1_strategy,
        reduces_gradients=averages,
        overlap=averages,
        bucket_cap_mb=_bucket_cap_mb(config, model),
        **options,
    )


def _bucket_cap_mb(config: TrainConfig, model: nn.Module) -> float:
    trained = (param.nbytes for param in model.parameters() if param.requires_grad)
    return config.bucket_size_mb or default_bucket_cap_mb(sum(trained))


class AveragedByOptimizer(nn.Module):
    """A module whose gradients its optimizer averages, behind the interface of a wrapper."""

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer) -> None:
        super().__init__()
        self.module, self.optimizer = module, optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Nothing: the optimizer does it when it is asked for the gradients' norm."""

    def no_sync(self) -> contextlib.AbstractContextManager:
        """In the block, backward passes only add up gradients on this rank."""
        return self.optimizer.no_sync()


def gather_under_forward(
    optimizer: ShardedOptimizer, loss: MeanLoss, *, starts_there: bool
) -> None:
    """Let the weights of later layers be on their way while earlier ones compute.

    Args:
        starts_there: as of `ShardedOptimizer.wait_in_forward_of`, for CUDA graphs.
    """
    model = loss.model
    heads = [] if model.lm_head is None else [model.lm_head]
    parts = [model.token_embeddings, *model.layers, *heads]
    optimizer.wait_in_forward_of(parts, starts_there=starts_there)
    fused_layer, hidden = model.fused_layer, loss.hidden

    # a GPU's way through a layer is past its forward, and that to the loss past the head's
    def waiting_layer(layer: nn.Module, *args: Any) -> Any:
        optimizer.wait_for_parameters(layer.parameters())
        return fused_layer(layer, *args)

    def waiting_hidden(inputs: Tensor) -> Tensor:
        result = hidden(inputs)
        optimizer.wait_for_parameters([model.output_weight])
        return result

    model.fused_layer, loss.hidden = waiting_layer, waiting_hidden
