"""Engines over tiny models, and the slow truth they are held against."""

import torch

from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.registry import parse
from echo_policies.testing.play import LinearCosts
from gpu_backend.model_preparation import prepare_model
from gpu_backend.sampling import Sampling, choose, request_seed
from gpu_backend.serving import ModelPair, ServeSettings, build_engine
from gpu_backend.serving_batch import ServeRequest
from tests.gpu_backend.tiny import VOCAB, disturb, tiny_model

GREEDY = Sampling()
UNLIMITED = 10**6


class Ticks:
    """A clock that moves by one second whenever it is read, so that nothing depends on speed."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        self.seconds += 1.0
        return self.seconds


def make_pair(
    kind="qwen2", draft="different", stops=(), limit=256, dtype=torch.float32, *, draft_vocab=VOCAB
):
    """A target, and a draft that is another model, nearly the same one, the very same, or none.

    ``lookup`` is none: drafts are looked up.
    """
    target = tiny_model(kind, seed=1, limit=limit)
    if draft == "lookup":
        prepare_model(target, VOCAB)
        return ModelPair(target, None, VOCAB, frozenset(stops), looks_up=True)
    drafter = tiny_model(kind, seed=2 if draft == "different" else 1, limit=limit)
    if draft == "close":
        disturb(drafter, 0.05)
    for model, size in ((target, VOCAB), (drafter, draft_vocab)):
        model.to(dtype)
        prepare_model(model, size)
    return ModelPair(target, drafter, VOCAB, frozenset(stops))


def calibrated(spec):
    """A policy with thresholds that close some gates and open others."""
    policy = parse(spec)
    if policy.is_calibrated:
        return policy
    gate = policy.gate
    if isinstance(gate, ConfidenceGate):
        depths = (1, 2, 3, 4) if gate.gate_set == "dense" else (2, 4)
        gate = gate.model_copy(update={"taus": tuple((depth, 0.3**depth) for depth in depths)})
    update = {"w_topk": 2} if getattr(policy.scheduler, "w_topk", None) == "auto" else {}
    scheduler = policy.scheduler.model_copy(update=update)
    return policy.model_copy(update={"gate": gate, "scheduler": scheduler})


def requests(prompts, max_new_tokens, seed=0):
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    return [
        ServeRequest(number, prompt, limit, request_seed(seed, number))
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def make_engine(pair, spec, asked, *, batch=3, k_max=12, sampling=GREEDY, **changes):
    settings = {
        "num_slots": batch,
        "k_max": k_max,
        "max_tokens": max(request.num_tokens for request in asked),
        "sampling": sampling,
        "prefill_chunk": 7,
        "costs": LinearCosts(),
        **changes,
    }
    return build_engine(pair, calibrated(spec), ServeSettings(**settings), Ticks())


def serve(engine, asked):
    """Outputs by request number, all requests submitted at once."""
    for request in asked:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    return outputs(engine)


def outputs(engine):
    return {done.request.number: list(done.output) for done in engine.finished}


@torch.inference_mode()
def true_output(model, request, sampling=GREEDY, stops=(), vocab=VOCAB):
    """One forward by transformers over the whole text for every token."""
    text = list(request.prompt)
    while len(text) < request.num_tokens:
        logits = model(torch.tensor([text])).logits[:, -1, :vocab]
        key = torch.tensor([request.seed]), torch.tensor([len(text)])
        text.append(int(choose(logits, *key, sampling)))
        if text[-1] in stops:
            break
    return text[len(request.prompt) :]
