"""`KeptReplicas` without a wrapper: where its tensors come from, and its copies."""

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.call.engine import Call, Method
from dataparallel.call.options import CallOptions
from dataparallel.replicas.kept_replicas import KeptReplicas, TensorStore
from dataparallel.replicas.plan import ModulePlan


def test_tensors_may_come_from_somebody_else(slots: list, root: torch.device) -> None:
    class Ones(TensorStore):
        def __init__(self) -> None:
            self.told: list[str] = []

        def for_call(
            self, plan: ModulePlan, slots: list, cap_bytes: int, record: bool, arrivals: object = None
        ) -> list[list[Tensor]]:
            self.told.append(f"for_call, {record}")
            return [[torch.ones_like(tensor, device=slot) for tensor in plan.tensors] for slot in slots]

        def clear(self) -> None:
            self.told.append("clear")

    ones = Ones()
    kept = KeptReplicas(ones)
    devices = [torch.device(slot) for slot in slots]
    module = nn.Linear(2, 1, bias=False).to(root)

    options = CallOptions(devices, {"output_device": None, "serial": None, "pad": None})
    maker: Any = SimpleNamespace(options=options, kept=kept, may_use_source=False, check=lambda slots: None)

    def call(features: int = 2) -> None:
        with Call(maker, Method("forward", module)) as around:
            for replica, device in zip(around.uses(kept.replicas(module, devices, 2**20)), devices, strict=True):
                assert replica(torch.ones(1, features, device=device)).item() == 2

    call()
    with torch.no_grad():
        call()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call(features=1)
    kept.clear()
    assert ones.told == ["clear", "for_call, True", "for_call, False", "for_call, True", "clear"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
def test_copies_are_empty_and_their_own(slots: list, root: torch.device, copied: Callable) -> None:
    devices = [torch.device(slot) for slot in slots]
    module = nn.Linear(2, 1).to(root)
    kept = KeptReplicas()
    with torch.no_grad():
        replicas = kept.replicas(module, devices, 2**20)
        other = copied(kept)
        assert pickle.dumps(other) == pickle.dumps(KeptReplicas())
        others = other.replicas(module, devices, 2**20)
    assert not {*map(id, replicas)} & {*map(id, others)}
    for replica, twin in zip(replicas, others, strict=True):
        assert replica.weight is not twin.weight
        if replica.weight.device != root:
            assert replica.weight.data_ptr() != twin.weight.data_ptr()
