"""Run one notebook with papermill in a kernel of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import papermill
from nbclient.output_widget import OutputWidget
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines

# ipykernel 7 warns at each start that its connection, inside this machine, is not encrypted.
KERNEL_ARGUMENTS = ["--IPKernelApp.log_level=CRITICAL"]


def execute(
    source: Path,
    output: Path | None,
    parameters: Mapping[str, Any] | None = None,
    on_cell: Callable[[int], None] | None = None,
) -> NotebookNode:
    """Run the notebook at `source` in its own folder; return it executed.

    Args:
        output: where the executed notebook is written, cell by cell.
        parameters: names from its cell tagged `parameters` -> values.
        on_cell: is told the number of cells done.

    Raises:
        papermill.PapermillExecutionError: a cell failed; `output` holds its traceback.
        RuntimeError: the kernel did not start, or died.
    """
    return papermill.execute_notebook(
        source,
        output,
        parameters,
        cwd=source.parent,
        engine_name="workbook",
        kernel_name="python3",
        progress_bar=False,
        on_cell=on_cell or (lambda count: None),
    )


class _OneWayOutput(OutputWidget):
    """Collects what an `Output` widget shows without telling the kernel.

    nbclient tells it over the socket that it waits on for the cell's end. Now and then that
    swallows the wake-up, and it waits for ever (seen with nbclient 0.11, pyzmq 27, ipykernel 7).
    """

    def send(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Engine(Engine):
    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, on_cell, start_timeout=60, **_):
        client = PapermillNotebookClient(
            nb_man,
            kernel_name=kernel_name,
            startup_timeout=start_timeout,
            extra_arguments=KERNEL_ARGUMENTS,
            on_cell_executed=lambda cell, cell_index, **_: on_cell(cell_index + 1),
        )
        client.widget_registry["@jupyter-widgets/output"]["OutputModel"] = _OneWayOutput
        return client.execute()


papermill_engines.register("workbook", _Engine)
