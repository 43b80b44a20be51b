"""What compiling would save on 8 x A100: a script that prints predictions as JSON.

It records steps of the GPT of width 768 by ``composable.replicate`` as `timelines` does: as it is, with the whole model
compiled, and with each block compiled. Inductor does not know simulated devices. So the backend is ``aot_eager``, which
runs the operators of compiled graphs one by one, and `fused` merges neighbours afterwards. The compiler would also take
attention on these devices apart, which has one kernel on a GPU: `attention_in_one` names that kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

import timelines
from compiled_report import PredictedRow
from fused import as_python, fused, without_lock
from nogpu import SimulationUnavailable, simulate
from nogpu.timeline import Host, Recording, schedule
from nogpu.timeline.presets import A100
from real_shapes import GPT_768, RealShape
from sharded_blocks import blocks_of
from timelines import ALONE, DEVICES, REPLICATE, WARM_UP, Recorded, Steps, record, second_step

BACKEND = "aot_eager"


def attention_in_one(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """``scaled_dot_product_attention`` by the operator that an eager call on a simulated device leads to."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)[0]


def as_it_is(module: nn.Module) -> None:
    """Nothing is compiled."""


def whole(module: nn.Module) -> None:
    module.compile(backend=BACKEND)


def blocks(module: nn.Module) -> None:
    for block in blocks_of(module):
        block.compile(backend=BACKEND)


WAYS: dict[str, Callable[[nn.Module], None]] = {"eager": as_it_is, "compiled": whole, "blocks compiled": blocks}


class CompiledSteps(Steps):
    """Steps by `timelines.REPLICATE` with a module that is compiled before."""

    def __init__(self, compile: Callable[[nn.Module], None], shape: RealShape, devices: Sequence[torch.device]) -> None:
        self._compile = compile
        super().__init__(REPLICATE, shape, devices)

    def _made(self, module: nn.Module) -> nn.Module:
        self._compile(module)
        return super()._made(module)


def recorded(compile: Callable[[nn.Module], None], shape: RealShape, devices: Sequence[torch.device]) -> Recorded:
    steps = CompiledSteps(compile, shape, devices)
    for _ in range(WARM_UP):
        steps.run()
    return record(steps.run)


def changed(found: Recorded, change: Callable[[Recording], Recording]) -> Recorded:
    return Recorded(change(found.one), change(found.two))


def row(way: str, found: Recorded, factor: float) -> PredictedRow:
    """``factor`` makes the recorded Python of the module alone what the machine's host takes for its launches."""
    one, two = schedule(found.one, A100), schedule(found.two, A100)
    return PredictedRow(
        model=GPT_768.name,
        way=way,
        devices=DEVICES,
        launches=len(found.one.launches),
        step=1e3 * (two.time - one.time),
        measured_host=second_step(found, A100.with_(host=Host(measured=factor))),
        free_host=second_step(found, A100.with_free_host()),
        host=1e3 * sum(sum(A100.host.cost(launch)) for launch in found.one.launches),
        exposed=1e3 * (two.exposed_communication - one.exposed_communication),
    )


def main() -> None:
    try:
        devices = simulate(DEVICES, compute=False)
    except SimulationUnavailable as error:
        print(json.dumps({"why_not": str(error)}))
        return
    nn.functional.scaled_dot_product_attention = attention_in_one
    rows: list[PredictedRow] = []
    alone = timelines.recorded(ALONE, GPT_768, devices[:1])
    factor = alone.cost_of_launches(A100) / alone.python_seconds()
    for way, compile in WAYS.items():
        found = recorded(compile, GPT_768, devices)
        if compile is as_it_is:
            rows.append(row(way, found, factor))
            continue
        merged = changed(found, fused)
        rows.append(row(way, changed(merged, as_python), factor))
        rows.append(row(f"{way}, cpp_wrapper", changed(merged, without_lock), factor))
    print(json.dumps({"predictions": [asdict(found) for found in rows]}))


if __name__ == "__main__":
    main()
