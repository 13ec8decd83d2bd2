// The heat map of expert loads: a row a layer, a column an expert, colours on a logarithmic scale around 1.0.

function colourOf(name) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((start) => parseInt(value.slice(start, start + 2), 16));
}

function mixed(from, to, part) {
  return from.map((channel, i) => Math.round(channel + (to[i] - channel) * part));
}

function css(colour) {
  return `rgb(${colour.join(" ")})`;
}

function brightness(colour) {
  return (0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]) / 255;
}

class HeatMap {
  constructor(parent, experts, onHover) {
    this.experts = experts;
    this.onHover = onHover;
    this.columns = Math.max(...experts.windows[0].load.map((row) => row.length));
    this.canvas = element(parent, "canvas", {role: "img"});
    this.canvas.addEventListener("pointermove", (event) => this.hoverAt(event));
    this.canvas.addEventListener("pointerdown", (event) => this.hoverAt(event));
    this.canvas.addEventListener("pointerleave", () => onHover(null));
    this.parent = parent;
    this.window = experts.windows[experts.windows.length - 1];
  }

  show(index) {
    this.window = this.experts.windows[index];
    this.render();
  }

  // The colour of a load: even at 1.0, saturated at a quarter and at four times.
  colour(load) {
    const part = Math.min(Math.abs(Math.log2(Math.max(load, 0.01))) / 2, 1);
    return mixed(this.palette.even, load < 1 ? this.palette.cold : this.palette.hot, part);
  }

  measure() {
    const width = Math.max(this.parent.clientWidth - 30, 160);
    const longest = Math.max(...this.experts.layers.map((layer) => String(layer).length));
    this.left = 52 + longest * 8;
    this.top = 34;
    this.cellWidth = Math.min((width - this.left) / this.columns, 84);
    this.cellHeight = this.experts.layers.length > 40 ? 14 : 26;
    this.width = this.left + this.cellWidth * this.columns;
    this.height = this.top + this.cellHeight * this.experts.layers.length;
  }

  render() {
    this.measure();
    this.palette = {even: colourOf("--even"), cold: colourOf("--cold"), hot: colourOf("--hot"), text: colourOf("--text"), muted: colourOf("--muted"), bad: colourOf("--bad"), surface: colourOf("--surface")};
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.ceil(this.width * scale);
    this.canvas.height = Math.ceil(this.height * scale);
    this.canvas.style.width = this.width + "px";
    this.canvas.style.height = this.height + "px";
    this.canvas.setAttribute("aria-label", this.description());
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.clearRect(0, 0, this.width, this.height);
    context.textBaseline = "middle";
    this.drawLabels(context);
    this.window.load.forEach((row, layer) => row.forEach((hundredths, expert) => this.drawCell(context, layer, expert, hundredths / 100)));
  }

  description() {
    const loads = this.window.load.flat();
    return `Expert loads of ${this.experts.layers.length} layers in steps ${this.window.first} to ${this.window.last}: ` +
      `from ${Math.min(...loads) / 100} to ${Math.max(...loads) / 100} of a perfect share`;
  }

  drawLabels(context) {
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = css(this.palette.muted);
    context.textAlign = "right";
    const everyRow = this.cellHeight < 14 ? 4 : 1;
    this.experts.layers.forEach((layer, i) => {
      if (i % everyRow === 0) context.fillText("layer " + layer, this.left - 8, this.top + (i + 0.5) * this.cellHeight);
    });
    context.textAlign = "left";
    context.fillText("expert", this.left, 8);
    context.textAlign = "center";
    const every = [1, 2, 4, 8, 16, 32, 64].find((step) => step * this.cellWidth >= 26) || 64;
    for (let expert = 0; expert < this.columns; expert += every) {
      context.fillText(String(expert), this.left + (expert + 0.5) * this.cellWidth, this.top - 10);
    }
  }

  drawCell(context, layer, expert, load) {
    const gap = this.cellWidth > 8 ? 1 : 0.25;
    const x = this.left + expert * this.cellWidth;
    const y = this.top + layer * this.cellHeight;
    const colour = load === 0 ? this.palette.surface : this.colour(load);
    context.fillStyle = css(colour);
    context.fillRect(x + gap, y + gap, this.cellWidth - 2 * gap, this.cellHeight - 2 * gap);
    const middle = [x + this.cellWidth / 2, y + this.cellHeight / 2];
    context.textAlign = "center";
    if (load === 0) {
      context.strokeStyle = css(this.palette.bad);
      context.strokeRect(x + gap + 0.5, y + gap + 0.5, this.cellWidth - 2 * gap - 1, this.cellHeight - 2 * gap - 1);
      context.fillStyle = css(this.palette.bad);
      context.font = "700 13px system-ui, sans-serif";
      context.fillText("×", ...middle);
    } else if (this.cellWidth >= 34 && this.cellHeight >= 20) {
      context.fillStyle = brightness(colour) > 0.55 ? "#14181f" : "#ffffff";
      context.font = "12px system-ui, sans-serif";
      context.fillText(load.toFixed(load < 9.95 ? 2 : 1), ...middle);
    }
  }

  hoverAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientY - box.top - this.top) / this.cellHeight);
    const expert = Math.floor((event.clientX - box.left - this.left) / this.cellWidth);
    const row = this.window.load[layer];
    if (!row || row[expert] === undefined) {
      this.onHover(null);
      return;
    }
    const load = row[expert] / 100;
    this.onHover({
      title: `layer ${this.experts.layers[layer]}, expert ${expert}`,
      lines: [["of a perfect share", load === 0 ? "nothing: dead" : load.toFixed(2) + "×"],
              ["of the layer's tokens", trimmed(load / row.length * 100, 3) + "%"]],
      clientX: event.clientX, clientY: event.clientY,
    });
  }

  drawLegend(parent) {
    const stops = [0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4].map((load) => css(this.colour(load)));
    parent.replaceChildren();
    element(parent, "span", {}, "¼× or less");
    element(parent, "span", {class: "scale", style: `background: linear-gradient(to right, ${stops.join(", ")})`}, "1×");
    element(parent, "span", {}, "4× or more");
    element(parent, "span", {class: "dead"}, "×");
    element(parent, "span", {}, "dead: not a single token");
  }
}
