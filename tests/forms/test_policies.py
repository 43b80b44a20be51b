"""The policies of `fully_shard` have torch's fields and defaults, and refuse what they cannot mean."""

import dataclasses

import pytest
import torch
import torch.distributed.fsdp as theirs

from dataparallel import composable
from dataparallel.composable import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


@pytest.mark.parametrize("name", ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"])
def test_fields_and_defaults_are_those_of_torch(name):
    def fields(cls):
        return [(field.name, field.default) for field in dataclasses.fields(cls)]

    ours = fields(getattr(composable, name))
    assert ours == fields(getattr(theirs, name))[: len(ours)]  # torch 2.15 has one more


def test_offloading_to_the_cpu_is_an_offload_policy():
    assert isinstance(CPUOffloadPolicy(), OffloadPolicy)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(torch.bfloat16), OffloadPolicy(), CPUOffloadPolicy()])
def test_a_policy_does_not_change_and_equals_another_like_it(policy):
    assert policy == dataclasses.replace(policy)
    assert hash(policy) == hash(dataclasses.replace(policy))
    for name in ("param_dtype", "pin_memory"):
        if hasattr(policy, name):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(policy, name, None)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
class TestDtypes:
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_floating_point_ones_are_taken(self, name, dtype):
        assert getattr(MixedPrecisionPolicy(**{name: dtype}), name) is dtype

    @pytest.mark.parametrize("dtype", ["bfloat16", 16, True])
    def test_what_is_no_dtype(self, name, dtype):
        with pytest.raises(TypeError, match=rf"^{name}={dtype!r}: expected a torch\.dtype"):
            MixedPrecisionPolicy(**{name: dtype})

    @pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
    def test_one_that_is_not_floating_point(self, name, dtype):
        with pytest.raises(ValueError, match=f"^{name}={dtype}: expected a floating-point dtype"):
            MixedPrecisionPolicy(**{name: dtype})


@pytest.mark.parametrize(
    ("cls", "name"), [(MixedPrecisionPolicy, "cast_forward_inputs"), (CPUOffloadPolicy, "pin_memory")]
)
@pytest.mark.parametrize("value", [None, 1, "no"])
def test_flags_are_bools(cls, name, value):
    with pytest.raises(TypeError, match=f"^{name}={value!r}: expected True or False"):
        cls(**{name: value})
