"""`DataParallel` and `data_parallel` keep the promises of ``torch.nn.DataParallel``, and their own."""

import copy
import inspect
import io
import pickle
from abc import ABC, abstractmethod

import numpy
import pytest
import torch
from torch import nn

import dataparallel as dp
from dataparallel import DataParallel, data_parallel


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

    @pytest.mark.devices("sim", "cuda")
    @pytest.mark.parametrize("kind", [numpy.array, torch.tensor, lambda ids: [numpy.int64(i) for i in ids]])
    def test_device_ids_are_what_python_takes_for_an_index(self, affine, slots, root, batch, kind):
        ids = [torch.device(slot).index for slot in slots]
        model = DataParallel(affine, device_ids=kind(ids), output_device=kind(ids)[1])
        assert model.device_ids == ids
        assert type(model.output_device) is int
        assert model(batch).device == torch.device(root.type, ids[1])

    def test_other_bases_of_a_subclass_are_initialised(self, affine, slots, batch):
        class Named(ABC, nn.Module):
            def __init__(self):
                super().__init__()
                self.name = self.own_name()

            @abstractmethod
            def own_name(self): ...

        class Wrapper(DataParallel, Named):
            def own_name(self):
                return "wrapper"

        wrapper = Wrapper(affine, slots)
        torch.testing.assert_close(wrapper(batch), affine(batch))
        assert wrapper.name == "wrapper"

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
    def test_attribute_of_the_module(self, affine, slots):
        wrapped = DataParallel(affine, slots)
        with pytest.raises(AttributeError, match=r"write \.module\.width"):
            _ = wrapped.width
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = wrapped.nothing
        assert not hasattr(wrapped, "width")

    @pytest.mark.parametrize("name", ["no_sync", "register_comm_hook"])
    def test_what_only_ddp_has_is_named_with_what_to_do(self, name, affine, slots):
        wrapped = DataParallel(affine, slots)
        with pytest.raises(AttributeError, match=rf"composable\.replicate\(model\), which has {name}"):
            getattr(wrapped, name)
        assert not hasattr(wrapped, name)
