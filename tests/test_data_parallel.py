"""`DataParallel` and `data_parallel` keep the promises of ``torch.nn.DataParallel``, and their own."""

import _thread
import copy
import inspect
import io
import pickle
import threading
import time

import pytest
import torch
from torch import nn

import dataparallel as dp
from affine import build_affine
from dataparallel import DataParallel, data_parallel
from nets import samples


@pytest.fixture
def affine(root):
    return build_affine(root)


@pytest.fixture
def batch(root):
    return samples(root)


class TestDropIn:
    @pytest.mark.parametrize(
        "name", ["DataParallel", "data_parallel", "replicate", "parallel_apply", "scatter", "gather"]
    )
    def test_signature_begins_like_torchs_and_adds_only_keywords(self, name):
        ours = list(inspect.signature(getattr(dp, name)).parameters.values())
        theirs = list(inspect.signature(getattr(nn.parallel, name)).parameters.values())
        assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
        assert [p.default for p in ours[: len(theirs)]] == [p.default for p in theirs]
        assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])

    def test_is_torchs_class_for_isinstance_and_nothing_of_it_is_inherited(self):
        assert issubclass(DataParallel, nn.DataParallel)
        torchs = {name for name, value in vars(nn.DataParallel).items() if inspect.isfunction(value)}
        assert torchs <= vars(DataParallel).keys()

    def test_state_dict_has_torchs_keys(self, affine, slots):
        wrapped = DataParallel(affine, slots)
        assert list(wrapped.state_dict()) == [f"module.{key}" for key in affine.state_dict()]

    def test_attributes_that_code_reads(self, affine, slots, root):
        wrapped = DataParallel(affine, slots, dim=1)
        assert wrapped.module is affine
        assert wrapped.dim == 1
        assert wrapped.src_device_obj == root
        shown = root if root.type == "cpu" else root.index
        assert wrapped.output_device == shown
        assert wrapped.device_ids[0] == shown
        assert len(wrapped.device_ids) == len(slots)

    def test_stages_are_methods_that_can_be_overridden(self, affine, slots, batch):
        seen = []

        class Traced(DataParallel):
            def scatter(self, *args):
                seen.append("scatter")
                return super().scatter(*args)

            def replicate(self, *args):
                seen.append("replicate")
                return super().replicate(*args)

            def parallel_apply(self, *args):
                seen.append("parallel_apply")
                return super().parallel_apply(*args)

            def gather(self, *args):
                seen.append("gather")
                return super().gather(*args)

        torch.testing.assert_close(Traced(affine, slots)(batch), affine(batch))
        assert seen == ["scatter", "replicate", "parallel_apply", "gather"]

    def test_pickles_and_copies(self, affine, slots, batch):
        wrapped = DataParallel(affine, slots)
        expected = wrapped(batch)
        torch.testing.assert_close(copy.deepcopy(wrapped)(batch), expected)
        torch.testing.assert_close(pickle.loads(pickle.dumps(wrapped))(batch), expected)
        file = io.BytesIO()
        torch.save(wrapped.state_dict(), file)
        file.seek(0)
        wrapped.load_state_dict(torch.load(file))


class TestCall:
    def test_keyword_and_whole_arguments(self, affine, slots, batch):
        offset = torch.randn(1, 3, dtype=torch.float64, device=batch.device)
        output = DataParallel(affine, slots)(batch, scale=2.0, offset=dp.whole(offset))
        torch.testing.assert_close(output, affine(batch, scale=2.0, offset=offset))

    def test_output_device_cpu(self, affine, slots, batch):
        for output_device in ("cpu", -1, torch.device("cpu")):
            assert DataParallel(affine, slots, output_device=output_device)(batch).device.type == "cpu"

    def test_dim_one(self, slots, root):
        module = nn.Linear(4, 3).double().to(root)
        x = torch.randn(5, 7, 4, dtype=torch.float64, device=root)
        torch.testing.assert_close(DataParallel(module, slots, dim=1)(x), module(x))

    def test_chunk_sizes_are_what_the_replicas_get(self, slots, root):
        sizes = []

        class Sizes(nn.Module):
            def forward(self, x):
                sizes.append(len(x))
                return x

        wrapped = DataParallel(Sizes(), slots, chunk_sizes=[1, 4, 2])
        wrapped(torch.zeros(7, 1, device=root))
        assert sorted(sizes) == [1, 2, 4]
        wrapped.chunk_sizes = [2, 2, 2]
        with pytest.raises(ValueError, match="add up to 6, but the batch has 7"):
            wrapped(torch.zeros(7, 1, device=root))

    def test_uneven_chunks_with_the_loss_on_the_replicas_need_their_weights(self, slots, root):
        class WithLoss(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 1)

            def forward(self, x, y):
                return (self.linear(x) - y).square().mean() * len(x)

        model = WithLoss().double().to(root)
        x = torch.randn(7, 4, dtype=torch.float64, device=root)
        y = torch.randn(7, 1, dtype=torch.float64, device=root)
        loss = DataParallel(model, slots, chunk_sizes=[1, 4, 2])(x, y).sum() / len(x)
        assert loss.dim() == 0
        torch.testing.assert_close(loss, model(x, y) / len(x))

    def test_scalars_become_a_vector(self, slots, root):
        class Mean(nn.Module):
            def forward(self, x):
                return x.mean()

        assert DataParallel(Mean(), slots)(torch.ones(7, 2, device=root)).shape == (3,)

    def test_no_arguments_run_one_replica(self, slots, root):
        class Constant(nn.Module):
            def forward(self):
                return torch.ones(2, device=root)

        assert DataParallel(Constant(), slots)().shape == (2,)

    def test_single_slot_calls_the_module_itself(self, affine, root, batch):
        wrapped = DataParallel(affine, [root])
        wrapped(batch)
        assert affine.calls == 1
        assert DataParallel(nn.Flatten(0), [root], output_device="cpu")(batch).device.type == "cpu"

    def test_without_accelerator_the_module_is_just_called(self, affine, batch, monkeypatch):
        monkeypatch.setattr("dataparallel.devices.all_devices", list)
        wrapped = DataParallel(affine)
        assert wrapped.device_ids == []
        torch.testing.assert_close(wrapped(batch), affine(batch))

    def test_module_may_be_moved_after_it_was_wrapped(self, slots, root):
        module = nn.Linear(4, 3, device="meta")
        wrapped = DataParallel(module, slots)
        module.to_empty(device=root)
        assert wrapped(torch.zeros(7, 4, device=root)).shape == (7, 3)

    def test_buffers_changed_in_place_on_slot_0_stay(self, affine, slots, batch):
        wrapped = DataParallel(affine, slots)
        wrapped(batch)
        wrapped(batch)
        assert affine.calls == 2

    def test_torch_compile_around_the_call_runs_the_same_numbers(self, affine, slots, batch):
        wrapped = DataParallel(affine, slots)
        compiled = torch.compile(lambda x: wrapped(x * 2) + 1, backend="eager")
        torch.testing.assert_close(compiled(batch), affine(batch * 2) + 1)


class TestFunctional:
    def test_equals_the_module(self, affine, slots, batch):
        output = data_parallel(affine, batch, slots, module_kwargs={"scale": 3.0})
        torch.testing.assert_close(output, affine(batch, scale=3.0))
        torch.testing.assert_close(data_parallel(affine, (batch,), slots), affine(batch))

    def test_no_accelerator_and_no_slots_is_an_error(self, affine, batch, monkeypatch):
        monkeypatch.setattr("dataparallel.devices.all_devices", list)
        with pytest.raises(RuntimeError, match="device_ids="):
            data_parallel(affine, batch)


class TestErrors:
    def test_parameter_on_the_wrong_device(self, affine, slots, batch, root):
        affine.linear.bias = nn.Parameter(torch.empty(3, device="meta"))
        with pytest.raises(RuntimeError) as caught:
            DataParallel(affine, slots)(batch)
        for word in ("'linear.bias'", "meta", f"module.to_empty(device='{root}')"):
            assert word in str(caught.value)

    def test_buffer_on_the_wrong_device(self, affine, slots, batch):
        affine.calls = torch.empty((), device="meta")
        with pytest.raises(RuntimeError, match=r"on device: meta\. It is buffer 'calls'"):
            DataParallel(affine, slots)(batch)

    @pytest.mark.parametrize("wrapper", [DataParallel, nn.DataParallel])
    def test_wrapping_a_wrapper(self, affine, slots, wrapper):
        wrapped = wrapper(affine, slots) if wrapper is DataParallel else wrapper(affine)
        with pytest.raises(TypeError, match=r"wrap its \.module instead"):
            DataParallel(wrapped, slots)

    def test_no_module(self, slots):
        with pytest.raises(TypeError, match=r"wraps a torch\.nn\.Module; got function"):
            DataParallel(lambda x: x, slots)

    def test_attribute_of_the_module(self, affine, slots):
        wrapped = DataParallel(affine, slots)
        with pytest.raises(AttributeError, match=r"write \.module\.width"):
            _ = wrapped.width
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = wrapped.nothing
        assert not hasattr(wrapped, "width")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"device_ids": []}, "empty"),
            ({"device_ids": ["cpu", "meta"]}, "meta"),
            ({"device_ids": ["nonsense"]}, "nonsense"),
            ({"output_device": "meta"}, "meta"),
            ({"workers": 0}, "workers=0"),
        ],
    )
    def test_what_the_constructor_refuses(self, slots, arguments, message):
        module = nn.Linear(1, 1)
        with pytest.raises(ValueError, match=message):
            DataParallel(module, **{"device_ids": slots, **arguments})

    def test_a_functorch_transform_around_the_call(self, affine, slots, batch):
        wrapped = DataParallel(affine, slots)
        with pytest.raises(RuntimeError, match=r"torch\.func transform"):
            torch.func.vmap(wrapped)(batch.unsqueeze(1))
        torch.testing.assert_close(wrapped(batch), affine(batch))

    def test_a_call_that_fails_leaves_the_module_as_it_was(self, affine, slots, batch):
        wrapped = DataParallel(affine, slots)
        before = copy.deepcopy(affine.state_dict())
        with pytest.raises(ValueError, match="batch sizes disagree"):
            wrapped(batch, offset=batch[:3])
        assert all(torch.equal(value, before[key]) for key, value in affine.state_dict().items())
        torch.testing.assert_close(wrapped(batch), affine(batch))

    @pytest.mark.usefixtures("ctrl_c")
    def test_ctrl_c_waits_for_the_replicas_and_the_same_wrapper_works_again(self, slots, root):
        began, may_end = threading.Event(), threading.Event()

        class Slow(nn.Module):
            def forward(self, x):
                began.set()
                assert may_end.wait(20)
                return x

        def press():
            assert began.wait(20)
            _thread.interrupt_main()
            time.sleep(0.3)  # longer than a waiting thread takes to notice the signal
            may_end.set()

        wrapped = DataParallel(Slow(), slots)
        x = torch.zeros(6, 1, device=root)
        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            wrapped(x)
        presser.join()
        torch.testing.assert_close(wrapped(x), x)
