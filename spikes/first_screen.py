"""The first screen of a spike's page: verdict, one table, one figure, read from what its last run wrote."""
from collections.abc import Sequence

import matplotlib.pyplot as plt
from IPython.display import Markdown, display

from composer_replication.report.html import STUDENT, TEACHER


def first_screen(
    verdict: str,  # one sentence or word
    rows: Sequence[tuple],  # what, estimate, low, high
    unit: str,
    digits: int = 1,
    level: str = "95 %",  # of the intervals
    threshold: float = 0,  # of the hypotheses
) -> None:
    "Show the verdict, the rows as a table, and the same rows as intervals; what the last run lacks is `not run`."
    lines = [f"| what | difference ({level} interval) | above {threshold:g} |", "|---|---|---|"]
    for what, value, low, high in rows:
        if value is None:
            lines.append(f"| {what} | **not run** | |")
            continue
        side = "shown" if low > threshold else "opposite" if high < min(0, threshold) else "not shown"
        lines.append(f"| {what} | {value:+.{digits}f} {unit} ({low:+.{digits}f} to {high:+.{digits}f}) | {side} |")
    display(Markdown(f"**{verdict}**\n\n" + "\n".join(lines)))
    fig, ax = plt.subplots(figsize=(7.4, 0.6 + 0.32 * len(rows)), layout="constrained")
    for place, (_, value, low, high) in enumerate(rows):
        if value is not None:
            ax.plot([low, high], [place, place], color=STUDENT, lw=2)
            ax.plot(value, place, "o", color=TEACHER, markersize=5)
    ax.set_yticks(range(len(rows)), [row[0].replace("`", "") for row in rows], fontsize=8)
    ax.axvline(threshold, color="#444444", lw=1)
    ax.invert_yaxis()
    ax.set_xlabel(f"{unit}; bar: {level} interval; line: {threshold:g}", fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    plt.show()


def decide(
    low: float | None,  # of a 95 % interval; None: no run
    high: float | None = None,
    threshold: float = 0,
) -> str:
    "Return VALIDATED if the interval lies above the threshold, REFUTED if not in any part, else UNDECIDED; NOT RUN without one."
    if low is None or high is None:
        return "NOT RUN"
    return "VALIDATED" if low > threshold else "REFUTED" if high <= threshold else "UNDECIDED"


def together(verdicts: Sequence[str]) -> str:
    "Return the verdict on all of these: REFUTED if one is, VALIDATED if each is, NOT RUN if none ran, else UNDECIDED."
    if "REFUTED" in verdicts:
        return "REFUTED"
    return verdicts[0] if len(set(verdicts)) == 1 else "UNDECIDED" if verdicts else "NOT RUN"


def checks_screen(
    results: dict,
    open_check: str = "not run",  # what a check without an answer is
) -> None:
    "Show the verdict with its reason, and each check with its own verdict or whether it held."
    reason = f": {results['reason']}" if results.get("reason") else ""
    checks = results.get("checks") or {}
    held = {name: all(found.values()) if isinstance(found, dict) else found for name, found in checks.items()}
    said = {True: "held", False: "**not held**", None: f"**{open_check}**"}
    rows = [f"| {name} | {said.get(found, found)} |" for name, found in held.items()]
    rows = ["| check | |", "|---|---|", *rows]
    display(Markdown("\n".join([f"**{results['verdict']}{reason}**", "", *(rows if checks else ())])))
