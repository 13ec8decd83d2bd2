// The plans of a step as timelines: a canvas for each rank, a row for each lane, all with one time axis.

const data = JSON.parse(document.getElementById("data").textContent);
const tooltip = document.getElementById("tooltip");
const ROW = 20, LABEL = 150, MEMORY = 54, AXIS = 18;
const length = Math.max(1e-12, ...data.ranks.map((rank) => rank.length));
let view = {begin: 0, end: length};
const charts = [];

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function taskColor(task) {
  const names = {send: "--good", receive: "--good", exchange: "--good", copy: "--info", optimizer: "--bad", host: "--muted"};
  if (task.kind !== "run") return color(names[task.kind]);
  if (task.name.startsWith("backward")) return color("--second");
  return color(task.name.startsWith("weight") ? "--warning" : "--first");
}

function formatTime(seconds) {
  if (seconds >= 1) return seconds.toPrecision(4) + " s";
  return seconds >= 1e-3 ? (seconds * 1e3).toPrecision(4) + " ms" : (seconds * 1e6).toPrecision(3) + " µs";
}

function formatScaled(value, base, units) {
  let unit = 0;
  while (value >= base && unit + 1 < units.length) {
    value /= base;
    unit++;
  }
  return Number(value.toPrecision(3)) + units[unit];
}
const formatBytes = (value) => formatScaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
const formatFlops = (value) => formatScaled(value, 1000, [" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP", " PFLOP"]);

class Chart {
  constructor(rank, parent) {
    this.rank = rank;
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const title = document.createElement("b");
    title.textContent = "rank " + rank.rank;
    const key = document.createElement("span");
    key.className = "key";
    for (const [name, text] of [["", "forward"], ["backward", "backward"], ["weights", "weight gradients"],
                                ["exchange", "exchange"], ["copy", "copy"], ["optimizer", "optimizer"]]) {
      const entry = document.createElement("span");
      entry.className = name;
      entry.textContent = text;
      key.append(entry);
    }
    this.canvas = document.createElement("canvas");
    caption.append(title, key);
    figure.append(caption, this.canvas);
    parent.append(figure);
    this.most = Math.max(1, ...rank.memory.map((point) => point[1]));
    this.listen();
  }

  get height() { return AXIS + this.rank.lanes.length * ROW + MEMORY; }
  x(time) { return LABEL + (time - view.begin) / (view.end - view.begin) * (this.width - LABEL); }
  time(x) { return view.begin + (x - LABEL) / (this.width - LABEL) * (view.end - view.begin); }

  draw() {
    const scale = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.canvas.style.height = this.height + "px";
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    this.drawAxis(context);
    this.drawTasks(context);
    this.drawMemory(context);
  }

  drawAxis(context) {
    const span = view.end - view.begin;
    const power = 10 ** Math.floor(Math.log10(span / 6));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= span / 6) * power;
    context.strokeStyle = color("--grid");
    context.fillStyle = color("--muted");
    for (let time = Math.ceil(view.begin / step) * step; time <= view.end; time += step) {
      const x = Math.round(this.x(time)) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS);
      context.lineTo(x, this.height);
      context.stroke();
      context.fillText(formatTime(time), x + 3, 12);
    }
    this.rank.lanes.forEach((lane, row) => context.fillText(lane, 2, AXIS + row * ROW + 14, LABEL - 8));
  }

  drawTasks(context) {
    for (const task of this.rank.tasks) {
      if (task.end < view.begin || task.begin > view.end || task.phase === "wait") continue;
      const begin = Math.max(LABEL, this.x(task.begin));
      const width = Math.max(1, this.x(task.end) - begin - 0.5);
      context.fillStyle = taskColor(task);
      context.fillRect(begin, AXIS + task.lane * ROW + 2, width, ROW - 4);
      if (width < 60) continue;
      context.fillStyle = color("--surface");
      context.save();
      context.beginPath();
      context.rect(begin, AXIS + task.lane * ROW, width - 4, ROW);
      context.clip();
      context.fillText(task.name, begin + 4, AXIS + task.lane * ROW + 14);
      context.restore();
    }
  }

  drawMemory(context) {
    const bottom = this.height - 2, top = this.height - MEMORY + 6;
    const y = (bytes) => bottom - bytes / this.most * (bottom - top);
    context.strokeStyle = color("--first");
    context.beginPath();
    let last = 0;
    context.moveTo(LABEL, y(0));
    for (const [time, bytes] of this.rank.memory) {
      const x = Math.min(Math.max(this.x(time), LABEL), this.width);
      context.lineTo(x, y(last));
      context.lineTo(x, y(bytes));
      last = bytes;
    }
    context.stroke();
    context.fillStyle = color("--muted");
    context.fillText("memory, at most " + formatBytes(this.most), 2, top + 10, LABEL - 8);
  }

  find(x, y) {
    const lane = Math.floor((y - AXIS) / ROW);
    const time = this.time(x), near = 2 / (this.width - LABEL) * (view.end - view.begin);
    return this.rank.tasks.find((task) => task.lane === lane && task.phase !== "wait" &&
      task.begin - near <= time && time <= task.end + near);
  }

  show(event) {
    const task = x => this.find(x, event.offsetY);
    const found = task(event.offsetX);
    tooltip.hidden = !found;
    if (!found) return;
    tooltip.replaceChildren();
    const name = document.createElement("b");
    name.textContent = found.name;
    tooltip.append(name);
    const rows = [["task", found.id], ["from", formatTime(found.begin)], ["for", formatTime(found.end - found.begin)]];
    if (found.flops) rows.push(["work", formatFlops(found.flops)]);
    if (found.bytes) rows.push(["bytes", formatBytes(found.bytes)]);
    for (const before of found.after.slice(-4)) rows.push(["after", this.rank.tasks[before].name]);
    for (const [what, value] of rows) {
      const row = document.createElement("div");
      for (const text of [what, value]) {
        const cell = document.createElement("span");
        cell.textContent = text;
        row.append(cell);
      }
      tooltip.append(row);
    }
    tooltip.style.left = Math.min(event.clientX + 14, innerWidth - tooltip.offsetWidth - 8) + "px";
    tooltip.style.top = Math.min(event.clientY + 14, innerHeight - tooltip.offsetHeight - 8) + "px";
  }

  listen() {
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = this.time(event.offsetX), factor = Math.exp(event.deltaY * 0.002);
      setView(at - (at - view.begin) * factor, at + (view.end - at) * factor);
    }, {passive: false});
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.buttons === 0) return this.show(event);
      const moved = event.movementX / (this.width - LABEL) * (view.end - view.begin);
      setView(view.begin - moved, view.end - moved);
    });
    this.canvas.addEventListener("pointerleave", () => { tooltip.hidden = true; });
  }
}

function setView(begin, end) {
  const span = Math.min(Math.max(end - begin, length * 1e-6), length);
  view.begin = Math.min(Math.max(begin, 0), length - span);
  view.end = view.begin + span;
  for (const chart of charts) chart.draw();
}

for (const rank of data.ranks) charts.push(new Chart(rank, document.getElementById("ranks")));
document.getElementById("whole").addEventListener("click", () => setView(0, length));
addEventListener("resize", () => setView(view.begin, view.end));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setView(view.begin, view.end));
setView(0, length);

// Between which of the simulated speeds, which double from one to the next, and how far between them.
function placeBetween(speeds, log) {
  const last = speeds.length - 2;
  let i = 0;
  while (i < last && Math.log2(speeds[i + 1]) <= log) i++;
  const from = Math.log2(speeds[i]), to = Math.log2(speeds[i + 1]);
  return {i, share: Math.min(Math.max((log - from) / (to - from), 0), 1)};
}

function interpolate(rows, computing, links) {
  const along = (row) => row[links.i] * (1 - links.share) + row[links.i + 1] * links.share;
  return along(rows[computing.i]) * (1 - computing.share) + along(rows[computing.i + 1]) * computing.share;
}

function showSpeeds(speeds) {
  const sliders = ["computing", "links"].map((id) => document.getElementById(id));
  const update = () => {
    const [computing, links] = sliders.map((slider) => placeBetween(speeds[slider.id], Number(slider.value)));
    for (const slider of sliders)
      slider.labels[0].parentNode.querySelector("output").textContent = (2 ** Number(slider.value)).toFixed(2) + " ×";
    const seconds = interpolate(speeds.seconds, computing, links), exposed = interpolate(speeds.exposed, computing, links);
    const ones = ["computing", "links"].map((id) => placeBetween(speeds[id], 0));
    document.getElementById("speeds-found").textContent = "A step takes " + formatTime(seconds) + ", " +
      (interpolate(speeds.seconds, ...ones) / seconds).toFixed(2) + " × the speed of the hardware as described; exchanges that nothing hides take " +
      formatTime(exposed) + " of it.";
  };
  for (const slider of sliders) {
    const known = speeds[slider.id];
    slider.min = Math.log2(known[0]);
    slider.max = Math.log2(known[known.length - 1]);
    slider.value = 0;
    slider.addEventListener("input", update);
  }
  document.getElementById("speeds").hidden = false;
  update();
}

if (data.speeds) showSpeeds(data.speeds);
