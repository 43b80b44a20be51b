"""From predictions to the rows of two tables: all models, machines and ways, and published figures beside them.

Does not know how predictions are made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nogpu.timeline.presets import A100
from published import ONE, SOURCES, Published
from real_shapes import GPT2_SMALL
from timelines import HOST_BOUND, PREDICTED_BY, SHAPES, SHARDED, TORCH, Prediction

CAPTION = f"""\
Predictions: nothing here was measured on such devices. A training step was recorded on simulated devices that skip
kernels, and scheduled on published machines with the shares of their peaks that are stated in
nogpu/timeline/presets.py. float32, TF32 where devices have it; forward, backward and SGD;
inputs from pinned memory of the host.

step, ms
    What one more step takes, where the host may run ahead of the devices.
from idle, ms
    A step that begins with idle devices and ends when they are idle again.
free host, ms
    One more step if launching cost nothing.
bound, ms
    The module alone with one device's samples, no communication and a free host. No way can be faster.
of bound
    The bound divided by the step.
efficiency
    Of weak scaling: the step of the module alone with one device's samples, divided by this step.
exposed
    The part of the step that it is longer than if copies took no time.
launches, copies
    Operators in a step, and those of them that copy between devices, or between a device and the host.
received, of all-reduce
    Megabytes that a device gets from others in a step, on the device that gets most; and the same divided by what an
    all-reduce of the gradients brings to each device, which is 2 (N - 1) / N of their size.
Python, ms
    CPU time of Python's threads between the launches of a step, measured, and scaled by the factor that makes it fit
    the machine's host for the module alone. Of the simulator's work it includes only how operators are dispatched, and
    operators that are no launch.
bound by
    "host" if the step takes more than {HOST_BOUND:g} times as long as with a free host; otherwise "devices".

The library chooses routes by the links. The rows of A100 and H100 presume that NVML can be read (the package
nvidia-ml-py); otherwise links count as shared, and steps on these machines take longer than here. Threads of a backward
pass that run nodes written in Python hold the interpreter lock in reality. Here they hold none, so the time of the host
in backward is predicted too low.

{TORCH} is torch's pipeline with plain copies, which is what it does without NCCL.
Where torch was built with NCCL, its broadcast and its sum take less time than here."""

PUBLISHED_CAPTION = f"""\
Published times of a training step beside predictions for the same model, batch and machine. What differs: DDP is one
process for each device, whose host costs nothing to the others, and sums with NCCL; its prediction is that of
composable.replicate, one process. Predicted steps end with SGD. Published steps may have another optimizer and read
their data from files, and ran on other versions of torch. Convolutions are predicted at one share of the peak for all
shapes. The prediction for one device tells how good the shares are, and the ratio to one device how good the rest is.
The sources:

{chr(10).join(f"{name}{chr(10)}    {source}" for name, source in SOURCES.items())}"""


@dataclass(frozen=True)
class Row(Prediction):
    """A prediction as a row."""

    @property
    def of_all_reduce(self) -> float | None:
        """What is received over what an all-reduce of the gradients, in float32, would bring to each device."""
        if self.devices == 1:
            return None
        return 1e6 * self.received / (2 * (self.devices - 1) / self.devices * 4 * SHAPES[self.model].parameters)

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        return {
            "model": self.model,
            "machine": self.machine,
            "way": self.way,
            "devices": str(self.devices),
            "step, ms": f"{self.step:.1f}",
            "from idle, ms": f"{self.from_idle:.1f}",
            "free host, ms": f"{self.free_host:.1f}",
            "bound, ms": f"{self.bound:.1f}",
            "of bound": f"{self.bound / self.step:.2f}",
            "efficiency": f"{self.efficiency:.2f}",
            "exposed": f"{100 * self.exposed / self.step:.1f} %",
            "launches": f"{self.launches:,}",
            "copies": f"{self.copies:,}",
            "received, MB": f"{self.received:,.0f}",
            "of all-reduce": "" if self.of_all_reduce is None else f"{self.of_all_reduce:.2f}",
            "Python, ms": f"{self.python:.1f}",
            "bound by": "host" if self.is_host_bound else "devices",
        }


@dataclass(frozen=True)
class PublishedRow:
    """A published figure and what is predicted for it. ``scaling`` is the ratio to one device, where that is known."""

    model: str
    machine: str
    devices: int
    published_way: str
    published_milliseconds: float
    published_scaling: float | None
    predicted_way: str
    predicted_milliseconds: float
    predicted_scaling: float
    source: str

    def cells(self) -> dict[str, str]:
        """The row of the table."""
        scaling = self.published_scaling
        return {
            "model": self.model,
            "machine": self.machine,
            "devices": str(self.devices),
            "published": self.published_way,
            "ms": f"{self.published_milliseconds:.1f}",
            "to one\ndevice": "" if scaling is None else f"{scaling:.2f}",
            "predicted": self.predicted_way,
            "ms, a\nprediction": f"{self.predicted_milliseconds:.1f}",
            "to one device,\na prediction": f"{self.predicted_scaling:.2f}",
            "predicted/\npublished": f"{self.predicted_milliseconds / self.published_milliseconds:.2f}",
            "source": self.source,
        }


EXPOSED_BAR = 0.1


def judged(predictions: Iterable[Prediction]) -> list[str]:
    """A sentence about each step whose exposed part has a bar: that of GPT-2 small by `fully_shard` on 8 x A100."""
    return [
        f"{found.way}, {found.model}, {found.devices} devices of {found.machine}: gathers and sums are exposed for "
        f"{found.exposed / found.step:.1%} of the step; at most {EXPOSED_BAR:.0%}: "
        f"{'yes' if found.exposed <= EXPOSED_BAR * found.step else 'no'}."
        for found in predictions
        if (found.way, found.model, found.machine) == (SHARDED, GPT2_SMALL.name, A100.name)
    ]


def beside_published(figures: Iterable[Published], predictions: Iterable[Prediction]) -> list[PublishedRow]:
    """A row for each of ``figures`` whose model has been predicted.

    Raises:
        KeyError: the model has been predicted, but not on this machine by this way.
    """
    predicted = {(found.model, found.machine, found.devices, found.way): found for found in predictions}
    models = {model for model, *_ in predicted}
    figures = [figure for figure in figures if figure.shape.name in models]
    one = {(figure.shape, figure.machine): figure.milliseconds for figure in figures if figure.way == ONE}
    rows = []
    for figure in figures:
        way = PREDICTED_BY[figure.way]
        found = predicted[figure.shape.name, figure.machine, figure.devices, way]
        alone = one.get((figure.shape, figure.machine))
        rows.append(
            PublishedRow(
                model=found.model,
                machine=found.machine,
                devices=found.devices,
                published_way=figure.way,
                published_milliseconds=figure.milliseconds,
                published_scaling=None if alone is None else figure.milliseconds / alone,
                predicted_way=way,
                predicted_milliseconds=found.step,
                predicted_scaling=found.step / found.alone,
                source=figure.source,
            )
        )
    return rows
