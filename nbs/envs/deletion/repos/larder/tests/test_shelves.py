import pytest

from larder import Queue, Shelf, group_by_shelf, pack


def test_pack():
    assert pack([4, 8, 1, 4, 2, 1], 10) == [[8, 2], [4, 4, 1, 1]]
    assert pack([], 3) == []
    assert pack([3, 3], 3) == [[3], [3]]


def test_pack_too_large():
    with pytest.raises(ValueError, match="11 does not fit"):
        pack([2, 11], 10)


def test_group_by_shelf():
    places = [("jam", "top"), ("rice", "low"), ("ale", "top"), ("jam", "top")]
    assert group_by_shelf(places) == {"low": ["rice"], "top": ["ale", "jam"]}
    assert list(group_by_shelf(places)) == ["low", "top"]
    assert group_by_shelf([]) == {}


def test_shelf_makes_way():
    shelf = Shelf(2)
    assert shelf.put("plum", 300) is None
    assert shelf.put("fig", 200) is None
    assert shelf.put("plum", 250) is None
    assert shelf.put("lime", 100) == "fig"
    assert shelf.names() == ["plum", "lime"]


def test_shelf_take():
    shelf = Shelf(3)
    shelf.put("plum", 300)
    shelf.put("fig", 200)
    assert shelf.take("plum", 100) == 200
    assert shelf.names() == ["fig", "plum"]
    assert shelf.take("fig", 200) == 0
    assert shelf.names() == ["plum"]
    assert shelf.weight() == 200


def test_shelf_take_refuses():
    shelf = Shelf(1)
    shelf.put("plum", 50)
    with pytest.raises(ValueError, match="only 50"):
        shelf.take("plum", 60)
    with pytest.raises(KeyError):
        shelf.take("fig", 1)
    assert shelf.weight() == 50


def test_shelf_needs_room():
    with pytest.raises(ValueError, match="room"):
        Shelf(0)


def test_queue():
    queue = Queue()
    for name, day in [("fig", 9), ("plum", 3), ("lime", 9), ("pear", 5)]:
        queue.add(name, day)
    assert [queue.next() for _ in range(4)] == ["plum", "pear", "fig", "lime"]
    with pytest.raises(IndexError, match="empty"):
        queue.next()


def test_queue_expired():
    queue = Queue()
    for name, day in [("fig", 9), ("plum", 3), ("pear", 5)]:
        queue.add(name, day)
    assert queue.expired(5) == ["plum"]
    assert queue.expired(10) == ["pear", "fig"]
    assert queue.expired(10) == []
