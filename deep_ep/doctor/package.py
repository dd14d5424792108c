"""Which deep_ep, torch and NVSHMEM a program gets, and whether native modules load and fit them."""

from __future__ import annotations

import functools
import json
import re
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deep_ep.doctor.checks import Check, Finding, Table, fail, ok, warn
from deep_ep.doctor.host import Host, Ran, version_numbers
from deep_ep.native import nvshmem

CHECKS = Table()
_OLDEST_TORCH = (2, 4)
_REBUILD = (
    "in the source tree of deep_ep: pip install --no-build-isolation --force-reinstall --no-deps ."
)
# A module is loaded in a process of its own, which may crash; by its file, so without the package.
_LOAD = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("deep_ep." + sys.argv[1], sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps({k: v for k, v in vars(module).items() if k.isupper() and isinstance(v, (int, str))}))
"""
# What each native module is for.
_MODULES = {
    "_cpu": "the kernels on the CPU, and the sizes of buffers, come from it",
    "_cuda": "GPUs are used through it",
    "_cuda_nvshmem": "ranks out of NVLink's reach are reached through it",
}
# Errors of the loader: pattern of the text, what it means, what to do.
_LOADER_ERRORS = (
    (
        r"undefined symbol",
        "it was built against a newer or another version of a library than the one that is loaded",
        _REBUILD,
    ),
    (
        r"cannot open shared object",
        "it is linked with a library that is on no path that the loader looks at",
        "install that library (NVSHMEM: ./install_nvshmem.sh --repair), or put its folder into LD_LIBRARY_PATH",
    ),
    (
        r"GLIBC(XX)?_\S+' not found|version .\S+. not found",
        "it was built on a system with newer libraries than those of this one",
        _REBUILD,
    ),
    (
        r"SIGILL",
        "it was built for instructions that this CPU does not have",
        "DEEP_EP_CPU_ARCH= pip install --no-build-isolation --force-reinstall --no-deps .",
    ),
    (r"", "nothing can use it in this environment", _REBUILD),
)
# What a copy of NVSHMEM must have at run time. The last two are opened by name, when a job starts.
_NVSHMEM_PARTS = (nvshmem.SONAME, "nvshmem_bootstrap_uid.so", "nvshmem_transport_ibgda.so")


# ---- which deep_ep


@CHECKS.row("deep_ep")
def _deep_ep(host: Host) -> Finding:
    """Ranks of one job must run the same version."""
    version = _version_of(host.package)
    found = f"{version} in {host.package}, Python {sys.version.split()[0]}"
    return ok(found, agreed={"deep_ep": version})


def _version_of(package: Path) -> str:
    """What a folder with a deep_ep says of its version; the one of this package ends in "+diagnose"."""
    text = (package / "__init__.py").read_text(errors="replace")
    found = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    return found[1] if found else "of an unknown version"


@CHECKS.row("other deep_ep")
def _other_copies(host: Host) -> Iterator[Finding]:
    """A program imports the first one on its own search path, which depends on the folder it starts in and on PYTHONPATH."""
    places = dict.fromkeys((Path(entry) / "deep_ep").resolve() for entry in host.search_path)
    copies = [place for place in places if (place / "__init__.py").is_file()]
    others = [place for place in copies if place != host.package]
    if others:
        listed = ", ".join(f"{place} ({_version_of(place)})" for place in copies)
        yield warn(
            f"in this order: {listed}; examined is {host.package}",
            repair="pip uninstall deep_ep, until python -c 'import deep_ep' fails, then install one; "
            f"or move {others[0]} away",
        )


# ---- native modules


def _load(host: Host, name: str) -> Ran | None:
    """Loads a native module of the examined package in another process; `None`: none was built for this Python."""
    file = _file_of(host, name)
    return host.run(sys.executable, "-c", _LOAD, name, str(file)) if file.is_file() else None


def _file_of(host: Host, name: str) -> Path:
    return host.package / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _constants_of_cuda(host: Host) -> dict[str, Any]:
    """What `_cuda` says of itself; nothing if it does not load."""
    ran = _load(host, "_cuda")
    return json.loads(ran.text.splitlines()[-1]) if ran and ran.status == 0 else {}


def _native(name: str, why: str, host: Host) -> Finding:
    """One native module, which programs need because of `why`."""
    ran = _load(host, name)
    if ran is not None and ran.status == 0:
        return ok(f"loads: {_file_of(host, name)}")
    if ran is not None:
        error = (ran.text.strip().splitlines() or ["no output"])[-1]
        if ran.status is not None and ran.status < 0:
            error = f"ended by {signal.Signals(-ran.status).name}"
        meaning, repair = next(
            advice for pattern, *advice in _LOADER_ERRORS if re.search(pattern, error)
        )
        return fail(f"does not load: {error}", f"{why}; {meaning}", repair)
    others = sorted(path.name for path in host.package.glob(f"{name}.*.so"))
    if others:
        found = f"built for another Python ({', '.join(others)}), not for {sys.version.split()[0]}"
        return fail(found, repair=_REBUILD)
    if name == "_cpu" or (name == "_cuda" and host.has_gpu_driver()):
        repair = f"{_REBUILD} (with -v it prints what it leaves out, and why)"
        return fail("not built", repair=repair)
    if host.has_gpu_driver() and host.has_rdma():
        return warn("not built", repair="./install_nvshmem.sh, then build again: make cuda")
    return ok("not built")


CHECKS += [
    Check(f"deep_ep.{name}", functools.partial(_native, name, why), why)
    for name, why in _MODULES.items()
]


# ---- torch


def cuda_of_torch(host: Host) -> str:
    """The CUDA that torch is built for; nothing: none, or torch does not load, which is a line of its own."""
    try:
        return str(host.load("torch").version.cuda or "")
    except (ImportError, OSError):
        return ""


@CHECKS.row("torch", repair="pip install --force-reinstall 'torch>=2.4', as your program needs it")
def _torch(host: Host) -> Finding:
    """Every call takes and returns tensors of torch. Its ABI cannot be wrong: no module of deep_ep is linked with it."""
    torch = host.load("torch")
    version, built_for = str(torch.__version__), torch.version.cuda
    abi = "new" if torch.compiled_with_cxx11_abi() else "old"
    found = f"{version}, {f'CUDA {built_for}' if built_for else 'without CUDA'}, {abi} C++ ABI"
    agreed = {"torch": version, "CUDA of torch": str(built_for)}
    if version_numbers(version) < _OLDEST_TORCH:
        return fail(found, agreed=agreed)
    if built_for is None and host.has_gpu_driver():
        why = "this machine has a GPU, and a torch without CUDA cannot use it"
        repair = "pip install a torch with CUDA (https://pytorch.org/get-started/locally)"
        return warn(found, why, repair, agreed=agreed)
    return ok(found, agreed=agreed)


@CHECKS.row("CUDA of the build")
def _same_cuda(host: Host) -> Iterator[Finding]:
    """Both load their NVSHMEM by the same name, a process has one, and its wheels are of one CUDA each."""
    constants, torch_cuda = _constants_of_cuda(host), cuda_of_torch(host)
    if constants and torch_cuda:
        built, major = int(constants["CUDA_MAJOR"]), version_numbers(torch_cuda)[0]
        found = f"deep_ep was built with CUDA {built}, torch with CUDA {torch_cuda}"
        repair = f"build deep_ep with a toolkit of CUDA {major}: CUDA_HOME=... make cuda"
        yield ok(found) if built == major else warn(found, repair=repair)


# ---- NVSHMEM


class Copy(NamedTuple):
    """An NVSHMEM on this machine.

    Attributes:
        folder: with its libraries.
        origin: how a process comes to it.
        version: `"3.8.0"`, or nothing if no header says.
        missing: what a copy has to have and this one has not.
    """

    folder: Path
    origin: str
    version: str
    missing: list[str]

    def __str__(self) -> str:
        lacks = f", without {', '.join(self.missing)}" if self.missing else ""
        return f"{self.version or 'of an unknown version'} in {self.folder} ({self.origin}){lacks}"


def _copies(host: Host) -> list[Copy]:
    """Those that a build or a process may find, the loader's own order first."""
    said = host.environment.get
    preloaded = [file for file in re.split(r"[: ]", said("LD_PRELOAD", "")) if "libnvshmem" in file]
    places = [(Path(file).parent, "LD_PRELOAD") for file in preloaded]
    searched = filter(None, said("LD_LIBRARY_PATH", "").split(":"))
    places += [(Path(folder), "LD_LIBRARY_PATH") for folder in searched]
    prefixes = [(said(name, ""), name) for name in ("NVSHMEM_DIR", "NVSHMEM_HOME") if said(name)]
    prefixes.append((f"{host.package.parent}/third-party/nvshmem", "third-party/nvshmem"))
    prefixes += [(f"{entry}/nvidia/nvshmem", "wheel") for entry in host.search_path]
    places += [
        (Path(prefix, lib), origin) for prefix, origin in prefixes for lib in ("lib", "lib64")
    ]
    copies: dict[Path, Copy] = {}
    for folder, origin in places:
        if any(folder.glob("libnvshmem_host.so*")):
            header = folder.parent / "include" / "non_abi" / "nvshmem_version.h"
            text = header.read_text(errors="replace") if header.is_file() else ""
            numbers = re.findall(r"NVSHMEM_VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text)
            missing = [part for part in _NVSHMEM_PARTS if not any(folder.glob(f"{part}*"))]
            copies.setdefault(folder.resolve(), Copy(folder, origin, ".".join(numbers), missing))
    return list(copies.values())


def _nvshmem_of_build(host: Host) -> tuple[nvshmem.HostLibrary, int] | None:
    """What deep_ep was built with, and the CUDA of that build."""
    return nvshmem.built_with(_constants_of_cuda(host))


@CHECKS.row(
    "NVSHMEM", repair="./install_nvshmem.sh (--repair puts the pinned wheel into this environment)"
)
def _on_machine(host: Host) -> Finding:
    """Ranks out of NVLink's reach need it; NVLink alone does not."""
    copies, is_needed = _copies(host), _nvshmem_of_build(host) is not None
    if not copies:
        return fail("none found") if is_needed else ok("none found")
    found = ", then ".join(map(str, copies))
    whole = [copy for copy in copies if not copy.missing]
    if len(whole) == len(copies) and len({copy.version for copy in copies}) == 1:
        return ok(found, agreed={"NVSHMEM": copies[0].version})
    return (fail if is_needed and not whole else warn)(
        found,
        "a process has the first that anybody loads; what it lacks is missed when a job starts, and libraries and headers "
        "of two versions do not fit together",
        "keep a whole one, and remove the others; LD_PRELOAD=FOLDER/libnvshmem_host.so.3 decides for one program; "
        "./install_nvshmem.sh --repair installs the pinned one",
    )


@CHECKS.row("NVSHMEM in process")
def _in_process(host: Host) -> Finding:
    """What deep_ep was built with must find the same, or a newer one."""
    found, needed = nvshmem.in_process(), _nvshmem_of_build(host)
    loaded = f"loaded: {found.version} ({found.path})" if found else "loaded: none"
    if needed is None:
        return ok(f"{loaded}; needed: none, deep_ep was built without")
    library, cuda_major = needed
    said = f"{loaded}; needed: {library.version} ({library.path})"
    agreed = {"NVSHMEM of the build": library.version}
    conflict = nvshmem.conflict(found, library, cuda_major)
    return fail(said, *conflict, agreed=agreed) if conflict else ok(said, agreed=agreed)
