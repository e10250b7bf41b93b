"""Kinds of modules for `tests.ddp.table`: what PyTorch's users hand to a wrapper."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lib.ddp.process_group import current_device

D = 4


class Residual(nn.Module):
    """A block with a matrix and its bias, and a norm if asked for."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Blocks one after another, the first with a norm, then what a subclass does with the sum."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(norm=index == 0) for index in range(count))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.end(x)

    def end(self, x: Tensor) -> Any:
        return x


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__(1)
        self.first, self.last = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(self.first(x)))


class ReadOutside(Stack):
    """Weights that are read without calling their module, before and after it ran."""

    def __init__(self) -> None:
        super().__init__(2)
        self.first = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.layers[1].linear.weight.square().mean()
        x = super().forward(self.first(x.to(self.layers[0].linear.weight.dtype)))
        return F.linear(x, self.first.weight) + self.layers[0].linear.bias


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__(2)
        self.layers[0].requires_grad_(False)
        self.layers[1].linear.weight.requires_grad_(False)


class Uneven(nn.Module):
    """Shapes that no number of ranks divides, a transposed one, and one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(D, 1), nn.Linear(1, 7), nn.Linear(7, 3, bias=False))
        self.blocks[2].weight = nn.Parameter(torch.zeros(7, 3).T)
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.scale + self.none.sum()


class Lists(nn.Module):
    """Lists and dicts of parameters in the module itself and in a block."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(D, D) for _ in range(2))
        self.vectors = nn.ParameterDict({"a": torch.zeros(D), "b": torch.zeros(D, D)})
        self.inner = nn.ModuleList([Lists(depth - 1)] if depth else [])

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        x = x @ self.vectors["b"] + self.vectors["a"]
        for part in self.inner:
            x = x + part(x)
        return x


class Nested(nn.Module):
    """Lists of lists, and a dict of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Residual() for _ in range(2)) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(D, 2), "b": nn.Linear(D, 2)})

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        return self.heads["a"](x) + self.heads["b"](x)


class Mixed(Stack):
    """Parameters of two dtypes, in one block too."""

    def __init__(self) -> None:
        super().__init__(2)
        self.layers[1].double()
        self.layers[0].extra = nn.Parameter(torch.zeros(D, D, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.double() @ self.layers[0].extra
        return self.layers[1](self.layers[0](x.to(self.layers[0].linear.weight.dtype)).double())


class Complex(nn.Module):
    """Complex matrices, a vector and a number, behind a real matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        parts = [nn.Linear(D, D, dtype=torch.complex64) for _ in range(2)]
        self.blocks = nn.Sequential(*parts)
        self.phase = nn.Parameter(torch.zeros(D, dtype=torch.complex64))
        self.number = nn.Parameter(torch.zeros((), dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.first(x).to(torch.complex64))
        return torch.view_as_real(x * self.phase * self.number)


class Quantized(nn.Module):
    """Parameters and buffers of integers and truth values, beside a matrix of scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D, D, dtype=torch.int8), requires_grad=False)
        self.index = nn.Parameter(torch.zeros(D, dtype=torch.int64), requires_grad=False)
        self.is_kept = nn.Parameter(torch.zeros(D, dtype=torch.bool), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(D, 1))
        self.register_buffer("mask", torch.zeros(D, dtype=torch.bool))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) * self.scale
        x = x + x[:, self.index] * self.is_kept
        return torch.tanh(F.linear(x, weight) * self.mask + self.calls)


class Integers(Stack):
    def __init__(self) -> None:
        super().__init__(1)
        self.layers.append(Quantized())


class Shared(nn.Module):
    """A block that is called twice, and a matrix inside of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.layers[2].linear = self.layers[1].linear

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 2, 1):
            x = self.layers[index](x)
        return x


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: Any = None


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def in_a_dict(value: Tensor) -> dict[str, Any]:
    return {"a": (value, None), "b": None}


class Returning(nn.Module):
    """A block that returns its tensors in something else."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(D, D), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(torch.tanh(self.linear(x)))


class Outputs(nn.Module):
    """Blocks whose outputs are a dataclass, a dict with None, an unknown class, and the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Returning, (Output, in_a_dict, Opaque)))
        self.prompt = nn.ModuleList([Prompt()])

    def forward(self, x: Tensor) -> Output:
        x = self.layers[0](x).logits
        x = self.layers[1](x)["a"][0]
        x = self.layers[2](x).value + self.prompt[0]()
        return Output(x, {"half": x / 2})


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, D))

    def forward(self) -> Tensor:
        return self.weight


class Router(Residual):
    """A block that leaves a loss of its own behind."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.loss = torch.tanh(F.linear(x, self.linear.weight)).mean()
        return torch.tanh(self.linear(x))


class SideLosses(nn.Module):
    """The last block's output is not used, but its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        middle = self.layers[1](self.layers[0](x))
        self.layers[2](middle)
        return middle + sum(layer.loss for layer in self.layers)


class Unheard(nn.Module):
    """A first block of which only the loss is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Router(), Residual(), Residual()])

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0](x)
        return self.layers[2](self.layers[1](x)) * self.layers[0].loss


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(D, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0])


class Attention(nn.Module):
    """PyTorch's own layer, which reads the weights of its parts without calling them."""

    def __init__(self) -> None:
        super().__init__()
        options = {"dim_feedforward": 5, "dropout": 0.0, "batch_first": True}
        layer = nn.TransformerEncoderLayer(D, 2, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x[None])


class Branches(Residual):
    """A block of which some passes use one matrix, on one rank perhaps, and some the other."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.detach().sum() > 0 else torch.tanh(self.other(x))


class Sometimes(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers.extend(Branches() for _ in range(2))
        self.never = nn.Linear(3, 3)


class OwnWeight(Stack):
    def __init__(self) -> None:
        super().__init__(1)
        self.weight = nn.Parameter(torch.zeros(D, D))

    def end(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.weight.T


class Clamped(Stack):
    """Changes its weights in forward."""

    def end(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[0].linear.weight.clamp_(-0.1, 0.1)
        return x


class Kind(NamedTuple):
    make: Callable[[], nn.Module]
    options: Callable[[nn.Module], dict[str, Any]] = lambda module: {}


def _wrap_first(module: nn.Module) -> dict[str, Any]:
    from lib.fsdp import FSDP

    module.layers[0] = FSDP(module.layers[0])
    return {}


# Kinds of modules, and how FSDP is told to divide them; each takes (batch, D) inputs.
KINDS: dict[str, Kind] = {
    "one matrix": Kind(lambda: nn.Linear(D, 3, bias=False)),
    "blocks": Kind(Stack),
    "blocks not in order": Kind(Stack, lambda m: {"blocks": [m.layers[i] for i in (2, 0, 1)]}),
    "no blocks": Kind(Stack, lambda m: {"blocks": []}),
    "no prefetch": Kind(Stack, lambda m: {"prefetch": False}),
    "tied": Kind(Tied),
    "read outside": Kind(ReadOutside),
    "frozen": Kind(Frozen),
    "uneven": Kind(Uneven),
    "lists": Kind(Lists),
    "nested": Kind(Nested),
    "float64": Kind(lambda: Stack(2).double()),
    "two dtypes": Kind(Mixed),
    "complex": Kind(Complex),
    "integers": Kind(Integers),
    "shared": Kind(Shared),
    "outputs": Kind(Outputs),
    "side losses": Kind(SideLosses),
    "unheard": Kind(Unheard),
    "recurrent": Kind(Recurrent),
    "attention": Kind(Attention),
    "sometimes": Kind(Sometimes),
    "convolutions": Kind(lambda: nn.Sequential(nn.Unflatten(1, (1, D)), nn.Conv1d(1, 3, 2))),
    "returns a weight": Kind(OwnWeight),
    # refused
    "wrapped twice": Kind(Stack, _wrap_first),
    "changes a weight": Kind(Clamped),
}


class Together(nn.ModuleDict):
    """Modules of several kinds, which get the same inputs."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {name: module(x.to(dtype_of(module))) for name, module in self.items()}


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of a module's first parameter in floating point."""
    floats = (param.dtype for param in module.parameters() if param.is_floating_point())
    return next(floats, torch.float32)


def seeded(kinds: Sequence[str], seed: int) -> nn.Module:
    """A module of one kind, or of several together, whose numbers are all drawn anew."""
    modules = {name: KINDS[name].make() for name in kinds}
    module = Together(modules) if len(kinds) > 1 else modules[kinds[0]]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point() or tensor.is_complex():
                drawn = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) / 2
            else:
                most = 2 if tensor.dtype == torch.bool else D
                drawn = torch.randint(most, tensor.shape, generator=generator)
            tensor.copy_(drawn)
    return module.to(current_device())
