"""Notebooks as files, and their cells as they are shown and committed: static widgets, metadata."""

from __future__ import annotations

import base64
import copy
import html
import re
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode, from_dict
from nbformat.v4 import new_output

from lib.core.files import write_atomically
from lib.core.png import in_palette

TEMPLATES = Path(__file__).resolve().parent / "templates"
# Where the workbook is published; [project.urls] in pyproject.toml has the same address.
REPOSITORY = "https://github.com/OWNER/training-workbook"
NAME = REPOSITORY.rsplit("/", 1)[1]
# The first code cell of every notebook, word for word, and folded; `make lint` compares. The
# workbook is in the folder above, in this one, or, for a notebook alone on Colab or Kaggle, fetched
# into it: elsewhere that would be a second one. It looks for lib/lessons, since Kaggle has a lib of
# its own above the working folder. JupyterLab shows the first line of what is folded.
FIRST_CELL = f"""\
# Find the workbook: in the folder above, here, or fetched
!ls ../lib lib */lib 2>/dev/null | grep -q lessons || \\
    ([ $COLAB_RELEASE_TAG$KAGGLE_KERNEL_RUN_TYPE ] && \\
    git clone --depth 1 {REPOSITORY}) || \\
    echo "This notebook is not in its workbook: open it there, as make lab does."
__import__("sys").path[:0] = ["..", ".", "{NAME}"]
%load_ext lib.lessons.notebook"""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


def read_notebook(path: Path) -> NotebookNode:
    """Read the notebook at `path`; a file that holds none is a ValueError with its path."""
    try:
        return nbformat.read(path, as_version=4)
    except OSError:
        raise
    # nbformat raises whatever comes up
    except Exception as error:
        raise ValueError(f"{path} is no notebook: {str(error) or error!r:.100}") from error


def save_notebook(path: Path, notebook: NotebookNode) -> None:
    """Write `notebook` to `path`, whole or not at all."""
    write_atomically(path, nbformat.writes(notebook) + "\n")


def clean(notebook: NotebookNode) -> NotebookNode:
    """Return a copy of `notebook` with the metadata that is committed and no other.

    Cells keep their tags, pictures their sizes; code tagged `folded` is shown folded. Pieces of one
    stream are joined, and of a line that was overwritten again and again (a progress bar) the last
    state stays. Pictures get a palette.
    """
    notebook = copy.deepcopy(notebook)
    notebook.metadata = from_dict(METADATA)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = from_dict(cell_metadata(tags))
        if cell.cell_type == "code":
            cell.outputs = _joined_streams(cell.outputs)
            for picture in (out.data for out in cell.outputs if "image/png" in out.get("data", {})):
                png = in_palette(base64.b64decode(picture["image/png"]))
                picture["image/png"] = base64.b64encode(png).decode()
    return notebook


def cell_metadata(tags: list[str] | None) -> dict[str, Any]:
    """Return the metadata that a cell is committed with: tags, and whether code is folded."""
    folded = {"jupyter": {"source_hidden": True}} if tags and "folded" in tags else {}
    return ({"tags": tags} if tags else {}) | folded


def static_widgets(notebook: NotebookNode) -> NotebookNode:
    """Return a copy of `notebook` whose widgets are replaced by what they last showed.

    An `Output` widget (also the one inside `interact`) becomes its outputs, a control its name and
    value as text, a container its children. Without saved state the text form stays.
    """
    notebook = copy.deepcopy(notebook)
    models = notebook.metadata.pop("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        outputs = []
        for output in cell.outputs:
            is_widget = WIDGET_VIEW in output.get("data", {})
            outputs += _static(output, models) if is_widget else [output]
        cell.outputs = _joined_streams(outputs)
    return notebook


def _joined_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join printed pieces into one text, without what a carriage return overwrote."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    for output in joined:
        if output.output_type == "stream":
            output.text = re.sub(r"(?m)^[^\n]*\r(?!\n)", "", output.text)
    return joined


def _static(output: NotebookNode, models: dict[str, Any]) -> list[NotebookNode]:
    """Return the outputs that stand in for the widget in `output`: a line of text, and pictures."""
    texts: list[str] = []
    shown = _shown_by(output.data[WIDGET_VIEW].get("model_id"), models, texts)
    if not texts and not shown:
        texts = [output.data.get("text/plain", "")]
    if not any(texts):
        return shown
    # HTML collapses spaces, so parts are separated by dots there
    line = f'<div class="report-widget">{html.escape(" · ".join(texts))}</div>'
    data = {"text/html": line, "text/plain": "  ".join(texts)}
    return [new_output("display_data", data=data), *shown]


def _shown_by(model_id: str | None, models: dict[str, Any], texts: list[str]) -> list[NotebookNode]:
    """Return the outputs that the widget shows, and append its texts to `texts`."""
    model = models.get(model_id)
    if model is None:
        return []
    state = model["state"]
    if model["model_name"] == "OutputModel":
        return [from_dict(_without_twin(output)) for output in state.get("outputs", [])]
    if "children" not in state:
        texts += _texts_of(model["model_name"], state)
    shown = []
    for child in state.get("children", []):
        shown += _shown_by(child.removeprefix("IPY_MODEL_"), models, texts)
    return shown


def _without_twin(output: dict[str, Any]) -> dict[str, Any]:
    """Return `output` without the HTML of a picture, which is for a running JupyterLab only."""
    data = output.get("data", {})
    if "image/png" not in data:
        return output
    return output | {"data": {kind: data[kind] for kind in data if kind != "text/html"}}


def _texts_of(name: str, state: dict[str, Any]) -> list[str]:
    """Return a control's description and value: only the former for bars, none for buttons."""
    if "Button" in name and "Toggle" not in name:
        return []
    if "Progress" in name or "Image" in name:
        value = ""
    elif state.get("index") in range(len(state.get("_options_labels", ()))):
        value = state["_options_labels"][state["index"]]
    else:
        value = state.get("value", "")
    description, value = _plain(state.get("description") or ""), _plain(value)
    text = f"{description}: {value}" if description and value else description or value
    return [text] if text else []


def _plain(markup: Any) -> str:
    return " ".join(html.unescape(re.sub("<[^>]+>", "", str(markup))).split())
