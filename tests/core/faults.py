"""Deliberate faults in this room; `tests/test_faults.py` shows that the tests catch each."""

from tests.fault import Fault

FAULTS = [
    # a partial file stays behind after an error
    Fault(
        "lib/core/files.py",
        "partial.unlink(missing_ok=True)",
        "pass",
        "tests/core/test_files.py",
    ),
    # a lock that excludes nobody
    Fault(
        "lib/core/files.py",
        "        lock.acquire()\n",
        "",
        "tests/core/test_files.py",
    ),
    # a torn line swallows the next record
    Fault(
        "lib/core/records.py",
        'if size and (file.seek(size - 1), file.read(1))[1] != b"\\n":',
        "if not size:",
        "tests/core/test_records.py",
    ),
    # 9.999 shows as 10.00
    Fault(
        "lib/core/records.py",
        'rounded = float(f"{value:.2e}") if abs(value) < 1000 else value',
        "rounded = value",
        "tests/core/test_records.py",
    ),
    # configs are the same only with their keys in the same order
    Fault(
        "lib/core/records.py",
        "json.dumps(config, sort_keys=True, default=plain)",
        "json.dumps(config, default=plain)",
        "tests/core/test_records.py",
    ),
    # true passes for 1
    Fault(
        "lib/core/settings.py",
        "if hint is Any or type(value) is hint:",
        "if hint is Any or isinstance(value, hint):",
        "tests/core/test_settings.py",
    ),
    # --no_flag switches the flag on
    Fault(
        "lib/core/settings.py",
        "is_on=key == last)",
        "is_on=True)",
        "tests/core/test_settings.py",
    ),
    Fault(
        "lib/core/settings.py",
        "object_pairs_hook=_unique_keys, parse_constant",
        "parse_constant",
        "tests/core/test_settings.py",
    ),
    # bfloat16 on a T4, which only emulates it
    Fault(
        "lib/core/hardware.py",
        "get_device_capability(device) >= (8, 0)",
        "get_device_capability(device) >= (7, 0)",
        "tests/core/test_hardware.py",
    ),
    Fault(
        "lib/core/hardware.py",
        "if len(pending) >= ahead:",
        "if len(pending) > ahead:",
        "tests/core/test_hardware.py",
    ),
    # NVTX ranges around the innermost one of the same object never close
    Fault(
        "lib/core/ranges.py",
        "innermost, self._open = self._open",
        "innermost, self._open = self._open[0], None",
        "tests/core/test_ranges.py",
    ),
    # memory at the end of a call instead of its peak
    Fault(
        "lib/core/allocator.py",
        "peak = max(peak, allocated)",
        "peak = allocated",
        "tests/core/test_allocator.py",
    ),
    Fault(
        "lib/core/allocator.py",
        "error = error.__context__",
        "error = None",
        "tests/core/test_allocator.py",
    ),
    # SVG files with random ids
    Fault(
        "lib/core/figures.py",
        '"svg.hashsalt": "lib",',
        "",
        "tests/core/test_figures.py",
    ),
    # a Literal 1 takes true
    Fault(
        "lib/core/settings.py",
        "any(type(value) is type(a) and value == a for a in arguments)",
        "value in arguments",
        "tests/core/test_settings.py",
    ),
    # a list stays one where a tuple is declared
    Fault(
        "lib/core/settings.py",
        "        object.__setattr__(config, name, value)\n",
        "",
        "tests/core/test_settings.py",
    ),
]
