"""The benchmarks run: their figures are looked at by people, not by tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).parent / "benchmarks/table.py"


def test_a_row_of_the_table_is_measured_and_shown() -> None:
    command = [sys.executable, str(TABLE), "--quick", "--no-peers", "--row", "send-many"]
    table = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert table.returncode == 0, table.stderr
    assert "send_many of 1,000" in table.stdout
    assert "ours" in table.stdout
    assert "target               >= 15000 /s: " in table.stdout
