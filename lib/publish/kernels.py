"""How the kernels of notebooks are started and reached."""

from __future__ import annotations

import secrets
import subprocess

import zmq

from lib.core.files import folder_for_sockets

# ipykernel 7 warns at each start that its connection, inside this machine, is not encrypted.
KERNEL_ARGUMENTS = ["--IPKernelApp.log_level=CRITICAL"]
# ipykernel repeats on the terminal what child processes print, which is in the outputs anyway.
NO_TERMINAL = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
# ipykernel takes what they print for UTF-8, whatever the terminal's encoding.
UTF8 = {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}


def connection() -> dict[str, str]:
    """Return the settings of a kernel manager that reaches its kernel through files.

    By default it looks for free ports, and the kernel takes them a second later. If another program
    has taken one in between, such as a rank of a notebook beside it, the kernel dies at its start.
    """
    if not zmq.has("ipc"):
        return {}
    return {"transport": "ipc", "ip": f"{folder_for_sockets()}/kernel-{secrets.token_hex(8)}"}
