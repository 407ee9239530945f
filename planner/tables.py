"""Tables of the printed report."""

from __future__ import annotations

from rich.table import Table


def plain_table(*columns: tuple[str, bool]) -> Table:
    """A table without lines; each column has a title and whether it holds numbers. Without titles it has no head."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
        show_header=any(title for title, _ in columns),
    )
    for title, numeric in columns:
        table.add_column(title, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table
