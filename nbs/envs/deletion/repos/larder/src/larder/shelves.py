"""Shelves: what stands where, and what is used first."""
from collections import OrderedDict


def pack(sizes, room):
    """Put things into boxes of equal room, each into the first box that still holds it, largest things first.

    Returns the boxes as lists of sizes. Raises ValueError where one thing is larger than a box.
    """
    boxes = []
    for size in sorted(sizes, reverse=True):
        if size > room:
            raise ValueError(f"{size} does not fit into {room}")
        for box in boxes:
            if sum(box) + size <= room:
                box.append(size)
                break
        else:
            boxes.append([size])
    return boxes


def group_by_shelf(places):
    """From (thing, shelf) pairs to a dictionary: shelf to its things in alphabetical order, each thing once."""
    shelves = {}
    for thing, shelf in places:
        shelves.setdefault(shelf, set()).add(thing)
    return {shelf: sorted(things) for shelf, things in sorted(shelves.items())}


class Shelf:
    """A shelf with room for a number of jars: the one not touched for longest makes way for a new one."""

    def __init__(self, room):
        if room < 1:
            raise ValueError("a shelf needs room for at least one jar")
        self.room = room
        self._jars = OrderedDict()

    def put(self, name, grams):
        """Put a jar on the shelf; returns the name of the jar that made way, or None."""
        self._jars.pop(name, None)
        self._jars[name] = grams
        if len(self._jars) > self.room:
            return self._jars.popitem(last=False)[0]
        return None

    def take(self, name, grams):
        """Take grams from a jar; returns what is left of it. An empty jar leaves the shelf.

        Raises KeyError for an unknown jar and ValueError where it holds less than that.
        """
        left = self._jars[name] - grams
        if left < 0:
            raise ValueError(f"{name} holds only {self._jars[name]} g")
        if left == 0:
            del self._jars[name]
        else:
            self._jars[name] = left
            self._jars.move_to_end(name)
        return left

    def names(self):
        """The jars on the shelf, the one not touched for longest first."""
        return list(self._jars)

    def weight(self):
        """Grams on the whole shelf."""
        return sum(self._jars.values())


class Queue:
    """Jars in the order of their last day; of two with the same day, the one that came first."""

    def __init__(self):
        self._jars = []
        self._count = 0

    def add(self, name, day):
        """Add a jar that keeps until a day, given as a number."""
        self._jars.append((day, self._count, name))
        self._jars.sort()
        self._count += 1

    def next(self):
        """Take out the jar to be used first. Raises IndexError where there is none."""
        if not self._jars:
            raise IndexError("the queue is empty")
        return self._jars.pop(0)[2]

    def expired(self, day):
        """Take out all jars whose last day is before the given one; returns their names in order."""
        old = [name for last, _, name in self._jars if last < day]
        self._jars = [jar for jar in self._jars if jar[0] >= day]
        return old
