"""What ``run_gpu`` prints of a run."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_backend.serve_results import CostTables, KneeTable, ServeBatch, ServeResult, ServeRow
from traces.table import TableRow, comparison_table
from traces.terminal import console


def print_result(result: ServeResult, *, shows_text: bool = False) -> None:
    """Print the head, a table per batch size, and what must be known about single rows."""
    out = console()
    for line in head(result):
        out.print(line, soft_wrap=True, markup=False)
    for batch in result.batches:
        out.print()
        rows = [
            TableRow(row.policy, row.summary, row.speedup, "" if row.is_complete else "!")
            for row in batch.rows
        ]
        title = f"batch {batch.batch_size}, k_max {batch.k_max} ({batch.k_max_rule})"
        out.print(comparison_table(title, rows, is_open_loop=True))
        if batch.costs is not None:
            out.print(f"costs     {costs_line(batch.costs)}", soft_wrap=True, markup=False)
        for note in notes(result, batch):
            out.print(note, soft_wrap=True, markup=False)
    if shows_text:
        for line in texts(result.batches[-1].rows[-1]):
            out.print(line, soft_wrap=True, markup=False)


def head(result: ServeResult) -> list[str]:
    """Say what ran, on what, and how."""
    config, sampling = result.config, result.config.sampling
    drawn = "greedy" if sampling.is_greedy else f"temperature {sampling.temperature:g}"
    if not sampling.is_greedy and sampling.top_k:
        drawn += f", top-k {sampling.top_k}"
    if not sampling.is_greedy and sampling.top_p < 1:
        drawn += f", top-p {sampling.top_p:g}"
    arrivals = f"{config.rate:g} arrivals per second" if config.rate else "all at once"
    draft = result.draft.name if result.draft else "none"
    lines = [
        f"models    target {result.target.name}, draft {draft}; {config.dtype}",
        f"device    {result.device}",
        f"attention {result.attention}",
        (
            f"requests  {result.num_requests}, {arrivals}; prompts of"
            f" {result.mean_prompt_tokens:.0f} tokens on average, up to {config.max_new_tokens} new"
        ),
        f"sampling  {drawn}, seed {config.seed}",
        f"engine    measured with prefill and drain, {config.mode} decisions"
        + (", every policy clamped to k_max" if config.cap_all else ""),
    ]
    if result.head:
        lines.insert(1, f"head      {result.head}")
    return [*lines, f"gates     {result.calibration}"] if result.calibration else lines


def costs_line(costs: CostTables) -> str:
    """Say what policies know of costs."""
    verify = costs.verify
    said = (
        f"timed here: a verify forward {_ms(verify, 0)} over {verify.rows[0]} rows, "
        f"{_ms(verify, -1)} over {verify.rows[-1]}"
    )
    if costs.draft is None:
        return f"{said}; lookups count as free"
    return (
        f"{said}; a draft layer {_ms(costs.draft, 0)} over {costs.draft.rows[0]}, "
        f"{_ms(costs.draft, -1)} over {costs.draft.rows[-1]}"
    )


def _ms(table: KneeTable, place: int) -> str:
    return f"{1e3 * table.seconds[place]:.3g} ms"


def notes(result: ServeResult, batch: ServeBatch) -> Iterator[str]:
    """What a table does not say."""
    over = [row for row in batch.rows if row.summary.k_per_step > batch.k_max]
    if over:
        shown = ", ".join(f"{row.policy} {row.summary.k_per_step:.0f}" for row in over)
        yield f"K beyond k_max, to which these do not keep (--cap-all clamps them): {shown}"
    yield from _sameness(batch, result.config.dtype)
    for row in batch.rows[1:]:
        if row.summary.k_per_step == 0:
            yield (
                f"{row.policy}: ! no node was verified in any step, so this is plain decoding; "
                "k_max, the policy's gates or the drafter left nothing"
            )
    for row in batch.rows:
        if not row.is_complete:
            yield (
                f"{row.policy}: ! stopped by Ctrl-C with {len(row.requests)} of "
                f"{result.num_requests} requests finished; later runs did not start"
            )
        if row.summary.clamped_share > 0:
            yield f"{row.policy}: ! clamped to k_max in {row.summary.clamped_share:.0%} of steps"


def _sameness(batch: ServeBatch, dtype: str) -> Iterator[str]:
    """Whether the outputs are plain decoding's."""
    others = batch.rows[1:]
    if not others:
        return
    if all(row.same_outputs == row.compared_outputs for row in others):
        yield "outputs   token for token those of plain decoding, under every policy"
        return
    for row in others:
        differ = row.compared_outputs - row.same_outputs
        if differ:
            yield (
                f"{row.policy}: ! {differ} of {row.compared_outputs} outputs differ from plain "
                f"decoding's; in {dtype} near-ties can fall either way"
            )


def texts(row: ServeRow) -> Iterator[str]:
    """Every output of a row."""
    for done in sorted(row.requests, key=lambda request: request.number):
        yield ""
        yield (
            f"{done.task} {done.question_id}: {len(done.tokens)} tokens ({done.finish_reason}), "
            f"{1e3 * done.tpot_s:.1f} ms per token, {row.policy}"
        )
        yield done.text
