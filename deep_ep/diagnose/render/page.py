"""Pages that need no network: made of the files in templates, under a policy that allows nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ..core.package import printable

if TYPE_CHECKING:
    from jinja2 import Environment


def _shown(value: Any) -> Any:
    """What others wrote does not steer what shows it; markup is our own."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return printable(value) if is_text else value


def _source(name: str) -> Markup:
    """A style or a script, as it is."""
    text = (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")
    return Markup(text)


def _source_of(name: str) -> Markup:
    """What a content security policy calls this style or script."""
    digest = hashlib.sha256(_source(name).encode("utf-8")).digest()
    return Markup(f"'sha256-{base64.b64encode(digest).decode('ascii')}'")


@functools.cache
def _environment() -> Environment:
    # Most commands write no page, and the import takes a while.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(source=_source, source_of=_source_of)
    # Operations keep their order, and a script reads no NaN.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment


def page(template: str, title: str, **values: Any) -> bytes:
    """The text of an HTML file, UTF-8; the template extends base.html."""
    text = part(template, title=title, **values)
    # A host name may hold what UTF-8 cannot.
    return text.encode("utf-8", errors="replace")


def part(template: str, **values: Any) -> Markup:
    """A piece of a page, or a picture."""
    return Markup(_environment().get_template(template).render(**values))
