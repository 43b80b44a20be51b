"""A training step by ``composable.replicate`` beside other forms, ``torch.nn.DataParallel``, single steps and DDP.

On 8 devices, where all take turns, and on two CPU slots in processes of their own (`contender`). A second table has the
memory of 8 simulated devices, and the bytes that they exchange in a step. The tests assert that all do the same work.
The bars of the report say what its ratios should be; they fail no test.
"""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

import sharded_memory
from beside_torch import SETTLE, SHORT_SETTLE
from child_processes import Contender, ranks
from contender import DDP, REPLICATE, SLOTS, WRAPPER
from forms import ShardedForms
from gradients import assert_same_gradients
from pairs import CELLS, PAIRS, Comparison, load, milliseconds, pairs_for, take_turns
from places import Places, simulator_notes
from reporting import Report
from shapes import NARROW_GPT, RESNET, WIDE_GPT, Shape
from sharded_memory import CAPTION as MEMORY_CAPTION
from sharded_memory import TABLE as MEMORY_TABLE
from sharded_memory import measure, row_of, work_of

CAPTION = """\
A training step (forward, loss and backward) by the library's forms and by others. ours and the other are median
milliseconds, or mebibytes, of the two that the quotient names. ours is replicate, and in the row of
nn.DataParallel/fully_shard it is fully_shard. ratio is the median of the quotient over the rounds, with its bootstrap
95 % interval. For memory it is that of proportional set sizes, measured once. bar is what the ratio should be; reached
says "not decided" where the bar lies in the interval. "in a row" are the same chunks one after the other on one device.
fully_shard has a unit for each block and one for the rest; with reshard_after_forward=False it keeps gathered weights
until backward, which is data parallelism with a sharded optimizer. What replicate saves is the making of replicas: on
CPU cores, where operators take most of the time, that is a smaller part than beside fast devices. Devices that are
simulated, or those of a stand-in, compute on the CPU's cores. Their clocks were off."""

BESIDE_TORCH = "nn.DataParallel/replicate"
BESIDE_WRAPPER = "DataParallel/replicate"
OVER_IN_A_ROW = "replicate/in a row"
BESIDE_SHARDED = "fully_shard/replicate"
BESIDE_NOT_RESHARDED = "fully_shard, reshard_after_forward=False/replicate"
SHARDED_BESIDE_TORCH = "nn.DataParallel/fully_shard"
BESIDE_DDP = "DDP/replicate"
MEMORY_OVER_DDP = "memory replicate/DDP"

BAR_DEVICES = 8
BARS: dict[tuple[str, str], float] = {
    (BESIDE_TORCH, RESNET.name): 1.5,
    (BESIDE_TORCH, NARROW_GPT.name): 1.5,
    (BESIDE_TORCH, WIDE_GPT.name): 1.3,
    **{(BESIDE_WRAPPER, shape.name): 1.0 for shape in (RESNET, NARROW_GPT, WIDE_GPT)},
    **{(OVER_IN_A_ROW, shape.name): 1.0 for shape in (RESNET, NARROW_GPT)},
}
DDP_BAR = 1.0
MEMORY_BAR = 0.7
STEPS_BEFORE_MEMORY = 10
TABLE = {
    "model": "{model}",
    "slots": "{slots}",
    "quotient": "{quotient}",
    "ours": "{ours:.1f}",
    "the other": "{other:.1f}",
    **CELLS,
}


def timed(model: str, slots: str, quotient: str, found: Comparison, bar: float | None) -> dict[str, object]:
    """A row of times, those of the library's form first."""
    times = {"ours": milliseconds(found.ours), "other": milliseconds(found.theirs)}
    return {"model": model, "slots": slots, "quotient": quotient, **times, **found.row(bar, quotient == OVER_IN_A_ROW)}


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("forms", CAPTION, TABLE, notes=simulator_notes(places)))
    return reports[-1]


@pytest.fixture(scope="module")
def memory_report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("forms_memory", MEMORY_CAPTION, MEMORY_TABLE, notes=simulator_notes(places)))
    return reports[-1]


@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support")
@pytest.mark.parametrize("shape", [RESNET, NARROW_GPT, WIDE_GPT], ids=lambda shape: shape.name)
def test_on_devices(shape: Shape, places: Places, report: Report, short: bool, once: Any) -> None:
    """All take turns, in rounds. Sharded forms, which take longest and have no bar, are in half of them."""
    if short and shape is not NARROW_GPT:
        pytest.skip("short")
    devices = places.apart_or_skip(BAR_DEVICES, report)[:BAR_DEVICES]
    forms = ShardedForms(shape, devices)
    in_all = {BESIDE_WRAPPER: forms.train, BESIDE_TORCH: forms.torch_train, OVER_IN_A_ROW: forms.train_in_a_row}
    in_half = {BESIDE_SHARDED: forms.train_sharded, BESIDE_NOT_RESHARDED: forms.train_not_resharded}
    before = load()
    with places.clocks_off(), forms.stand_ins.installed():
        for call in (forms.train_replicated, forms.train, *in_half.values()):
            for _ in range(SHORT_SETTLE if short else SETTLE):
                call()
        first = once(take_turns, [forms.train_replicated, *in_all.values(), *in_half.values()], PAIRS, short=short)
        second = take_turns([forms.train_replicated, *in_all.values()], PAIRS, short=short)
    ours, *others = [one + more for one, more in zip_longest(first, second, fillvalue=[])]
    loads = before, load()
    forms.check_replicated()
    forms.check_sharded()
    seconds = dict(zip([*in_all, *in_half], others, strict=True))
    pairs = {quotient: (ours, theirs) for quotient, theirs in seconds.items()}
    pairs[SHARDED_BESIDE_TORCH] = seconds[BESIDE_SHARDED], seconds[BESIDE_TORCH]
    for quotient, (one, other) in pairs.items():
        common = min(len(one), len(other))
        found = Comparison(one[:common], other[:common], *loads)
        report.rows.append(
            timed(shape.name, f"{len(devices)} devices", quotient, found, BARS.get((quotient, shape.name)))
        )


@pytest.mark.parametrize("shape", [RESNET, NARROW_GPT, WIDE_GPT], ids=lambda shape: shape.name)
def test_memory_and_bytes(shape: Shape, places: Places, memory_report: Report, short: bool) -> None:
    """Of a step with AdamW, by each form."""
    if short and shape is not NARROW_GPT:
        pytest.skip("short")
    if not places.simulated:
        pytest.skip(f"only simulated devices count bytes: {places.why_not_simulated}")
    devices = places.simulated[:BAR_DEVICES]
    work = work_of(shape)
    for name in ("DataParallel", "replicate", "fully_shard", "reshard_after_forward=False"):
        way = sharded_memory.NAMED[name]
        memory_report.rows.append(row_of(work, way, len(devices), measure(work, way, devices)))


def test_on_cpu_slots(report: Report, tmp_path: Path, short: bool, once: Any) -> None:
    """In a process of its own, beside as many processes of DDP as there are slots."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch without gloo")
    model, slots = "GPT of 6 blocks, width 256", f"{SLOTS} CPU slots"
    with (
        Contender("replicate", [[str(SLOTS), REPLICATE]], tmp_path) as ours,
        Contender("wrapper", [[str(SLOTS), WRAPPER]], tmp_path) as wrapper,
        ranks("ddp", tmp_path, [DDP], SLOTS) as ddp,
    ):
        contenders = {REPLICATE: ours, WRAPPER: wrapper, DDP: ddp}
        for _ in range(1 if short else STEPS_BEFORE_MEMORY):
            for way, contender in contenders.items():
                contender.tell(way)
        memory, of_ddp = ours.memory(), ddp.memory()

        def collect_garbage() -> None:
            for contender in contenders.values():
                contender.collect_garbage()

        before = load()
        calls = [partial(contender.tell, way) for way, contender in contenders.items()]
        seconds = once(take_turns, calls, pairs_for(DDP_BAR), between=collect_garbage, short=short)
        loads = before, load()
        assert_same_gradients(ours.found()[REPLICATE][0]["gradients"], ddp.found()[DDP][0]["gradients"])
    for quotient, theirs in ((BESIDE_WRAPPER, seconds[1]), (BESIDE_DDP, seconds[2])):
        report.rows.append(timed(model, slots, quotient, Comparison(seconds[0], theirs, *loads), DDP_BAR))
    if memory is not None and of_ddp is not None:
        ratio = memory / of_ddp
        sizes = {"ours": memory / 2**20, "other": of_ddp / 2**20, "ratio": ratio, "ratio_low": None, "ratio_high": None}
        judged = {"bar": MEMORY_BAR, "at_most": True, "verdict": "yes" if ratio <= MEMORY_BAR else "no"}
        names = {"model": model, "slots": slots, "quotient": MEMORY_OVER_DDP}
        report.rows.append(
            names | sizes | {"pairs": 1} | judged | dict(zip(("load_before", "load_after"), loads, strict=True))
        )
