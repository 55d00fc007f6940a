"""Plots results of //tools/bench:collectives: latency and bandwidth over size.

    open("collectives.svg", "w").write(svg(results))

One row of two panels for each operation, number of ranks and type, on
logarithmic axes. Colours follow the reader's light or dark background.
"""

import math
from xml.sax.saxutils import escape

_PANEL_WIDTH, _PANEL_HEIGHT = 380, 250
_LEFT, _TOP, _BOTTOM, _GAP, _LEGEND = 64, 54, 46, 84, 230
_ROW = _TOP + _PANEL_HEIGHT + _BOTTOM
_WIDTH = _LEFT + 2 * _PANEL_WIDTH + _GAP + _LEGEND
# For light and for dark backgrounds; the first ones are Okabe and Ito's, which colour-blind readers
# tell apart.
_COLOURS = (
    ("#0072b2", "#56b4e9"), ("#d55e00", "#ff8c42"), ("#009e73", "#2fd0a3"),
    ("#cc79a7", "#e8a3c8"), ("#b38600", "#f0c000"), ("#666666", "#bbbbbb"),
    ("#6a3d9a", "#b799e0"), ("#8c2d04", "#d98a5f"),
)  # fmt: skip
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_UNITS = (("GB", 30), ("MB", 20), ("KB", 10), ("B", 0))


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _power(value):
    """A power of ten, as the axes have them."""
    exponent = round(math.log10(value))
    if -2 <= exponent <= 3:
        return "%g" % value
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def _size(size):
    for unit, bits in _UNITS:
        if size >= 1 << bits:
            return "%g %s" % (round(size / (1 << bits), 1), unit)
    return str(size)


class _Axis:
    """Maps values of a logarithmic range to positions."""

    def __init__(self, values, start, end, base):
        self.base = base
        self.low = math.floor(math.log(min(values), base) + 1e-9)
        self.high = max(self.low + 1, math.ceil(math.log(max(values), base) - 1e-9))
        self.start, self.end = start, end

    def __call__(self, value):
        part = (math.log(value, self.base) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, most):
        step = max(1, math.ceil((self.high - self.low) / most))
        return [self.base**power for power in range(self.low, self.high + 1, step)]


def _text(x, y, text, anchor="middle", more=""):
    return '<text x="%.1f" y="%.1f" text-anchor="%s"%s>%s</text>' % (
        x, y, anchor, more, escape(text))  # fmt: skip


def _panel(left, top, rows, styles, key, title, unit):
    bottom, right = top + _PANEL_HEIGHT, left + _PANEL_WIDTH
    x = _Axis([row["bytes"] for row in rows], left, right, 4)
    y = _Axis([row[key] for row in rows], bottom, top, 10)
    parts = [_text((left + right) / 2, top - 10, title)]
    for size in x.ticks(8):
        parts.append('<path class="grid" d="M%.1f %d V%d"/>' % (x(size), top, bottom))
        parts.append(_text(x(size), bottom + 18, _size(size)))
    for value in y.ticks(8):
        parts.append('<path class="grid" d="M%d %.1f H%d"/>' % (left, y(value), right))
        parts.append(_text(left - 8, y(value) + 4, _power(value), "end"))
    parts.append(_text((left + right) / 2, bottom + 38, "bytes"))
    middle = (top + bottom) / 2
    turned = ' transform="rotate(-90 %.1f %.1f)"' % (left - 48, middle)
    parts.append(_text(left - 48, middle, unit, more=turned))
    for name, style in styles.items():
        line = sorted((row["bytes"], row[key]) for row in rows if row["label"] == name)
        points = ["%.1f %.1f" % (x(size), y(value)) for size, value in line]
        parts.append('<path class="line %s" d="M%s"/>' % (style, " L".join(points)))
        for size, value in line:
            parts.append(
                '<circle class="dot %s" cx="%.1f" cy="%.1f" r="2.8"><title>%s, %s: %g %s</title>'
                "</circle>" % (style, x(size), y(value), escape(name), _size(size), value, unit)
            )
    parts.append('<path class="frame" d="M%d %d H%d V%d H%d Z"/>' % (left, top, right, bottom, left))
    return parts


def _label(row):
    """A contender, whichever variant of a peer was the fastest at one size."""
    words = [row["backend"], "" if row["through"] == "raw" and row["variant"] else row["through"]]
    return " ".join([word for word in words if word] + (["arena"] if row["arena"] else []))


def _css(styles):
    lines = [
        "text { font: 12px system-ui, sans-serif; fill: #24292f }",
        ".title { font-weight: 600; font-size: 14px }",
        ".back { fill: #ffffff } .frame { fill: none; stroke: #57606a }",
        ".grid { stroke: #d0d7de; stroke-width: 0.6 } .line { fill: none; stroke-width: 2 }",
    ]
    dark = ["text { fill: #e6edf3 } .back { fill: #0d1117 } .frame { stroke: #8b949e }"]
    dark += [".grid { stroke: #30363d }"]
    for index, style in enumerate(styles.values()):
        colour = _COLOURS[index % len(_COLOURS)]
        dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
        lines.append(".line.%s { stroke: %s; stroke-dasharray: %s }" % (
            style, colour[0], dash or "none"))  # fmt: skip
        lines.append(".dot.%s { fill: %s }" % (style, colour[0]))
        dark.append(".line.%s { stroke: %s } .dot.%s { fill: %s }" % (
            style, colour[1], style, colour[1]))  # fmt: skip
    return "\n".join(lines) + "\n@media (prefers-color-scheme: dark) {\n%s\n}" % "\n".join(dark)


def svg(results):
    """The picture of results as --json writes them; ValueError if there are none."""
    if not results:
        raise ValueError("there is nothing to plot")
    rows = [dict(result, label=_label(result)) for result in results]
    groups = {}
    for row in rows:
        groups.setdefault((row["op"], row["world_size"], row["dtype"]), []).append(row)
    # One style for one contender in all of the picture.
    styles = {name: "s%d" % i for i, name in enumerate(dict.fromkeys(r["label"] for r in rows))}
    height = _ROW * len(groups) + 10
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d">'
        % (_WIDTH, height, _WIDTH, height),
        "<style>%s</style>" % _css(styles),
        '<rect class="back" width="%d" height="%d"/>' % (_WIDTH, height),
    ]
    for index, ((op, world_size, dtype), group) in enumerate(groups.items()):
        top = index * _ROW + _TOP
        parts.append(_text(_LEFT, top - 32, "%s, %d ranks, %s" % (op, world_size, dtype), "start",
                           ' class="title"'))  # fmt: skip
        here = {name: styles[name] for name in dict.fromkeys(row["label"] for row in group)}
        second = _LEFT + _PANEL_WIDTH + _GAP
        parts += _panel(_LEFT, top, group, here, "us_median", "time per call", "µs (median)")
        parts += _panel(second, top, group, here, "gb_per_s", "bandwidth: bytes / time", "GB/s")
        for line, (name, style) in enumerate(here.items()):
            x, y = second + _PANEL_WIDTH + 18, top + 14 + 20 * line
            parts.append('<path class="line %s" d="M%d %d h24"/>' % (style, x, y))
            parts.append('<circle class="dot %s" cx="%d" cy="%d" r="2.8"/>' % (style, x + 12, y))
            parts.append(_text(x + 32, y + 4, name, "start"))
    return "\n".join(parts) + "\n</svg>\n"
