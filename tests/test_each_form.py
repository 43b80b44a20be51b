"""A call of each form runs on its slots, and equals one device.

What only one form promises is in the form's own files.
"""

import copy
import gc
import weakref
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from affine import Affine, build_affine
from dataparallel.composable import register_forward_method
from each_form import composable_forms, replicating_forms, whole
from nets import samples


@pytest.fixture
def affine(root):
    return build_affine(root)


@pytest.fixture
def batch(root):
    return samples(root)


class Called(nn.Module):
    """Calls a function; a parameter lets it be sharded."""

    def __init__(self, function):
        super().__init__()
        self.function, self.unused = function, nn.Parameter(torch.ones(3))

    def forward(self, *args):
        return self.function(*args)


def gradients_of(module):
    return {name: None if p.grad is None else whole(p.grad) for name, p in module.named_parameters()}


class TestInputsOfBackward:
    """``backward(inputs=...)`` gives these a gradient and no others."""

    def both(self, form, slots, root):
        nets = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double().to(root) for _ in range(2)]
        nets[1].load_state_dict(nets[0].state_dict())
        return form(nets[0], slots), nets[0], nets[1]

    @pytest.mark.parametrize("names", [["0.weight", "2.bias"], ["0.bias"], ["2.weight", "x"], ["x"]])
    def test_gradients_are_those_of_one_device(self, names, form, slots, root):
        called, module, one = self.both(form, slots, root)
        found = []
        for call, net in ((called, module), (one, one)):
            x = torch.linspace(-1, 1, 28, dtype=torch.float64, device=root).view(7, 4).requires_grad_()
            named = {**dict(net.named_parameters()), "x": x}
            for _ in range(2):
                call(x).square().sum().backward(inputs=[named[name] for name in names])
            call(x).sum().backward()
            found.append({**gradients_of(net), "x": x.grad})
        for name, expected in found[1].items():
            torch.testing.assert_close(found[0][name], expected, rtol=0, atol=1e-9, check_device=False)

    @pytest.mark.parametrize("options", [{}, {"allow_unused": True}], ids=str)
    def test_autograd_grad_returns_them_or_says_what_to_do(self, options, form, slots, root):
        called, module, one = self.both(form, slots, root)
        x = torch.ones(len(slots), 4, dtype=torch.float64, device=root)
        expected = torch.autograd.grad(one(x).sum(), [*one.parameters()])
        try:
            found = torch.autograd.grad(called(x).sum(), [*module.parameters()], **options)
        except RuntimeError as error:
            assert hasattr(module, "reshard")
            assert "loss.backward(inputs=[...])" in str(error)  # noqa: PT017
        else:
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, check_device=False)


class Recomputed(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.below, self.above, self.inside = nn.Linear(4, 4), nn.Linear(4, 1), inside

    def forward(self, x):
        y = torch.tanh(self.below(x))
        return self.above(y) if self.inside is None else checkpoint(self.above, y, use_reentrant=self.inside)


@pytest.mark.parametrize("inside", [None, True, False])
@pytest.mark.parametrize("around", [True, False])
def test_a_call_may_be_recomputed_and_recompute_a_part_of_itself(around, inside, form, slots, root):
    nets = [Recomputed(inside).double().to(root) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for call in (form(nets[0], slots), nets[1]):
        for _ in range(2):
            x = torch.linspace(-1, 1, 28, dtype=torch.float64, device=root).view(7, 4).requires_grad_()
            checkpoint(call, x, use_reentrant=around).square().sum().backward()
    for name, expected in gradients_of(nets[1]).items():
        torch.testing.assert_close(gradients_of(nets[0])[name], expected, rtol=0, atol=1e-9, check_device=False)


@pytest.mark.parametrize("default", ["root", "cpu"])
def test_a_default_device_changes_nothing(default, form, slots, root):
    """In forward, backward and the optimizer: what the library makes for itself is where it has to be."""
    nets = [nn.Linear(4, 3).double().to(root) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x = torch.linspace(-1, 1, 28, dtype=torch.float64, device=root).view(7, 4)
    model = form(nets[0], slots)
    for call, net in ((model, nets[0]), (nets[1], nets[1])):
        with torch.device(root if default == "root" else "cpu"):
            optimizer = torch.optim.AdamW(net.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                call(x).square().sum().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1)
                optimizer.step()
    for name, expected in nets[1].state_dict().items():
        torch.testing.assert_close(whole(nets[0].state_dict()[name]), expected, rtol=0, atol=1e-9, check_device=False)


class Marked(nn.Linear):
    """Reads what users set on parameters."""

    def forward(self, x):
        return super().forward(x) * self.weight.scale * (2 if self.bias.requires_grad else 3)


@pytest.mark.parametrize("options", [{}, {"compile": {"backend": "eager"}}], ids=["eager", "compiled"])
def test_what_users_set_on_a_parameter_reaches_the_replicas(options, form, slots, root):
    module = Marked(4, 3).double().to(root)
    one = copy.deepcopy(module)
    module.weight.scale = one.weight.scale = 1.0
    model = form(module, slots, **options)
    x = torch.linspace(-1, 1, 28, dtype=torch.float64, device=root).view(7, 4)
    for scale, needs_gradient in ((1.0, True), (5.0, True), (5.0, False), (2.0, True)):
        for each in (module, one):
            each.weight.scale = scale
            each.bias.requires_grad_(needs_gradient)
        torch.testing.assert_close(model(x), one(x), rtol=0, atol=1e-9)


class TestWhatReplicasGet:
    def test_chunks_keyword_arguments_and_whole_tensors(self, affine, form, slots, batch):
        offset = torch.randn(1, 3, dtype=torch.float64, device=batch.device)
        expected = affine(batch, scale=2.0, offset=offset)
        affine.sizes.clear()
        output = form(affine, slots)(batch, scale=2.0, offset=dp.whole(offset))
        torch.testing.assert_close(output, expected)
        assert sorted(affine.sizes) == [1, 3, 3]

    @pytest.mark.parametrize("options", [{}, {"compile": {"backend": "eager"}}], ids=["eager", "compiled"])
    def test_keyword_arguments_of_any_name(self, options, form, slots, batch, root):
        names = ["function", "module", "original", "method", "call", "slot", "args", "kwargs"]

        class Named(Affine):
            def forward(self, x, **given):
                return super().forward(x, scale=sum(given[name] for name in names))

        module, given = Named().double().to(root), dict.fromkeys(names, 2.0)
        expected = module(batch, **given)
        torch.testing.assert_close(form(module, slots, **options)(batch, **given), expected)

    def test_chunks_of_another_dimension(self, form, slots, root):
        module = nn.Linear(4, 3).double().to(root)
        x = torch.randn(5, 7, 4, dtype=torch.float64, device=root)
        expected = module(x)
        torch.testing.assert_close(form(module, slots, dim=1)(x), expected)

    def test_uneven_chunks_with_the_loss_on_the_replicas_need_their_weights(self, form, slots, root):
        class WithLoss(nn.Linear):
            def forward(self, x, y):
                return (super().forward(x) - y).square().mean() * len(x)

        module = WithLoss(4, 1).double().to(root)
        x, y = (torch.randn(7, width, dtype=torch.float64, device=root) for width in (4, 1))
        expected = module(x, y) / len(x)
        loss = form(module, slots, chunk_sizes=[1, 4, 2])(x, y).sum() / len(x)
        assert loss.dim() == 0
        torch.testing.assert_close(loss, expected)


class Doubling(nn.Linear):
    """Changes what ``forward`` returns."""

    def __call__(self, x):
        return 2 * super().__call__(x)


@pytest.mark.parametrize("options", [{}, {"compile": {"backend": "aot_eager"}}], ids=["eager", "compiled"])
def test_an_overridden_call_runs_once(options, form, slots, root):
    module = Doubling(4, 3).double().to(root)
    x = torch.randn(7, 4, dtype=torch.float64, device=root)
    expected = module(x).detach()
    called = form(module, slots, **options)
    for _ in range(2):
        torch.testing.assert_close(called(x).detach(), expected)


class Decoder(nn.Module):
    """Computes as many steps as its longest sample needs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3, dtype=torch.float64))

    def forward(self, x, lengths):
        steps = [x @ self.weight * step for step in range(1, int(lengths.max()) + 1)]
        ids = torch.ones(len(x), len(steps), dtype=torch.int64, device=x.device)
        # A class of its own for each replica.
        return namedtuple("Output", "ids scores steps")(ids, torch.stack(steps, dim=1), tuple(steps))

    def generate(self, x, lengths):
        return self.forward(x, lengths)._asdict()

    def stream(self, x):
        yield x

    async def later(self, x):
        return x


class TestOutputsOfOtherLengths:
    @pytest.fixture
    def inputs(self, root, batch):
        return batch[:, :3].contiguous(), torch.tensor([2, 1, 1, 1, 3, 1, 1], device=root)  # 2, 3, 1 in the chunks

    @pytest.fixture
    def decoder(self, root):
        return Decoder().to(root)

    @pytest.mark.parametrize("output_device", [None, "cpu"])
    def test_are_filled(self, form, slots, inputs, decoder, output_device):
        pad = {"ids": 9, "scores": 0.0, "steps": 0.0}
        expected = decoder(*inputs)
        found = form(copy.deepcopy(decoder), slots, pad=pad, output_device=output_device)(*inputs)
        assert found.ids.tolist() == [[1, 1, 9]] * 3 + [[1, 1, 1]] * 3 + [[1, 9, 9]]
        rows = [2] * 3 + [3] * 3 + [1]
        for row, count in enumerate(rows):
            for scores in (found.scores[row], torch.stack(found.steps, 1)[row]):
                torch.testing.assert_close(scores[:count], expected.scores[row, :count], check_device=False)
                assert scores[count:].tolist() == [0.0] * (3 - count)

    def test_gradients_are_those_of_one_device(self, form, slots, inputs, decoder):
        model = form(copy.deepcopy(decoder), slots, pad=-1)
        found, mask = model(*inputs), torch.tensor([2, 2, 2, 3, 3, 3, 1], device=inputs[0].device)
        (found.scores.square().sum() + found.steps[2].sum()).backward()
        expected = decoder(*inputs)
        is_there = torch.arange(3, device=mask.device) < mask[:, None]
        (torch.where(is_there, expected.scores.square(), 0).sum() + expected.steps[2][mask == 3].sum()).backward()
        (parameter,) = model.parameters()
        torch.testing.assert_close(whole(parameter.grad), decoder.weight.grad)

    def test_without_a_value_the_error_names_it(self, form, slots, inputs, decoder):
        with pytest.raises(
            ValueError, match=r"output\.ids: replica 0 has shape \(3, 2\).*; the argument pad=NUMBER of"
        ):
            form(decoder, slots)(*inputs)

    @composable_forms
    def test_a_method_has_its_own_value(self, form, slots, inputs, decoder):
        model = form(decoder, slots, pad=3)
        register_forward_method(model, "generate")
        assert model.generate(*inputs)["ids"][-1].tolist() == [1, 3, 3], "that of the form"
        register_forward_method(model, "generate", pad={"ids": 5, "scores": 0, "steps": 0})
        assert model.generate(*inputs)["ids"][-1].tolist() == [1, 5, 5]
        assert model(*inputs).ids[-1].tolist() == [1, 3, 3]
        with pytest.raises(TypeError, match="pad='max': expected a number"):
            register_forward_method(model, "generate", pad="max")
        assert model.generate(*inputs)["ids"][-1].tolist() == [1, 5, 5]


class TestCodeThatRunsLater:
    @composable_forms
    @pytest.mark.parametrize("name", ["stream", "later"])
    def test_is_no_forward_method(self, form, slots, root, name):
        model = form(Decoder().to(root), slots)
        with pytest.raises(
            TypeError, match=f"'{name}' of this Decoder is a generator function or a coroutine function"
        ):
            register_forward_method(model, name)
        assert next(iter(model.stream(3))) == 3, "it runs as before"

    @pytest.mark.usefixtures("warnings_are_errors")
    @pytest.mark.parametrize("name", ["stream", "later"])
    def test_is_no_output(self, form, slots, root, batch, name):
        class Later(Decoder):
            forward = getattr(Decoder, name)

        with pytest.raises(
            TypeError, match=r"replica 0 returned (generator|coroutine), which gives its values when the call"
        ):
            form(Later().to(root), slots)(batch)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_a_transform_around_a_call_is_refused_before_anything_runs(transform, form, slots, root):
    model, x = form(nn.Linear(4, 2).to(root), slots), torch.ones(3, 4, device=root)
    around = {
        "vmap": lambda: torch.func.vmap(model)(x.unsqueeze(0)),
        "grad": lambda: torch.func.grad(lambda x: model(x).sum())(x),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
    }
    with pytest.raises(RuntimeError, match=r"replicas cannot run here: a torch\.func transform"):
        around[transform]()
    model(x).sum().backward()


class TestWhatReplicasWouldShare:
    """The stage ``scatter`` has the rest."""

    def test_is_refused_before_they_run(self, form, slots, root, batch):
        ran = []
        model = form(Called(lambda *args: ran.append(args)).to(root), slots)
        for shared in ((row for row in batch), SimpleNamespace(targets=batch)):
            with pytest.raises(ValueError, match=rf"args\[1\] is one {type(shared).__name__} for 3 replicas"):
                model(batch, shared)
        assert ran == []

    @pytest.mark.usefixtures("nothing_said")
    def test_is_said_if_it_may_be_a_batch(self, form, slots, root, batch):
        model = form(Called(lambda x, names: x).to(root), slots)
        with pytest.warns(UserWarning, match=r"args\[1\] is a list of length 7.*samples\(list\)") as caught:
            model(batch, list("abcdefg"))
        assert [each.filename for each in caught if "samples(list)" in str(each.message)] == [__file__]


class TestFewSlots:
    @replicating_forms
    def test_a_single_slot_runs_the_module_itself(self, affine, form, root, batch):
        model, seen = form(affine, [root], output_device="cpu"), []
        affine.linear.register_forward_hook(lambda module, args, output: seen.append(module))
        assert model(batch).device.type == "cpu"
        assert seen == [affine.linear]

    def test_without_accelerators_the_module_is_just_called(self, affine, form, batch, monkeypatch):
        monkeypatch.setattr("dataparallel.devices.all_devices", list)
        parameters, expected = [*affine.parameters()], affine(batch)
        affine.sizes.clear()
        torch.testing.assert_close(form(affine)(batch), expected)
        assert affine.sizes == [7]
        assert [*map(id, affine.parameters())] == [*map(id, parameters)]


class TestTheModuleAtTheCall:
    def test_may_have_been_materialised_since(self, form, slots, root):
        module = nn.Linear(4, 3, device="meta")
        model = form(module, slots)
        with pytest.raises(RuntimeError, match="meta"):
            model(torch.ones(7, 4, device=root))
        module.to_empty(device=root)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(1.0)
        torch.testing.assert_close(model(torch.ones(7, 4, device=root)), torch.full((7, 3), 5.0, device=root))

    @replicating_forms
    def test_may_have_other_layers_modes_and_parameters(self, affine, form, slots, batch):
        model = form(affine, slots)
        model(batch)
        affine.linear = nn.Linear(4, 2).double().to(batch.device)
        affine.eval()
        assert model(batch).shape == (7, 2)
        affine.linear.weight = nn.Parameter(torch.ones_like(affine.linear.weight))
        affine.linear.bias.requires_grad_(False)
        output = model(batch)
        torch.testing.assert_close(output, affine.linear(batch))
        output.sum().backward()
        assert affine.linear.bias.grad is None
        torch.testing.assert_close(affine.linear.weight.grad, batch.sum(0).expand(2, 4))

    def test_is_freed_with_the_form(self, affine, form, slots, batch):
        model = form(nn.Sequential(affine), slots)
        model(batch).sum().backward()
        gc.collect()
        gc.disable()
        try:
            gone = weakref.ref(model)
            del model
            assert gone() is None
        finally:
            gc.enable()


class TestHooks:
    def test_on_the_model_run_once_on_the_whole_batch(self, affine, form, slots, batch):
        model, seen = form(affine, slots), []
        model.register_forward_pre_hook(lambda module, args: seen.append(("pre", module, len(args[0]))))
        model.register_forward_hook(lambda module, args, output: seen.append(("forward", module, len(output))))
        model.register_full_backward_hook(lambda module, ins, outs: seen.append(("backward", module, len(outs[0]))))
        model(batch.requires_grad_()).sum().backward()
        assert seen == [("pre", model, 7), ("forward", model, 7), ("backward", model, 7)]

    def test_on_parameters_see_the_penalties_in_a_loss_and_the_outputs_together(self, form, slots, root, batch):
        def two_steps(module, call):
            seen = []
            for parameter in (parameters := [*module.parameters()]):
                parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
                parameter.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.shape)))
            for _ in range(2):
                before = sum(p.square().sum() for p in parameters)
                (call(batch).square().sum() + before + 3 * sum(p.sum() for p in parameters)).backward()
            return [whole(p.grad) for p in parameters], sorted(seen)

        module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double().to(root)
        expected = two_steps(one := copy.deepcopy(module), one)
        call = form(module, slots)
        found = two_steps(module, call)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] == expected[1]


class Failing(Affine):
    fails = True

    def forward(self, x, **kwargs):
        if self.fails and len(x) == 1:
            raise KeyError("odd")
        return super().forward(x, **kwargs)


class TestErrors:
    @pytest.mark.parametrize("where", ["in a replica", "before the replicas"])
    def test_a_call_that_fails_leaves_the_module_as_it_was(self, form, slots, root, batch, where):
        torch.manual_seed(0)
        module = Failing().double().to(root)
        twin = copy.deepcopy(module)
        twin.fails = False
        model = form(module, slots)
        before = {name: whole(value).clone() for name, value in module.linear.state_dict().items()}
        if where == "in a replica":
            with pytest.raises(KeyError, match="odd"):
                model(batch)
        else:
            with pytest.raises(ValueError, match="batch sizes disagree"):
                model(batch, offset=batch[:3])
        assert all(torch.equal(whole(value), before[name]) for name, value in module.linear.state_dict().items())
        module.fails = False
        torch.testing.assert_close(model(batch), twin(batch))

    @replicating_forms
    def test_a_parameter_on_meta_is_named(self, affine, form, slots, batch, root):
        affine.linear.bias = nn.Parameter(torch.empty(3, device="meta"))
        with pytest.raises(
            RuntimeError, match=r"device: meta.* parameter 'linear\.bias'.* materialise it first"
        ) as caught:
            form(affine, slots)(batch)
        assert f"module.to_empty(device='{root}')" in str(caught.value)


class TestRefused:
    @pytest.mark.parametrize("what", [3, lambda x: x, nn.Linear], ids=["int", "function", "class"])
    def test_what_is_no_module(self, form, slots, what):
        with pytest.raises(TypeError, match=r"(wraps|takes) a torch\.nn\.Module"):
            form(what, slots)

    @pytest.mark.parametrize("wrapper", [dp.DataParallel, nn.DataParallel])
    def test_a_wrapper(self, affine, form, slots, wrapper):
        wrapped = wrapper(affine, slots) if wrapper is dp.DataParallel else wrapper(affine)
        with pytest.raises(TypeError, match=r"(wrap|replicate|shard) its \.module instead"):
            form(wrapped, slots)
