"""Engines that take turns: everyone serves everything, and nobody runs ahead in time."""

import numpy as np

from gpu_backend.serve_loop import serve_side_by_side
from tests.gpu_backend.serve import make_engine, make_pair, outputs, requests, serve


class Worker:
    """Stands for an engine with so many steps of so many seconds."""

    def __init__(self, name, steps, seconds, clock):
        self.name, self.left, self.seconds, self.clock = name, 0, seconds, clock
        self.steps = steps

    def submit(self, request):
        self.left += self.steps

    @property
    def has_work(self):
        return self.left > 0

    def step(self):
        self.left -= 1
        self.clock.now += self.seconds
        self.clock.turns.append(self.name)


class Clock:
    def __init__(self):
        self.now, self.turns = 0.0, []

    def __call__(self):
        return self.now


def test_whoever_has_spent_least_goes_next():
    clock = Clock()
    workers = [Worker("slow", 2, 3.0, clock), Worker("fast", 5, 1.0, clock)]
    spent = serve_side_by_side(workers, ["a request"], [clock, lambda: 10 * clock.now])
    assert clock.turns == ["slow", "fast", "fast", "fast", "slow", "fast", "fast"]
    np.testing.assert_array_equal(spent, [[6.0, 60.0], [5.0, 50.0]])


def test_side_by_side_outputs_are_those_of_an_engine_alone():
    """Kind of fault: engines over the same models that share a pool or a tap."""
    pair, asked = make_pair(draft="close"), requests([[5, 6, 7, 8], [9, 10], [11, 12, 13]], 12)
    specs = ("chain:levels=2", "echo:w_topk=2", "autoregressive")
    alone = [serve(make_engine(pair, spec, asked, batch=2), asked) for spec in specs]
    engines = [make_engine(pair, spec, asked, batch=2) for spec in specs]
    ticks = iter(range(10**6))
    serve_side_by_side(engines, asked, [lambda: next(ticks)])
    assert [outputs(engine) for engine in engines] == alone
