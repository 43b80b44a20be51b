"""What ``compile=`` refuses. Its values are in test_arguments and forms/test_fully_shard_compiled."""

import pytest
import torch
from torch import nn

from dataparallel import DataParallel

pytestmark = pytest.mark.devices("cpu")  # it knows no slots: once is enough

SLOTS = ["cpu", "cpu"]


def test_torch_says_what_it_does_not_take() -> None:
    with pytest.raises(Exception, match="no_such_backend"):
        DataParallel(nn.Linear(2, 2), SLOTS, compile={"backend": "no_such_backend"})(torch.ones(2, 2))


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_module_needs_no_argument(how: str) -> None:
    module: nn.Module = nn.Linear(2, 2)
    if how == "in place":
        module.compile(backend="eager")
    else:
        module = torch.compile(module, backend="eager")
    with pytest.raises(ValueError, match="is compiled already, and its replicas are compiled in the same way"):
        DataParallel(module, SLOTS, compile=True)


def test_a_module_that_is_compiled_later_as_well_is_refused() -> None:
    module = nn.Linear(2, 2)
    wrapper = DataParallel(module, SLOTS, compile={"backend": "eager"})
    module.compile(backend="eager")
    with pytest.raises(RuntimeError, match="was compiled, and its wrapper has compile= as well"):
        wrapper(torch.ones(2, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_script_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.compile takes no ScriptModule"):
        DataParallel(torch.jit.script(nn.Linear(2, 2)), SLOTS, compile=True)


def test_freezing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    wrapper = DataParallel(nn.Linear(2, 2), SLOTS, compile={"backend": "eager"})
    with config.patch(freezing=True), pytest.raises(RuntimeError, match=r"freezing = True: graphs would hold"):
        wrapper(torch.ones(2, 2))
    wrapper(torch.ones(2, 2))
