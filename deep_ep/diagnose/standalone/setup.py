"""Builds the distribution `deep-ep-diagnose`: `deep_ep.diagnose` as the package `deep_ep_diagnose`.

The package is the modules of `deep_ep.diagnose`, and, in its folder `_deep_ep`, those that they import from the rest of
`deep_ep`. Imports of `deep_ep` are renamed, so it needs no `deep_ep`, and may stand beside one that is somebody else's.
"""

from __future__ import annotations

import ast
import atexit
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import SetupError

HERE = Path(__file__).resolve().parent
PACKAGE = "deep_ep_diagnose"
COPY = f"{PACKAGE}._deep_ep"
CHECKOUT = HERE.parents[2]
# What stands elsewhere in the checkout, and in the package by the same name.
DATA = ("patches", "LICENSE")
# What messages say, and what they say here.
WORDS = {
    "python -m deep_ep.diagnose": f"python -m {PACKAGE}",
    "deep_ep[report]": "deep-ep-diagnose[report]",
}


def sources(checkout: Path) -> Iterator[tuple[str, bytes]]:
    """Path in the package and content of each of its files."""
    yield "__init__.py", (HERE / PACKAGE / "__init__.py").read_bytes()
    diagnose = checkout / "deep_ep" / "diagnose"
    for file in sorted(diagnose.rglob("*")):
        inner = file.relative_to(diagnose)
        if not file.is_file() or inner.parts[0] == HERE.name or "__pycache__" in inner.parts:
            continue
        # Their place is taken by the module that looks which `deep_ep` is installed.
        name = "public_names.py" if inner.as_posix() == "__init__.py" else inner.as_posix()
        yield name, renamed(file) if file.suffix == ".py" else file.read_bytes()
    for file in imported_files(checkout, diagnose / "core" / "package.py"):
        yield f"_deep_ep/{file.relative_to(checkout / 'deep_ep').as_posix()}", renamed(file)
    yield "_deep_ep/__init__.py", f'__version__ = "{version(checkout)}"\n'.encode()
    # All of deep_ep: stacks of programs that have it are read by these names.
    modules = [m for m in (checkout / "deep_ep").rglob("*.py") if HERE not in m.parents]
    names = sorted(module.relative_to(checkout / "deep_ep").as_posix() for module in modules)
    yield "_deep_ep/modules.txt", "\n".join(names).encode()
    for given in (checkout / name for name in DATA):
        for file in sorted(given.rglob("*")) if given.is_dir() else [given]:
            if file.is_file():
                yield file.relative_to(checkout).as_posix(), file.read_bytes()


def imported_files(checkout: Path, first: Path) -> list[Path]:
    """Files of `deep_ep` that a module imports when it runs, and those that these import, and so on."""
    found: set[Path] = set()
    looked_at = [first]
    for module in looked_at:
        for name in imported_names(ast.parse(module.read_bytes())):
            path = checkout.joinpath(*name.split("."))
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if name != "deep_ep" and file.is_file() and file not in found:
                    found.add(file)
                    looked_at.append(file)
    return sorted(found)


def imported_names(node: ast.AST) -> Iterator[str]:
    """Dotted names below `deep_ep` that code imports, their packages too, but for what only type checkers see."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom) and is_of_deep_ep(node):
        for alias in node.names:
            words = [*str(node.module).split("."), alias.name]
            yield from (".".join(words[:n]) for n in range(1, len(words) + 1))
    for child in ast.iter_child_nodes(node):
        yield from imported_names(child)


def renamed(file: Path) -> bytes:
    """A module whose imports of `deep_ep` lead into the copy, and whose messages name this package.

    Raises:
        SetupError: it imports `deep_ep` in another way.
    """
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.ImportFrom) and is_of_deep_ep(node):
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace("from deep_ep", f"from {COPY}", 1)
        elif isinstance(node, ast.Import) and any(
            alias.name.split(".")[0] == "deep_ep" for alias in node.names
        ):
            raise SetupError(f"{file}:{node.lineno}: write `from deep_ep... import ...` here.")
    text = "".join(lines)
    for words, here in WORDS.items():
        text = text.replace(words, here)
    return text.encode()


def is_of_deep_ep(node: ast.ImportFrom) -> bool:
    return node.level == 0 and str(node.module).split(".")[0] == "deep_ep"


def version(checkout: Path) -> str:
    """That of `deep_ep`, which is not imported."""
    for node in ast.parse((checkout / "deep_ep" / "__init__.py").read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise SetupError("deep_ep/__init__.py: there is no __version__; it must be a literal.")


class Build(build_py):
    """Writes the package instead of copying its folder."""

    def run(self) -> None:
        if self.editable_mode:
            raise SetupError(
                f"{PACKAGE} cannot be edited in place, since it is a copy. Install deep_ep itself in place: "
                f"{PACKAGE} then is deep_ep.diagnose."
            )
        for name, content in sources(CHECKOUT):
            file = Path(self.build_lib) / PACKAGE / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


class Sources(sdist):
    """There are none: they are those of the checkout."""

    def run(self) -> None:
        raise SetupError(
            f"{PACKAGE} is built from a checkout of deep_ep: `pip wheel --no-deps {HERE}`."
        )


if __name__ == "__main__":
    # Nothing is left in the checkout, and nothing of an earlier build gets in.
    work = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    setup(
        version=version(CHECKOUT),
        cmdclass={"build_py": Build, "sdist": Sources},
        options={"build": {"build_base": work}, "egg_info": {"egg_base": work}},
    )
