"""One self-contained HTML page about a hang. No script, and nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.package import ranks_text
from .hang_picture import STYLE, picture
from .hang_views import OperationTable, View
from .page_parts import Element, add, add_list, add_table, start_page, text_of


def page(
    title: str, views: Sequence[View], collectives: Sequence[str], remarks: Sequence[str]
) -> bytes:
    """The text of the file, UTF-8."""
    root, body = start_page(title, STYLE)
    for view in views:
        _add_view(body, view)
    add_list(body, "Collectives of torch", collectives)
    add_list(body, "Notes", remarks)
    return text_of(root)


def _add_view(body: Element, view: View) -> None:
    add(body, "h2", view.title)
    kind = "headlines bad" if view.verdict.causes else "headlines"
    causes = add(body, "ul", **{"class": kind})
    for paragraph in view.paragraphs:
        item = add(causes, "li", f"{paragraph.said}.")
        add(item, "p", paragraph.advice, **{"class": "evidence"})
    if view.waits:
        add(body, "h2", "Who waits for whom")
        add(body, "figure").append(picture(view.verdict))
        add(body, "pre", "\n".join(view.waits))
    if view.table.rows:
        add(body, "h2", "Recent operations")
        _add_operations(body, view.table)
    if view.stacks:
        add(body, "h2", "Python stacks")
        for stack in view.stacks:
            add(body, "p", f"{ranks_text(stack.ranks)}, thread {stack.thread}")
            add(body, "pre", "\n".join(stack.frames))


def _add_operations(body: Element, table: OperationTable) -> None:
    titles = ["operation", "name", *(ranks_text(ranks) for ranks in table.columns), ""]
    rows = [
        [str(row.number), row.name, *row.cells, "first disagreement" if row.differs else ""]
        for row in table.rows
    ]
    add_table(body, titles, rows, css_class="operations", numbers=(0,))
