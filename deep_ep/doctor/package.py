"""Which deep_ep a program gets, whether its native modules load, and the torch that it works with."""

from __future__ import annotations

import functools
import json
import re
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deep_ep.doctor.checks import Check, Finding, Table, chain, fail, ok, warn
from deep_ep.doctor.host import Host, Ran, version_numbers

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
        r"libnvshmem\S*: cannot open shared object",
        "it is linked with NVSHMEM, whose host library is on no path that the loader looks at",
        "./install_nvshmem.sh --repair, or put its folder into LD_LIBRARY_PATH",
    ),
    (
        r"cannot open shared object",
        "it is linked with a library that is on no path that the loader looks at",
        "install that library, or put its folder into LD_LIBRARY_PATH",
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


# ---- which deep_ep


@CHECKS.row("deep_ep", why="ranks of one job must run the same version")
def _deep_ep(host: Host) -> Finding:
    version = _version_of(host.package)
    found = f"{version} in {host.package}, Python {sys.version.split()[0]}"
    return ok(found, agreed={"deep_ep": version})


def _version_of(package: Path) -> str:
    """What a folder with a deep_ep says of its version."""
    try:
        text = (package / "__init__.py").read_text(errors="replace")
    except OSError:
        return "of an unreadable version"
    found = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    return found[1] if found else "of an unknown version"


@CHECKS.row(
    "other deep_ep",
    why="a program imports the first one on its own search path, which depends on the folder it starts in and on PYTHONPATH",
)
def _other_copies(host: Host) -> Iterator[Finding]:
    """Folders named deep_ep on the search path besides the one that is examined."""
    places = dict.fromkeys((Path(entry) / "deep_ep").resolve() for entry in host.search_path)
    copies = [place for place in places if (place / "__init__.py").is_file()]
    others = [place for place in copies if place != host.package]
    if others:
        listed = ", ".join(f"{place} ({_maker(_version_of(place))})" for place in copies)
        yield warn(
            f"in this order: {listed}; examined is {host.package}",
            repair="pip uninstall deep_ep, until python -c 'import deep_ep' fails, then install one; "
            f"or move {others[0]} away",
        )


def _maker(version: str) -> str:
    return f"this package, {version}" if "+diagnose" in version else f"another package, {version}"


# ---- native modules


def _load(host: Host, name: str) -> Ran | None:
    """Loads a native module of the examined package in another process; `None`: none was built for this Python."""
    file = _file_of(host, name)
    return host.run(sys.executable, "-c", _LOAD, name, str(file)) if file.is_file() else None


def _file_of(host: Host, name: str) -> Path:
    return host.package / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def constants_of_cuda(host: Host) -> dict[str, Any]:
    """What `_cuda` says of itself; nothing if it does not load."""
    ran = _load(host, "_cuda")
    if ran is None or ran.status != 0:
        return {}
    return dict(json.loads(ran.text.splitlines()[-1]))


def _last_words(ran: Ran) -> str:
    if ran.status is not None and ran.status < 0:
        return f"ended by {signal.Signals(-ran.status).name}"
    return (ran.text.strip().splitlines() or ["no output"])[-1]


def _native(name: str, why: str, host: Host) -> Finding:
    """One native module, which programs need because of `why`."""
    ran = _load(host, name)
    if ran is not None and ran.status == 0:
        return ok(f"loads: {_file_of(host, name)}")
    if ran is not None:
        error = _last_words(ran)
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


@CHECKS.row("torch")
def _torch(host: Host) -> Finding:
    try:
        torch = host.load("torch")
    except (ImportError, OSError) as error:
        return fail(
            f"does not load: {chain(error)}",
            "every call takes and returns tensors of torch",
            "pip install --force-reinstall torch, in the version that your program needs",
        )
    version, built_for = str(torch.__version__), torch.version.cuda
    abi = "new" if torch.compiled_with_cxx11_abi() else "old"
    found = f"{version}, {f'CUDA {built_for}' if built_for else 'without CUDA'}, {abi} C++ ABI"
    why = "deep_ep's modules are not linked with torch, so its ABI cannot be wrong for them"
    agreed = {"torch": version, "CUDA of torch": str(built_for)}
    if version_numbers(version) < _OLDEST_TORCH:
        return fail(found, why, "pip install 'torch>=2.4'", agreed=agreed)
    if built_for is None and host.has_gpu_driver():
        why = "this machine has a GPU, and a torch without CUDA cannot use it"
        repair = "pip install a torch with CUDA (https://pytorch.org/get-started/locally)"
        return warn(found, why, repair, agreed=agreed)
    return ok(found, why, agreed=agreed)


@CHECKS.row(
    "CUDA of the build",
    why="both load their NVSHMEM by the same name, and a process has one",
)
def _same_cuda(host: Host) -> Iterator[Finding]:
    """NVSHMEM's wheels are of one CUDA each."""
    constants, torch_cuda = constants_of_cuda(host), cuda_of_torch(host)
    if constants and torch_cuda:
        built, major = int(constants["CUDA_MAJOR"]), version_numbers(torch_cuda)[0]
        found = f"deep_ep was built with CUDA {built}, torch with CUDA {torch_cuda}"
        repair = f"build deep_ep with a toolkit of CUDA {major}: CUDA_HOME=... make cuda"
        yield ok(found) if built == major else warn(found, repair=repair)
