#!/usr/bin/env python3
"""Plots step logs (log.jsonl) of one or several runs as SVG, with nothing but the standard library.

  scripts/plot_log.py out/log.jsonl                          loss over updates, to out/loss.svg
  scripts/plot_log.py a/log.jsonl b/log.jsonl -l A -l B -o ab.svg --smooth 20
  scripts/plot_log.py out/log.jsonl --corpus data/corpus/corpus.json --table
  scripts/plot_log.py out/log.jsonl -y tokens_per_s -x tokens

Thin lines are the values of each update, thick ones their mean over --smooth updates, dots the validation loss, the
dashed level what a perfect model would reach. A name that ends in .png is made from the SVG by rsvg-convert, if that is there.
"""
import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from html import escape

# Okabe and Ito's colours, which most colour-blind readers can tell apart.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 44, 52


def stop(text):
    print("error: " + text, file=sys.stderr)
    sys.exit(2)


def read_log(path):
    """The records of updates by step (a step that was run again after a resume counts once, the last time), those of
    evaluations by the number of updates before them (at_step), and the number of lines that are no JSON (a line may be
    cut when a run was killed)."""
    updates, evaluations, broken = {}, {}, 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError:
                    broken += 1
                    continue
                if not isinstance(record, dict):
                    continue
                if isinstance(record.get("val_loss"), (int, float)) and isinstance(record.get("at_step"), int):
                    evaluations[record["at_step"]] = {**record, "step": record["at_step"]}
                if isinstance(record.get("loss"), (int, float)) and isinstance(record.get("step"), int):
                    updates[record["step"]] = record
    except OSError as error:
        stop(f"{path}: {error.strerror}")
    return ([updates[s] for s in sorted(updates)], [evaluations[s] for s in sorted(evaluations)], broken)


def series(records, x_key, y_key):
    """Points with finite numbers on both axes."""
    points = []
    for record in records:
        x, y = record.get(x_key), record.get(y_key)
        if isinstance(x, (int, float)) and isinstance(y, (int, float)) and math.isfinite(x) and math.isfinite(y):
            points.append((float(x), float(y)))
    return points


def smoothed(points, window):
    """Mean of the `window` values around each point (fewer at the ends)."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    result = []
    for i, (x, _) in enumerate(points):
        low, high = max(0, i - window // 2), min(len(points), i - window // 2 + window)
        result.append((x, (sums[high] - sums[low]) / (high - low)))
    return result


def ticks(low, high, wanted):
    """Round numbers (1, 2, 5 times a power of ten) that cover [low, high] in about `wanted` steps."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / wanted))
    for factor in (1, 2, 5, 10):
        if span / (step * factor) <= wanted:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value):
    if value == 0:
        return "0"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.6g}{letter}"
    return f"{value:.6g}"


def svg(curves, x_name, y_name, title, floor, width, height):
    """curves: list of (label, colour, thin points, thick points, dots)."""
    everything = [p for _, _, thin, thick, dots in curves for p in thin + thick + dots]
    xs = [p[0] for p in everything]
    # Spikes of single updates may leave the picture; the thick line and the dots never do.
    ys = sorted(p[1] for p in everything)
    solid = [p[1] for _, _, thin, thick, dots in curves for p in (thick or thin) + dots]
    y_low, y_high = min(ys[len(ys) // 500], *solid), max(ys[len(ys) - 1 - len(ys) // 500], *solid)
    if floor is not None:
        y_low, y_high = min(y_low, floor), max(y_high, floor)
    x_low, x_high = min(xs), max(xs)
    if x_high == x_low:
        x_high = x_low + 1
    pad = (y_high - y_low) * 0.05 or abs(y_high) * 0.05 or 1.0
    y_low, y_high = (y_low - pad if y_low < 0 or y_low - pad > 0 else 0.0), y_high + pad
    inner_w, inner_h = width - LEFT - RIGHT, height - TOP - BOTTOM

    def px(x):
        return LEFT + (x - x_low) / (x_high - x_low) * inner_w

    def py(y):
        return TOP + (y_high - y) / (y_high - y_low) * inner_h

    def path(points, colour, thickness, opacity):
        text = " ".join(f"{px(x):.1f},{min(max(py(y), TOP - 50), TOP + inner_h + 50):.1f}" for x, y in points)
        return (f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="{thickness}" '
                f'stroke-opacity="{opacity}" stroke-linejoin="round" clip-path="url(#plot)"/>')

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222222">',
           f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
           f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{inner_w}" height="{inner_h}"/></clipPath>']
    if title:
        out.append(f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>')
    for y in ticks(y_low, y_high, max(3, inner_h // 50)):
        out.append(f'<line x1="{LEFT}" x2="{LEFT + inner_w}" y1="{py(y):.1f}" y2="{py(y):.1f}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{LEFT - 8}" y="{py(y) + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in ticks(x_low, x_high, max(3, inner_w // 90)):
        out.append(f'<line x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{TOP}" y2="{TOP + inner_h}" stroke="#f2f2f2"/>')
        out.append(f'<text x="{px(x):.1f}" y="{TOP + inner_h + 18}" text-anchor="middle">{number(x)}</text>')
    for _, colour, thin, thick, _ in curves:
        if thin:
            out.append(path(thin, colour, 1, 0.35 if thick else 1))
    for _, colour, _, thick, _ in curves:
        if thick:
            out.append(path(thick, colour, 2, 1))
    for _, colour, _, _, dots in curves:
        for x, y in dots:
            out.append(f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="#ffffff" stroke="{colour}" stroke-width="1.5"/>')
    if floor is not None:
        out.append(f'<line x1="{LEFT}" x2="{LEFT + inner_w}" y1="{py(floor):.1f}" y2="{py(floor):.1f}" stroke="#555555" stroke-dasharray="6 4"/>')
        out.append(f'<text x="{LEFT + 6}" y="{py(floor) - 6:.1f}" fill="#555555">perfect model: {floor:.4f}</text>')
    out.append(f'<rect x="{LEFT}" y="{TOP}" width="{inner_w}" height="{inner_h}" fill="none" stroke="#888888"/>')
    out.append(f'<text x="{LEFT + inner_w / 2}" y="{height - 12}" text-anchor="middle">{escape(x_name)}</text>')
    out.append(f'<text x="18" y="{TOP + inner_h / 2}" text-anchor="middle" transform="rotate(-90 18 {TOP + inner_h / 2})">{escape(y_name)}</text>')
    rows = []
    for label, colour, thin, thick, dots in curves:
        last = (thick or thin)
        rows.append((f"{label}: {last[-1][1]:.4g} at the end" if last else label, colour, False))
        if dots:
            rows.append((f"{label}, validation: {dots[-1][1]:.4g}", colour, True))
    box_w = max(len(text) for text, _, _ in rows) * 6.6 + 40
    box_x, box_y = LEFT + inner_w - box_w - 10, TOP + 10
    out.append(f'<rect x="{box_x:.0f}" y="{box_y}" width="{box_w:.0f}" height="{len(rows) * 18 + 10}" fill="#ffffff" fill-opacity="0.85" stroke="#cccccc"/>')
    for i, (text, colour, is_dot) in enumerate(rows):
        y = box_y + 18 + i * 18
        if is_dot:
            out.append(f'<circle cx="{box_x + 18:.0f}" cy="{y - 4}" r="3" fill="#ffffff" stroke="{colour}" stroke-width="1.5"/>')
        else:
            out.append(f'<line x1="{box_x + 8:.0f}" x2="{box_x + 28:.0f}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{box_x + 34:.0f}" y="{y}">{escape(text)}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def print_table(label, updates, evaluations, floor):
    """About twelve rows, evenly spaced, the first and the last update among them."""
    by_step = {e["step"]: e["val_loss"] for e in evaluations}
    n = len(updates)
    picks = sorted({round(i * (n - 1) / 11) for i in range(12)}) if n > 12 else range(n)
    print(f"{label}: {n} updates" + (f", a perfect model's loss is {floor:.4f}" if floor is not None else ""))
    print(f"{'step':>8} {'loss':>9}" + (f" {'above floor':>12}" if floor is not None else "") + f" {'tokens/s':>10}")
    for i in picks:
        u = updates[i]
        row = f"{u['step']:>8} {u['loss']:>9.4f}"
        if floor is not None:
            row += f" {u['loss'] - floor:>12.4f}"
        row += f" {u['tokens_per_s']:>10.0f}" if isinstance(u.get("tokens_per_s"), (int, float)) else f" {'n/a':>10}"
        print(row)
    for step in sorted(by_step)[-1:]:
        print(f"validation loss after {step} updates: {by_step[step]:.4f}" + (f", {by_step[step] - floor:.4f} above the floor" if floor is not None else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("logs", nargs="+", help="log.jsonl files, or the folders that hold them")
    parser.add_argument("-o", "--output", help="SVG or PNG file (default: loss.svg beside the first log)")
    parser.add_argument("-l", "--label", action="append", default=[], help="name of a log in the legend, once for each, in order")
    parser.add_argument("-x", default="step", help="field of the records on the x axis: step (default), tokens")
    parser.add_argument("-y", default="loss", help="field on the y axis: loss (default), grad_norm, lr, tokens_per_s, ...")
    parser.add_argument("--smooth", type=int, default=0, help="mean over so many updates (default: a fiftieth of the run)")
    parser.add_argument("--floor", type=float, help="a level to draw, such as the entropy of the corpus")
    parser.add_argument("--corpus", help="corpus.json of data/make_corpus.py: the loss of a perfect model is the floor")
    parser.add_argument("--title", default="")
    parser.add_argument("--size", default="900x480", help="width x height in pixels")
    parser.add_argument("--table", action="store_true", help="print the curve as a table too")
    args = parser.parse_args()
    if len(args.label) > len(args.logs):
        stop(f"{len(args.label)} labels for {len(args.logs)} logs")
    try:
        width, height = (int(part) for part in args.size.split("x"))
    except ValueError:
        stop(f"--size {args.size}: give it as 900x480")
    floor = args.floor
    if args.corpus:
        try:
            with open(args.corpus, encoding="utf-8") as file:
                # what a perfect model reaches that sees windows of the training's length, as this one does
                floor = float(json.load(file)["window"]["nats_per_byte"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            stop(f"{args.corpus}: no window.nats_per_byte in it ({error!r})")
    curves = []
    for i, name in enumerate(args.logs):
        path = os.path.join(name, "log.jsonl") if os.path.isdir(name) else name
        label = args.label[i] if i < len(args.label) else os.path.basename(os.path.dirname(os.path.abspath(path)))
        updates, evaluations, broken = read_log(path)
        if broken:
            print(f"note: {path}: {broken} lines are no JSON and were left out", file=sys.stderr)
        thin = series(updates, args.x, args.y)
        if not thin:
            stop(f"{path}: no record with numbers in both {args.x} and {args.y}")
        window = args.smooth or max(1, len(thin) // 50)
        dots = series(evaluations, args.x, "val_loss") if args.y == "loss" else []
        curves.append((label, COLOURS[i % len(COLOURS)], thin, smoothed(thin, window) if window > 1 else [], dots))
        if args.table:
            print_table(label, updates, evaluations, floor)
    output = args.output or os.path.join(os.path.dirname(os.path.abspath(args.logs[0] if not os.path.isdir(args.logs[0]) else os.path.join(args.logs[0], "x"))), args.y + ".svg")
    names = {"step": "update", "tokens": "tokens", "loss": "loss (nats a token)", "tokens_per_s": "tokens a second"}
    text = svg(curves, names.get(args.x, args.x), names.get(args.y, args.y), args.title, floor if args.y == "loss" else None, width, height)
    try:
        if output.endswith(".png"):
            if not shutil.which("rsvg-convert"):
                stop("a PNG needs rsvg-convert (apt-get install librsvg2-bin); or name the output .svg")
            subprocess.run(["rsvg-convert", "-o", output], input=text.encode(), check=True)
        else:
            with open(output, "w", encoding="utf-8") as file:
                file.write(text)
    except (OSError, subprocess.CalledProcessError) as error:
        stop(f"{output}: {error}")
    print(f"wrote {os.path.relpath(output)}")


if __name__ == "__main__":
    main()
