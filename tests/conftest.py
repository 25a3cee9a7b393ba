"""Settings of all tests: no network, one thread per process, reproducible Hypothesis draws."""

import os

# Before anything imports transformers or huggingface_hub: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests run in one process per core; commands that they start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import importlib.util
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from typing import Any

import hypothesis
import pytest
import torch

# Drawn examples: a handful, the same in every run, where each change is tested; a hundred random
# ones, and what draws a failing one again is printed (`HYPOTHESIS_PROFILE=nightly`).
_COMMON = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("dev", max_examples=3, derandomize=True, **_COMMON)
hypothesis.settings.register_profile("nightly", max_examples=100, print_blob=True, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Imports make millions of objects that stay; the search for garbage is a tenth of their time.
gc.set_threshold(50_000, 20, 100)
torch.set_num_threads(1)  # the tensors are tiny: a second thread costs more than it saves

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell script that runs pytest in the background ignores SIGINT, and processes that tests
    # start and interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

REASON = "needs the bundled reasoners, which are not installed"


class _SkipImporters(MetaPathFinder):
    """Skips a test, or a module of tests, that imports the bundled reasoners."""

    def find_spec(self, name: str, *_: object) -> None:
        if name in ("kvpolicy_reasoner", "kvpolicy_reasoner.train"):
            pytest.skip(REASON, allow_module_level=True)


HAS_REASONER = importlib.util.find_spec("kvpolicy_reasoner") is not None
# Last: it is asked for what no other finder has; a wheel has no training code.
sys.meta_path.append(_SkipImporters())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--device`."""
    parser.addoption("--device", default="cpu", help="where tests that take `device` run")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of `--device`; kernels of its own run there."""
    return torch.empty(0, device=request.config.getoption("--device")).device  # with its number


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make most cases of tests marked `few` nightly; skip what needs an absent plugin."""
    for num, cases in _cases_of_few(items):
        stays = _spread(cases, num)
        for number, case in enumerate(cases):
            if number not in stays:
                case.add_marker(pytest.mark.nightly)
    if HAS_REASONER:
        return
    for item in items:
        if item.get_closest_marker("needs_reasoner"):
            item.add_marker(pytest.mark.skip(reason=REASON))


def _cases_of_few(items: list[pytest.Item]) -> list[tuple[int, list[pytest.Item]]]:
    """For each test that is marked `few`: how many of its cases are quick, and all of them."""
    few: dict[str, tuple[int, list[pytest.Item]]] = {}
    for item in items:
        if marker := item.get_closest_marker("few"):
            test = item.nodeid.partition("[")[0]
            few.setdefault(test, (marker.args[0], []))[1].append(item)
    return list(few.values())


def _spread(cases: list[pytest.Item], num: int) -> set[int]:
    """The numbers of the cases that stay: as many values of parameters as so few can have."""
    values = [_values(case) for case in cases]
    stays: set[int] = set()
    seen: Counter[tuple[str, int]] = Counter()
    for i in range(min(num, len(cases))):
        middle = (2 * i + 1) * len(cases) // (2 * num)  # of the i-th of n parts

        def rank(number: int, middle: int = middle) -> tuple[int, int, int]:
            times = [seen[value] for value in values[number]]
            return times.count(0), -sum(times), -abs(number - middle)

        best = max(set(range(len(cases))) - stays, key=rank)
        stays.add(best)
        seen.update(values[best])
    return stays


def _values(case: pytest.Item) -> set[tuple[str, int]]:
    """The parameters of a case and which objects they are."""
    params = case.callspec.params  # type: ignore[attr-defined]
    return {(name, id(value)) for name, value in params.items()}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a test fail that connects to another machine."""

    def guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: socket.socket, address: Any) -> Any:
            is_here = isinstance(address, tuple) and address[0] in ("127.0.0.1", "::1")
            if is_here or self.family == socket.AF_UNIX:
                return connect(self, address)
            msg = f"a test tried to connect to {address!r}; tests run without a network"
            raise AssertionError(msg)

        return checked

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))


@pytest.fixture(autouse=True)
def _plugin_files_of_one_test() -> Iterator[None]:
    """Forget the policies of files that a test has registered."""
    yield
    if discovery := sys.modules.get("kvpolicy.hooks.discovery"):
        discovery.forget_files()


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the wait until files are on the disk: tests do not cut the power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def packs_small_products() -> Iterator[None]:
    """Let the products of tiny models be packed, although that makes them slower."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpolicy.model.packed.MIN_BYTES", 0)
        yield


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Ray cluster of two nodes, which is started once for all tests on it."""
    from sweeps_on_ray import running_nodes

    with running_nodes(tmp_path_factory.mktemp("ray")) as running:
        yield running


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace steps as for a compiler, and run their operations as they are."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr("kvpolicy.model.static_forward.BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def _freeze_garbage_collector() -> None:
    """Keep the garbage collector from scanning what exists already: tests collect often."""
    gc.collect()
    gc.freeze()
