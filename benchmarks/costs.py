"""Speed of the cost model: one call at a time, and many points at once, side by side.

python -m benchmarks.costs
"""

from __future__ import annotations

import time

import numpy as np

from simulator.cost import build_cost_model
from simulator.cost.vector import verify_many_s

POINTS = 10_000


def main() -> None:
    """Measure and print."""
    rng = np.random.default_rng(0)
    rows_N, requests_N = rng.integers(64, 2048, POINTS), rng.integers(1, 64, POINTS)
    kv_N = rng.integers(0, 10**6, POINTS)
    for name, tp in (("llama-3.1-8b", 4), ("qwen3-235b", 8)):
        model = build_cost_model(name, "h100", tp)
        points = list(zip(rows_N.tolist(), requests_N.tolist(), kv_N.tolist(), strict=True))
        for _ in range(2):  # the first round fills the caches of expert coverage
            start = time.perf_counter()
            for point in points:
                model.verify_s(*point)
            one_by_one_s = time.perf_counter() - start
            start = time.perf_counter()
            verify_many_s(model, rows_N, requests_N, kv_N)
            together_s = time.perf_counter() - start
        print(
            f"{name:14} {POINTS} points: {1e6 * one_by_one_s / POINTS:.1f} us a call, "
            f"{1e3 * together_s:.1f} ms together, ratio {one_by_one_s / together_s:.0f}"
        )


if __name__ == "__main__":
    main()
