"""Accepted lengths against an oracle: what a plain draft and a plain target say at every step."""

import functools

import numpy as np
import pytest
import torch

from tests.gpu_backend.serve import make_engine, make_pair, requests, serve, true_output
from tests.gpu_backend.tiny import VOCAB, disturb, tiny_model

LEVELS = 3
PROMPTS = (23, 1, 9, 14)


@functools.cache
def asked():
    rng = np.random.default_rng(12)
    return requests([rng.integers(2, VOCAB, size).tolist() for size in PROMPTS], [12, 9, 12, 10])


@torch.inference_mode()
def greedy(model, text):
    return int(model(torch.tensor([text])).logits[0, -1, :VOCAB].argmax())


@functools.cache
def expected_trace():
    """Accepted tokens of every step of every request, without cache, batch or tree."""
    target, draft = tiny_model(seed=1), disturb(tiny_model(seed=1), 0.05)
    traces = {}
    for request in asked():
        output = true_output(target, request)
        traces[request.number], emitted = [], 1
        while emitted < len(output):
            text, accepted = [*request.prompt, *output[:emitted]], 0
            for _ in range(min(LEVELS, len(output) - emitted - 1)):
                token = greedy(draft, text)
                if token != output[emitted + accepted]:
                    break
                text.append(token)
                accepted += 1
            traces[request.number].append(accepted)
            emitted += accepted + 1
    return traces


@pytest.mark.parametrize(
    ("batch", "chunk", "is_staged"),
    [(1, 1, True), (8, 1, False), (3, 7, True), (1, 64, False), (8, None, True)],
)
def test_acceptance_is_that_of_the_two_models(batch, chunk, is_staged):
    """Kinds: a draft primed from the last chunk alone, or off at a chunk's end; drafts that get
    worse with batch size or execution mode; features or positions shifted by one."""
    engine = make_engine(
        make_pair(draft="close"),
        f"chain:levels={LEVELS}",
        asked(),
        batch=batch,
        prefill_chunk=chunk,
        is_staged=is_staged,
    )
    serve(engine, asked())
    log = engine.log.freeze()
    found = {r.number: log.accepted_SB[log.request_SB == r.number].tolist() for r in asked()}
    assert found == expected_trace()
    assert 0.5 < np.mean(np.concatenate(list(found.values()))) < LEVELS
