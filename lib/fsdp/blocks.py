"""Dividing a module into blocks, whose parameters are gathered together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.settings import require
from lib.fsdp.flat_parameters import FlatParameters, Places
from lib.optimizer.adamw import group_by

# Modules that are gathered together: one, or several that run one after another.
BlockOf = nn.Module | Sequence[nn.Module]
# Modules that hold others, and are not called themselves.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclasses.dataclass(eq=False)
class Block:
    """Modules whose parameters are gathered together."""

    modules: list[nn.Module]

    flats: list[FlatParameters]
    """Its parameters: one for each dtype, and for trained and frozen ones."""

    index: int


def default_blocks(module: nn.Module) -> list[nn.Module]:
    """Elements of each ModuleList, ModuleDict and Sequential, and other modules with matrices."""
    found = [part for child in module.children() for part in _blocks_of(child)]
    blocks = dict.fromkeys(part for part in found if any(p.ndim > 1 for p in part.parameters()))
    # those inside others are theirs, such as a layer that is used by itself too
    inside = {child for part in blocks for child in part.modules() if child is not part}
    return [part for part in blocks if part not in inside]


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, (*CONTAINERS, nn.Sequential)):
        parts = list(module.children())
        found = [_blocks_of(part) if isinstance(part, CONTAINERS) else [part] for part in parts]
        return [part for several in found for part in several]
    return [module] if _has_matrix(module) else default_blocks(module)


def make_blocks(
    module: nn.Module,
    chosen: list[list[nn.Module]],
    group: dist.ProcessGroup | None,
    compute_dtype: torch.dtype | None,
    full_precision: Iterable[nn.Module],
) -> tuple[list[Block], dict[str, nn.Parameter]]:
    """Divide the parameters: blocks, the last for what is outside of all others; and the rest."""
    named, places = dict(module.named_parameters()), _places_of(module)
    name_of = {id(param): name for name, param in named.items()}
    keeps_dtype = {id(param) for part in full_precision for param in part.parameters()}

    def kind_of(param: Tensor) -> tuple[Any, ...]:
        return id(param) in keeps_dtype, param.dtype, param.device, param.requires_grad

    # in a block, those that share a buffer: of one dtype, trained or frozen, gathered in one dtype
    blocks = []
    for index, (modules, names) in enumerate(zip([*chosen, []], divide(module, chosen))):
        flats = []
        params: list[Any] = [named.pop(name) for name in names]
        for (keeps, *_), alike in group_by(params, kind_of):
            members: dict[str, Any] = {name_of[id(param)]: param for param in alike}
            at = [places[id(param)] for param in alike]
            flats.append(FlatParameters(members, at, group, None if keeps else compute_dtype))
        blocks.append(Block(modules, flats, index))
    return blocks, named


def divide(module: nn.Module, blocks: list[list[nn.Module]]) -> list[list[str]]:
    """Names of the parameters of each block, and last of those outside of blocks or in several.

    Vectors belong to the matrices of their module, as a bias does. Modules of vectors alone, such
    as norms, are left out.
    """
    homes: dict[int, set[int]] = {}
    for number, modules in enumerate(blocks):
        for part in modules:
            for param in part.parameters():
                homes.setdefault(id(param), set()).add(number)
    divided = {
        id(param)
        for part in module.modules()
        if _has_matrix(part)
        for param in part.parameters(recurse=False)
    }
    names: list[list[str]] = [[] for _ in range(len(blocks) + 1)]
    for name, param in module.named_parameters():
        if id(param) in divided:
            found = sorted(homes.get(id(param), ()))
            names[found[0] if len(found) == 1 else -1].append(name)
    return names


def _has_matrix(module: nn.Module) -> bool:
    return any(param.ndim >= 2 for param in module.parameters(recurse=False))


def _places_of(module: nn.Module) -> dict[int, Places]:
    """Where each parameter is found, by its id."""
    places: dict[int, Places] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((part, name))
    return places


def checked_facts(
    module: nn.Module,
    blocks: list[list[nn.Module]],
    full_precision: list[nn.Module],
    options: dict[str, Any],
) -> dict[str, str]:
    """Check module and blocks; return what must be the same on all ranks."""
    dtype = options["compute_dtype"]
    require(
        dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point),
        f"compute_dtype must be a floating-point dtype of torch, got {dtype!r}",
    )
    known, parts = set(module.modules()), [part for modules in blocks for part in modules]
    for argument, given in (("blocks", parts), ("full_precision", full_precision)):
        for part in given:
            require(
                part in known,
                f"{argument} must be modules inside the wrapped one, got a {type(part).__name__} "
                "that is not",
            )
    inside = [child for part in parts for child in part.modules() if child is not part]
    for part in parts:
        require(
            part not in inside and parts.count(part) == 1,
            f"blocks must not overlap, got a {type(part).__name__} that is in two of them",
        )
    for name, param in module.named_parameters():
        has_hooks = bool(param._backward_hooks or param._post_accumulate_grad_hooks)
        require(
            not has_hooks,
            f"{name} must have no gradient hook, which would see no gradient, such as that of "
            "another wrapper; wrap the module itself",
        )
        require(param.grad is None, f"{name} must have no gradient before it is divided")
    facts = {name: str(value) for name, value in options.items()}
    names = divide(module, blocks)
    return facts | {f"block {i}": ", ".join(block) for i, block in enumerate(names)}


# A module's output


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in dataclasses, and in lists, dicts and what else PyTorch can take apart."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))
