"""Figures and tables of an executed notebook as files beside its page: PNG and CSV."""

from __future__ import annotations

import base64
import csv
import io
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from lib.files import make_folder

if TYPE_CHECKING:
    from nbformat import NotebookNode

TITLE_LENGTH = 90
NUMBER = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


def save_downloads(notebook: NotebookNode, folder: Path) -> list[dict[str, str]]:
    """Write each picture and each table of `notebook` into `folder`, which is made anew.

    An output that is written gets the name of its file, with the folder's, as
    `metadata["download"]`, for the link on the page.

    Returns:
        For each file `href` (its name, with the folder's), `kind` (PNG or CSV) and `title`: of a
        picture what it shows, of a table the heading above it and its columns. Between these
        stands the line printed right above the table where titles would be the same otherwise.
    """
    shutil.rmtree(folder, ignore_errors=True)
    found: list[dict[str, str]] = []
    heading, captioned = "", {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = _last_heading(cell.source) or heading
        caption = ""
        for output in cell.get("outputs", []):
            data, above = output.get("data", {}), caption
            caption = _last_line(output.get("text", ""))
            if "image/png" in data:
                content, kind, title = base64.b64decode(data["image/png"]), "PNG", _words(output)
            elif rows := table_rows(data.get("text/markdown", "")):
                columns = ", ".join(filter(None, rows[0]))
                title = _joined(heading, columns)
                content, kind = _csv(rows), "CSV"
            else:
                continue
            number = 1 + sum(other["kind"] == kind for other in found)
            name = {"PNG": f"figure_{number:02}.png", "CSV": f"table_{number:02}.csv"}[kind]
            make_folder(folder)
            (folder / name).write_bytes(content)
            href = f"{folder.name}/{name}"
            output.metadata["download"] = href
            found.append({"href": href, "kind": kind, "title": _short(title) or name})
            if kind == "CSV" and above:
                captioned[href] = _short(_joined(heading, above, columns))
    counts = Counter(file["title"] for file in found)
    for file in found:
        if counts[file["title"]] > 1:
            file["title"] = captioned.get(file["href"], file["title"])
    return found


def table_rows(markdown: str) -> list[list[str]]:
    """The cells of a Markdown table, its head first; nothing where the text is no such table.

    Thousands stand without commas, so that programs read them as numbers.
    """
    lines = [line.strip() for line in markdown.strip().splitlines()]
    if len(lines) < 2 or not all(line.startswith("|") for line in lines):
        return []
    if not re.fullmatch(r"[|:\- ]+", lines[1]):
        return []
    rows = []
    for line in (lines[0], *lines[2:]):
        cells = re.split(r"(?<!\\)\|", line.removeprefix("|").removesuffix("|"))
        rows.append([_plain(cell) for cell in cells])
    return rows


def _last_heading(source: str) -> str:
    """The last heading of a Markdown cell without its number, or nothing; code has none."""
    text = re.sub(r"^```.*?^```", "", source, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(?:\d+[.·] *)?(.+)$", text, flags=re.MULTILINE)
    return re.sub(r"[`*]", "", headings[-1]).strip() if headings else ""


def _plain(cell: str) -> str:
    text = re.sub(r"[`*]", "", cell.strip()).replace("\\|", "|")
    return text.replace(",", "") if NUMBER.fullmatch(text) else text


def _csv(rows: list[list[str]]) -> bytes:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue().encode()


def _words(output: NotebookNode) -> str:
    """What the picture shows, in words: as its metadata say, or the text that stands for it."""
    alt = output.metadata.get("image/png", {}).get("alt") or output.data.get("text/plain", "")
    return "" if alt.startswith("<") else alt


def _joined(*parts: str) -> str:
    return ": ".join(filter(None, parts))


def _last_line(printed: str) -> str:
    lines = printed.strip().splitlines()
    return lines[-1].strip().rstrip(":") if lines else ""


def _short(title: str) -> str:
    title = title.split(". ")[0]
    if len(title) <= TITLE_LENGTH:
        return title
    return title[:TITLE_LENGTH].rsplit(" ", 1)[0].rstrip(".,:;") + " …"
