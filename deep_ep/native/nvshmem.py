"""Which NVSHMEM host library a process has, and whether the CUDA module can work with it.

A process has one library of a name: the first that is loaded. CUDA builds of torch bring an NVSHMEM of
their own, which may be older than the one that `deep_ep._cuda_nvshmem` is built with.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SONAME = "libnvshmem_host.so.3"
_MAPS = Path("/proc/self/maps")


class HostLibrary(NamedTuple):
    """An NVSHMEM host library.

    Attributes:
        version: "3.8.0".
        path: its file.
    """

    version: str
    path: str

    @property
    def release(self) -> tuple[int, ...]:
        """Major and minor version; a patch adds no calls."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:2])

    def serves(self, device: HostLibrary) -> bool:
        """Whether it has what the device library of `device` calls."""
        return self.release[:1] == device.release[:1] and self.release >= device.release


def in_process() -> HostLibrary | None:
    """The one that is loaded, whoever loaded it; loads none."""
    return _loaded(os.RTLD_NOLOAD | os.RTLD_LAZY)


def on_path() -> HostLibrary | None:
    """The one that the loader finds by its own rules (`LD_LIBRARY_PATH`); loads it.

    For a module that did not load: it may have been linked with what was found there.
    """
    return _loaded(os.RTLD_LAZY)


def conflict(
    found: HostLibrary | None, built_with: HostLibrary, cuda_major: int
) -> tuple[str, str] | None:
    """Why a library does not serve, and the command that repairs it; `None` if it does, or there is none.

    Args:
        found: see `in_process` and `on_path`.
        built_with: what the module was built with.
        cuda_major: of that build.
    """
    if found is None or found.serves(built_with):
        return None
    oldest = ".".join(map(str, built_with.release))
    why = (
        f"this process has NVSHMEM {found.version} ({found.path}), and deep_ep._cuda_nvshmem is built "
        f"with NVSHMEM {built_with.version} ({built_with.path}); the one of the process must be "
        f"{oldest} or newer, of the same major version"
    )
    repair = (
        f"{sys.executable} -m pip install --no-deps nvidia-nvshmem-cu{cuda_major}=={built_with.version} "
        "(in a source tree ./install_nvshmem.sh --repair does that); or start the program with "
        f"LD_PRELOAD={built_with.path}"
    )
    return why, repair


def built_with(constants: Mapping[str, object]) -> tuple[HostLibrary, int] | None:
    """What the CUDA modules were built with, and the major version of their CUDA.

    Args:
        constants: of the module `deep_ep._cuda`; both modules come from one build.
    """
    if "NVSHMEM_VERSION" not in constants:
        return None
    library = HostLibrary(str(constants["NVSHMEM_VERSION"]), str(constants["NVSHMEM_LIBRARY"]))
    return library, int(str(constants["CUDA_MAJOR"]))


def _loaded(mode: int) -> HostLibrary | None:
    try:
        library = ctypes.CDLL(SONAME, mode=mode)
    except OSError:
        return None
    mapped = [line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines()]
    file = next((path for path in mapped if Path(path).name.startswith(SONAME)), SONAME)
    try:
        tell_version = library.nvshmemx_vendor_get_version_info
    except AttributeError:
        return HostLibrary("of an unknown version", file)
    numbers = [ctypes.c_int() for _ in range(3)]
    tell_version(*map(ctypes.byref, numbers))
    return HostLibrary(".".join(str(number.value) for number in numbers), file)
