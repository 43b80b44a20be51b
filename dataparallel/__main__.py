"""``python -m dataparallel`` prints a description of this machine, and what to do next.

This is only the entry point: ``report`` writes the text. The interpreter runs it, and nobody imports it.
"""

from dataparallel.tracing.report import collect, format_report

if __name__ == "__main__":
    print(format_report(collect()))
