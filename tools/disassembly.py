"""The machine code of a CUDA module, as instructions.

Takes nvdisasm and cuobjdump from PATH, from the toolkit of CUDA_HOME or nvcc, or from the packages
nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from memory_order.sass import Instruction, read


def find_tool(name: str) -> str:
    """Path of a tool of the CUDA toolkit."""
    folders = [os.environ.get("PATH", "")]
    if home := os.environ.get("CUDA_HOME"):
        folders.append(str(Path(home) / "bin"))
    if nvcc := shutil.which("nvcc"):
        folders.append(str(Path(nvcc).resolve().parent))
    for site in (sysconfig.get_path("purelib"), *sys.path):
        folders += [str(folder) for folder in Path(site).glob("nvidia/*/bin")]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise FileNotFoundError(
            f"{name} is neither on PATH nor in the CUDA toolkit. Install it: pip install nvidia-cuda-{name}"
        )
    return found


def cubins(module: Path, folder: Path) -> list[Path]:
    """The machine code in a module, as files in a folder; a .cubin is its own."""
    if module.suffix == ".cubin":
        return [module]
    command = [find_tool("cuobjdump"), "-xelf", "all", str(module.resolve())]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return sorted(folder.glob("*.cubin"))


def disassembled(module: Path) -> Iterator[Instruction]:
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins(module, Path(folder)):
            command = [find_tool("nvdisasm"), "-c", "-gi", str(cubin)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                yield from read(process.stdout)
            if process.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}.")
