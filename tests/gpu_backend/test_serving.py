"""How much memory a policy is given: known answers, and what the models' pools hold."""

import pytest

from echo_policies.session import widest_plan
from gpu_backend.serving import kept_nodes
from gpu_backend.tree_drafter import draft_rows
from tests.gpu_backend.serve import calibrated


@pytest.mark.parametrize(
    ("spec", "k_max", "caps_all", "kept", "expanded"),
    [
        ("autoregressive", 9, False, 0, 0),
        ("chain:levels=3", 0, False, 3, 2),
        ("chain:levels=3", 2, True, 2, 2),
        ("static", 9, False, 63, 21),
        ("eagle3", 9, False, 59, 80),  # 9 levels, of which 8 are expanded, 10 wide
        ("eagle3:levels=2,top_k=2,nodes=50", 9, False, 6, 2),  # 2 and 2 x 2 candidates
        ("echo:levels=4,top_k=4,w_topk=3", 12, False, 12, 9),
        ("echo:levels=4,top_k=4,w_topk=3", 900, False, 40, 9),  # 4 and 3 x 3 x 4 candidates
    ],
)
def test_reserved_rows(spec, k_max, caps_all, kept, expanded):
    policy = calibrated(spec)
    plan = widest_plan(policy)
    assert kept_nodes(policy, plan, k_max, caps_all=caps_all) == kept
    assert draft_rows(plan) == expanded
