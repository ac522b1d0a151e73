"""Target features: what enters some of a model's layers, for the drafter that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


class FeatureTaps:
    """Listens at the doors of decoder layers during a forward; in between nothing is hooked."""

    def __init__(self, layers: Sequence[nn.Module], taps: Sequence[int]) -> None:
        """Bind the layers.

        Args:
            layers: of the model, in order.
            taps: layers whose inputs are wanted, ascending; 0 gives the embedding's output.
        """
        assert all(0 <= tap < len(layers) for tap in taps), "a tap is a layer of the model"
        self._layers = layers
        self._taps = tuple(taps)
        self._heard: Tensor | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the forward of one flattened batch, ``[1, rows, width]``."""
        with ExitStack() as stack:
            for layer in sorted(set(self._taps)):
                hook = self._layers[layer].register_forward_pre_hook(
                    self._listener(layer), with_kwargs=True
                )
                stack.callback(hook.remove)
            yield

    def take(self) -> Tensor | None:
        """Features ``[rows, taps * width]`` of the forward just heard; None without taps."""
        heard, self._heard = self._heard, None
        return heard

    def _listener(self, layer: int) -> Any:
        places = [place for place, tap in enumerate(self._taps) if tap == layer]

        def listen(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            states_Rh = (given[0] if given else named["hidden_states"])[0]
            rows, width = states_Rh.shape
            if self._heard is None:
                self._heard = states_Rh.new_empty((rows, len(self._taps) * width))
            for place in places:  # copied at once: a later layer may write over its input
                self._heard[:, place * width : (place + 1) * width] = states_Rh

        return listen
