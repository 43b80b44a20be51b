"""In the tree of a replica, references to the module lead to the replica, and ignored parts are shared."""

import types

import pytest
import torch
from torch import nn

from dataparallel.composable import replicate
from dataparallel.forms.managed import KEY
from dataparallel.replicas.plan import TWIN_INFO


class TestReferencesToTheModule:
    """References from inside the tree to the module lead to the replica."""

    def test_a_forward_that_is_set_around_the_one_before(self, affine, slots, batch):
        def around(module):
            former = module.forward
            module.forward = lambda x: former(x).exp()

        around(affine)
        replicate(affine, devices=slots)
        around(affine)
        around(affine)
        torch.testing.assert_close(affine(batch), affine.linear(batch).exp().exp().exp())
        assert len({*affine.ran} - {id(affine)}) == 3

    def test_a_reference_made_after_the_first_call(self, slots, root, batch):
        owners = []

        class Child(nn.Linear):
            def forward(self, x):
                owners.extend(self.above)
                return super().forward(x)

        module = nn.Sequential(Child(4, 3)).double().to(root)
        module[0].above = []
        replicate(module, devices=slots)(batch)
        module[0].above.append(module)
        module(batch)
        assert len({id(owner) for owner in owners}) == 3
        assert all(type(owner) is nn.Sequential for owner in owners)
        assert all(vars(owner).keys().isdisjoint({KEY, TWIN_INFO}) for owner in owners)


class TestIgnored:
    @pytest.fixture
    def net(self, root):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3))).double().to(root)

    def seen_by_replicas(self, net, batch):
        """The modules and parameters that replicas have, one row for each replica."""
        rows = []

        def forward(self, x):
            rows.append(([*self.modules()], [*self.parameters()]))
            return x

        net.forward = types.MethodType(forward, net)
        net(batch)
        assert len(rows) == 3
        return rows

    @pytest.mark.parametrize("record", [True, False])
    def test_modules_are_handed_over_as_they_are(self, net, slots, batch, record):
        replicate(net, devices=slots, ignored_modules=[net[1]])
        with torch.set_grad_enabled(record):
            rows = self.seen_by_replicas(net, batch)
        for modules, parameters in rows:
            assert modules[1] is not net[0]
            assert modules[2] is net[1]
            assert all(map(lambda a, b: a is b, parameters[2:], net[1].parameters()))
            assert all(parameter is not weight for parameter in parameters[:2] for weight in net.parameters())

    @pytest.mark.parametrize("record", [True, False])
    def test_parameters_are_handed_over_as_they_are(self, net, slots, batch, record):
        replicate(net, devices=slots, ignored_params=[net[0].weight, net[1][1].bias])
        with torch.set_grad_enabled(record):
            rows = self.seen_by_replicas(net, batch)
        for modules, parameters in rows:
            assert parameters[0] is net[0].weight
            assert parameters[3] is net[1][1].bias
            assert parameters[1] is not net[0].bias
            assert modules[2] is not net[1]

    def test_a_parameter_of_an_ignored_module_is_ignored_everywhere(self, net, slots, batch):
        net[1][1].weight = net[0].weight
        replicate(net, devices=slots, ignored_modules=[net[1]])
        assert all(parameters[0] is net[0].weight for _, parameters in self.seen_by_replicas(net, batch))

    def test_they_may_be_anywhere(self, net, slots, batch):
        net[1] = nn.Linear(4, 3, device="meta")
        net[0].weight = nn.Parameter(torch.empty(4, 4, device="meta"))
        replicate(net, devices=slots, ignored_modules=[net[1]], ignored_params=[net[0].weight])
        self.seen_by_replicas(net, batch)

    def test_a_module_that_the_slots_can_share_computes_as_before(self, slots, root, batch):
        class Rounded(nn.Module):
            def forward(self, x):
                return x.round()

        net = nn.Sequential(nn.Linear(4, 4), Rounded()).double().to(root)
        expected = net(batch)
        replicate(net, devices=slots, ignored_modules=[net[1]])
        torch.testing.assert_close(net(batch), expected)
