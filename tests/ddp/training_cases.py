"""Training with every wrapper and in one process, for ranks of the wrappers' tests."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.ddp import process_group, wrappers
from lib.ddp.process_group import current_device
from lib.fsdp import FSDP
from lib.optimizer.adamw import AdamW
from lib.optimizer.schedule import clip_grad_norm

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


def make_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    return AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def reference(
    optimizer_name: str, micros: int, max_norm: float = 1e9
) -> Iterator[tuple[float, list[Tensor]]]:
    """Norm and parameters after each step of one process, which adds up the ranks' means."""
    module, ranks = Net(), process_group.world_size()
    optimizer = make_optimizer(optimizer_name, module)
    for step in range(STEPS):
        grads: dict[str, list[Tensor]] = {}
        for number in range(ranks):
            for micro in range(micros):
                (loss_of(module, *part(step, micro, number)) / micros).backward()
            for name, param in module.named_parameters():
                grads.setdefault(name, []).extend([] if param.grad is None else [param.grad])
            module.zero_grad()
        for name, param in module.named_parameters():
            param.grad = sum(grads[name]) / ranks if grads[name] else None
        norm = clip_grad_norm(module.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield norm.item(), [param.detach().clone() for param in module.parameters()]


class Trained(NamedTuple):
    """How training on ranks differed from that of one process."""

    error: float
    """The largest difference of a parameter after any step."""

    norm_error: float

    has_right_gradients: bool
    """Whether the parameters that no rank used, and no others, had no gradient."""

    digest: str
    """Of all parameters in the end."""


def train(
    make: Callable[[Net], nn.Module],
    optimizer_name: str,
    micros: int,
    max_norm: float = 1e9,
) -> Trained:
    """Train from other weights on each rank, and compare with one process."""
    rank, ranks = process_group.rank(), range(process_group.world_size())
    net = Net(seed=rank)
    model = make(net)
    is_fsdp = isinstance(model, FSDP)
    optimizer = make_optimizer(optimizer_name, model)
    error = norm_error = 0.0
    is_right = True
    for step, (norm, expected) in enumerate(reference(optimizer_name, micros, max_norm)):
        for micro in range(micros):
            is_last = micro == micros - 1
            with nullcontext() if is_last else model.no_sync():
                (loss_of(model, *part(step, micro, rank)) / micros).backward()
        model.finish_gradient_synchronization()
        is_used = any(part(step, 0, number)[1] for number in ranks)
        is_right &= (net.layers[1].sometimes.weight.grad is not None) == is_used
        is_right &= net.never.weight.grad is None and net.layers[0].fixed.weight.grad is None
        clip = (
            model.clip_grad_norm if is_fsdp else functools.partial(clip_grad_norm, net.parameters())
        )
        norm_error = max(norm_error, abs(clip(max_norm).item() - norm))
        optimizer.step()
        optimizer.zero_grad()
        params = list(model.full_parameters().values() if is_fsdp else net.parameters())
        error = max(error, difference(params, expected))
    return Trained(error, norm_error, is_right, digest(params))


def difference(params: Iterable[Tensor], expected: list[Tensor]) -> float:
    return max((a.detach() - b).abs().max().item() for a, b in zip(params, expected))


def digest(params: Iterable[Tensor]) -> str:
    bits = b"".join(param.detach().cpu().numpy().tobytes() for param in params)
    return hashlib.sha256(bits).hexdigest()


def ways_to_train(world_size: int) -> list[tuple[str, str, int]]:
    """Wrapper, optimizer and micro-batches; fewer where ranks outnumber cores."""
    hows = [("adamw", 3), ("sgd", 1)] if world_size < 3 else [("adamw", 3)]
    return [(name, *how) for how in hows for name in WRAPPERS]


def equality(world_size: int) -> dict:
    """The result of each way to train.

    A group of three ranks tells of one of two ranks too: starting workers takes longest.
    """
    results: dict = {}
    for name, *how in ways_to_train(world_size):
        results[name, *how] = train(WRAPPERS[name], *how)
    return results | {"subgroup": subgroup() if world_size == 3 else None}


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
    for name in ("naive", "flat", "overlap", "flashddp", "torch_ddp"):
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
