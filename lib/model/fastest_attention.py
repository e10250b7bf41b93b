"""Which attention kernel trains fastest on this GPU: measured once, then read from a file."""

import contextlib
import hashlib
import json
import logging
import statistics
from functools import partial

import torch

from lib.core.files import lock_file, write_atomically
from lib.flash_attention.cuda.build import SOURCES, cache_folder
from lib.model.attention import attention
from lib.model.config import AttentionKernel, ModelConfig

# Triton emits no tensor-core instructions for the chips that are asked about here.
CANDIDATES: tuple[AttentionKernel, ...] = ("sdpa", "flash_attention_cuda")
BATCH_SIZE, WARMUP, SAMPLES = 8, 3, 10
log = logging.getLogger(__name__)


def pick_attention_kernel(
    model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> AttentionKernel:
    """Return the model's attention kernel; where that is `auto`, the best one for the device.

    On a CUDA GPU before Ampere, such as a T4, in float16: the fastest of CANDIDATES, forward and
    backward, in the shape of the model. The times are kept in the user's cache folder, and one line
    of the log says them. Elsewhere: `sdpa`.
    """
    if model.attention_kernel != "auto":
        return model.attention_kernel
    is_older = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if not is_older or dtype != torch.float16:
        return "sdpa"
    times = attention_times(model, device)
    best = min(times, key=times.__getitem__)
    shown = ", ".join(f"{name} {ms:.3g} ms" for name, ms in times.items())
    log.info(
        "attention_kernel %s, the fastest on %s: %s",
        best,
        torch.cuda.get_device_name(device),
        shown,
    )
    return best


def attention_times(model: ModelConfig, device: torch.device) -> dict[AttentionKernel, float]:
    """Milliseconds of causal attention in float16, forward and backward, with each candidate."""
    sizes = (model.num_heads, model.context_length, model.head_dim)
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.cu*")))
    place = (torch.cuda.get_device_name(device), torch.__version__, *sizes)
    key = hashlib.sha256(repr(place).encode() + sources).hexdigest()[:24]
    try:
        path = cache_folder() / f"attention-{key}.json"
        # one process of a machine measures, the others read
        with lock_file(path):
            # there is no file yet, or it is damaged
            with contextlib.suppress(FileNotFoundError, ValueError):
                return json.loads(path.read_text(encoding="utf-8"))
            times = _measure(sizes, device)
            # what fails now, for want of a compiler or of memory, may run next time
            if len(times) == len(CANDIDATES):
                write_atomically(path, json.dumps(times))
            return times
    except OSError as error:
        log.warning("%s; attention is measured again next time", error)
        return _measure(sizes, device)


def _measure(sizes: tuple[int, int, int], device: torch.device) -> dict[AttentionKernel, float]:
    """Measure `attention_times` of num_heads, context_length and head_dim."""
    options: dict = {"device": device, "dtype": torch.float16}
    q, k, v = (torch.randn(BATCH_SIZE, *sizes, **options).requires_grad_() for _ in range(3))
    grad_out = torch.randn(BATCH_SIZE, *sizes, **options)

    def both_passes(kernel: str) -> None:
        torch.autograd.grad(attention(q, k, v, kernel=kernel), (q, k, v), grad_out)

    times: dict[AttentionKernel, float] = {}
    for kernel in CANDIDATES:
        try:
            times[kernel] = _median_ms(partial(both_passes, kernel), device)
        # sdpa always runs; ours may lack its compiler or meet a chip that it does not know
        except (RuntimeError, ValueError) as error:
            if kernel == "sdpa":
                raise
            log.warning("%s does not run here: %s", kernel, error)
    return times


def _median_ms(run: partial, device: torch.device) -> float:
    samples = []
    with torch.cuda.device(device):
        for _ in range(WARMUP + SAMPLES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end))
    return statistics.median(samples[WARMUP:])
