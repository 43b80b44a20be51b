"""``python -m dataparallel`` describes this machine, and with ``--check`` checks it."""

import argparse
import os
import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a check runs out of memory on purpose
        from dataparallel.testing.machine_check.run import main

        main(sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(
            prog="python -m dataparallel",
            usage="%(prog)s [--check ...]",
            description="Describes this machine; with --check, checks what it computes and how fast (--check --help).",
        )
        _, unknown = parser.parse_known_args()
        if unknown:
            parser.error(f"{' '.join(unknown)!r}: expected nothing, or --check as the first argument")
        from dataparallel.integrations.machine import description

        print(description())
