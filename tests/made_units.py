"""What tests of units share: what slots gather."""

from typing import Any

import pytest

from dataparallel.sharded.units.gather import PullSource


def recorded_gathers(monkeypatch: pytest.MonkeyPatch) -> list[PullSource]:
    """A list that gets the sources which slots ask for the owners' shards, one for each gather of a slot."""
    asked: list[PullSource] = []
    of_source = PullSource.pieces

    def recorded(self: PullSource, *args: Any) -> Any:
        asked.append(self)
        return of_source(self, *args)

    monkeypatch.setattr(PullSource, "pieces", recorded)
    return asked
