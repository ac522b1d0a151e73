"""Outputs of a target that were recorded before, so that another draft meets the same text."""

from __future__ import annotations

from echo_policies.errors import InputError
from gpu_backend.config import RecordConfig
from gpu_backend.greedy import TargetOutput
from gpu_backend.prompts import Prompt
from traces.schema import ModelInfo, Trace


class RecordedOutputs:
    """Answers prompts from a recording instead of decoding.

    - :meth:`check_target` says whether the recording can serve.
    - :meth:`decode` finds the outputs of prompts.
    """

    def __init__(self, trace: Trace, config: RecordConfig) -> None:
        """Index the recording's requests.

        Args:
            trace: the recording.
            config: of the new recording.
        """
        self._trace = trace
        self._config = config
        self._number = {
            (info.task, info.question_id, info.turn): q
            for q, info in enumerate(trace.header.requests)
        }

    @property
    def digest(self) -> str:
        """Of the recording's content."""
        return self._trace.digest

    def check_target(self, target: ModelInfo) -> None:
        """Refuse another target, the same in other arithmetic, or too short a look-ahead.

        Raises:
            InputError: naming what differs.
        """
        recorded = self._trace.header.target
        levels, needed = self._trace.header.chain_levels, self._config.chain_levels
        if levels < needed:
            raise InputError(
                f"--outputs-of: the recording must look ahead {needed} tokens (--chain-levels); "
                f"it looks ahead {levels}. Lower --chain-levels."
            )
        for field in ("digest", "dtype"):
            ours, theirs = getattr(target, field), getattr(recorded, field)
            if ours != theirs:
                raise InputError(
                    f"--outputs-of: the recording must be of this target; its {field} is "
                    f"{theirs!r}, the target's is {ours!r}. Leave the option out to decode again."
                )

    def decode(self, prompts: list[Prompt]) -> list[TargetOutput]:
        """Outputs of prompts.

        Raises:
            InputError: a prompt is not in the recording, or was asked in another way.
        """
        return [self._output(prompt) for prompt in prompts]

    def _output(self, prompt: Prompt) -> TargetOutput:
        q = self._number.get((prompt.task, prompt.question_id, prompt.turn))
        if q is None:
            raise InputError(
                f"--outputs-of: every prompt must be in the recording; {prompt.label} is not. "
                "Give the prompt files and limits that it was made with."
            )
        info = self._trace.header.requests[q]
        limits = (len(prompt.token_ids), self._config.max_new_tokens)
        recorded = (info.prompt_tokens, info.max_new_tokens)
        if limits != recorded:
            raise InputError(
                "--outputs-of: prompt length and max_new_tokens must be as recorded; "
                f"{prompt.label} has {limits}, the recording {recorded}. "
                "Give the prompt files and limits that it was made with."
            )
        emitted = len(self._trace.output_tokens(q))
        tokens = self._trace.all_tokens(q)[: emitted + self._config.chain_levels]
        return TargetOutput(
            tokens=tokens.tolist(),
            num_emitted=emitted,
            finish_reason=info.finish_reason,
        )
