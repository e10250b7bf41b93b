"""Functions that cells of the lesson define, and the orders of all stages."""

from lib.lessons.mesh.exercises import gpipe, one_f_one_b
from tests.lessons.page import read_page


def functions_of(name, names):
    """All names after the cell that begins with the function `name`, which uses `names`."""
    cells = read_page("11_pipeline_context_mesh").cells
    (source,) = (cell.source for cell in cells if cell.source.startswith(f"def {name}("))
    exec(source, names := dict(names))
    return names


def gpipe_orders(ranks, micro_batches):
    return [gpipe(micro_batches) for _ in range(ranks)]


def one_f_one_b_orders(ranks, micro_batches):
    return [one_f_one_b.solve(rank, ranks, micro_batches) for rank in range(ranks)]
