#include "tools/plot_page.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "nlohmann/json.hpp"
#include "tools/plot_report.h"

namespace ddp::tools {
namespace {

constexpr size_t kMostPoints = 2000;

constexpr char kBeforeCurves[] = R"html(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Curves</title>
<style>
:root { --page: #f6f7f9; --card: #fff; --text: #1c2128; --faint: #5c6670; --line: #d9dee4; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --card: #1d2127; --text: #e4e8ec; --faint: #9aa4af; --line: #363d46; }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 12px; background: var(--page); color: var(--text);
  font: 14px/1.4 system-ui, sans-serif; }
#controls { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: 6px 18px;
  align-items: center; padding: 8px 0; background: var(--page); }
#controls label { display: flex; gap: 6px; align-items: center; }
#smoothing { width: 110px; }
#legend { max-height: 240px; overflow: auto; margin: 4px 0 12px; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; }
#legend table { border-collapse: collapse; }
#legend th, #legend td { padding: 3px 10px; text-align: left; white-space: nowrap; }
#legend th { position: sticky; top: 0; background: var(--card); color: var(--faint);
  font-weight: 600; }
#legend label { display: flex; gap: 6px; align-items: center; }
.swatch { flex: none; width: 18px; height: 8px; }
#diagrams { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
figure { position: relative; margin: 0; min-width: 0; padding: 8px; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
figcaption small { color: var(--faint); font-weight: 400; }
svg { display: block; width: 100%; height: 240px; touch-action: pan-y; }
svg text { fill: var(--faint); font-size: 11px; }
.grid { stroke: var(--line); }
.curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.raw { stroke-width: 1; opacity: .3; }
.pointer { stroke: var(--faint); stroke-dasharray: 3 3; }
.tip { position: absolute; z-index: 1; pointer-events: none; padding: 4px 8px; font-size: 12px;
  max-width: calc(100% - 16px); background: var(--card); border: 1px solid var(--line);
  border-radius: 4px; box-shadow: 0 2px 8px #0004; }
.tip div { display: flex; gap: 6px; align-items: center; }
.tip span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.tip b { margin-left: auto; padding-left: 8px; font-variant-numeric: tabular-nums; }
</style>
</head>
<body>
<div id="controls">
<label><input type="checkbox" id="log"> log scale</label>
<label>smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" value="0"><output id="smoothed">0</output></label>
</div>
<div id="legend"></div>
<div id="diagrams"></div>
<noscript>The curves are drawn by this page's script.</noscript>
<script type="application/json" id="curves">)html";

constexpr char kAfterCurves[] = R"html(</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("curves").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const hidden = new Set();
const diagrams = [];
const log = document.getElementById("log");
const smoothing = document.getElementById("smoothing");
const MARGIN = { left: 56, right: 12, top: 8, bottom: 22 };
const HEIGHT = 240;
const TIP_LINES = 12;

// Eight hues that are told apart also by people with colour blindness; then dashes as well.
const LIGHT = ["#0068b3", "#d05000", "#00845c", "#b03a80", "#8a6d00", "#3f8fd0", "#555", "#7a3fc0"];
const DARK = ["#56b4e9", "#ff8c42", "#2fc79a", "#e78ac3", "#e6c229", "#8ab6ff", "#c0c0c0", "#b58cff"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
function colour(run) { return (dark.matches ? DARK : LIGHT)[run % 8]; }
function dash(run) { return DASHES[Math.floor(run / 8) % DASHES.length]; }

function make(name, attributes, parent, text) {
  const svg = ["svg", "path", "line", "text", "circle", "g"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}
function swatch(run, parent) {
  const svg = make("svg", { class: "swatch", viewBox: "0 0 18 8", style: "width:18px;height:8px" }, parent);
  make("line", { x1: 0, x2: 18, y1: 4, y2: 4, stroke: colour(run), "stroke-width": 3, "stroke-dasharray": dash(run) }, svg);
}
function format(value) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(5)));
}

// A mean with weights that decay by `weight` per point, without the bias towards the first point's
// zero: section 3 of arXiv:1412.6980.
function smooth(values, weight) {
  let mean = 0, sum = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return mean / sum;
  });
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) found.push(Number((i * step).toPrecision(12)));
  return found;
}
function logTicks(low, high) {
  const powers = [];
  const apart = Math.max(1, Math.ceil((high - low) / 6));
  for (let power = Math.ceil(low - 1e-9); power <= high + 1e-9; power += apart) powers.push(power);
  if (powers.length >= 4) return powers.map((power) => 10 ** power);
  const found = [];
  for (let power = Math.floor(low); power <= high; ++power) {
    for (const factor of [1, 2, 5]) {
      const value = Number((factor * 10 ** power).toPrecision(12));
      if (Math.log10(value) >= low && Math.log10(value) <= high) found.push(value);
    }
  }
  if (found.length >= 3) return found;
  return ticks(10 ** low, 10 ** high, 4).filter((value) => value > 0);
}

function draw(diagram) {
  const { svg, tag } = diagram;
  svg.replaceChildren();
  diagram.shown = [];
  hide(diagram);
  const width = svg.clientWidth || 300;
  const weight = Number(smoothing.value);
  const usable = (value) => value !== null && (!log.checked || value > 0);
  let xLow = Infinity, xHigh = -Infinity, yLow = Infinity, yHigh = -Infinity;
  for (const curve of tag.curves) {
    if (hidden.has(curve.run)) continue;
    const smoothed = weight > 0 ? smooth(curve.values, weight) : curve.values;
    diagram.shown.push({ ...curve, smoothed });
    for (const step of curve.steps) { xLow = Math.min(xLow, step); xHigh = Math.max(xHigh, step); }
    for (const values of new Set([curve.values, smoothed])) for (const value of values) if (usable(value)) { yLow = Math.min(yLow, value); yHigh = Math.max(yHigh, value); }
  }
  if (yLow > yHigh) {
    const reason = diagram.shown.length === 0 ? "no run with this tag is shown" : log.checked ? "no value above 0" : "no finite value";
    make("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, svg, reason);
    diagram.shown = [];
    return;
  }
  const toAxis = log.checked ? Math.log10 : (value) => value;
  let low = toAxis(yLow), high = toAxis(yHigh);
  const room = high > low ? (high - low) * 0.05 : log.checked ? 0.3 : Math.abs(high) * 0.1 || 1;
  low -= room;
  high += room;
  const [first, last] = [xLow, xHigh];
  if (xLow === xHigh) { xLow -= 1; xHigh += 1; }
  const x = (step) => MARGIN.left + (step - xLow) / (xHigh - xLow) * (width - MARGIN.left - MARGIN.right);
  const y = (value) => HEIGHT - MARGIN.bottom - (toAxis(value) - low) / (high - low) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  diagram.x = x;
  diagram.y = y;

  for (const value of log.checked ? logTicks(low, high) : ticks(low, high, 5)) {
    make("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }, svg);
    make("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, svg, format(value));
  }
  const steps = ticks(xLow, xHigh, Math.max(2, Math.floor(width / 90))).filter((step) => Number.isInteger(step) && step >= first && step <= last);
  for (const step of steps) {
    const label = Math.abs(step) >= 1e6 ? step / 1e6 + "M" : Math.abs(step) >= 1e4 ? step / 1e3 + "k" : step;
    const anchor = x(step) > width - 30 ? "end" : "middle";
    make("text", { x: anchor === "end" ? width - 4 : x(step), y: HEIGHT - 6, "text-anchor": anchor }, svg, label);
  }

  const path = (curve, values, kind) => {
    let shape = "", drawing = false;
    values.forEach((value, i) => {
      if (!usable(value)) { drawing = false; return; }
      shape += (drawing ? "L" : "M") + x(curve.steps[i]).toFixed(1) + " " + y(value).toFixed(1);
      const alone = !drawing && !usable(values[i + 1] ?? null);
      if (alone && kind === "curve") make("circle", { cx: x(curve.steps[i]), cy: y(value), r: 3, fill: colour(curve.run) }, svg);
      drawing = true;
    });
    make("path", { class: kind, d: shape || "M0 0", stroke: colour(curve.run), "stroke-dasharray": dash(curve.run) }, svg);
  };
  for (const curve of diagram.shown) {
    if (weight > 0) path(curve, curve.values, "curve raw");
    path(curve, curve.smoothed, "curve");
    curve.values.forEach((value, i) => {
      if (value === null) make("text", { x: x(curve.steps[i]), y: HEIGHT - MARGIN.bottom - 1, "text-anchor": "middle", style: "fill:" + colour(curve.run) }, svg, "×");
    });
  }
  diagram.pointer = make("g", {}, svg);
}

function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - steps[low - 1] <= steps[low] - wanted ? low - 1 : low;
}

function point(diagram, event) {
  if (!diagram.shown.length) return;
  const box = diagram.svg.getBoundingClientRect();
  const px = event.clientX - box.left, py = event.clientY - box.top;
  let step = null;
  for (const curve of diagram.shown) {
    for (const at of [curve.steps[nearest(curve.steps, invert(diagram, px))]]) {
      if (step === null || Math.abs(diagram.x(at) - px) < Math.abs(diagram.x(step) - px)) step = at;
    }
  }
  const lines = diagram.shown.map((curve) => {
    const i = nearest(curve.steps, step);
    const value = curve.smoothed[i];
    const height = value === null || (log.checked && value <= 0) ? null : diagram.y(value);
    return { run: curve.run, step: curve.steps[i], value, height };
  });
  lines.sort((a, b) => Math.abs((a.height ?? 1e6) - py) - Math.abs((b.height ?? 1e6) - py));
  const shown = lines.slice(0, TIP_LINES);
  shown.sort((a, b) => (a.height ?? 1e6) - (b.height ?? 1e6));
  diagram.pointer.replaceChildren();
  make("line", { class: "pointer", x1: diagram.x(step), x2: diagram.x(step), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }, diagram.pointer);
  diagram.tip.replaceChildren();
  make("div", {}, diagram.tip, "step " + step);
  for (const line of shown) {
    if (line.height !== null) make("circle", { cx: diagram.x(line.step), cy: line.height, r: 3.5, fill: colour(line.run) }, diagram.pointer);
    const row = make("div", {}, diagram.tip);
    swatch(line.run, row);
    make("span", {}, row, data.runs[line.run].name + (line.step === step ? "" : " at " + line.step));
    make("b", {}, row, format(line.value));
  }
  if (lines.length > shown.length) make("div", {}, diagram.tip, "and " + (lines.length - shown.length) + " more");
  diagram.tip.hidden = false;
  const room = diagram.figure.clientWidth - diagram.tip.offsetWidth - 8;
  const left = px + 24 > room ? px - diagram.tip.offsetWidth - 8 : px + 24;
  diagram.tip.style.left = Math.max(8, Math.min(room, left)) + "px";
  // Beside the pointer, or below the diagram where it is too narrow for that.
  const beside = px + 24 <= room || px - diagram.tip.offsetWidth - 8 >= 0;
  const top = (beside ? box.top + 12 : box.bottom) - diagram.figure.getBoundingClientRect().top;
  diagram.tip.style.top = top + "px";
}
function invert(diagram, px) {
  const zero = diagram.x(0), one = diagram.x(1);
  return (px - zero) / (one - zero);
}
function hide(diagram) {
  diagram.tip.hidden = true;
  if (diagram.pointer) diagram.pointer.replaceChildren();
}

function drawLegend() {
  const legend = document.getElementById("legend");
  legend.replaceChildren();
  const options = data.differing_options;
  const table = make("table", {}, legend);
  const head = make("tr", {}, make("thead", {}, table));
  const all = make("label", {}, make("th", {}, head));
  const every = make("input", { type: "checkbox", "aria-label": "all runs" }, all);
  every.checked = hidden.size === 0;
  every.indeterminate = hidden.size > 0 && hidden.size < data.runs.length;
  every.addEventListener("change", () => {
    data.runs.forEach((_, run) => every.checked ? hidden.delete(run) : hidden.add(run));
    drawAll();
  });
  all.append(data.runs.length + (data.runs.length === 1 ? " run" : " runs"));
  for (const option of options) make("th", {}, head, option);
  const body = make("tbody", {}, table);
  data.runs.forEach((run, index) => {
    const row = make("tr", {}, body);
    const label = make("label", {}, make("td", {}, row));
    const box = make("input", { type: "checkbox" }, label);
    box.checked = !hidden.has(index);
    box.addEventListener("change", () => {
      box.checked ? hidden.delete(index) : hidden.add(index);
      drawAll();
    });
    swatch(index, label);
    label.append(run.name);
    for (const option of options) make("td", {}, row, run.options[option] ?? "-");
  });
}
function drawAll() {
  document.getElementById("smoothed").textContent = smoothing.value;
  drawLegend();
  diagrams.forEach(draw);
}

for (const tag of data.tags) {
  const figure = make("figure", {}, document.getElementById("diagrams"));
  const caption = make("figcaption", {}, figure, tag.tag + " ");
  if (tag.thinned) make("small", {}, caption, "extremes of sections");
  const svg = make("svg", { role: "img", "aria-label": tag.tag }, figure);
  const tip = make("div", { class: "tip", hidden: "" }, figure);
  const diagram = { figure, svg, tip, tag, shown: [] };
  svg.addEventListener("pointermove", (event) => point(diagram, event));
  svg.addEventListener("pointerdown", (event) => point(diagram, event));
  svg.addEventListener("pointerleave", () => hide(diagram));
  diagrams.push(diagram);
}
log.addEventListener("change", drawAll);
smoothing.addEventListener("input", drawAll);
dark.addEventListener("change", drawAll);
let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  diagrams.forEach(draw);
}).observe(document.body);
drawAll();
</script>
</body>
</html>
)html";

// The smallest and the largest finite value of each of kMostPoints / 2 sections, and one value that
// is not finite, if there is one.
std::vector<CurvePoint> Thinned(const std::vector<CurvePoint>& points) {
  if (points.size() <= kMostPoints) return points;
  constexpr size_t kSections = kMostPoints / 2;
  std::vector<CurvePoint> thinned;
  for (size_t section = 0; section < kSections; ++section) {
    const auto begin = points.begin() + points.size() * section / kSections;
    const auto end = points.begin() + points.size() * (section + 1) / kSections;
    std::map<int64_t, double> kept;
    const CurvePoint* smallest = nullptr;
    const CurvePoint* largest = nullptr;
    for (auto it = begin; it != end; ++it) {
      if (!std::isfinite(it->value)) {
        kept = {{it->step, it->value}};
        continue;
      }
      if (smallest == nullptr || it->value < smallest->value) smallest = &*it;
      if (largest == nullptr || it->value > largest->value) largest = &*it;
    }
    for (const CurvePoint* point : {smallest, largest}) {
      if (point != nullptr) kept[point->step] = point->value;
    }
    for (const auto& [step, value] : kept) thinned.push_back({step, value});
  }
  return thinned;
}

}  // namespace

std::string PlotPage(const std::vector<LoggedRun>& runs, const std::vector<std::string>& tags) {
  using Json = nlohmann::ordered_json;
  Json data = {
      {"runs", Json::array()}, {"differing_options", Json::array()}, {"tags", Json::array()}};
  for (const auto& [path, values] : DifferingOptions(runs)) {
    data["differing_options"].push_back(path);
  }
  for (const LoggedRun& run : runs) {
    data["runs"].push_back({{"name", run.name}, {"options", run.options}});
  }
  for (const std::string& tag : tags) {
    Json curves = Json::array();
    bool is_thinned = false;
    for (size_t run = 0; run < runs.size(); ++run) {
      const auto it = runs[run].curves.find(tag);
      if (it == runs[run].curves.end()) continue;
      Json steps = Json::array();
      Json values = Json::array();
      const std::vector<CurvePoint> points = Thinned(it->second.points);
      is_thinned |= points.size() < it->second.points.size();
      for (const CurvePoint& point : points) {
        steps.push_back(point.step);
        values.push_back(point.value);  // null if it is not finite
      }
      curves.push_back({{"run", run}, {"steps", std::move(steps)}, {"values", std::move(values)}});
    }
    data["tags"].push_back({{"tag", tag}, {"thinned", is_thinned}, {"curves", std::move(curves)}});
  }
  const std::string json = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  // A tag or a folder's name may have "</script>" in it.
  return absl::StrCat(kBeforeCurves, absl::StrReplaceAll(json, {{"<", "\\u003c"}}), kAfterCurves);
}

}  // namespace ddp::tools
