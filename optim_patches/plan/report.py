"""A plan as text, as a file and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from optim_patches.plan.fit import Fit
from optim_patches.plan.phases import COMPONENTS, Peak, Plan

GB = 1e9
_COLOURS = ("#777777", "#4477aa", "#66ccee", "#228833", "#aaddaa", "#ccbb44", "#bbbbbb", "#99ddff", "#ee6677",
            "#ffaabb", "#aa3377", "#dddddd", "#eeeeee")  # fmt: skip


def table(plan: Plan) -> list[str]:
    """One line per phase, size and place, with its components in GB."""
    shown = [name for name in COMPONENTS if any(peak.parts.get(name, 0) > 5e6 for peak in plan.peaks)]
    head = ["phase", "where", "size", "peak GB", *shown]
    rows = [[peak.phase, peak.place, peak.size, _gb(peak.total), *(_gb(peak.parts.get(name, 0)) for name in shown)]
            for peak in sorted(plan.peaks, key=lambda peak: (peak.place, peak.size))]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) if column < 3 else cell.rjust(width)
                       for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
             for row in [head, *rows]]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def summary(plan: Plan, *, device_gb: float | None = None, host_gb: float | None = None) -> list[str]:
    """The plan in a few sentences."""
    spec = plan.spec
    kind = "LoRA" if spec.adapters is not None else "full fine-tuning"
    lines = [f"plan: {kind}, {plan.trained / 1e6:.1f}M trained parameters, {spec.precision}, made in "
             f"{plan.seconds:.1f} s"]  # fmt: skip
    if spec.device != "cpu":
        lines.append(_place(plan.peak("device"), "device", device_gb))
    lines.append(_place(plan.peak("host"), "host", host_gb))
    return lines + [f"  {note}" for note in plan.notes]


def _place(peak: Peak, place: str, limit: float | None) -> str:
    beside = ""
    if limit is not None:
        word = "fits into" if peak.total <= limit * GB else "DOES NOT FIT into"
        beside = f": {word} {limit:.4g} GB"
    return f"  {place}: {_gb(peak.total)} GB in phase {peak.phase} at {peak.size}{beside}"


def fit_lines(fit: Fit, *, device_gb: float) -> list[str]:
    """What must change, and what that costs."""
    if not fit.changes and fit.fits:
        return [f"fits into {device_gb:.4g} GB as it is"]
    start = (f"fits into {device_gb:.4g} GB with" if fit.fits
             else f"nothing makes it fit into {device_gb:.4g} GB; the least is reached with")
    lines = [f"{start}: {' '.join(change.text() for change in fit.changes)}"]
    lines += [f"  {change.text()}: {change.why} (about {100 * (change.slowdown - 1):.0f} % slower)"
              for change in fit.changes]
    lines.append(f"  then {_gb(fit.plan.device_bytes)} GB, about {100 * (fit.slowdown - 1):.0f} % slower")
    return lines + [f"  further: {hint}" for hint in fit.hints]


def write_json(plan: Plan, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plan.as_dict(), indent=1) + "\n", encoding="utf-8")
    return path


def draw(plan: Plan, path: Path, *, device_gb: float | None = None) -> Path:
    """Stacked bars: one per phase, size and place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    peaks = sorted(plan.peaks, key=lambda peak: (peak.place, peak.size))
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(peaks)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _bars(axes, peaks)
    if device_gb is not None and plan.spec.device != "cpu":
        axes.axvline(device_gb, color="black", linestyle="--", linewidth=1, label=f"device {device_gb:.4g} GB")
    axes.set_xlabel("GB")
    axes.invert_yaxis()
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _bars(axes: object, peaks: Sequence[Peak]) -> None:
    labels = [f"{peak.place} {peak.phase}\n{peak.size}" for peak in peaks]
    left = [0.0] * len(peaks)
    for name, colour in zip(COMPONENTS, _COLOURS, strict=True):
        values = [peak.parts.get(name, 0) / GB for peak in peaks]
        if max(values, default=0) > 0:
            axes.barh(range(len(peaks)), values, left=left, color=colour, label=name, height=0.8)  # type: ignore[attr-defined]
            left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set_yticks(range(len(peaks)), labels, fontsize=7)  # type: ignore[attr-defined]


def _gb(value: float) -> str:
    return f"{value / GB:.2f}" if value < 100 * GB else f"{value / GB:.0f}"
