"use strict";
// Each view is a function that fetches its data and fills the body of its section. Names from the runs reach the page
// as text only, never as HTML.

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D00", "#7F7F7F"]; // Okabe, Ito
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]]; // lines also differ without colour
const FOLLOW_MILLISECONDS = 3000;
const state = { runs: [], shown: [], plots: {} };

const make = (tag, options = {}, ...children) => {
  const { text, cls, ...rest } = options;
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (cls) made.className = cls;
  for (const [name, value] of Object.entries(rest)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const bodyOf = (view) => document.querySelector(`#${view} .body`);
const number = (value, digits = 4) => (value === null || value === undefined ? "" : Number(value.toPrecision(digits)));
const size = (bytes) => {
  if (bytes === null || bytes === undefined) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < 4) { bytes /= 1000; unit += 1; }
  return `${Number(bytes.toPrecision(3))} ${units[unit]}`;
};
const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
};
const clock = (time) => new Date(1000 * time).toLocaleTimeString([], { hour12: false }) ;

async function ask(path) {
  const answer = await fetch(path);
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error);
  return data;
}
const view = (run, name, options = {}) => ask(`runs/${run}/${name}?${new URLSearchParams(options)}`);

function table(columns, rows) {
  const head = make("tr", {}, ...columns.map(([name, kind]) => make("th", { text: name, cls: kind, scope: "col" })));
  const lines = rows.map((row) => make("tr", {}, ...row.map((value, place) => {
    const cell = make("td", { cls: columns[place][1] });
    cell.append(value instanceof Node ? value : String(value ?? ""));
    return cell;
  })));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines));
}
const nothing = (text) => make("p", { text, cls: "soft" });

// Lines over the steps.

function draw(key, target, steps, lines, shown) {
  const style = getComputedStyle(document.body);
  const axis = { stroke: style.getPropertyValue("--text"), grid: { stroke: style.getPropertyValue("--line"), width: 1 } };
  const names = lines.map((line) => line.name).join("\n");
  const known = state.plots[key];
  const data = [steps, ...lines.map((line) => line.values)];
  if (known && known.names === names && known.target === target && target.contains(known.plot.root)) {
    known.plot.setData(data);
    return;
  }
  if (known) known.plot.destroy();
  target.replaceChildren();
  const plot = new uPlot({
    width: Math.max(280, target.clientWidth - 8), height: 220,
    scales: { x: { time: false } },
    axes: [{ ...axis, label: "step", labelSize: 18 }, { ...axis, size: 64, values: (_, all) => all.map(shown) }],
    series: [{ label: "step" }, ...lines.map((line, place) => ({
      label: line.name, stroke: COLOURS[place % COLOURS.length], width: 1.5, spanGaps: true,
      dash: DASHES[Math.floor(place / COLOURS.length + (line.dash || 0)) % DASHES.length],
      value: (_, value) => (value === null || value === undefined ? "" : shown(value)),
      points: { show: line.values.filter((value) => value === null).length > line.values.length / 2 },
    }))],
  }, data, target);
  plot.root.setAttribute("role", "img");
  plot.root.setAttribute("aria-label", `${names.replaceAll("\n", ", ")} over the steps`);
  state.plots[key] = { plot, names, target };
}
const joined = (lists) => uPlot.join(lists.map(([steps, ...values]) => [steps, ...values]));
const nameOf = (run) => state.runs[run].label;

// The views.

const VIEWS = {
  async runs(body) {
    const known = state.summaries || [];
    const found = await Promise.all(state.runs.map(async (run, place) => {
      if (known[place] && known[place].end && !state.shown.includes(place)) return known[place];
      try { return await view(place, "summary"); } catch (error) { return { error: error.message }; }
    }));
    state.summaries = found;
    const rows = found.map((one, place) => {
      const box = make("input", { type: "checkbox", "aria-label": `show ${nameOf(place)}` });
      box.checked = state.shown.includes(place);
      box.addEventListener("change", () => {
        state.shown = box.checked ? [...state.shown, place].sort((a, b) => a - b) : state.shown.filter((shown) => shown !== place);
        if (!state.shown.length) state.shown = [place];
        refresh();
      });
      const silent = one.silent ? `, no step for ${duration(one.age)}` : "";
      const at = one.error || (one.end ? `ended: ${one.end}` : `trains${silent}`);
      return [box, nameOf(place), at, one.of ? `${one.steps} of ${one.of}` : one.steps ?? "", one.workers ?? "",
        one.strategy ?? "", duration(one.seconds), one.lost || ""];
    });
    body.replaceChildren(table([["", ""], ["run", ""], ["state", "text"], ["steps", "number"], ["workers", "number"],
      ["strategy", ""], ["time", "number"], ["lost", "number"]], rows));
  },
  async summary(body) {
    const parts = state.shown.flatMap((run) => {
      const lines = state.summaries[run].sentences || [];
      const said = lines.length ? lines : ["Too few steps are recorded."];
      return [make("h3", { text: nameOf(run) }), make("ul", {}, ...said.map((text) => make("li", { text })))];
    });
    body.replaceChildren(...parts);
  },
  async series(body) {
    const all = await Promise.all(state.shown.map((run) => view(run, "series")));
    if (!all.some((one) => one.steps.length)) return body.replaceChildren(nothing("No steps are recorded yet."));
    const label = (run, name) => (state.shown.length > 1 ? `${nameOf(run)}: ${name}` : name);
    const names = [...new Set(all.flatMap((one) => Object.keys(one.metrics)))];
    const plots = [
      ["loss", all.map((one, at) => [label(state.shown[at], "loss"), one.steps, one.loss]), (value) => number(value)],
      ["duration of a step", all.flatMap((one, at) => [[label(state.shown[at], "mean over the ranks"), one.steps, one.seconds],
        [label(state.shown[at], "slowest rank"), one.steps, one.slowest]]), duration],
      ...names.map((name) => [name, all.flatMap((one, at) => (one.metrics[name] ? [[label(state.shown[at], name),
        one.metrics[name].map((point) => point[0]), one.metrics[name].map((point) => point[1])]] : [])), (value) => number(value)]),
    ];
    lay(body, "series", plots);
  },
  async stages(body) {
    const run = state.shown[0];
    const one = await view(run, "stages");
    if (!one.steps.length) return body.replaceChildren(nothing("No steps are recorded yet."));
    const names = { load: "waits for data", compute: "computes", wait: "waits for others", between: "between steps" };
    const plots = [["parts", Object.entries(one.parts).map(([name, values]) => [names[name], one.steps, values]), duration]];
    const operations = Object.entries(one.operations);
    if (operations.length) plots.push(["operations", operations.map(([name, values]) => [name, one.steps, values]), duration]);
    lay(body, "stages", plots);
  },
  async heat(body) {
    const what = document.querySelector("#what").value;
    const one = await view(state.shown[0], "heat", { what });
    if (!one.rows.length) return body.replaceChildren(nothing("No steps are recorded yet."));
    heat(body, one);
  },
  async waits(body) {
    const one = await view(state.shown[0], "waits");
    if (!one.pairs.length) return body.replaceChildren(nothing("No rank has waited for another one."));
    body.replaceChildren(
      table([["rank", "number"], ["was waited for", "number"], ["steps", "number"]],
        one.late.map((late) => [late.rank, duration(late.seconds), late.steps])),
      make("h3", { text: "Longest waits" }),
      table([["rank", "number"], ["waited for rank", "number"], ["time", "number"], ["steps", "number"]],
        one.pairs.map((pair) => [pair.rank, pair.for, duration(pair.seconds), pair.steps])));
  },
  async membership(body) {
    const one = await view(state.shown[0], "membership");
    if (!one.events.length) return body.replaceChildren(nothing("The workers have not come together yet."));
    body.replaceChildren(table([["time", ""], ["event", ""], ["", "text"]],
      one.events.map((event) => [clock(event.time), event.event, event.text])));
  },
  async memory(body) {
    const one = await view(state.shown[0], "memory");
    const budget = table([["rank", "number"], ["predicted", "number"], ["reached", "number"], ["limit", "number"]],
      one.ranks.map((rank) => [rank.rank, size(rank.predicted), size(rank.reached), size(rank.limit)]));
    if (!one.steps.length) {
      delete body.dataset.plots;
      return body.replaceChildren(one.ranks.length ? budget : nothing("The run was too short to record its memory."));
    }
    lay(body, "memory", [["physical memory", [["mean over the ranks", one.steps, one.mean],
      ["largest", one.steps, one.most]], size]], one.ranks.length ? [budget] : []);
  },
  async network(body) {
    const one = await view(state.shown[0], "network");
    const lines = Object.entries(one.bytes);
    if (!lines.length) return body.replaceChildren(nothing("The workers of this run have sent nothing over a network."));
    lay(body, "network", [["bytes", lines.map(([name, values]) => [`${name}, of a worker in a step`, one.steps, values]), size]]);
  },
  async logs(body) {
    const form = new FormData(document.querySelector("#search"));
    const options = Object.fromEntries([...form].filter(([, value]) => value.trim()));
    const one = await view(state.shown[0], "logs", options);
    const rows = one.records.map((record) => {
      const { time, event, rank, generation, step, ...rest } = record;
      return [clock(time), event, rank, generation, step ?? "", make("code", { text: JSON.stringify(rest) })];
    });
    const more = rows.length === one.most ? nothing(`The newest ${one.most} records.`) : nothing(`${rows.length} records.`);
    body.replaceChildren(more, table([["time", ""], ["event", ""], ["rank", "number"], ["generation", "number"],
      ["step", "number"], ["", "text"]], rows));
  },
  async settings(body) {
    const all = state.shown.map((run) => state.summaries[run].settings || {});
    const keys = [...new Set(all.flatMap((one) => Object.keys(one)))].sort();
    const differ = all.length > 1 ? keys.filter((key) => new Set(all.map((one) => one[key])).size > 1) : keys;
    if (!differ.length) return body.replaceChildren(nothing(all.length > 1 ? "The runs have the same settings." : "No settings are recorded."));
    body.replaceChildren(table([["setting", ""], ...state.shown.map((run) => [nameOf(run), "text"])],
      differ.map((key) => [key, ...all.map((one) => one[key] ?? "")])));
  },
};

function lay(body, view, plots, more = []) {
  const key = plots.map(([name]) => name).join("\n");
  if (body.dataset.plots !== key) {
    body.replaceChildren(...plots.map(([name]) => make("figure", {}, make("figcaption", { text: name, cls: "soft" }), make("div"))));
    body.dataset.plots = key;
  }
  for (const old of [...body.children].slice(plots.length)) old.remove();
  body.append(...more);
  plots.forEach(([name, lines, shown], place) => {
    const target = body.children[place].lastChild;
    const data = joined(lines.map(([, steps, values]) => [steps, values]));
    draw(`${view}/${name}`, target, data[0], lines.map(([label], at) => ({ name: label, values: data[at + 1] })), shown);
  });
}

// Cividis, which reads the same with every kind of colour vision, at five points.
const CIVIDIS = [[0, 34, 78], [66, 78, 108], [124, 123, 120], [186, 172, 105], [254, 232, 56]];
function colour(part) {
  const at = Math.min(0.9999, Math.max(0, part)) * (CIVIDIS.length - 1);
  const [low, high] = [CIVIDIS[Math.floor(at)], CIVIDIS[Math.floor(at) + 1]];
  return low.map((one, place) => Math.round(one + (at % 1) * (high[place] - one)));
}

function heat(body, data) {
  const [high, wide] = [data.rows.length, data.steps.length];
  const all = data.rows.flat().filter((value) => value !== null).sort((a, b) => a - b);
  const [low, top] = [all[0], all[Math.floor(0.99 * (all.length - 1))] || 1];
  const canvas = make("canvas", { cls: "heat", tabindex: "0", role: "img" });
  [canvas.width, canvas.height] = [wide, high];
  const context = canvas.getContext("2d");
  const picture = context.createImageData(wide, high);
  data.rows.forEach((row, at) => row.forEach((value, step) => {
    const place = 4 * (at * wide + step);
    if (value !== null) picture.data.set([...colour((value - low) / (top - low || 1)), 255], place);
  }));
  context.putImageData(picture, 0, 0);
  const told = make("p", { "aria-live": "polite", cls: "soft" });
  const tell = (row, step) => {
    const first = row * data.together;
    const rank = data.together > 1 ? `slowest of ranks ${first} to ${first + data.together - 1}` : `rank ${first}`;
    const last = data.steps[step] + data.width - 1;
    const steps = data.width > 1 ? `steps ${data.steps[step]} to ${last}` : `step ${last}`;
    const value = data.rows[row][step];
    told.textContent = `${rank}, ${steps}: ${value === null ? "no record" : duration(value)}`;
  };
  let [row, step] = [0, 0];
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    row = Math.min(high - 1, Math.max(0, Math.floor((high * (event.clientY - box.top)) / box.height)));
    step = Math.min(wide - 1, Math.max(0, Math.floor((wide * (event.clientX - box.left)) / box.width)));
    tell(row, step);
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!moves) return;
    event.preventDefault();
    row = Math.min(high - 1, Math.max(0, row + moves[0]));
    step = Math.min(wide - 1, Math.max(0, step + moves[1]));
    tell(row, step);
  });
  canvas.setAttribute("aria-label", `${high} rows of ranks over ${wide} ranges of steps. The arrow keys move over them.`);
  const scale = make("canvas", { "aria-hidden": "true" });
  [scale.width, scale.height] = [100, 1];
  const strip = scale.getContext("2d");
  for (let at = 0; at < 100; at += 1) { strip.fillStyle = `rgb(${colour(at / 99)})`; strip.fillRect(at, 0, 1, 1); }
  told.textContent = "Point at a place, or use the arrow keys.";
  body.replaceChildren(canvas, make("div", { cls: "scale" }, duration(low), scale, `${duration(top)} or more`), told);
}

// The page.

async function show(name) {
  const section = document.querySelector(`#${name}`);
  try {
    await VIEWS[name](bodyOf(name));
    section.dataset.state = "drawn";
  } catch (error) {
    section.dataset.state = "failed";
    delete bodyOf(name).dataset.plots;
    bodyOf(name).replaceChildren(make("p", { text: error.message, cls: "error" }));
  }
}
let refreshing = null;
async function refresh() {
  while (refreshing) await refreshing;
  refreshing = (async () => {
    await show("runs");
    await Promise.all(Object.keys(VIEWS).filter((name) => name !== "runs").map(show));
  })();
  await refreshing;
  refreshing = null;
  document.documentElement.dataset.state = "drawn";
}
async function begin() {
  const found = await ask("runs");
  const names = found.map((run) => run.name);
  state.runs = found.map((run) => ({ ...run, label: names.filter((name) => name === run.name).length > 1 ? run.folder : run.name }));
  state.shown = [0];
  for (const section of document.querySelectorAll("main > section")) {
    document.querySelector("#views").append(make("a", { href: `#${section.id}`, text: section.querySelector("h2").textContent }));
  }
  document.querySelector("#what").addEventListener("change", () => show("heat"));
  document.querySelector("#search").addEventListener("submit", (event) => { event.preventDefault(); show("logs"); });
  await refresh();
  setInterval(() => {
    const busy = document.activeElement && document.activeElement.matches("#search input, canvas.heat");
    const trains = state.shown.some((run) => !state.summaries[run].end);
    if (document.querySelector("#follow").checked && trains && !busy && !document.hidden && !refreshing) refresh();
  }, FOLLOW_MILLISECONDS);
}
begin().catch((error) => document.querySelector("main").prepend(make("p", { text: error.message, cls: "error" })));
