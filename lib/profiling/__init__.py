"""Measuring: `measurement.py` times functions, `profiler.py` a training step; `roofline.py`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "measurement": ["measure", "measure_interleaved"],
        "profiler": ["profile"],
    },
)
