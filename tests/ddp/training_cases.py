"""Training with every wrapper and in one process, for ranks of the wrappers' tests."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp import process_group, wrappers
from lib.ddp.process_group import current_device
from lib.fsdp import FSDP
from lib.optimizer.adamw import AdamW, clip_coefficient, grad_norm
from lib.sharded_optimizer.optimizer import ShardedOptimizer
from lib.tools.peers.torch_ddp import TorchDDP

STEPS, BATCH = 5, 4
WIDTH = 6
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "naive": wrappers.NaiveDDP,
    "flat": wrappers.FlatDDP,
    "overlap": wrappers.OverlappedDDP,
    "flashddp": wrappers.BucketedDDP,
    "flashddp, caps below a parameter": lambda m: wrappers.BucketedDDP(m, bucket_cap_mb=1e-6),
    "flashddp, caps of two parameters": lambda m: wrappers.BucketedDDP(m, bucket_cap_mb=3e-4),
    "flashddp, as with NCCL": lambda m: not_packed(wrappers.BucketedDDP(m, bucket_cap_mb=3e-4)),
}


def not_packed(model: wrappers.BucketedDDP) -> wrappers.BucketedDDP:
    model.packed = False
    return model


class Part(nn.Module):
    """A block: a matrix, one that only some passes use, a frozen one, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
        self.sometimes = nn.Linear(WIDTH, WIDTH, bias=False)
        self.fixed = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        y = self.b(torch.tanh(self.a(x))) + self.fixed(x)
        return x + (torch.tanh(self.sometimes(y)) if uses_all else y)


class Net(nn.Module):
    """Tied embedding and head, blocks, a norm, a buffer, a matrix that is never used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Part() for _ in range(3))
        self.norm, self.never = nn.LayerNorm(WIDTH), nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.zeros(1))
        for tensor in [*self.parameters(), self.scale]:
            nn.init.normal_(tensor, 0.0, 0.5, generator=generator)
        self.around: Callable[..., Tensor] | None = None
        self.to(current_device())

    def forward(self, tokens: Tensor, uses_all: bool) -> Tensor:
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            run = self.around or (lambda index, layer, *args: layer(*args))
            x = run(index, layer, x, uses_all)
        return self.head(self.norm(x) * self.scale)


def part(step: int, micro: int, rank: int) -> tuple[Tensor, bool]:
    """The tokens of a rank in a micro-batch, and whether it uses all of the model."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    tokens = torch.randint(11, (BATCH, 2), generator=generator).to(process_group.current_device())
    # used by all; by rank 0; by none; by odd ranks; before the last micro-batch only
    uses_all = (True, rank == 0, False, rank % 2 == 1, micro == 0)[step % 5]
    return tokens, uses_all


def loss_of(model: nn.Module, tokens: Tensor, uses_all: bool) -> Tensor:
    logits = model(tokens[:, 0], uses_all)
    return nn.functional.cross_entropy(logits, tokens[:, 1])


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "torch adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def groups_of(net: Net) -> list[dict[str, Any]]:
    """Three groups with settings of their own; the first has a frozen parameter."""
    named = dict(net.named_parameters())
    sometimes = [named.pop(name) for name in list(named) if "sometimes" in name]
    weights = [param for name, param in named.items() if name.endswith("weight")]
    biases = [param for name, param in named.items() if name.endswith("bias")]
    return [
        {"params": weights, "lr": 0.02},
        {"params": biases, "weight_decay": 0.0},
        {"params": sometimes, "lr": 0.005},
    ]


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def state_elements(optimizer: torch.optim.Optimizer) -> int:
    """How many elements its state has, without step counts."""
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(v.numel() for v in tensors if isinstance(v, Tensor) and v.dim())


def clip(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.clip_grad_norm(max_norm)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    norm = optimizer.grad_norm() if isinstance(optimizer, AdamW) else grad_norm(params)
    for param in params:
        if param.grad is not None:
            param.grad.mul_(clip_coefficient(norm, max_norm))
    return norm


class Expected(NamedTuple):
    """One process after a step."""

    norm: float
    params: list[Tensor]
    elements: int


def reference(how: str, micros: int, max_norm: float, ranks: int) -> Iterator[Expected]:
    """Train in one process, which adds up the ranks' means."""
    net = Net()
    cls, settings = OPTIMIZERS[how]
    optimizer = cls(groups_of(net), **settings)
    schedule = schedule_of(optimizer)
    for step in range(STEPS):
        grads: dict[str, list[Tensor]] = {}
        for number in range(ranks):
            for micro in range(micros):
                (loss_of(net, *part(step, micro, number)) / micros).backward()
            for name, param in net.named_parameters():
                grads.setdefault(name, []).extend([] if param.grad is None else [param.grad])
            net.zero_grad()
        for name, param in net.named_parameters():
            param.grad = sum(grads[name]) / ranks if grads[name] else None
        norm = clip(optimizer, max_norm).item()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        params = [param.detach().clone() for param in net.parameters()]
        yield Expected(norm, params, state_elements(optimizer))


class Trained(NamedTuple):
    """How training on ranks differed from that of one process."""

    error: float
    """The largest difference of a parameter after any step."""

    norm_error: float

    has_right_gradients: bool
    """Whether the parameters that no rank used, and no others, had no gradient."""

    digest: str
    """Of all parameters in the end."""

    elements: int
    """The number of elements in this rank's optimizer state."""

    whole_elements: int
    """The number in the state of one process."""


def train(
    make: Callable[[Net], nn.Module] | None,
    how: str,
    micros: int = 1,
    max_norm: float = 1e9,
    *,
    zero: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    expected: list[Expected] | None = None,
) -> Trained:
    """Train from other weights on each rank, and compare with one process.

    Args:
        make: makes the wrapper; None for ZeRO-1 without one.
        zero: options of the sharded optimizer, if there is one.
    """
    rank, ranks = process_group.rank(group), range(process_group.world_size(group))
    net = Net(seed=rank)
    model: Any = make(net) if make else net
    if not make:
        process_group.broadcast_module(net, group)
    is_fsdp, averages = isinstance(model, FSDP), zero is not None and not make
    cls, settings = OPTIMIZERS[how]
    options = {} if zero is None else {"optimizer_cls": cls, "group": group, **zero}
    optimizer: Any = (cls if zero is None else ShardedOptimizer)(
        groups_of(net), **options, **settings
    )
    schedule, syncing = schedule_of(optimizer), optimizer if averages else model
    error = norm_error = 0.0
    is_right = True
    expected = expected or list(reference(how, micros, max_norm, len(ranks)))
    for step, one in enumerate(expected):
        for micro in range(micros):
            is_last = micro == micros - 1
            with nullcontext() if is_last else syncing.no_sync():
                (loss_of(model, *part(step, micro, rank)) / micros).backward()
        syncing.finish_gradient_synchronization()
        if not averages:
            is_used = any(part(step, 0, number)[1] for number in ranks)
            is_right &= (net.layers[1].sometimes.weight.grad is not None) == is_used
            is_right &= net.never.weight.grad is None and net.layers[0].fixed.weight.grad is None
        norm = model.clip_grad_norm(max_norm) if is_fsdp else clip(optimizer, max_norm)
        norm_error = max(norm_error, abs(norm.item() - one.norm))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        params = list(model.full_parameters().values() if is_fsdp else net.parameters())
        error = max(error, difference(params, one.params))
    elements = state_elements(optimizer if zero is None else optimizer.inner)
    return Trained(error, norm_error, is_right, digest(params), elements, one.elements)


def difference(params: Iterable[Tensor], expected: list[Tensor]) -> float:
    return max((a.detach() - b).abs().max().item() for a, b in zip(params, expected))


def digest(params: Iterable[Tensor]) -> str:
    bits = b"".join(param.detach().cpu().numpy().tobytes() for param in params)
    return hashlib.sha256(bits).hexdigest()


WAYS_TO_TRAIN = [(name, *how) for how in [("adamw", 3), ("sgd", 1)] for name in WRAPPERS]
"""Wrapper, optimizer and micro-batches."""


def equality() -> dict:
    """The result of each way to train, and of a group of two where there are three ranks."""
    results: dict = {(name, *how): train(WRAPPERS[name], *how) for name, *how in WAYS_TO_TRAIN}
    return results | {"subgroup": subgroup() if process_group.world_size() == 3 else None}


def check_training(results: list[Trained], *, is_exact: bool = False) -> None:
    """All ranks train alike, and as one process does."""
    for result in results:
        # weights are of size 1 and below, and float32 has 24 bits
        assert result.error <= (0 if is_exact else 32 * 2**-24)
        assert result.norm_error <= 32 * 2**-24
        assert result.has_right_gradients
    assert len({result.digest for result in results}) == 1


def subgroup() -> list[float] | None:
    """Gradients of ranks 1 and 2 of three, which have a group of their own."""
    group = dist.new_group([1, 2])
    if process_group.rank() == 0:
        return None
    device = process_group.current_device()
    results = []
    for name in ("naive", "flat", "overlap", "flashddp", TorchDDP):
        module = nn.Linear(1, 1, bias=False, device=device)
        nn.init.constant_(module.weight, process_group.rank())
        model = wrappers.wrap(name, module, group=group)
        results.append(module.weight.item())
        for _ in range(2):
            module.zero_grad()
            model(torch.full((1, 1), float(process_group.rank()), device=device)).sum().backward()
            model.finish_gradient_synchronization()
        results.append(module.weight.grad.item())
    return results
