"""Triton kernels compiled for GPUs that are not here, in a process of its own, as this one may interpret them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import opteq


def names_compiled(script: str, capability: int, folder: Path) -> set[str]:
    """Run ``script``, which compiles kernels by :func:`ptx` for the capability it is given, and prints their names."""
    if sys.platform != "linux" or importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("this Triton has no compiler for NVIDIA's GPUs")
    path = folder / "build.py"
    path.write_text(script, encoding="utf-8")
    own = [str(place) for place in (Path(opteq.__file__).parents[1], Path(__file__).parent)]
    # Another Triton may be there, to see whether it can compile them, too.
    places = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": places}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(path), str(capability)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return set(done.stdout.split())


def ptx(
    kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any], attrs: Any = None, **options: int
) -> str:
    """The assembly of a kernel whose other arguments have the ``types``; its name is printed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    known = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in known else types[name] for name in kernel.arg_names}
    # Triton 3.2 has another name for them.
    word = "constexprs" if "constexprs" in inspect.signature(ASTSource).parameters else "constants"
    more = {} if attrs is None else {"attrs": attrs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = ASTSource(fn=kernel, signature=signature, **{word: known}, **more)
        made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = str(made.asm["ptx"])
    assert f"sm_{capability}" in code
    print(kernel.__name__)
    return code
