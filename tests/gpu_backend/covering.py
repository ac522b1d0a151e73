"""Pairwise covering: few rows in which every two values of two factors meet."""

import itertools


def pairwise_rows(factors):
    """Rows, as dicts by factor, that hold every pair of values of every two factors.

    Greedy and deterministic: a row starts with the first pair that is not covered yet, and takes
    for every other factor the value that covers most.
    """
    wanted = dict.fromkeys(
        ((one, x), (other, y))
        for one, other in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[one], factors[other])
    )
    rows = []
    while wanted:
        row = dict(next(iter(wanted)))
        for name, values in factors.items():
            if name not in row:
                row[name] = max(values, key=lambda v, n=name: len(_gain(row, n, v, wanted)))
        for pair in pairs_of(row, factors):
            wanted.pop(pair, None)
        rows.append({name: row[name] for name in factors})
    return rows


def pairs_of(row, factors):
    """Every pair that a row holds."""
    return itertools.combinations([(name, row[name]) for name in factors if name in row], 2)


def _gain(row, name, value, wanted):
    """Pairs that are covered only with this value."""
    new = (name, value)
    return [item for item in row.items() if (item, new) in wanted or (new, item) in wanted]
