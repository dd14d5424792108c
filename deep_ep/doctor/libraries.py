"""NVSHMEM: which copies there are, which is loaded, and which one deep_ep was built with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.host import Host
from deep_ep.doctor.package import load_native
from deep_ep.native import nvshmem

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


def check(host: Host) -> list[Finding]:
    """All findings on NVSHMEM."""
    cuda = load_native(host, "_cuda")
    needed = nvshmem.built_with(cuda.constants or {})
    return [
        *_copies(copies(host), needed is not None),
        judge_loaded(nvshmem.in_process(), needed),
    ]


def copies(host: Host) -> list[Copy]:
    """Those that a build or a process may find, the loader's own order first."""
    environment = host.environment
    places = [
        (Path(file).parent, "LD_PRELOAD")
        for file in re.split(r"[: ]+", environment.get("LD_PRELOAD", ""))
        if "libnvshmem" in file
    ]
    for entry in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if entry and any(Path(entry).glob("libnvshmem_host.so*")):
            places.append((Path(entry), "LD_LIBRARY_PATH"))
    prefixes = [
        (Path(environment[name]), name)
        for name in ("NVSHMEM_DIR", "NVSHMEM_HOME")
        if environment.get(name)
    ]
    prefixes.append((host.package.parent / "third-party" / "nvshmem", "third-party/nvshmem"))
    prefixes += [(Path(entry) / "nvidia" / "nvshmem", "wheel") for entry in host.search_path]
    for prefix, origin in prefixes:
        folders = [prefix / name for name in ("lib", "lib64") if (prefix / name).is_dir()]
        if folders:
            places.append((folders[0], origin))
    unique: dict[Path, Copy] = {}
    for folder, origin in places:
        unique.setdefault(folder.resolve(), _look(folder, origin))
    return list(unique.values())


def _look(folder: Path, origin: str) -> Copy:
    header = folder.parent / "include" / "non_abi" / "nvshmem_version.h"
    text = header.read_text(errors="replace") if header.is_file() else ""
    numbers = [
        found.group(1)
        for part in ("MAJOR", "MINOR", "PATCH")
        if (found := re.search(rf"NVSHMEM_VENDOR_{part}_VERSION\s+(\d+)", text))
    ]
    missing = tuple(part for part in _PARTS if not any(folder.glob(f"{part}*")))
    return Copy(folder, origin, ".".join(numbers), missing)


def _copies(found: list[Copy], is_needed: bool) -> list[Finding]:
    if not found:
        status = FAIL if is_needed else OK
        return [Finding("NVSHMEM", status, "none found", _WHY, _INSTALL if is_needed else "")]
    whole = [copy for copy in found if not copy.missing]
    findings = [
        Finding(
            "NVSHMEM",
            FAIL if is_needed and not whole else WARN,
            f"{copy} is incomplete: it has no {', no '.join(copy.missing)}",
            "the loader takes the first folder with a library of the right name, and what the copy "
            "lacks is missed when a job starts",
            f"remove {copy.folder}, or {_INSTALL}",
        )
        for copy in found
        if copy.missing
    ]
    versions = {copy.version for copy in whole}
    if len(versions) > 1:
        listed = ", then ".join(map(str, whole))
        findings.append(
            Finding(
                "NVSHMEM",
                WARN,
                f"several versions: {listed}",
                "a process has one of them, the first that anybody loads, and libraries and headers "
                "of two versions do not fit together",
                "keep one of them; LD_PRELOAD=FOLDER/libnvshmem_host.so.3 decides for one program",
            )
        )
    elif whole:
        listed = ", ".join(map(str, whole))
        findings.append(Finding("NVSHMEM", OK, listed, _WHY, agreed={"NVSHMEM": whole[0].version}))
    return findings


def judge_loaded(
    found: nvshmem.HostLibrary | None, needed: tuple[nvshmem.HostLibrary, int] | None
) -> Finding:
    """What this process has of NVSHMEM, against what deep_ep was built with.

    Args:
        found: what is loaded.
        needed: library and CUDA's major version of the build, if it was built with NVSHMEM.
    """
    loaded = f"loaded: {found.version} ({found.path})" if found else "loaded: none"
    if needed is None:
        said = f"{loaded}; needed: none, deep_ep was built without"
        return Finding("NVSHMEM in process", OK, said, _WHY)
    library, cuda_major = needed
    said = f"{loaded}; needed: {library.version} ({library.path})"
    if found is None or found.serves(library):
        return Finding(
            "NVSHMEM in process", OK, said, _WHY, agreed={"NVSHMEM of the build": library.version}
        )
    text = nvshmem.conflict_text(found, library, cuda_major)
    return Finding(
        "NVSHMEM in process",
        FAIL,
        said,
        text.split(". torch may")[0],
        text.split("Replace it: ")[-1],
        agreed={"NVSHMEM of the build": library.version},
    )
