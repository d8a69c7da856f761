"""Intervals against enumeration, a plain loop, closed forms and properties; curves against a search along the line."""
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from composer_replication.experiments.statistics import bootstrap_mean, generations_to_reach, paired_bootstrap

NAN = math.nan
CELLS = arrays(float, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=st.sampled_from([0.0, 1.0]))


def exact_quantiles(cells, levels):
    "Quantiles of the resampled mean over every possible draw of rows and columns, nan left out of each mean."
    n, m = cells.shape
    found = []
    rows = [range(n)] if n == 1 else list(itertools.product(range(n), repeat=n))
    for r in rows:
        for c in itertools.product(range(m), repeat=m):
            with np.errstate(invalid="ignore"):
                picked = cells[np.ix_(list(r), list(c))]
                if not np.isnan(picked).all():
                    found.append(np.nanmean(picked))
    return np.quantile(found, levels, method="inverted_cdf")


@pytest.mark.parametrize("cells", [
    [[0, 1, 1, 0, 1]], [[0, 1, 1], [1, 0, 0.5]], [[0.1, 0.7, 0.3, 0.9], [0.4, 0.2, 0.8, 0.6]], [[0, 1, NAN], [1, NAN, 0.3]],
    [[0.3, 0.1], [0.9, 0.7], [0.2, 0.4]]])
def test_interval_is_that_of_all_possible_draws(cells):
    cells = np.array(cells, dtype=float)
    found = bootstrap_mean(cells, draws=40_000)
    around = exact_quantiles(cells, (0.022, 0.028, 0.972, 0.978))  # few cells: the mean takes few values
    assert around[0] - 1e-9 <= found.low <= around[1] + 1e-9 and around[2] - 1e-9 <= found.high <= around[3] + 1e-9
    assert found.estimate == pytest.approx(np.nanmean(cells))


def plain_loop(a, b, draws, random):
    "The paired bootstrap as one would write it first."
    found = []
    for _ in range(draws):
        rows, columns = random.integers(0, a.shape[0], a.shape[0]), random.integers(0, a.shape[1], a.shape[1])
        found.append(np.nanmean((a - b)[rows][:, columns]))
    return np.quantile(found, [0.025, 0.975])


def test_paired_interval_is_that_of_a_plain_loop():
    random = np.random.default_rng(3)
    base = random.random((5, 40))
    a, b = (base + random.normal(0, 0.3, base.shape) < t for t in (0.6, 0.4))
    a, b = a.astype(float), b.astype(float)
    a[0, :4], b[3, 9] = NAN, NAN
    found = paired_bootstrap(a, b)
    np.testing.assert_allclose((found.low, found.high), plain_loop(a, b, 6000, random), atol=0.008)
    assert found.unscored == 5 and (found.seeds, found.problems) == (5, 40)


@settings(max_examples=80, deadline=None)
@given(CELLS, st.data())
def test_properties(b, data):
    a = data.draw(arrays(float, b.shape, elements=st.sampled_from([0.0, 1.0])))
    holes = data.draw(arrays(bool, b.shape))
    holes[:, 0] = False
    a = np.where(holes, NAN, a)
    there, back = paired_bootstrap(a, b, draws=300), paired_bootstrap(b, a, draws=300)
    assert there.estimate == pytest.approx(-back.estimate)
    assert there.low == pytest.approx(-back.high) and there.high == pytest.approx(-back.low)
    differences = (a - b)[~holes]
    assert there.estimate == pytest.approx(differences.mean()) and there.unscored == holes.sum()
    if len(set(differences)) > 1:
        assert differences.min() - 1e-9 <= there.low <= there.high <= differences.max() + 1e-9
    else:
        assert -1 <= there.low < there.high <= 1
    assert paired_bootstrap(a, np.where(holes, NAN, b), draws=300) == there  # what either did not score is in neither
    assert paired_bootstrap(a, b, draws=300, seed="other").estimate == there.estimate
    assert there.sign == (1 if there.low > 0 else -1 if there.high < 0 else 0)


@pytest.mark.parametrize("value, least", [(0.25, 0), (0.5, 0), (0, 0), (1, 0), (-0.5, -1), (0, -1), (1, -1)])
def test_cells_that_are_all_equal_may_hide_the_worst_that_is_as_rare_as_none_of_n(value, least):
    cells = np.full((3, 20), float(value))
    found = bootstrap_mean(cells) if least == 0 else paired_bootstrap(cells, np.zeros_like(cells))
    rare = 0.1684  # (1 - 0.1684) ** 20 = 0.025: that share of tasks, each at the end of the range
    assert found.low == pytest.approx((1 - rare) * value + rare * least, abs=1e-4)
    assert found.high == pytest.approx((1 - rare) * value + rare, abs=1e-4)
    assert (1 - rare) ** 20 == pytest.approx(0.025, abs=1e-4)


def test_a_count_and_what_is_no_share_keep_their_width():
    "Nothing bounds what was not seen."
    assert bootstrap_mean([3, 3, 3]).low == 3 and bootstrap_mean([1, 1, 1], share=False).low == 1


def test_what_nobody_scored_makes_no_bound_narrower():
    cells = np.full((2, 64), NAN)
    cells[:, :3] = 1.0
    assert bootstrap_mean(cells).low == pytest.approx(bootstrap_mean(cells[:, :3]).low) == pytest.approx(0.2924, abs=1e-4)
    assert paired_bootstrap(cells, cells).high == pytest.approx(1 - 0.2924, abs=1e-4)


def test_the_draws_have_a_name():
    cells = np.random.default_rng(2).random((3, 30))
    assert bootstrap_mean(cells, seed="a") == bootstrap_mean(cells, seed="a") != bootstrap_mean(cells, seed="b")
    assert bootstrap_mean(cells, seed=1) == bootstrap_mean(cells, seed="1")


CURVE = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 8)), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(CURVE, st.floats(0, 1))
def test_reached_is_the_first_crossing_of_the_line(drawn, target):
    x = np.cumsum([gap for gap, _ in drawn])
    y = np.array([passed / 8 for _, passed in drawn])
    curve = [{"generations": int(g), "passed": [1] * p + [0] * (8 - p) + [None] * 3} for g, (_, p) in zip(x, drawn, strict=True)]
    found = generations_to_reach(curve, target)
    if (y < target).all():
        assert found is None
        return
    assert np.interp(found, x, y) == pytest.approx(target) or (found == x[0] and y[0] >= target)
    before = np.linspace(x[0], found, 50)[:-1]
    assert found == x[0] or (np.interp(before, x, y) < target + 1e-9).all()
