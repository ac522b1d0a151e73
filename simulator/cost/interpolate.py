"""Piecewise-linear interpolation in measured points that need not fill a grid.

Points are nested by axis: the first axis brackets the value, each of the two neighbours does the
same along the next axis, and so on. On a full grid this is multilinear interpolation, which
represents products of the coordinates (weights read, keys read) exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo_policies.errors import InputError


@dataclass(frozen=True, slots=True)
class Knots:
    """Measured values along one axis, increasing, each with the next axis or a value below it."""

    at: tuple[float, ...]
    below: tuple[Knots | float, ...]


@dataclass(frozen=True, slots=True)
class LinearTable:
    """Values at measured points; made by `build_table`.

    - A measured point gives its own value exactly.
    - Beyond the last point of an axis, up to ``margin``, the last slope is kept, or 0 if it falls.
    - Before the first one, down to ``margin``, and along an axis with one point: held constant.
    - Further out is refused.
    """

    what: str
    """What was measured, for messages."""
    axes: tuple[str, ...]
    root: Knots
    margin: float
    """Share of the first and last measured value that may be gone beyond."""
    num_points: int

    def at(self, *coords: float) -> float:
        """Return the value at one place, a coordinate for each axis.

        Raises:
            InputError: if it lies too far outside of what was measured; the message has the range.
        """
        return self._walk(self.root, coords, 0, "")

    def limits(self, axis: int, coords: Sequence[float]) -> tuple[float, float]:
        """Return the first and last measured value along ``axis`` that are next to ``coords``."""
        nodes = [self.root]
        for depth in range(axis):
            used: list[Knots] = []
            for node in nodes:
                left, weight = self._bracket(node.at, coords[depth], depth, "")
                chosen = node.below[left : left + (2 if weight else 1)]
                used += [below for below in chosen if isinstance(below, Knots)]
            nodes = used
        return max(node.at[0] for node in nodes), min(node.at[-1] for node in nodes)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the first and last measured value of each axis, over the whole table."""
        found: dict[str, tuple[float, float]] = {}
        nodes = [self.root]
        for axis in self.axes:
            found[axis] = min(n.at[0] for n in nodes), max(n.at[-1] for n in nodes)
            nodes = [below for n in nodes for below in n.below if isinstance(below, Knots)]
        return found

    def _walk(self, node: Knots | float, coords: Sequence[float], depth: int, path: str) -> float:
        if not isinstance(node, Knots):
            return node
        left, weight = self._bracket(node.at, coords[depth], depth, path)
        low = self._walk(node.below[left], coords, depth + 1, self._path(path, node, left, depth))
        if weight == 0.0:
            return low
        left += 1
        high = self._walk(node.below[left], coords, depth + 1, self._path(path, node, left, depth))
        if weight > 1.0:
            return high + max(0.0, high - low) * (weight - 1.0)
        return low + weight * (high - low)

    def _path(self, path: str, node: Knots, index: int, depth: int) -> str:
        return f"{path}, {self.axes[depth]} {node.at[index]:g}" if len(self.axes) > 1 else ""

    def _bracket(
        self, at: tuple[float, ...], value: float, depth: int, path: str
    ) -> tuple[int, float]:
        """Return the left neighbour and the weight of the right one; above 1 beyond the last."""
        first, last = at[0], at[-1]
        if not first * (1.0 - self.margin) <= value <= last * (1.0 + self.margin):
            where = f" (at{path[1:]})" if path else ""
            raise InputError(
                f"{self.what} covers {self.axes[depth]} {first:g} to {last:g}{where} and may be "
                f"left by {self.margin:.0%}; got {value:g}. Measure there, or use a computed cost "
                "model."
            )
        if value <= first or len(at) == 1:
            return 0, 0.0
        left = min(bisect_right(at, value) - 1, len(at) - 2)
        if value == last:
            return len(at) - 1, 0.0
        return left, (value - at[left]) / (at[left + 1] - at[left])


def build_table(
    what: str, axes: Sequence[str], points: Mapping[tuple[float, ...], float], margin: float = 0.0
) -> LinearTable:
    """Nest points by axis, in the order of ``axes``.

    Args:
        what: what was measured, as the subject of a message.
        axes: name of each coordinate.
        points: value at each measured point.
        margin: share of an axis' ends that may be gone beyond, 0 to 1.

    Raises:
        InputError: if there is no point, or ``margin`` is outside [0, 1].
    """
    if not points:
        raise InputError(f"{what} must hold at least one point; it has none.")
    if not 0.0 <= margin <= 1.0:
        raise InputError(f"margin must lie in [0, 1]; got {margin}. It is a share: 0.1 is 10 %.")
    root = _nest(sorted(points.items()), 0)
    assert isinstance(root, Knots), "a point has at least one coordinate"
    return LinearTable(what, tuple(axes), root, margin, len(points))


def _nest(points: Sequence[tuple[tuple[float, ...], float]], depth: int) -> Knots | float:
    if depth == len(points[0][0]):
        return points[0][1]
    groups: dict[float, list[tuple[tuple[float, ...], float]]] = {}
    for point in points:
        groups.setdefault(point[0][depth], []).append(point)
    return Knots(tuple(groups), tuple(_nest(group, depth + 1) for group in groups.values()))
