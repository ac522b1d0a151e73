"""Speed and memory of the simulator: one run of a policy on one core.

    python -m benchmarks.simulator [--policy echo] [--batch-size 256] [--trace NAME]

Prints simulated seconds per CPU second, request-steps per CPU second and peak memory, and the same
of plain decoding in the same process. Calibration is done before the clock starts.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

os.environ["OMP_NUM_THREADS"] = "1"
import torch

from echo_policies.presets import autoregressive
from echo_policies.registry import parse
from simulator.config import DEFAULT_TRACE, make_config
from simulator.run import calibrated, simulation_run
from simulator.setting import make_setting


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="echo")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--trace", default=DEFAULT_TRACE)
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = options.batch_size
    config = make_config(
        policies=(options.policy,),
        trace=options.trace,
        target=options.target,
        batch_sizes=(size,),
        requests=options.requests,
    )
    setting = make_setting(config)
    k_max, _ = setting.k_max(size)
    for policy in (parse(options.policy), autoregressive()):
        fitted = calibrated(setting, policy, size, k_max)
        for _ in range(options.repeats):
            run = simulation_run(setting, fitted, size, k_max)
            start = time.process_time()
            records = run.records("lower")
            cpu_s = time.process_time() - start
            steps = records.levels_S.size + records.warm_up_steps
            # The clock also ran during warm-up, whose records are dropped.
            share = records.levels_S.size / steps
            print(
                f"{policy.name:16} batch {size} k_max {k_max} "
                f"w_topk {fitted.parameters().get('w_topk', '-')}: "
                f"{records.step_s.sum() / share / cpu_s:7.1f} simulated s per CPU s, "
                f"{size * steps / cpu_s:10,.0f} request-steps per CPU s, "
                f"{1e3 * cpu_s / steps:.2f} ms per batch step"
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
