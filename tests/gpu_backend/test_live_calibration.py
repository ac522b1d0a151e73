"""Samples of a warm-up equal what slow drafts at every position of the outputs give."""

import numpy as np
import torch

from echo_policies.api import Policy
from echo_policies.gates.open import OpenGate
from echo_policies.registry import parse
from gpu_backend.live_calibration import BEAM_WIDTH, BeamLog, Probe, fit, warm_up
from gpu_backend.sampling import Sampling
from gpu_backend.serving import ServeSettings, build_engine
from tests.gpu_backend.reference import PlainDraft
from tests.gpu_backend.serve import make_pair, requests, serve, true_output
from tests.gpu_backend.tiny import VOCAB, disturb, tiny_model

PROMPTS = [[5, 9, 40, 7], [11, 3], [60, 61, 62, 63, 64, 65, 66, 67]]
WARM = Sampling(temperature=0.8)
LEVELS, TOP_K = 3, 3


def slow_sample(draft, text, output, position):
    """Best log-prob, revealed and on-path per depth of a beam grown by plain forwards."""
    beam = [(np.float32(0), [])]
    log_c, accepted = [], []
    for _ in range(LEVELS):
        found = []
        for score, path in beam:
            tokens, logp = draft.children([*text, *path], TOP_K)
            found += [
                (score + np.float32(np.float16(value)), [*path, token])
                for token, value in zip(tokens, logp, strict=True)
            ]
        log_c.append(max(score for score, _ in found))
        ahead = output[position : position + len(found[0][1])]
        accepted.append(any(path == ahead for _, path in found))
        beam = sorted(found, key=lambda node: -node[0])[:BEAM_WIDTH]
    return log_c, accepted


def test_samples_are_those_of_slow_drafts():
    pair = make_pair(draft="close")
    asked = requests(PROMPTS, [7, 5, 6])
    probe = Policy(name="probe", gate=OpenGate(), scheduler=Probe(levels=LEVELS, top_k=TOP_K))
    settings = ServeSettings(num_slots=2, k_max=0, max_tokens=16, sampling=WARM)
    engine = build_engine(pair, probe, settings)
    engine.observer = log = BeamLog(engine.drafter, LEVELS)
    outputs = serve(engine, asked)
    plain, draft = tiny_model(seed=1), PlainDraft(disturb(tiny_model(seed=1), 0.05), VOCAB)
    assert outputs == {r.number: true_output(plain, r, WARM) for r in asked}
    samples = log.samples(outputs)
    # The first token comes from prefill, and the last one needs no draft.
    assert len(samples.request_N) == sum(len(output) - 2 for output in outputs.values())
    position = dict.fromkeys(outputs, 0)
    for n, request in enumerate(samples.request_N):
        position[request] += 1
        output, place = outputs[request], position[request]
        text = [*PROMPTS[request], *output[:place]]
        log_c, accepted = slow_sample(draft, text, output, place)
        room = len(output) - place
        # The last position has room for the bonus token alone; each draft level needs one more.
        levels = min(LEVELS, room - 1)
        np.testing.assert_allclose(samples.log_c_ND[n, :levels], log_c[:levels], atol=2e-3)
        reached = [d < levels and (d == 0 or accepted[d - 1]) for d in range(LEVELS)]
        assert samples.reached_ND[n].tolist() == reached
        assert samples.accepted_ND[n, :levels].tolist() == accepted[:levels]


def test_policies_come_back_fitted():
    pair = make_pair(draft="close")
    rng = np.random.default_rng(1)
    asked = requests([rng.integers(2, 97, 5).tolist() for _ in range(8)], 14)
    settings = ServeSettings(num_slots=8, k_max=8, max_tokens=19, sampling=WARM)
    given = [parse(spec) for spec in ("chain", "echo:levels=3", "dense:levels=4")]
    samples = warm_up(pair, given, settings, asked)
    fitted = fit(given, samples, settings)
    assert fitted[0] is given[0]
    assert all(policy.is_calibrated for policy in fitted)
    assert len(samples.request_N) == 8 * 12
    assert all(0 <= tau <= 1 for policy in fitted[1:] for _, tau in policy.gate.taus)
    torch.testing.assert_close(fitted[1].scheduler.w_topk, 1)
