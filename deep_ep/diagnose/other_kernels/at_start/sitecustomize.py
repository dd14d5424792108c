"""Runs at the start of every interpreter of `python -m deep_ep.diagnose run`; and then the one that it hides, if any."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _package(folder: str) -> str:
    """Its dotted name: of all folders above it that are packages, too."""
    above, name = os.path.split(folder)
    in_package = os.path.exists(os.path.join(above, "__init__.py"))
    return f"{_package(above)}.{name}" if in_package else name


def _next() -> None:
    path = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.origin:
        _load("sitecustomize", spec.origin)


try:
    _folder = os.path.dirname(_HERE)
    _hook = _load("_deep_ep_diagnose_hook", os.path.join(_folder, "import_hook.py"))
    _hook.install(_package(_folder))
except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
    sys.stderr.write(f"deep_ep.diagnose: nothing is watched: {error!r}\n")
_next()
