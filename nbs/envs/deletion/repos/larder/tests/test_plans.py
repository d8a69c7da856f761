import pytest

from larder import cheapest, merge_spans, schedule


def test_merge_spans():
    assert merge_spans([(5, 7), (1, 3), (2, 4)]) == [(1, 4), (5, 7)]
    assert merge_spans([(1, 2), (2, 3)]) == [(1, 3)]
    assert merge_spans([(1, 9), (2, 3)]) == [(1, 9)]
    assert merge_spans([]) == []


def test_merge_spans_refuses():
    with pytest.raises(ValueError, match="3 is before 4"):
        merge_spans([(1, 2), (4, 3)])


def test_schedule():
    assert schedule({"pie": ["dough", "filling"], "dough": [], "filling": ["plums"]}) == ["dough", "plums", "filling", "pie"]
    assert schedule({"b": [], "a": []}) == ["a", "b"]
    assert schedule({}) == []


def test_schedule_circle():
    with pytest.raises(ValueError, match="circle among egg, hen"):
        schedule({"hen": ["egg"], "egg": ["hen"], "nest": []})


def test_cheapest():
    assert cheapest([(1, 3), (4, 10)], 6) == 16
    assert cheapest([(1, 3), (4, 10)], 7) == 19
    assert cheapest([(5, 2)], 6) == 4
    assert cheapest([(2, 1)], 0) == 0


def test_cheapest_nothing():
    with pytest.raises(ValueError, match="nothing"):
        cheapest([], 1)
