// Line charts as SVG: axes with round ticks, gaps where a value is not finite, values under the pointer.

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

function withPrefix(value, base, prefixes, digits) {
  let index = 0;
  while (Math.abs(value) >= base && index + 1 < prefixes.length) {
    value /= base;
    index++;
  }
  return trimmed(value, digits) + prefixes[index];
}

function formatNumber(value, digits) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(Math.max(digits - 2, 0)).replace(/\.?0+e/, "e").replace("e+", "e");
  return trimmed(value, digits);
}

function formatSeconds(value) {
  if (value < 60) return trimmed(value, 3) + " s";
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return minutes + " min" + (value % 60 >= 1 ? " " + Math.floor(value % 60) + " s" : "");
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return hours + " h" + (minutes % 60 ? " " + (minutes % 60) + " min" : "");
  return trimmed(hours / 24, 3) + " d";
}

const FORMATS = {
  number: formatNumber,
  rate: formatNumber,
  percent: (value, digits) => trimmed(value * 100, digits) + "%",
  count: (value, digits) => withPrefix(value, 1000, ["", "k", "M", "G", "T", "P"], digits),
  bytes: (value, digits) => withPrefix(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"], digits),
  step: (value) => Math.round(value).toLocaleString("en"),
  tokens: (value, digits) => withPrefix(value, 1000, ["", "k", "M", "G", "T", "P"], digits),
  seconds: formatSeconds,
};
const AXIS_NAMES = {step: "step", tokens: "tokens seen", seconds: "time in steps"};
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];

// A round distance between ticks that gives about `count` of them.
function tickDistance(span, count, format) {
  const rough = span / count;
  if (format === "seconds" && rough > 1) {
    const step = TIME_STEPS.find((candidate) => candidate >= rough);
    if (step) return step;
    return tickDistance(span / 86400, count, "number") * 86400;
  }
  if (format === "bytes") {
    const unit = 1024 ** Math.floor(Math.log(Math.max(span, 1)) / Math.log(1024));
    if (unit > 1) return tickDistance(span / unit, count, "number") * unit;
  }
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  return format === "step" ? Math.max(1, Math.ceil(step)) : step;
}

function linearTicks(low, high, count, format) {
  const step = tickDistance(high - low, count, format);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step + 0);
  return ticks;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const factors = decades > 3 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

// y values from piecewise linear interpolation of the points (xs, ys); xs ascends.
function interpolate(xs, ys, x) {
  const right = xs.findIndex((candidate) => candidate >= x);
  if (right < 0) return ys[ys.length - 1];
  if (right === 0 || xs[right] === x) return ys[right];
  const part = (x - xs[right - 1]) / (xs[right] - xs[right - 1]);
  return ys[right - 1] + part * (ys[right] - ys[right - 1]);
}

// The position of the entry of an ascending list that lies nearest to `x`.
function nearest(list, x) {
  let low = 0;
  let high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - list[low - 1] < list[low] - x ? low - 1 : low;
}

function element(parent, tag, attributes, text) {
  const node = parent instanceof SVGElement || tag === "svg"
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function finite(values) {
  return values.filter((value) => value !== null);
}

// The range of the vertical axis. Quantities of which zero means nothing happening start there.
function verticalRange(chart) {
  let values = chart.curves.flatMap((curve) => finite(curve.value));
  if (chart.reference !== null) values = values.concat(chart.reference);
  if (!values.length) return null;
  let low = values.reduce((a, b) => Math.min(a, b));
  let high = values.reduce((a, b) => Math.max(a, b));
  if (chart.format === "number" && low > 0 && high / low > 50) return {low, high, log: true};
  if (chart.format !== "number") {
    low = Math.min(low, 0);
    const step = high > low ? tickDistance(high - low, 4, chart.format) : 1;
    return {low: Math.floor(low / step) * step, high: Math.max(Math.ceil(high / step), 1) * step, log: false};
  }
  if (low === high) {
    const pad = Math.abs(low) * 0.1 || 1;
    low -= pad;
    high += pad;
  }
  const pad = (high - low) * 0.06;
  return {low: low - pad, high: high + pad, log: false};
}

class LineChart {
  constructor(parent, chart, axes, onHover) {
    this.chart = chart;
    this.axes = axes;
    this.onHover = onHover;
    this.isWide = chart.id === "loss";
    this.figure = element(parent, "figure", this.isWide ? {class: "wide"} : {});
    this.caption();
    this.svg = element(this.figure, "svg", {role: "img", tabindex: "0", "aria-label": this.description()});
    this.svg.addEventListener("pointermove", (event) => this.hoverAt(event));
    this.svg.addEventListener("pointerdown", (event) => this.hoverAt(event));
    this.svg.addEventListener("pointerleave", () => this.onHover(null));
    this.svg.addEventListener("blur", () => this.onHover(null));
    this.svg.addEventListener("keydown", (event) => this.moveByKey(event));
  }

  caption() {
    const caption = element(this.figure, "figcaption");
    element(caption, "b", {}, this.chart.title);
    element(caption, "span", {class: "unit"}, this.chart.unit);
    const key = element(caption, "span", {class: "key"});
    if (this.chart.curves.length > 1) {
      for (const curve of this.chart.curves) {
        const isSmoothed = curve.style === "line" && this.chart.curves.some((other) => other.style === "faint");
        const name = curve.style === "faint" ? "each step" : isSmoothed ? (this.isWide ? curve.name + ", smoothed" : "smoothed") : curve.name;
        element(key, "span", {class: curve.style}, name);
      }
    }
    if (this.chart.curves.some((curve) => curve.value.includes(null))) element(key, "span", {class: "gap"}, "not finite");
  }

  description() {
    const parts = this.chart.curves.map((curve) => {
      const values = finite(curve.value);
      return values.length ? `${curve.name} from ${this.value(values[0])} to ${this.value(values[values.length - 1])}` : curve.name;
    });
    return `${this.chart.title}: ${parts.join(", ")}`;
  }

  value(value) {
    return FORMATS[this.chart.format](value, 4);
  }

  // Draws the chart anew for the width that the page gives it.
  render(axis) {
    this.axis = axis;
    this.width = Math.max(this.figure.clientWidth - 28, 200);
    this.height = this.isWide ? 300 : 200;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.svg.replaceChildren();
    this.range = verticalRange(this.chart);
    if (!this.range) {
      element(this.svg, "text", {x: this.width / 2, y: this.height / 2, "text-anchor": "middle"}, "no finite value recorded");
      return;
    }
    this.placeCurves();
    this.drawAxes();
    if (this.chart.reference !== null) this.drawReference();
    for (const curve of this.curves) this.drawCurve(curve);
    this.cross = element(this.svg, "g", {visibility: "hidden"});
  }

  placeCurves() {
    this.curves = this.chart.curves.map((curve) => ({
      ...curve,
      x: this.axis === "step" ? curve.step : curve.step.map((step) => interpolate(this.axes.step, this.axes[this.axis], step)),
    }));
    const xs = this.curves.flatMap((curve) => [curve.x[0], curve.x[curve.x.length - 1]]);
    this.low = Math.min(...xs);
    this.high = Math.max(...xs);
    if (this.low === this.high) {
      this.low -= 1;
      this.high += 1;
    } else if (this.low < (this.high - this.low) * 0.02) {
      this.low = 0;
    }
  }

  px(x) {
    return this.left + (x - this.low) / (this.high - this.low) * (this.width - this.left - 14);
  }

  py(y) {
    const {low, high, log} = this.range;
    const part = log ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low);
    return this.height - 38 - part * (this.height - 38 - 10);
  }

  drawAxes() {
    const {low, high, log} = this.range;
    const ticks = log ? logTicks(low, high) : linearTicks(low, high, this.height / 50, this.chart.format);
    const labels = ticks.map((tick) => FORMATS[this.chart.format](tick, 4));
    this.left = 14 + Math.max(...labels.map((label) => label.length)) * 7;
    const bottom = this.height - 38;
    ticks.forEach((tick, i) => {
      const y = this.py(tick);
      element(this.svg, "line", {class: "grid", x1: this.left, x2: this.width - 14, y1: y, y2: y});
      element(this.svg, "text", {x: this.left - 7, y: y + 4, "text-anchor": "end"}, labels[i]);
    });
    element(this.svg, "line", {class: "axis", x1: this.left, x2: this.width - 14, y1: bottom, y2: bottom});
    for (const tick of linearTicks(this.low, this.high, Math.max(2, this.width / 110), this.axis)) {
      const x = this.px(tick);
      element(this.svg, "line", {class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4});
      const anchor = x > this.width - 40 ? "end" : "middle";
      element(this.svg, "text", {x: anchor === "end" ? Math.min(x + 14, this.width) : x, y: bottom + 18, "text-anchor": anchor}, FORMATS[this.axis](tick, 4));
    }
    const middle = (this.left + this.width - 14) / 2;
    element(this.svg, "text", {x: middle, y: this.height - 3, "text-anchor": "middle"}, AXIS_NAMES[this.axis] + (log ? " (vertical axis: logarithmic)" : ""));
  }

  drawReference() {
    const y = this.py(this.chart.reference);
    element(this.svg, "line", {class: "reference", x1: this.left, x2: this.width - 14, y1: y, y2: y});
  }

  // The runs of finite values as lines, single values as dots, and a mark at the foot where a value is not finite.
  drawCurve(curve) {
    let path = "";
    const dots = curve.style === "points" ? curve.value.map((_, i) => i) : [];
    curve.value.forEach((value, i) => {
      if (value === null) {
        if (curve.style !== "faint") this.drawGap(curve.x[i]);
        return;
      }
      const starts = i === 0 || curve.value[i - 1] === null;
      const ends = i + 1 === curve.value.length || curve.value[i + 1] === null;
      path += `${starts ? "M" : "L"}${this.px(curve.x[i]).toFixed(1)} ${this.py(value).toFixed(1)}`;
      if (starts && ends) dots.push(i);
    });
    element(this.svg, "path", {class: "curve " + curve.style, d: path});
    const radius = dots.length > 60 ? 1.5 : 3;
    for (const i of dots) {
      if (curve.value[i] === null) continue;
      element(this.svg, "circle", {class: "dot " + curve.style, cx: this.px(curve.x[i]), cy: this.py(curve.value[i]), r: radius});
    }
  }

  drawGap(x) {
    const bottom = this.height - 38;
    element(this.svg, "line", {class: "gap-mark", x1: this.px(x), x2: this.px(x), y1: bottom - 9, y2: bottom});
  }

  hoverAt(event) {
    if (!this.range) return;
    const box = this.svg.getBoundingClientRect();
    const part = (event.clientX - box.left - this.left) / (this.width - this.left - 14);
    const x = this.low + Math.min(Math.max(part, 0), 1) * (this.high - this.low);
    const curve = this.mainCurve();
    this.onHover({chart: this, step: curve.step[nearest(curve.x, x)], clientX: event.clientX, clientY: event.clientY});
  }

  moveByKey(event) {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move || !this.range) return;
    event.preventDefault();
    const curve = this.mainCurve();
    const now = this.keyPosition === undefined ? curve.step.length - 1 - move : this.keyPosition;
    this.keyPosition = Math.min(Math.max(now + move, 0), curve.step.length - 1);
    const box = this.svg.getBoundingClientRect();
    const x = this.px(curve.x[this.keyPosition]);
    this.onHover({chart: this, step: curve.step[this.keyPosition], clientX: box.left + x, clientY: box.top + 40});
  }

  mainCurve() {
    return this.curves.find((curve) => curve.style === "line" || curve.style === "faint") || this.curves[0];
  }

  // Marks a step in this chart; null removes the mark.
  mark(step) {
    if (!this.range || !this.cross) return;
    this.cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    this.cross.replaceChildren();
    if (step === null) return;
    const main = this.mainCurve();
    const x = this.px(main.x[nearest(main.step, step)]);
    element(this.cross, "line", {class: "cross", x1: x, x2: x, y1: 10, y2: this.height - 38});
    for (const curve of this.curves) {
      const i = nearest(curve.step, step);
      if (curve.style === "faint" || curve.value[i] === null) continue;
      element(this.cross, "circle", {class: "dot " + curve.style, cx: this.px(curve.x[i]), cy: this.py(curve.value[i]), r: 4});
    }
  }

  // The lines of the tooltip for a step: [name, value].
  readings(step) {
    return this.curves.map((curve) => {
      const i = nearest(curve.step, step);
      const value = curve.value[i] === null ? "not finite" : this.value(curve.value[i]);
      const isSmoothed = curve.style === "line" && this.curves.some((other) => other.style === "faint");
      const name = curve.style === "faint" ? "each step" : isSmoothed ? "smoothed" : curve.name;
      return [curve.style === "points" ? `${name} (step ${FORMATS.step(curve.step[i])})` : name, value];
    });
  }
}
