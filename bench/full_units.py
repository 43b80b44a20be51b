"""How many units of a sharded model are full at once, by ``composable.fully_shard`` and by FSDP2.

Each has two devices. Ours are in one process; FSDP2 has two processes with a simulated device each, and gloo between
them: ``python full_units.py MODEL RANK FOLDER`` is one of them. So both shard the same modules over as many devices,
run the same kernels, and their bytes come from the same counters. Nothing of either library is replaced: hooks on
layers look at the state of each unit when a layer has run in forward, and when the gradient of its output comes in
backward.

`test_full_units.py` makes the table.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from child_processes import environment
from dataparallel.composable import fully_shard
from nogpu import simulate
from sharded_blocks import full_gradients

DEVICES = 2
SAMPLES, LENGTH, VOCABULARY = 2, 16, 500
"""Samples of a device. Few and short ones, so that parameters are most of the memory."""
WIDTH, HEADS, BLOCKS = 128, 2, 6
STEPS = 2
"""Of which the last is measured: the first one learns in which order units are used."""

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """A model that returns its loss, which of its modules are units, and inputs for so many samples."""

    name: str
    model: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], list[nn.Module]]
    inputs: Callable[[int], Inputs]
    needs: str | None = None


@dataclass(frozen=True)
class Found:
    """Of the device that has most. ``forward``, ``backward``: units full at once; ``peak_...``: bytes on the device.

    ``full`` is the bytes of the full parameters at the moment when most units are full.
    """

    units: int
    forward: int
    backward: int
    full: int
    peak_forward: int
    peak_backward: int


# ---- models ----------------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """Returns only the loss of a model of transformers, so that only numbers are gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs, use_cache=False).loss.unsqueeze(0)


class ConditionedBlock(nn.Module):
    """A layer whose scale and shift come from a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.of_condition = nn.Linear(WIDTH, 2 * WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.of_condition(condition).chunk(2, -1)
        return x + self.narrow(torch.tanh(self.wide(x * (1 + scale) + shift)))


class Conditioned(nn.Module):
    """Blocks that all get the same condition. A layer of the root makes it, so it needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(2 * BLOCKS))

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        condition = self.condition(about)
        for block in self.blocks:
            x = block(x, condition)
        return x.square().mean().unsqueeze(0)


def t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH, num_layers=BLOCKS, num_heads=HEADS,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Loss(transformers.T5ForConditionalGeneration(config))


def bart() -> nn.Module:
    import transformers

    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, max_position_embeddings=2 * LENGTH, encoder_layers=BLOCKS,
        decoder_layers=BLOCKS, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH, dropout=0.0,
    )  # fmt: skip
    return Loss(transformers.BartForConditionalGeneration(config))


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=2 * LENGTH, n_embd=WIDTH, n_layer=2 * BLOCKS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Loss(transformers.GPT2LMHeadModel(config))


def of_class(*names: str) -> Callable[[nn.Module], list[nn.Module]]:
    return lambda model: [module for module in model.modules() if type(module).__name__ in names]


def text(samples: int) -> Inputs:
    tokens = torch.randint(3, VOCABULARY, (2, samples, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens[0], "labels": tokens[1]}


def vectors(samples: int) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    sizes = {"x": (samples, LENGTH, WIDTH), "about": (samples, 1, 8)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


WORKS = {
    work.name: work
    for work in (
        Work("T5", t5, of_class("T5Block"), text, "transformers"),
        Work("BART", bart, of_class("BartEncoderLayer", "BartDecoderLayer"), text, "transformers"),
        Work("GPT-2", gpt2, of_class("GPT2Block"), text, "transformers"),
        Work("conditioned", Conditioned, of_class("ConditionedBlock"), vectors),
    )
}


def made(work: Work, device: torch.device) -> nn.Module:
    """The model with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return work.model().to(device)


# ---- measuring -------------------------------------------------------------------------------------------------------


class Watch:
    """Hooks on all layers of ``model``. ``bytes_full`` lists for each device the bytes of every unit that is full.

    They are set before the model is sharded, so that replicas have them too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.bytes_full: Callable[[], Sequence[Sequence[int]]] = lambda: []
        self.part = "forward"
        self.clear()
        for layer in model.modules():
            if not [*layer.children()]:
                layer.register_forward_hook(self._after)

    def clear(self) -> None:
        self.most = {"forward": 0, "backward": 0}
        self.full = 0

    def _after(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._look()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._look)

    def _look(self, _: Any = None) -> None:
        for units in self.bytes_full():
            self.most[self.part] = max(self.most[self.part], len(units))
            self.full = max(self.full, sum(units))


def measured(model: nn.Module, watch: Watch, inputs: Inputs, devices: Sequence[torch.device], units: int) -> Found:
    """Of the last of `STEPS` steps without an optimizer. The gradients of the last one stay."""
    peaks: list[int] = []

    def end(part: str) -> None:
        gc.collect()
        for device in devices:
            torch.sim.synchronize(device)
        peaks.append(max(torch.sim.max_memory_allocated(device) for device in devices))
        for device in devices:
            torch.sim.reset_peak_memory_stats(device)
        watch.part = part

    for _ in range(STEPS):
        model.zero_grad()
        watch.clear()
        end("forward")
        loss = model(**inputs).mean()
        end("backward")
        loss.backward()
        end("forward")
        del loss
    return Found(units, watch.most["forward"], watch.most["backward"], watch.full, *peaks[-2:])


def by_fully_shard(work: Work, devices: Sequence[torch.device]) -> tuple[Found, list[Tensor]]:
    """Also returns the gradients, on the CPU."""
    model = made(work, devices[0])
    watch = Watch(model)
    blocks = work.blocks(model)
    for block in blocks:
        fully_shard(block, devices=devices)
    fully_shard(model, devices=devices)
    states = [fully_shard.state(module) for module in (model, *blocks)]

    def bytes_full() -> list[list[int]]:
        units = [state.unit for state in states]
        return [
            [unit.full_bytes for unit in units if unit.slot_units and unit.slot_units[slot].is_full]
            for slot in range(len(devices))
        ]

    watch.bytes_full = bytes_full
    inputs = {name: value.to(devices[0]) for name, value in work.inputs(SAMPLES * len(devices)).items()}
    found = measured(model, watch, inputs, devices, len(states))
    return found, [gradient.cpu() for gradient in full_gradients(model)]


def by_fsdp(work: Work, folder: Path) -> tuple[Found, list[Tensor]]:
    """The same by FSDP2, in a process for each device.

    Raises:
        RuntimeError: a process has failed; with what it wrote.
    """
    command = [sys.executable, __file__, work.name]
    said = [folder / f"{work.name} {rank}.txt" for rank in range(DEVICES)]
    processes = []
    for rank, path in enumerate(said):
        with path.open("w") as file:
            processes.append(subprocess.Popen([*command, str(rank), str(folder)], env=environment(), stderr=file))
    if any([process.wait() for process in processes]):  # a list: all are waited for
        raise RuntimeError("\n".join(path.read_text() for path in said))
    found, gradients = zip(*(torch.load(folder / f"{work.name} {rank}") for rank in range(DEVICES)), strict=True)
    return Found(**{name: max(each[name] for each in found) for name in found[0]}), gradients[0]


def run_rank(name: str, rank: str, folder: str) -> None:
    from torch import distributed as dist
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    work, device = WORKS[name], simulate(DEVICES)[int(rank)]
    torch.sim.set_device(device)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name} rendezvous",
        rank=int(rank),
        world_size=DEVICES,
        timeout=timedelta(minutes=5),
    )
    mesh = init_device_mesh("sim", (DEVICES,))
    model = made(work, device)
    watch = Watch(model)
    units: list[Any] = [*work.blocks(model), model]
    for unit in units:
        fsdp.fully_shard(unit, mesh=mesh)
    groups = [group for unit in units for group in groups_of(unit)]

    def bytes_full() -> list[list[int]]:
        return [
            [
                sum(parameter._unsharded_param.nbytes for parameter in group.fsdp_params)
                for group in groups
                if group.is_unsharded
            ]
        ]

    watch.bytes_full = bytes_full
    inputs = {key: value.chunk(DEVICES)[int(rank)].to(device) for key, value in work.inputs(SAMPLES * DEVICES).items()}
    with torch.sim.clocks(False):  # gloo is no stream, and what it does is not ordered by any
        found = measured(model, watch, inputs, [device], len(groups))
        gradients = [parameter.grad.full_tensor().cpu() for parameter in model.parameters()]
    torch.save((asdict(found), gradients), Path(folder, f"{name} {rank}"))
    dist.destroy_process_group()


def groups_of(unit: Any) -> list[Any]:
    """What FSDP2 gathers together for a module: private, because it shows nowhere else whether it is gathered."""
    state = unit._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
