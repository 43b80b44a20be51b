"""Launches and recordings that tests make by hand."""

from __future__ import annotations

from typing import Any

from nogpu.timeline import Launch


def launch(index: int, op: str = "aten::add", **fields: Any) -> Launch:
    """A launch of the first thread on the first stream, which does nothing and waits for nothing."""
    values: dict[str, Any] = {
        "thread": 0,
        "in_backward": False,
        "stream": 0,
        "bytes_read": 0,
        "bytes_written": 0,
        "flops": 0,
        "dtype": "float32",
        "shapes": (),
        "copy": None,
        "waits": (),
        "joins": None,
        "host_waits": (),
        "issued_after": (),
        "host_seconds": 0.001,
    }
    return Launch(index=index, op=op, **(values | fields))
