"""The results as text: tables that are readable as they stand, and what costs most as the last line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from dataparallel.tracing.results import REST, Results

_SHOWN = 0.05
"""A wait for devices after the block that is shorter than this part of it is not worth a line."""


def text_of(found: Results, cost: float) -> str:
    """All tables. ``cost``: about how many seconds recording took."""
    parts = [
        _head(found),
        _stages(found),
        _slots(found),
        _sent(found),
        _memory(found),
        f"Recording took about {1e3 * cost:.1f} ms of this, for {found.records} records in all threads.",
        advice(found),
    ]
    return "\n\n".join(parts)


def _head(found: Results) -> str:
    steps = f", {found.steps} steps of {_ms(found.seconds / found.steps)} ms" if found.steps > 1 else ""
    modules = ", ".join(f"{count} of {name}" for name, count in found.modules.items()) or "none on several slots"
    forms = f", by {' and '.join(found.forms)}" if found.forms else ""
    text = f"{_ms(found.seconds)} ms{steps}; calls: {modules}{forms}"
    if found.behind > 0.01 * found.seconds:
        text += f"\nWhen the block had ended, the host waited {_ms(found.behind)} ms more for the devices."
    return text


def _stages(found: Results) -> str:
    steps = max(found.steps, 1)
    rows = [["stage", "calls", "ms", "%", "ms a step", "ran", "no core", "other threads"]]
    for stage in found.stages:
        rows.append(
            [
                stage.name,
                str(stage.calls or ""),
                _ms(stage.seconds),
                f"{100 * stage.seconds / found.seconds:.1f}",
                _ms(stage.seconds / steps),
                "" if stage.running is None else _ms(stage.running),
                "" if stage.no_core is None else _ms(stage.no_core),
                _ms(stage.elsewhere) if stage.elsewhere else "",
            ]
        )
    total = sum(stage.seconds for stage in found.stages)
    sums = ["all", "", _ms(total), f"{100 * total / found.seconds:.1f}", _ms(total / steps), "", "", ""]
    return "The calling thread, without ranges inside ranges:\n" + aligned([*rows, sums])


def _slots(found: Results) -> str:
    if not found.slots:
        return "No replica ran: one slot needs none, and stages that a subclass overrides are not looked into."
    has_times = any(slot.device_forward is not None for slot in found.slots)
    head = ["slot", "device", "calls", "forward ms", "ran", "no permit", "no core", "lock, at most"]
    rows = [head + ["on the device: forward", "backward"] * has_times]
    for slot in found.slots:
        row = [str(slot.slot), str(slot.device), str(slot.calls)]
        row += map(_ms, (slot.forward, slot.running, slot.no_permit))
        row += ["?" if slot.no_core is None else _ms(slot.no_core), _ms(slot.lock)]
        if has_times:
            row += ["" if t is None else _ms(t) for t in (slot.device_forward, slot.device_backward)]
        rows.append(row)
    waiting = sum(slot.no_permit for slot in found.slots), sum(slot.lock for slot in found.slots)
    return (
        "Replicas:\n"
        + aligned(rows)
        + f"\nWithout waits the slowest replica of a call takes {found.imbalance:.2f} times the mean. All together had "
        + f"no permit for {_ms(waiting[0])} ms, and waited for Python's lock for {_ms(waiting[1])} ms at most."
    )


def _sent(found: Results) -> str:
    if not found.sent:
        return "Nothing was sent between devices."
    steps = max(found.steps, 1)
    rows = [["stage", "route", "copies a step", "bytes a step", "most between"]]
    for sent in found.sent:
        source, target = sent.busiest
        copies, size = sent.copies / steps, round(sent.number_of_bytes / steps)
        rows.append([sent.stage, sent.route, f"{copies:.1f}", f"{size:,}", f"{source} and {target}"])
    return "Sent between devices:\n" + aligned(rows)


def _memory(found: Results) -> str:
    if not found.memory:
        return "Memory: no figure. Nobody counts host memory for CPU slots."
    rows = [["device", "slots", "before, MiB", "after", "at most"]]
    for memory in found.memory:
        sizes = [f"{size / 2**20:.1f}" for size in (memory.before, memory.after, memory.peak)]
        rows.append([str(memory.device), " ".join(map(str, memory.slots)), *sizes])
    return "Memory of tensors:\n" + aligned(rows)


def aligned(rows: Iterable[Sequence[str]], words: Collection[int] = (0,)) -> str:
    """Rows as lines, in columns of the same width. Columns of `words` begin at the left, others end at the right."""
    lines = [*rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


# ---- advice: each rule is a guess, and names what most often helps where a stage costs most --------------------------

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
            f"The largest cost is what devices compute: they went on for {_milliseconds(found.behind)} when the block "
            f"of {_milliseconds(found.seconds)} had ended, so the host is ahead of them. torch.compile and "
            "torch.autocast make kernels faster."
        )
    largest = max(found.stages, key=lambda stage: stage.seconds)
    time = f"{_milliseconds(largest.seconds / found.steps)} a step" if found.steps else _milliseconds(largest.seconds)
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
            return "Parameters are sent in each call: for serving, call inside `with model.options.frozen():`."
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


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
