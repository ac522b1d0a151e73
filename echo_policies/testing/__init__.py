"""The conformance kit: whether a policy keeps the contract, with a minimal counterexample if not.

::

    results = run_checks(MyPolicy())
    assert all(result.status != "failed" for result in results)

Needs hypothesis (extra ``[dev]``); nothing else in this package imports it.
"""

from __future__ import annotations

import importlib.util

from echo_policies.errors import MissingExtraError

if importlib.util.find_spec("hypothesis") is None:
    raise MissingExtraError("The conformance kit", "dev")

from echo_policies.testing.checks import CHECKS
from echo_policies.testing.runner import CheckResult, run_checks
from echo_policies.testing.strategies import situations

__all__ = ["CHECKS", "CheckResult", "run_checks", "situations"]
