"""Parts of pages that need no network: elements, tables, and a policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Sequence
from importlib import resources
from xml.etree import ElementTree

Element = ElementTree.Element


def resource(name: str) -> str:
    """The text of a file of this folder."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def source_of(text: str) -> str:
    """What a content security policy calls this script or style."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def start_page(title: str, *more_styles: str) -> tuple[Element, Element]:
    """A page without a script, and its body, which begins with the title."""
    style = resource("html.css")
    root = Element("html", lang="en")
    head = add(root, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    styles = " ".join(map(source_of, (style, *more_styles)))
    policy = f"default-src 'none'; style-src {styles}"
    add(head, "meta", content=policy, **{"http-equiv": "Content-Security-Policy"})
    add(head, "title", title)
    add(head, "style", style)
    body = add(root, "body")
    add(body, "h1", title)
    return root, body


def add_list(parent: Element, title: str, lines: Sequence[str]) -> None:
    """A heading and its lines; nothing where there are none."""
    if not lines:
        return
    add(parent, "h2", title)
    items = add(parent, "ul")
    for line in lines:
        add(items, "li", line)


def text_of(page: Element) -> bytes:
    """The text of the file, UTF-8."""
    text = "<!DOCTYPE html>\n" + ElementTree.tostring(page, encoding="unicode", method="html")
    return text.encode("utf-8", errors="replace")


def add(parent: Element, tag: str, text: str = "", **attributes: str) -> Element:
    """Appends an element, and returns it."""
    element = ElementTree.SubElement(parent, tag, attributes)
    element.text = text
    return element


def add_table(
    parent: Element,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    css_class: str,
    numbers: Collection[int],
) -> Element:
    """A table that scrolls by itself; returns its tbody."""
    table = add(add(parent, "div", **{"class": "scroll"}), "table", **{"class": css_class})
    head = add(add(table, "thead"), "tr")
    for title in titles:
        add(head, "th", title, scope="col")
    body = add(table, "tbody")
    for row in rows:
        line = add(body, "tr")
        for column, text in enumerate(row):
            add(line, "td", text, **({"class": "number"} if column in numbers else {}))
    return body
