"The rate of an arm, as plans choose it: the best of what was tried, which is tried beside an edge as far as there are rates."
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parent))
from appended import tuned

RATES = (1.0, 2.0, 3.0, 4.0, 5.0)


def chosen(levels, first):
    "Make what is asked for until a rate is chosen; the rate, and all that was tried."
    done, run_of = {}, lambda seed, rate: SimpleNamespace(name=(seed, rate))
    while True:
        runs, rate = tuned(run_of, lambda run: run["level"], done, RATES, first, (7, 8))
        new = [run.name for run in runs if run.name not in done]
        if rate is not None:
            assert not new
            return rate, {rate for _, rate in done}
        assert new and {seed for seed, _ in new} == {7, 8}
        done |= {(seed, rate): {"level": levels[rate] + (seed - 7.5)} for seed, rate in new}  # the seeds' noise cancels


@pytest.mark.parametrize("order", itertools.permutations(range(5)))
def test_the_chosen_rate_has_worse_neighbours_or_is_the_last(order):
    levels = dict(zip(RATES, order))
    rate, tried = chosen(levels, (1, 2, 3))
    assert rate == max(tried, key=levels.get) and {2.0, 3.0, 4.0} <= tried
    place = RATES.index(rate)
    assert {RATES[n] for n in (place - 1, place + 1) if 0 <= n < len(RATES)} <= tried


def test_of_equal_rates_the_smallest_is_taken():
    assert chosen(dict.fromkeys(RATES, 1.0), (1, 2, 3)) == (1.0, {1.0, 2.0, 3.0, 4.0})
