"""A short run of benchmarks/soak.py, which watches memory, arrays, threads and compilations."""

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).resolve().parents[1] / "benchmarks" / "soak.py"


def test_nothing_grows(tmp_path):
    command = [sys.executable, SOAK, "--steps", "200", "--out", tmp_path / "soak.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "soak.json").stat().st_size > 0
