"""``python -m dataparallel`` describes this machine, or runs a program with this library in place of torch's."""

import sys
from typing import Any

from dataparallel.integrations.programs import main


def plan(*arguments: Any) -> Any:
    """What ``--model`` asks for. It is above the room that reads the options."""
    from dataparallel.testing.model_report import plan

    return plan(*arguments)


if __name__ == "__main__":
    main(sys.argv[1:], plan)
