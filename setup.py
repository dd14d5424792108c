"""Builds the native modules of `deep_ep`; everything else about the package is in pyproject.toml.

`deep_ep._cpu` is built always, `deep_ep._cuda` and `deep_ep._cuda_nvshmem` when nvcc and NVSHMEM
are found. Each decision is printed in one line. Compilation runs through ninja, in `build/native-*`,
so that a second build only compiles what changed.

Environment:
    CXX                   C++ compiler of the host target (default g++)
    DEEP_EP_CPU_ARCH      -march of the host target (default x86-64-v3 on x86-64; "" leaves it out)
    DEEP_EP_WERROR=1      warnings of the host target are errors
    DEEP_EP_TIME_MODEL=1  host target for benchmarks/time_model.py: constants of the GPU, basic blocks are counted
    DEEP_EP_CUDA          0: no CUDA modules; 1: missing nvcc or NVSHMEM is an error (default: auto)
    CUDA_HOME             toolkit to use (default: the one of the nvcc on PATH)
    TORCH_CUDA_ARCH_LIST  e.g. "9.0a;10.0a" (default 9.0a)
    NVSHMEM_DIR           NVSHMEM prefix (default: third-party/nvshmem, then the installed wheel)
    MAX_JOBS              parallel compilations (default: ninja's choice)
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
PATCHES = ROOT / "patches"
CUDA_SOURCE = CSRC / "cuda_module.cu"
OLDEST_SM = 90  # The kernels use cluster-era instructions; Hopper is the first that has them.
HOST_LIBRARY = "libnvshmem_host.so.3"
# Bindings only pass arguments on. More takes longer to build, and calls take as long.
BINDING_FLAGS = "-O1"
OLDEST_NVSHMEM = (3, 5)  # First version with the queue-pair API.


def say(text: str) -> None:
    """Print one line that pip shows under -v and `setup.py` shows always."""
    print(f"deep_ep: {text}", flush=True)


@dataclass(frozen=True)
class Module:
    """One native module: `compile` makes an object of each source, `link` the module of them."""

    name: str
    sources: list[Path]
    compile: list[str]
    link: list[str]
    libraries: list[str]


@dataclass(frozen=True)
class Nvshmem:
    """An NVSHMEM prefix that was found, and by which of the three ways."""

    prefix: Path
    library_dir: Path
    version: tuple[int, ...]
    origin: str

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


# ---------------------------------------------------------------------------------------- host


def host_module() -> Module:
    """The host target: the same kernels under the SIMT executor, for any CPU."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(compiler[0]) is None:
        raise SetupError(
            f"C++ compiler {compiler[0]!r} not found. Install g++ 12 or newer, or set CXX."
        )
    sources: list[Path] = []
    for folder in ("bindings", "runtime", "device/host", "transport/host"):
        sources += sorted((CSRC / folder).glob("*.cpp")) + sorted((CSRC / folder).glob("*.S"))
    flags = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
    # GCC 12 takes fright at `"text" + std::string` (its bug 105651); clang does not know the word.
    flags += ["-Wno-restrict", "-Wno-unknown-warning-option"]
    flags.append("-DEP_TIME_MODEL=1" if builds_time_model() else "-DEP_WITHOUT_TIME_MODEL=1")
    if os.environ.get("DEEP_EP_WERROR") == "1":
        flags.append("-Werror")
    arch = os.environ.get("DEEP_EP_CPU_ARCH", default_cpu_arch())
    if arch:
        flags.append(f"-march={arch}")
    say(f"builds deep_ep._cpu: {shlex.join(compiler)}, {f'-march={arch}' if arch else 'no -march'}")
    return Module(
        name="_cpu",
        sources=sources,
        compile=[*compiler, *flags, *module_flags("_cpu")],
        link=[*compiler, "-shared", "-pthread"],
        libraries=["-lrt"],
    )


def builds_time_model() -> bool:
    """Whether the host target is to tell the time of a GPU."""
    return os.environ.get("DEEP_EP_TIME_MODEL") == "1"


def default_cpu_arch() -> str:
    """AVX2 and F16C, which every x86-64 server of the last ten years has; nothing elsewhere."""
    return "x86-64-v3" if platform.machine() in ("x86_64", "AMD64") else ""


def module_flags(name: str) -> list[str]:
    """Flags of every translation unit of module `name`, whichever the compiler."""
    import pybind11

    includes = [f"-I{CSRC}"]
    for path in (pybind11.get_include(), sysconfig.get_path("include")):
        includes += ["-isystem", path]
    return [*includes, f"-DEP_MODULE_NAME={name}"]


# ---------------------------------------------------------------------------------------- CUDA


def cuda_modules() -> list[Module]:
    """`_cuda` for NVLink peers alone, `_cuda_nvshmem` for RDMA too; empty with a reason otherwise."""
    wanted = os.environ.get("DEEP_EP_CUDA") or "auto"
    if wanted not in ("auto", "0", "1"):
        raise SetupError(f"DEEP_EP_CUDA is {wanted!r}; it may be 0, 1 or auto.")
    if wanted == "0":
        return leave_out("deep_ep._cuda", "DEEP_EP_CUDA=0", required=False)
    nvcc = find_nvcc()
    if nvcc is None:
        reason = "nvcc is neither in CUDA_HOME nor on PATH; install a CUDA toolkit (12.5 or newer)"
        return leave_out("deep_ep._cuda", reason, required=wanted == "1")
    if not CUDA_SOURCE.exists():
        return leave_out("deep_ep._cuda", "csrc/cuda_module.cu is missing", required=wanted == "1")

    version = nvcc_version(nvcc)
    gencode = gencode_flags(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    say(f"found CUDA {version[0]}.{version[1]}: {nvcc}")
    # ptxas says what each kernel uses; tools/kernel_resources.py makes a table of it. tools/machine_code.py
    # and profilers find the source line of an instruction.
    flags = ["-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", *gencode]
    flags += ["-Xptxas=-v", "-lineinfo"]
    link = [str(nvcc), "-shared", "-cudart=static", *gencode]
    nvshmem = find_nvshmem(cuda_major=version[0])
    if isinstance(nvshmem, Nvshmem):
        library = nvshmem.library_dir / HOST_LIBRARY
        flags.append(f'-DEP_NVSHMEM_VERSION="{nvshmem.text}"')
        flags.append(f'-DEP_NVSHMEM_LIBRARY="{library}"')
    say(f"builds deep_ep._cuda for {', '.join(flag.split(',code=')[1] for flag in gencode)}")
    plain = Module(
        name="_cuda",
        sources=[CUDA_SOURCE],
        compile=[str(nvcc), *flags, *module_flags("_cuda")],
        link=link,
        libraries=[],
    )

    if isinstance(nvshmem, str):
        return [plain, *leave_out("deep_ep._cuda_nvshmem", nvshmem, required=wanted == "1")]
    say(f"found NVSHMEM {nvshmem.text}: {nvshmem.prefix} ({nvshmem.origin})")
    say("builds deep_ep._cuda_nvshmem, to be loaded only when a rank is out of NVLink's reach")
    flags += ["-rdc=true", "-isystem", str(nvshmem.prefix / "include"), "-DEP_WITH_NVSHMEM=1"]
    libraries = [f"-L{nvshmem.library_dir}", "-lnvshmem_device", f"-Xlinker=-l:{HOST_LIBRARY}"]
    # Where it was found, then the wheel's place beside ours in site-packages.
    for path in (str(nvshmem.library_dir), "$ORIGIN/../nvidia/nvshmem/lib"):
        libraries.append(f"-Xlinker=-rpath={path}")
    with_nvshmem = Module(
        name="_cuda_nvshmem",
        sources=[CUDA_SOURCE],
        compile=[str(nvcc), *flags, *module_flags("_cuda_nvshmem")],
        link=link,
        libraries=libraries,
    )
    return [plain, with_nvshmem]


def leave_out(module: str, reason: str, *, required: bool) -> list[Module]:
    """Say why `module` is not built; an error when the user asked for it."""
    if required:
        raise SetupError(f"DEEP_EP_CUDA=1, but {module} cannot be built: {reason}.")
    say(f"leaves out {module}: {reason}")
    return []


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME if that is set, else of PATH."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")
    return Path(found) if found else None


def nvcc_version(nvcc: Path) -> tuple[int, int]:
    """Major and minor release of the toolkit."""
    text = subprocess.run([str(nvcc), "--version"], check=True, capture_output=True, text=True)
    match = re.search(r"release (\d+)\.(\d+)", text.stdout)
    if match is None:
        raise SetupError(f"{nvcc} --version names no release: {text.stdout.strip()!r}.")
    return int(match.group(1)), int(match.group(2))


def gencode_flags(arch_list: str) -> list[str]:
    """-gencode flags for torch's notation ("9.0a;10.0+PTX"); what is older than Hopper is left out."""
    flags = []
    for item in re.split(r"[;,\s]+", arch_list.strip()) if arch_list.strip() else ["9.0a"]:
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if match is None:
            raise SetupError(f"TORCH_CUDA_ARCH_LIST has {item!r}; write numbers such as 9.0a.")
        major, minor, suffix, ptx = match.groups()
        number = f"{major}{minor}{suffix}"
        if int(major + minor) < OLDEST_SM:
            say(f"leaves out sm_{number}: the kernels need sm_{OLDEST_SM} or newer")
            continue
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if ptx:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    if not flags:
        raise SetupError(
            f"TORCH_CUDA_ARCH_LIST={arch_list!r} names no architecture from sm_{OLDEST_SM} on. "
            "Unset it, set it to 9.0a, or build without CUDA: DEEP_EP_CUDA=0."
        )
    return flags


def find_nvshmem(cuda_major: int) -> Nvshmem | str:
    """NVSHMEM by NVSHMEM_DIR, third-party/nvshmem, installed wheel; or the reason why there is none."""
    if os.environ.get("NVSHMEM_DIR"):
        return inspect_nvshmem(Path(os.environ["NVSHMEM_DIR"]), "NVSHMEM_DIR")
    linked = ROOT / "third-party" / "nvshmem"
    if linked.exists():
        return inspect_nvshmem(linked.resolve(), "third-party/nvshmem")
    wheel = f"nvidia-nvshmem-cu{cuda_major}"
    # sysconfig's folders as well as sys.path: pip's build isolation hides the former from the latter.
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path]
    for folder in filter(None, dict.fromkeys(folders)):
        prefix = Path(folder) / "nvidia" / "nvshmem"
        if prefix.is_dir() and any(Path(folder).glob(f"{wheel.replace('-', '_')}-*.dist-info")):
            return inspect_nvshmem(prefix, f"wheel {wheel}")
    return f"NVSHMEM is not in NVSHMEM_DIR, third-party/nvshmem or a wheel {wheel}; run ./install_nvshmem.sh"


def inspect_nvshmem(prefix: Path, origin: str) -> Nvshmem | str:
    """Check that `prefix` has what we link against, in a version that has what we call."""
    header = prefix / "include" / "non_abi" / "nvshmem_version.h"
    if not header.exists():
        return f"{prefix} ({origin}) has no include/non_abi/nvshmem_version.h, so it is no NVSHMEM prefix"
    text = header.read_text()
    found = [
        re.search(rf"NVSHMEM_VENDOR_{part}_VERSION\s+(\d+)", text)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    version = tuple(int(match.group(1)) for match in found if match)
    if version < OLDEST_NVSHMEM:
        return (
            f"{prefix} ({origin}) is NVSHMEM {'.'.join(map(str, version))}; 3.5 or newer is needed"
        )
    for folder in ("lib", "lib64"):
        library_dir = prefix / folder
        if all((library_dir / name).exists() for name in ("libnvshmem_device.a", HOST_LIBRARY)):
            return Nvshmem(prefix, library_dir, version, origin)
    return f"{prefix} ({origin}) lacks lib/libnvshmem_device.a or lib/{HOST_LIBRARY}"


# --------------------------------------------------------------------------------------- ninja


def ninja_text(modules: list[Module]) -> str:
    """A build.ninja with one edge per object and one per module."""
    lines = ["ninja_required_version = 1.5"]
    for module in modules:
        # The compiler's output is kept beside the object; what ptxas reports is not shown.
        lines += [
            f"rule compile{module.name}",
            f"  command = {shell_join(module.compile)} $flags -MD -MF $out.d -c $in -o $out > $out.log 2>&1; "
            "status=$$?; grep -vE 'ptxas info|bytes stack frame' $out.log; exit $$status",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $out",
            f"rule link{module.name}",
            f"  command = {shell_join(module.link)} $in -o $out {shell_join(module.libraries)}",
            "  description = link $out",
        ]
        objects = []
        for source in module.sources:
            target = escape(f"{module.name}/{source.relative_to(CSRC)}.o")
            lines.append(f"build {target}: compile{module.name} {escape(str(source))}")
            if source.parent.name == "bindings":
                lines.append(f"  flags = {BINDING_FLAGS}")
            elif source.parent.name == "runtime" and builds_time_model():
                lines.append("  flags = -fsanitize-coverage=trace-pc")  # the kernels
            objects.append(target)
        lines.append(f"build {module_file(module)}: link{module.name} {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def module_file(module: Module) -> str:
    """File name of a module for this interpreter."""
    return f"{module.name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def escape(path: str) -> str:
    """A path as ninja's build lines want it."""
    return re.sub(r"([$ :])", r"$\1", path)


def shell_join(words: list[str]) -> str:
    """Words quoted for the shell, then for ninja."""
    return shlex.join(words).replace("$", "$$")


def ninja_command() -> list[str]:
    """The ninja of the PyPI package, else the one on PATH."""
    try:
        import ninja
    except ImportError:
        command = shutil.which("ninja")
    else:
        command = str(Path(ninja.BIN_DIR) / "ninja")
    if command is None:
        raise SetupError("ninja not found. Install it: pip install ninja.")
    jobs = os.environ.get("MAX_JOBS")
    return [command, f"-j{jobs}"] if jobs else [command]


def run_ninja(folder: Path, modules: list[Module]) -> None:
    """Build `modules` in `folder`, compiling only what changed since the last time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Two builds of one tree would write the same objects.
        (folder / "build.ninja").write_text(ninja_text(modules))
        command = [*ninja_command(), "-C", str(folder)]
        # Under `make -j`, ninja would take its number of jobs from a pipe that make has closed.
        environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
        if subprocess.run(command, check=False, env=environment).returncode != 0:
            hint = "; DEEP_EP_CUDA=0 builds without CUDA" if folder.name == "cuda" else ""
            raise SetupError(f"compilation failed, see above. Again: {shlex.join(command)}{hint}.")


class NinjaBuild(build_ext):
    """Decides what to build when a build is asked for, and compiles through ninja."""

    def finalize_options(self) -> None:
        self.modules = [host_module(), *cuda_modules()]
        self.distribution.ext_modules = [extension(module.name) for module in self.modules]
        super().finalize_options()

    def build_extensions(self) -> None:
        folder = (
            ROOT / "build" / f"native-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        )
        host = "time-model" if builds_time_model() else "host"
        builds = [(folder / host, self.modules[:1]), (folder / "cuda", self.modules[1:])]
        builds = [(where, modules) for where, modules in builds if modules]
        # At once, since each CUDA module is one long compilation. Who limits jobs means all of them.
        with ThreadPoolExecutor(1 if "MAX_JOBS" in os.environ else len(builds)) as pool:
            for _ in pool.map(run_ninja, *zip(*builds)):
                pass
        for where, modules in builds:
            for module in modules:
                target = Path(self.get_ext_fullpath(f"deep_ep.{module.name}"))
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(where / module_file(module)), str(target))


class BuildWithPatches(build_py):
    """Puts `patches` into the package, where `diagnose patch` looks for them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "deep_ep" / "diagnose" / PATCHES.name
            self.copy_tree(str(PATCHES), str(target))


def extension(name: str) -> Extension:
    """What setuptools has to know of a module; NinjaBuild knows the sources."""
    return Extension(f"deep_ep.{name}", sources=[])


if __name__ == "__main__":
    commands = {"build_ext": NinjaBuild, "build_py": BuildWithPatches}
    setup(ext_modules=[extension("_cpu")], cmdclass=commands)
