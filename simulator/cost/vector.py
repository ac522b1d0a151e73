"""Many points at once: the same formulas on arrays.

The scalar model branches in four places (a sharp maximum, the faster all-reduce, counted experts,
the graph that is replayed); here they are replaced by their array forms, everything else runs as
it is, because it is plain arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np

from simulator.cost.experts import distinct_experts
from simulator.cost.forward import logits_s
from simulator.cost.models import Experts
from simulator.cost.operators import AllReduce, Operators, Roofline
from simulator.cost.step import CostModel

# Shapes: N points.
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class _Roofline(Roofline):
    def time_s(self, flops: Any, num_bytes: Any) -> Any:
        compute_s, memory_s = flops / self.flop_per_s, num_bytes / self.byte_per_s
        q = self.sharpness
        high = np.maximum(compute_s, memory_s)
        if q == math.inf:
            return self.floor_s + high
        # as the scalar form, with one power less: high * (1 + (low / high)^q)^(1/q)
        low = np.minimum(compute_s, memory_s)
        share = np.divide(low, high, out=np.zeros_like(high), where=high > 0.0)
        return self.floor_s + high * np.exp(np.log1p(share**q) / q)


@dataclass(frozen=True, slots=True)
class _AllReduce(AllReduce):
    def time_s(self, num_bytes: Any) -> Any:
        small_s = self.small_floor_s + num_bytes / self.small_byte_per_s
        large_s = self.large_floor_s + num_bytes / self.large_byte_per_s
        return np.minimum(small_s, large_s)


@dataclass(frozen=True, slots=True)
class _Operators(Operators):
    def distinct(self, experts: Experts, rows: Any) -> Any:
        values, places = np.unique(rows, return_inverse=True)
        alpha = self.moe_zipf_alpha
        counted = [
            distinct_experts(experts.count, experts.per_token, alpha, value)
            for value in values.tolist()
        ]
        return np.array(counted)[places]


def verify_many_s(model: CostModel, rows_N: Floats, requests_N: Floats, kv_N: Floats) -> Floats:
    """Return `CostModel.verify_s` of many points at once.

    Args:
        model: the cost model.
        rows_N: flattened tokens, roots included, at least 1.
        requests_N: requests they belong to, at least 1.
        kv_N: committed tokens of these requests.
    """
    target = cast("Any", replace(model.target, ops=_array_operators(model.target.ops)))
    rows_N, requests_N, kv_N = (np.asarray(a, dtype=np.float64) for a in (rows_N, requests_N, kv_N))
    padded_N = _padded(model, rows_N)
    span_N = kv_N + padded_N
    total_N = target.body_s(padded_N, padded_N * span_N / requests_N, span_N)
    total_N = total_N + logits_s(target, cast("float", padded_N)) + target.argmax_s(padded_N)
    host = model.host
    largest = host.graph_rows[-1] if host.graph_rows else 0
    bound_s = host.launch_bound_s(model.target.kernels)
    launched_N = np.where(padded_N <= largest, total_N, np.maximum(total_N, bound_s))
    return cast("Floats", model.scale * (launched_N + requests_N * host.request_s))


def _padded(model: CostModel, rows_N: Floats) -> Floats:
    graphs = np.array(model.host.graph_rows, dtype=np.float64)
    if not graphs.size or not model.host.pads_to_graphs:
        return rows_N
    place_N = np.searchsorted(graphs, rows_N)
    return np.where(place_N < graphs.size, graphs[np.minimum(place_N, graphs.size - 1)], rows_N)


def _array_operators(ops: Operators) -> _Operators:
    values = {field.name: getattr(ops, field.name) for field in fields(Operators)}
    for name, value in values.items():
        if isinstance(value, Roofline):
            values[name] = _Roofline(*(getattr(value, f.name) for f in fields(Roofline)))
        elif isinstance(value, AllReduce):
            values[name] = _AllReduce(*(getattr(value, f.name) for f in fields(AllReduce)))
    return _Operators(**values)
