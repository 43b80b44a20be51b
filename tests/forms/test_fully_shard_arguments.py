"""`fully_shard` checks all that it is given before it changes anything, and makes units of what it takes.

What the module's methods do is in test_fully_shard_methods.
"""

import inspect

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from dataparallel.call.options import InPlaceOptions
from dataparallel.composable import fully_shard
from dataparallel.replicas.plan import FORM_ATTRIBUTE
from processes import run_script

pytestmark = pytest.mark.slots(4)


def build(root):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2)).double().to(root)


@pytest.fixture
def net(root):
    return build(root)


def untouched(module, before):
    """True if nothing of the tree is managed, and it has its parameters."""
    return [*map(id, module.parameters())] == before and not any(
        FORM_ATTRIBUTE in vars(child) for child in module.modules()
    )


def test_some_parameters_may_be_on_meta(net, slots):
    net[1].to("meta")
    assert fully_shard(net, devices=slots) is net
    assert net[1][0].weight.device.type == "meta"


def test_its_arguments_are_those_of_torch_and_a_few_more():
    theirs = inspect.signature(torch.distributed.fsdp.fully_shard).parameters
    ours = inspect.signature(fully_shard).parameters
    names = ["reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy"]
    assert list(ours) == ["module", *names, "units", *InPlaceOptions.__annotations__]
    names.append("ignored_params")
    for name in [*names, "mesh"]:
        assert ours[name].kind is theirs[name].kind is inspect.Parameter.KEYWORD_ONLY
    for name in ("reshard_after_forward", "shard_placement_fn", "ignored_params", "mesh"):
        assert ours[name].default is theirs[name].default is None


class TestPlacements:
    def test_the_function_says_how_each_is_cut(self, net, slots):
        fully_shard(net, devices=slots, shard_placement_fn=lambda p: Shard(-1) if p.dim() > 1 else None)
        assert [parameter.placement for parameter in net.parameters()] == [Shard(1), Shard(0)] * 3

    @pytest.mark.parametrize(
        ("placement", "error", "message"),
        [
            (0, TypeError, r"shard_placement_fn returned 0 for '0\.weight'; expected torch.*Shard\(dim\), or None"),
            (Replicate(), TypeError, r"returned Replicate\(\) for '0\.weight'; expected"),
            (Shard(2), ValueError, r"for '0\.weight': cannot place .*\(8, 4\).*no such dimension"),
            (Shard(-3), ValueError, r"for '0\.weight': cannot place .*no such dimension"),
        ],
        ids=str,
    )
    def test_what_is_no_placement(self, net, slots, placement, error, message):
        before = [*map(id, net.parameters())]
        with pytest.raises(error, match=message):
            fully_shard(net, devices=slots, shard_placement_fn=lambda parameter: placement)
        assert untouched(net, before)

    def test_an_uneven_dimension_that_is_not_the_first(self, root, slots):
        net = nn.Linear(6, 4).to(root)
        with pytest.raises(
            ValueError, match=r"Shard\(dim=1\) for 'weight' of shape \(4, 6\): 6 is no multiple of 4 slots"
        ):
            fully_shard(net, devices=slots, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"mp_policy": None}, TypeError, "mp_policy=None: expected .*MixedPrecisionPolicy; import it from"),
            ({"reshard_after_forward": 1}, ValueError, "=1: expected True, False or an int above 1, the slots"),
            ({"reshard_after_forward": 4}, ValueError, "=4 is the number of all slots; pass True for that"),
            ({"reshard_after_forward": 3}, ValueError, "=3: groups of 3 slots do not divide 4 slots.*possible: 2"),
        ],
    )
    def test_arguments(self, net, slots, arguments, error, message):
        """Others are in tests/test_arguments."""
        before = [*map(id, net.parameters())]
        with pytest.raises(error, match=message):
            fully_shard(net, **{"devices": slots, **arguments})
        assert untouched(net, before)
        fully_shard(net, devices=slots)

    def test_groups_of_a_prime_number_of_slots(self, net, make_slots):
        with pytest.raises(ValueError, match="possible: there is no such number, so pass True or False"):
            fully_shard(net, devices=make_slots(3), reshard_after_forward=2)

    def test_nothing_to_shard(self, net, slots):
        with pytest.raises(ValueError, match="nothing to shard in a Tanh: it has no parameters"):
            fully_shard(nn.Tanh(), devices=slots)
        with pytest.raises(ValueError, match=r"nothing to shard in .* all of them are in ignored_params"):
            fully_shard(net, devices=slots, ignored_params=net.parameters())

    @pytest.mark.devices("sim", "cuda")
    def test_a_unit_on_two_devices(self, net, slots, root):
        net[2].to("cpu")
        before = [*map(id, net.parameters())]
        message = rf"of one unit are on 2 devices: '0\.weight' on {root}, '2\.weight' on cpu\. Move the module"
        with pytest.raises(ValueError, match=message):
            fully_shard(net, devices=slots)
        assert untouched(net, before)
        fully_shard(net[2], devices=slots)
        fully_shard(net, devices=slots)

    def test_a_child_over_other_devices(self, net, slots):
        fully_shard(net[1], devices=slots[:3])
        shown = ", ".join(str(torch.device(slot)) for slot in slots)
        with pytest.raises(
            ValueError, match=rf"the child '1' is sharded over .*, and this module would be over {shown};"
        ):
            fully_shard(net, devices=slots)
        assert FORM_ATTRIBUTE not in vars(net)
        fully_shard(net, devices=slots[:3])

    @pytest.mark.filterwarnings("ignore:Lazy modules")
    def test_lazy_parameters(self, slots):
        lazy = nn.Sequential(nn.LazyLinear(2))
        with pytest.raises(RuntimeError, match=r"'0\.weight' is not initialised yet; run the module once"):
            fully_shard(lazy, devices=slots)
        assert FORM_ATTRIBUTE not in vars(lazy)

    @pytest.mark.parametrize(
        "made",
        [lambda w: Named(w), lambda w: nn.Parameter(w.as_subclass(Marked))],
        ids=["of a class", "that holds one"],
    )
    def test_a_class_of_its_own(self, net, slots, made):
        """It would be dropped with its methods and attributes."""
        net[0].weight = made(net[0].weight.detach())
        with pytest.raises(TypeError, match=r"'0\.weight' is a (Named|Marked), a class of its own.*ignored_params"):
            fully_shard(net, devices=slots)
        assert FORM_ATTRIBUTE not in vars(net)
        fully_shard(net, devices=slots, ignored_params={net[0].weight})

    def test_inference_mode_and_nothing_has_changed(self, net, slots):
        before = [*map(id, net.parameters())]
        with (
            torch.inference_mode(),
            pytest.raises(RuntimeError, match=r"inside torch.inference_mode\(\).*Call it before"),
        ):
            fully_shard(net, devices=slots)
        assert untouched(net, before)
        with torch.no_grad():
            fully_shard(net, devices=slots)


class Named(nn.Parameter):
    """A parameter of another class."""


class Marked(torch.Tensor):
    """A tensor of another class."""


class TestOptimizers:
    def test_one_made_before_raises_at_its_first_step(self, net, slots):
        optimizer = torch.optim.AdamW(net.parameters())
        fully_shard(net[1], devices=slots)
        fully_shard(net, devices=slots)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        message = (
            r"this AdamW holds '.*' of a Sequential as it was before `fully_shard`.*Make the optimizer after fully_sh"
        )
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()

    def test_one_of_ignored_parameters_steps(self, net, slots):
        weight = net[0].weight
        optimizer = torch.optim.SGD([weight], lr=1)
        fully_shard(net, devices=slots, ignored_params=[weight])
        expected = weight.detach() - 1
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert torch.equal(weight, expected)


@pytest.mark.long
@pytest.mark.devices("cpu")
def test_placements_are_imported_when_they_are_needed():
    script = "import sys, dataparallel.composable; print('torch.distributed.tensor' in sys.modules)"
    assert run_script(script).split() == ["False"]
