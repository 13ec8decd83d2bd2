// Puts the page together from its data.

const data = JSON.parse(document.getElementById("data").textContent);
const tooltip = document.getElementById("tooltip");

function showTooltip(title, lines, clientX, clientY) {
  tooltip.replaceChildren();
  element(tooltip, "b", {}, title);
  for (const [name, value] of lines) {
    const line = element(tooltip, "div");
    element(line, "span", {}, name);
    element(line, "span", {}, value);
  }
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  const left = clientX + 16 + box.width < innerWidth ? clientX + 16 : Math.max(clientX - 16 - box.width, 4);
  const top = Math.max(clientY - box.height - 10, 4);
  tooltip.style.left = left + "px";
  tooltip.style.top = top + "px";
}

function stepTitle(step) {
  const tokens = interpolate(data.axes.step, data.axes.tokens, step);
  return `step ${FORMATS.step(step)} · ${FORMATS.tokens(tokens, 3)} tokens`;
}

function hoverChart(hover) {
  for (const chart of charts) chart.mark(hover && hover.step);
  if (hover) showTooltip(stepTitle(hover.step), hover.chart.readings(hover.step), hover.clientX, hover.clientY);
  else tooltip.hidden = true;
}

function hoverExpert(hover) {
  if (hover) showTooltip(hover.title, hover.lines, hover.clientX, hover.clientY);
  else tooltip.hidden = true;
}

const chartsParent = document.getElementById("charts");
const hasSteps = data.axes.step.length > 0;
const charts = hasSteps ? data.charts.map((chart) => new LineChart(chartsParent, chart, data.axes, hoverChart)) : [];
document.getElementById("curves").hidden = !hasSteps;
let axis = "step";

let heatMap = null;
if (data.experts) {
  document.getElementById("experts").hidden = false;
  heatMap = new HeatMap(document.getElementById("heatmap"), data.experts, hoverExpert);
  const slider = document.getElementById("window");
  const windows = data.experts.windows;
  const show = () => {
    const shown = windows[slider.value];
    const steps = shown.first === shown.last ? FORMATS.step(shown.last) : `${FORMATS.step(shown.first)} to ${FORMATS.step(shown.last)}`;
    document.getElementById("window-steps").textContent = steps;
    heatMap.show(slider.value);
  };
  slider.max = windows.length - 1;
  slider.value = windows.length - 1;
  slider.hidden = windows.length === 1;
  slider.addEventListener("input", show);
  show();
}

function renderAll() {
  for (const chart of charts) chart.render(axis);
  if (heatMap) {
    heatMap.render();
    heatMap.drawLegend(document.getElementById("legend"));
  }
}

for (const button of document.querySelectorAll("[data-axis]")) {
  button.addEventListener("click", () => {
    axis = button.dataset.axis;
    for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", String(other === button));
    renderAll();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renderAll);
let lastWidth = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === lastWidth) return;
  lastWidth = document.body.clientWidth;
  renderAll();
}).observe(document.body);
