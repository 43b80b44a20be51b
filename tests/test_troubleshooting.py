"""The page of errors: each of the commonest mistakes raises what the page quotes, and the row says what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate

PAGE = (Path(__file__).parents[1] / "docs" / "guide" / "troubleshooting.rst").read_text(encoding="utf-8")

Mistake = Callable[[list[Any], torch.device], object]


class Row(NamedTuple):
    """A row of the page's table. ``...`` in the error stands for what differs."""

    error: str
    why: str
    do: str


def rows() -> list[Row]:
    table = PAGE.partition("The commonest errors")[2].partition("\n   * - error")[2].partition("\n\nWithout")[0]
    cells = [[" ".join(cell.split()) for cell in row.split("\n     - ")] for row in table.split("\n   * - ")[1:]]
    return [Row(*row) for row in cells]


MISTAKES: dict[str, Mistake] = {}


def mistake(beginning: str) -> Callable[[Mistake], Mistake]:
    """Registers a mistake, by the beginning of the row's error."""

    def register(made: Mistake) -> Mistake:
        MISTAKES[beginning] = made
        return made

    return register


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, *further: Any) -> Any:
        return self.fc(x)


def batch(root: torch.device, samples: int = 6) -> Tensor:
    return torch.randn(samples, 4, device=root)


@mistake("module must have")
def a_model_that_was_not_moved(slots: list[Any], root: torch.device) -> object:
    return DataParallel(Net().to("meta" if root.type == "cpu" else "cpu"), slots)(batch(root))


@mistake("'DataParallel' object has no attribute '...', but")
def an_attribute_of_the_module(slots: list[Any], root: torch.device) -> object:
    return DataParallel(Net(), slots).fc


@mistake("'DataParallel' object has no attribute 'no_sync'")
def gradients_are_not_to_be_sent(slots: list[Any], root: torch.device) -> object:
    return DataParallel(Net(), slots).no_sync()


@mistake("Error(s) in loading state_dict for DataParallel: Missing")
def weights_saved_without_the_wrapper(slots: list[Any], root: torch.device) -> object:
    return DataParallel(Net(), slots).load_state_dict(Net().state_dict())


@mistake("Error(s) in loading state_dict for ...: Missing")
def weights_saved_with_the_wrapper(slots: list[Any], root: torch.device) -> object:
    return replicate(Net(), devices=slots).load_state_dict(DataParallel(Net(), slots).state_dict())


@mistake("Error(s) in loading state_dict for ...: ... Unexpected")
def a_whole_checkpoint(slots: list[Any], root: torch.device) -> object:
    return DataParallel(Net(), slots).load_state_dict({"epoch": 1, "model": Net().state_dict()})


@mistake("grad can be")
def a_vector_of_losses(slots: list[Any], root: torch.device) -> object:
    class Loss(Net):
        def forward(self, x: Tensor, *further: Any) -> Any:
            return self.fc(x).mean()

    return DataParallel(Loss().to(root), slots)(batch(root)).backward()


@mistake("batch sizes disagree along dimension ...: ... has ..., ... has ...; mark")
def a_table_beside_the_batch(slots: list[Any], root: torch.device) -> object:
    return DataParallel(Net().to(root), slots)(batch(root), torch.randn(5, device=root))


@mistake("batch sizes disagree along dimension ...: ... has its samples")
def the_state_of_an_lstm(slots: list[Any], root: torch.device) -> object:
    state = torch.zeros(1, 6, 3, device=root)
    return DataParallel(nn.LSTM(4, 3, batch_first=True).to(root), slots)(
        torch.randn(6, 5, 4, device=root), (state, state)
    )


@mistake("Expected more than")
def one_sample_for_each_slot(slots: list[Any], root: torch.device) -> object:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(root)
    return DataParallel(net, slots)(batch(root, len(slots)))


@mistake("Expected all tensors")
def a_mask_that_is_no_buffer(slots: list[Any], root: torch.device) -> object:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(3, device=root)

        def forward(self, x: Tensor, *further: Any) -> Any:
            return self.fc(x) * self.mask

    if len({*slots}) == 1:
        pytest.skip(f"the mask has to be elsewhere, and all slots are on {root}")
    return DataParallel(Masked().to(root), slots)(batch(root))


@mistake("'PerReplica' object")
def an_output_of_an_own_class(slots: list[Any], root: torch.device) -> object:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Returns(Net):
        def forward(self, x: Tensor, *further: Any) -> Any:
            return Output(self.fc(x))

    return DataParallel(Returns().to(root), slots)(batch(root)).logits


@mistake("cannot gather output...: replica ... has shape")
def outputs_of_different_lengths(slots: list[Any], root: torch.device) -> object:
    class Longest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, : int(x[0, 0])]

    return DataParallel(Longest(), slots)(torch.arange(1, 7, device=root).unsqueeze(1).expand(6, 8))


@mistake("cannot gather output...: replica ... returned a tensor")
def an_output_that_some_chunks_lack(slots: list[Any], root: torch.device) -> object:
    class Sometimes(Net):
        def forward(self, x: Tensor, *further: Any) -> Any:
            return self.fc(x) if len(x) > 1 else None

    return DataParallel(Sometimes().to(root), slots)(batch(root, 2 * len(slots) - 1))


@mistake("storage does not")
def the_memory_of_a_sharded_parameter(slots: list[Any], root: torch.device) -> object:
    return fully_shard(Net().to(root), devices=slots).fc.weight.storage()


@mistake("'...' does not exist")
def a_device_that_the_machine_lacks(slots: list[Any], root: torch.device) -> object:
    return DataParallel(Net(), [f"{root.type}:{number}" for number in range(100)])


@mistake("the module is wrapped")
def wrapped_twice(slots: list[Any], root: torch.device) -> object:
    return DataParallel(DataParallel(Net(), slots), slots)


@mistake("cannot replicate")
def a_wrapper_around_a_form(slots: list[Any], root: torch.device) -> object:
    return DataParallel(replicate(Net().to(root), devices=slots), slots)(batch(root))


@mistake("cannot deepcopy")
def a_copy_of_a_replicated_module(slots: list[Any], root: torch.device) -> object:
    return copy.deepcopy(replicate(Net(), devices=slots))


@mistake("... is a torch.nn.SyncBatchNorm")
def the_batch_norm_of_ddp(slots: list[Any], root: torch.device) -> object:
    return DataParallel(nn.Sequential(nn.SyncBatchNorm(4)), slots)


@mistake("chunk_sizes=")
def sizes_that_do_not_fit(slots: list[Any], root: torch.device) -> object:
    return DataParallel(Net().to(root), slots, chunk_sizes=[4, 4, 4])(batch(root))


@mistake("inside frozen()")
def training_inside_frozen(slots: list[Any], root: torch.device) -> object:
    model = DataParallel(Net().to(root), slots)
    with model.options.frozen():
        return model(batch(root))


@mistake("cannot set requires_grad=False")
def parameters_frozen_in_forward(slots: list[Any], root: torch.device) -> object:
    class Freezes(Net):
        def forward(self, x: Tensor, *further: Any) -> Any:
            self.fc.weight.requires_grad_(False)
            return self.fc(x)

    return DataParallel(Freezes().to(root), slots)(batch(root))


@mistake("... is one ... for")
def an_iterator_among_the_arguments(slots: list[Any], root: torch.device) -> object:
    return DataParallel(Net().to(root), slots)(batch(root), iter([1, 2, 3]))


@mistake("this ... holds")
def an_optimizer_that_was_made_too_early(slots: list[Any], root: torch.device) -> object:
    net = Net().to(root)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fully_shard(net, devices=slots)
    net(batch(root)).sum().backward()
    return optimizer.step()


@mistake("DataParallel wraps")
def the_wrapper_gets_an_optimizer(slots: list[Any], root: torch.device) -> object:
    return DataParallel(torch.optim.SGD(Net().parameters(), lr=0.1), slots)  # type: ignore[type-var]


@mistake("'...' object has no attribute 'module'")
def a_form_is_no_wrapper(slots: list[Any], root: torch.device) -> object:
    return replicate(Net(), devices=slots).module


@mistake("options.")
def a_name_that_is_no_option(slots: list[Any], root: torch.device) -> object:
    DataParallel(Net(), slots).options.chunk_size = [1, 2, 3]  # type: ignore[attr-defined]
    return None


def row_of(beginning: str) -> Row:
    found = [row for row in rows() if row.error.strip("`").startswith(beginning)]
    assert len(found) == 1, f"the page has {len(found)} rows whose error begins with {beginning!r}"
    return found[0]


@pytest.mark.parametrize("beginning", MISTAKES)
def test_the_commonest_mistakes_raise_what_the_page_quotes(beginning: str, slots: list, root: torch.device) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011 - the page says which
        MISTAKES[beginning](slots, root)
    said = " ".join("\n".join([str(error.value), *getattr(error.value, "__notes__", [])]).split())
    quoted = row_of(beginning).error.strip("`")
    pattern = "(?s:.*?)".join(re.escape(part.strip()) for part in quoted.split("..."))
    assert re.match(pattern, said), f"{said!r} is not {quoted!r}"


@pytest.mark.devices("cpu")
def test_the_table_is_in_the_order_of_the_texts_and_each_row_was_tried() -> None:
    errors = [row.error.strip("`") for row in rows()]
    assert errors == sorted(errors, key=lambda text: re.sub(r"\W+", " ", text).strip().lower())
    assert {row_of(beginning) for beginning in MISTAKES} == {*rows()}
    assert all(row.why and row.do for row in rows())
