"""Laws of whole simulations: metamorphic, conservation, determinism, intervals."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import fields

import numpy as np
import pytest

import simulator
from echo_policies.api import DraftPlan, Gate, Policy
from echo_policies.errors import InputError, SignalError, UnknownNameError
from echo_policies.gates.open import OpenGate
from echo_policies.registry import parse
from echo_policies.schedulers.rerank import Rerank
from echo_policies.schedulers.static import Chain
from simulator.config import make_config
from simulator.run import calibrated, measured_requests, simulation_run
from simulator.setting import make_setting
from traces.records import RunRecords, StepTimes
from traces.store import make_trace, save

ECHO = "echo:levels=5,top_k=4"
SHAPES = [
    "autoregressive",
    "chain:levels=3",
    "static:tree=0/1/00/01",
    "eagle3:levels=4,top_k=3,nodes=6",
    ECHO,
    "dense:levels=5,top_k=4",
    "fixed:levels=5,top_k=4",
]
COSTED = {"target": "llama-3.1-8b"}


def records_of(trace_file, spec: str, batch_size: int = 4, **options) -> RunRecords:
    config = make_config(
        policies=(spec,), trace=str(trace_file), batch_sizes=(batch_size,), **COSTED, **options
    )
    setting = make_setting(config)
    k_max, _ = setting.k_max(batch_size)
    fitted = calibrated(setting, parse(spec), batch_size, k_max)
    return simulation_run(setting, fitted, batch_size, k_max).records("lower")


def seconds(run: RunRecords, part: str):
    """Seconds of one part of every step."""
    return run.times_SX[:, [field.name for field in fields(StepTimes)].index(part)]


def test_few_requests_on_many_slots_are_measured(trace_file):
    """Kind: the step that ends the warm-up finishes all that was asked for; nothing is recorded."""
    for spec in ("autoregressive", "eagle3:levels=4,top_k=3,nodes=6"):
        for batch_size in (64, 256):
            assert len(records_of(trace_file, spec, batch_size, requests=1).times_SX)


@pytest.mark.parametrize("spec", SHAPES)
def test_tokens_are_conserved(trace_file, spec):
    records = records_of(trace_file, spec, k_max=12)
    live = records.live_SB
    emitted, accepted = records.emitted_SB[live], records.accepted_SB[live]
    # Every step emits its accepted tokens and the bonus token, unless the output ends inside.
    cut = emitted == accepted
    assert ((emitted == accepted + 1) | cut).all()
    assert emitted.sum() == accepted.sum() + live.sum() - cut.sum()
    assert (emitted >= 1).all()
    assert (records.emitted_SB[~live] == 0).all()


@pytest.mark.parametrize("spec", SHAPES)
def test_requests_emit_exactly_the_recorded_output(trace, trace_file, spec):
    """Kind: a token lost or repeated where blocks meet."""
    records = records_of(trace_file, spec, batch_size=3, k_max=9)
    offsets = trace.arrays.position_offset
    for slot in range(3):
        request, emitted = records.request_SB[:, slot], records.emitted_SB[:, slot]
        bounds = np.flatnonzero(np.diff(request) != 0) + 1
        # Whole requests only: the first and the last of a slot are cut by the measured window.
        for start, stop in itertools.pairwise(bounds):
            recorded = request[start]
            positions = offsets[recorded + 1] - offsets[recorded]
            repeats = emitted[start:stop].sum() / positions
            assert repeats == int(repeats) >= 1
            steps = np.concatenate([[0], np.cumsum(emitted[start:stop])])[:-1] % positions
            tokens = trace.output_tokens(int(recorded))
            said = [
                tokens[a + 1 : a + 1 + n] for a, n in zip(steps, emitted[start:stop], strict=True)
            ]
            assert np.array_equal(np.concatenate(said), np.tile(tokens[1:], int(repeats)))


def test_doubling_every_cost_halves_throughput_exactly(trace_file):
    once, twice = (
        simulator.simulate(
            policies=SHAPES[1:4], trace=str(trace_file), batch_sizes=(4,), scale_costs=s, **COSTED
        )
        for s in (1.0, 2.0)
    )
    for a, b in zip(once.batches[0].rows, twice.batches[0].rows, strict=True):
        assert a.summary.tokens_per_s == 2 * b.summary.tokens_per_s
        assert a.summary.mat == b.summary.mat


def test_no_budget_is_plain_decoding(trace_file):
    result = simulator.simulate(
        policies=[ECHO], trace=str(trace_file), batch_sizes=(4,), k_max=0, **COSTED
    )
    plain, echo = result.batches[0].rows
    assert echo.summary.tokens_per_s == plain.summary.tokens_per_s
    assert echo.summary.mat == 1
    assert math.isnan(echo.summary.utilisation)


@pytest.mark.parametrize("spec", SHAPES)
@pytest.mark.parametrize("k_max", [0, 1, 5, 10**6])
def test_cap_all_keeps_every_step_within_k_max(trace_file, spec, k_max):
    records = records_of(trace_file, spec, k_max=k_max, cap_all=True)
    assert (records.verified_SB.sum(axis=1) <= k_max).all()


def test_the_same_seed_gives_the_same_bytes(trace_file):
    runs = [
        simulator.simulate(
            policies=[ECHO, "chain:levels=3"],
            trace=str(trace_file),
            batch_sizes=(2, 5),
            by_task=True,
            seed=seed,
            **COSTED,
        )
        for seed in (3, 3, 4)
    ]
    assert runs[0].to_json() == runs[1].to_json()
    assert runs[0].to_csv() == runs[1].to_csv()
    assert runs[0].to_csv() != runs[2].to_csv()


def test_processes_change_nothing(trace_file):
    options = {"trace": str(trace_file), "batch_sizes": (1, 3), **COSTED}
    alone = simulator.simulate(policies=[ECHO], jobs=1, **options)
    beside = simulator.simulate(policies=[ECHO], jobs=2, **options)
    assert alone.to_json() == beside.to_json().replace('"jobs": 2', '"jobs": 1')


def test_json_holds_what_is_needed_to_repeat_it(trace, trace_file):
    result = simulator.simulate(policies=[ECHO], trace=str(trace_file), batch_sizes=(2,), **COSTED)
    content = json.loads(result.to_json())
    assert content["trace_digest"] == trace.digest
    assert content["config"]["seed"] == 0
    assert content["versions"]["torch"]
    assert content["is_what_if"] is True
    assert content["trace"]["provenance"]["kind"] == "synthetic"
    parameters = content["batches"][0]["rows"][1]["parameters"]
    assert parameters["taus"]
    assert parameters["w_topk"] in {1, 2, 3, 4}


def test_intervals_hold_the_value_and_plain_decoding_is_one(trace_file):
    result = simulator.simulate(
        policies=["chain:levels=3"], trace=str(trace_file), batch_sizes=(4,), **COSTED
    )
    plain, chain = result.batches[0].rows
    assert plain.policy == "autoregressive"
    assert plain.speedup.value == plain.speedup.low == plain.speedup.high == 1
    assert chain.speedup.low <= chain.speedup.value <= chain.speedup.high
    assert chain.speedup.low < chain.speedup.high


def test_policies_serve_the_same_requests(trace_file):
    first = [
        [r.recorded for r in records_of(trace_file, spec, batch_size=1).requests]
        for spec in ("autoregressive", "chain:levels=3")
    ]
    assert first[0] == first[1]


def test_masked_mode_pays_for_every_level_and_no_check(trace_file):
    spec = "dense:levels=5,top_k=4,w_topk=1"
    staged = records_of(trace_file, spec, k_max=2)
    masked = records_of(trace_file, spec, k_max=2, mode="masked")
    assert masked.levels_S.mean() > staged.levels_S.mean()
    assert seconds(masked, "check_s").sum() == 0
    assert seconds(staged, "check_s").sum() > 0
    assert np.array_equal(masked.verified_SB, staged.verified_SB)


def test_open_loop_charges_prefill_and_queues(trace_file):
    options = {"batch_size": 2, "arrivals": "poisson", "requests": 30}
    idle = records_of(trace_file, "chain:levels=3", rate=0.5, **options)
    busy = records_of(trace_file, "chain:levels=3", rate=500.0, **options)
    assert idle.idle_s > 0
    assert busy.idle_s < idle.idle_s
    assert seconds(idle, "prefill_s").sum() > 0
    waits = [np.median([r.ttft_s for r in run.requests]) for run in (idle, busy)]
    assert waits[1] > 2 * waits[0] > 0
    assert (idle.request_SB == -1).any()


def test_overload_ends():
    """Kind: a queue that grows without bound, and the run with it."""
    options = {"batch_size": 2, "arrivals": "poisson", "requests": 6, "rate": 1e6}
    records = records_of("qwen2.5-coder-1.5b", "chain:levels=3", **options)
    assert len(records.requests) >= 6


def test_measured_requests_are_whole_cycles():
    config = make_config()
    assert measured_requests(config, 8, 1) == 8
    assert measured_requests(config, 8, 32) == 64
    assert measured_requests(make_config(requests=5), 8, 32) == 5


def test_tasks_partition_the_batch(trace_file):
    result = simulator.simulate(
        policies=["chain:levels=3"], trace=str(trace_file), batch_sizes=(4,), by_task=True, **COSTED
    )
    for row in result.batches[0].rows:
        assert len(row.tasks) > 1
        assert sum(part.summary.k_per_step for part in row.tasks) == pytest.approx(
            row.summary.k_per_step
        )
        assert sum(part.summary.request_steps for part in row.tasks) == row.summary.request_steps


def test_one_task_only(trace, trace_file):
    task = trace.header.requests[0].task
    result = simulator.simulate(
        policies=["chain:levels=2"], trace=str(trace_file), batch_sizes=(2,), task=task, **COSTED
    )
    tasks = {trace.header.requests[q].task for q in result.evaluated_requests}
    assert tasks == {task}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"policies": ["ecoh"]}, UnknownNameError, "Did you mean 'echo'"),
        ({"policies": ["echo:treshold=1"]}, UnknownNameError, "Did you mean 'threshold'"),
        ({"policies": ["echo:w_max=0"]}, InputError, "w_max"),
        ({"policies": ["chain:levels=9"]}, SignalError, "drafts 9 levels, but the recording has 8"),
        ({"batch_sizes": (0,)}, InputError, "batch_sizes"),
        ({"batch_sizes": (10**7,)}, InputError, "batch_sizes"),
        ({"k_max": -1}, InputError, "k_max"),
        ({"task": "humanevil"}, UnknownNameError, "task"),
        ({"trace": "nowhere.pkl"}, UnknownNameError, "trace"),
        ({"target": "llama-3.1-8"}, UnknownNameError, "Did you mean 'llama-3.1-8b'"),
        ({"target": "recorded"}, InputError, "does not say what its own models cost"),
        ({"target": "qwen3-235b", "tp": 1}, InputError, "tp"),
        ({"hardware": "h1000"}, UnknownNameError, "Did you mean 'h100'"),
        ({"rate": 3.0}, InputError, "poisson"),
        ({"arrivals": "poisson"}, InputError, "rate"),
        ({"batchsize": 3}, UnknownNameError, "Did you mean 'batch_sizes'"),
        ({"jobs": 0}, InputError, "jobs"),
        ({"tp": 0}, InputError, "tp"),
        ({"check_ms": float("inf")}, InputError, "check_ms"),
        ({"arrivals": "poisson", "rate": float("inf")}, InputError, "rate"),
    ],
)
def test_bad_input_is_one_sentence(trace_file, options, error, words):
    with pytest.raises(error) as caught:
        simulator.simulate(**{"trace": str(trace_file), "batch_sizes": (2,), **COSTED, **options})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("trace", "target", "is_what_if"),
    [
        ("qwen2.5-coder-1.5b", None, True),
        ("qwen2.5-coder-1.5b", "recorded", False),
        ("qwen2.5-coder-1.5b", "qwen3-8b", True),
        ("qwen235b", None, False),
        ("qwen235b", "llama-3.1-8b", True),
    ],
)
def test_a_what_if_is_called_one(trace, target, is_what_if):
    """Kind: one pair's acceptance at another's cost, passed off as a forecast."""
    from simulator.setting import make_setting

    options = {"target": target} if target else {}
    assert make_setting(make_config(trace=trace, **options)).is_what_if == is_what_if


class _NeedsEntropy(Gate):
    needs = frozenset({"path_logp", "entropy"})

    def checkpoints(self, levels):
        return (1,)

    def evaluate(self, layer):
        assert layer.entropy_BF is not None
        return layer.entropy_BF[:, 0] < 1


def test_a_signal_that_the_trace_lacks_is_refused_by_name(trace_file):
    scheduler = parse(f"{ECHO},w_topk=1").scheduler
    policy = Policy(name="mine", gate=_NeedsEntropy(), scheduler=scheduler)
    with pytest.raises(SignalError, match="needs the signal 'entropy'"):
        simulator.simulate(policy, trace=str(trace_file), batch_sizes=(2,), **COSTED)
    # The bundled recording has it.
    result = simulator.simulate(policy, batch_sizes=(2,), requests=3)
    assert result.row("mine", 2).summary.checks_per_step > 0


@pytest.mark.parametrize(
    ("split", "words"),
    [("calibration", "must hold evaluation requests"), ("evaluation", "no calibration requests")],
)
def test_a_split_that_is_missing_is_said(trace, tmp_path, split, words):
    infos = tuple(info.model_copy(update={"split": split}) for info in trace.header.requests)
    header = trace.header.model_copy(update={"requests": infos})
    save(make_trace(header, trace.arrays), tmp_path / "one.safetensors")
    with pytest.raises(InputError, match=words):
        simulator.simulate(
            ECHO, trace=str(tmp_path / "one.safetensors"), batch_sizes=(2,), **COSTED
        )


def test_padded_verification_is_charged_by_the_widest_tree(trace_file):
    ragged, padded = (
        records_of(trace_file, f"{ECHO},w_topk=1", k_max=7, verify=verify)
        for verify in ("ragged", "padded")
    )
    assert np.array_equal(ragged.verified_SB, padded.verified_SB)
    verify_s = [seconds(run, "verify_s") for run in (ragged, padded)]
    uneven = ragged.verified_SB.max(axis=1) > ragged.verified_SB.min(axis=1)
    assert uneven.any()
    assert (verify_s[1] >= verify_s[0]).all()
    assert (verify_s[1] > verify_s[0])[uneven].any()
    assert np.array_equal(verify_s[1][~uneven], verify_s[0][~uneven])


def test_a_config_json_is_a_target(trace_file, tmp_path):
    """LLaMA-3.1-8B's own numbers give the catalogue's costs."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    named, given = (
        simulator.simulate("autoregressive", trace=str(trace_file), batch_sizes=(2,), target=target)
        for target in ("llama-3.1-8b", str(tmp_path / "config.json"))
    )
    rates = [run.batches[0].rows[0].summary.tokens_per_s for run in (named, given)]
    assert rates[0] == rates[1]
    with pytest.raises(InputError, match=r"draft goes with a config\.json"):
        simulator.simulate("chain", trace=str(trace_file), draft="x.json", **COSTED)


class _SeesCosts(Rerank):
    """Drafts only where a verify forward of twice the rows is cheap."""

    def begin(self, ctx, memory):
        plan, state = super().begin(ctx, memory)
        if ctx.costs is not None:
            once, twice = (ctx.costs.verify_s(rows * ctx.num_live) for rows in (1, 2))
            assert 0 < once <= twice
            assert ctx.costs.draft_layer_s(ctx.num_live) > 0
            if twice > 1.2 * once:
                return DraftPlan(0), state
        return plan, state


def test_policies_see_what_a_step_costs(trace_file):
    policy = Policy(name="p", gate=OpenGate(), scheduler=_SeesCosts(levels=2, top_k=2, nodes=3))
    result = simulator.simulate(policy, trace=str(trace_file), batch_sizes=(1, 256), **COSTED)
    assert result.row("p", 1).summary.levels_per_step > 1
    assert result.row("p", 256).summary.levels_per_step == 0


def test_policies_need_names_of_their_own(trace_file):
    """Kind: two rows that nobody can tell apart."""
    two = [Policy(name="same", gate=OpenGate(), scheduler=Chain(levels=n)) for n in (1, 2)]
    with pytest.raises(InputError, match="'same'"):
        simulator.simulate(two, trace=str(trace_file), batch_sizes=(1,), **COSTED)
    once = simulator.simulate(["chain", "chain"], trace=str(trace_file), batch_sizes=(1,), **COSTED)
    assert [row.policy for row in once.batches[0].rows] == ["autoregressive", "chain"]


def test_a_calibration_file_is_read_even_where_no_policy_needs_it(trace_file, tmp_path):
    """Kind: an option that is silently ignored."""
    with pytest.raises(InputError, match="calibration file or bundled trace"):
        simulator.simulate(
            "chain", trace=str(trace_file), batch_sizes=(1,), calibration=tmp_path / "x", **COSTED
        )


def test_csv_holds_configuration_and_versions(trace_file):
    result = simulator.simulate(ECHO, trace=str(trace_file), batch_sizes=(2,), seed=5, **COSTED)
    line = list(csv.DictReader(result.to_csv().splitlines()))[1]
    assert json.loads(line["config"])["seed"] == 5
    assert json.loads(line["versions"])["torch"]
    assert json.loads(line["parameters"])["w_topk"] in {1, 2, 3, 4}


@pytest.mark.parametrize("options", ["", ":best_case=1"])
def test_a_tree_that_collapses_at_a_large_batch_falls_back(options):
    """59 nodes of 128 requests: a fraction of plain decoding, tried (``best_case=1``) or not."""
    policies = ["eagle3", f"eagle3+fallback{options}"]
    result = simulator.simulate(policies, batch_sizes=[128], requests=128, unrevealed="lower")
    bare, wrapped = (result.row(name, 128) for name in policies)
    assert bare.speedup.value < 0.5
    assert wrapped.speedup.value >= 0.97


def test_a_fallback_changes_nothing_where_drafting_pays(trace_file):
    policies = ["chain:levels=3", "chain:levels=3+fallback"]
    result = simulator.simulate(
        policies, trace=str(trace_file), batch_sizes=[2], requests=4, **COSTED
    )
    bare, wrapped = (result.row(name, 2) for name in policies)
    assert wrapped.summary.tokens_per_s == bare.summary.tokens_per_s
