"""Full states of models over machines: saved together, loaded with other machines, other devices, or one device."""

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from dataparallel.composable import fully_shard
from dataparallel.testing.cases import adamw
from dataparallel.testing.steps import assert_equal
from machine_ranks import on_machines
from sharded_machines import EACH_SPREAD, SPREADS, batches, batches_of_rank, mean_of, slots_of, spread, sum_of_squares
from sharded_models import on_meta
from sharded_steps import MODELS, on_device, sharded, train

MODEL = "gpt"
STEPS = 2
LIMIT = 20.0
"""Seconds for what would otherwise wait for the group's timeout of 90."""


# ---- training --------------------------------------------------------------------------------------------------------


def go_on(model: nn.Module, number: int, folder: Path, samples: Iterator[Any], loss: Any, rank: int = 0) -> Any:
    """Some steps from the state that was saved before, if there was any. The first machine saves the state."""
    optimizer = adamw(model.parameters())
    if number:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # other values, which the load replaces
        fully_shard.load_full_state_dict(model, torch.load(folder / f"{number}.pt", weights_only=True), optimizer)
    train(model, islice(samples, number * STEPS, None), optimizer, STEPS, loss=loss)
    saved = fully_shard.full_state_dict(model, optimizer)
    assert_plain(saved)
    if rank == 0:
        torch.save(saved, folder / f"{number + 1}.pt")
    return saved


def go_on_over_machines(rank: int, devices: list, way: str, number: int, folder: Path) -> Any:
    model = sharded(on_device(MODELS[MODEL].build, devices[0]), devices, **spread(way))
    samples = batches_of_rank(MODEL, rank, distributed.get_world_size(), devices[0])
    return go_on(model, number, folder, samples, sum_of_squares, rank)


def assert_plain(saved: Any) -> None:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(saved) if isinstance(leaf, Tensor)]
    assert {(type(leaf), leaf.device.type, leaf.requires_grad) for leaf in leaves} == {(Tensor, "cpu", False)}


@EACH_SPREAD
def test_training_moves_between_machines_and_devices(
    way: str, make_slots: Callable[[int], list], tmp_path: Path
) -> None:
    """From machines with two devices each to one with three, to one device, and to machines again."""
    ranks, slots, few = SPREADS[way][0], slots_of(way), make_slots(3)
    on_machines(go_on_over_machines, way, 0, tmp_path, ranks=ranks, slots=slots)
    one, other = (on_device(MODELS[MODEL].build, "cpu") for _ in range(2))
    for number, model in ((1, sharded(on_device(MODELS[MODEL].build, few[0]), few)), (2, other)):
        go_on(model, number, tmp_path, batches(MODEL, ranks), mean_of(ranks))
    optimizer = adamw(one.parameters())
    train(one, batches(MODEL, ranks), optimizer, 4 * STEPS, loss=mean_of(ranks))
    expected = fully_shard.full_state_dict(one, optimizer)
    for found in on_machines(go_on_over_machines, way, 3, tmp_path, ranks=ranks, slots=slots):
        assert_equal([*map(dict, found)], [*map(dict, expected)], "state", atol=1e-9)


# ---- what is saved and loaded ----------------------------------------------------------------------------------------


class Kept(nn.Module):
    """Parts of all sizes, a tied weight, a 0-dim parameter, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.few = nn.Parameter(torch.arange(3.0))
        self.register_buffer("table", torch.randn(5))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale + self.few.sum() + self.table


def kept(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Kept().double()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: Any) -> None:
    model(torch.ones(4, 5, dtype=torch.float64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def loads_on_meta(rank: int, devices: list, way: str, state: Any) -> None:
    model = on_meta(kept)
    fully_shard(model, devices=devices, **spread(way))
    model.scratch = torch.zeros(5, dtype=torch.float64, device=devices[0])
    parameters = [*model.parameters()]
    fully_shard.load_full_state_dict(model, state)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert_equal(dict(fully_shard.full_state_dict(model)), dict(state), "state", atol=0)


@pytest.mark.parametrize("way", ["1-D", "hybrid"])
def test_a_model_on_meta_gets_memory(way: str) -> None:
    on_machines(loads_on_meta, way, kept(3).state_dict())


def pickles(rank: int, devices: list) -> None:
    model = fully_shard(on_device(kept, devices[0]), devices=devices, **spread("1-D"))
    with pytest.raises(TypeError, match=r"cannot be pickled.*fully_shard\.full_state_dict\(model\)"):
        torch.save(model.state_dict(), io.BytesIO())
    hybrid = fully_shard(on_device(kept, devices[0]), devices=devices, **spread("hybrid"))
    torch.save(hybrid.state_dict(), io.BytesIO())  # every rank has all of it
    if rank == 0:
        assert_plain(fully_shard.full_state_dict(hybrid))  # no other rank is asked


def test_what_is_here_in_part_is_not_pickled() -> None:
    on_machines(pickles)


# ---- failures --------------------------------------------------------------------------------------------------------


def said(call: Callable[[], Any]) -> str:
    """The type and the words of an error that does not come late."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        seconds = time.monotonic() - began
        return f"{type(error).__name__}: {error}" if seconds < LIMIT else f"late, after {seconds} s: {error}"
    return "nothing was raised"


def fails(rank: int, devices: list, way: str) -> dict[str, str]:
    """What each rank says where the last one fails. In between everything works."""
    is_last = rank == distributed.get_world_size() - 1
    model = fully_shard(on_device(kept, devices[0]), devices=devices, **spread(way))
    optimizer = adamw(model.parameters())
    step(model, optimizer, devices[0])
    good = fully_shard.full_state_dict(model, optimizer)
    lacking = {name: value for name, value in good[0].items() if name != "few"}
    another = ({**good[0], "first.weight": good[0]["first.weight"] + 1}, good[1])
    found = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        before = [shard.clone() for p in model.parameters() for shard in p.shards]
        found[name] = said(call)
        after = [shard for p in model.parameters() for shard in p.shards]
        if name != "in the middle":
            assert_equal(after, before, name, atol=0)
        fully_shard.load_full_state_dict(model, good, optimizer)

    attempt("lacking", lambda: fully_shard.load_full_state_dict(model, lacking if is_last else good[0]))
    attempt("no dict", lambda: fully_shard.load_full_state_dict(model, 3 if is_last else good[0]))
    attempt("both lacking", lambda: fully_shard.load_full_state_dict(model, lacking))
    attempt("others", lambda: fully_shard.load_full_state_dict(model, another if is_last else good, optimizer))
    with failing_load(model) if is_last else contextlib.nullcontext():
        attempt_in_the_middle = said(lambda: fully_shard.load_full_state_dict(model, good[0]))
    found["in the middle"] = attempt_in_the_middle
    if way != "hybrid":
        attempt("save", lambda: fully_shard.full_state_dict(model, "optimizer" if is_last else optimizer))
        attempt(
            "other states", lambda: fully_shard.full_state_dict(model, adamw([model.few]) if is_last else optimizer)
        )
    step(model, optimizer, devices[0])
    return found


@contextlib.contextmanager
def failing_load(model: nn.Module) -> Any:
    def fail(*args: Any) -> None:
        raise RuntimeError("no more memory")

    hook = model._register_load_state_dict_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("way", ["1-D", "2-D", "hybrid"])
def test_an_error_on_one_rank_is_one_on_all(way: str) -> None:
    """Nobody waits for the timeout, and nothing is changed before all ranks can go on."""
    ranks = SPREADS[way][0]
    *others, last = on_machines(fails, way, ranks=ranks, slots=slots_of(way))
    assert last["lacking"].startswith("ValueError: this state dict does not fit the")
    assert last["no dict"].startswith("TypeError: expected the state dict of a model; got int")
    assert last["in the middle"] == "RuntimeError: no more memory"
    for found in others:
        assert "it lacks 'few'" in found["lacking"]
        assert "got int" in found["no dict"]
        assert "no more memory" in found["in the middle"]
        for name in ("lacking", "no dict", "in the middle"):
            assert found[name].startswith("MachinesDiffer: ")
    for found in (*others, last):
        assert "it lacks 'few'" in found["both lacking"]
        assert found["others"].startswith("MachinesDiffer")
        assert "first.weight" in found["others"]
    if way != "hybrid":
        assert "expected a torch.optim" in last["save"]
        for found in others:
            # Without the other row of a mesh: a row saves by itself.
            alone = way == "2-D" and found["save"] == "nothing was raised"
            assert alone or "expected a torch.optim" in found["save"]
        for found in (others[-1], last):
            assert found["other states"].startswith("MachinesDiffer")
            assert "exp_avg" in found["other states"]
