"""A discrete-event simulator of a serving engine, driven by recordings and roofline costs.

>>> import simulator
>>> result = simulator.simulate("echo", batch_sizes=[8])  # doctest: +SKIP

``simulate`` takes the fields of :class:`simulator.config.SimulationConfig` as keywords.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo_policies.api import Policy
    from simulator.results import Result

__all__ = ["simulate"]


def simulate(policies: str | Policy | Sequence[str | Policy] = ("echo",), **options: Any) -> Result:
    """Replay policies on a recording in a simulated serving engine.

    Args:
        policies: specifications such as ``"echo:w_topk=1"``, or policy objects.
        **options: further fields of :class:`simulator.config.SimulationConfig`, and ``progress``,
            called with what runs, requests finished and requests to finish.

    Returns:
        Rows for every batch size, plain decoding first, with everything needed to repeat them.

    Raises:
        echo_policies.errors.EchoError: an option breaks its rule, a policy cannot run on the
            trace, or a policy breaks its contract.
    """
    # Imported here so that `simulate --help` does not wait for torch.
    from simulator.run import simulate as run

    return run(policies, **options)
