"""`deep_ep.diagnose` under a name of its own: beside whatever `deep_ep` is installed, or without any.

If the `deep_ep` that can be imported has `deep_ep.diagnose`, every module and name here is the one there; otherwise
each is that of the copy installed with this file. That is decided when this is imported, which imports neither torch
nor any `deep_ep`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_OURS = "deep_ep.diagnose"


def __getattr__(name: str) -> Any:
    """A public name of `deep_ep.diagnose`, imported when it is first asked for.

    `install` alone does without torch and without any `deep_ep`: engines call it in each of their processes.
    """
    if name == "install":
        return _import_hook().install
    if name == "__all__" or not name.startswith("_"):
        names = importlib.import_module(_names)
        if name == "__all__" or name in names.__all__:
            return getattr(names, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the modules of `deep_ep.diagnose` when those of this package are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # A program is run under the name by which it was called.
        if not fullname.startswith(f"{__name__}.") or fullname == f"{__name__}.__main__":
            return None
        there = importlib.util.find_spec(_there(fullname))
        return there and importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        # What stands here afterwards is what is imported.
        sys.modules[module.__name__] = importlib.import_module(_there(module.__name__))


def _import_hook() -> ModuleType:
    """The module that has `install`, under the name that it has for everybody, without the packages around it."""
    name = f"{_package}.other_kernels.import_hook"
    if name not in sys.modules:
        file = Path(__path__[0]) / "other_kernels" / "import_hook.py"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _there(name: str) -> str:
    return _OURS + name[len(__name__) :]


def _folder_of_ours() -> Path | None:
    """Where `deep_ep.diagnose` is, if `deep_ep` has it. Files are looked at, nothing is imported."""
    places: Iterable[str] | None
    if "deep_ep" in sys.modules:
        places = getattr(sys.modules["deep_ep"], "__path__", None)
    else:
        spec = importlib.util.find_spec("deep_ep")
        places = spec.submodule_search_locations if spec else None
    for place in places or ():
        folder = Path(place) / "diagnose"
        if (folder / "core" / "package.py").is_file():
            return folder
    return None


_ours = _folder_of_ours()
if _ours is None:
    _package, _names = __name__, f"{__name__}.public_names"
else:
    _package = _names = _OURS
    __path__ = [str(_ours)]
    sys.meta_path.insert(0, _Alias())
