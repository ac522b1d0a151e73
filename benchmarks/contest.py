"""Contestants of a benchmark: they take turns, and their ratios to the first one are printed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from gpu_backend.engine import Engine
from gpu_backend.serve_loop import serve_side_by_side
from gpu_backend.serving_batch import ServeRequest

PARTS: Final = ("draft", "verify", "decide", "host", "prefill")


@dataclass(frozen=True)
class Outcome:
    """What came out of serving all requests."""

    outputs: list[list[int]]
    """By request."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part, where they are known."""
    full_rate: float | None = None
    """Tokens per second of decoding in steps in which no slot was idle, prompts left out."""


Run = Callable[[], Outcome]
"""Serves all requests."""


@dataclass
class Contestant:
    """What is measured, and what was measured of it."""

    name: str
    run: Run
    warm_up: Run
    """A few tokens of one request."""
    make_engine: Callable[[], Engine] | None = None
    """None where it is not ours."""
    outcome_of: Callable[[Engine], Outcome] | None = None
    """Likewise; of an engine that has served all requests."""
    elapsed_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def take_turn(self) -> None:
        """Serve once and note the times."""
        elapsed, processor = time.perf_counter(), time.process_time()
        outcome = self.run()
        self.note(time.perf_counter() - elapsed, time.process_time() - processor, outcome)

    def note(self, elapsed_s: float, processor_s: float, outcome: Outcome) -> None:
        """Note a turn."""
        self.elapsed_s.append(elapsed_s)
        self.processor_s.append(processor_s)
        self.outcomes.append(outcome)

    @property
    def best(self) -> Outcome:
        """Of the fastest turn."""
        return self.outcomes[self.elapsed_s.index(min(self.elapsed_s))]


def take_turns(contestants: Sequence[Contestant], repeats: int) -> None:
    """Measure one contestant after the other, over and over."""
    for contestant in contestants:
        contestant.warm_up()
    for _ in range(repeats):
        for contestant in contestants:
            contestant.take_turn()


def step_in_turns(
    contestants: Sequence[Contestant], requests: Sequence[ServeRequest], repeats: int
) -> None:
    """Measure engines that take turns step by step."""
    for contestant in contestants:
        contestant.warm_up()
    for _ in range(repeats):
        engines = [one.make_engine() for one in contestants if one.make_engine is not None]
        spent = serve_side_by_side(engines, requests, [time.perf_counter, time.process_time])
        for one, engine, seconds in zip(contestants, engines, spent.tolist(), strict=True):
            assert one.outcome_of is not None, "an engine has an outcome"
            one.note(*seconds, one.outcome_of(engine))


def table(contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    """What is known of each, and ratios to the first."""
    base, rows = contestants[0], []
    for one in contestants:
        best = one.best
        row: dict[str, Any] = {
            "name": one.name,
            "elapsed_s": one.elapsed_s,
            "processor_s": one.processor_s,
            "turns": [asdict(outcome) for outcome in one.outcomes],
            "tokens": sum(map(len, best.outputs)),
            "speedup_elapsed": min(base.elapsed_s) / min(one.elapsed_s),
            "speedup_processor": min(base.processor_s) / min(one.processor_s),
            "speedup_full": None,
        }
        if best.full_rate is not None and base.best.full_rate is not None:
            row["speedup_full"] = best.full_rate / base.best.full_rate
        same = [a == b for a, b in zip(best.outputs, base.best.outputs, strict=True)]
        row["same_outputs"] = sum(same)
        rows.append(row)
    return rows


def print_table(title: str, contestants: Sequence[Contestant]) -> None:
    """Print ratios and where the time went."""
    names = "".join(f"{part:>9}" for part in PARTS)
    print(f"\n{title}\n{'':34}{'tok/s':>8}{'x time':>8}{'x cpu':>8}{'x full':>8}{'same':>7}{names}")
    for row, one in zip(table(contestants), contestants, strict=True):
        elapsed_s, best = min(one.elapsed_s), one.best
        shares = "".join(f"{best.parts[part] / elapsed_s:9.1%}" for part in PARTS if best.parts)
        full = row["speedup_full"]
        print(
            f"{one.name:34}{row['tokens'] / elapsed_s:8.2f}"
            f"{row['speedup_elapsed']:8.2f}{row['speedup_processor']:8.2f}"
            f"{'' if full is None else format(full, '.2f'):>8}"
            f"{row['same_outputs']:>4}/{len(best.outputs):<2}{shares}",
            flush=True,
        )
