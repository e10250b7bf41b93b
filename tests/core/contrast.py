"""How well a color stands out from another one."""

import numpy as np
from matplotlib.colors import to_rgb


def luminance(color: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(a: str, b: str) -> float:
    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)
