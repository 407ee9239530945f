"""How far a step's gradients depend on how the emitted script cuts it: a row for each task.

    python benchmarks/gradient_agreement.py --out FILE.csv

Runs the test that holds the script to it, and tabulates what it measured: the largest difference of a gradient to that
of 32 samples in one pass, relative to the largest gradient; cut into about 4 x 8 and 32 x 1 samples, and in a step in
which memory ran out and the rest was cut smaller.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

TEST = "tests/test_emitted_tasks.py::test_gradients_do_not_depend_on_the_cuts"


def measure() -> list[dict[str, str]]:
    """A row for each task, with the test's figures."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        command = [sys.executable, "-m", "pytest", "-q", TEST, f"--junitxml={found}"]
        if subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, check=False).returncode:
            raise SystemExit("the test fails: see above")
        cases = list(ElementTree.parse(found).iter("testcase"))
    rows = []
    for case in cases:
        figures = {str(p.get("name")): f"{float(str(p.get('value'))):.1e}" for p in case.iter("property")}
        rows.append({"task": str(case.get("name")).split("[")[1].rstrip("]"), **figures})
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="csv file")
    args = parser.parse_args()
    rows = measure()
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print("  ".join(row.values()))


if __name__ == "__main__":
    main()
