"""Reads the Markdown tables of reports."""

import itertools


def rows_of(markdown: str, number: int = 0) -> list[dict[str, str]]:
    """The rows of one of the tables in a text, the first by default: heading -> cell."""
    blocks = itertools.groupby(markdown.splitlines(), lambda line: line.startswith("|"))
    tables = [list(lines) for is_table, lines in blocks if is_table]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables[number]]
    return [dict(zip(cells[0], row)) for row in cells[2:]]
