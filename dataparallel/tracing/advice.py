"""The largest cost in words, and what to try. The words follow from the figures of `Results` by the rules below.

A rule is a guess: it names what most often helps where a stage costs most. To see if it does, trace again.
"""

from __future__ import annotations

from dataparallel.tracing.results import REST, Results

__all__ = ["advice"]

_UNEVEN = 1.25
"""The slowest replica takes so many times as long as the mean: that is a cost of its own."""

_BEHIND = 0.1
"""Devices go on for this part of the block when it has ended: the host is not what takes time."""

_LARGE = 0.3
"""From this part of a time on a wait is worth a word."""

_MANY_BYTES = 2**20
"""Replicas whose outputs for one step are larger return more than a loss."""


def advice(found: Results) -> str:
    """One line: the stage that takes most of the caller's time, how much, and what to try."""
    if not any(stage.seconds for stage in found.stages if stage.name != REST):
        return (
            "No stage of this library ran in the block: call the wrapped module inside of it. Without accelerators and "
            "without device_ids a wrapper just calls the module."
        )
    if found.behind > _BEHIND * found.seconds:
        return (
            f"The largest cost is what devices compute: they went on for {_ms(found.behind)} when the block of "
            f"{_ms(found.seconds)} had ended, so the host is ahead of them. torch.compile and torch.autocast make "
            "kernels faster."
        )
    largest = max(found.stages, key=lambda stage: stage.seconds)
    time = f"{_ms(largest.seconds / found.steps)} a step" if found.steps else _ms(largest.seconds)
    share = f"{100 * largest.seconds / found.seconds:.0f} %"
    words = f"The largest cost is {_NAMES.get(largest.name, largest.name)}: {time}, {share}."
    return f"{words} {_to_try(largest.name, found)}{_about_cores(found)}"


def _about_cores(found: Results) -> str:
    """A warning, where other programs or too many threads make all figures vary."""
    share = sum(stage.no_core or 0.0 for stage in found.stages) / found.seconds
    if share < _LARGE:
        return ""
    return f" For {100 * share:.0f} % of the block the calling thread had no core, so all of these times are uncertain."


_NAMES = {
    REST: "code of your own between the stages",
    "forward": "the forward passes of the replicas",
    "replicate": "making replicas",
    "unshard": "gathering sharded parameters",
    "sums": "adding up gradients",
    "optimizer": "the step of the optimizer",
    "backward": "the backward pass",
    "scatter": "splitting and sending the batch",
    "gather": "gathering outputs",
}


def _to_try(stage: str, found: Results) -> str:
    if stage == "forward":
        return _forward(found)
    if stage == "replicate":
        return _replicate(found)
    if stage == "backward":
        return _backward(found)
    return {
        REST: (
            "If that is the loss of gathered outputs, compute it in the module's forward, on all devices. If it is "
            "loading, work ahead: dataparallel.prefetch(loader, model), and workers in the loader. .item(), print and "
            "metrics make the host wait for the devices: every few steps are enough."
        ),
        "scatter": (
            "Give the call pinned batches, dataparallel.prefetch(loader, model) to send them before it, and "
            "dataparallel.whole(tensor) only for what every replica needs."
        ),
        "gather": (
            "Compute the loss in the module's forward, so that each replica returns one number instead of its outputs."
        ),
        "unshard": (
            "Fewer and larger units (one for several blocks) take fewer gathers; reshard_after_forward=False keeps "
            "parameters until backward where there is memory; a larger batch hides the rest."
        ),
        "sums": (
            "Sum less often: several backward passes inside set_requires_gradient_sync(False) before the last one, or "
            "a larger batch; a larger bucket_cap_mb means fewer launches."
        ),
        "optimizer": (
            "Let it work on all parameters at once: foreach=True or fused=True; composable.fully_shard gives each "
            "device a part of it."
        ),
    }.get(stage, "Look at its ranges in trace.plot or trace.save.")


def _forward(found: Results) -> str:
    slots, together = found.slots, sum(slot.forward for slot in found.slots)
    if together and sum(slot.lock for slot in slots) > _LARGE * together:
        return (
            "The replicas wait for Python's lock: launch less, with DataParallel(model, compile=True) or larger chunks "
            "of the batch, and let fewer run at a time (workers=1 or 2)."
        )
    no_core = sum(slot.no_core or 0.0 for slot in slots)
    if together and no_core > _LARGE * together:
        return (
            "The replicas wait for a core: more threads want to run than there are cores. Let fewer replicas run at a "
            "time (workers=), or end other programs."
        )
    if len(slots) > 1 and sum(slot.no_permit for slot in slots) > _LARGE * together and _on_devices(found):
        return (
            "The replicas run one after the other, because their Python code takes longer than their kernels: launch "
            "less, with DataParallel(model, compile=True) or larger chunks of the batch."
        )
    if len(slots) > 1 and found.imbalance > _UNEVEN:
        return _uneven(found)
    return (
        "That is the model itself: torch.compile (DataParallel(model, compile=True)), torch.autocast and larger "
        "chunks of the batch make it faster."
    )


def _uneven(found: Results) -> str:
    times = {slot.slot: slot.work for slot in found.slots}
    slowest = max(times, key=lambda slot: times[slot])
    mean = sum(times.values()) / len(times)
    if times[slowest] > _UNEVEN * mean:
        speeds = [1 / times[slot] if times[slot] else 0.0 for slot in sorted(times)]
        shares = ", ".join(f"{100 * speed / sum(speeds):.0f}" for speed in speeds)
        return (
            f"Slot {slowest} takes {times[slowest] / mean:.1f} times the mean, and the others wait for it: give it "
            f"fewer samples, with chunk_sizes= in the ratio {shares}."
        )
    return (
        f"The slowest replica of a call takes {found.imbalance:.1f} times the mean, and another one each time: samples "
        "differ, so sort or pack them by length."
    )


def _replicate(found: Results) -> str:
    if "DataParallel" in found.forms:
        if not found.stage("backward").calls:
            return "Parameters are sent in each call: for serving, call inside `with model.frozen():`."
        return "Parameters are sent in each step: composable.replicate(model) lets the replicas stay."
    return (
        "The replicas stay, and their values are sent after each step of the optimizer: a larger batch, or several "
        "backward passes for each step, send them less often."
    )


def _backward(found: Results) -> str:
    gathered = sum(sent.number_of_bytes for sent in found.sent if sent.stage == "gather") / max(found.steps, 1)
    if gathered > _MANY_BYTES:
        return (
            f"Each step gathers {gathered / 1e6:.1f} MB of outputs, and one device alone computes what follows from "
            "them and its gradient: compute the loss in the module's forward, so that each replica returns one number."
        )
    if found.stage("sums").elsewhere_running > _LARGE * found.stage("backward").seconds:
        return (
            "Sums of gradients take much of it: a larger batch, several backward passes for each sum "
            "(set_requires_gradient_sync(False)), or a larger bucket_cap_mb."
        )
    return (
        "That is the model itself: torch.compile (DataParallel(model, compile=True)) and torch.autocast make it "
        "faster; checkpoints that recompute make it slower."
    )


def _on_devices(found: Results) -> bool:
    return len({slot.device for slot in found.slots}) > 1


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
