"""Settings and measures of what trains on ranks in notebook 09."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# With its usual eps, AdamW takes full-size steps on gradients that are mere rounding errors.
SETTINGS: dict = {"lr": 1e-2, "eps": 1e-4}


def weights_of(module: nn.Module) -> Tensor:
    """The flattened weights of `module`."""
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
