"""Which plans prompt lookup can serve, live or recorded."""

from __future__ import annotations

from echo_policies.api import DraftPlan


def lookup_objection(plan: DraftPlan) -> str | None:
    """Say why prompt lookup cannot serve a plan, if it cannot.

    It proposes as many children as it finds, so a fixed tree would have holes; a chain just ends.
    """
    if plan.template is None or plan.is_chain:
        return None
    return (
        "verifies a fixed tree, but prompt lookup proposes only what it finds; "
        "use a chain or a scored tree"
    )
