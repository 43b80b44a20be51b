"""The plugin ``nogpu.pytest`` in a user's project."""

import textwrap

import pytest
import torch

from nogpu.cuda.possible import why_not_here
from processes import Ahead, Job, attempt, run_pytest

# These tests start their own processes, so one kind of devices is enough.
pytestmark = pytest.mark.devices("cpu")

CONFTEST = 'pytest_plugins = ["nogpu.pytest"]\n'


@pytest.fixture(scope="module")
def processes(request, tmp_path_factory):
    """Each process runs pytest in a project: a conftest.py with the plugin, and one test file."""

    def project(tests: str, *arguments: str, conftest: str = "", ini: str = "", **changes: str) -> Job:
        folder = tmp_path_factory.mktemp("project")
        (folder / "conftest.py").write_text(CONFTEST + conftest)
        (folder / "pytest.ini").write_text(f"[pytest]\n{ini}")
        (folder / "test_user.py").write_text("import pytest, torch\n" + textwrap.dedent(tests))
        return run_pytest(folder, "-rs", *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **changes)

    attempt()
    with Ahead(request, tmp_path_factory.mktemp("ahead"), project) as ahead:
        yield ahead


@pytest.mark.smoke
@pytest.mark.ahead("""
        @pytest.fixture(scope="module")
        def model(sim_devices):
            return torch.nn.Linear(3, 3).to(sim_devices[1])

        def test_devices(sim_devices):
            assert sim_devices == [torch.device("sim", index) for index in range(8)]
            assert torch.accelerator.device_count() == 8

        def test_backward(sim_devices, model):
            model(torch.ones(2, 3).to(sim_devices[1])).sum().backward()
            assert model.weight.grad.device == sim_devices[1]

        def test_race(sim_devices):
            x = torch.zeros(1000, device=sim_devices[0])
            with torch.Stream(sim_devices[0]):
                x.add_(1)
            x.add_(1)

        def test_after_the_race(sim_devices):
            assert torch.ones(3, device=sim_devices[0]).sum().item() == 3

        def test_freed_too_early(sim_devices):
            x = torch.zeros(1000, device=sim_devices[0])
            side = torch.Stream(sim_devices[0])
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                x.add_(1)
            del x  # without record_stream

        def test_after_that(sim_devices):
            assert torch.ones(3, device=sim_devices[0]).sum().item() == 3

        def test_freed_too_early_and_failed(sim_devices):
            test_freed_too_early(sim_devices)
            assert False, "its own error"

        @pytest.fixture
        def x(sim_devices):
            return torch.zeros(1000, device=sim_devices[0])

        def test_a_fixture_outlives_the_streams_of_its_test(sim_devices, x):
            side = torch.Stream(sim_devices[0])
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                x.add_(1)

        def test_last(sim_devices):
            assert torch.ones(3, device=sim_devices[0]).sum().item() == 3
    """, "-v")  # fmt: skip
def test_the_devices_work_in_forward_and_backward_and_the_errors_are_the_tests(available, result):
    result.assert_outcomes(passed=6, failed=3)
    result.stdout.fnmatch_lines(["simulated accelerators: 8, for 9 of 9 tests"])
    result.stdout.fnmatch_lines(
        [
            "*::test_race FAILED*",
            "*::test_freed_too_early FAILED*",
            "*::test_freed_too_early_and_failed FAILED*",
            "*___ test_race ___*",
            "E *RuntimeError: race:*",
            "*___ test_freed_too_early ___*",
            "E *RuntimeError: *freed*",
            "*___ test_freed_too_early_and_failed ___*",
            "E *its own error*",
            "*simulated accelerators*",
            "*freed*",
        ]
    )


COUNT = """
def test_count(sim_devices):
    assert len(sim_devices) == {0}
"""


@pytest.mark.long
@pytest.mark.ahead(
    COUNT.format(2), conftest="import torch\ntorch.cuda.is_available = lambda: True\n", ini="sim_devices = 2"
)
def test_the_ini_file_says_how_many_and_on_a_machine_with_cuda_the_run_says_whose_they_are(available, result):
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["simulated accelerators: 2, for 1 of 1 tests; torch.accelerator means them in this run*"]
    )


@pytest.mark.long
@pytest.mark.ahead(
    COUNT.format(3), "--sim-devices=3", conftest="import nogpu\nnogpu.simulate(16)\n", ini="sim_devices = 2"
)
def test_the_command_line_says_how_many_of_those_that_a_conftest_has_made(available, result):
    result.assert_outcomes(passed=1)


@pytest.mark.long
@pytest.mark.ahead(COUNT.format(0), ini="sim_devices = many")
def test_what_is_no_number_of_devices_is_a_usage_error(result):
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*the ini file's sim_devices is a number; got 'many'*"])


NEEDS_NONE = """
def test_on_the_cpu():
    torch.ones(1, requires_grad=True).sum().backward()
    assert not hasattr(torch, "sim")

def test_on_devices(sim_devices):
    pass
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "argument",
    [
        pytest.param(argument, marks=pytest.mark.ahead(NEEDS_NONE, argument, TORCH_EXTENSIONS_DIR="none"))
        for argument in ("--deselect=test_user.py::test_on_devices", "--collect-only")
    ],
)
def test_a_run_that_needs_no_devices_makes_none(result, done, argument):
    assert result.ret == 0
    assert not (done.args.folder / "none").exists()


@pytest.mark.ahead(NEEDS_NONE, PATH="nowhere", CXX="", TORCH_EXTENSIONS_DIR="none")
def test_without_a_compiler_tests_are_skipped_and_told_why(result):
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*simulated accelerators are compiled on first use*lacks a C++ compiler*"])


@pytest.mark.long
@pytest.mark.ahead("""
        import unittest

        def free_too_early(device):
            x = torch.zeros(1000, device=device)
            side = torch.Stream(device)
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                x.add_(1)

        @pytest.mark.parametrize("leave", [pytest.skip, pytest.xfail])
        @pytest.mark.parametrize("wrong", [True, False])
        def test_leaves(sim_devices, leave, wrong):
            if wrong:
                free_too_early(sim_devices[0])
            leave("there is more to do")

        @pytest.mark.parametrize("wrong", [True, False])
        def test_unittest(sim_devices, wrong):
            if wrong:
                free_too_early(sim_devices[0])
            raise unittest.SkipTest("there is more to do")

        def test_after_that(sim_devices):
            assert torch.ones(3, device=sim_devices[0]).sum().item() == 3
    """)
def test_freed_too_early_fails_a_test_that_skips_or_expects_to_fail(available, result):
    result.assert_outcomes(passed=1, failed=3, skipped=2, xfailed=1)
    result.stdout.fnmatch_lines(["E *RuntimeError: freed too early*"] * 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.ahead("""
        def test_on_cuda(cuda_devices):
            raise AssertionError("there are none")
    """)
def test_without_cuda_devices_a_test_that_asks_for_them_is_skipped_and_says_what_to_do(result):
    result.assert_outcomes(skipped=1)
    remedy = "python -m nogpu.cuda -m pytest" if why_not_here() is None else why_not_here()
    assert f"this run has no CUDA devices: {remedy}"[:100] in str(result.stdout).replace("\n", " ")
