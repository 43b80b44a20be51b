"""Outputs that cannot be joined come back as a `PerReplica`; passed in again, each replica gets its own entry."""

import copy
import pickle

import pytest
import torch
from torch import nn

from dataparallel import DataParallel, PerReplica, gather, scatter, scatter_kwargs
from dataparallel.composable import register_forward_method, replicate


class State:
    """What one replica has seen; equal only to itself, as caches are."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


class Recurrent(nn.Module):
    """Adds up what it is given in a state that it returns, and starts a new one where it is given none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, state=None):
        state = State() if state is None else state["inner"][0]
        state.seen.append(x * self.scale)
        return {"sum": sum(state.seen), "state": {"inner": [state]}}

    def step(self, x, state=None):
        return self.forward(x, state)


@pytest.fixture
def net(root):
    return Recurrent().to(root)


@pytest.fixture
def batch(root):
    return torch.arange(14.0, device=root).reshape(7, 2)


class TestAState:
    @pytest.mark.slots(1, 2, 3)
    @pytest.mark.parametrize("samples", [7, 2, 1])
    @pytest.mark.parametrize("how", ["DataParallel", "replicate", "method"])
    def test_it_follows_its_replica(self, net, slots, batch, how, samples):
        """Also where there are fewer samples than slots."""
        replicated, state, alone = replicate(copy.deepcopy(net), devices=slots), None, None
        register_forward_method(replicated, "step")
        model = {"DataParallel": DataParallel(net, slots), "replicate": replicated, "method": replicated.step}[how]
        for step in range(3):
            x = batch[:samples] + step
            output, expected = model(x, state=state), net(x, alone)
            torch.testing.assert_close(output["sum"], expected["sum"])
            state, alone = output["state"], expected["state"]
            assert type(state["inner"][0]) is (State if 1 in (len(slots), samples) else PerReplica)

    def test_gradients_flow_through_it(self, wrapped, net, batch):
        state = wrapped(batch)["state"]
        wrapped(batch * 3, state)["sum"].sum().backward()
        assert net.scale.grad.item() == pytest.approx(4 * batch.sum().item())


class TestScatter:
    def test_each_slot_gets_its_entry(self, slots, root):
        states = [State(), State(), State()]
        x = torch.zeros(6, 1, device=root)
        args, kwargs = scatter_kwargs((x, [PerReplica(states)]), {"again": {"a": PerReplica(states)}}, slots)
        for slot, state in enumerate(states):
            assert args[slot][1][0] is state
            assert kwargs[slot]["again"]["a"] is state

    def test_tensors_and_containers_in_it_arrive_on_the_slots(self, slots, root):
        masks = PerReplica({"mask": torch.full((slot + 1,), float(slot), device=root)} for slot in range(3))
        found = scatter((torch.zeros(3, device=root), masks), slots)
        assert [mask["mask"].tolist() for _, mask in found] == [[0], [1, 1], [2, 2, 2]]
        assert [mask["mask"].device for _, mask in found] == [torch.device(slot) for slot in slots]

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            (
                lambda x: (x, {"state": PerReplica("ab")}),
                r'^input\[1\]\["state"\] has entries for 2 replicas, but a batch of 7 on 3 slots is for 3;',
            ),
            (lambda x: (x[:2], PerReplica("abc")), "entries for 3 replicas, but a batch of 2 on 3 slots is for 2;"),
            (lambda x: PerReplica(), "^input is an empty PerReplica"),
            (lambda x: PerReplica("abcd"), "^input has entries for 4 replicas, but there are only 3 slots;"),
            (
                lambda x: [PerReplica("ab"), PerReplica("a")],
                r"^input\[1\] has entries for 1 replicas, but input\[0\] has entries for 2;",
            ),
        ],
    )
    def test_a_number_that_does_not_fit_is_named(self, slots, batch, inputs, message):
        with pytest.raises(ValueError, match=message):
            scatter(inputs(batch), slots)


@pytest.mark.devices("cpu")  # elsewhere there is an accelerator
class TestWithoutSlots:
    @pytest.fixture(params=["DataParallel", "replicate"])
    def model(self, request, net):
        return DataParallel(net) if request.param == "DataParallel" else replicate(net)

    def test_the_module_gets_the_only_entry(self, model, batch):
        state = State()
        assert model(batch, state={"inner": PerReplica([[state]])})["state"] == {"inner": [state]}

    def test_another_number_is_refused(self, model, batch):
        for states in ([], [State(), State()]):
            with pytest.raises(ValueError, match=r'kwargs\["state"\] '):
                model(batch, state=PerReplica(states))


class TestWhatReplicasWouldShare:
    @pytest.fixture
    def cache(self):
        base = type("Cache", (), {"__module__": "transformers.cache_utils"})
        return type("SpecialCache", (base,), {})()

    def test_one_cache_for_several_replicas_is_refused(self, slots, batch, cache):
        message = r"past\"\] is one SpecialCache, to which 3 replicas would write.*register_forward_method"
        with pytest.raises(ValueError, match=message):
            scatter({"x": batch, "past": cache}, slots)

    def test_one_for_each_is_taken(self, slots, batch, cache):
        caches = [copy.copy(cache) for _ in slots]
        assert [found for _, found in scatter((batch, PerReplica(caches)), slots)] == caches


class TestGather:
    def test_equal_leaves_stay_that_leaf(self, root):
        assert gather(["a", "a"], root) == "a"
        state = State()
        assert gather([state, state], root) is state
        assert gather([state], root) is state

    def test_those_of_inner_calls_stay_apart(self, root):
        inner = PerReplica("ab")
        assert gather([inner, PerReplica("ab")], root) == [["a", "b"], ["a", "b"]]
        assert [type(part) for part in gather([inner, inner], root)] == [PerReplica] * 2
        assert scatter(gather([inner, inner], root), ["cpu"] * 2) == [inner, inner]


class TestItIsAList:
    def test_equality_slices_repr_and_copies(self):
        both = PerReplica(["a", "b"])
        assert both == ["a", "b"]
        assert isinstance(both, list)
        assert repr(both) == "PerReplica(['a', 'b'])"
        assert type(both[:1]) is list
        for other in (copy.copy(both), copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
            assert type(other) is PerReplica
            assert other == both

    def test_an_attribute_of_an_own_type_says_how_outputs_are_joined(self, slots, root):
        class Output:
            def __init__(self, logits):
                self.logits = logits

        class Net(nn.Module):
            def forward(self, x):
                return Output(2 * x)

        output = DataParallel(Net(), slots)(torch.ones(6, 1, device=root))
        with pytest.raises(AttributeError, match=r"has no attribute 'logits'.*one Output each.*register_batch\(Output"):
            _ = output.logits
        assert getattr(output, "logits", None) is None
        assert output[0].logits.shape == (2, 1)  # what the message says
