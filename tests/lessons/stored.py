"""What a committed notebook or a report keeps of a widget."""

from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

from lib.tools.publish.cells import WIDGET_STATE, WIDGET_VIEW, static_widgets


def stored_outputs(box: Any) -> list[NotebookNode]:
    """The outputs of a cell that ends in the widget `box`, once nobody can move it."""
    from ipywidgets import Widget

    state = Widget.get_manager_state(widgets=None)["state"]
    view = {WIDGET_VIEW: {"model_id": box.model_id}, "text/plain": "VBox(…)"}
    cell = new_code_cell("box", outputs=[new_output("display_data", view)])
    metadata = {"widgets": {WIDGET_STATE: {"state": state}}}
    return static_widgets(new_notebook(cells=[cell], metadata=metadata)).cells[0].outputs
