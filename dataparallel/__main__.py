"""``python -m dataparallel`` describes or checks this machine, or runs a program with this library in torch's place."""

import os
import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a check runs out of memory on purpose
        from dataparallel.testing.machine_check.run import main
    else:
        from dataparallel.integrations.programs import main
    main(sys.argv[1:] if sys.argv[1:2] != ["--check"] else sys.argv[2:])
