"""Writes the calls of csrc/kernels/protocol/calls.def and csrc/runtime/options.def into deep_ep/_cpu.pyi.

A call that a list's table names is replaced in the stub's `Runtime`; all else there is written by hand.

Usage: python tools/stub.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "deep_ep" / "_cpu.pyi"
LISTS = (ROOT / "csrc/kernels/protocol/calls.def", ROOT / "csrc/runtime/options.def")
TYPES = {"bool": "bool", "std::string": "str", "CounterView": "tuple[int, int, int, int]"}


def keywords() -> dict[str, list[str]]:
    """The keywords of each call, as a stub writes them."""
    found = {}
    for path in LISTS:
        text = path.read_text(encoding="utf-8")
        arguments: dict[str, list[str]] = {}
        for name, inside in re.findall(r"^EP_(\w+)\((.+?)\)", text, re.MULTILINE):
            c_type, argument, *default = inside.split(", ")
            keyword = f"{argument}: {TYPES.get(c_type, 'int')}{' = ...' if default else ''}"
            arguments.setdefault(name, []).append(keyword)
        for call, names in re.findall(r"^//   (\w+) +([A-Z_]+(?:, [A-Z_]+)*)$", text, re.MULTILINE):
            found[call] = [keyword for name in names.split(", ") for keyword in arguments[name]]
    return found


def written(stub: str) -> str:
    """The text of the stub with the calls as they are listed now."""
    lines = stub.splitlines()
    (runtime,) = (
        node
        for node in ast.parse(stub).body
        if isinstance(node, ast.ClassDef) and node.name == "Runtime"
    )
    listed = keywords()
    # From the end, because the number of lines changes.
    for node in reversed(runtime.body):
        if not isinstance(node, ast.FunctionDef) or node.name not in listed:
            continue
        assert node.returns is not None
        inside = "".join(f"        {keyword},\n" for keyword in listed[node.name])
        returns = ast.unparse(node.returns)
        text = f"    def {node.name}(\n        self,\n        *,\n{inside}    ) -> {returns}: ..."
        lines[node.lineno - 1 : node.end_lineno] = text.splitlines()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    STUB.write_text(written(STUB.read_text(encoding="utf-8")), encoding="utf-8")
