"""The bucket that a communication hook gets, and the checks of what the hook returns."""

import pytest
import torch
from torch import nn
from torch.futures import Future

from dataparallel.gradients.comm_hooks import CommHook, GradBucket

pytestmark = pytest.mark.devices("cpu")  # what is checked is the same on all kinds


@pytest.fixture
def bucket(root: torch.device) -> GradBucket:
    """The second of three buckets: six numbers for a matrix, one for a scalar."""
    matrix, scalar = nn.Parameter(torch.zeros(2, 3, device=root)), nn.Parameter(torch.zeros((), device=root))
    return GradBucket(1, 3, torch.arange(7.0, device=root), [matrix, scalar], ["a.weight", "b"])


def done(value: object) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def called(hook: object, bucket: GradBucket) -> torch.Tensor:
    registered = CommHook(None, hook)  # type: ignore[arg-type]
    return bucket.owned(registered.value(bucket, registered.call(bucket)))


class TestTheBucket:
    def test_has_views_of_its_buffer_with_the_parameters_shapes(self, bucket):
        gradients = bucket.gradients()
        assert [each.shape for each in gradients] == [each.shape for each in bucket.parameters()]
        gradients[0][1, 2] = 50
        gradients[1].fill_(60)
        assert bucket.buffer().tolist() == [0, 1, 2, 3, 4, 50, 60]

    def test_has_views_of_the_buffer_that_was_set(self, bucket):
        bucket.set_buffer(bucket.buffer().to(torch.float16) + 1)
        assert bucket.buffer().dtype == torch.float16
        assert bucket.gradients()[0].tolist() == [[1, 2, 3], [4, 5, 6]]

    def test_refuses_a_buffer_that_is_no_tensor(self, bucket):
        with pytest.raises(TypeError, match=r"buffer=\[.*: expected a torch.Tensor"):
            bucket.set_buffer([1.0])

    def test_has_no_views_of_a_buffer_of_another_size(self, bucket):
        bucket.set_buffer(bucket.buffer()[:3])
        with pytest.raises(RuntimeError, match=r"bucket 1 of 3 .*the shape \[3\] since set_buffer.*7 elements"):
            bucket.gradients()


class TestWhatAHookLeaves:
    def test_is_the_buffer_that_it_has_changed(self, bucket):
        def twice(state, bucket):
            return done(bucket.buffer().mul_(2))

        assert called(twice, bucket) is bucket.buffer()

    def test_is_in_memory_of_its_own_else(self, bucket):
        """A hook may keep its tensor for the next step."""
        kept = torch.ones_like(bucket.buffer())
        found = called(lambda state, bucket: done(kept), bucket)
        kept.zero_()
        assert found.tolist() == [1] * 7

    def test_may_be_the_list_of_one_tensor_that_a_collective_has(self, bucket):
        assert called(lambda state, bucket: done([bucket.buffer()]), bucket) is bucket.buffer()

    def test_may_have_the_dtype_of_the_buffer_that_it_has_set(self, bucket):
        def compressed(state, bucket):
            bucket.set_buffer(bucket.buffer().to(torch.float16))
            return done(bucket.buffer())

        found = called(compressed, bucket)
        assert found.dtype == torch.float32
        assert found.tolist() == [*range(7)]

    def test_is_not_part_of_a_graph(self, bucket):
        def recorded(state, bucket):
            assert not torch.is_grad_enabled()
            with torch.enable_grad():
                return done(bucket.buffer() * torch.ones(7, device=bucket.buffer().device, requires_grad=True))

        assert not called(recorded, bucket).requires_grad


def fails(state: object, bucket: GradBucket) -> Future:
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("hook", "error", "what"),
    [
        (fails, RuntimeError, "KeyError: 'gone'"),
        (lambda state, bucket: done(1).then(lambda _: fails(state, bucket)), RuntimeError, "gone"),
        (lambda state, bucket: bucket.buffer(), TypeError, "has returned a Tensor"),
        (lambda state, bucket: done(None), TypeError, "has None"),
        (lambda state, bucket: done([bucket.buffer(), bucket.buffer()]), TypeError, "has a list"),
        (lambda state, bucket: done(bucket.buffer()[1:]), ValueError, r"the shape \[6\] instead of \[7\]"),
        (lambda state, bucket: done(bucket.buffer().view(7, 1)), ValueError, r"the shape \[7, 1\] instead of \[7\]"),
        (lambda state, bucket: done(bucket.buffer().half()), ValueError, "torch.float16 instead of torch.float32"),
        (lambda state, bucket: done(bucket.buffer().to("meta")), ValueError, "the device meta instead of"),
    ],
)
def test_what_is_wrong_is_said_with_the_hook_and_the_bucket(hook, error, what, bucket):
    where = r"bucket 1 of 3 \('a.weight' and 1 more, 7 x torch.float32\)"
    with pytest.raises(error, match=rf"communication hook {hook.__name__} .*{where}") as found:
        called(hook, bucket)
    found.match(what)
    assert hook is not fails or isinstance(found.value.__cause__, KeyError)
