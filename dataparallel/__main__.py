"""``python -m dataparallel``: print what this machine offers.

Only the entry point: what is looked at and how it reads is in ``report``. Called by the
interpreter, imported by nobody.
"""

from dataparallel.report import collect, format_report

if __name__ == "__main__":
    print(format_report(collect()))
