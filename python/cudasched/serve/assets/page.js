// The page of `cudasched serve`. All that comes from the server is put in as text, never as markup.
"use strict";

const API = "api/v1";
const EVERY_MS = 1000;
const CLASSES = [["latency", "latency"], ["normal", "normal"], ["best_effort", "best effort"]];
const POLICIES = ["strict", "slack", "harvest", "open"];
const WEIGHTS = [0.1, 0.25, 0.5, 1, 2, 4, 10];
// Apart from one another for most eyes, on light and on dark.
const COLORS = ["#1f8a78", "#d9652b", "#5a78d1", "#b0459b", "#a08a16", "#3f9fd0", "#c23b4e", "#7b7f86"];
const SPAN_S = 300;

const $ = (id) => document.getElementById(id);
const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
};
const drawn = (tag, attributes = {}, text = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
};
const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const percent = (value, digits = 0) => (value === null || value === undefined ? "–" : (100 * value).toFixed(digits));
const gib = (value) => (value / 2 ** 30).toFixed(1);

let token = "";
let samples = [];
let empty = 0; // answers in a row without a new sample
let names = {};
let known = { clients: [], gpus: [] };
let busy = new Set(); // clients that are being changed
const colors = new Map();

function colorOf(id) {
  if (!colors.has(id)) colors.set(id, COLORS[colors.size % COLORS.length]);
  return colors.get(id);
}

// ---- the server ----------------------------------------------------------------------------------------------------

class Unauthorized extends Error {}

async function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${token}`, ...(options.body ? { "Content-Type": "application/json" } : {}) };
  const answer = await fetch(`${API}/${path}`, { ...options, headers, cache: "no-store", credentials: "omit" });
  const found = await answer.json().catch(() => ({}));
  if (answer.status === 401) throw new Unauthorized(found.detail);
  if (!answer.ok) throw new Error(found.detail || `the server answered with ${answer.status}`);
  return found;
}

async function change(id, changes, what) {
  busy.add(id);
  showClients();
  try {
    const now = await ask(`clients/${id}`, { method: "PATCH", body: JSON.stringify(changes) });
    known.clients = known.clients.map((client) => (client.id === id ? now : client));
    tell(`${now.name} (${now.pid}): ${what}`, false);
  } catch (error) {
    tell(error.message, true);
    if (error instanceof Unauthorized) login(error.message);
  }
  busy.delete(id);
  showClients();
}

function tell(text, warn) {
  const notice = $("notice");
  notice.textContent = text;
  notice.className = warn ? "warn" : "";
  notice.hidden = false;
}

// ---- what is there now ---------------------------------------------------------------------------------------------

function last(id) {
  const sample = samples[samples.length - 1];
  return (sample && sample.clients[id]) || [null, null, null, null, null];
}

function classButtons(client) {
  const group = element("span", { className: "choice", role: "group", ariaLabel: `class of ${client.name}` });
  for (const [value, text] of CLASSES) {
    const chosen = client.client_class === value;
    const button = element("button", { type: "button", disabled: busy.has(client.id) }, text);
    button.setAttribute("aria-pressed", String(chosen));
    button.dataset.choice = value;
    button.addEventListener("click", () => {
      if (!chosen) change(client.id, { client_class: value }, `class ${text}`);
    });
    group.append(button);
  }
  // What its regions say, and what it was before.
  const others = client.classes.filter((each) => each !== client.client_class).map((each) => each.replace("_", " "));
  if (others.length) return element("span", {}, group, " ", element("small", { title: "in regions, or before a change" }, `and ${others.join(", ")}`));
  return group;
}

function steps(client) {
  const step = (by, text, label) => {
    const to = client.priority + by;
    const button = element("button", { type: "button", disabled: busy.has(client.id) || Math.abs(to) > 8 }, text);
    button.setAttribute("aria-label", `${label} priority of ${client.name}`);
    button.addEventListener("click", () => change(client.id, { priority: to }, `priority ${to}`));
    return button;
  };
  return element("span", { className: "steps" }, step(-1, "−", "lower"), element("output", {}, String(client.priority)),
                 step(1, "+", "higher"));
}

function picked(client, label, values, now, changed) {
  const options = values.includes(now) ? values : [...values, now];
  const select = element("select", { disabled: busy.has(client.id) });
  select.setAttribute("aria-label", `${label} of ${client.name}`);
  for (const value of options) {
    select.append(element("option", { value: String(value), selected: value === now }, String(value)));
  }
  select.addEventListener("change", () => changed(select.value));
  return select;
}

function limit(client) {
  const now = client.memory_limit_bytes;
  const field = element("input", { type: "number", min: "0", step: "any", placeholder: "–", disabled: busy.has(client.id) });
  const given = now === null ? "" : String(+(now / 2 ** 30).toFixed(3));
  field.value = given;
  field.setAttribute("aria-label", `limit of memory of ${client.name}, GiB`);
  field.addEventListener("change", () => {
    if (!field.checkValidity()) { // a text that is no number has no value, as no text has
      field.value = given;
      tell(`a limit of memory is a number of GiB, or nothing: ${client.name} (${client.pid}) keeps its own`, true);
      return;
    }
    const wanted = Math.round((Number(field.value) || 0) * 2 ** 30);
    change(client.id, { memory_limit_bytes: wanted }, wanted ? `limit of memory ${field.value} GiB` : "no limit of memory");
  });
  return field;
}

const LABELS = [...document.querySelectorAll("thead th")].map((head) => head.textContent);

function row(client) {
  const [ran, , wait, attainment] = last(client.id);
  const swatch = element("span", { className: "swatch" });
  swatch.style.background = colorOf(client.id);
  const regions = client.regions.map((region) => `${region.name || "(requests)"}: ${region.met} in target, ${region.missed} not`);
  const name = element("td", { className: "name", title: [client.name, ...regions].join("\n") }, swatch, client.name, " ",
                       element("small", {}, String(client.pid)));
  const made = element("tr", {}, name);
  made.dataset.client = client.id;
  const cell = (content, numeric = false) => {
    const added = element("td", numeric ? { className: "number" } : {}, content);
    added.dataset.label = LABELS[made.children.length]; // what a narrow screen shows in the place of the head
    made.append(added);
  };
  cell(classButtons(client));
  cell(percent(ran), true);
  cell(client.state);
  cell(number(wait, 2), true);
  cell(percent(attainment, 1), true);
  cell(number(client.request_p99_ms, 2), true);
  cell(steps(client));
  cell(picked(client, "weight", WEIGHTS, client.weight, (to) => change(client.id, { weight: Number(to) }, `weight ${to}`)));
  cell(picked(client, "policy", POLICIES, client.policy, (to) => change(client.id, { policy: to }, `policy ${to}`)));
  cell(gib(client.memory_bytes), true);
  cell(limit(client));
  return made;
}

let shown = "";
function showClients() {
  // A row that is being used is not taken away under the pointer or the keyboard.
  const state = JSON.stringify([known.clients, [...busy], samples.length && samples[samples.length - 1].clients]);
  const open = document.activeElement;
  if (state === shown || (open && ["SELECT", "INPUT"].includes(open.tagName) && $("clients").contains(open) && busy.size === 0)) return;
  shown = state;
  const focused = open && $("clients").contains(open)
    ? [open.closest("tr").dataset.client, [...open.closest("tr").querySelectorAll("button, select, input")].indexOf(open)]
    : null;
  $("clients").replaceChildren(...known.clients.map(row));
  $("nobody").hidden = known.clients.length > 0;
  if (focused) {
    const again = [...$("clients").children].find((each) => each.dataset.client === focused[0]);
    if (again) again.querySelectorAll("button, select, input")[focused[1]]?.focus();
  }
}

function showGpus() {
  $("gpus").replaceChildren(...known.gpus.map((gpu) => {
    const card = element("div", { className: "card" }, element("h2", {}, gpu.name || "GPU"),
                         element("p", { className: "faint" }, gpu.uuid));
    const said = [];
    if (gpu.sm_ratio !== null) said.push(`${percent(gpu.sm_ratio)}% busy`);
    if (gpu.memory_used_bytes !== null) said.push(`${gib(gpu.memory_used_bytes)} of ${gib(gpu.memory_total_bytes ?? 0)} GiB in use`);
    if (said.length) card.append(element("p", {}, said.join(", ")));
    if (gpu.error) card.append(element("p", { className: "warn" }, gpu.error));
    for (const program of gpu.foreign) card.append(element("p", { className: "warn" }, `${program} is not among the clients here`));
    if (gpu.unaccounted_bytes) card.append(element("p", { className: "warn" }, `unaccounted memory: ${gib(gpu.unaccounted_bytes)} GiB`));
    return card;
  }));
}

// ---- the last minutes ----------------------------------------------------------------------------------------------

const CHARTS = [
  // Both by the driver's samples, of clients and of GPUs.
  { title: "GPU time", unit: "%", least: 100, of: (sample) => ({ ...sample.clients, ...sample.gpus }), value: (x) => (x[0] === null ? null : 100 * x[0]) },
  { title: "Best effort's predicted GPU time", unit: "%", least: 100, of: (sample) => sample.clients, value: (x) => (x[1] === null ? null : 100 * x[1]) },
  { title: "Waits at the gate, P95", unit: "ms", least: 1, of: (sample) => sample.clients, value: (x) => x[2] },
  { title: "Requests in their target", unit: "%", least: 100, of: (sample) => sample.clients, value: (x) => (x[3] === null ? null : 100 * x[3]) },
  // Of clients what they hold, of GPUs what is in use by all, where NVML can be asked.
  { title: "Memory", unit: "GiB", least: 1, of: (sample) => ({ ...sample.clients, ...sample.gpus }),
    value: (x) => ((x = x[x.length - 1]) === null ? null : x / 2 ** 30) },
];
const WIDE = 600, HIGH = 176, LEFT = 40, RIGHT = 8, TOP = 8, BOTTOM = 20;

function round(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= most - 1e-9) ?? 10 * power;
}

function makeChart(chart) {
  const svg = drawn("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", "aria-label": chart.title });
  const readout = element("div", { className: "readout" });
  const legend = element("ul", { className: "legend" });
  chart.svg = svg;
  chart.legend = legend;
  chart.readout = readout;
  chart.pointer = null;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    chart.pointer = ((event.clientX - box.left) / box.width) * chart.wide;
    draw(chart);
  });
  svg.addEventListener("pointerleave", () => {
    chart.pointer = null;
    draw(chart);
  });
  return element("div", { className: "card" }, element("h2", {}, `${chart.title}, ${chart.unit}`), svg, legend, readout);
}

function showLegend(chart, ids) {
  const entries = ids.map((id) => [colorOf(id), names[id] ?? id.slice(0, 12)]);
  const text = JSON.stringify(entries);
  if (text === chart.entries) return;
  chart.entries = text;
  chart.legend.replaceChildren(...entries.map(([color, name]) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = color;
    return element("li", { title: name }, swatch, name);
  }));
}

function draw(chart) {
  const { svg } = chart;
  // As many units as pixels, so that text is not stretched.
  const wide = (chart.wide = Math.max(200, Math.round(svg.getBoundingClientRect().width) || WIDE));
  svg.setAttribute("viewBox", `0 0 ${wide} ${HIGH}`);
  const end = samples.length ? samples[samples.length - 1].at_s : 0;
  const seen = samples.filter((sample) => sample.at_s >= end - SPAN_S);
  const x = (at) => LEFT + (1 - (end - at) / SPAN_S) * (wide - LEFT - RIGHT);
  const lines = new Map();
  let most = chart.least;
  for (const sample of seen) {
    for (const [id, values] of Object.entries(chart.of(sample))) {
      const value = chart.value(values);
      if (!lines.has(id)) lines.set(id, []);
      lines.get(id).push([sample.at_s, value]);
      if (value !== null) most = Math.max(most, value);
    }
  }
  most = round(most);
  const y = (value) => TOP + (1 - value / most) * (HIGH - TOP - BOTTOM);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(share * most);
    parts.push(drawn("line", { class: "grid", x1: LEFT, x2: wide - RIGHT, y1: at, y2: at }));
    parts.push(drawn("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, String(+(share * most).toPrecision(3))));
  }
  for (let minutes = 0; 60 * minutes <= SPAN_S; ++minutes) {
    const anchor = minutes === 0 ? "end" : 60 * minutes === SPAN_S ? "start" : "middle";
    const text = minutes === 0 ? "now" : `−${minutes} min`;
    parts.push(drawn("text", { x: x(end - 60 * minutes), y: HIGH - 5, "text-anchor": anchor }, text));
  }
  for (const [id, points] of lines) {
    let path = "";
    let before = null;
    for (const [at, value] of points) {
      if (value !== null) path += `${before === null ? "M" : "L"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      before = value;
    }
    if (path) parts.push(drawn("path", { d: path, stroke: colorOf(id), "data-line": id }));
    const [at, value] = points[points.length - 1];
    if (value !== null) parts.push(drawn("circle", { cx: x(at), cy: y(value), r: 2.5, fill: colorOf(id) }));
  }
  showLegend(chart, [...lines].filter(([, points]) => points.some(([, value]) => value !== null)).map(([id]) => id));
  if (chart.pointer !== null && seen.length) {
    const near = seen.reduce((best, sample) => (Math.abs(x(sample.at_s) - chart.pointer) < Math.abs(x(best.at_s) - chart.pointer) ? sample : best));
    parts.push(drawn("line", { class: "cursor", x1: x(near.at_s), x2: x(near.at_s), y1: TOP, y2: HIGH - BOTTOM }));
    const values = Object.entries(chart.of(near)).filter(([, found]) => chart.value(found) !== null);
    const texts = values.map(([id, found]) => `${names[id] ?? id.slice(0, 12)} ${number(chart.value(found), 1)}`);
    chart.readout.textContent = `${new Date(1000 * near.at_s).toLocaleTimeString()}  ${texts.join("   ") || "nothing"}`;
  } else {
    const any = [...lines.values()].some((points) => points.some(([, value]) => value !== null));
    chart.readout.textContent = any ? "" : "nothing yet";
  }
  svg.replaceChildren(...parts);
}

// ---- the page ------------------------------------------------------------------------------------------------------

function login(why = "") {
  token = "";
  try { sessionStorage.removeItem("cudasched-token"); } catch { /* the browser keeps nothing: the token is asked for again */ }
  $("content").hidden = true;
  $("login").hidden = false;
  $("refused").textContent = why;
  $("summary").textContent = "";
  $("token").focus();
}

async function look() {
  if (!token) return;
  if (!document.hidden) {
    try {
      const after = samples.length ? samples[samples.length - 1].number : 0;
      const [found, usage] = await Promise.all([ask("clients"), ask(`usage?after=${after}`)]);
      // A server that was started anew counts from 1 again, and has nothing beyond the last number for a while.
      samples = (usage.samples.length && usage.samples[0].number <= after ? [] : samples).concat(usage.samples).slice(-usage.kept);
      empty = usage.samples.length ? 0 : empty + 1;
      if (empty > 10) samples = [];
      names = { ...names, ...usage.names };
      known = found;
      for (const client of found.clients) names[client.id] = client.name;
      for (const gpu of found.gpus) names[gpu.uuid] = gpu.name || gpu.uuid;
      $("login").hidden = true;
      $("content").hidden = false;
      const count = found.clients.length;
      $("summary").textContent = `${count} ${count === 1 ? "client" : "clients"} on ${found.gpus.length} ${found.gpus.length === 1 ? "GPU" : "GPUs"}`;
      $("summary").className = "";
      showGpus();
      showClients();
      CHARTS.forEach(draw);
      document.documentElement.dataset.ready = "1";
    } catch (error) {
      if (error instanceof Unauthorized) {
        login(error.message);
        return;
      }
      $("summary").textContent = error instanceof TypeError ? "the server does not answer" : error.message;
      $("summary").className = "warn";
    }
  }
  setTimeout(look, EVERY_MS);
}

function begin(given) {
  token = given;
  try { sessionStorage.setItem("cudasched-token", given); } catch { /* see above */ }
  look();
}

$("charts").append(...CHARTS.map(makeChart));
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("token").value.trim();
  $("token").value = "";
  if (/^[\x21-\x7e]+$/.test(given)) begin(given);
  else $("refused").textContent = "that is no token";
});
// The fragment is not sent to any server; it does not stay in the address or in the history either.
const fragment = new URLSearchParams(location.hash.slice(1)).get("token");
if (fragment) history.replaceState(null, "", location.pathname);
let kept = null;
try { kept = sessionStorage.getItem("cudasched-token"); } catch { /* see above */ }
if (fragment || kept) begin(fragment || kept);
else login();
