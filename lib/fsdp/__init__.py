"""Fully sharded data parallelism: `wrapper.py`, then `flat_parameters.py`; and checkpointing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "activation_checkpointing": ["checkpoint_activations"],
        "wrapper": ["FSDP"],
    },
)
