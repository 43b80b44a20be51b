"""``python -m dataparallel`` prints a description of this machine, and what to do next."""

from dataparallel.tracing.report import report

if __name__ == "__main__":
    print(report())
