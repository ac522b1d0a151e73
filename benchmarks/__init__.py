"""Speed and memory, as ratios measured side by side; run with ``python -m benchmarks.NAME``."""
