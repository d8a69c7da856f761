"""Plans: when things are cooked, and what they cost."""


def merge_spans(spans):
    """Join spans (start, end) that touch or overlap; returns them in order. Raises ValueError where an end is before its start."""
    merged = []
    for start, end in sorted(spans):
        if end < start:
            raise ValueError(f"{end} is before {start}")
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def schedule(needs):
    """An order in which every dish comes after those it needs; of several that could be next, the first in the alphabet.

    `needs` maps a dish to the dishes it needs. Raises ValueError where dishes need each other in a circle.
    """
    waiting = {dish: set(wanted) for dish, wanted in needs.items()}
    for wanted in needs.values():
        for dish in wanted:
            waiting.setdefault(dish, set())
    order = []
    while waiting:
        ready = [dish for dish, wanted in waiting.items() if not wanted & waiting.keys()]
        if not ready:
            raise ValueError(f"a circle among {', '.join(sorted(waiting))}")
        order.append(min(ready))
        del waiting[order[-1]]
    return order


def cheapest(offers, amount):
    """The lowest price of at least an amount, from packs that can be bought any number of times.

    `offers` are pairs (size of the pack, its price), `amount` and sizes whole numbers. Returns the price; 0 for an
    amount of 0. Raises ValueError where nothing is on offer.
    """
    if amount <= 0:
        return 0
    if not offers:
        raise ValueError("nothing is on offer")
    best = [0] * (amount + 1)
    for wanted in range(1, amount + 1):
        best[wanted] = min(price + best[max(0, wanted - size)] for size, price in offers)
    return best[amount]
