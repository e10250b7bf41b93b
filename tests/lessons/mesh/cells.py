"""Functions that cells of the lesson define."""

import json
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"


def functions_of(name, names):
    """All names after the cell that begins with the function `name`, which uses `names`."""
    for path in NOTEBOOKS.glob("11_*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if (source := "".join(cell["source"])).startswith(f"def {name}("):
                exec(source, names := dict(names))
                return names
    raise LookupError(name)
