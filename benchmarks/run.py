"""Runs the benchmarks, each in a process of its own, and prints which goals hold.

    python benchmarks/run.py [--only dispatch steps ...] [--quick] [--out DIR]

Needs the `benchmarks` extra.  Each part also runs alone, as `python benchmarks/dispatch.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from _measure import goals_table, make_console, parser

PARTS = ("dispatch", "steps", "scaling", "compiling", "checks", "pipeline")


def main() -> None:
    arguments_of = parser("Runs the benchmarks.")
    arguments_of.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    arguments = arguments_of.parse_args()

    passed_on = ["--out", str(arguments.out)]
    passed_on += [f"--{flag}" for flag in ("quick", "redraw") if getattr(arguments, flag)]
    goals, failed = [], []
    for part in arguments.only:
        # The number of devices is fixed once JAX has started.
        script = Path(__file__).with_name(f"{part}.py")
        if subprocess.run([sys.executable, str(script), *passed_on]).returncode:
            failed.append(part)
        else:
            goals += json.loads((arguments.out / f"{part}.json").read_text())["goals"]
    console = make_console()
    if len(arguments.only) > 1:
        console.print(goals_table(goals))
    if failed:
        console.print(f"[red]Failed: {', '.join(failed)}[/red]")
        sys.exit(1)


if __name__ == "__main__":
    main()
