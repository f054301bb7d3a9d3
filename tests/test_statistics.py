"""Moving averages and their schedule against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foof.statistics import Gathered, MovingAverage, Schedule, Stride


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6), decay=st.sampled_from([0.0, 0.5, 0.95, 0.999]), m=st.integers(1, 6),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5), groups=st.sampled_from([(), (2,)]),
)  # fmt: skip
def test_normalised_moving_average(seed, decay, m, sizes, groups):
    """``Σ m^(t-s) x_s / Σ m^(t-s)``, whether rows are few (kept as rows) or many (multiplied out at once)."""
    torch.manual_seed(seed)
    average, values = MovingAverage(), []
    for size in sizes:
        rows, seen = torch.randn(*groups, size, m, dtype=torch.float64), Gathered()
        seen.add_rows(rows, size, pass_id=0)
        average.update(seen, decay)
        values.append(rows.mT @ rows / size)
    weights = [decay ** (len(values) - 1 - k) if decay else float(k == len(values) - 1) for k in range(len(values))]
    expected = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
    assert torch.allclose(average.value, expected, rtol=1e-12, atol=1e-12)


def test_calls_add_rows_and_passes_add_datapoints():
    a, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    for second_pass, datapoints in ((0, 3), (1, 6)):
        seen, average = Gathered(), MovingAverage()
        seen.add_rows(a, 3, pass_id=0)
        seen.add_rows(b, 3, pass_id=second_pass)
        assert seen.datapoints == datapoints
        average.update(seen, 0.95)
        assert torch.allclose(average.value, (a.mT @ a + b.mT @ b) / datapoints)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (5, 2), (10, 10), (500, 10)])
def test_schedule_is_that_of_algorithm_1(T, S):
    schedule = Schedule(T, S, warming_up=False)
    for t in range(3 * T):
        assert schedule.inverts() == (t % T == 0)
        assert schedule.gathers() == ((t + S) % T in range(S))
        schedule.advance()


@pytest.mark.parametrize(("T", "S"), [(0, 1), (5, 0), (5, 6)])
def test_impossible_schedules(T, S):
    with pytest.raises(ValueError, match="must be"):
        Schedule(T, S)


def test_datapoints_of_a_pass_are_the_most_that_one_of_its_calls_had():
    """Support and query, or a call that was given nothing: their order in the backward pass does not matter."""
    for counts in ((2, 20), (20, 2), (0, 20)):
        seen = Gathered()
        for n in counts:
            seen.add_rows(torch.ones(n, 3), n, pass_id=7)
        assert seen.of_pass == {7: 20}
        seen.add_rows(torch.ones(5, 3), 5, pass_id=8)
        assert seen.datapoints == 25


@pytest.mark.parametrize("shape", [(12, 4), (3, 12, 4), (2, 4), (1, 4), (0, 4)])
def test_a_stride_comes_by_all_rows_in_turn(shape):
    """Over as many batches as rows are left out, and one, the mean of the estimates is what all rows give."""
    rows = torch.randn(*shape, dtype=torch.float64)
    for every in (1, 2, 3, 4):
        found = [Stride(every, shift).of(rows) for shift in range(7, 7 + every)]
        assert all(some.shape[-2] == max(shape[-2] // every, min(1, shape[-2])) for some in found)
        estimates = torch.stack([some.mT @ some for some in found[: max(1, min(every, shape[-2]))]])
        assert torch.allclose(estimates.mean(0), rows.mT @ rows, rtol=1e-12)


@pytest.mark.parametrize("more", [0, 1, 2])
def test_rows_that_were_written_into_are_not_sound(more):
    rows, seen, other = torch.randn(2, 3), Gathered(), Gathered()
    seen.add_rows(rows, 2, pass_id=0)
    assert seen.sound()
    rows.zero_()
    if more == 1:
        seen.add_rows(torch.randn(2, 3), 2, pass_id=1)
    if more == 2:
        other.add_rows(torch.randn(2, 3), 2, pass_id=1)
        other.merge(seen)
    assert not (other if more == 2 else seen).sound()
