"""The policies of `fully_shard`: their fields, what lies where in which dtype, and how often it travels."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn

from clocked import timeline
from dataparallel import composable
from dataparallel.comm.streams.current import Event
from dataparallel.composable import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from dataparallel.sharded import ShardedTensor
from dataparallel.testing.cases import adamw, numbers, seeded
from dataparallel.testing.steps import mean_square_loss
from memory import allocated
from sharded_chains import Chain, Layer
from sharded_steps import on_device, sharded

WIDTH, LAYERS = 6, 4
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CPU = torch.device("cpu")
HOST = -1  # in a recording


def rows(slots: list, seed: int = 0, count: int | None = None) -> Tensor:
    (x,), _ = numbers(WIDTH)(2 * len(slots) if count is None else count, seed)
    return x.to(slots[0])


def make(slots: list, **options: Any) -> Any:
    """Layers that are units, and one of the model's own."""
    model = on_device(seeded(lambda: Chain(*(Layer() for _ in range(LAYERS + 1)))), slots[0])
    return sharded(model, slots, **{"offload_policy": CPUOffloadPolicy(), **options})


def shards(model: Any) -> list[Tensor]:
    return [shard for parameter in model.parameters() for shard in parameter.shards if shard.numel()]


class Launches:
    """What is launched inside the block."""

    def __enter__(self) -> "Launches":
        self._block = timeline()
        self._timeline = self._block.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._block.__exit__(*error)
        self.all = self._timeline.recording.launches

    def sent(self, to_host: bool) -> list[Any]:
        """The copies from or to the host."""
        copies = [launch for launch in self.all if launch.copy is not None]
        return [launch for launch in copies if launch.copy[1 if to_host else 0] == HOST]

    def complete_at_the_end(self) -> set[int]:
        """The launches that the main thread had waited for at its last launch."""
        last = max(launch.index for launch in self.all if launch.thread == self.all[-1].thread)
        waited = [index for launch in self.all if launch.thread == self.all[last].thread for index in launch.host_waits]
        done: set[int] = set()
        while waited:
            index = waited.pop()
            if index not in done:
                done.add(index)
                launch = self.all[index]
                waited += launch.waits
                waited += [other.index for other in self.all[:index] if other.stream == launch.stream]
        return done


def probe(slots: list) -> None:
    """A launch of this thread."""
    torch.ones(1, device=slots[0])


class TestOffload:
    @pytest.mark.parametrize("pin", [True, False])
    def test_shards_gradients_and_states_are_on_the_host_and_pinned_if_the_policy_says_so(self, pin, slots):
        model = make(slots, offload_policy=CPUOffloadPolicy(pin_memory=pin))
        optimizer = adamw(model.parameters())
        mean_square_loss(model(rows(slots))).backward()
        optimizer.step()
        for parameter in model.parameters():
            assert [*parameter.devices] == [*map(torch.device, slots)]
            moments = [value for value in optimizer.state[parameter].values() if isinstance(value, ShardedTensor)]
            assert len(moments) == 2
            for tensor in (parameter, parameter.grad, *moments):
                assert {shard.device for shard in tensor.shards} == {CPU}
            if torch.device(slots[0]) != CPU:
                parts = [shard for shard in (*parameter.shards, *parameter.grad.shards) if shard.numel()]
                assert {shard.is_pinned() for shard in parts} == {pin}

    @pytest.mark.devices("sim")
    @pytest.mark.slots(4)
    def test_devices_hold_nothing_between_steps(self, slots):
        before = allocated(slots)
        model = make(slots)
        optimizer = adamw(model.parameters())
        found = []
        for seed in range(3):
            mean_square_loss(model(rows(slots, seed, count=3 * len(slots) - 1))).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(allocated(slots))
        assert found[0] == found[1] == found[2]
        # Handles of the graph's nodes, and nothing that has the size of parameters.
        assert max(after - idle for after, idle in zip(found[-1], before, strict=True)) < WIDTH * WIDTH * 8


@pytest.mark.devices("sim", "stand-in")
class TestCopiesOfOffloadedShards:
    @pytest.mark.slots(4)
    @pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), HALF], ids=["as they are", "cast"])
    @pytest.mark.parametrize("count", [8, 3])
    def test_one_upload_for_each_unit_and_owner_and_round(self, count, precision, slots):
        """A round is a forward or a backward. The model's own unit stays full in between."""
        model = make(slots, mp_policy=precision)
        x = rows(slots, 1, count=count)
        for batch in (rows(slots), x):
            mean_square_loss(model(batch).double()).backward()
        model.zero_grad()
        with Launches() as forward:
            loss = mean_square_loss(model(x).double())
            probe(slots)
        with Launches() as backward:
            loss.backward()
            probe(slots)
        assert len(forward.sent(to_host=False)) == (LAYERS + 1) * len(slots)
        assert len(backward.sent(to_host=False)) == LAYERS * len(slots)
        assert len(backward.sent(to_host=True)) == (LAYERS + 1) * len(slots)

    @pytest.mark.slots(3)
    def test_gradients_are_complete_when_backward_returns(self, slots):
        model = make(slots)
        mean_square_loss(model(rows(slots))).backward()
        with Launches() as launches:
            mean_square_loss(model(rows(slots))).backward()
            probe(slots)
        arrived = {launch.index for launch in launches.sent(to_host=True)}
        assert arrived
        assert arrived <= launches.complete_at_the_end()

    @pytest.mark.slots(3)
    @pytest.mark.parametrize("what", ["a call", "an optimizer steps", "a state dict is loaded", "it is sharded again"])
    def test_shards_may_be_written_once_the_host_has_them(self, what, slots, monkeypatch):
        """After a call, or while an unshard is on its way: uploads from pinned memory are no part of what a stream
        orders for the host."""
        # After a query that finds the copies done, no wait for them is recorded.
        monkeypatch.setattr(Event, "has_passed", lambda event: False)
        model = make(slots)
        optimizer = torch.optim.SGD(model.parameters())
        values = {name: value.clone() for name, value in model.layers[1].state_dict().items()}
        mean_square_loss(model(rows(slots))).backward()
        with Launches() as launches:
            if what == "a call":
                with torch.no_grad():
                    model(rows(slots))
                assert shards(model)
            else:
                model.layers[1].unshard(async_op=True)
            if what == "an optimizer steps":
                optimizer.step()
            elif what == "a state dict is loaded":
                model.layers[1].load_state_dict(values)
            elif what == "it is sharded again":
                model.layers[1].reshard()
                assert shards(model)
            probe(slots)
        sent = {launch.index for launch in launches.sent(to_host=False)}
        assert sent
        assert sent <= launches.complete_at_the_end()


class Seen(nn.Module):
    """A linear layer that notes the dtypes of its input, weight and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen[:] = [x.dtype, self.linear.weight.dtype, self.shift.dtype]
        return self.linear(x.to(self.linear.weight.dtype)) + self.shift


class TestMixedPrecision:
    def shard(self, slots: list, policy: MixedPrecisionPolicy) -> Any:
        model = on_device(seeded(Seen), slots[0]).float()
        return fully_shard(model, devices=slots, mp_policy=policy)

    @pytest.mark.parametrize("casts", [True, False])
    def test_inputs_are_cast_unless_the_policy_says_no(self, casts, slots):
        model = self.shard(slots, MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=casts))
        output = model(rows(slots).float())
        assert model.seen == [torch.bfloat16 if casts else torch.float32, torch.bfloat16, torch.float32]
        assert output.dtype == torch.float32  # the buffer's, with which the sum is promoted
        mean_square_loss(output).backward()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert {shard.dtype for parameter in model.parameters() for shard in parameter.grad.shards} == {torch.float32}

    @pytest.mark.parametrize("offload", [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)], ids=["", "offloaded"])
    @pytest.mark.parametrize("reduce", [None, torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("param", [None, torch.bfloat16], ids=str)
    def test_gradients_are_those_of_replicas_in_one_dtype_that_are_cast_to_another(self, param, reduce, offload, slots):
        """A chunk on one device has the gradients of a replica. They are added in the dtype of the parameters."""
        build = seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).float())
        model, twin = build().float().to(slots[0]), build().to(slots[0], param or torch.float32)
        for module in (*model, model):
            fully_shard(module, devices=slots, mp_policy=MixedPrecisionPolicy(param, reduce), offload_policy=offload)
        expected = [0.0] * len([*twin.parameters()])
        for seed in range(2):
            x = rows(slots, seed).float()
            model(x).float().sin().sum().backward()
            for chunk in x.chunk(len(slots)):
                twin.zero_grad()
                twin(chunk.to(param or torch.float32)).float().sin().sum().backward()
                added = [parameter.grad.to(reduce or parameter.dtype).float() for parameter in twin.parameters()]
                expected = [total + each for total, each in zip(expected, added, strict=True)]
        for parameter, total in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor("cpu"), total.cpu(), rtol=0, atol=1e-6)

    def test_outputs_are_cast(self, slots):
        output = self.shard(slots, MixedPrecisionPolicy(output_dtype=torch.float16))(rows(slots).float())
        assert output.dtype == torch.float16

    def test_integers_are_not_cast(self, slots):
        model = fully_shard(nn.Embedding(5, 4).to(slots[0]), devices=slots, mp_policy=HALF)
        assert model(torch.arange(5).to(slots[0])).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"])
def test_fields_and_defaults_are_those_of_torch(name):
    def fields(cls):
        return [(field.name, field.default) for field in dataclasses.fields(cls)]

    ours = fields(getattr(composable, name))
    assert ours == fields(getattr(theirs, name))[: len(ours)]  # torch 2.15 has one more
