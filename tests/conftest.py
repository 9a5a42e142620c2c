"""Settings for all tests."""

from __future__ import annotations

import atexit
import gc
import os
import zlib
from collections.abc import Generator, Iterator

# The tensors here are tiny and the tests run in several processes: more threads would only get in each other's way.
# Libraries of linear algebra read this when they are loaded, those of programs that tests start as well.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Processes that run tests need torch; the one that hands tests out to them does not, and begins sooner."""
    if config.getoption("dist", "no") != "no":
        return
    import torch

    torch.set_num_threads(1)
    # Where there is no GPU, Triton's interpreter runs the fused kernels. It has to be known before Triton is imported.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        # Every torch.manual_seed keeps its seed for devices that may come, each with a formatted stack: 1 ms a call.
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            devices.manual_seed_all = lambda seed: None


# Laws are products of cases and options. Three quarters of the combinations are left to `make test-all`: which ones
# follows from their names, so that it is the same ones everywhere. Products that choose by themselves (cases.combined)
# are left as they are.
_THINNED = ("test_laws_", "test_regularizers", "test_penalties", "test_solvers", "test_hooks", "test_aliases")


@pytest.fixture(scope="module", autouse=True)
def _nothing_loaded_is_garbage() -> None:
    """Modules stay: torch and its compiler are most objects, and each collection would go through all of them."""
    gc.freeze()


@pytest.fixture
def traced_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Users' objectives are traced at their first call."""
    from opteq import engine

    monkeypatch.setattr(engine.settings, "calls_before_tracing", 0)
    engine.forget()
    yield
    engine.forget()


@pytest.fixture
def full_float32() -> Iterator[None]:
    """Products in float32 on a GPU, whatever an earlier test of the process trained with."""
    import torch

    flags = torch.backends.cudnn, torch.backends.cuda.matmul  # pytest's monkeypatch would delete theirs at the end
    before = [each.allow_tf32 for each in flags]
    for each in flags:
        each.allow_tf32 = False
    yield
    for each, allowed in zip(flags, before, strict=True):
        each.allow_tf32 = allowed


# Frozen objects are passed over when Python ends, too, and Triton would call its own leaked. Not sooner: pytest
# collects garbage five times when it ends.
atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting tests makes objects that stay; looking for garbage among them takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Every second worker reads the files from the end: in a fresh clone each of them compiles half of them."""
    report = yield
    if isinstance(collector, pytest.Dir) and os.environ.get("PYTEST_XDIST_WORKER", "")[-1:] in set("13579"):
        report.result.reverse()
    return report


# Files that take longest, some with few tests: they begin, so that no core waits for one of them at the end.
_LONG = {
    "test_certificates", "test_cli_refusals", "test_comparators", "test_deep", "test_docs", "test_export",
    "test_figures", "test_geq", "test_hunt", "test_imports", "test_laws_batch", "test_laws_gradients",
    "test_laws_module", "test_laws_precision", "test_models", "test_mopteq", "test_norms", "test_objective",
    "test_play", "test_play_browser", "test_report", "test_report_browser", "test_robustness",
    "test_training_adversary", "test_training_parallel", "test_training_resume", "test_triton_kernels",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (item.path.stem not in _LONG, item.path))
    for item in items:
        if "[" not in item.nodeid or not item.path.name.startswith(_THINNED) or item.get_closest_marker("chosen"):
            continue
        if zlib.crc32(item.nodeid.encode()) % 4:
            item.add_marker(pytest.mark.slow)
