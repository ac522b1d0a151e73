"""Named policies: compositions of a gate and a scheduler, with published shapes.

Shapes are levels / top_k / nodes, root excluded. Published shapes are converted here: EAGLE's
code counts loop iterations after the first layer and the root among its tokens, SGLang counts
levels and the root, so ``depth 8, total 60`` becomes 9 levels and 59 nodes.
"""

from __future__ import annotations

from collections.abc import Callable

from echo_policies.api import Policy, Scheduler
from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.gates.open import OpenGate
from echo_policies.schedulers.elastic import Elastic
from echo_policies.schedulers.fallback import Fallback
from echo_policies.schedulers.none import NoDraft
from echo_policies.schedulers.price import Price
from echo_policies.schedulers.rerank import Rerank
from echo_policies.schedulers.static import Chain, StaticTree

AUTOREGRESSIVE = "autoregressive"
"""Name of plain decoding."""


def autoregressive() -> Policy:
    """Plain decoding, one token per step."""
    return Policy(name=AUTOREGRESSIVE, gate=OpenGate(), scheduler=NoDraft())


def chain() -> Policy:
    """A greedy chain of 4 tokens (K = 4 of arXiv 2302.01318)."""
    return Policy(name="chain", gate=OpenGate(), scheduler=Chain())


def static() -> Policy:
    """Medusa's tree of 63 nodes; ``static:tree=eagle25`` is EAGLE-1's."""
    return Policy(name="static", gate=OpenGate(), scheduler=StaticTree())


def eagle3() -> Policy:
    """EAGLE-3 at depth 8, top-k 10, total 60: the low-load setting of the ECHO paper."""
    return Policy(name="eagle3", gate=OpenGate(), scheduler=Rerank())


def eagle3_scripts() -> Policy:
    """EAGLE-3 as SafeAILab's evaluation scripts run it: depth 5, top-k 10, total 60."""
    shape = Rerank(levels=6, top_k=10, nodes=59)
    return Policy(name="eagle3_scripts", gate=OpenGate(), scheduler=shape)


def eagle3_sglang() -> Policy:
    """EAGLE-3 by SGLang's documentation: 5 steps, top-k 4, 8 draft tokens."""
    shape = Rerank(levels=5, top_k=4, nodes=7)
    return Policy(name="eagle3_sglang", gate=OpenGate(), scheduler=shape)


def eagle3_small() -> Policy:
    """EAGLE-3 in the shape that ECHO starts from at high load: depth 3, top-k 3, total 5."""
    shape = Rerank(levels=3, top_k=3, nodes=4)
    return Policy(name="eagle3_small", gate=OpenGate(), scheduler=shape)


def echo() -> Policy:
    """ECHO (arXiv 2604.09603): sparse confidence gate, elastic scheduler."""
    return Policy(name="echo", gate=ConfidenceGate(), scheduler=Elastic())


def dense() -> Policy:
    """ECHO's ablation that checks every depth, each with its own threshold."""
    return Policy(name="dense", gate=ConfidenceGate(gate_set="dense"), scheduler=Elastic())


def fixed() -> Policy:
    """ECHO's ablation with one threshold at all gated depths."""
    return Policy(name="fixed", gate=ConfidenceGate(threshold="fixed"), scheduler=Elastic())


def price() -> Policy:
    """Global greedy by path probability; depth and budget are what pays at measured costs."""
    return Policy(name="price", gate=OpenGate(), scheduler=Price())


PRESETS: dict[str, Callable[[], Policy]] = {
    factory.__name__: factory
    for factory in (
        autoregressive,
        chain,
        static,
        eagle3,
        eagle3_scripts,
        eagle3_sglang,
        eagle3_small,
        echo,
        dense,
        fixed,
        price,
    )
}
"""Every named policy of this package."""


def fallback(inner: Scheduler) -> Scheduler:
    """Plain decoding where drafting is predicted to be slower."""
    return Fallback(inner=inner)


WRAPPERS: dict[str, Callable[[Scheduler], Scheduler]] = {"fallback": fallback}
"""What ``NAME+WRAPPER`` puts around the scheduler of a policy."""
