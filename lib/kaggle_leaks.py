"""A search for what should not leave a machine: credentials, home folders, the machine's name."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

from lib.hardware import ROOT

# What each pattern finds, for the message.
PATTERNS = {
    "a home folder": r"(?<![\w./:-])/(?:home|Users|root)/[\w.-]+",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a key of Kaggle": r"\bKGAT_[0-9a-f]{16,}|[\"']key[\"']\s*:\s*[\"'][0-9a-f]{32}[\"']",
    "a key of W&B": r"(?i)wandb[_-]?api[_-]?key\W{1,4}[0-9a-f]{40}|api\.wandb\.ai\s+login",
    "a token of GitHub": r"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_\w{20,}",
    "a token of Hugging Face": r"\bhf_[A-Za-z0-9]{30,}",
    "a key of AWS": r"(?<![A-Za-z0-9+/])AKIA[0-9A-Z]{16}(?![A-Za-z0-9+/=])",
    "a key of Google": r"\bAIza[\w-]{35}",
    "a secret key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a password": r"(?i)\b(?:password|passwd|secret|api_?key|access_?token)"
    r"[\"']?\s*[:=]\s*[\"'][^\"'\s]{8,}[\"']",
}
# A name that every second machine has says nothing.
COMMON_NAMES = ("localhost", "kaggle", "workbook", "ubuntu", "debian", "docker")


def find_leaks(folder: Path) -> list[str]:
    """What the files in `folder` should not hold: `name: what it is, the text found`."""
    patterns = _compiled()
    leaks = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            # each byte a character: text in binary files is found too
            content = path.read_bytes().decode("latin-1")
            name = path.relative_to(folder).as_posix()
            leaks += [f"{name}: {found}" for found in leaks_in(content, patterns)]
    return leaks


def leaks_in(text: str, patterns: dict[str, re.Pattern] | None = None) -> Iterator[str]:
    """What of `patterns` (by default all) stands in `text`: the first of each kind."""
    for what, pattern in (patterns or _compiled()).items():
        if match := pattern.search(text):
            yield f"{what}, {match[0][:60]!r}"


def _compiled() -> dict[str, re.Pattern]:
    every = PATTERNS | of_this_machine()
    return {what: re.compile(pattern, re.ASCII) for what, pattern in every.items()}


def of_this_machine() -> dict[str, str]:
    """Patterns for its name and for the folders of this user and this workbook."""
    name = socket.gethostname().split(".")[0]
    found = {}
    if len(name) >= 5 and name.lower() not in COMMON_NAMES:
        found["the name of this machine"] = rf"(?<![\w-]){re.escape(name)}(?![\w-])"
    for what, path in (("your home folder", Path.home()), ("this workbook's folder", ROOT)):
        # the root of a disk, or one step below, is the same on many machines
        if len(path.parts) > 2:
            found[what] = re.escape(str(path)) + r"(?![\w-])"
    return found
