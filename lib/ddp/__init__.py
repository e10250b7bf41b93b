"""Data parallelism: `wrappers.py` says what is sent when, `flat.py` sends it and takes the mean.

`launcher.py` starts the processes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "launcher": ["launch"],
        "process_group": ["rank", "world_size"],
        "wrappers": ["NaiveDDP", "FlatDDP", "OverlappedDDP", "BucketedDDP", "wrap"],
    },
)
