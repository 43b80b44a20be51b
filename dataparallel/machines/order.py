"""`Order`: in which order this process issues what its lines send, so that no two ranks differ.

A process is in several sets of ranks: a row and a column of a mesh, for example. NCCL hangs if ranks that share two of
them issue their collectives in different orders, or if more than two do so in a circle. Which line has something to
send first depends on time, and differs between ranks. So the ranks of a line agree on a number for each of its items,
and every process issues by these numbers, whatever line they are of. That is Skeen's total order of multicasts, in
Birman and Joseph, "Reliable communication in the presence of failures" (1987):

- When all ranks of a line have said that they have the item, each proposes a number larger than all that it knows.
- The largest proposal is the item's number, on all ranks of the line.
- A rank issues the item with the smallest number, if no other one that has been proposed can get a smaller one.

Nobody proposes before all ranks have the item. So a proposal waits only for other launchers, which never block, and not
for what a rank still computes or issues. The numbers grow along every chain of waits, so there is no circle. Only the
launcher's thread uses this file.
"""

from __future__ import annotations

__all__ = ["Order"]


class Order:
    """The items of this process that have a number and are not issued yet, each by the name of its line."""

    def __init__(self) -> None:
        self._largest = 0
        self._numbers: dict[str, int] = {}

    def propose(self, line: str) -> int:
        """This process's number for the next item of a line. ``line``: a name that all ranks of it have."""
        self._largest += 1
        self._numbers[line] = self._largest
        return self._largest

    def settle(self, line: str, number: int) -> None:
        """The ranks of the line have agreed on the number."""
        self._numbers[line] = number
        self._largest = max(self._largest, number)

    def is_first(self, line: str) -> bool:
        """True if the line's item, whose number is settled, comes before all others. Names decide between equals."""
        return min((number, name) for name, number in self._numbers.items())[1] == line

    def leave(self, line: str) -> None:
        """The line's item has been issued, or never will be."""
        self._numbers.pop(line, None)
