"""Code in processes that have imported torch and nothing of opteq. Python starts once for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

FORKS = """
import json, os, sys, traceback
import torch
assert not any(name.startswith("opteq") for name in sys.modules)
printed = {}
for name, code in json.load(sys.stdin).items():
    out, into = os.pipe()
    if os.fork() == 0:
        os.dup2(into, 1)
        try:
            exec(code, {"__name__": "__main__"})
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as file:
        printed[name] = file.read().strip()
    if os.wait()[1]:
        sys.exit(f"{name} failed")
print(json.dumps(printed))
"""


def run(codes: Mapping[str, str]) -> dict[str, str]:
    """What each code prints, in a process of its own; none may fail or print to standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKS],
        input=json.dumps(dict(codes)),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr
    printed: dict[str, str] = json.loads(done.stdout)
    return printed
