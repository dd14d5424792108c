"""Facts about the tree that no compiler checks. Each failure lists where, and what to do instead."""

from __future__ import annotations

import ast
import graphlib
import io
import re
import subprocess
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CODE = {".c", ".cpp", ".cu", ".cuh", ".def", ".h", ".S"}
TEXT = CODE | {".py", ".pyi", ".md", ".toml", ".sh", ".lock", ".txt", ".yaml", ".yml", ""}
# Which layer of csrc may include which. runtime and the bindings see everything below them.
MAY_INCLUDE = {
    "device": {"device"},
    "transport": {"device", "transport"},
    "kernels": {"device", "transport", "kernels"},
    "runtime": {"device", "transport", "kernels", "runtime"},
}
# The rooms of deep_ep and of deep_ep/diagnose, folders or modules, and from which others of them each may import,
# for types as well. A room's line stands below theirs. The modules beside the rooms of diagnose see all of these.
MAY_IMPORT: dict[str, dict[str, set[str]]] = {
    "deep_ep": {
        "errors": set(),
        "base": {"errors"},
        "testing": {"errors"},
        "hang": {"errors", "base"},
        "membership": {"errors", "base", "hang"},
        "native": {"errors", "base"},
        "types": {"errors", "base", "native"},
        "observe": {"errors", "base", "native", "types"},
        "checks": {"errors", "base", "native", "types", "observe"},
        "ops": {
            *("errors", "base", "testing", "hang", "membership", "native", "types"),
            *("observe", "checks"),
        },
        "buffer": {
            *("errors", "base", "native", "types", "observe", "checks", "ops"),
        },
        "buffers": {"errors", "types", "buffer"},
        "utils": {"errors", "base", "native", "types"},
        "elastic": {
            *("errors", "base", "native", "types", "observe", "checks", "ops", "buffer"),
        },
        "diagnose": {"errors", "base", "hang", "membership", "observe"},
        "integrations": {"diagnose"},
        "moe": {
            *("errors", "base", "testing", "types", "observe", "checks", "ops", "buffer"),
            "utils",
        },
        "doctor": {"errors", "base", "testing", "native", "buffer", "buffers", "diagnose"},
        "tune": {"errors", "base", "native", "types", "buffer", "utils", "moe", "doctor"},
    },
    "deep_ep/diagnose": {
        "core": set(),
        "collect": {"core"},
        "analyze": {"core", "collect"},
        "storage": {"core", "collect", "analyze"},
        "render": {"core", "storage"},
        "live": {"core", "collect", "analyze", "storage", "render"},
        "other_kernels": {"core", "analyze", "live"},
        "trace": {"core", "analyze"},
        "standalone": set(),
        "cli": {"core", "collect", "storage", "render", "trace"},
    },
}
# Each folder of csrc/kernels from the bottom up: a file includes only what stands in a line above its own, and
# of other folders only what protocol has. The last line is the kernels, which nobody else includes.
KERNEL_FILES = {
    "protocol": (
        ("calls.def", "counters.def", "names.def"),
        ("counters.cuh", "messages.cuh"),
        ("calls.cuh",),
        ("operation_state.cuh",),
        ("masks.cuh",),
        ("failure.cuh", "recorder.cuh"),
        ("waiting.cuh", "verify.cuh"),
        ("clocks.cuh", "hand_over.cuh"),
        ("join.cuh", "measuring.cuh"),
        ("operation.cuh",),
        ("barrier.cuh", "clock_offset.cuh", "mask_calls.cuh"),
    ),
    "low_latency": (
        ("expert_rows.cuh", "handle.cuh", "log_rows.cuh"),
        ("combine.cuh", "dispatch.cuh"),
    ),
    "normal": (
        ("leader.cuh", "messages.cuh"),
        ("state.cuh",),
        ("queue.cuh", "row_sum.cuh"),
        ("counters.cuh", "tasks.cuh", "verify.cuh"),
        ("operation.cuh",),
        (
            "combine.cuh",
            "dispatch.cuh",
            "dispatch_layout.cuh",
            "local_rows.cuh",
            "notify.cuh",
            "pack.cuh",
        ),
    ),
}
# What setup.py compiles; every other file of csrc has to be included by one of them.
COMPILED = ("csrc/cuda_module.cu",)
COMPILED_FOLDERS = ("csrc/bindings", "csrc/runtime", "csrc/device/host", "csrc/transport/host")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# What makes a line of the doctor, its name first.
MAKES_LINES = re.compile(r"(CHECKS\.row|Check)$")
# A file, with its path or without; patterns, and what lies below the root of a machine, are no names of ours.
FILE_NAME = re.compile(
    r"(?<![\w/.{*<-])(?:\.{1,2}/)*(\w[\w-]*(?:/[\w.-]+)*\.(?:pyi?|md|css|js|c(?:pp|uh?)|h|def|S))\b(?![\w*(/-]|\.\w)"
)
# Files of other programs, which examples name.
OTHERS_FILES = {"torch/_inductor/compile_fx.py", "train.py", "ibgda_device.cuh", "runtime.cu"}
# Read by tests alone.
TEST_VARIABLES = {"DEEP_EP_UPSTREAM"}
ENVIRONMENT_VARIABLE = re.compile(r"\bDEEP_EP_[A-Z][A-Z_]*[A-Z]\b")


@cache
def files() -> tuple[str, ...]:
    """Paths of all files that are or could be committed, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("needs the git checkout")
    return tuple(path for path in sorted(listed.stdout.split("\0")) if (ROOT / path).is_file())


@cache
def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code(folder: str) -> list[str]:
    """C++ and CUDA sources under `folder`."""
    return [path for path in files() if path.startswith(f"{folder}/") and Path(path).suffix in CODE]


def without_comments(text: str) -> str:
    """C++ with comments blanked, line numbers kept."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.DOTALL)


def lines_with(pattern: str, paths: list[str], *, comments: bool = False) -> list[str]:
    """`path:line: text` of each match."""
    found = []
    for path in paths:
        text = read(path) if comments else without_comments(read(path))
        for match in re.finditer(pattern, text, re.MULTILINE):
            number = text.count("\n", 0, match.start()) + 1
            found.append(f"{path}:{number}: {text.splitlines()[number - 1].strip()}")
    return found


def report(found: list[str], advice: str) -> None:
    """Fail with all places at once."""
    if found:
        pytest.fail("\n".join([*found, advice]), pytrace=False)


def test_assembly_and_target_switches_stay_in_device() -> None:
    paths = [path for path in code("csrc") if not path.startswith("csrc/device/")]
    report(
        lines_with(r"\b(asm|__asm__|__CUDACC__|__CUDA_ARCH__)\b", paths),
        "Put it behind a function of csrc/device, with a twin for the other target.",
    )


def test_csrc_knows_no_torch() -> None:
    report(
        lines_with(r"#\s*include\s*[<\"](torch|ATen|c10)/", code("csrc")),
        "Pointers cross the binding as integers; tensors stay in Python.",
    )


def test_the_environment_is_read_in_one_place() -> None:
    package = [path for path in files() if path.startswith("deep_ep") and path.endswith(".py")]
    package.remove("deep_ep/base/env.py")
    # Runs in every interpreter of a job, and must not import the package there.
    package.remove("deep_ep/diagnose/other_kernels/import_hook.py")
    report(
        lines_with(r"\bos\.(environ|getenv)\b|\bfrom os import\b", package, comments=True)
        + lines_with(r"\b(secure_)?getenv\s*\(", code("csrc")),
        "Declare the variable in deep_ep/base/env.py and pass the value on.",
    )


def package() -> list[str]:
    """Python modules of deep_ep."""
    return [path for path in files() if path.startswith("deep_ep/") and path.endswith(".py")]


def test_wheels_have_all_files_of_the_package() -> None:
    patterns = re.findall(r'^"?(deep_ep[\w.]*)"? = \[(.*)\]$', read("pyproject.toml"), re.MULTILINE)
    data = [
        f"{name.replace('.', '/')}/{pattern}"
        for name, listed in patterns
        for pattern in re.findall(r'"(.*?)"', listed)
    ]
    there = files()
    report(
        [
            path
            for path in there
            # What is built there is a distribution of its own.
            if path.startswith("deep_ep/")
            and not path.startswith("deep_ep/diagnose/standalone/")
            and not (path.endswith(".py") and f"{Path(path).parent}/__init__.py" in there)
            and not any(Path(path).match(pattern) for pattern in data)
        ],
        "Name it under [tool.setuptools.package-data] of pyproject.toml.",
    )


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_modules_keep_out_of_each_other_s_private_names() -> None:
    found = []
    for path in package():
        for node in ast.walk(ast.parse(read(path))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            # What CPython documents in sys has such names, what torch offers to subclasses of Tensor, named tuples.
            own = ("self", "cls", "sys")
            offered = {"_make_wrapper_subclass", "_pytree", "_fields", "_asdict"}
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in own:
                names = [node.attr]
            found += [
                f"{path}:{node.lineno}: {name}" for name in set(names) - offered if is_private(name)
            ]
    report(found, "Give what others use a name without underscore, and say what it is.")


def test_no_two_classes_have_one_name() -> None:
    where: dict[str, list[str]] = {}
    for path in package():
        for node in ast.parse(read(path)).body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    report(
        [f"{name}: {', '.join(places)}" for name, places in where.items() if len(places) > 1],
        "Say in the name of one of them of what it is.",
    )


def test_no_open_ends_in_files() -> None:
    # Spelt so that this file is not a finding.
    words = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"])
    paths = [path for path in files() if Path(path).suffix in TEXT]
    report(
        lines_with(rf"\b({words})\b", paths, comments=True),
        "Finish it, or open an issue and say so.",
    )


def ignored(name: str) -> bool:
    """Whether git ignores the path: it is made here, not stored."""
    command = ["git", "check-ignore", "-q", name]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_documents_name_files_that_exist() -> None:
    found = []
    top = {path.split("/")[0] for path in files()}
    for path in files():
        if not path.endswith(".md"):
            continue
        text = read(path)
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        quoted = re.findall(r"`([\w.-]+(?:/[\w.*-]+)+/?)`", text)
        names = [name for name in links if ":" not in name]
        # Quoted words with a slash are paths when they begin like one of ours.
        names += [name for name in quoted if name.split("/")[0] in top]
        for name in names:
            bases = ((ROOT / path).parent, ROOT)
            exists = any(next(base.glob(name.rstrip("/")), None) for base in bases)
            if not exists and not ignored(name):
                found.append(f"{path}: {name}")
    report(found, "Correct the name, or drop the sentence.")


def prose(path: str) -> list[str]:
    """What a file says to people: a document, or comments and docstrings."""
    text, kind = read(path), Path(path).suffix
    if kind == ".md":
        return [text]
    if kind in CODE:
        return re.findall(r"//[^\n]*|/\*.*?\*/", text, re.DOTALL)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(n) for n in ast.walk(ast.parse(text)) if isinstance(n, nodes)]
    return [t.string for t in tokens if t.type == tokenize.COMMENT] + [d for d in docstrings if d]


def test_what_is_said_of_files_names_those_that_exist() -> None:
    """By their whole path, or by as much of its end as is said; those into which patches go as well."""
    sums = (read(path) for path in files() if path.endswith("/FILES.sha256"))
    patched = [line.split()[1] for text in sums for line in text.splitlines() if line[0] != "#"]
    paths = [*files(), *patched]
    ends = {"/".join(path.split("/")[at:]) for path in paths for at in range(path.count("/") + 1)}
    report(
        [
            f"{path}: {name}"
            for path in files()
            if Path(path).suffix in CODE | {".py", ".pyi", ".md"}
            for text in prose(path)
            for name in FILE_NAME.findall(text)
            if name not in ends | OTHERS_FILES
        ],
        "Correct the name, or drop the sentence.",
    )


def resolve(path: str, name: str) -> str | None:
    """The file in the tree that `#include "name"` in `path` means; None if it is not ours."""
    for base in ("csrc", str(Path(path).parent), "tests/cpp"):
        candidate = str(Path(base) / name)
        if (ROOT / candidate).is_file():
            return str((ROOT / candidate).resolve().relative_to(ROOT))
    return None


def test_every_source_is_compiled_or_included() -> None:
    included = {
        resolve(path, name)
        for path in code("csrc") + code("tests")
        for name in INCLUDE.findall(read(path))
    }
    orphans = [
        path
        for path in code("csrc")
        if path not in included
        and path not in COMPILED
        and not (path.endswith((".cpp", ".S")) and str(Path(path).parent) in COMPILED_FOLDERS)
    ]
    report(orphans, "Nobody includes or compiles these; remove them.")


def test_layers_include_downwards() -> None:
    found = []
    for path in code("csrc"):
        layer = path.split("/")[1]
        for name in INCLUDE.findall(read(path)):
            target = (resolve(path, name) or name).split("/")
            if layer in MAY_INCLUDE and target[0] == "csrc" and target[1] not in MAY_INCLUDE[layer]:
                found.append(f"{path} includes {name}")
    report(found, "The direction is device <- transport <- kernels <- runtime <- bindings.")


def imports_of(path: str) -> list[str]:
    """Dotted names of the modules that a Python file imports, relative ones resolved."""
    package = path.split("/")[:-1]
    found = []
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            # `from package import module` names the module only behind the import.
            found += [".".join([*module, alias.name]) for alias in node.names]
    return found


def room_of(path: str, folder: str) -> str | None:
    """The room of `folder` that a Python file belongs to; None if it belongs to none."""
    room, slash, _ = path.removeprefix(f"{folder}/").removesuffix(".py").partition("/")
    is_room = slash or (folder == "deep_ep" and room != "__init__")
    return room if path.startswith(f"{folder}/") and is_room else None


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_rooms_import_downwards(folder: str) -> None:
    dotted, found = folder.replace("/", "."), []
    for path in package():
        room = room_of(path, folder)
        for name in imports_of(path) if room is not None else ():
            # Types of the native modules are in no room.
            is_ours = f"{name}.".startswith(f"{dotted}.") and not name.startswith("deep_ep._c")
            inner = name.removeprefix(f"{dotted}.").split(".")[0]
            if is_ours and inner not in (room, *MAY_IMPORT[folder].get(room, ())):
                found.append(f"{path} imports {name}")
    report(
        found, "MAY_IMPORT says what a room may import. Move what both need into one below both."
    )


def test_rooms_stand_above_what_they_import() -> None:
    found = []
    for folder, rooms in MAY_IMPORT.items():
        there = {room for path in package() if (room := room_of(path, folder))}
        found += [f"{folder}/{room}" for room in sorted(there ^ rooms.keys())]
        above: set[str] = set()
        for room, imported in rooms.items():
            found += [f"{folder}/{room} and {name}" for name in sorted(imported - above)]
            above.add(room)
    report(
        found, "Give each room a line in MAY_IMPORT, below the lines of those that it imports from."
    )


def test_files_import_in_no_circle() -> None:
    """For types as well: what a file needs can be read before it."""
    modules = {re.sub(r"(/__init__)?\.py$", "", path).replace("/", "."): path for path in package()}
    files_of = {path: set[str]() for path in package()}
    for path, imported in files_of.items():
        for name in imports_of(path):
            # The last name may be of something in the module. Types of the native modules are in no file.
            module = name if name in modules else name.rpartition(".")[0]
            imported.update({modules[module]} - {path} if module in modules else ())
    try:
        graphlib.TopologicalSorter(files_of).prepare()
    except graphlib.CycleError as error:
        pytest.fail(
            f"These import each other; let one name what it needs as a Protocol: {error.args[1]}"
        )


def test_rooms_of_diagnosis_see_the_package_through_one_module() -> None:
    report(
        [
            f"{path} imports {name}"
            for path in package()
            if path.startswith("deep_ep/diagnose/") and path != "deep_ep/diagnose/core/package.py"
            for name in imports_of(path)
            if name.split(".")[0] == "deep_ep" and not name.startswith("deep_ep.diagnose.")
        ],
        "Take it from core/package.py.",
    )


def test_kernel_files_include_downwards() -> None:
    line_of = {
        f"csrc/kernels/{folder}/{name}": line
        for folder, lines in KERNEL_FILES.items()
        for line, names in enumerate(lines)
        for name in names
    }
    found = [
        f"{path} is not in KERNEL_FILES" for path in code("csrc/kernels") if path not in line_of
    ]
    for path in set(code("csrc/kernels")) & set(line_of):
        folder = Path(path).parent
        for name in INCLUDE.findall(read(path)):
            target = resolve(path, name) or name
            if not target.startswith("csrc/kernels/"):
                continue
            is_below = (
                line_of[target] < line_of[path]
                if Path(target).parent == folder
                else Path(target).parent.name == "protocol"
            )
            if not is_below:
                found.append(f"{path} includes {name}")
    report(found, "Move what both need into a file below both; KERNEL_FILES says what is below.")


def test_targets_do_not_include_each_other() -> None:
    found = [
        f"{path} includes {name}"
        for path in code("csrc")
        for mine, other in (("/host/", "/cuda/"), ("/cuda/", "/host/"))
        for name in INCLUDE.findall(read(path))
        if mine in path and other in f"/{name}"
    ]
    report(found, "Share through a file that belongs to neither target.")


def test_kernels_wait_in_one_way() -> None:
    report(
        lines_with(r"\bwhile\s*\([^\n]*\bload_(acquire|relaxed)", code("csrc/kernels")),
        "Use spin_until: it has a deadline, takes the time and knows who was waited for.",
    )


def test_environment_variables_are_documented() -> None:
    declared = set(ENVIRONMENT_VARIABLE.findall(read("deep_ep/base/env.py")))
    build = set(ENVIRONMENT_VARIABLE.findall(read("setup.py")))
    documents = [path for path in files() if path.endswith(".md")]
    documented = {name for path in documents for name in ENVIRONMENT_VARIABLE.findall(read(path))}
    missing = [f"{name}: in no document" for name in sorted((declared | build) - documented)]
    stale = documented - declared - build - TEST_VARIABLES
    unread = [f"{name}: documented, read nowhere" for name in sorted(stale)]
    report(
        missing + unread, "docs/environment.md lists what deep_ep/base/env.py and setup.py read."
    )


def test_the_table_of_environment_variables_is_the_code_s() -> None:
    from deep_ep.base import env

    # The line below a row of the code is its meaning.
    body = ast.parse(read("deep_ep/base/env.py")).body
    meanings = {
        row.value.args[0].value: ast.literal_eval(text.value)
        for row, text in zip(body, body[1:])
        if isinstance(text, ast.Expr) and isinstance(row, ast.Assign)
    }
    rows = [
        f"| `{v.name}` | {words} | {v.default or 'unset'} | {meanings[v.name]} |"
        for v in env.VARIABLES
        for words in (v.kind.words.replace("|", "\\|"),)
    ]
    lines = read("docs/environment.md").splitlines()
    documented = [line for line in lines if line in rows]
    missing = [row for row in rows if row not in documented]
    moved = [row for row, line in zip(rows, documented) if row != line]
    report(missing or moved, "Put these rows into docs/environment.md, in this order.")


def test_the_lines_of_the_doctor_are_documented() -> None:
    calls = [
        call
        for path in files()
        if path.startswith("deep_ep/doctor/") and path.endswith(".py")
        for call in ast.walk(ast.parse(read(path)))
        if isinstance(call, ast.Call)
    ]
    named = [
        *(
            call.args[0]
            for call in calls
            if call.args and MAKES_LINES.search(ast.unparse(call.func))
        ),
        *(keyword.value for call in calls for keyword in call.keywords if keyword.arg == "name"),
    ]
    names = {one.value for one in named if isinstance(one, ast.Constant)} - {""}
    rows = re.findall(
        r"^\| ([^|]+) \|", read("docs/doctor.md").split("## What it looks at")[1], re.M
    )
    documented = {name.strip() for row in rows for name in row.split(",")}
    report(
        sorted(names - documented), "docs/doctor.md lists what the lines of the doctor are named."
    )


def test_tests_that_are_marked_by_name_are_there() -> None:
    (marked,) = (
        set(ast.literal_eval(node.value))
        for node in ast.parse(read("tests/conftest.py")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXHAUSTIVE"
    )
    sources = [read(path) for path in files() if path.startswith("tests/") and path.endswith(".py")]
    there = {
        node.name
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
    gone = []
    for name in sorted(marked):
        function, _, parameters = name.rstrip("]").partition("[")
        is_parameter = any(f'"{parameters}"' in source for source in sources)
        if function not in there or (parameters and not is_parameter):
            gone.append(name)
    report(gone, "Correct the name in EXHAUSTIVE of tests/conftest.py.")
