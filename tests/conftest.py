"""Hypothesis profiles: `ci` where CI is set, else a small one; HYPOTHESIS_PROFILE overrides."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("fast", max_examples=15, deadline=None, print_blob=True)
settings.register_profile("default", max_examples=40, deadline=None, print_blob=True)
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, database=None, print_blob=True
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default")
)
