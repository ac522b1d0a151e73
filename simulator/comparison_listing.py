"""Two recordings side by side, as ``simulate traces compare`` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console

from simulator.output import print_figures
from traces.alignment import RequestPair
from traces.compare import Comparison
from traces.content_difference import ContentDifference, Count, LogpDifference
from traces.terminal import console

SHOWN: Final = 10
"""Requests that are listed by name; the rest is counted."""

SHOWN_LETTERS: Final = 120
"""Length at which a header field's value is cut; the JSON has all of it."""


def print_comparison(comparison: Comparison, labels: tuple[str, str]) -> None:
    """Print what differs, or that nothing does."""
    out = console()
    for line in _head(comparison, labels):
        out.print(line, soft_wrap=True, markup=False)
    parted = [pair for pair in comparison.requests if pair.parting is not None]
    if parted:
        _print_partings(out, parted)
    if comparison.content is not None and not comparison.is_identical:
        _print_content(out, comparison.content)
    if comparison.positions:
        _print_policies(out, comparison)
    for row in comparison.policies:
        if row.reason:
            out.print(f"{row.policy}: not replayed. {row.reason}", soft_wrap=True, markup=False)


def _head(comparison: Comparison, labels: tuple[str, str]) -> Iterator[str]:
    for side, label, digest in zip(("A", "B"), labels, comparison.digests, strict=True):
        yield f"{side}  {label}, digest {digest[:12]}"
    if comparison.is_identical:
        count = len(comparison.requests)
        yield f"identical: all {count} requests, their data and every array of theirs are equal"
    else:
        yield "different:"
    for field in comparison.header_fields:
        values = (_shortened(value) for value in (field.one, field.other))
        yield "  header {}: {} in A, {} in B".format(field.field, *values)
    for name, count in comparison.request_fields.items():
        yield f"  {name} differs in {count} of {len(comparison.requests)} common requests"
    for side, only in (("A", comparison.only_one), ("B", comparison.only_other)):
        if only:
            yield f"  only in {side}: {_named(only)}"
    if comparison.arrays_in_one_only:
        yield f"  arrays in one only: {', '.join(comparison.arrays_in_one_only)}"
    other_prompts = [pair.request for pair in comparison.requests if not pair.has_same_prompt]
    if other_prompts:
        yield f"  prompts of different length, not compared: {_named(other_prompts)}"
    agree = sum(pair.has_same_prompt and not pair.parting for pair in comparison.requests)
    yield (
        f"  {len(comparison.requests)} common requests; the target's tokens agree as far as both "
        f"go in {agree}; {comparison.positions} positions compared, none beyond the first token "
        "that differs"
    )


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}..."


def _named(requests: Sequence[str]) -> str:
    more = f" and {len(requests) - SHOWN} more" if len(requests) > SHOWN else ""
    return f"{len(requests)} requests: {', '.join(requests[:SHOWN])}{more}"


def _print_partings(out: Console, parted: list[RequestPair]) -> None:
    more = f", the first {SHOWN} of {len(parted)}" if len(parted) > SHOWN else ""
    print_figures(
        out,
        f"where the target's tokens part{more}",
        ["request", "tokens before", "tokens A", "tokens B", "draft's rank A", "draft's rank B"],
        [
            [
                pair.request,
                str(pair.parting.token),
                str(pair.tokens_one),
                str(pair.tokens_other),
                _rank(pair.parting.rank_one),
                _rank(pair.parting.rank_other),
            ]
            for pair in parted[:SHOWN]
            if pair.parting is not None
        ],
    )


def _rank(rank: int | None) -> str:
    """A rank counted from 1, as the card counts them."""
    if rank is None:
        return "-"
    return str(rank + 1) if rank >= 0 else "outside"


def _print_content(out: Console, content: ContentDifference) -> None:
    """Counts that differ, then how far values are apart."""
    counts = {
        "positions with another proposal": content.proposals,
        "positions whose greedy chain meets the text for other levels": content.chain_agreement,
        "positions whose greedy chain has other log-probabilities": content.chain_values,
        "slots with another candidate": sum(content.slots, Count(0, 0)),
        "expanded nodes that the other did not expand": sum(content.nodes, Count(0, 0)),
        **{
            f"ranks of the target's token, level {level}": count
            for level, count in enumerate(content.path_ranks, 1)
            if count.differ or level == 1
        },
    }
    values = {
        "log-probability of the root's children": content.root_logp,
        "log-probability of children of nodes that both expanded": content.child_logp,
        "log-probability of the greedy chain": content.chain_logp,
        "log-probability of the target's tokens": content.path_logp,
        "entropy at the root": content.root_entropy,
        "entropy at nodes that both expanded": content.slot_entropy,
    }
    print_figures(
        out,
        "at the compared positions",
        ["", "differ", "of", "share"],
        [[name, *_cells(count)] for name, count in counts.items()],
    )
    print_figures(
        out,
        "how far values are apart, in nats",
        ["", "differ", "of", "share", "largest", "mean", "in one only"],
        [[name, *_value(value)] for name, value in values.items()],
    )


def _cells(count: Count) -> list[str]:
    share = f"{100 * count.share:.3f} %" if count.of else "-"
    return [str(count.differ), str(count.of), share]


def _value(value: LogpDifference) -> list[str]:
    return [
        *_cells(Count(value.differ, value.values)),
        f"{value.largest:.4f}",
        f"{value.mean:.6f}",
        str(value.in_one_only),
    ]


def _print_policies(out: Console, comparison: Comparison) -> None:
    replaying = comparison.replaying
    print_figures(
        out,
        f"policies replayed on both, {replaying.batch_size} positions sharing "
        f"{replaying.k_per_request} nodes each; differences where no node is unrevealed",
        ["policy", "positions", "with unrevealed nodes", "plans differ", "accepted lengths differ"],
        [
            [
                row.policy,
                *map(str, (row.positions, row.unrevealed, row.plans_differ, row.accepted_differ)),
            ]
            for row in comparison.policies
            if not row.reason
        ],
    )
