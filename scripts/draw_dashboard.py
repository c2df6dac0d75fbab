#!/usr/bin/env python3
"""Draws the dashboard of deploy/monitoring as pictures for docs/: `make pictures`. As root.

The agents work for some minutes, as for `make monitoring`; then the queries of each panel
are run against their Prometheus, as Grafana runs them, and drawn: a picture for each row of
the dashboard in which something happened. A panel that finds no data says so.

Run it by target/python/bin/python, with matplotlib; BIN_DIR has the programs.
"""

import io
import json
import math
import time
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter  # noqa: E402
from PIL import Image  # noqa: E402

from check_monitoring import DASHBOARD, ask, replaced, running  # noqa: E402
from manifests import problem, report  # noqa: E402

PICTURES = Path(__file__).resolve().parent.parent / "docs/pictures"
RUN, STEP, INTERVAL = 150, 2, "20s"
# The most lines with a name of their own in a panel.
NAMED = 8


def rows():
    """(title, panels) of each row of the dashboard."""
    listed = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            listed.append((panel["title"], []))
        else:
            listed[-1][1].append(panel)
    return listed


def amount(unit):
    """How values of the unit are written."""

    def written(value, _=None):
        if unit == "percentunit":
            return f"{value * 100:.3g} %"
        if unit == "bytes":
            power = max(0, min(4, int(math.log(value, 1024)))) if value >= 1 else 0
            return f"{value / 1024**power:.3g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
        if unit == "s":
            scale, name = (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")
            return f"{value * scale:.3g} {name}"
        return f"{value:.3g}" + {"reqps": " /s", "ops": " /s"}.get(unit, "")

    return written


def numbers(series):
    points = [(float(at), float(value)) for at, value in series["values"]]
    return [point for point in points if math.isfinite(point[1])]


def found(address, panel, start, end):
    """(legend, points) of all series of the panel."""
    series = []
    for target in panel["targets"]:
        query = replaced(target["expr"], INTERVAL)
        for one in ask(address, query, start=start, end=end, step=STEP) or []:
            legend = target.get("legendFormat") or panel["title"]
            for label, value in one["metric"].items():
                legend = legend.replace("{{" + label + "}}", value)
            if points := numbers(one):
                series.append((legend, points))
    moved = [one for one in series if is_moved(one[1])]
    return moved or series[:1]


def is_moved(points):
    return any(value for _, value in points)


def draw_lines(axes, series, start, title):
    # The largest first, so that the legend has those that one sees.
    series.sort(key=lambda one: -max(value for _, value in one[1]))
    for number, (legend, points) in enumerate(series):
        x, y = [at - start for at, _ in points], [value for _, value in points]
        axes.plot(x, y, linewidth=1.2, label=legend if number < NAMED else None)
    top = max(value for _, points in series for _, value in points)
    axes.set_ylim(0, top * 1.15 or 1)
    if is_moved(series[0][1]) and (len(series) > 1 or series[0][0] != title):
        axes.legend(fontsize=6, loc="upper right", framealpha=0.7)


def draw_heatmap(axes, series, start):
    """Buckets are cumulative: a cell is what its bucket has above the one below."""
    series = sorted(series, key=lambda one: float(one[0].replace("+Inf", "inf")))
    times = sorted({at for _, points in series for at, _ in points})
    table, below = [], dict.fromkeys(times, 0.0)
    for _, points in series:
        now = {**below, **dict(points)}
        table.append([max(0.0, now[at] - below[at]) for at in times])
        below = now
    axes.pcolormesh([at - start for at in times], range(len(table)), table, cmap="YlOrRd", shading="nearest")
    names = [amount("s")(float(bound)) if bound != "+Inf" else "more" for bound, _ in series]
    axes.set_yticks(range(len(names)), [f"≤ {name}" for name in names], fontsize=6)


def draw(panel, axes, series, start):
    unit = panel["fieldConfig"]["defaults"].get("unit") if "fieldConfig" in panel else None
    axes.set_title(panel["title"], fontsize=8, loc="left")
    axes.tick_params(labelsize=6)
    if panel["type"] == "stat" or not series:
        axes.axis("off")
        text = amount(unit)(series[0][1][-1][1]) if series else "no data"
        axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=16 if series else 9)
        return
    axes.set_xlabel("seconds", fontsize=6)
    axes.set_xlim(0, RUN)
    if panel["type"] == "heatmap":
        draw_heatmap(axes, series, start)
    else:
        axes.grid(linewidth=0.3)
        axes.yaxis.set_major_formatter(FuncFormatter(amount(unit)))
        draw_lines(axes, series, start, panel["title"])


def picture(title, drawn, start):
    """One row of the dashboard, laid out as in Grafana."""
    lines = {}
    for panel, series in drawn:
        lines.setdefault(panel["gridPos"]["y"], []).append((panel, series))
    heights = [0.32 * line[0][0]["gridPos"]["h"] for line in lines.values()]
    figure = plt.figure(figsize=(12, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)
    for part, line in zip(parts[:, 0], lines.values()):
        widths = [panel["gridPos"]["w"] for panel, _ in line]
        columns = part.subplots(1, len(line), width_ratios=widths, squeeze=False)
        for axes, (panel, series) in zip(columns[0], line):
            draw(panel, axes, series, start)
    file = PICTURES / f"dashboard-{title.lower().replace(' ', '-')}.png"
    drawing = io.BytesIO()
    figure.savefig(drawing, dpi=90)
    plt.close(figure)
    # A third of the size.
    Image.open(drawing).convert("RGB").quantize(48).save(file, optimize=True)
    return file


def main():
    PICTURES.mkdir(exist_ok=True)
    for old in PICTURES.glob("dashboard-*.png"):
        old.unlink()
    made = []
    with running() as (address, _):
        start = time.time()
        time.sleep(RUN)
        for title, panels in rows():
            drawn = [(panel, found(address, panel, start, start + RUN)) for panel in panels]
            if any(is_moved(points) for _, series in drawn for _, points in series):
                made.append(picture(title, drawn, start))
    if not made:
        problem(DASHBOARD.name, "no panel finds data")
    size = sum(file.stat().st_size for file in made)
    report(f"pictures: {len(made)} rows of the dashboard in docs/pictures, {size >> 10} KiB")


if __name__ == "__main__":
    main()
