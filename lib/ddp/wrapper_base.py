"""The base of all data-parallel wrappers: checks of the module, and its state dict."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.core.settings import require
from lib.ddp.process_group import world_size


class Structure:
    """The parts and parameters of a module, to check quickly in each step for changes."""

    def __init__(self, module: nn.Module) -> None:
        self.parts = dict(module.named_modules())
        self.held = [
            (found, key, value)
            for part in self.parts.values()
            for found in (part._parameters, part._modules)
            for key, value in found.items()
        ]

    def is_unchanged(self) -> bool:
        """Whether no part and no parameter was added, removed or replaced."""
        count = 0
        for part in self.parts.values():
            count += len(part._parameters) + len(part._modules)
        for found, key, value in self.held:
            if found.get(key) is not value:
                return False
        return count == len(self.held)

    def parameters(self) -> list[tuple[nn.Module, str, str, Tensor]]:
        """Part, its name for the parameter, name in the module, and parameter, as noted."""
        owners = {id(part._parameters): (part, name) for name, part in self.parts.items()}
        known = []
        for found, key, value in self.held:
            if isinstance(value, Tensor):
                part, name = owners[id(found)]
                known.append((part, key, f"{name}.{key}".lstrip("."), value))
        return known


class Wrapper(nn.Module):
    """A module around another one, `module`, with that one's state dict."""

    module: nn.Module
    group: dist.ProcessGroup | None

    def note_parameters(self) -> None:
        """Note the module's parameters and where they are, for `check_parameters`."""
        self.structure = Structure(inner_module(self.module))
        self.frozen = [param for param in self.module.parameters() if not param.requires_grad]

    def check_parameters(self) -> None:
        """Raise a `RuntimeError` if a parameter was added, replaced or unfrozen since wrapping."""
        # quick, in each step
        are_frozen = not any(param.requires_grad for param in self.frozen)
        if are_frozen and self.structure.is_unchanged():
            return
        # something changed: a parameter, or only parts without one
        known = self.structure.parameters()
        for part, key, name, param in known:
            if part._parameters.get(key) is not param:
                raise RuntimeError(
                    f"parameter {name} was replaced after the module was wrapped, for example by "
                    "load_state_dict(assign=True); wrap the module again"
                )
        frozen = {id(param) for param in self.frozen}
        trained = {id(param) for *_, param in known} - frozen
        for name, param in inner_module(self.module).named_parameters():
            if param.requires_grad and id(param) not in trained:
                what = "frozen when" if id(param) in frozen else "added after"
                raise RuntimeError(
                    f"parameter {name} was {what} the module was wrapped and is trained now; wrap "
                    "the module again"
                )

    def __getstate__(self) -> dict[str, Any]:
        """The state for `copy.deepcopy` and pickle.

        Raises:
            TypeError: on several ranks; a copy would average nothing.
        """
        if world_size(self.group) > 1:
            raise TypeError(
                f"{type(self).__name__} on several ranks cannot be copied or pickled; copy its "
                "module, and wrap that"
            )
        return super().__getstate__()  # type: ignore[misc]  # object's

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict, under its own names, compiled or not."""
        return inner_module(self.module).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module; every rank must load the same."""
        return inner_module(self.module).load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as a part of another module, whose state dict has the module's own names."""
        inner = inner_module(self.module)
        path = next(name for name, part in self.named_modules() if part is inner)
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}{path}.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)


def inner_module(module: Any) -> Any:
    """The module itself, or the one inside if `torch.compile` wrapped it."""
    return getattr(module, "_orig_mod", module)


def check_not_wrapped(module: nn.Module) -> None:
    """Refuse a module, or one with a part, whose gradients are averaged already."""
    for name, part in module.named_modules():
        is_wrapped = isinstance(part, (Wrapper, DistributedDataParallel))
        require(
            not is_wrapped,
            f"module must not be wrapped already, but {name or 'it'} is {type(part).__name__}; "
            "wrap the module inside it, .module, alone",
        )
    for name, param in inner_module(module).named_parameters():
        wrapper = wrapper_of(param)
        require(
            not wrapper,
            f"module must not be wrapped already, but a {wrapper} averages the gradient of {name}; "
            "delete it first",
        )


def wrapper_of(param: Tensor) -> str:
    """The class of the wrapper that averages a parameter's gradient; "" if there is none.

    PyTorch's watches one parameter of its module alone.
    """
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        # as `add_hook` makes them
        owner = hook.args[0] if isinstance(hook, functools.partial) and hook.args else None
        if isinstance(owner, Wrapper):
            return owner.__class__.__name__
    return ""
