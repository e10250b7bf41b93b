"""One notebook is run: how its kernel is started, reached and ended."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq
from nbclient import NotebookClient
from nbclient.output_widget import OutputWidget
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from traitlets.config import Config

from lib.core.files import folder_for_sockets

# ipykernel 7 warns at each start that its connection, inside this machine, is not encrypted.
KERNEL_ARGUMENTS = ["--IPKernelApp.log_level=CRITICAL"]
# ipykernel repeats on the terminal what child processes print, which is in the outputs anyway.
NO_TERMINAL = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
# ipykernel takes what they print for UTF-8, whatever the terminal's encoding.
UTF8 = {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}


def execute(
    notebook: NotebookNode,
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    past_errors: bool = False,
    on_cell: Callable[[int], None] | None = None,
    clients: set[NotebookClient] | None = None,
) -> NotebookNode:
    """Run `notebook` with `folder` as its working folder; its outputs are put into it.

    Args:
        environment: variables that the kernel gets beside those of this process.
        past_errors: whether cells after a failed one are run, too.
        on_cell: called with the number of cells done.
        clients: has what runs the notebook, as long as it does; see `kill`.

    Returns:
        The same notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; its outputs have the traceback.
        RuntimeError: the kernel did not start, or died.
    """
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        allow_errors=past_errors,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=KERNEL_ARGUMENTS,
        config=Config(KernelManager=connection()),
    )
    if on_cell:
        client.on_cell_executed = lambda cell, cell_index, execute_reply: on_cell(cell_index + 1)
    client.widget_registry["@jupyter-widgets/output"]["OutputModel"] = _OneWayOutput
    # one line per notebook that it runs
    client.log.setLevel(logging.WARNING)
    clients = set() if clients is None else clients
    clients.add(client)
    try:
        return client.execute(env=os.environ | UTF8 | dict(environment or {}), **NO_TERMINAL)
    finally:
        clients.discard(client)


def kill(client: NotebookClient) -> None:
    """End the kernel of a notebook that another thread runs, and what the kernel has started."""
    process = getattr(client.km and client.km.provisioner, "process", None)
    with contextlib.suppress(OSError):
        if process and os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        elif process:
            process.kill()


def insert_parameters(notebook: NotebookNode, source: str) -> None:
    """Put a cell with `source` below the one tagged `parameters`, as papermill does."""
    tags = [cell.metadata.get("tags", ()) for cell in notebook.cells]
    index = next(index for index, found in enumerate(tags) if "parameters" in found)
    cell = new_code_cell(source, metadata={"tags": ["injected-parameters"]})
    notebook.cells.insert(index + 1, cell)


def connection() -> dict[str, str]:
    """Return the settings of a kernel manager that reaches its kernel through files.

    By default it looks for free ports, and the kernel takes them a second later. If another program
    has taken one in between, such as a rank of a notebook beside it, the kernel dies at its start.
    """
    if not zmq.has("ipc"):
        return {}
    return {"transport": "ipc", "ip": f"{folder_for_sockets()}/kernel-{secrets.token_hex(8)}"}


class _OneWayOutput(OutputWidget):
    """Collects what an `Output` widget shows without sending it back to the kernel.

    nbclient sends it over the socket on which it waits for the cell's end. Now and then that
    swallows the wake-up, and it waits for ever (seen with nbclient 0.11, pyzmq 27, ipykernel 7).
    """

    def send(self, *args: Any, **kwargs: Any) -> None:
        pass
