"""The gate that never closes."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from echo_policies.api import Gate, LayerView


class OpenGate(Gate):
    """Lets every request deepen; has no checkpoints, so nothing is charged."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def checkpoints(self, levels: int) -> tuple[int, ...]:
        """No depth is checked."""
        del levels
        return ()

    def evaluate(self, layer: LayerView) -> Tensor:
        """True for everybody."""
        return layer.exists_BW.new_ones(layer.exists_BW.shape[0])
