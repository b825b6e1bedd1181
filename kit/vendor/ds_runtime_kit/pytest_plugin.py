"""The vendor kit under pytest. In a package's tests:

    # conftest.py
    pytest_plugins = ["ds_runtime_kit.pytest_plugin"]

    # a test module
    def test_conforms(conformance):
        conformance()

A test that takes `conformance` runs once per question and kernel or loader of the plugins that the
option `ds_runtime_plugins` in pyproject.toml or --ds-plugins names. The platform is the best that
is here. Kernels that accept nothing here are skipped with their refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest

from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import DeviceInfo, QuantLoader
from ds_runtime.ops.kernel import Layout
from ds_runtime.platform.contract import GraphBackend
from ds_runtime.platform.page_copies import PageCopies
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime_kit.checks.conformance import CaseResult, cases_for, facts_for
from ds_runtime_kit.checks.replay import ReplayBackend
from ds_runtime_kit.conform import LOADER, questioned
from ds_runtime_kit.kit import CHECKS, Subject, by_kernel, check_all, subjects
from ds_runtime_kit.layouts import LAYOUT, check_layout, layouts_of
from ds_runtime_kit.layouts import QUESTIONS as LAYOUT_QUESTIONS
from ds_runtime_kit.loaders.checks import QUESTIONS, check_loader
from ds_runtime_kit.selection import plugins_of

Case: TypeAlias = tuple[str, Callable[[], Iterable[CaseResult]]]  # why it is skipped, what asks


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugins to test, the platform to test them on, and how calls are captured."""
    group = parser.getgroup("ds-runtime")
    group.addoption("--ds-plugins", metavar="A,B", help="plugins whose kernels are tested")
    group.addoption(
        "--ds-platform", default="auto", metavar="X", help="platform to test on (default: auto)"
    )
    parser.addini("ds_runtime_plugins", "plugins whose kernels are tested", type="args")
    parser.addini(
        "ds_runtime_recorder",
        "where the platform captures nothing, record torch's ops instead",
        type="bool",
        default=False,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per kernel and question."""
    if "conformance" not in metafunc.fixturenames:
        return
    given = metafunc.config.getoption("--ds-plugins")
    names = given.split(",") if given else metafunc.config.getini("ds_runtime_plugins")
    plugins = load_plugins()
    platform, _ = select_platform(plugins, metafunc.config.getoption("--ds-platform"))
    device = platform.device_info(0)
    wanted = set(plugins_of(plugins, names))
    offers = plugins.offers(facts_for(device, "float32"))
    providers = {provider for provider, owner in plugins.owners.items() if owner in wanted}
    found = by_kernel(subjects(plugins, device, providers))
    loaders = questioned(offers, providers)
    assert found or loaders, (
        f"ds_runtime_plugins {names}: no kernel or loader is offered on {device.name}"
    )
    backend: GraphBackend | None = None
    if platform.captures:
        backend = platform.graph_backend(0)
    elif metafunc.config.getini("ds_runtime_recorder"):
        backend = ReplayBackend()
    questions = [c for c in CHECKS if c != "capture" or backend is not None]
    cases: list[Case] = [
        _of_kernel(mine, question, backend) for mine in found.values() for question in questions
    ]
    ids = ["-".join((*key, question)) for key in found for question in questions]
    cases += [_of_loader(loader, question) for loader in loaders for question in QUESTIONS]
    ids += [f"{LOADER}-{x.full_name}-{question}" for x in loaders for question in QUESTIONS]
    copies = platform.page_copies(0)
    for layout in layouts_of(offers, providers):
        cases += [_of_layout(layout, device, question, copies) for question in LAYOUT_QUESTIONS]
        ids += [f"{LAYOUT}-{layout.tag}-{question}" for question in LAYOUT_QUESTIONS]
    metafunc.parametrize("conformance", cases, ids=ids, indirect=True)


@pytest.fixture
def conformance(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Asks one question of one kernel or loader; fails with every sentence that is wrong."""
    refused, ask = request.param
    if refused:
        pytest.skip(refused)
    return lambda: _fail(ask())


def _of_kernel(mine: list[Subject], question: str, backend: GraphBackend | None) -> Case:
    kernel, refused = mine[0].kernel, ""
    if not any(cases_for((kernel,), s.facts) for s in mine):
        refused = refusal(kernel, mine[0].facts) or "it accepts no sample"
    return refused, lambda: check_all(mine, backend, (question,))


def _of_loader(loader: QuantLoader, question: str) -> Case:
    return "", lambda: check_loader(loader, (question,))


def _of_layout(layout: Layout, device: DeviceInfo, question: str, copies: PageCopies) -> Case:
    return "", lambda: check_layout(layout, device, (question,), copies)


def _fail(results: Iterable[CaseResult]) -> None:
    failures = [r for r in results if not r.ok]
    if failures:
        said = dict.fromkeys(f"case {r.case!r} in {r.dtype}: {r.failure}" for r in failures)
        pytest.fail("\n".join(said), pytrace=False)
