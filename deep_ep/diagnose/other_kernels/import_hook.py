"""Attaches to buffers that a program makes, without a line in the program. Only the standard library is imported here,
because this runs at the start of every interpreter of a job.

Classes are patched where they are, when their module has been imported. So it does not matter whether a program
imports the module or the class, nor when.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

MODULES = ("deep_ep", "nixl_ep", "mooncake.mooncake_ep_buffer")
_PACKAGE = __name__.rpartition(".")[0]
# What a finder of this file has, under whichever name the file was loaded.
_MARK = "deep_ep_diagnose_watches"


def install(package: str = _PACKAGE) -> None:
    """Watches for modules of other kernels, if `DEEP_EP_DIAGNOSE` is set; otherwise does nothing. May be repeated.

    Args:
        package: the one that has this module.
    """
    wanted = os.environ.get("DEEP_EP_DIAGNOSE", "").strip() not in ("", "0")
    if not wanted or any(hasattr(finder, _MARK) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(package))
    for name in MODULES:
        if name in sys.modules:
            _watch(package, sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and looks at a module once it has been executed."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._looking_for: set[str] = set()
        setattr(self, _MARK, True)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # All finders are asked, and so this one; and so does another finder that asks all others.
        if fullname not in MODULES or fullname in self._looking_for:
            return None
        self._looking_for.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking_for.discard(fullname)
        if spec is not None:
            self._follow(spec)
        return spec

    def _follow(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:  # a namespace package has nothing to attach to
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _watch(self._package, module)

        # On the object: its type, which other code may ask for, stays.
        loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]


def _watch(package: str, module: ModuleType) -> None:
    try:
        importlib.import_module(f"{package}.attach").watch(module)
    except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
        sys.stderr.write(f"deep_ep.diagnose: {module.__name__} is not watched: {error}\n")
