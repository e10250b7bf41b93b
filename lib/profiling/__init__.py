"""Measuring: time and memory of functions, traces, timelines, the roofline."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "measurement": ["measure", "measure_interleaved"],
        "profiler": ["profile"],
    },
)
