"""`RelayedCopies`: a copy between two devices that are no peers goes through a third device that is a peer of both.

On some machines only a part of the pairs are peers. In a hybrid cube mesh of eight V100, each GPU has NVLink to four
others, and CUDA sends the copies to the three that are left through the host's memory, over links that GPUs share. Two
copies over NVLink take a fraction of that time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import TypeVar

import torch
from torch import Tensor

from dataparallel.comm.buckets import travels_flat
from dataparallel.comm.peers import Pair
from dataparallel.comm.routes import TorchCopies
from dataparallel.comm.streams.current import Event, current_streams, kept_stream, streams_set
from dataparallel.comm.streams.held import hold
from dataparallel.devices import CPU

Place = TypeVar("Place", bound=Hashable)

_LEAST_BYTES = 2**16
"""Smaller copies go through the host: launching two copies would take as long as one copy through it."""


def plan_relays(places: Sequence[Place], are_peers: Callable[[Place, Place], bool]) -> dict[tuple[Place, Place], Place]:
    """The relay of each ordered pair of distinct ``places`` that are no peers, if another place is a peer of both.

    Peers have access to each other in both directions. On a relay, copies to one target wait for another one. So a pair
    takes the relay that serves the fewest pairs with other targets, and among these the one whose two links carry least
    if all pairs send as much. Pairs choose in turn, until none gains by another relay.
    """
    links = {pair for pair in permutations(places, 2) if are_peers(*pair) and are_peers(*pair[::-1])}
    relays: dict[tuple[Place, Place], Place] = {}
    options = {
        (source, target): found
        for source, target in permutations(places, 2)
        if (source, target) not in links
        and (found := [place for place in places if {(source, place), (place, target)} <= links])
    }

    def cost(pair: tuple[Place, Place], relay: Place) -> tuple[int, int, bool]:
        others = [(other, at) for other, at in relays.items() if other != pair]
        carried = [hop for (source, target), at in others for hop in ((source, at), (at, target))]
        mine = (pair[0], relay), (relay, pair[1])
        targets = sum(at == relay and other[1] != pair[1] for other, at in others)
        return targets, sum(hop in mine for hop in carried), relay != relays.get(pair, relay)

    for _ in options:  # a few rounds are enough, and nothing proves that the choices settle
        before = relays.copy()
        for pair, found in options.items():
            relays[pair] = min(found, key=lambda relay: cost(pair, relay))
        if relays == before:
            break
    return relays


def relays_between(devices: Sequence[torch.device]) -> dict[Pair, torch.device]:
    """The relays among the accelerators of ``devices``: none if all are peers, or no two are. It asks the backend."""
    accelerators = [device for device in dict.fromkeys(devices) if device != CPU]
    if len(accelerators) < 3:
        return {}
    backend = torch.get_device_module(accelerators[0].type)
    can_access = getattr(backend, "can_device_access_peer", None)
    return {} if can_access is None else plan_relays(accelerators, can_access)


@dataclass(frozen=True)
class RelayedCopies(TorchCopies):
    """torch's copies, of which those between the pairs of ``relays`` make two hops.

    The relay copies on a stream of its own: it neither waits for what the relay computes, nor holds that up.
    """

    relays: Mapping[Pair, torch.device] = field(default_factory=dict)

    def _relay_of(self, source: Tensor, target: torch.device) -> torch.device | None:
        relay = self.relays.get((source.device, target))
        return relay if relay is not None and travels_flat(source) and source.nbytes >= _LEAST_BYTES else None

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """See `Transport.send`."""
        if self._relay_of(tensor, device) is None:
            return super().send(tensor, device)
        sent = torch.empty_like(tensor, device=device)
        self.copy(sent, tensor)
        return sent

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Transport.copy`."""
        if self._relay_of(source, target.device) is None:
            super().copy(target, source)
        else:
            self.copy_each([target], [source])

    def copy_each(self, targets: Sequence[Tensor], sources: Sequence[Tensor], senders_wait: bool = True) -> None:
        """See `Transport.copy_each`. First hops go out together, beside the copies that take one."""
        half_way: list[tuple[Tensor, Tensor, Tensor, torch.Stream]] = []
        direct: list[tuple[Tensor, Tensor]] = []
        for target, source in zip(targets, sources, strict=True):
            relay = self._relay_of(source, target.device)
            if relay is None:
                direct.append((target, source))
                continue
            stream = kept_stream(relay, "relays")
            # A copy comes after the work of the target's stream too, which may have waited for the source.
            Event(current_streams([target.device])[target.device]).make_wait(stream)
            with streams_set({relay: stream}):
                half_way.append((target, source, torch.empty_like(source, device=relay).copy_(source), stream))
        super().copy_each([target for target, _ in direct], [source for _, source in direct])
        for target, source, on_relay, stream in half_way:
            with streams_set({on_relay.device: stream}):
                target.copy_(on_relay)
            done = Event(stream)
            hold([on_relay], done)
            if senders_wait:
                done.make_wait(current_streams([source.device])[source.device])
