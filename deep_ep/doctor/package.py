"""Which deep_ep a program gets, whether its native modules load, and the torch that it works with."""

from __future__ import annotations

import importlib.metadata
import json
import re
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.host import Host, Ran, version_numbers

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


class _Advice(NamedTuple):
    """What to do about an error of the loader.

    Attributes:
        pattern: of its text.
        why: what it means.
        repair: what to do.
    """

    pattern: str
    why: str
    repair: str


_LOADER_ERRORS = (
    _Advice(
        r"undefined symbol",
        "it was built against a newer or another version of a library than the one that is loaded",
        _REBUILD,
    ),
    _Advice(
        r"libnvshmem\S*: cannot open shared object",
        "it is linked with NVSHMEM, whose host library is on no path that the loader looks at",
        "./install_nvshmem.sh --repair, or put its folder into LD_LIBRARY_PATH",
    ),
    _Advice(
        r"cannot open shared object",
        "it is linked with a library that is on no path that the loader looks at",
        "install that library, or put its folder into LD_LIBRARY_PATH",
    ),
    _Advice(
        r"GLIBC(XX)?_\S+' not found|version .\S+. not found",
        "it was built on a system with newer libraries than those of this one",
        _REBUILD,
    ),
    _Advice(
        r"SIGILL",
        "it was built for instructions that this CPU does not have",
        "DEEP_EP_CPU_ARCH= pip install --no-build-isolation --force-reinstall --no-deps .",
    ),
)
_UNKNOWN_ERROR = _Advice("", "nothing can use it in this environment", _REBUILD)


def check(host: Host) -> list[Finding]:
    """All findings on the installation."""
    findings = [_deep_ep(host), *_other_copies(host), *_distributions(host)]
    loaded = {name: load_native(host, name) for name in ("_cpu", "_cuda", "_cuda_nvshmem")}
    findings += [_native(host, name, outcome) for name, outcome in loaded.items()]
    return [*findings, *_torch(host, loaded["_cuda"])]


# ---- which deep_ep


def _deep_ep(host: Host) -> Finding:
    version = version_of(host.package)
    return Finding(
        "deep_ep",
        OK,
        f"{version} in {host.package}, Python {sys.version.split()[0]}",
        "ranks of one job must run the same version",
        agreed={"deep_ep": version},
    )


def version_of(package: Path) -> str:
    """What a folder with a deep_ep says of its version."""
    try:
        text = (package / "__init__.py").read_text(errors="replace")
    except OSError:
        return "of an unreadable version"
    found = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    return found.group(1) if found else "of an unknown version"


def _other_copies(host: Host) -> list[Finding]:
    """Folders named deep_ep on the search path besides the one that is examined."""
    places = dict.fromkeys(Path(entry or ".").resolve() / "deep_ep" for entry in host.search_path)
    copies = [place for place in places if (place / "__init__.py").is_file()]
    others = [place for place in copies if place != host.package]
    if not others:
        return []
    listed = ", ".join(f"{place} ({_maker(version_of(place))})" for place in copies)
    return [
        Finding(
            "other deep_ep",
            WARN,
            f"in this order: {listed}; examined is {host.package}",
            "a program imports the first one on its own search path, which depends on the folder it "
            "starts in and on PYTHONPATH",
            f"pip uninstall deep_ep, until python -c 'import deep_ep' fails, then install one; or move "
            f"{others[0]} away",
        )
    ]


def _maker(version: str) -> str:
    return f"this package, {version}" if "+diagnose" in version else f"another package, {version}"


def _distributions(host: Host) -> list[Finding]:
    """Installed distributions that bring a deep_ep."""
    found = {
        (one.version, str(one.locate_file(""))): one
        for one in importlib.metadata.distributions(path=list(host.search_path))
        if re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower() in ("deep-ep", "deepep")
    }
    why = "pip replaces and removes only what it knows, and the last one installed wins"
    if not found:
        return [
            Finding(
                "distribution",
                WARN,
                f"none is installed; deep_ep is used from {host.package.parent}",
                "programs that start in another folder do not find it",
                f"pip install {host.package.parent}",
            )
        ]
    listed = ", ".join(f"deep_ep {version} in {folder}" for version, folder in found)
    if len(found) > 1:
        repair = "pip uninstall deep_ep for each of them, then install one"
        return [Finding("distribution", FAIL, f"several: {listed}", why, repair)]
    (source,) = (_editable_source(one) for one in found.values())
    if source is not None and source != host.package.parent:
        return [
            Finding(
                "distribution",
                WARN,
                f"{listed} stands for {source}, examined is {host.package}",
                "programs that start in another folder import the other one",
                f"pip install --no-build-isolation --no-deps -e {host.package.parent}",
            )
        ]
    return [Finding("distribution", OK, listed, why)]


def _editable_source(distribution: importlib.metadata.Distribution) -> Path | None:
    """The tree that an editable installation stands for."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(urlsplit(origin["url"]).path))


# ---- native modules


class Loaded(NamedTuple):
    """A native module that was tried.

    Attributes:
        file: its file; `None`: it was not built for this Python.
        constants: what it says of itself; `None`: it does not load.
        error: why.
    """

    file: Path | None
    constants: dict[str, Any] | None = None
    error: str = ""


def load_native(host: Host, name: str) -> Loaded:
    """Loads a native module of the examined package in another process."""
    file = host.package / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not file.is_file():
        return Loaded(None)
    if file not in host.tried:
        host.tried[file] = _try(host, name, file)
    outcome: Loaded = host.tried[file]
    return outcome


def _try(host: Host, name: str, file: Path) -> Loaded:
    ran = host.run([sys.executable, "-c", _LOAD, name, str(file)])
    if ran.status == 0:
        return Loaded(file, json.loads(ran.text.splitlines()[-1]))
    return Loaded(file, error=_words(ran))


def _words(ran: Ran) -> str:
    if ran.status is not None and ran.status < 0:
        return f"ended by {signal.Signals(-ran.status).name}"
    return (ran.text.strip().splitlines() or ["no output"])[-1]


def _native(host: Host, name: str, outcome: Loaded) -> Finding:
    label = f"deep_ep.{name}"
    why = {
        "_cpu": "the kernels on the CPU, and the sizes of buffers, come from it",
        "_cuda": "GPUs are used through it",
        "_cuda_nvshmem": "ranks out of NVLink's reach are reached through it",
    }[name]
    if outcome.constants is not None:
        return Finding(label, OK, f"loads: {outcome.file}", why)
    if outcome.file is not None:
        advice = next(
            (one for one in _LOADER_ERRORS if re.search(one.pattern, outcome.error)), None
        )
        _, meaning, repair = advice or _UNKNOWN_ERROR
        return Finding(label, FAIL, f"does not load: {outcome.error}", f"{why}; {meaning}", repair)
    others = sorted(path.name for path in host.package.glob(f"{name}.*.so"))
    if others:
        found = f"built for another Python ({', '.join(others)}), not for {sys.version.split()[0]}"
        return Finding(label, FAIL, found, why, _REBUILD)
    status, repair = OK, ""
    if name == "_cpu" or (name == "_cuda" and host.has_gpu_driver()):
        status, repair = FAIL, f"{_REBUILD} (with -v it prints what it leaves out, and why)"
    elif host.has_gpu_driver() and host.has_rdma():
        status, repair = WARN, "./install_nvshmem.sh, then build again: make cuda"
    return Finding(label, status, "not built", why, repair)


# ---- torch


def _torch(host: Host, cuda: Loaded) -> list[Finding]:
    try:
        torch = host.load("torch")
    except (ImportError, OSError) as error:
        return [
            Finding(
                "torch",
                FAIL,
                f"does not load: {chain(error)}",
                "every call takes and returns tensors of torch",
                "pip install --force-reinstall torch, in the version that your program needs",
            )
        ]
    version, built_for = str(torch.__version__), torch.version.cuda
    abi = "new" if torch.compiled_with_cxx11_abi() else "old"
    found = f"{version}, {f'CUDA {built_for}' if built_for else 'without CUDA'}, {abi} C++ ABI"
    why = "deep_ep's modules are not linked with torch, so its ABI cannot be wrong for them"
    status, repair = OK, ""
    if version_numbers(version) < _OLDEST_TORCH:
        status, repair = FAIL, "pip install 'torch>=2.4'"
    elif built_for is None and host.has_gpu_driver():
        status = WARN
        why = "this machine has a GPU, and a torch without CUDA cannot use it"
        repair = "pip install a torch with CUDA (https://pytorch.org/get-started/locally)"
    findings = [
        Finding(
            "torch",
            status,
            found,
            why,
            repair,
            agreed={"torch": version, "CUDA of torch": str(built_for)},
        )
    ]
    if built_for is not None and cuda.constants is not None:
        findings.append(_same_cuda(str(built_for), cuda.constants))
    return findings


def _same_cuda(torch_cuda: str, constants: dict[str, Any]) -> Finding:
    """NVSHMEM's wheels are of one CUDA each, and a process has one NVSHMEM."""
    built, major = int(constants["CUDA_MAJOR"]), version_numbers(torch_cuda)[0]
    return Finding(
        "CUDA of the build",
        OK if built == major else WARN,
        f"deep_ep was built with CUDA {built}, torch with CUDA {torch_cuda}",
        "both load their NVSHMEM by the same name, and a process has one",
        ""
        if built == major
        else f"build deep_ep with a toolkit of CUDA {major}: CUDA_HOME=... make cuda",
    )


def chain(error: BaseException) -> str:
    """An error and what caused it, in one line."""
    parts: list[str] = []
    link: BaseException | None = error
    while link is not None and len(parts) < 5:
        parts.append(f"{type(link).__name__}: {' '.join(str(link).split())}")
        link = link.__cause__ or link.__context__
    return ", because of ".join(parts)
