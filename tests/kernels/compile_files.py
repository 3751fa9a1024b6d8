"""Compiles the COMPILE_CASES of files for sm_90 and prints one JSON line per case. If a case fails, it prints
a line with the error and skips the rest of the file.

test_compile_sm90.py runs it without TRITON_INTERPRET: `python -m tests.kernels.compile_files FILE…`.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

DOT = re.compile(r"tt\.dot .*: tensor<(\d+)x(\d+)x(\w+)> \* tensor<\d+x(\d+)x\w+>")


def compiled(function: Any, types: dict[str, Any], sizes: dict[str, Any], options: dict[str, int]) -> Any:
    names = function.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    missing = [name for name in names if name not in types and name not in sizes]
    if missing:
        raise TypeError(f"{function.__name__}: COMPILE_CASES says nothing of {missing}")
    constants = {(names.index(name),): value for name, value in sizes.items()}
    make = GluonASTSource if function.is_gluon() else ASTSource
    return triton.compile(
        make(function, signature, constants), target=GPUTarget("cuda", 90, 32), options=options
    )


def needs_wgmma(kernel: Any, function: Any) -> bool:
    """Say whether a kernel must use wgmma: Gluon kernels, and 16-bit Triton dots of 64 or more rows."""
    if function.is_gluon():
        return True
    dots = DOT.findall(kernel.asm["ttir"])
    return any(int(m) >= 64 and int(n) >= 16 and kind in ("bf16", "f16") for m, _, kind, n in dots)


def records(path: str) -> Iterator[dict[str, Any]]:
    for function, types, sizes, *rest in runpy.run_path(path)["COMPILE_CASES"]:
        options = rest[0] if rest else {}
        kernel = compiled(function, types, sizes, options)
        yield {
            "case": f"{function.__name__} {sizes}",
            "shared": kernel.metadata.shared,
            "wgmma": "wgmma.mma_async" in kernel.asm["ptx"],
            "needs_wgmma": needs_wgmma(kernel, function) and options.get("num_warps", 4) >= 4,
        }


def main() -> None:
    for path in sys.argv[1:]:
        try:
            for record in records(path):
                print(json.dumps({"file": path, **record}), flush=True)
        except Exception:
            print(json.dumps({"file": path, "error": traceback.format_exc()}), flush=True)


if __name__ == "__main__":
    main()
