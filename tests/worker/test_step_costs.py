"""The costs of steps and drafts, as the scheduler gets them."""

from quire.worker.step_costs import convex


def test_disturbed_times_are_corrected_by_those_of_smaller_and_larger_steps():
    disturbed = {1: 30.0, 2: 58.0, 4: 34.0, 8: 44.0, 16: 90.0, 32: 130.0}
    assert convex(disturbed) == {1: 30.0, 2: 30.0 + 4 / 3, 4: 34.0, 8: 44.0, 16: 44.0 + 86 / 3, 32: 130.0}
    assert convex({1: 50.0, 2: 20.0, 4: 30.0}) == {1: 50.0, 2: 20.0, 4: 30.0}
    assert convex({1: 7.0}) == {1: 7.0}
    undisturbed = {1: 60.0, 2: 62.0, 4: 66.0, 8: 80.0}
    assert convex(undisturbed) == undisturbed
