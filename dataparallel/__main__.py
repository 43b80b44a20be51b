"""``python -m dataparallel`` describes this machine, or runs a program with this library in place of torch's."""

import sys

from dataparallel.integrations.programs import main

if __name__ == "__main__":
    main(sys.argv[1:])
