"""Policy after policy, batch size after batch size, until a user asks to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from echo_policies.api import Policy
from echo_policies.errors import InputError
from gpu_backend.serve_prepare import PreparedBatch, Progress


@dataclass(frozen=True, slots=True)
class RunLoop:
    """The runs of one command; those before a Ctrl-C are reported all the same."""

    runs: tuple[tuple[PreparedBatch, Policy], ...]
    progress: Progress
    should_stop: Callable[[], bool]

    @classmethod
    def over(
        cls,
        batches: Sequence[PreparedBatch],
        *,
        with_plain: bool,
        progress: Progress,
        should_stop: Callable[[], bool],
    ) -> RunLoop:
        """Every policy at every batch size.

        Args:
            batches: policies by batch size, plain decoding first.
            with_plain: whether plain decoding is run as well.
            progress: shown after every run.
            should_stop: asked before every run.

        Raises:
            InputError: there is nothing to run.
        """
        first = 0 if with_plain else 1
        runs = [(batch, policy) for batch in batches for policy in batch.policies[first:]]
        if not runs:
            raise InputError("policies: one at least must draft; plain decoding decides nothing.")
        return cls(tuple(runs), progress, should_stop)

    def __iter__(self) -> Iterator[tuple[PreparedBatch, Policy]]:
        """Give one run after the other, until it is asked to stop.

        Raises:
            KeyboardInterrupt: it was asked before the first one.
        """
        for done, run in enumerate(self.runs):
            self.progress("runs", done, len(self.runs))
            if self.should_stop():
                if not done:
                    raise KeyboardInterrupt
                return
            yield run
        self.progress("runs", len(self.runs), len(self.runs))
