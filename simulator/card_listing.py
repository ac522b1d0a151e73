"""The data card of a trace, as ``simulate traces info`` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from rich.console import Console

from simulator.output import print_figures, provenance
from traces.acceptance import RANK_BINS
from traces.card import TraceCard
from traces.realism import Lengths, Realism
from traces.reliability import LevelReliability
from traces.table import number
from traces.terminal import console

SHOWN_LEVELS: Final = 8
SHOWN_AUCS: Final = 4
ALL: Final = "all"


def print_card(card: TraceCard) -> None:
    """Print identity, then one table per subject with a row per data set."""
    out = console()
    for line in _identity(card):
        out.print(line, soft_wrap=True, markup=False)
    groups = {ALL: card.overall, **card.by_task}
    _requests(out, groups)
    levels = range(min(SHOWN_LEVELS, len(card.overall.ranks)))
    for title, is_conditional in (
        ("greedy chain accepted up to level (share of positions)", False),
        ("greedy chain accepted at level, given the levels before", True),
    ):
        _table(
            out,
            title,
            [str(level + 1) for level in levels],
            {
                name: [number(shares[level], 3) for level in levels]
                for name, group in groups.items()
                for chain in [group.within_first[1]]
                for shares in [chain.conditional if is_conditional else chain.cumulative]
            },
        )
    _table(
        out,
        "rank of the target's token at level 1 (share of positions)",
        list(RANK_BINS),
        {
            name: [number(share, 3) for share in group.ranks[0].values()]
            for name, group in groups.items()
        },
    )
    _confidence(out, groups)
    _walks(out, groups)


def _identity(card: TraceCard) -> Iterator[str]:
    yield f"{card.name}: {provenance(card.provenance)}"
    for model, role in ((card.target, "target"), (card.draft, "draft")):
        details = ", ".join(filter(None, (model.weights, model.dtype)))
        yield f"{role:8}{model.name} ({details})"
        if model.digest:
            yield f"        sha256 {model.digest}"
    yield f"drafter {card.drafter}, temperature {card.temperature:g}"
    licence = card.licence or "not stated"
    yield from (f"{'licence' if not i else '':8}{line}" for i, line in _numbered(licence))
    yield f"digest  {card.digest}"
    yield f"arrays  {card.array_bytes / 1e6:.1f} MB"
    yield from (f"source  {source}" for source in card.provenance.sources)
    yield from (f"note    {note}" for note in card.provenance.notes)


def _numbered(text: str) -> Iterable[tuple[int, str]]:
    return enumerate(text.splitlines())


def _requests(out: Console, groups: dict[str, Realism]) -> None:
    _table(
        out,
        "requests (positions) by split; tokens: median [least to most]; how outputs ended",
        ["calibration", "evaluation", "prompt tokens", "output tokens", "stop", "length"],
        {
            name: [
                *(f"{size.requests} ({size.positions})" for size in group.splits.values()),
                _lengths(group.prompt_tokens),
                _lengths(group.output_tokens),
                *(str(group.finish_reasons.get(reason, 0)) for reason in ("stop", "length")),
            ]
            for name, group in groups.items()
        },
    )


def _lengths(lengths: Lengths) -> str:
    return f"{lengths.quartiles[1]:g} [{lengths.least} to {lengths.most}]"


def _confidence(out: Console, groups: dict[str, Realism]) -> None:
    """The reliability of level 1 over all data sets, then errors and AUC of each."""
    first = groups[ALL].reliability[0]
    bins = first.bins
    _table(
        out,
        "confidence of the draft's first token against acceptance, by bin of its probability",
        [f"{one.low:.1f}-{one.high:.1f}" for one in bins],
        {
            "positions": [str(one.positions) for one in bins],
            "confidence": [number(one.confidence, 3) for one in bins],
            "accepted": [number(one.accepted, 3) for one in bins],
        },
        heading=ALL,
    )
    aucs = range(min(SHOWN_AUCS, len(groups[ALL].reliability)))
    _table(
        out,
        "calibration error of that probability (bins of equal width and of equal mass); "
        "AUC for acceptance at level",
        ["ECE", "ECE mass", *(f"AUC {level + 1}" for level in aucs)],
        {
            name: [
                number(group.reliability[0].ece, 3),
                number(group.reliability[0].ece_equal_mass, 3),
                *(_auc(group.reliability[level]) for level in aucs),
            ]
            for name, group in groups.items()
        },
    )


def _auc(report: LevelReliability) -> str:
    return f"{number(report.auc, 3)} ({report.accepted}:{report.rejected})"


def _walks(out: Console, groups: dict[str, Realism]) -> None:
    walks = groups[ALL].walks
    if not walks:
        return
    _table(
        out,
        f"walked chains of K tokens: acceptance length; for K = {walks[-1].levels} lag-1 "
        "autocorrelation of accepted tokens (also about each request's mean) and spread of the "
        "requests' means",
        [
            *(f"K = {walk.levels}" for walk in walks),
            "lag 1",
            "in request",
            "SD of means",
            "SD between",
            "ICC",
        ],
        {
            name: [
                *(number(walk.acceptance_length, 3) for walk in group.walks),
                number(last.autocorrelation.pooled, 2),
                number(last.autocorrelation.within, 2),
                number(last.spread.sd_of_means, 2),
                number(last.spread.sd_between, 2),
                number(last.spread.icc, 2),
            ]
            for name, group in groups.items()
            for last in [group.walks[-1]]
        },
    )


def _table(
    out: Console,
    title: str,
    columns: list[str],
    rows: dict[str, list[str]],
    heading: str = "data set",
) -> None:
    lines = ([name, *cells] for name, cells in rows.items())
    print_figures(out, title, [heading, *columns], lines)
