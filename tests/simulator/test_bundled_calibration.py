"""The calibrations bundled with the recordings are what `simulate calibrate` makes of them."""

import pytest

from simulator.fitting import calibrate
from traces.calibration_file import load_calibration
from traces.library import available, calibrations, open_trace


@pytest.mark.parametrize("name", sorted(calibrations()))
def test_bundled_calibration_belongs_to_the_bundled_trace(name):
    shipped = load_calibration(name)
    assert shipped.trace_digest == open_trace(name).digest
    assert shipped.requests == len(open_trace(name).split("calibration"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(calibrations()))
def test_bundled_calibration_is_what_calibrate_finds(name):
    """Guards against figures that no command reproduces."""
    shipped = load_calibration(name)
    entries = [entry for entry in shipped.policies if entry.batch_size == 8]
    policies = [entry.policy for entry in entries]
    again = calibrate(policies, batch_sizes=(8,), trace=name)
    assert list(again.policies) == entries
    assert again.depths == shipped.depths


def test_every_recording_has_a_calibration():
    assert {name for name in available() if name != "qwen235b"} == set(calibrations())
