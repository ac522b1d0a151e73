"""Recorded requests and what is known of them, joined into one trace."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from gpu_backend.answers import Answered
from gpu_backend.config import RecordConfig
from traces.schema import (
    Costing,
    ModelInfo,
    PositionArrays,
    Provenance,
    RequestInfo,
    Trace,
    TraceArrays,
    TraceHeader,
)
from traces.version import package_version

RecordedRequest = tuple[Answered, PositionArrays]


@dataclass(frozen=True, slots=True)
class HeaderText:
    """What the user says about a recording."""

    name: str
    costed_as: str
    """Target whose costs the trace is charged with by default."""
    recorded_as: str = ""
    """Catalogue name of the recorded pair itself."""
    licence: str = ""
    target_name: str | None = None
    draft_name: str | None = None
    """Names of the models, where their files call them something else."""


def assemble(
    config: RecordConfig,
    text: HeaderText,
    *,
    target: ModelInfo,
    draft: ModelInfo,
    drafter: Literal["draft_model", "eagle3", "prompt_lookup"],
    tokenizer: str,
    vocab_size: int,
    device: str,
    libraries: dict[str, str],
    date: str,
    requests: list[RecordedRequest],
) -> Trace:
    """Build a trace of recorded requests, in the order given; nothing is written."""
    from traces.store import make_trace

    header = TraceHeader(
        name=text.name,
        target=_named(target, text.target_name),
        draft=_named(draft, text.draft_name),
        drafter=drafter,
        recorded_as=text.recorded_as,
        costing=Costing(target=text.costed_as),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        licence=text.licence,
        levels=config.levels,
        beam_width=config.beam_width,
        root_width=config.root_width,
        top_k=config.top_k,
        chain_levels=config.chain_levels,
        provenance=Provenance(
            kind="recorded",
            generator=f"run_gpu record {package_version()}",
            date=date,
            device=device,
            libraries=libraries,
        ),
        requests=tuple(_request_info(said, config) for said, _ in requests),
    )
    return make_trace(header, _joined(requests))


def _request_info(said: Answered, config: RecordConfig) -> RequestInfo:
    prompt = said.prompt
    return RequestInfo(
        task=prompt.task,
        question_id=prompt.question_id,
        turn=prompt.turn,
        prompt_tokens=len(prompt.token_ids),
        max_new_tokens=config.max_new_tokens,
        finish_reason=said.output.finish_reason,
        split=prompt.split,
    )


def _named(model: ModelInfo, name: str | None) -> ModelInfo:
    return model if name is None else model.model_copy(update={"name": name})


def _joined(requests: list[RecordedRequest]) -> TraceArrays:
    """Arrays of all requests behind one another, and the offsets between them."""
    positions = [said.output.num_emitted - 1 for said, _ in requests]
    tokens = [len(said.output.tokens) for said, _ in requests]
    joined = {
        field.name: np.concatenate([getattr(arrays, field.name) for _, arrays in requests])
        for field in fields(PositionArrays)
    }
    return TraceArrays(
        position_offset=np.cumsum([0, *positions], dtype=np.int64),
        token_offset=np.cumsum([0, *tokens], dtype=np.int64),
        **joined,
    )
