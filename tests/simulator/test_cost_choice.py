"""`--costs`: which cost model runs, what it says of itself, and what it refuses."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import simulator
from echo_policies.errors import InputError, UnknownNameError
from simulator import cli
from simulator.cost import aic_tables, build_cost_model
from simulator.cost.aic import build_aic_costs
from simulator.cost.choice import CostChoice, apply_choice, parse_choice
from simulator.cost.kernels_aic import open_aic_kernels
from simulator.cost.protocol import StepCosts
from simulator.output import head

OPTIONS = {"target": "llama-3.1-8b", "batch_sizes": (2,), "context": 1024, "k_max": 12}
POLICY = "chain:levels=3"


def steps(path: Path, contexts=(256, 4096), tokens=(1, 8), engine="sglang 0.5") -> Path:
    lines = ["model,tp,batch,context,tokens,ms,engine,gpu,dtype"]
    for batch, context, count in itertools.product((1, 4), contexts, tokens):
        ms = 7.0 + 0.02 * batch * count + 1e-4 * batch * context
        lines.append(f"llama-3.1-8b,1,{batch},{context},{count},{ms},{engine},H100 SXM,bf16")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (None, CostChoice()),
        ("my.toml", CostChoice(path=Path("my.toml"))),
        ("roofline:my.toml", CostChoice(path=Path("my.toml"))),
        ("table:a/b.csv", CostChoice("table", Path("a/b.csv"))),
        (
            "affine:b.csv:engine=sglang 0.5.8,gpu=H100",
            CostChoice("affine", Path("b.csv"), {"engine": "sglang 0.5.8", "gpu": "H100"}),
        ),
        ("aiconfigurator", CostChoice("aiconfigurator")),
        (
            "aiconfigurator:version=0.5.14",
            CostChoice("aiconfigurator", None, {"version": "0.5.14"}),
        ),
    ],
)
def test_one_syntax(text, choice):
    assert parse_choice(text) == choice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rooflin", "must be FILE.toml .*, table:STEPS.csv, affine:STEPS.csv or aiconfigurator"),
        ("tables:x.csv", "must be FILE.toml"),
        ("table", "needs a file of measured steps: table:STEPS.csv"),
        ("aiconfigurator:x.csv", "takes no file; got 'x.csv'"),
        ("table:x.csv:enigne=a", "Did you mean 'engine'"),
        ("table:x.csv:engine=", "fields as field=value"),
    ],
)
def test_what_is_no_cost_model_is_refused(text, message):
    with pytest.raises((InputError, UnknownNameError), match=message):
        parse_choice(text)


@pytest.mark.parametrize(("kind", "word"), [("table", "table of 8"), ("affine", "affine fit of 8")])
def test_a_simulation_says_what_it_was_costed_by(kind, word, trace_file, tmp_path):
    costs = f"{kind}:{steps(tmp_path / 'steps.csv')}"
    result = simulator.simulate([POLICY], trace=str(trace_file), costs=costs, **OPTIONS)
    (line,) = [line for line in head(result) if line.startswith("costed as")]
    assert f"llama-3.1-8b tp 1, sglang 0.5, H100 SXM, bf16: {word} measured steps" in line
    assert "drafts, prefill, checks, selection, packing, compaction, host and memory from" in line
    assert "sglang roofline fit" in line
    content = json.loads(result.to_json())
    assert content["config"]["costs"] == costs
    assert content["cost"]["kind"] == {"table": "measured table", "affine": "affine"}[kind]
    assert "draft_layer_s" in content["cost"]["from_fallback"]
    assert content["cost"]["fallback"]["kind"] == "roofline"
    plain = result.row("autoregressive", 2).summary
    assert plain.step_ms == pytest.approx(7.0 + 0.02 * 2 + 1e-4 * 2 * 1024, rel=1e-3)
    assert plain.time_split["host"] == 0.0  # a measured step holds it


def test_a_table_is_not_left(trace_file, tmp_path):
    costs = f"table:{steps(tmp_path / 'steps.csv')}"
    with pytest.raises(
        InputError, match=r"covers context 256 to 4096 .* may be left by 10%; got 9000"
    ):
        simulator.simulate(
            [POLICY], trace=str(trace_file), costs=costs, **(OPTIONS | {"context": 9000})
        )


def test_a_table_without_knee_wants_k_max(trace_file, tmp_path):
    costs = f"table:{steps(tmp_path / 'steps.csv')}"
    with pytest.raises(InputError, match="Measure more tokens per request, or give k_max"):
        simulator.simulate(
            [POLICY], trace=str(trace_file), costs=costs, **(OPTIONS | {"k_max": None})
        )


def test_two_versions_are_told_apart_by_a_field(tmp_path):
    one, two = steps(tmp_path / "a.csv"), steps(tmp_path / "b.csv", engine="sglang 0.6")
    both = tmp_path / "both.csv"
    both.write_text(one.read_text() + two.read_text().split("\n", 1)[1])
    computed = build_cost_model("llama-3.1-8b", "h100", 1)
    with pytest.raises(InputError, match=r"'sglang 0.5'; 'sglang 0.6'. Name one: engine=NAME"):
        apply_choice(parse_choice(f"table:{both}"), computed)
    chosen = apply_choice(parse_choice(f"table:{both}:engine=sglang 0.6"), computed)
    assert "sglang 0.6" in chosen.label
    with pytest.raises(UnknownNameError, match="gpu in the step times"):
        apply_choice(parse_choice(f"table:{one}"), build_cost_model("llama-3.1-8b", "h200", 1))


def test_only_constants_can_be_drawn(trace_file, tmp_path):
    costs = f"affine:{steps(tmp_path / 'steps.csv')}"
    with pytest.raises(InputError, match="--costs affine has none to draw"):
        simulator.simulate([POLICY], trace=str(trace_file), costs=costs, cost_interval=3, **OPTIONS)


def columns(names, rows):
    return {n: np.array(cells) for n, cells in zip(names.split(), zip(*rows), strict=True)}  # noqa: B905


def gemm_ms(m, n, k):
    return 0.003 + 1e-12 * m * n * k


@pytest.fixture
def kernels(tmp_path):
    """Kernels that follow a product of their sizes, which the interpolation gives back."""
    names = "isl num_heads num_key_value_heads head_dim attn_dtype kv_cache_dtype window_size"
    shape = (1, 32, 8, 128, "bfloat16", "bfloat16", 0)
    files = {
        "gemm/sglang/1/gemm_perf": columns(
            "gemm_dtype m n k latency",
            [("bfloat16", m, n, k, gemm_ms(m, n, k)) for m in (1, 16384)
             for n in (32, 65536) for k in (32, 65536)],
        ),
        "attention/sglang/1/generation_attention_perf": columns(
            f"batch_size step latency {names}",
            [(b, s, 0.01 + 1e-6 * b * (s + 1), *shape) for b in (1, 512) for s in (0, 16383)],
        ),
    }  # fmt: skip
    for name in files:
        path = tmp_path / "h100_sxm" / f"{name}.parquet"
        path.parent.mkdir(parents=True)
        path.touch()

    def read(path):
        return files[path.relative_to(tmp_path / "h100_sxm").with_suffix("").as_posix()]

    return open_aic_kernels(folder=tmp_path, read=read)


def test_measured_kernels_make_a_forward(kernels):
    computed = build_cost_model("llama-3.1-8b", "h100", 1)
    costs: StepCosts = build_aic_costs(computed, kernels=kernels)
    parts, own = (model.verify_parts(8, 8, 8 * 1023) for model in (costs, computed))
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    assert parts["gemm"] == pytest.approx(32 * sum(gemm_ms(8, n, k) for n, k in shapes) / 1e3)
    assert parts["attention"] == pytest.approx(32 * (0.01 + 1e-6 * 8 * 1024) / 1e3)
    for name in ("elementwise", "lm_head", "argmax"):
        assert parts[name] == own[name]
    assert costs.verify_s(8, 8, 8 * 1023) == pytest.approx(sum(parts.values()))
    assert costs.host_s(3) == computed.host_s(3)
    assert costs.draft_layer_s(8, 8, 999) == computed.draft_layer_s(8, 8, 999)
    assert "h100_sxm, bfloat16: aiconfigurator kernels of sglang; drafts, prefill" in costs.label
    json.dumps(costs.describe(), allow_nan=False)


def test_more_queries_read_the_keys_once(kernels):
    costs = build_aic_costs(build_cost_model("llama-3.1-8b", "h100", 1), kernels=kernels)
    one, many = (costs.verify_parts(rows, 8, 8 * 8192)["attention"] for rows in (8, 64))
    assert one < many < 1.2 * one


def test_knee_of_measured_kernels(kernels):
    costs = build_aic_costs(build_cost_model("llama-3.1-8b", "h100", 1), kernels=kernels)
    k_max = costs.knee_k_max(8, 1024)
    limit_s = 1.25 * costs.plain_decode_s(8, 8 * 1024)
    assert costs.verify_s(8 + k_max, 8, 8 * 1024) <= limit_s
    assert costs.verify_s(8 + k_max + 64, 8, 8 * 1024) > limit_s


def test_machines_without_kernels(kernels):
    with pytest.raises(InputError, match="kernels of h100, h200, a100; got cpu"):
        build_aic_costs(build_cost_model("qwen3-8b", "cpu", 1, engine="cpu"), kernels=kernels)


def test_a_missing_extra_is_one_sentence(monkeypatch, capsys, trace_file):
    monkeypatch.setattr(aic_tables, "find_spec", lambda name: None)
    arguments = ["--trace", str(trace_file), "--target", "llama-3.1-8b"]
    monkeypatch.setattr(sys, "argv", ["simulate", *arguments, "--costs", "aiconfigurator"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "Error: The cost model aiconfigurator needs the extra [aiconfigurator]: "
        "pip install 'echo-spec[aiconfigurator]'.\n"
    )
