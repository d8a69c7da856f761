"""A kitchen's stock: amounts, labels, shelves and plans."""
from larder.amounts import add_amounts, format_amount, parse_amount, scale_amount
from larder.labels import batch_code, initials, label, roman
from larder.plans import cheapest, merge_spans, schedule
from larder.shelves import Queue, Shelf, group_by_shelf, pack

__all__ = [
    "Queue", "Shelf", "add_amounts", "batch_code", "cheapest", "format_amount", "group_by_shelf", "initials", "label",
    "merge_spans", "pack", "parse_amount", "roman", "scale_amount", "schedule",
]
