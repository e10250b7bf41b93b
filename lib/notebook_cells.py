"""Notebook cells as they are shown and committed: widgets made static, metadata clean."""

from __future__ import annotations

import copy
import html
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbformat import NotebookNode

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def clean(notebook: NotebookNode) -> NotebookNode:
    """A copy of `notebook` with the metadata that is committed and no other.

    Cells keep their tags, pictures their sizes. Pieces of one stream are joined, and of a line
    that was written over again and again (a progress bar) the last state stays.
    """
    from nbformat import from_dict

    notebook = copy.deepcopy(notebook)
    notebook.metadata = from_dict(METADATA)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs = _joined_streams(cell.outputs)
    return notebook


def _joined_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """`outputs` with printed pieces in one text, without what a carriage return overwrote."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    for output in joined:
        if output.output_type == "stream":
            output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
    return joined


def static_widgets(notebook: NotebookNode) -> NotebookNode:
    """A copy of `notebook` whose widgets are replaced by what they last showed.

    An `Output` widget (also the one inside `interact`) gives its outputs, a control its name and
    value as text, a container its children. Without saved state the text form stays.
    """
    from nbformat.v4 import new_output

    notebook = copy.deepcopy(notebook)
    models = notebook.metadata.pop("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for cell in notebook.cells:
        outputs = []
        for output in cell.get("outputs", []):
            view = output.get("data", {}).get(WIDGET_VIEW)
            if view is None:
                outputs.append(output)
                continue
            words: list[str] = []
            shown = _shown_by(view["model_id"], models, words)
            if not words and not shown:
                words = [output.data.get("text/plain", "")]
            if text := "  ".join(words):
                # HTML makes one space of several
                said = html.escape(" · ".join(words))
                line = f'<div class="report-widget">{said}</div>'
                data = {"text/html": line, "text/plain": text}
                outputs.append(new_output("display_data", data=data))
            outputs += shown
        if cell.cell_type == "code":
            cell.outputs = _joined_streams(outputs)
    return notebook


def _shown_by(model_id: str, models: dict[str, Any], words: list[str]) -> list[NotebookNode]:
    """The outputs that the widget shows; what it says in text is added to `words`."""
    from nbformat import from_dict

    model = models.get(model_id)
    if model is None:
        return []
    state = model["state"]
    if model["model_name"] == "OutputModel":
        return [from_dict(_once(output)) for output in state.get("outputs", [])]
    if "children" not in state:
        words += _words_of(model["model_name"], state)
    shown = []
    for child in state.get("children", []):
        shown += _shown_by(child.removeprefix("IPY_MODEL_"), models, words)
    return shown


def _once(output: dict[str, Any]) -> dict[str, Any]:
    """`output` without the HTML of a picture, which is there only for a running JupyterLab."""
    data = output.get("data", {})
    if "image/png" not in data:
        return output
    return output | {"data": {kind: data[kind] for kind in data if kind != "text/html"}}


def _words_of(name: str, state: dict[str, Any]) -> list[str]:
    """A control's description and value: of bars and pictures the former alone, of buttons none."""
    if "Button" in name and "Toggle" not in name:
        return []
    if "Progress" in name or "Image" in name:
        value = ""
    elif "_options_labels" in state and isinstance(state.get("index"), int):
        value = state["_options_labels"][state["index"]]
    else:
        value = state.get("value", "")
    description, value = _plain(state.get("description") or ""), _plain(value)
    text = f"{description}: {value}" if description and value else description or value
    return [text] if text else []


def _plain(markup: Any) -> str:
    return " ".join(html.unescape(re.sub("<[^>]+>", "", str(markup))).split())
