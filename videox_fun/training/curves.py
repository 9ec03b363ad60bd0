"""One picture of a finished run, drawn from its ``events.jsonl``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _ORANGE, _GREEN, _PURPLE = "#2563eb", "#d97706", "#059669", "#7c3aed"


def read_events(path: Path) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """Rows by step, and the steps at which the run was resumed.

    Steps that an interrupted run had made after its last save appear twice; the later row counts. A line that a crash
    cut off is skipped.
    """
    rows: dict[int, dict[str, Any]] = {}
    resumed: list[int] = []
    if not path.is_file():
        return rows, resumed
    with open(path, encoding="utf-8") as handle:
        for line in handle:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if event.get("event") == "start":
                begin = int(event["step"])
                rows = {step: row for step, row in rows.items() if step <= begin}
                if begin:
                    resumed.append(begin)
                else:
                    resumed.clear()
            elif event.get("event") == "step":
                rows.setdefault(int(event["step"]), {}).update(event)
    return dict(sorted(rows.items())), resumed


def series(rows: Mapping[int, Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one quantity, where it is a finite number."""
    pairs = [(step, row[key]) for step, row in rows.items() if isinstance(row.get(key), int | float)]
    pairs = [(step, float(value)) for step, value in pairs if abs(float(value)) < float("inf")]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smooth(values: Sequence[float], *, span: int) -> list[float]:
    """Exponential moving average whose start is not pulled towards zero."""
    weight = 2 / (span + 1)
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total = (1 - weight) * total + weight * value
        norm = (1 - weight) * norm + weight
        out.append(total / norm)
    return out


def _panel(axes: Any, title: str, unit: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=8)
    axes.set_ylabel(unit, fontsize=9, color=_MUTED)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)


def _line(axes: Any, steps: Sequence[int], values: Sequence[float], color: str, *, label: str, span: int) -> None:
    """The raw values faintly, the smoothed ones over them."""
    if len(values) >= 8:
        axes.plot(steps, values, color=color, alpha=0.28, linewidth=1.0, label=label)
        axes.plot(steps, smooth(values, span=span), color=color, linewidth=2.2, label=f"{label}, smoothed")
    else:
        axes.plot(steps, values, color=color, linewidth=2.0, marker="o", markersize=4, label=label)


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(handles, labels, frameon=False, fontsize=8.5, labelcolor=_INK, loc="best")


def _draw_loss(axes: Any, rows: Mapping[int, Mapping[str, Any]], span: int) -> None:
    steps, values = series(rows, "loss")
    _panel(axes, "Loss")
    _line(axes, steps, values, _BLUE, label="training", span=span)
    held_steps, held = series(rows, "validation_loss")
    if held:
        axes.plot(held_steps, held, color=_ORANGE, linewidth=1.8, marker="o", markersize=4, label="held-out")
    if len(values) >= 8:
        ordered = sorted(values)
        top = ordered[int(0.99 * (len(ordered) - 1))]
        low, high = min(ordered[0], *(held or [ordered[0]])), max(top, *(held or [top]))
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)
    _legend(axes)


def _draw_norm(axes: Any, rows: Mapping[int, Mapping[str, Any]], span: int) -> None:
    steps, values = series(rows, "grad_norm")
    _panel(axes, "Gradient norm (before clipping)")
    _line(axes, steps, values, _PURPLE, label="norm", span=span)
    limit_steps, limits = series(rows, "grad_limit")
    if limits:
        axes.plot(limit_steps, limits, color=_ORANGE, linewidth=1.4, linestyle="--", label="limit")
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 50 * min(positive):
        axes.set_yscale("log")
    _legend(axes)


def _draw_time(axes: Any, rows: Mapping[int, Mapping[str, Any]], span: int) -> None:
    steps, values = series(rows, "step_time")
    _panel(axes, "Time per step", "seconds")
    top = None
    if len(values) > 4:  # the first step compiles or warms up and would flatten the rest
        top = 1.15 * sorted(values)[max(0, int(0.97 * len(values)) - 1)]
        axes.set_ylim(0, top)
    _line(axes, steps, [min(value, top or value) for value in values], _GREEN, label="step", span=span)
    wait_steps, waits = series(rows, "data_wait")
    if waits:
        axes.fill_between(wait_steps, waits, color=_ORANGE, alpha=0.35, linewidth=0, label="of it waiting for data")
    _legend(axes)


def plot_curves(events: Path, target: Path, *, title: str = "") -> Path | None:
    """Draw loss, learning rate, gradient norm and step time; ``None`` when there is nothing to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows, resumed = read_events(events)
    if not rows:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    span = max(5, len(rows) // 15)
    figure = Figure(figsize=(12, 7), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    grid = figure.subplots(2, 2, sharex=True)
    _draw_loss(grid[0][0], rows, span)
    _panel(grid[0][1], "Learning rate")
    steps, rates = series(rows, "lr")
    grid[0][1].plot(steps, rates, color=_INK, linewidth=2.0)
    grid[0][1].ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    if rates:
        grid[0][1].set_ylim(0, 1.15 * max(rates) or 1.0)
    _draw_norm(grid[1][0], rows, span)
    _draw_time(grid[1][1], rows, span)
    for axes in grid.flat:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        for step in resumed:
            axes.axvline(step, color=_MUTED, linewidth=1.0, linestyle=":")
    for axes in grid[1]:
        axes.set_xlabel("optimizer step" + (" (dotted: resumed)" if resumed else ""), fontsize=9, color=_MUTED)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, facecolor="white")
    return target
