"""The base of all data-parallel wrappers: checks of the module, and its state dict."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.core.settings import require
from lib.ddp.process_group import world_size


class Structure:
    """The parts and parameters of a module, to check quickly in each step for changes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.named = dict(module.named_parameters(remove_duplicate=False))
        self.tables = [t for part in module.modules() for t in (part._parameters, part._modules)]
        self.held = self._found()

    def _found(self) -> list[Any]:
        return [value for table in self.tables for value in table.values()]

    def check(self) -> None:
        """Raise a `RuntimeError` if a parameter was replaced, or a trained one added."""
        found = self._found()
        if len(found) == len(self.held) and all(map(operator.is_, found, self.held)):
            return
        # something changed: a parameter, or only parts without one
        for name, param in self.module.named_parameters(remove_duplicate=False):
            is_known = name in self.named
            if param is not self.named.get(name) and (is_known or param.requires_grad):
                raise RuntimeError(
                    f"parameter {name} was {'replaced' if is_known else 'added'} after the module "
                    "was wrapped, for example by load_state_dict(assign=True); wrap the whole "
                    "module again"
                )


class Wrapper(nn.Module):
    """A module around another one, `module`, with that one's state dict."""

    module: nn.Module
    group: dist.ProcessGroup | None

    def note_parameters(self) -> None:
        """Note the module's parameters and where they are, for `check_parameters`."""
        self.structure = Structure(inner_module(self.module))
        named = self.structure.named
        self.frozen = {name: param for name, param in named.items() if not param.requires_grad}

    def check_parameters(self) -> None:
        """Raise a `RuntimeError` if a parameter was added, replaced or unfrozen since wrapping."""
        self.structure.check()
        for name, param in self.frozen.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen when the module was wrapped and is trained now; "
                    "wrap the module again"
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
