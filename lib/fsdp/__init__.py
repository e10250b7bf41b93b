"""Fully sharded data parallelism, from `wrapper.py` on, and activation checkpointing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "activation_checkpointing": ["checkpoint_activations"],
        "wrapper": ["FSDP"],
    },
)
