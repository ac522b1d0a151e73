"""Drives an engine through the requests of a run, as they arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from gpu_backend.engine import Engine
from gpu_backend.serving_batch import ServeRequest
from gpu_backend.stopwatch import Clock


def serve_all(
    engine: Engine,
    requests: Sequence[ServeRequest],
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_finished: Callable[[int], None] = lambda count: None,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Serve every request, each from its arrival on.

    Args:
        engine: fresh; its log and its finished requests hold the outcome.
        requests: in order of arrival.
        should_stop: asked between steps; True ends the run with what is finished.
        on_finished: called with the number of finished requests when it has grown.
        sleep: waits for the next arrival.

    Returns:
        Whether all requests were served.
    """
    coming = deque(requests)
    while coming or engine.has_work:
        if should_stop():
            return False
        while coming and coming[0].arrival_s <= engine.now():
            engine.submit(coming.popleft())
        if engine.has_work:
            before = len(engine.finished)
            engine.step()
            if len(engine.finished) > before:
                on_finished(len(engine.finished))
        else:
            idle_from = engine.now()
            sleep(max(coming[0].arrival_s - idle_from, 0.0))
            engine.log.idle_s += engine.now() - idle_from
    return True


def serve_side_by_side(
    engines: Sequence[Engine], requests: Sequence[ServeRequest], clocks: Sequence[Clock]
) -> npt.NDArray[np.float64]:
    """Serve the same requests, all at once, with several engines that take turns step by step.

    Whoever has spent least goes next. So what slows the machine down for a while slows all of them.

    Args:
        engines: fresh.
        requests: submitted to every engine before the first step, whenever they arrive.
        clocks: what is counted, such as elapsed and processor seconds; turns go by the first.

    Returns:
        float64 [engines, clocks]: what the steps of every engine took.
    """
    for engine in engines:
        for request in requests:
            engine.submit(request)
    spent = np.zeros((len(engines), len(clocks)))
    while busy := [number for number, engine in enumerate(engines) if engine.has_work]:
        turn = min(busy, key=lambda number: spent[number, 0])
        before = [clock() for clock in clocks]
        engines[turn].step()
        spent[turn] += [clock() - start for clock, start in zip(clocks, before, strict=True)]
    return spent
