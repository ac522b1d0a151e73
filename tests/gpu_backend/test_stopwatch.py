"""Seconds by part, with parts within parts."""

import pytest

from gpu_backend.stopwatch import Stopwatch


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_part_within_a_part_counts_once(clock):
    """Kind: seconds that two parts of a step both claim."""
    watch = Stopwatch(clock)
    with watch.part("decide"):
        clock.now += 1
        with watch.part("draft"):
            clock.now += 2
            with watch.part("prefill"):
                clock.now += 4
            clock.now += 8
        with watch.part("draft"):
            clock.now += 16
        clock.now += 32
    with watch.part("verify"):
        clock.now += 64
    taken = {name: watch.take(name) for name in ("decide", "draft", "prefill", "verify")}
    assert taken == {"decide": 33, "draft": 26, "prefill": 4, "verify": 64}
    assert sum(taken.values()) == watch.now()
    assert watch.take("draft") == 0


def test_a_part_that_fails_is_counted_and_ends(clock):
    watch = Stopwatch(clock)

    def fail():
        clock.now += 3
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), watch.part("draft"), watch.part("prefill"):
        fail()
    with watch.part("draft"):
        clock.now += 1
    assert (watch.take("prefill"), watch.take("draft")) == (3, 1)
