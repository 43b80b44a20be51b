"""torch.distributed.checkpoint works with all forms: full and sharded states, files for another number of slots."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import FULL, Trained
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dataparallel import DataParallel
from dataparallel.composable import CPUOffloadPolicy, fully_shard, replicate
from dataparallel.sharded import Replicate, Shard, ShardedTensor, distribute_tensor
from dataparallel.testing.steps import assert_equal
from sharded_steps import whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # torch's own, without a process group
]

ON_THE_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Net(nn.Module):
    """Uneven shapes, a scalar, a buffer and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) - self.mean)) * self.scale


def module(device: Any, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(device=device, dtype=torch.float64)


def sharded(slots: list, **options: Any) -> Any:
    made = module(slots[0], 1)
    for unit in (made.first, made):
        fully_shard(unit, devices=slots, **options)
    return made


# What makes a model with other weights over these slots.
FORMS: dict[str, Callable[[list], Any]] = {
    "fully_shard": sharded,
    "offloaded": lambda slots: sharded(slots, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "columns": lambda slots: fully_shard(
        module(slots[0], 1), devices=slots[:1], shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.dim() else None
    ),
    "replicate": lambda slots: replicate(module(slots[0], 1), devices=slots),
    "wrapper": lambda slots: DataParallel(module(slots[0], 1), slots),
    "plain": lambda slots: module(slots[0], 1),
}
INTO = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def one(root: torch.device) -> Trained:
    """After two steps on one device."""
    return Trained(module(root, 1), 2)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process, which asynchronous saving wants."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


# torch refuses full states for a model with parameters in host memory and buffers on an accelerator.
OF_ONE_KIND = [pytest.param(form, marks=[pytest.mark.devices("cpu")] * (form == "offloaded")) for form in FORMS]


@pytest.mark.parametrize("form", OF_ONE_KIND)
def test_full_states_are_plain_tensors_on_the_cpu_and_are_loaded(form: str, slots: list, one: Trained) -> None:
    saved = copy.deepcopy(Trained(FORMS[form](slots), 2).to_save(ON_THE_CPU))
    of_model, of_optimizer = saved["model"].values(), saved["optimizer"]["state"].values()
    assert {type(value) for value in of_model} == {Tensor}
    assert {value.device.type for value in of_model} == {"cpu"}
    assert {type(value) for state in of_optimizer for value in state.values()} == {Tensor}
    other = Trained(FORMS[form](slots))
    other.set(saved, FULL)
    for parameter in other.model.parameters() if form in ("fully_shard", "offloaded") else ():
        averages = [value for name, value in other.optimizer.state[parameter].items() if name != "step"]
        assert all(isinstance(value, ShardedTensor) for value in (parameter, *averages))
    for each in (one, other):
        each.step(7)
    assert_equal(other.state(), one.state(), "state", atol=1e-9)


def test_no_device_gets_a_whole_tensor_of_a_full_state(
    slots: list, one: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = of_torch.get_model_state_dict(one.model, options=ON_THE_CPU)
    model = sharded(slots)
    given: dict[str, Any] = {}
    load = type(model).load_state_dict
    monkeypatch.setattr(
        type(model),
        "load_state_dict",
        lambda self, state_dict, **k: (given.update(state_dict), load(self, state_dict, **k))[1],
    )
    of_torch.set_model_state_dict(model, dict(state), options=FULL)
    names = dict(model.named_parameters())
    assert given
    assert all(isinstance(value, ShardedTensor) == (name in names) for name, value in given.items())


@pytest.mark.usefixtures("group")
def test_a_full_state_fills_a_model_on_meta(slots: list, one: Trained) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(7, 5, dtype=torch.float64))
    fully_shard(model, devices=slots)
    state = {"0.weight": one.model.first.weight.detach().cpu(), "0.bias": one.model.first.bias.detach().cpu()}
    of_torch.set_model_state_dict(model, dict(state), options=FULL)
    assert_equal(whole(dict(model.state_dict())), state, "state", atol=0)
    assert [str(shard.device) for shard in model[0].weight.shards] == [str(torch.device(slot)) for slot in slots]


@INTO
def test_files_of_eight_slots_are_loaded_and_saved_again(
    form: str, make_slots: Callable[[int], list], one: Trained, tmp_path: Path
) -> None:
    checkpoint.save(Trained(sharded(make_slots(8)), 2).to_save(), checkpoint_id=tmp_path / "eight")
    there = Trained(FORMS[form](make_slots(3)))
    there.load(tmp_path / "eight")
    checkpoint.save(there.to_save(), checkpoint_id=tmp_path / "again")
    back = Trained(sharded(make_slots(8)))
    back.load(tmp_path / "again")
    for each in (one, there, back):
        each.step(7)
    assert_equal(there.state(), one.state(), "there", atol=1e-9)
    assert_equal(back.state(), one.state(), "back", atol=1e-9)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("shape", [(7, 3), (2, 5), (0, 3), (3, 1)], ids=str)
def test_each_part_is_saved_once_and_loaded_everywhere(
    placement: Any, shape: tuple, slots: list, tmp_path: Path
) -> None:
    values = torch.rand(shape)
    checkpoint.save({"x": distribute_tensor(values, slots, placement)}, checkpoint_id=tmp_path)
    loaded = {"x": distribute_tensor(torch.zeros(shape), slots, placement)}
    plain = {"x": torch.zeros(shape)}
    for state in (loaded, plain):
        checkpoint.load(state, checkpoint_id=tmp_path)
    assert torch.equal(loaded["x"].full_tensor("cpu"), values)
    assert torch.equal(plain["x"], values)
    if placement == Replicate():
        assert all(torch.equal(shard.cpu(), values) for shard in loaded["x"].shards)
    saved = checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["x"]
    assert sum(chunk.sizes.numel() for chunk in saved.chunks) == values.numel()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("staging", ["torch's default", "of the writer"])
def test_training_goes_on_while_a_checkpoint_is_saved(staging: str, slots: list, one: Trained, tmp_path: Path) -> None:
    several = Trained(sharded(slots), 2)
    folder = tmp_path / "saved"
    writer = {} if staging == "torch's default" else {"storage_writer": checkpoint.FileSystemWriter(folder)}
    saving = checkpoint.async_save(several.to_save(), checkpoint_id=folder, **writer)
    with torch.no_grad():
        for parameter in several.model.parameters():
            parameter.zero_()
    saving.result()
    other = Trained(sharded(slots))
    other.load(folder)
    for each in (one, other):
        each.step(7)
    assert_equal(other.state(), one.state(), "state", atol=1e-9)
