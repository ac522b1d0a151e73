"""Dialogues that a chat model makes up: it writes the user's turn, then answers it.

A chat model given the opening of a user's turn goes on as users do (Xu et al., arXiv 2406.08464),
so a head can be trained on what its target says without any data set. Turns are sampled, because
they must differ; answers are greedy, because that is what a head is measured on. Both depend on
nothing but target, seed and number of the dialogue.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from echo_policies.errors import InputError
from echo_policies.presets import autoregressive
from gpu_backend.sampling import Sampling, request_seed
from gpu_backend.serve_loop import serve_all
from gpu_backend.serving import ModelPair, ServeSettings, build_engine
from gpu_backend.serving_batch import ServeRequest
from traces.store import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH: Final = 64
"""Dialogues written at a time."""

PART: Final = 192
"""Dialogues per file; what a kill loses at most."""

TURN_SAMPLING: Final = Sampling(temperature=1.0, top_k=50, top_p=0.95)

_MARK: Final = "\x00"


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One user's turn, chat template included, and its answer."""

    number: int
    tokens: tuple[int, ...]
    answer_start: int
    """Tokens before the answer."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How some users' turns begin."""

    text: str
    max_tokens: int
    """Tokens that the target adds to it, at most."""


def load_openings() -> tuple[Opening, ...]:
    """Openings of the kinds of turns that heads are used for."""
    text = (files("gpu_backend") / "data" / "openings.toml").read_text()
    return tuple(Opening(**entry) for entry in tomllib.loads(text)["opening"])


class DialogueWriter:
    """Lets a target write dialogues."""

    def __init__(
        self, pair: ModelPair, tokenizer: PreTrainedTokenizerBase, *, max_answer: int, seed: int
    ) -> None:
        """Bind the target.

        Args:
            pair: the target, without a draft.
            tokenizer: the target's, with a chat template.
            max_answer: tokens of an answer, at most.
            seed: of the users' turns.
        """
        self._pair = pair
        self._tokenizer = tokenizer
        self._max_answer = max_answer
        self._seed = seed

    def write(self, numbers: Sequence[int], on_finished: Callable[[int], None]) -> list[Dialogue]:
        """Write the dialogues of these numbers.

        Args:
            numbers: of the dialogues.
            on_finished: called with the number of finished ones when it has grown.

        Raises:
            InputError: the tokenizer has no chat template that tells where a turn begins and ends.
        """
        before, after = self._template()
        # Where a template begins with what the user says, there is nothing to go on from.
        openings = [o for o in load_openings() if before or o.text]
        starts = [openings[number % len(openings)] for number in numbers]
        asks = [
            ServeRequest(
                number,
                self._ids(before + opening.text),
                opening.max_tokens,
                request_seed(self._seed, number),
            )
            for number, opening in zip(numbers, starts, strict=True)
        ]
        # Longest first, so that the batch stays full to the end.
        asks.sort(key=lambda request: -request.max_new_tokens)
        turns = self._serve(asks, TURN_SAMPLING)
        prompt = {request.number: request.prompt for request in asks}
        closing = self._ids(after)
        texts = {n: [*prompt[n], *self._spoken(turns[n]), *closing] for n in numbers}
        replies = [ServeRequest(n, texts[n], self._max_answer) for n in numbers]
        answers = self._serve(replies, Sampling(), on_finished)
        return [Dialogue(n, (*texts[n], *answers[n]), len(texts[n])) for n in numbers]

    def _template(self) -> tuple[str, str]:
        """Text before and after what a user says, up to where the answer begins."""
        if not self._tokenizer.chat_template:
            raise InputError(
                "target: the target writes its own training text, which needs a tokenizer with a "
                "chat template; this one has none. Use an instruction-tuned target."
            )
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        before, mark, after = str(text).partition(_MARK)
        if not mark:
            raise InputError("target: its chat template leaves out what the user says.")
        return before, after

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _spoken(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self._pair.stops]

    def _serve(
        self,
        requests: Sequence[ServeRequest],
        sampling: Sampling,
        on_finished: Callable[[int], None] = lambda count: None,
    ) -> dict[int, tuple[int, ...]]:
        """Output tokens by number."""
        settings = ServeSettings(
            num_slots=BATCH,
            k_max=0,
            max_tokens=max(request.num_tokens for request in requests),
            sampling=sampling,
        )
        engine = build_engine(self._pair, autoregressive(), settings)
        serve_all(engine, requests, on_finished=on_finished)
        return {done.request.number: done.output for done in engine.finished}


def save_dialogues(path: Path, dialogues: Sequence[Dialogue]) -> None:
    """Write dialogues as JSON lines, whole or not at all."""
    lines = [
        json.dumps({"number": d.number, "tokens": list(d.tokens), "output": d.answer_start})
        for d in dialogues
    ]
    write_whole(path, "".join(line + "\n" for line in lines).encode())


def load_dialogues(path: Path) -> list[Dialogue]:
    """Read what :func:`save_dialogues` wrote."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [Dialogue(e["number"], tuple(e["tokens"]), e["output"]) for e in entries]
