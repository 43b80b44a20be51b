"""The twin of a module has the module's attributes, and its hooks only where replicas run them."""

import torch
from torch import nn

from dataparallel.forms.managed import Twin
from dataparallel.replicas.plan import TWIN_INFO, TwinInfo


class Slotted(nn.Linear):
    __slots__ = ("mark", "not_set")


def made() -> tuple[Slotted, Twin]:
    module = Slotted(2, 3)
    return module, Twin(Slotted, TwinInfo(id(module)))


def test_has_current_attributes_and_tensors():
    module, twin = made()
    first = twin.update(module, "forward")
    module.note, module.mark = "late", "in a slot"
    assert twin.update(module, "forward") is first is twin.module
    assert (first.note, first.mark) == ("late", "in a slot")
    assert not hasattr(first, "not_set")
    assert first.weight is module.weight
    assert type(first) is Slotted
    assert vars(first)[TWIN_INFO].source_id == id(module)
    assert TWIN_INFO not in vars(module)


def test_has_hooks_for_other_methods_than_forward():
    module, twin = made()
    module.register_forward_hook(lambda *_: torch.zeros(3))
    assert not twin.update(module, "forward")._forward_hooks
    assert twin.update(module, "encode")._forward_hooks is module._forward_hooks
    assert len(module._forward_hooks) == 1
