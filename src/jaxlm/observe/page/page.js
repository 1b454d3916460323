const figures = JSON.parse(document.getElementById("figures").textContent);
const tip = document.getElementById("tip");
const [LEFT, RIGHT, TOP, BOTTOM] = [56, 22, 6, 24];  // margins of the plot in its chart
const REACH = 20;  // pixels between the cursor and a point that the tip shows
const MAX_DOTS = 60;  // points of a curve that shows each of them as a dot

const make = (parent, name, attributes, text = "") => {
  const element = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
};

// Multiples of 1, 2 or 5 times a power of ten.
const ticks = (low, high, most, least = 0) => {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const size = Math.max(least, [1, 2, 5, 10].map((digit) => digit * power).find((size) => (high - low) / size <= most));
  const first = Math.ceil(low / size);
  return Array.from({length: Math.floor(high / size) - first + 1}, (_, index) => (first + index) * size);
};

const logTicks = (low, high) => high - low < 2  // decades
  ? ticks(10 ** low, 10 ** high, 6)
  : ticks(low, high, 6, 1).map((exponent) => 10 ** exponent);

const step = (value) => Math.round(value).toLocaleString("en");
const number = (value) => Math.abs(value) >= 1e4
  ? value.toLocaleString("en", {notation: "compact", maximumSignificantDigits: 5})
  : String(Number(value.toPrecision(5)));

function draw(chart) {
  const figure = figures[chart.id], width = chart.clientWidth, height = chart.clientHeight;
  if (!width) return;  // in a closed <details>
  const curves = figure.curves.filter(({key}) => !figure.hidden.has(key));
  const scaled = (y) => y === null ? NaN : figure.log ? Math.log10(y) : y;  // not finite: a gap
  const steps = figure.curves.flatMap(({x}) => [x[0], x.at(-1)]);
  let [first, last] = figure.zoom ?? [Math.min(...steps), Math.max(...steps)];
  if (first === last) [first, last] = [first - 1, last + 1];
  const heights = curves.flatMap(({x, y}) => y.filter((_, index) => x[index] >= first && x[index] <= last)).map(scaled)
    .filter(Number.isFinite);
  let low = heights.reduce((a, b) => Math.min(a, b), heights[0] ?? 0), high = heights.reduce((a, b) => Math.max(a, b), low);
  const space = (high - low) * .05 || Math.abs(high) * .05 || 1;
  [low, high] = [low - space, high + space];

  chart.replaceChildren();
  const svg = make(chart, "svg", {width, height});
  const plot = {width: width - LEFT - RIGHT, height: height - TOP - BOTTOM};
  const toX = (x) => (x - first) / (last - first) * plot.width;
  const toY = (y) => (high - scaled(y)) / (high - low) * plot.height;
  for (const x of ticks(first, last, plot.width / 60, 1)) {
    make(svg, "line", {x1: LEFT + toX(x), x2: LEFT + toX(x), y1: TOP, y2: TOP + plot.height, class: "gridline"});
    make(svg, "text", {x: LEFT + toX(x), y: height - 8, "text-anchor": "middle"}, step(x));
  }
  for (const y of figure.log ? logTicks(low, high) : ticks(low, high, 6)) {
    make(svg, "line", {x1: LEFT, x2: LEFT + plot.width, y1: TOP + toY(y), y2: TOP + toY(y), class: "gridline"});
    make(svg, "text", {x: LEFT - 6, y: TOP + toY(y) + 4, "text-anchor": "end"}, number(y));
  }
  const area = make(svg, "svg", {x: LEFT, y: TOP, ...plot});  // what lies beyond it is not shown
  for (const [begin, end, fill] of figure.bands) {
    make(area, "rect", {x: toX(begin), y: 0, width: toX(end) - toX(begin), height: plot.height, fill, opacity: figure.opacity});
  }
  let named = -Infinity;
  for (const [at, text] of figure.marks) {
    const x = toX(at);
    make(area, "line", {x1: x, x2: x, y1: 0, y2: plot.height, class: "mark"});
    if (x - named < 12) continue;  // names would overlap
    make(area, "text", {transform: `translate(${x - 3} 2) rotate(-90)`, "text-anchor": "end", class: "mark"}, text);
    named = x;
  }
  for (const {x, y, color, dash, faint, name} of [...curves].sort((a, b) => b.faint - a.faint)) {
    const points = x.map((at, index) =>
      Number.isFinite(scaled(y[index])) ? `${toX(at).toFixed(2)} ${toY(y[index]).toFixed(2)}` : null);
    const dot = (point) => point === null ? "" : `M${point}h0`;
    const line = points.map((point, index) => point && points[index - 1] ? `L${point}` : dot(point)).join("");
    const style = {stroke: color, "stroke-opacity": faint ? .3 : 1};
    make(area, "path", {d: line, ...style, "stroke-width": faint ? 1 : 1.8, "stroke-dasharray": dash, "data-name": name});
    if (x.length <= MAX_DOTS) make(area, "path", {d: points.map(dot).join(""), ...style, "stroke-width": 5});
  }

  const cursor = make(area, "rect", {y: 0, height: plot.height, class: "cursor"});
  const place = ({clientX}) => clientX - chart.getBoundingClientRect().x - LEFT;
  const toStep = (x) => first + x / plot.width * (last - first);
  let begin = null;  // of a selection
  chart.onpointerdown = (event) => {
    if (event.pointerType !== "mouse" || event.button) return;  // a finger scrolls the page, it does not zoom
    begin = place(event);
    chart.setPointerCapture(event.pointerId);
  };
  chart.onpointerup = (event) => {
    const ends = [begin, place(event)].sort((a, b) => a - b).map(toStep);
    if (begin === null || Math.abs(place(event) - begin) < 5) return begin = null;
    figure.zoom = [Math.max(first, ends[0]), Math.min(last, ends[1])];
    draw(chart);
  };
  chart.ondblclick = () => {
    figure.zoom = null;
    draw(chart);
  };
  chart.onpointermove = (event) => {
    const x = place(event), from = begin ?? x;
    cursor.setAttribute("x", Math.min(x, from));
    cursor.setAttribute("width", Math.max(1, Math.abs(x - from)));
    const nearest = (steps) => steps.reduce((best, at) => Math.abs(toX(at) - x) < Math.abs(toX(best) - x) ? at : best);
    const near = curves.map((curve) => ({...curve, at: nearest(curve.x)}))
      .map((curve) => ({...curve, value: curve.y[curve.x.indexOf(curve.at)]}))
      .filter(({at, value}) => value !== null && Math.abs(toX(at) - x) <= REACH);
    tip.hidden = !near.length;
    if (!near.length) return;
    const at = nearest(near.map((curve) => curve.at));
    tip.replaceChildren(`step ${step(at)}`, ...near.map((curve) => {
      const row = document.createElement("div");
      row.textContent = `${curve.name}: ${number(curve.value)}${curve.at === at ? "" : ` (step ${step(curve.at)})`}`;
      row.style.borderColor = curve.color;
      return row;
    }));
    const {clientX, clientY} = event;
    tip.style.left = `${clientX > innerWidth / 2 ? clientX - tip.offsetWidth - 12 : clientX + 12}px`;
    tip.style.top = `${Math.max(0, Math.min(clientY + 12, innerHeight - tip.offsetHeight))}px`;
  };
  chart.onpointerleave = () => {
    tip.hidden = true;
    cursor.setAttribute("width", 0);
  };
}

const resized = new ResizeObserver((entries) => entries.forEach(({target}) => draw(target)));
document.querySelectorAll(".chart").forEach((chart) => {
  figures[chart.id].hidden = new Set();
  resized.observe(chart);
});
document.querySelectorAll("[data-key]").forEach((button) => {
  const {chart, key} = button.dataset, {hidden} = figures[chart];
  button.onclick = () => {
    const isHidden = !hidden.delete(Number(key)) && hidden.add(Number(key));
    button.setAttribute("aria-pressed", !isHidden);
    draw(document.getElementById(chart));
  };
});
document.querySelectorAll("[data-log]").forEach((box) => {
  box.checked = figures[box.dataset.log].log;
  box.onchange = () => {
    figures[box.dataset.log].log = box.checked;
    draw(document.getElementById(box.dataset.log));
  };
});
