"""What the checks share: where things are, and what has failed."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
RENDERED = Path(sys.argv[1])

failures = []


def check(what, ok, detail=""):
    if not ok:
        failures.append(f"{what}: {detail}" if detail else what)


def done(what):
    print(f"deploy-check: {what}: {'ok' if not failures else 'FAILED'}")
    for failure in failures:
        print(f"  {failure}", file=sys.stderr)
    if failures:
        sys.exit(1)


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h)", text).groups()
    return int(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit]
