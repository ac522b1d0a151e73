"""Step files, fits, constants files: what they accept, what they recover, what they refuse."""

import math
from dataclasses import replace

import pytest

from echo_policies.errors import InputError, UnknownNameError
from simulator.cost.accuracy import accuracy
from simulator.cost.constants import ConstantsFile, load, parse, render, shipped_file
from simulator.cost.fit import cross_validate, fit_constants
from simulator.cost.host import ENGINES
from simulator.cost.parameters import CONSTANTS, FITTED_NAMES, NEUTRAL, CostParameters
from simulator.cost.predict import predict_all
from simulator.cost.stepfile import MeasuredStep, read_steps

HEADER = "model,tp,batch,context,tokens_per_request,measured_ms,gpu,dtype,engine,kind,isl,osl"


def rows_of(parameters, engine="trtllm", models=("llama-3.1-8b", "qwen3-32b")):
    steps = [
        MeasuredStep(
            line=0, model=model, hardware="h100", tp=tp, ep=1, dtype="bf16", engine=engine,
            kind="serving_tpot", batch=batch, context=isl, measured_ms=1.0, isl=isl, osl=osl,
        )
        for model in models
        for tp in (2, 4, 8)
        for batch, isl, osl in ((4, 512, 256), (16, 1024, 128), (64, 2048, 512))
    ]  # fmt: skip
    times = predict_all(steps, parameters)
    return [replace(step, measured_ms=ms) for step, ms in zip(steps, times, strict=True)]


def write(tmp_path, *lines, header=HEADER):
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_a_fit_recovers_the_constants_that_made_the_rows():
    truth = replace(NEUTRAL, trtllm_step_ms=0.9, trtllm_prefill_share=0.7)
    steps = rows_of(truth)
    found = fit_constants(steps)
    assert accuracy(steps, predict_all(steps, found.parameters)).overall.max < 0.02
    assert found.parameters.trtllm_step_ms == pytest.approx(0.9, rel=0.1)
    assert found.parameters.trtllm_prefill_share == pytest.approx(0.7, rel=0.1)
    low, high = found.intervals["trtllm_step_ms"]
    assert low < 0.9 < high
    # rows of one engine and bf16 say nothing of the others
    assert set(found.names) == {name for name in FITTED_NAMES if name.startswith("trtllm")}
    assert found.parameters.vllm_step_ms == NEUTRAL.vllm_step_ms


def test_one_wild_row_does_not_move_a_robust_fit():
    steps = rows_of(NEUTRAL)
    steps[0] = replace(steps[0], measured_ms=5.0 * steps[0].measured_ms)
    found = fit_constants(steps)
    others = steps[1:]
    assert accuracy(others, predict_all(others, found.parameters)).overall.median < 0.03


def test_a_fit_with_too_few_rows_says_how_many_it_needs():
    with pytest.raises(InputError, match=r"needs at least 5 measured steps; got 3. Measure 2 more"):
        fit_constants(rows_of(NEUTRAL)[:3])
    with pytest.raises(InputError, match="needs at least 5 measured steps; got 0"):
        fit_constants([])


def test_cross_validation_needs_two_groups():
    with pytest.raises(InputError, match="needs at least 2; got 1"):
        cross_validate(rows_of(NEUTRAL, models=("qwen3-32b",)))
    steps = rows_of(NEUTRAL)
    held_out = cross_validate(steps)
    assert accuracy(steps, held_out).overall.max < 0.01  # made by the model: nothing to learn


def test_rows_are_read_with_their_defaults(tmp_path):
    path = write(tmp_path, "qwen3-8b,1,8,340,1,7.6,H100 SXM,,vllm 0.11.0,decode_step,,")
    (step,) = read_steps(path, ENGINES)
    assert (step.hardware, step.engine, step.dtype, step.ep, step.topk) == (
        "h100", "vllm", "bf16", 1, 1,
    )  # fmt: skip
    assert step.group == ("qwen3-8b", "vllm")
    old = write(tmp_path, "qwen3-8b,1,8,340,1,7.6,H100 SXM,bf16,sglang 2025-03,decode_step,,")
    assert read_steps(old, ENGINES)[0].engine == "sglang-2025-03"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("qwen3-8b,1,8,340,1,0.0076,H100,bf16,vllm,decode_step,,", "looks like seconds.*by 1000"),
        ("qwen3-8b,1,8,340,1,76000,H100,bf16,vllm,decode_step,,", "looks like microseconds"),
        ("qwen3-8b,1,8,340,1,fast,H100,bf16,vllm,decode_step,,", "line 2: measured_ms must be a"),
        ("qwen3-8b,1,-8,340,1,7.6,H100,bf16,vllm,decode_step,,", "line 2: batch must be a number"),
        ("qwen3-8b,1,8,nan,1,7.6,H100,bf16,vllm,decode_step,,", "line 2: context must be a number"),
        ("qwen3-8b,1,8,340,1,7.6,H100,bf16,vlm,decode_step,,", "Did you mean 'vllm'"),
        ("qwen3-8b,1,8,340,1,7.6,H100,bf16,vllm,decode,,", "Did you mean 'decode_step'"),
        ("qwen3-8b,1,8,340,1,7.6,H100,bf16,vllm,serving_tpot,,", "serving_tpot needs isl and osl"),
        ("qwen3-8b,1,8,340,1,7.6,H100,bf16,vllm,spec_cycle,,", "spec_cycle needs steps"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        read_steps(write(tmp_path, line), ENGINES)


def test_missing_columns_are_named(tmp_path):
    path = write(tmp_path, "qwen3-8b,1", header="model,tp")
    with pytest.raises(InputError, match="it lacks batch, context, measured_ms, gpu, engine, kind"):
        read_steps(path, ENGINES)
    with pytest.raises(InputError, match="must be a CSV file of measured steps"):
        read_steps(tmp_path / "none.csv", ENGINES)
    with pytest.raises(InputError, match="at least one row below its header"):
        read_steps(write(tmp_path), ENGINES)


def test_unknown_model_in_a_file_offers_the_nearest(tmp_path):
    path = write(tmp_path, "qwen3-8,1,8,340,1,7.6,H100,bf16,vllm,decode_step,,")
    with pytest.raises(UnknownNameError, match="Did you mean 'qwen3-8b'"):
        predict_all(read_steps(path, ENGINES))


def test_constants_survive_their_file(tmp_path):
    found = fit_constants(rows_of(NEUTRAL))
    content = ConstantsFile(
        found.parameters, found.intervals, found.covariance, found.names, {"rows": 18}
    )
    path = tmp_path / "costs.toml"
    path.write_text(render(content))
    back = load(path)
    assert back.names == found.names
    assert back.provenance == {"rows": 18}
    for name in CONSTANTS:
        assert getattr(back.parameters, name) == pytest.approx(getattr(found.parameters, name))
    assert set(back.intervals) == set(found.names)


def test_shipped_constants_are_documented_and_few():
    content = shipped_file()
    assert len(content.names) == len(FITTED_NAMES) < 40
    for name in content.names:
        low, high = content.intervals[name]
        assert low < getattr(content.parameters, name) < high
    for constant in CONSTANTS.values():
        assert constant["unit"]
        assert constant["meaning"]
        assert constant["source"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not toml", "must be TOML"),
        ("a = 1", r"must hold a table \[constants\]"),
        ("[constants.gemm_flor_us]\nvalue = 1.0", "Did you mean 'gemm_floor_us'"),
        ("[constants.gemm_floor_us]\nvalue = -1.0", "must be a finite number above 0"),
        ("[constants.gemm_floor_us]\nvalue = nan", "must be a finite number above 0"),
        ("[constants.gemm_floor_us]\nvalue = true", "must be a finite number above 0"),
        ("[constants]\ngemm_floor_us = 1.0", "must be a table"),
    ],
)
def test_files_of_constants_that_are_wrong_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse(text, "x.toml")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path / "none.toml")


def test_constants_are_values():
    assert CostParameters() == CostParameters()
    assert hash(CostParameters()) == hash(CostParameters())
    assert all(math.isfinite(getattr(NEUTRAL, name)) for name in CONSTANTS)
