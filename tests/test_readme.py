"""The README's examples do what they say, on CPU slots where there is no accelerator."""

import dataclasses
import os
import re
import textwrap
from pathlib import Path

import pytest
import torch

import dataparallel

README = Path(__file__).parents[1] / "README.rst"


def examples() -> list[str]:
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", README.read_text(encoding="utf-8"))
    return [textwrap.dedent(block) for block in blocks]


def example(word: str) -> str:
    (found,) = [block for block in examples() if word in block]
    return found


def test_the_complete_example_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example("the line that matters"), names)
    assert names["loss"] < 5
    assert os.listdir(tmp_path) == ["model.pt"]


def test_the_uneven_example_is_the_loss_of_one_device():
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1).double()
    x, y = torch.randn(64, 20, dtype=torch.float64), torch.randn(64, 1, dtype=torch.float64)
    names = {"nn": torch.nn, "DataParallel": dataparallel.DataParallel, "model": model, "x": x, "y": y}
    exec(example("chunk_sizes=[24, 40]"), names)
    torch.testing.assert_close(names["loss"], torch.nn.functional.mse_loss(model(x), y), rtol=0, atol=1e-12)


def test_the_serving_example_answers_like_one_device():
    model, answers = torch.nn.Linear(20, 1), []
    requests = [torch.randn(6, 20) for _ in range(3)]
    wrapped = dataparallel.DataParallel(model, ["cpu", "cpu"])
    exec(example("model.frozen()"), {"torch": torch, "model": wrapped, "requests": requests, "answer": answers.append})
    torch.testing.assert_close(answers, [model(batch) for batch in requests])


def test_the_generation_example_is_that_of_one_device():
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        past_key_values: object

    class Cache:
        def __init__(self, total):
            self.total = total

    class Model(torch.nn.Module):
        """Each token depends on the sum of all before, which only the cache knows."""

        def forward(self, ids, past_key_values, use_cache):
            totals = ids.cumsum(1) + (0 if past_key_values is None else past_key_values.total)
            return Output(torch.nn.functional.one_hot(totals * 7 % 11, 11), Cache(totals[:, -1:]))

    found = []
    for model in (Model(), dataparallel.DataParallel(Model(), ["cpu", "cpu"])):
        names = {"torch": torch, "model": model, "ids": torch.arange(10).reshape(5, 2)}
        exec(example("greedy generation"), names)
        found.append(names["ids"].tolist())
    assert found[0] == found[1]
    assert len(found[0][0]) == 22
    assert type(names["cache"]) is dataparallel.PerReplica


def test_the_example_of_replicas_that_stay_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example("composable import replicate"), names)
    assert names["loss"] * 4 < 15
    assert list(names["model"].state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert os.listdir(tmp_path) == ["model.pt"]


@pytest.mark.slots(4)
def test_the_example_of_routes_is_the_loss_of_one_device(slots, root):
    model, x = torch.nn.Linear(20, 1).double().to(root), torch.randn(64, 20, dtype=torch.float64, device=root)
    names = {"model": dataparallel.DataParallel(model, slots), "x": x}
    exec(example('route="star"'), names)
    expected = model(x).square().mean()
    (gradient,) = torch.autograd.grad(expected, [model.weight])
    torch.testing.assert_close(names["loss"], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.weight.grad, gradient, rtol=0, atol=1e-12)


def test_the_example_of_a_loader_learns():
    torch.manual_seed(0)
    names: dict = {}
    exec(example("prefetch(loader, model)"), names)
    assert names["loss"] < 0.1


@pytest.mark.devices("sim")
@pytest.mark.slots(8)
def test_the_example_of_counts_counts_so(slots):
    exec(example("torch.sim.counted()"), {"torch": torch, "x": torch.ones(3, device="sim:1")})


def test_the_profiling_example_records_the_replicas(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"model": dataparallel.DataParallel(torch.nn.Linear(20, 1), ["cpu", "cpu"]), "x": torch.randn(6, 20)}
    exec(example("profile_all_threads=True"), names)
    assert {"dataparallel::replica 0", "dataparallel::replica 1"} <= {
        event.name for event in names["recorded"].events()
    }
    assert os.listdir(tmp_path) == ["step.json"]


def test_every_example_is_valid_python():
    assert len(examples()) == 14
    for block in examples():
        compile(block, "README.rst", "exec")


@pytest.mark.parametrize("name", ["tests", "main job"])
def test_commands_are_where_other_tools_look_for_them(name):
    assert re.search(rf"^\.\. command: {name}\n\n\.\. code-block:: bash\n\n    pip install", README.read_text(), re.M)
