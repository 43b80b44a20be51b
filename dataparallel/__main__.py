"""``python -m dataparallel`` describes or checks this machine, or runs a program with this library in torch's place."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        from dataparallel.testing.machine_check.run import main
    else:
        from dataparallel.integrations.programs import main
    main(sys.argv[1:] if sys.argv[1:2] != ["--check"] else sys.argv[2:])
