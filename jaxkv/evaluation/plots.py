"""The pictures of a report, as matplotlib figures. Needs matplotlib (`pip install 'jaxkv[eval]'`)."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.evaluation.retention import Retention
from jaxkv.evaluation.summary import Record, answers, asked_size, grouped, has_bytes, in_words, name_of, quality, wilson

# Colours that people with any colour vision tell apart (Okabe and Ito), and a marker each: readable in grey as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31", "#B2182B", "#4D4D4D")
MARKERS = "osD^vPX*<>"
SHADES = "viridis"
MANY = len(COLOURS)  # more policies than this are no lines that one can tell apart
INK = {False: ("black", "white"), True: ("#B34700", "#FFC08A")}  # of a prompt's and of a new word, on light and on dark


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def _styles(rows: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """A colour and marker per policy; another source's twin has the same ones, dashed."""
    bare = lambda name: name.rpartition(": ")[2]  # noqa: E731
    order = list(dict.fromkeys(bare(row["policy"]) for row in rows if row["budget"] is not None))
    out = {}
    for row in rows:
        turn = order.index(bare(row["policy"])) if bare(row["policy"]) in order else len(order)
        out[row["policy"]] = {
            "color": COLOURS[turn % len(COLOURS)],
            "marker": MARKERS[turn % len(MARKERS)],
            "linestyle": "-" if bare(row["policy"]) == row["policy"] else "--",
            "markerfacecolor": None if bare(row["policy"]) == row["policy"] else "white",
            "markersize": 5,
            "linewidth": 1.6,
        }
    return out


def _lines(axes: Any, rows: Sequence[Record], value: Any, styles: dict[str, Any], bars: bool = False) -> None:
    """`value(row)` against budget, a line per policy; policies without a budget as a horizontal line."""
    names = list(styles)
    for order, (name, some) in enumerate(grouped(rows, lambda row: row["policy"]).items()):
        known = [(row["at"], row) for row in some if row["budget"] is not None and row["at"] is not None]
        points = sorted(known, key=lambda point: point[0])
        points = [(x, y) for x, row in points if (y := value(row)) is not None]
        if not points:
            flat = value(some[0])
            if flat is not None:
                ours = name == name.rpartition(": ")[2]
                look = {"color": "black", "linestyle": ":"} if ours else {"color": "grey", "linestyle": "-."}
                axes.axhline(flat.value if bars else flat, linewidth=1.4, label=name, **look)
            continue
        x = np.array([x for x, _ in points], float)
        if not bars:
            axes.plot(x, [y for _, y in points], label=name, **styles[name])
            continue
        x = x * (1 + 0.012 * (order - len(names) / 2))  # side by side, so that no interval hides another
        mean = np.array([y.value for _, y in points])
        error = np.array([[y.value - y.low for _, y in points], [y.high - y.value for _, y in points]])
        axes.errorbar(x, mean, np.maximum(error, 0), label=name, elinewidth=0.8, capsize=2, alpha=0.9, **styles[name])
    ticks = sorted({round(row["at"]) for row in rows if row["at"] is not None and row["budget"] is not None})
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [in_words(tick, rows) if has_bytes(rows) else str(tick) for tick in ticks])
        axes.minorticks_off()
    if len(ticks) == 1:  # what stands side by side is no other budget
        axes.set_xlim(ticks[0] / 1.5, ticks[0] * 1.5)
    axes.set_xlabel("bytes of keys and values per row" if has_bytes(rows) else "tokens kept per KV head")
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _crowded(rows: Sequence[Record]) -> bool:
    """Whether lines against the budget would say nothing: one budget only, or too many policies."""
    evicting = [row for row in rows if row["budget"] is not None]
    return len({row["budget"] for row in evicting}) < 2 or len({row["policy"] for row in evicting}) > MANY


def _name(policy: str) -> str:
    """A policy's label on lines of some forty letters."""
    return "\n".join(textwrap.wrap(policy, 40)) or policy


def _dot_panels(panels: Sequence[tuple[str, Sequence[Record], Any]], width: float = 3.4, best: str = "high") -> Any:
    """A line per policy, the best of the first panel on top, and a point in each panel (title, rows, `value(row)`)."""
    first = {row["policy"]: _plain(panels[0][2](row)) for row in panels[0][1]}
    known = {row["policy"]: None for _, rows, _ in panels for row in rows}
    worst = -math.inf if best == "high" else math.inf
    sign = 1 if best == "high" else -1
    names = sorted(known, key=lambda name: sign * (worst if first.get(name) is None else first[name]))
    lines = sum(_name(name).count("\n") + 1 for name in names)
    figure = _figure(2.2 + width * len(panels), max(1.8, 0.9 + 0.19 * lines))
    for axes, (title, rows, value) in zip(
        np.atleast_1d(figure.subplots(1, len(panels), sharey=True)), panels, strict=True
    ):
        for row in rows:
            found = value(row)
            if found is None:
                continue
            mean, at = _plain(found), names.index(row["policy"])
            look = {"color": "black" if row["budget"] is None else COLOURS[0], "fmt": "o", "markersize": 4}
            error = None if found is mean else np.maximum([[mean - found.low], [found.high - mean]], 0)
            axes.errorbar([mean], [at], xerr=error, elinewidth=0.8, capsize=2, **look)
        axes.set_title(title, fontsize=9)
        axes.set_yticks(range(len(names)), [_name(name) for name in names], fontsize=7)
        axes.set_ylim(-0.7, len(names) - 0.3)
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure


def _plain(found: Any) -> Any:
    """The mean of a `Mean`, or the number itself."""
    return getattr(found, "value", found)


def _by_budget(rows: Sequence[Record], value: Any, title: str) -> list[tuple[str, list[Record], Any]]:
    """A panel for each budget; policies without one stand in all."""
    sizes = sorted({row["budget"] for row in rows if row["budget"] is not None})
    of = lambda size: [row for row in rows if row["budget"] in (size, None)]  # noqa: E731
    return [(f"{title}, {in_words(size, rows)}", of(size), value) for size in sizes] or [(title, list(rows), value)]


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    longest = max([len(line) for label in labels for line in _name(label).split("\n")], default=1)
    figure.legend(
        handles,
        [_name(label) for label in labels],
        loc="outside lower center",
        ncols=max(1, int(figure.get_figwidth() / (0.75 + 0.068 * longest))),
        frameon=False,
        fontsize=8,
        handlelength=3.2,
    )


def quality_figure(records: Sequence[Record]) -> Any:
    """Mean score against budget per policy with 95 % intervals, a panel per mode.

    With one budget, or with many policies: a line for each policy and a panel for each budget.
    """
    rows = quality(records)
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    if _crowded(rows):
        panels = []
        for mode in modes:
            some = [row for row in rows if row["mode"] == mode]
            panels += _by_budget(some, lambda row: row["score"], "score" if len(modes) < 2 else f"score, {mode}")
        figure = _dot_panels(panels)
        for axes in figure.axes:
            axes.set_xlim(-0.03, 1.03)
        figure.supxlabel(f"mean score of {_questions(rows)}, 95 % interval", fontsize=9)
        return figure
    figure = _figure(7.2 * len(modes), 4.6)
    for axes, mode in zip(np.atleast_1d(figure.subplots(1, len(modes), sharey=True)), modes, strict=True):
        _lines(axes, [row for row in rows if row["mode"] == mode], lambda row: row["score"], _styles(rows), bars=True)
        axes.set_ylim(-0.03, 1.03)
        said = "question known" if mode == "aware" else "context compressed first"
        count = _questions([row for row in rows if row["mode"] == mode])
        axes.set_title(f"Mean score, {said} ({count})", fontsize=10)
    figure.axes[0].set_ylabel("score (95 % interval)")
    _legend(figure, figure.axes[0])
    return figure


def _questions(rows: Sequence[Record]) -> str:
    """How many questions the means are of: all of one number, or from the fewest to the most."""
    counts = [row["score"].count for row in rows]
    return f"{min(counts)} to {max(counts)} questions" if min(counts) < max(counts) else f"{max(counts)} questions"


def tasks_figure(records: Sequence[Record]) -> Any:
    """Score against budget per policy, a panel per task and mode; with one budget or many policies a heat map."""
    rows = quality(records)
    panels = list(dict.fromkeys((row["mode"], task) for row in rows for task in row["tasks"]))
    if _crowded(rows):
        return _task_map(rows, panels)
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = _figure(3.9 * columns, 2.9 * lines + 0.6)
    grid = np.atleast_1d(figure.subplots(lines, columns, sharey=True, squeeze=False)).ravel()
    modes = {mode for mode, _ in panels}
    for axes, (mode, task) in zip(grid, panels, strict=False):
        some = [row for row in rows if row["mode"] == mode and task in row["tasks"]]
        _lines(axes, some, lambda row, task=task: row["tasks"][task].value, _styles(rows))
        axes.set_title(task if len(modes) < 2 else f"{task}, {mode}", fontsize=9)
        axes.set_ylim(-0.03, 1.03)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, grid[0])
    return figure


def _task_map(rows: Sequence[Record], panels: Sequence[tuple[str, str]]) -> Any:
    """Scores as numbers on colours: a line per policy, best on top, a column per task and budget."""
    sizes = sorted({row["budget"] for row in rows if row["budget"] is not None}) or [None]
    columns = [(mode, task, size) for mode, task in panels for size in sizes]
    modes = {mode for mode, _ in panels}
    found: dict[str, list[Any]] = {row["policy"]: [None] * len(columns) for row in rows}
    for row in rows:
        for at, (mode, task, size) in enumerate(columns):
            if row["mode"] == mode and row["budget"] in (size, None) and task in row["tasks"]:
                found[row["policy"]][at] = row["tasks"][task].value
    mode_of = lambda mode: [mode] if len(modes) > 1 else []  # noqa: E731
    size_of = lambda size: [] if size is None else [in_words(size, rows)]  # noqa: E731
    said = ["\n".join([task, *mode_of(mode), *size_of(size)]) for mode, task, size in columns]
    return _score_map(found, said)


def _score_map(found: dict[str, list[Any]], columns: Sequence[str]) -> Any:
    """Numbers on colours: a line per policy, best on top, a column each; None where nothing was asked."""
    cells = np.array([[np.nan if value is None else value for value in line] for line in found.values()], float)
    order = np.argsort(-np.nan_to_num(cells).mean(axis=1), kind="stable")
    names, cells = [list(found)[at] for at in order], cells[order]
    lines = sum(_name(name).count("\n") + 1 for name in names)
    figure = _figure(2.4 + 0.95 * len(columns), max(1.8, 1.1 + 0.2 * lines))
    axes = figure.subplots()
    axes.set_facecolor("#dddddd")
    axes.imshow(cells, cmap=SHADES, vmin=0, vmax=1, aspect="auto")
    for (line, at), value in np.ndenumerate(cells):
        if not np.isnan(value):
            colour = "black" if value > 0.55 else "white"
            axes.text(at, line, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_yticks(range(len(names)), [_name(name) for name in names], fontsize=7)
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.xaxis.tick_top()
    figure.supxlabel("right answers, per cent", fontsize=9)
    return figure


def needle_figure(records: Sequence[Record]) -> Any:
    """Depth x length heat maps of the mean score of tasks with a depth: a row per policy and mode, a column per budget.

    Where all prompts have one length: a line per policy, a column per depth and budget.
    """
    found = [r for r in answers(records) if r.get("depth") is not None and r.get("length") is not None]
    sizes = sorted({size for record in found if (size := asked_size(record)) is not None})
    modes = {record["mode"] for record in found}
    line_of = lambda record: name_of(record) + (f", {record['mode']}" if len(modes) > 1 else "")  # noqa: E731
    names = list(dict.fromkeys(map(line_of, found)))
    depths, lengths = sorted({r["depth"] for r in found}), sorted({r["length"] for r in found})
    if len(lengths) == 1:
        columns = [(depth, size) for size in sizes or [None] for depth in depths]
        shares = {
            name: [
                wilson(some).value
                if (
                    some := [
                        r["score"]
                        for r in found
                        if line_of(r) == name and r["depth"] == depth and asked_size(r) in (size, None)
                    ]
                )
                else None
                for depth, size in columns
            ]
            for name in names
        }
        said = [
            f"depth {depth:g}" + (f"\n{in_words(size, found)}" if size is not None else "") for depth, size in columns
        ]
        return _score_map(shares, said)
    wide = max(1.1, 0.42 * len(lengths) + 0.5)
    figure = _figure(max(5.8, 1.6 + wide * max(1, len(sizes))), 0.8 + (0.17 * len(depths) + 0.45) * len(names))
    grid = figure.subplots(len(names), max(1, len(sizes)), squeeze=False)
    image = None
    for line, name in enumerate(names):
        for column in range(max(1, len(sizes))):
            axes = grid[line, column]
            cells = np.full((len(depths), len(lengths)), np.nan)
            mine = [
                r for r in found if line_of(r) == name and asked_size(r) in (None, sizes[column] if sizes else None)
            ]
            for (depth, length), some in grouped(mine, lambda r: (r["depth"], r["length"])).items():
                cells[depths.index(depth), lengths.index(length)] = wilson([r["score"] for r in some]).value
            image = axes.imshow(cells, cmap=SHADES, vmin=0, vmax=1, aspect="auto")
            axes.set_facecolor("#dddddd")
            last = line == len(names) - 1
            axes.set_xticks(range(len(lengths)), [str(n) for n in lengths] if last else [], fontsize=6, rotation=90)
            axes.set_yticks(range(len(depths)), [f"{d:g}" for d in depths] if not column else [], fontsize=5)
            if not line and sizes:
                axes.set_title(in_words(sizes[column], found), fontsize=8)
        grid[line, 0].set_ylabel(_name(name), rotation=0, ha="right", va="center", fontsize=8)
    figure.suptitle("Score by depth of the answer (down) and length of the prompt, by budget", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.5, aspect=30)
    return figure


def cost_figure(records: Sequence[Record]) -> Any:
    """Bytes of the cache per row, and, where more than one batch was decoded, tokens per second, against budget."""
    rows = [row for row in quality(records) if row["mode"] == quality(records)[0]["mode"]]
    timed = any(row["tokens_per_second"] for row in rows)
    if _crowded(rows):
        cost = _by_budget(rows, lambda row: row["cache_bytes"] / 2**20, "MiB of cache per sequence")
        speed = _by_budget(rows, lambda row: row["tokens_per_second"], "tokens/s, all rows") if timed else []
        figure = _dot_panels([*cost, *speed], best="low")
        for axes in figure.axes:
            axes.set_xlim(left=0)
        return figure
    figure = _figure(9.6 if timed else 4.8, 4.0)
    left, *right = np.atleast_1d(figure.subplots(1, 1 + timed))
    _lines(left, rows, lambda row: row["cache_bytes"] / 2**20, _styles(rows))
    left.set_title("Cache per sequence when the answer ends", fontsize=10)
    left.set_ylabel("MiB")
    left.set_ylim(bottom=0)
    for axes in right:
        _lines(axes, rows, lambda row: row["tokens_per_second"], _styles(rows))
        axes.set_title("Decoding, best batch", fontsize=10)
        axes.set_ylabel("tokens/s, all rows")
        axes.set_ylim(bottom=0)
    _legend(figure, left)
    return figure


def fidelity_figure(rows: Sequence[Record]) -> Any:
    """KL, top-1 agreement and attention mass kept against budget (`rows` from `summary.fidelities`)."""
    evicting = [row for row in rows if row["budget"] is not None]
    if _crowded(rows):
        panels = []
        for field, title in (("kl", "KL (nats)"), ("top1", "same likeliest token"), ("mass", "attention mass kept")):
            panels += _by_budget(evicting, lambda row, field=field: row[field], title)
        figure = _dot_panels(panels, 2.8 if len(panels) < 4 else 2.2, best="low")
        for axes, (title, some, _) in zip(figure.axes, panels, strict=True):
            if title.startswith("KL") and all(row["kl"] > 0 for row in some):
                axes.set_xscale("log")
        return figure
    figure = _figure(12.6, 4.0)
    for axes, (field, title) in zip(
        figure.subplots(1, 3),
        (
            ("kl", "KL of the next token, full cache against policy (nats)"),
            ("top1", "Same most likely token"),
            ("mass", "Attention mass of the prompt kept"),
        ),
        strict=True,
    ):
        _lines(axes, evicting, lambda row, field=field: row[field], _styles(rows))
        axes.set_title(title, fontsize=9)
        if field == "kl":
            if all(row["kl"] > 0 for row in evicting):
                axes.set_yscale("log")
        else:
            axes.set_ylim(-0.03, 1.03)
    _legend(figure, figure.axes[0])
    return figure


def heads_figure(rows: Sequence[Record]) -> Any:
    """Attention mass kept by layer and KV head, a panel per policy at the middle budget."""
    sizes = sorted({row["budget"] for row in rows if row["budget"] is not None})
    size = sizes[len(sizes) // 2]
    some = [row for row in rows if row["budget"] == size]
    layers, heads = np.array(some[0]["by_head"]).shape
    columns = min(len(some), 10)
    lines = math.ceil(len(some) / columns)
    figure = _figure(max(5.0, 1.25 * columns + 1.2), max(2.4, 0.07 * layers + 1.0) * lines + 0.4)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    image = None
    for axes, row in zip(grid.ravel(), some, strict=False):
        image = axes.imshow(np.array(row["by_head"]), cmap=SHADES, vmin=0, vmax=1, aspect="auto")
        axes.set_title("\n".join(textwrap.wrap(row["policy"], 16)), fontsize=7)
        axes.set_xticks(range(heads), [str(head) for head in range(heads)], fontsize=6)
    for axes in grid.ravel()[len(some) :]:
        axes.set_visible(False)
    for line in grid:
        line[0].set_ylabel("layer", fontsize=8)
    figure.supxlabel("KV head", fontsize=8)
    figure.suptitle(f"Attention mass of the prompt kept ({in_words(size, rows)})", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.8 / lines, aspect=20, fraction=0.05)
    return figure


def retention_figure(picture: Retention, title: str) -> Any:
    """Two maps over the text: which layer and head held each token at the end; what share held it at every step."""
    kept = picture.kept
    layers, heads, tokens = kept.shape[1:]
    figure = _figure(10.5, 6.4)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    upper.imshow(
        kept[-1].reshape(layers * heads, tokens), cmap="Blues", aspect="auto", interpolation="nearest", vmax=1.3
    )
    upper.set_yticks([heads * layer + (heads - 1) / 2 for layer in range(0, layers, max(1, layers // 10))])
    upper.set_yticklabels([str(layer) for layer in range(0, layers, max(1, layers // 10))], fontsize=7)
    upper.set_ylabel(f"layer ({heads} KV heads each)")
    upper.set_title(f"{title}: held after {picture.steps[-1]} new tokens", fontsize=10)
    share = kept.mean(axis=(1, 2))
    image = lower.imshow(share, cmap=SHADES, aspect="auto", interpolation="nearest", vmin=0, vmax=1)
    shown = range(0, len(picture.steps), max(1, len(picture.steps) // 8))
    lower.set_yticks(list(shown), [str(picture.steps[at]) for at in shown], fontsize=7)
    lower.set_ylabel("new tokens")
    lower.set_xlabel("place in the text")
    figure.colorbar(image, ax=lower, label="share of heads that hold it", pad=0.01)
    for axes in (upper, lower):
        axes.axvline(picture.prompt - 0.5, color="#D55E00", linewidth=1)
    upper.text(
        picture.prompt, layers * heads * 1.02, " prompt | new", fontsize=7, ha="center", va="top", color="#D55E00"
    )
    return figure


def text_figure(picture: Retention, title: str, limit: int = 420) -> Any:
    """The text itself, each token on the colour of the share of heads that hold it, at the first and last snapshot."""
    import matplotlib
    from matplotlib.patches import Rectangle

    columns, shades = 118, matplotlib.colormaps["Blues"]
    moments = (0, len(picture.steps) - 1)
    layouts = [_laid_out(picture, picture.prompt + picture.steps[moment], limit, columns) for moment in moments]
    heights = [layout[-1][1] + 1 for layout in layouts]
    figure = _figure(10.5, 0.19 * sum(heights) + 1.0)
    grid = figure.subplots(len(moments), 1, height_ratios=heights)
    for axes, moment, layout, height in zip(grid, moments, layouts, heights, strict=True):
        share = picture.kept[moment].mean(axis=(0, 1))
        for at, line, column, word in layout:
            value = float(share[at])
            box = Rectangle((column, line), len(word), 0.92, facecolor=shades(0.85 * value), edgecolor="none")
            axes.add_patch(box)
            axes.text(
                column, line + 0.5, word, family="monospace", fontsize=9.4, ha="left", va="center",
                parse_math=False,
                color=INK[at >= picture.prompt][value > 0.6],
            )  # fmt: skip
        axes.set_xlim(0, columns)
        axes.set_ylim(height, 0)
        axes.axis("off")
        when = f"after {picture.steps[moment]} new tokens" if moment else "as the prompt left it"
        axes.set_title(f"{title}, {when} (dark: held by all heads; orange: written by the model)", fontsize=9)
    return figure


def _laid_out(picture: Retention, tokens: int, limit: int, columns: int) -> list[tuple[int, int, int, str]]:
    """(token, line, column, what is drawn) of the last `limit` of the first `tokens` tokens, in `columns` columns."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont("monospace"))
    out, line, column = [], 0, 0
    for at in range(max(0, tokens - limit), tokens):
        word = picture.tokens[at].replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", " ") or " "
        word = "".join(letter if font.get_char_index(ord(letter)) else "\N{WHITE SQUARE}" for letter in word)
        word = word[:columns]
        if column + len(word) > columns:
            line, column = line + 1, 0
        out.append((at, line, column, word))
        column += len(word)
    return out
