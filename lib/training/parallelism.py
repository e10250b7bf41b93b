"""How the ranks of a group train one model: every kind of parallelism behind one interface.

A training step calls the methods of `Parallel` one after another:

    with parallel.no_sync():                      # all passes but the last
        parallel.loss(first, targets).backward()  # forward, backward
    parallel.loss(second, targets).backward()
    parallel.reduce()                             # every gradient becomes its mean over the ranks
    norm = parallel.grad_norm()                   # norm
    parallel.update(scale, skip)                  # update, and start to gather the weights
    parallel.gather()                             # before weights are read outside of `loss`

`ddp_wrapper` and `sharded_optimizer` choose the kind, on several ranks:

- a wrapper of `lib.ddp.wrappers` (`Replicated`): it averages gradients, and every rank holds all of
  AdamW's state; with `zero1` that state is sharded;
- `none` with `zero1` (`Zero1`): ZeRO stage 1 on flat slices averages gradients itself, during
  backward, and gathers the parameters under the next forward pass;
- `fsdp` (`FullySharded`): parameters and gradients are sharded too (`lib.fsdp`).

PyTorch's own ways, the peers `torch_ddp`, `torch_zero` and `fsdp2`, have the interfaces of ours,
and take their places (`PEERS`).

A single rank has the plain optimizer in any case (`Parallel` itself).
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp.process_group import broadcast_module, world_size
from lib.ddp.settings import default_bucket_cap_mb
from lib.ddp.wrappers import WRAPPERS, wrap
from lib.optimizer.adamw import AdamW
from lib.training.config import TrainConfig

if TYPE_CHECKING:
    from lib.fsdp.wrapper import FSDP
    from lib.model.config import ModelConfig
    from lib.model.transformer import MeanLoss, TransformerLM
    from lib.sharded_optimizer.optimizer import Divide


class Parallel:
    """A model in training: all of it on this rank. Other kinds of parallelism are subclasses.

    All ranks make the same calls in the same order. They start with the weights of rank 0.

    Attributes:
        module: computes the loss, inside the wrapper that averages gradients.
        averager: averages gradients, a wrapper or a strategy of the sharded optimizer; None on a
            single rank.
        is_sharded: whether each rank holds its own part of the optimizer's state.
        is_divided: whether each rank holds its own part of the weights, so that a forward pass
            needs all ranks.

    Args:
        loss: of the model.
        lr: the learning rate, a 0-dim tensor that the caller fills before each step.
        group: the ranks that train the model together.

    Raises:
        ValueError: models or settings differ between ranks.
    """

    is_divided = False

    def __init__(
        self, loss: MeanLoss, config: TrainConfig, lr: Tensor, group: dist.ProcessGroup | None
    ) -> None:
        self.model: TransformerLM = loss.model
        self.module: nn.Module = loss
        self.averager: Any = None
        self.optimizer: Any = None
        self.is_sharded = False
        self.group = group
        self.adamw: dict[str, Any] = {
            "lr": lr,
            "betas": (config.optimizer.beta1, config.optimizer.beta2),
            "eps": config.optimizer.eps,
        }
        # compiled before it is wrapped, so that the wrapper's hooks stay outside
        if config.compile:
            self._compile(config)
        self._set_up(loss, config)

    def _compile(self, config: TrainConfig) -> None:
        """Compile the model, in pieces that leave this kind's hooks outside."""
        self.model.compile_whole()

    def _set_up(self, loss: MeanLoss, config: TrainConfig) -> None:
        """Wrap the loss, and make the optimizer."""
        groups = parameter_groups(self.model.parameters(), config)
        self.optimizer = AdamW(groups, **self.adamw)

    def _shard_optimizer(
        self,
        groups: list[dict[str, Any]],
        strategy: Literal["parameters", "flat"] | Divide,
        **options: Any,
    ) -> None:
        """Make an AdamW whose state is sharded; `options` are those of `ShardedOptimizer`."""
        # imported here since a single process needs none of it
        from lib.sharded_optimizer.optimizer import ShardedOptimizer

        options |= {"group": self.group, "strategy": strategy}
        self.optimizer = ShardedOptimizer(groups, AdamW, **options, **self.adamw)
        self.is_sharded = True

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.model.config

    # What a step calls

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of this rank's tokens, (batch, length) int64; in eval mode no z-loss."""
        return self.module(inputs, targets)

    def no_sync(self) -> contextlib.AbstractContextManager:
        """In the block, backward passes only add up gradients on this rank."""
        return self.averager.no_sync() if self.averager else contextlib.nullcontext()

    def reduce(self) -> None:
        """Finish averaging: every gradient, or the shard of it, becomes its mean over the ranks."""
        if self.averager:
            self.averager.finish_gradient_synchronization()

    def grad_norm(self) -> Tensor:
        """The L2 norm of all averaged gradients: 0-dim float32, the same on all ranks."""
        return self.optimizer.grad_norm()

    def update(self, grad_scale: Tensor | None, skip: Tensor) -> None:
        """Update the weights with gradients times `grad_scale`, unless `skip`; drop the gradients.

        Weights may still be on their way to the other ranks when this returns: see `gather`.
        """
        self.optimizer.step(grad_scale=grad_scale, skip=skip)
        self.optimizer.zero_grad(set_to_none=True)

    def replayed(self) -> None:
        """Note that a CUDA graph has repeated all of the above."""
        if self.is_sharded:
            self.optimizer.mark_replayed()

    # What a run calls between steps

    def gather(self) -> None:
        """Wait until the weights of the last update are complete on each rank that holds them."""
        if self.is_sharded:
            self.optimizer.wait_for_parameters()

    def weights(self) -> dict[str, Tensor]:
        """The model's state dict after the last update, whole, on rank 0."""
        self.gather()
        return self.model.state_dict()


class Replicated(Parallel):
    """A wrapper of `lib.ddp.wrappers` averages gradients; the optimizer's state may be sharded."""

    module: Any

    def _compile(self, config: TrainConfig) -> None:
        # all gradients of one compiled graph arrive together, too late to overlap with backward
        if wrapper_class(config).overlaps:
            self.model.compile_blocks()
        else:
            self.model.compile_whole()

    def _set_up(self, loss: MeanLoss, config: TrainConfig) -> None:
        # gradients: averaged by the wrapper
        params = list(self.model.parameters())
        groups, cap_mb = parameter_groups(params, config), bucket_cap_mb(config, params)
        self.module = self.averager = wrap(
            wrapper_class(config), loss, group=self.group, bucket_cap_mb=cap_mb
        )

        # optimizer: sharded, also by the peer, or whole on each rank
        if config.sharded_optimizer == "zero1":
            self._shard_optimizer(groups, config.zero1_strategy, bucket_cap_mb=cap_mb)
        elif config.sharded_optimizer in PEERS:
            sharded = PEERS[config.sharded_optimizer].load()
            self.optimizer = sharded(groups, AdamW, process_group=self.group, **self.adamw)
            self.is_sharded = True
        else:
            self.optimizer = AdamW(groups, **self.adamw)


class Zero1(Parallel):
    """ZeRO stage 1 without a wrapper: the optimizer averages gradients and gathers weights."""

    def _compile(self, config: TrainConfig) -> None:
        self.model.compile_blocks()

    def _set_up(self, loss: MeanLoss, config: TrainConfig) -> None:
        broadcast_module(loss, self.group)

        # gradients and optimizer: in one object
        params = list(self.model.parameters())
        self._shard_optimizer(
            parameter_groups(params, config),
            "flat",
            reduces_gradients=True,
            overlap=True,
            bucket_cap_mb=bucket_cap_mb(config, params),
        )
        self.averager = self.optimizer.strategy

        # The all-gather of later parts runs while earlier ones compute. The norms, which have a
        # bucket of their own, are complete when `update` returns.
        parts = [self.model.token_embeddings, *self.model.layers, self.model.head]
        self.model.before_part = self.optimizer.overlap_gather_with_forward(
            parts, in_graph=config.cuda_graph
        )


class FullySharded(Parallel):
    """A rank holds its shards, and the whole of a block only while it computes with it."""

    is_divided = True
    module: Any

    def _compile(self, config: TrainConfig) -> None:
        # `Module.compile` would compile the hooks that gather, too
        for layer in self.model.layers:
            for part in (layer.attn, layer.ffn):
                part.forward = torch.compile(part.forward, dynamic=False)

    def _set_up(self, loss: MeanLoss, config: TrainConfig) -> None:
        # weights: each rank keeps its shards; gradients are averaged into shards, too
        peer = PEERS.get(config.ddp_wrapper)
        divide = peer.load() if peer else divide_loss
        self.module = self.averager = divide(loss, self.group)

        # optimizer: of the shards alone
        groups = parameter_groups(self.module.whole_parameters(), config)
        self._shard_optimizer(groups, self.module.shards_of)

    def weights(self) -> dict[str, Tensor]:
        """The model's state dict after the last update: on rank 0's CPU, empty on others."""
        full = self.module.full_parameters(on_first_only=True)
        names = self.model.state_dict()
        return {name: full[f"model.{name}"] for name in names if f"model.{name}" in full}


def divide_loss(loss: MeanLoss, group: dist.ProcessGroup | None) -> FSDP:
    """Divide a language model's matrices among the ranks; return its loss as an `FSDP`.

    Raises:
        ValueError: models differ between ranks.
    """
    from lib.fsdp.wrapper import FSDP

    # not the layers themselves: on a GPU a fused kernel runs from one into the next
    model = loss.model
    outer = [part for part in (model.token_embeddings, model.lm_head) if part is not None]
    blocks: list[Any] = [[layer.attn, layer.ffn] for layer in model.layers]  # type: ignore[union-attr]
    blocks = [outer[0], *blocks, *outer[1:]]
    # Blocks are gathered in the dtype of the matmuls, embedding and head in their own: the gradient
    # of a frequent token is a sum of many.
    divided = FSDP(loss, loss.dtype, blocks=blocks, full_precision=outer, group=group)
    # the head's matrix is read without calling it
    model.before_part = divided.before_forward
    return divided


# The kind of each `ddp_wrapper` on several ranks.
KINDS: dict[str, type[Parallel]] = {
    "none": Zero1,
    "naive": Replicated,
    "flat": Replicated,
    "overlap": Replicated,
    "flashddp": Replicated,
    "torch_ddp": Replicated,
    "fsdp": FullySharded,
    "fsdp2": FullySharded,
}


class Peer(NamedTuple):
    """PyTorch's own way, outside of the engine, which takes the place of ours."""

    path: str
    """Module and class, which are loaded for runs that use them."""

    cannot: tuple[str, ...]
    """Options of a config that it cannot take."""

    ours: str
    """The value of the same setting that can take them."""

    def load(self) -> Any:
        """The class."""
        return pkgutil.resolve_name(self.path)


# By the value of `ddp_wrapper` or `sharded_optimizer`.
PEERS = {
    "torch_ddp": Peer("lib.tools.peers.torch_ddp:TorchDDP", ("cuda_graph",), "flashddp"),
    "fsdp2": Peer(
        "lib.tools.peers.fsdp2:FullySharded", ("cuda_graph", "low_precision_weights"), "flashddp"
    ),
    "torch_zero": Peer(
        "lib.tools.peers.torch_zero:TorchZero", ("cuda_graph", "low_precision_weights"), "zero1"
    ),
}


def wrapper_class(config: TrainConfig) -> Any:
    """The class of the wrapper that averages gradients."""
    peer = PEERS.get(config.ddp_wrapper)
    return peer.load() if peer else WRAPPERS[config.ddp_wrapper]


def parallelize(
    loss: MeanLoss, config: TrainConfig, lr: Tensor, group: dist.ProcessGroup | None
) -> Parallel:
    """Make the kind of parallelism that `config` asks for; arguments as for `Parallel`.

    Raises:
        ValueError: models or settings differ between ranks, or can't be combined.
    """
    ranks = world_size(group)
    check_wrapper(config, ranks)
    kind = Parallel if ranks == 1 else KINDS[config.ddp_wrapper]
    return kind(loss, config, lr, group)


def check_wrapper(config: TrainConfig, num_ranks: int) -> None:
    """Refuse settings that can't be combined on this many ranks."""
    if num_ranks == 1:
        return
    if config.ddp_wrapper == "none" and config.sharded_optimizer != "zero1":
        raise ValueError(
            f"ddp_wrapper 'none' on {num_ranks} ranks averages no gradients; use flashddp or "
            "sharded_optimizer zero1"
        )
    if config.ddp_wrapper == "none" and config.zero1_strategy == "parameters":
        raise ValueError(
            "zero1_strategy must be 'flat' with ddp_wrapper 'none', got 'parameters', which "
            "leaves averaging gradients to a wrapper"
        )
    for field in ("ddp_wrapper", "sharded_optimizer"):
        value = getattr(config, field)
        peer = PEERS.get(value)
        for option in peer.cannot if peer else ():
            if getattr(config, option):
                raise ValueError(
                    f"{option} must be False with {field} {value!r} on {num_ranks} ranks, got "
                    f"True; {field} {peer.ours} can do it"
                )


# Optimizers


def parameter_groups(params: Iterable[nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    """The groups of AdamW that are not empty: matrices, with weight decay, and vectors, without."""
    params = list(params)
    matrices = [param for param in params if param.ndim >= 2]
    vectors = [param for param in params if param.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.optimizer.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def bucket_cap_mb(config: TrainConfig, params: list[nn.Parameter]) -> float:
    """MiB of gradients in a bucket."""
    trained_bytes = (param.nbytes for param in params if param.requires_grad)
    return config.bucket_size_mb or default_bucket_cap_mb(sum(trained_bytes))
