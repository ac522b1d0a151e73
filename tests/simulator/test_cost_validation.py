"""The model against published measurements of real engines (bf16 rows only, no fp8 yet).

The data is outside the repository: ``$ECHO_SHARED`` or ``../shared``. Constants are the starting
values of hardware.md, none is fitted here.
"""

import csv
import os
import statistics
from pathlib import Path

import pytest

from simulator.cost import build_cost_model

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("ECHO_SHARED", ROOT.parent / "shared"))
TABLE = SHARED / "data" / "validation" / "step_times_dev.csv"

# kind: rows, bound on the median and the 90th percentile of the absolute relative error.
# Measured: decode_step 3.1 % (largest 7.7 %), serving_tpot 3.8 / 13.9 %, spec_cycle 3.3 / 7.0 %.
BOUNDS = {
    "decode_step": (6, 0.05, 0.09),
    "serving_tpot": (54, 0.05, 0.16),
    "spec_cycle": (20, 0.05, 0.09),
}


def read_rows():
    with TABLE.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["dtype"] == "bf16"]


def predict_s(row, model):
    batch, context = int(row["batch"]), int(float(row["context"]))
    kv = batch * context
    if row["kind"] == "decode_step":
        return model.plain_decode_s(batch, kv) + model.host_s(0)
    if row["kind"] == "serving_tpot":  # section 4.4
        prompt, output = int(float(row["isl"])), int(float(row["osl"]))
        decode_s = model.plain_decode_s(batch, batch * (prompt + output // 2))
        return decode_s + (batch - 1) * model.prefill_s(prompt) / output + model.host_s(0)
    tokens, steps, topk = (int(float(row[c])) for c in ("tokens_per_request", "steps", "topk"))
    total_s = model.verify_s(batch * tokens, batch, kv)
    total_s += model.draft_extend_s(batch * tokens, batch, kv)
    total_s += (steps - 1) * model.draft_layer_s(batch * topk, batch, kv)
    if row["engine"] == "sglang 2025-03" and not model.is_pure_roofline:
        total_s += 2.25e-3 * (1 + {"1": 0, "8": 3}[row["tp"]])  # section 4.5, last line
    return total_s + model.host_s(steps) + model.select_s(topk > 1)


def errors(kind, *, pure=False):
    found = []
    for row in read_rows():
        if row["kind"] != kind:
            continue
        engine, gpu = row["engine"].split()[0], row["gpu"].split()[0].lower()
        model = build_cost_model(
            row["model"], gpu, int(row["tp"]), pure_roofline=pure, engine=engine
        )
        found.append(abs(predict_s(row, model) * 1e3 / float(row["measured_ms"]) - 1.0))
    return sorted(found)


pytestmark = pytest.mark.skipif(not TABLE.exists(), reason=f"{TABLE} is not there")


@pytest.mark.parametrize("kind", sorted(BOUNDS))
def test_error_against_measurements(kind):
    count, median, p90 = BOUNDS[kind]
    found = errors(kind)
    assert len(found) == count
    assert statistics.median(found) <= median
    assert found[int(0.9 * len(found))] <= p90


@pytest.mark.parametrize("kind", sorted(BOUNDS))
def test_pure_roofline_is_far_off(kind):
    assert statistics.median(errors(kind, pure=True)) > 0.3
