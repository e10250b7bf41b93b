"""The choice between the readable tokenizer (`bpe.py`) and the one that Numba compiles."""

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

IMPLEMENTATIONS = ("auto", "python", "numba")
# below this size, compiling with Numba or even loading its cache costs more than it saves
COMPILED_TRAINING_BYTES = 8 << 20
# bytes that a tokenizer encodes before it loads the compiled code; before it uses code that is
# loaded already
COMPILED_ENCODING_BYTES, COMPILED_AGAIN_BYTES = 1 << 20, 1 << 12
# the address space that importing and compiling with Numba takes
NUMBA_BYTES = 1 << 30
log = logging.getLogger(__name__)


class CompiledCode:
    """Loads the code for encoding once, in a thread: seconds if Numba must compile it first."""

    def __init__(self):
        self._lock = threading.Lock()
        self._loaded: Future | None = None

    def load(self, first_use: Callable[[], None]) -> None:
        """Begin to load the code, unless that was done before or Numba cannot be used here.

        `first_use` uses all of it once.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = Future()
                if choose_implementation("auto", COMPILED_ENCODING_BYTES, 0) == "numba":
                    name = "load compiled tokenizer"
                    threading.Thread(target=self._load, args=(first_use,), name=name).start()

    def _load(self, first_use: Callable[[], None]) -> None:
        try:
            first_use()
            self._loaded.set_result(None)
        except Exception:
            log.exception("tokenizer: Numba failed, so the Python implementation goes on")

    def is_ready(self) -> bool:
        """Whether the code is loaded."""
        return self._loaded is not None and self._loaded.done()


COMPILED_CODE = CompiledCode()


def choose_implementation(implementation: str, num_bytes: int, threshold: int) -> str:
    """Resolve "auto" for an input of `num_bytes`: "numba" from `threshold` bytes on. Logs it."""
    check_implementation(implementation)
    if implementation != "auto":
        return implementation
    reason = None
    if num_bytes < threshold:
        reason = "small input"
    elif not numba_installed():
        reason = "Numba is not installed"
    elif not _numba_fits():
        reason = "too little address space for Numba"
    if reason is None:
        log.info("tokenizer: compiled implementation (Numba) for %.1f MB", num_bytes / 1e6)
        return "numba"
    log.info("tokenizer: Python implementation for %.1f MB (%s)", num_bytes / 1e6, reason)
    return "python"


def check_implementation(implementation: str) -> None:
    """Raise `ValueError` for an unknown implementation, `ImportError` for a missing one."""
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation must be one of {known}, got {implementation!r}")
    if implementation == "numba" and not numba_installed():
        raise ImportError("implementation 'numba' needs the package numba, which is not installed")


def numba_installed() -> bool:
    """Whether the compiled implementation is available."""
    return importlib.util.find_spec("numba") is not None


def _numba_fits() -> bool:
    """Whether a limit on this process's address space leaves enough for Numba.

    An import that runs out of memory halfway can leave Python itself broken.
    """
    if "numba" in sys.modules or not Path("/proc/self/statm").exists():
        return True
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limit == resource.RLIM_INFINITY or limit - used > NUMBA_BYTES
