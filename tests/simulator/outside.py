"""Data that does not ship: ``$ECHO_SHARED`` or ``../shared``; tests skip where it is absent."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("ECHO_SHARED", ROOT.parent / "shared"))
STEP_TIMES = SHARED / "data" / "validation" / "step_times_dev.csv"
"""Published step times of real engines."""
