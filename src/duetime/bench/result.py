"""A benchmark's result: figures with names; of several runs, the medians and their spread."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

#: Name -> figure.
Figures = Mapping[str, int | float | bool | None]


def summed_up(runs: Sequence[Figures], *, summed: Sequence[str] = ()) -> dict[str, Any]:
    """One result of several runs: sums of what is counted, medians of what is measured.

    Of more than one, `runs` says how many, and `spread` the least and the most of each median.
    """
    if len(runs) == 1:
        return dict(runs[0])
    figures = {name: [run[name] for run in runs] for name in runs[0]}
    medians = {name: _known(values) for name, values in figures.items() if name not in summed}
    sums = {name: sum(_known(figures[name])) for name in summed}
    return {
        **{name: sums[name] if name in sums else _median(medians[name]) for name in runs[0]},
        "runs": len(runs),
        "spread": {name: [min(known), max(known)] for name, known in medians.items() if known},
    }


def _known(values: Sequence[int | float | bool | None]) -> list[int | float]:
    return [value for value in values if value is not None]


def _median(known: Sequence[int | float]) -> int | float | None:
    if not known:
        return None
    return statistics.median_low(known) if len(known) % 2 else round(statistics.median(known), 3)
