"""Every error a user can meet, in one tree.

::

    EchoError
    ├── InputError (ValueError)          a value the caller gave breaks a rule
    │   ├── UnknownNameError             a name that does not exist; offers the nearest one
    │   ├── PolicyLoadError              a policy file or entry point that cannot be used
    │   ├── SignalError                  a policy needs what a drafter or trace cannot give
    │   └── TraceError                   a trace file or its content breaks the format
    ├── PolicyViolation                  a policy broke its contract while running
    ├── PolicyCrash                      a policy raised an exception while running
    └── MissingExtraError (ImportError)  an optional dependency is not installed

A command-line tool prints one of these as one sentence and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence, with a space in front, that offers the nearest known name; empty if none is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class EchoError(Exception):
    """Base of every error raised on purpose by this project."""


class InputError(EchoError, ValueError):
    """Raised when a value given by the caller breaks a stated rule."""


class UnknownNameError(InputError):
    """Raised when a name is not among the known ones; the message offers the nearest.

    Args:
        kind: what the name should be, such as ``"policy"``.
        name: the name that was given.
        known: the names that exist.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        """Build the sentence from the data and keep the data as attributes."""
        self.kind = kind
        self.name = name
        self.known = sorted(known)
        hint = did_you_mean(name, self.known)
        super().__init__(f"No {kind} named {name!r}.{hint} Known: {', '.join(self.known)}.")


class PolicyLoadError(InputError):
    """Raised when a policy file, class or entry point cannot be loaded."""


class SignalError(InputError):
    """Raised before a run when a policy needs a signal that is not available."""


class TraceError(InputError):
    """Raised when a trace cannot be read or breaks an invariant of the format."""


class PolicyViolation(EchoError):  # noqa: N818 - it names what happened, as the docs do
    """Raised when a policy breaks its contract during a step.

    Args:
        policy: the policy's name.
        rule: the broken rule, in words.
        detail: what was found.
        step: the step number, counted from 0.
    """

    def __init__(self, policy: str, rule: str, detail: str, step: int) -> None:
        """Build the sentence from the data and keep the data as attributes."""
        self.policy = policy
        self.rule = rule
        self.step = step
        super().__init__(f"{policy} broke the rule '{rule}' at step {step}: {detail}.")


class PolicyCrash(EchoError):  # noqa: N818 - it names what happened, as the docs do
    """Raised when a policy's own code raises; the original is its cause.

    Args:
        policy: the policy's name.
        method: the method that was called.
        step: the step number, counted from 0.
        error: what it raised.
        where: file and line in the policy.
    """

    def __init__(
        self, policy: str, method: str, step: int, error: BaseException, where: str
    ) -> None:
        """Build the sentence from the data and keep the data as attributes."""
        self.policy = policy
        self.method = method
        self.step = step
        what = " ".join(str(error).split())[:200]
        super().__init__(
            f"{policy} raised {type(error).__name__} in {method} at step {step} ({where}): {what}."
        )


class MissingExtraError(EchoError, ImportError):
    """Raised when an optional dependency is needed and not installed."""

    def __init__(self, what: str, extra: str) -> None:
        """Name the missing thing and the extra that brings it."""
        self.extra = extra
        super().__init__(f"{what} needs the extra [{extra}]: pip install 'echo-spec[{extra}]'.")
