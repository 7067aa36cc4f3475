"use strict";
// The page works by its links; this adds the search form, images that are requested again, and the note of the decoder.
const root = document.body.dataset.root;

const form = document.getElementById("search");
if (form) {
  const search = () => {
    const wanted = new URLSearchParams();
    for (const [name, value] of new FormData(form)) {
      if (value && !(name === "order" && value === "up")) wanted.set(name, value);
    }
    location.assign(`${root}/?${wanted}`);
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); search(); });
  form.addEventListener("change", (event) => { if (event.target.tagName === "SELECT") search(); });
  addEventListener("pageshow", (event) => { if (event.persisted) form.reset(); });  // the form says what is shown
}

const MOST_TRIES = 4;
for (const image of document.querySelectorAll(".frame img")) {
  let tries = 0;
  const again = () => {
    tries += 1;
    if (tries >= MOST_TRIES) return;
    const address = image.getAttribute("src");
    setTimeout(() => { image.src = address; }, 500 * 2 ** tries);  // the server refuses images while too many wait
  };
  image.addEventListener("error", again);
  if (image.complete && !image.naturalWidth && image.loading !== "lazy") again();
}

const note = document.getElementById("note");
async function watchDecoder() {
  const state = await (await fetch(`${root}/status`)).json();
  if (!state.is_ready) {
    setTimeout(watchDecoder, 1000);
  } else if (state.note) {
    note.textContent = `Images are the first three channels of their latents: no decoder. ${state.note}`;
  } else {
    note.hidden = true;
  }
}
if (note && note.dataset.ready === "no") watchDecoder();

// The page of a run: facts, charts and grids, asked for again and again.
const POLL_MS = 2000, WIDTH = 520, HEIGHT = 230, LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 36;

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function html(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function ticks(low, high) {
  const step = 10 ** Math.floor(Math.log10((high - low) / 4 || 1));
  const wide = [1, 2, 5, 10].map((times) => times * step).find((one) => (high - low) / one <= 5) || step;
  const found = [];
  for (let at = Math.ceil(low / wide) * wide; at <= high + wide / 1e6; at += wide) found.push(at);
  return found;
}

const short = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4, notation: Math.abs(value) >= 1e5 ? "compact" : "standard" });
const tiny = (value, largest = Math.abs(value)) => (value && largest < 1e-2 ? value.toExponential(1) : short(value));

function limits(points, at) {
  let low = Infinity, high = -Infinity;
  for (const point of points) { low = Math.min(low, point[at]); high = Math.max(high, point[at]); }
  if (low === high) { const room = Math.abs(low) / 10 || 1; return [low - room, high + room]; }
  return [low, high];
}

function draw(chart) {
  const points = chart.lines.flatMap((line) => line.points);
  const [left, right] = limits(points, 0), [low, high] = limits(points, 1);
  const x = (value) => LEFT + ((value - left) / (right - left)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title });
  for (const at of ticks(low, high)) {
    svg.append(element("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }));
    svg.append(element("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, tiny(at, high)));
  }
  for (const at of ticks(left, right)) {
    svg.append(element("text", { x: x(at), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, short(at)));
  }
  svg.append(element("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "step"));
  chart.lines.forEach((line, number) => {
    const path = line.points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ");
    svg.append(element("polyline", { class: `line-${number}`, points: path }));
  });
  return svg;
}

function legend(chart) {
  const list = html("ul", undefined, "legend");
  chart.lines.forEach((line, number) => {
    const item = html("li", undefined, `line-${number}`);
    item.append(html("span", `${line.name}: ${tiny(line.points[line.points.length - 1][1])}`));
    list.append(item);
  });
  return list;
}

function showCharts(charts) {
  document.getElementById("charts").replaceChildren(...charts.map((chart) => {
    const made = html("section", undefined, "chart");
    made.append(html("h2", chart.unit ? `${chart.title} (${chart.unit})` : chart.title), legend(chart), draw(chart));
    return made;
  }));
}

function showGrids(steps) {
  document.getElementById("grids-title").hidden = !steps.length;
  document.getElementById("grids").replaceChildren(...steps.map((step) => {
    const made = html("figure"), image = html("img");
    image.src = `${root}/grid/${step}`;
    image.alt = `pictures of step ${step}`;
    made.append(image, html("figcaption", `step ${step.toLocaleString("en")}`));
    return made;
  }));
}

function showFacts(facts) {
  document.getElementById("facts").replaceChildren(...facts.map(([name, text]) => {
    const row = html("tr");
    row.append(html("th", name), html("td"));
    row.lastChild.append(html("bdi", text));
    return row;
  }));
}

let version = "";
async function follow() {
  const lost = document.getElementById("lost");
  try {
    const answer = await fetch(`${root}/state?version=${encodeURIComponent(version)}`);
    if (!answer.ok) throw new Error(answer.statusText);
    const state = await answer.json();
    showFacts(state.facts);
    if (state.charts) { showCharts(state.charts); showGrids(state.grids); }
    version = state.version;
    lost.hidden = true;
  } catch {
    lost.hidden = false;
  }
  setTimeout(follow, POLL_MS);
}
if (document.getElementById("run")) follow();
