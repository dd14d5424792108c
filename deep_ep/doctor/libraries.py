"""NVSHMEM: which copies there are, which is loaded, and which one deep_ep was built with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deep_ep.doctor.checks import Finding, Table, fail, ok, warn
from deep_ep.doctor.host import Host
from deep_ep.doctor.package import constants_of_cuda
from deep_ep.native import nvshmem

CHECKS = Table()
_WHY = "ranks out of NVLink's reach need it; NVLink alone does not"
_INSTALL = "./install_nvshmem.sh (--repair puts the pinned wheel into this environment)"
# What a copy must have at run time. The last two are opened by name, when a job starts.
_PARTS = (nvshmem.SONAME, "nvshmem_bootstrap_uid.so", "nvshmem_transport_ibgda.so")


class Copy(NamedTuple):
    """An NVSHMEM on this machine.

    Attributes:
        folder: with its libraries.
        origin: how a process comes to it.
        version: `"3.8.0"`, or `""` if no header says.
        missing: what a copy has to have and this one has not.
    """

    folder: Path
    origin: str
    version: str
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.version or 'of an unknown version'} in {self.folder} ({self.origin})"


def _copies(host: Host) -> list[Copy]:
    """Those that a build or a process may find, the loader's own order first."""
    environment = host.environment
    places = [
        (Path(file).parent, "LD_PRELOAD")
        for file in re.split(r"[: ]+", environment.get("LD_PRELOAD", ""))
        if "libnvshmem" in file
    ]
    places += [
        (Path(folder), "LD_LIBRARY_PATH")
        for folder in environment.get("LD_LIBRARY_PATH", "").split(":")
        if folder and any(Path(folder).glob("libnvshmem_host.so*"))
    ]
    prefixes = [
        (Path(environment[name]), name)
        for name in ("NVSHMEM_DIR", "NVSHMEM_HOME")
        if environment.get(name)
    ]
    prefixes.append((host.package.parent / "third-party" / "nvshmem", "third-party/nvshmem"))
    prefixes += [(Path(entry) / "nvidia" / "nvshmem", "wheel") for entry in host.search_path]
    for prefix, origin in prefixes:
        folders = [prefix / name for name in ("lib", "lib64") if (prefix / name).is_dir()]
        places += [(folder, origin) for folder in folders[:1]]
    unique: dict[Path, Copy] = {}
    for folder, origin in places:
        unique.setdefault(folder.resolve(), _look(folder, origin))
    return list(unique.values())


def _look(folder: Path, origin: str) -> Copy:
    header = folder.parent / "include" / "non_abi" / "nvshmem_version.h"
    text = header.read_text(errors="replace") if header.is_file() else ""
    numbers = dict(re.findall(r"NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text))
    version = ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH") if part in numbers)
    missing = tuple(part for part in _PARTS if not any(folder.glob(f"{part}*")))
    return Copy(folder, origin, version, missing)


def _needed(host: Host) -> tuple[nvshmem.HostLibrary, int] | None:
    """What deep_ep was built with, and the CUDA of that build."""
    return nvshmem.built_with(constants_of_cuda(host))


@CHECKS.row("NVSHMEM", why=_WHY, repair=_INSTALL)
def _on_machine(host: Host) -> Iterator[Finding]:
    found, is_needed = _copies(host), _needed(host) is not None
    whole = [copy for copy in found if not copy.missing]
    if not found:
        yield fail("none found") if is_needed else ok("none found")
    for copy in found:
        if copy.missing:
            yield (fail if is_needed and not whole else warn)(
                f"{copy} is incomplete: it has no {', no '.join(copy.missing)}",
                "the loader takes the first folder with a library of the right name, and what the copy "
                "lacks is missed when a job starts",
                f"remove {copy.folder}, or {_INSTALL}",
            )
    if len({copy.version for copy in whole}) > 1:
        yield warn(
            f"several versions: {', then '.join(map(str, whole))}",
            "a process has one of them, the first that anybody loads, and libraries and headers "
            "of two versions do not fit together",
            "keep one of them; LD_PRELOAD=FOLDER/libnvshmem_host.so.3 decides for one program",
        )
    elif whole:
        yield ok(", ".join(map(str, whole)), agreed={"NVSHMEM": whole[0].version})


@CHECKS.row("NVSHMEM in process", why=_WHY)
def _in_process(host: Host) -> Finding:
    """What this process has, against what deep_ep was built with."""
    found, needed = nvshmem.in_process(), _needed(host)
    loaded = f"loaded: {found.version} ({found.path})" if found else "loaded: none"
    if needed is None:
        return ok(f"{loaded}; needed: none, deep_ep was built without")
    library, cuda_major = needed
    said = f"{loaded}; needed: {library.version} ({library.path})"
    agreed = {"NVSHMEM of the build": library.version}
    conflict = nvshmem.conflict(found, library, cuda_major)
    return fail(said, *conflict, agreed=agreed) if conflict else ok(said, agreed=agreed)
