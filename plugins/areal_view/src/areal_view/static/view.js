"use strict";
// The page of one run. Text of the policy is untrusted: it becomes text nodes only, never HTML.

const RUN = JSON.parse(document.getElementById("run").textContent);
const { metrics: METRICS, sequences: SEQUENCES, in_flight: IN_FLIGHT, timeline: { tracks: TRACKS } } = RUN;
const BETWEEN = " · ";  // between the name of a metric and that of another run
const COLUMNS = RUN.columns;  // numbers of a token, in the order of the menu: [name, what it is]

// ---- helpers
const find = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const palette = (index) => `--c${index % 8}`;
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const ascending = (values) => [...new Set(values)].sort((a, b) => a - b);

/** An element; `properties` are attributes, or listeners where the name begins with "on". Strings become text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const dim = (text) => make("p", { class: "dim" }, text);
const sentence = (text) => make("p", { class: "empty" }, text);
const swatch = (color) => make("span", { class: "swatch", style: `background: ${color}` });

const round = (value, digits) => (Number.isInteger(value) ? value : Number(value.toPrecision(digits)));
const number = (value, digits = 5) => String(isNumber(value) ? round(value, digits) : value ?? "–");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 6 });
const tick = (value) => (value !== 0 && Math.abs(value) < 1e-4 ? round(value, 6).toExponential()
  : Math.abs(value) >= 1e4 ? compact.format(value) : number(value, 8));

/** Seconds since the start as h:mm, or h:mm:ss where ticks are less than a minute apart. */
function clock(seconds, apart = 1) {
  const digits = apart < 1 ? Math.min(3, Math.ceil(-Math.log10(apart))) : 0;
  const rounded = Math.max(0, Number(seconds.toFixed(digits)));
  const minutes = `${Math.floor(rounded / 3600)}:${String(Math.floor(rounded / 60) % 60).padStart(2, "0")}`;
  return minutes + (apart >= 60 ? "" : `:${(rounded % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0")}`);
}

/** Unix time of the first event or metric, and of the last: charts and timeline count seconds from the first. */
const TIMES = [METRICS.time, IN_FLIGHT.time, ...TRACKS.flatMap(({ spans }) => spans)].flat().filter(isNumber);
const START = TIMES.reduce((a, b) => Math.min(a, b), TIMES[0] ?? 0);
const END = TIMES.reduce((a, b) => Math.max(a, b), START);

// ---- charts
const STEPS_APART = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].flatMap((ten) => [ten, 2 * ten, 5 * ten]);
const SECONDS_APART = [0.001, 0.01, 0.1].flatMap((ten) => [ten, 2 * ten, 5 * ten]).concat([1, 2, 5, 10, 15, 30, 60, 120,
  300, 600, 900, 1800], [1, 2, 4, 6, 12, 24, 48, 120, 240].map((hours) => hours * 3600));

/** Of a curve that is one number everywhere the axis shows that number and 0. */
const RANGE = { range: (u, a, b) => (a === b ? [Math.min(0, a), Math.max(0, b) || 1] : uPlot.rangeNum(a, b, 0.1, 1)) };

/** A uPlot chart in `place` that follows its width. `x` and `y`: options of its axes, `paint` paints below curves. */
function plot(place, data, series, { byTime, x, y, yScale = RANGE, cursor, sync, paint, tell = () => {}, ...options }) {
  const line = { stroke: css("--line"), width: 1, size: 4 };
  const axis = { stroke: css("--dim"), grid: line, ticks: line, font: "11px system-ui, sans-serif" };
  const ofTime = { incrs: SECONDS_APART, values: (u, splits, i, space, apart) => splits.map((s) => clock(s, apart)) };
  const ofSteps = { incrs: STEPS_APART, values: (u, splits) => splits.map(tick) };
  const width = (u, values) => 16 + 7 * Math.max(2, ...(values ?? []).map((text) => text.length));
  const at = (u, value) => (value === null ? "last" : byTime ? clock(value) : number(value));
  const under = (u) => {
    u.ctx.save();
    paint?.(u);
    u.ctx.restore();
  };
  const chart = new uPlot({
    width: place.clientWidth, padding: [8, 14, 0, 0], ...options, hooks: { drawAxes: [under], setCursor: [tell] },
    cursor: { drag: { dist: 5 }, points: { size: 6 }, sync: { key: sync, setSeries: false }, ...cursor },
    scales: { x: { time: false, range: (u, from, to) => (from === to ? [from - 1, to + 1] : [from, to]) }, y: yScale },
    axes: [{ ...axis, ...(byTime ? ofTime : ofSteps), space: 70, size: 28, ...x },
      { ...axis, size: width, space: 28, values: (u, splits) => splits.map(tick), ...y }],
    series: [{ label: byTime ? "time" : "step", value: at }, ...series],
  }, data, place);
  new ResizeObserver(() => {
    const [width, height] = [place.clientWidth, chart.height];
    if (width && width !== chart.width) chart.setSize({ width, height });
  }).observe(place);
  return chart;
}

/** Paints stacks of rectangles: `stacks[i]` is a list of [color, height] from `edges[i]` to `edges[i + 1]`. */
function paintStacks(chart, edges, stacks) {
  const { ctx, bbox, scales: { x: { min, max } } } = chart;
  const x = (value) => Math.round(chart.valToPos(Math.max(min, Math.min(max, value)), "x", true));
  const y = (value) => Math.max(bbox.top, Math.round(chart.valToPos(value, "y", true)));
  stacks.forEach((stack, i) => {
    if (edges[i + 1] < min || edges[i] > max) return;
    const left = x(edges[i]);
    let below = 0;
    for (const [color, height] of stack) {
      const top = y(below + height);
      ctx.fillStyle = color;
      ctx.fillRect(left, top, Math.max(1, x(edges[i + 1]) - left), y(below) - top);
      below += height;
    }
  });
}

/** Exponential moving average without the bias of its start. Gaps stay gaps, and do not age what came before. */
function smooth(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

const overview = { byTime: false, smoothing: 0 };
const xValues = () => (overview.byTime ? METRICS.time.map((time) => time - START) : METRICS.step);
const valuesOf = (key) => (METRICS.columns[key] ?? []).map((value) => (isNumber(value) ? value : null));
const lastOf = (values) => values.findLast((value) => value !== null);

/** The points of a curve that get dots, and whether it is sparse: most steps between its ends have no value. */
function dotsOf(values) {
  const known = [...values.keys()].filter((i) => values[i] !== null);
  const sparse = known.length <= (known.at(-1) - known[0] + 1) / 2;
  const alone = known.filter((i) => (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null);
  return [sparse ? known : alone, sparse];
}

/** Those of the dots that are in sight, or none where they would run into one another. */
function dotsInSight(chart, dots) {
  const [first, last] = chart.series[0].idxs;
  const shown = dots.filter((i) => i >= first && i <= last);
  return shown.length * 12 < chart.over.clientWidth ? shown : [];
}

/** Two curves a key: the raw one, faint, and over it the smooth one. Sparse keys are not smoothed. */
function lines(keys, title) {
  const raw = keys.map(valuesOf);
  const dots = raw.map(dotsOf);
  const smoothed = (values, k) => (overview.smoothing && !dots[k][1] ? smooth(values, overview.smoothing) : values);
  const text = (exact, smoothed) => number(exact) + (smoothed === exact ? "" : ` (smoothed ${number(smoothed, 4)})`);
  const curves = keys.map((key, k) => ({
    label: key === title ? "value" : key, stroke: css(palette(k)), width: 1.75, spanGaps: dots[k][1],
    points: { show: true, size: 6, fill: css(palette(k)), filter: (u) => dotsInSight(u, dots[k][0]) },
    value: (u, value, i, at) => (at === null ? number(lastOf(raw[k])) : text(raw[k][at], value)),
  }));
  const faint = curves.map((one) => ({ ...one, class: "raw", width: 1, alpha: 0.3, points: { show: false } }));
  return { data: () => [xValues(), ...raw, ...raw.map(smoothed)], series: [...faint, ...curves] };
}

/** Shares of each step's sum, as stacked bars that fill the height. The legend has the values themselves. */
function shares(keys) {
  const raw = keys.map(valuesOf);
  const colors = keys.map((key, k) => css(palette(k)));
  const stacks = METRICS.step.map((step, i) => {
    const values = raw.map((column) => Math.max(0, column[i] ?? 0));
    const sum = values.reduce((a, b) => a + b, 0);
    return values.map((value, k) => [colors[k], sum && value / sum]);
  });
  const x = xValues();
  const edges = x.map((at, i) => (at + (x[i - 1] ?? at - 1)) / 2).concat(x.at(-1) + 0.5);
  const series = keys.map((key, k) => ({ label: key, stroke: colors[k], paths: () => null, points: { show: false },
    value: (u, value, i, at) => number(at === null ? lastOf(raw[k]) : value) }));
  return { data: () => [x, ...raw], series, yScale: { range: [0, 1] }, cursor: { points: { show: false } },
    paint: (chart) => paintStacks(chart, edges, stacks) };
}

/** A chart is drawn when it comes into sight. */
const inSight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting) target.draw();
}, { rootMargin: "300px" });
const drawnPlots = () => [...find("overview").querySelectorAll(".plot")].filter((place) => place.plot);

/** Draws a chart with the zoom of those that are there. */
function drawChart(place, height, { data, series, ...options }) {
  inSight.unobserve(place);
  const zoom = drawnPlots()[0]?.plot.scales.x;
  const chart = plot(place, data(), series, { byTime: overview.byTime, height, sync: "overview", ...options });
  if (isNumber(zoom?.min)) chart.setScale("x", { min: zoom.min, max: zoom.max });
  chart.setLegend({ idx: null });
  place.plot = chart;
  place.smooth = () => {
    chart.setData(data(), false);
    chart.setScale("x", { ...chart.scales.x });
  };
}

function chartCard({ title, text, keys, stacked }, height) {
  const known = keys.filter((key) => valuesOf(key).some((value) => value !== null));
  const place = make("div", { class: "plot", "data-chart": title });
  place.draw = () => drawChart(place, height, stacked ? shares(known) : lines(known, title));
  if (known.length) inSight.observe(place);
  return make("div", { class: "card" }, make("h3", {}, title), dim(text ?? ""),
    known.length ? place : sentence(`no values yet of ${keys.join(", ")}`));
}

function showCards(where, charts, height) {
  where.querySelectorAll(".plot").forEach((place) => place.plot?.destroy());
  where.replaceChildren(...charts.map((chart) => chartCard(chart, height)));
}

function showSmallCharts() {
  const named = new Set(RUN.charts.flatMap((chart) => chart.keys));
  const words = find("metric-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const all = Object.keys(METRICS.columns).filter((key) => !key.includes(BETWEEN)).sort();
  const keys = all.filter((key) => (words.length ? words.every((word) => key.toLowerCase().includes(word))
    : /^(train|reward|agents|episodes)\//.test(key) && !named.has(key)));
  const ofRuns = (key) => [key, ...RUN.others.map((run) => key + BETWEEN + run)];
  showCards(find("small-charts"), keys.map((key) => ({ title: key, keys: ofRuns(key) })), 150);
  find("metric-count").textContent = `${keys.length} of ${all.length} metrics`;
}

function showCharts() {
  overview.byTime = find("x-axis").value === "time";
  find("chart-controls").hidden = find("more").hidden = !METRICS.step.length;
  const none = sentence("no metrics yet: metrics.jsonl gets a line after each step");
  if (!METRICS.step.length) return find("charts").replaceChildren(none);
  showCards(find("charts"), RUN.charts, 230);
  showSmallCharts();
}

function setSmoothing() {
  overview.smoothing = Number(find("smoothing").value);
  find("smoothing-text").textContent = overview.smoothing
    ? `exponential moving average, weight ${overview.smoothing} on what came before; raw curves are faint` : "off";
  for (const place of drawnPlots()) place.smooth();
}

function startOverview() {
  const last = METRICS.step.at(-1);
  const made = new Date(RUN.made_at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
  find("progress").textContent = `${last === undefined ? "no step" : `step ${last}`} of ${RUN.steps} · made ${made}`;
  find("facts").append(...RUN.facts.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));
  find("notes").append(...RUN.notes.map((note) => make("li", {}, note)));
  const [newest, ...earlier] = RUN.diagnostics.map(({ step, text }) => dim(step ? `Step ${step}: ${text}` : `Note: ${text}`)).reverse();
  find("diagnostics").hidden = !newest;
  find("diagnostics").append(newest ?? "", make("details", { hidden: earlier.length ? null : "" },
    make("summary", {}, `${earlier.length} earlier`), ...earlier));
  find("x-axis").parentElement.hidden = RUN.others.length > 0;  // the steps of two runs have two times
  find("smoothing").addEventListener("input", setSmoothing);
  find("metric-filter").addEventListener("input", showSmallCharts);
  find("x-axis").addEventListener("change", showCharts);
  setSmoothing();
  showCharts();
}

// ---- rollouts
const FIELDS = [  // [name, is a number, width in px]
  ["step", true, 68], ["group_id", true, 76], ["sample_index", true, 80], ["part_index", true, 62],
  ["agent", false, 96],
  ["turns", true, 70], ["reward", true, 84], ["advantage", true, 110], ["length", true, 80],
  ["finish_reason", false, 84], ["prompt", false], ["answer", false],
];
const ROW = 28;
const NO_ROLLOUTS = "no rollouts were logged: training.logged_groups";
const rollouts = { shown: [], sort: ["step", -1], texts: [] };

const rangeFilter = (name) => make("label", {}, `${name} `, ...["from", "to"].map((end) =>
  make("input", { type: "number", step: "any", id: `${name}-${end}`, placeholder: end })));

function choiceFilter(name) {
  const values = [...new Set(SEQUENCES[name])].filter(Boolean).sort();
  const options = ["", ...values].map((value) => make("option", { value }, value || "all"));
  return make("label", { hidden: values.length ? null : "" }, `${name.replace("_reason", "")} `,
    make("select", { id: `${name}-is` }, ...options));
}

function filterRollouts() {
  const tests = [];
  for (const name of ["step", "reward", "advantage", "length"]) {
    const [from, to] = ["from", "to"].map((end) => find(`${name}-${end}`).valueAsNumber);
    const inside = (value) => isNumber(value) && !(value < from) && !(value > to);
    if (isNumber(from) || isNumber(to)) tests.push((i) => inside(SEQUENCES[name][i]));
  }
  for (const name of ["finish_reason", "agent"]) {
    const { value } = find(`${name}-is`);
    if (value) tests.push((i) => SEQUENCES[name][i] === value);
  }
  const text = find("text-has").value.toLowerCase();
  if (text) tests.push((i) => rollouts.texts[i].includes(text));
  rollouts.shown = [...SEQUENCES.step.keys()].filter((i) => tests.every((test) => test(i)));
  find("row-count").textContent = `${rollouts.shown.length} of ${SEQUENCES.step.length} logged sequences`;
  sortRollouts(...rollouts.sort);
}

/** By the chosen column, what has no value last; equals stay in the order of the data. */
function sortRollouts(name, sign) {
  const values = SEQUENCES[name];
  rollouts.sort = [name, sign];
  rollouts.shown.sort((a, b) => {
    if (values[a] === values[b]) return a - b;
    if (values[a] === null || values[b] === null) return values[a] === null ? 1 : -1;
    return values[a] < values[b] ? -sign : sign;
  });
  const order = (heading) => (heading.dataset.sort !== name ? "none" : sign > 0 ? "ascending" : "descending");
  find("table").querySelectorAll("th").forEach((heading) => heading.setAttribute("aria-sort", order(heading)));
  find("table").scrollTop = 0;
  drawRows();
}

function tableRow(i) {
  const href = `#tokens/${SEQUENCES.step[i]}/${SEQUENCES.group_id[i]}`;
  const cell = ([name, numeric]) => {
    const text = number(SEQUENCES[name][i], 4);
    return make("td", { class: numeric ? "number" : null, "data-field": name, title: numeric ? null : text },
      name === "group_id" ? make("a", { href }, text) : text);
  };
  return make("tr", { class: "row", "data-row": i }, ...FIELDS.map(cell));
}

/** The rows in sight, and two rows of space that stand for those above and below. */
function drawRows() {
  const table = find("table");
  const count = Math.ceil((table.clientHeight || 600) / ROW) + 20;
  const first = Math.max(0, Math.min(Math.floor(table.scrollTop / ROW) - 10, rollouts.shown.length - count));
  const rows = rollouts.shown.slice(first, first + count);
  const space = (height) => make("tr", {}, make("td", { class: "space", style: `height: ${height}px` }));
  const all = [space(first * ROW), ...rows.map(tableRow), space((rollouts.shown.length - first - rows.length) * ROW)];
  table.querySelector("tbody").replaceChildren(...all);
}

function sampleGroup({ version, episodes }) {
  const all = (rewards) => Object.entries(rewards ?? {}).map(([name, one]) => ` · ${name} ${number(one)}`).join("");
  const heading = `weight version ${version} · rewards ${episodes.map(({ reward }) => number(reward, 3)).join(", ")}`;
  return make("details", {}, make("summary", {}, heading), ...episodes.flatMap(({ text, reward, rewards }) =>
    [dim(`reward ${number(reward)}${all(rewards)}`), make("pre", {}, text)]));
}

function startRollouts() {
  find("samples").hidden = !RUN.samples.length;
  const openSamples = () => find("samples").append(...RUN.samples.map(sampleGroup));
  find("samples").addEventListener("toggle", openSamples, { once: true });
  find("table").hidden = !SEQUENCES.step.length;
  if (!SEQUENCES.step.length) return find("filters").replaceChildren(sentence(NO_ROLLOUTS));
  rollouts.texts = SEQUENCES.prompt.map((prompt, i) => `${prompt}\n${SEQUENCES.answer[i]}`.toLowerCase());
  find("filters").append(...["step", "reward", "advantage", "length"].map(rangeFilter), choiceFilter("finish_reason"),
    choiceFilter("agent"), make("label", {}, "text ", make("input", { id: "text-has", type: "search",
      placeholder: "in prompt or answer" })), make("b", { id: "row-count" }));
  find("filters").addEventListener("input", filterRollouts);
  const sortBy = (name) => sortRollouts(name, rollouts.sort[0] === name ? -rollouts.sort[1] : 1);
  const heading = ([name, numeric, width]) =>
    make("th", { class: numeric ? "number" : null, "data-sort": name, style: width ? `width: ${width}px` : null },
      make("button", { type: "button", onclick: () => sortBy(name) }, name.replace(/_(reason|id|index)$/, "")));
  find("table").querySelector("thead").append(make("tr", {}, ...FIELDS.map(heading)));
  find("table").addEventListener("scroll", drawRows);
  find("table").addEventListener("click", (event) => {
    const link = event.target.closest("tr.row")?.querySelector("a");
    if (link) location.hash = link.hash;
  });
  filterRollouts();
}

// ---- tokens
const CATEGORIES = ["versions", "loss_mask"];
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [-1, -1], ArrowDown: [1, 1] };  // [tokens, lines]
const TOOL = /<(tool_call|tool_response|tool_result|function_call)>[\s\S]*?(?:<\/\1>|$)/g;
const SPECIAL = /<\|[^<>|\s]+\|>|<\/?(?:tool_call|tool_response|tool_result|function_call|think|s|bos|eos|pad)>/g;
const tokens = { step: null, group: null, sequences: [], columns: [], colorBy: "advantages", at: null, pinned: false };
const columnName = (key) => COLUMNS[key]?.[0] ?? key.replaceAll("_", " ");
const turnName = (turn) => (turn < 0 ? "context" : `policy, turn ${turn}`);

/** The sequences of a step: those in the page, or from the folder beside it; null where they are not to be had. */
async function loadRollouts(step) {
  const load = (done) => make("script", { src: `rollouts/step-${step}.js`, onload: done, onerror: done });
  if (!RUN.rollouts[step] && RUN.rollout_steps.includes(step)) {
    await new Promise((done) => document.head.append(load(done)));
  }
  return RUN.rollouts[step] ?? null;
}

/** Files `rollouts/step-N.js` call this. */
window.arealRollouts = (step, sequences) => { RUN.rollouts[step] = sequences; };

/** The groups of a step, from the table and from the tokens that are loaded. */
function groupsOf(step) {
  const inTable = SEQUENCES.group_id.filter((group, i) => SEQUENCES.step[i] === step);
  return ascending([...inTable, ...(RUN.rollouts[step] ?? []).map(({ group_id }) => group_id)]);
}

/** How many tokens of context all sequences begin with. */
function sharedLength(sequences) {
  const shared = (token, i) => sequences.every((one) => one.turn[i] === -1 && one.text[i] === token);
  const first = sequences[0].text.findIndex((token, i) => !shared(token, i));
  return first < 0 ? sequences[0].text.length : first;
}

/** For each token the number of the pattern's match that it lies in, -1 for none. Matches may span tokens. */
function matchesOf(texts, pattern) {
  const matches = [...texts.join("").matchAll(pattern)].map((match) => [match.index, match.index + match[0].length]);
  let [end, current] = [0, 0];
  return texts.map((text) => {
    const begin = end;
    end += text.length;
    while (current < matches.length && matches[current][1] <= begin) current++;
    return current < matches.length && matches[current][0] < end ? current : -1;
  });
}

/** Tokens `from` to `to` of a sequence, all of one turn, as a block. `place` is the sequence's in the group. */
function block(sequence, place, from, to) {
  const turn = sequence.turn[from];
  const texts = sequence.text.slice(from, to);
  const tools = matchesOf(texts, TOOL);
  const specials = matchesOf(texts, SPECIAL);
  const element = make("div", { class: `block ${turn < 0 ? "context" : "policy"}`, "data-turn": turn },
    make("h4", {}, turnName(turn)));
  let inner = element;
  texts.forEach((text, i) => {
    if (tools[i] < 0) inner = element;
    else if (tools[i] !== tools[i - 1]) element.append(inner = make("span", { class: "tool" }));
    const kind = `token${specials[i] < 0 ? "" : " special"}${text.includes("\n") ? " newline" : ""}`;
    const token = make("span", { class: kind, tabindex: -1, "data-sequence": place, "data-token": from + i }, text);
    sequence.elements[from + i] = token;
    inner.append(token);
  });
  return element;
}

function blocks(sequence, place, from, to = sequence.text.length) {
  const begins = [...sequence.turn.keys()].filter((i) => i >= from && i < to
    && (i === from || sequence.turn[i] !== sequence.turn[i - 1]));
  return begins.map((begin, k) => block(sequence, place, begin, begins[k + 1] ?? to));
}

function sequenceColumn(sequence, place, shared) {
  const { columns: { advantages = [] }, turn } = sequence;
  const known = advantages.filter((value, i) => isNumber(value) && turn[i] >= 0);
  const advantage = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  const { sample_index: sample, part_index: part } = sequence;
  const title = [`sample ${sample}`, part ? `part ${part}` : "", sequence.agent];
  const facts = [`reward ${number(sequence.reward, 4)}`, `advantage ${number(advantage, 4)}`, sequence.finish_reason,
    `${turn.filter((k) => k >= 0).length} tokens`];
  const join = (parts) => parts.filter(Boolean).join(" · ");
  return make("article", { class: "card sequence", "data-sample": sample, "data-part": part },
    make("header", {}, make("h3", {}, join(title)), dim(join(facts))), ...blocks(sequence, place, shared));
}

function fillSelect(id, options, value) {
  find(id).replaceChildren(...options.map(([key, text]) => make("option", { value: key }, text)));
  find(id).value = value;
}

function showGroup() {
  const { sequences } = tokens;
  const shared = sharedLength(sequences);
  find("group").replaceChildren(
    make("details", { id: "prompt", class: "card", open: "", hidden: shared ? null : "" },
      make("summary", {}, `prompt, the same for all ${sequences.length}`), ...blocks(sequences[0], 0, 0, shared)),
    make("div", { id: "sequences" }, ...sequences.map((one, place) => sequenceColumn(one, place, shared))));
  const others = sequences.flatMap(({ columns }) => Object.keys(columns)).sort();
  tokens.columns = [...new Set([...Object.keys(COLUMNS), ...others])].filter((key) => others.includes(key));
  if (!tokens.columns.includes(tokens.colorBy)) tokens.colorBy = tokens.columns[0] ?? "";
  fillSelect("color-by", tokens.columns.map((key) => [key, columnName(key)]), tokens.colorBy);
  colorTokens();
}

/** A color for each weight version, or for the mask, and the legend. */
function categories(key, values) {
  const kinds = ascending(values).filter((value) => value >= (key === "loss_mask" ? 1 : 0));
  const colors = new Map(kinds.map((value, i) => [value, `color-mix(in srgb, var(${palette(i)}) 45%, transparent)`]));
  const color = (value) => colors.get(value) ?? "";
  return [color, kinds.map((value) => make("span", {}, swatch(color(value)), number(value)))];
}

/** Blue below the center, orange above; a hundredth of the tokens may lie beyond the full color. */
function diverging(key, values) {
  const center = /correction|(?<!log_)ratio/.test(key) ? 1 : 0;
  const far = values.map((value) => Math.abs(value - center)).sort((a, b) => a - b);
  const extent = far[Math.floor(0.99 * (far.length - 1))] || far.at(-1) || 1;
  const color = (value) => {
    const share = Math.max(-1, Math.min(1, (value - center) / extent));
    return share ? `rgb(var(${share < 0 ? "--cold" : "--warm"}) / ${(Math.abs(share) * 0.75).toFixed(2)})` : "";
  };
  const from = values.some((value) => value < center) ? center - extent : center;
  const to = values.some((value) => value > center) ? center + extent : center;
  const ramp = [...new Set([from, center, to, to])].map((value) => color(value) || "transparent");
  return [color, [number(from, 3), make("i", { style: `background: linear-gradient(to right, ${ramp})` }),
    `${number(to, 3)} and beyond, ${center} has no color`]];
}

function colorTokens() {
  const key = tokens.colorBy = find("color-by").value;
  const valueAt = ({ columns }, i) => (columns.loss_mask?.[i] === 0 ? null : columns[key]?.[i]);  // context has none
  const values = tokens.sequences.flatMap((one) => one.text.map((text, i) => valueAt(one, i))).filter(isNumber);
  const [color, legend] = (CATEGORIES.includes(key) ? categories : diverging)(key, values);
  find("scale").replaceChildren(...(values.length ? legend : ["no token has a value"]));
  for (const one of tokens.sequences) {
    one.elements.forEach((element, i) => {
      element.style.backgroundColor = isNumber(valueAt(one, i)) ? color(valueAt(one, i)) : "";
    });
  }
}

function describeToken({ text, turn, sample_index: sample, columns }, i) {
  const row = (key) => make("tr", { "data-column": key, "data-value": columns[key][i] },
    make("td", {}, columnName(key), make("small", {}, COLUMNS[key]?.[1] ?? "a column of this algorithm")),
    make("td", {}, number(columns[key][i], 6)));
  const where = `token ${i} of ${text.length}, sample ${sample}, ${turnName(turn[i])}`;
  return [make("pre", { id: "panel-text" }, JSON.stringify(text[i])), dim(where + (tokens.pinned ? ", pinned" : "")),
    make("table", {}, ...tokens.columns.filter((key) => columns[key]).map(row))];
}

function showToken(element) {
  tokens.at?.classList.remove("at", "pinned");
  tokens.at = element;
  element?.classList.add("at", ...(tokens.pinned ? ["pinned"] : []));
  find("panel").replaceChildren(...(element
    ? describeToken(tokens.sequences[element.dataset.sequence], Number(element.dataset.token))
    : [dim("Point at a token, or press an arrow key: here are its numbers. A click or Enter pins it.")]));
}

/** The token above or below where a line is asked for and has one there; else the one so many tokens on. */
function tokenBeside(token, by, line) {
  const { left, top } = token.getBoundingClientRect();
  const there = line ? document.elementFromPoint(left + 2, top + 8 + 21 * line) : null;
  const { elements } = tokens.sequences[token.dataset.sequence];
  return there?.closest(".token") ?? elements[Number(token.dataset.token) + by];
}

function onKey(event) {
  if (event.key === "Escape" || (event.key === "Enter" && event.target.matches(".token, #group"))) {
    tokens.pinned = event.key === "Enter" && tokens.at !== null && !tokens.pinned;
    return showToken(tokens.at);
  }
  if (!(event.key in MOVES) || !tokens.sequences.length) return;
  event.preventDefault();
  const next = tokens.at ? tokenBeside(tokens.at, ...MOVES[event.key]) : tokens.sequences[0].elements[0];
  showToken(next ?? tokens.at);
  tokens.at.focus();
}

/** The group before or after this one, in its step or in the next one whose tokens can be had; null at the ends. */
function neighbor(direction) {
  const groups = groupsOf(tokens.step);
  const beside = groups[groups.indexOf(tokens.group) + direction];
  if (beside !== undefined) return [tokens.step, beside];
  const step = RUN.rollout_steps[RUN.rollout_steps.indexOf(tokens.step) + direction];
  return step === undefined ? null : [step, groupsOf(step).at(direction < 0 ? -1 : 0)];
}

/** Opens a group; what the address leaves open is the newest step and its first group. */
async function showTokens(stepText, groupText) {
  const step = stepText ? Number(stepText) : RUN.rollout_steps.at(-1);
  find("tokens").querySelector(".controls").hidden = find("panel").hidden = step === undefined;
  if (step === undefined) return find("group").replaceChildren(sentence(NO_ROLLOUTS));
  const here = location.hash;
  if (!RUN.rollouts[step]) find("group").replaceChildren(sentence(`loading step ${step}`));
  const all = await loadRollouts(step);
  if (location.hash !== here) return;
  const group = groupText ? Number(groupText) : groupsOf(step)[0];
  if (!groupText && group !== undefined) return location.replace(`#tokens/${step}/${group}`);
  const own = (all ?? []).filter((one) => one.group_id === group);
  const sequences = own.map((one) => ({ ...one, elements: [] }));
  sequences.sort((a, b) => a.sample_index - b.sample_index || a.part_index - b.part_index);
  Object.assign(tokens, { step, group, sequences, at: null, pinned: false });
  find("tabs").querySelector("[data-page=tokens]").href = here;
  fillSelect("token-step", ascending([...RUN.rollout_steps, step]).map((one) => [one, one]), step);
  fillSelect("token-group", ascending([...groupsOf(step), group]).map((one) => [one, one]), group);
  find("previous-group").disabled = !neighbor(-1);
  find("next-group").disabled = !neighbor(1);
  showToken(null);
  find("group").scrollTo(0, 0);
  if (document.activeElement === document.body) find("group").focus({ preventScroll: true });
  if (sequences.length) return showGroup();
  find("group").replaceChildren(sentence(all ? `step ${step} has no sequence of group ${group}`
    : `the tokens of step ${step} are not in this page: ${RUN.missing}`));
}

function startTokens() {
  const open = (...place) => { location.hash = `#tokens/${place.filter((part) => part !== undefined).join("/")}`; };
  find("token-step").addEventListener("change", (event) => open(event.target.value));
  find("token-group").addEventListener("change", (event) => open(tokens.step, event.target.value));
  find("previous-group").addEventListener("click", () => open(...neighbor(-1)));
  find("next-group").addEventListener("click", () => open(...neighbor(1)));
  find("color-by").addEventListener("change", colorTokens);
  find("group").addEventListener("keydown", onKey);
  const onToken = (type, listener) => find("group").addEventListener(type, (event) => {
    if (event.target.matches(".token")) listener(event.target);
  });
  onToken("pointerover", (token) => tokens.pinned || showToken(token));
  onToken("click", (token) => {
    tokens.pinned = !(tokens.pinned && tokens.at === token);
    showToken(token);
  });
}

// ---- timeline
const LANES = TRACKS.map(({ process, name, spans }) => ({  // the longer first where spans begin together
  label: `${process} · ${name}`,
  spans: spans.map(([a, b, ...what]) => [a - START, b - START, ...what]).sort((a, b) => a[0] - b[0] || b[1] - a[1]),
}));
const FIRST = Math.min(END, ...IN_FLIGHT.time.slice(0, 1), ...TRACKS.map(({ spans }) => spans[0][0])) - START;
const WHOLE = [FIRST, Math.max(FIRST + 1e-3, END - START)];
const LANE = Math.max(5, Math.min(20, 8000 / LANES.length));
const GUTTER = 210;
const timelineCharts = [];

/** A chart whose wheel zooms all of the timeline around the cursor; with shift, or sideways, it moves them. */
function timelineChart(place, data, series, options) {
  const chart = plot(place, data, series, { byTime: true, sync: "timeline", legend: { show: false }, ...options });
  timelineCharts.push(chart);
  chart.over.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { min, max } = chart.scales.x;
    const center = chart.posToVal(event.offsetX, "x");
    const width = Math.max(1e-3, Math.min(WHOLE[1] - WHOLE[0], (max - min) * 1.0015 ** event.deltaY));
    const moved = min + 0.001 * event.deltaX * (max - min);
    const from = Math.max(WHOLE[0], Math.min(WHOLE[1] - width, center - ((center - moved) * width) / (max - min)));
    for (const one of timelineCharts) one.setScale("x", { min: from, max: from + width });
  }, { passive: false });
  return chart;
}

/** Groups in flight: which weight versions, and how many groups of each, at each time; the oldest lie below. */
function showInFlight(place, legend) {
  const { time, versions, counts } = IN_FLIGHT;
  const groups = time.map(() => []);
  versions.forEach((version, v) => counts[v].forEach((count, i) => count && groups[i].push([version, count])));
  const at = [[], ...groups, groups.at(-1)];  // from the first moment to the last
  const x = [WHOLE[0], ...time.map((t) => t - START), WHOLE[1]];
  const colorOf = new Map(versions.map((version, v) => [version, css(palette(v))]));
  const stacks = at.map((all) => all.map(([version, count]) => [colorOf.get(version), count]));
  const total = at.map((all) => all.reduce((sum, [, count]) => sum + count, 0));
  const tell = ({ cursor: { idx } }) => legend.replaceChildren(...(isNumber(idx) ? [clock(x[idx]), ...at[idx].map(
    ([version, count]) => make("span", {}, swatch(colorOf.get(version)), `version ${version}: ${count}`))]
    : ["Point at a time: its weight versions are here."]));
  const line = { stroke: css("--ink"), width: 1, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
  tell(timelineChart(place, [x, total], [line], {
    height: 190, y: { size: GUTTER }, yScale: { range: (u, from, to) => [0, Math.max(1, to * 1.05)] },
    paint: (chart) => paintStacks(chart, x, stacks), tell }));
}

/** Colors of span names, and the legend: by their seconds in all. Groups have the colors of the chart above. */
function spanColors(legend) {
  const seconds = new Map(IN_FLIGHT.versions.map((version) => [`version ${version}`, -1]));
  const add = ([from, to, name]) => seconds.get(name) !== -1 && seconds.set(name, (seconds.get(name) ?? 0) + to - from);
  LANES.forEach(({ spans }) => spans.forEach(add));
  const names = [...seconds].filter(([, sum]) => sum >= 0).sort((a, b) => b[1] - a[1]);
  const colors = new Map(names.map(([name], i) => [name, css(i < 8 ? palette(i) : "--line")]));
  legend.append(...names.map(([name, sum]) =>
    make("span", { "data-span": name }, swatch(colors.get(name)), `${name} ${clock(sum)}`)));
  IN_FLIGHT.versions.forEach((version, v) => colors.set(`version ${version}`, css(palette(v))));
  return colors;
}

function paintLanes({ ctx, bbox, scales: { x: { min, max } } }, colors) {
  const [end, height, scale] = [bbox.left + bbox.width, bbox.height / LANES.length, bbox.width / (max - min)];
  LANES.forEach(({ spans }, i) => {
    let painted = 0;
    for (const [from, to, name] of spans) {
      if (to < min || from > max) continue;
      const left = Math.max(bbox.left, bbox.left + (from - min) * scale);
      const right = Math.min(end, Math.max(left + 1, bbox.left + (to - min) * scale));
      if (right <= painted && right - left <= 1) continue;  // a pixel is painted once
      painted = Math.ceil(right);
      ctx.fillStyle = colors.get(name);
      ctx.fillRect(left, bbox.top + (i + 0.1) * height, Math.max(1, right - left - 0.5), 0.8 * height);
    }
  });
}

function tellSpan(chart, tip) {
  const { left, top } = chart.cursor;
  const pixel = chart.posToVal(1, "x") - chart.posToVal(0, "x");
  const [time, at] = [chart.posToVal(left, "x"), chart.posToVal(top, "y")];
  const lane = chart.over.matches(":hover") ? LANES[Math.floor(at)] : null;
  const span = lane?.spans.findLast(([from, to]) => from <= time && Math.max(to, from + pixel) >= time);
  tip.hidden = !span;
  if (!span) return;
  const [from, to, name, about] = span;
  tip.replaceChildren(make("b", {}, about ? `${about}, ${name}` : name),
    dim(`${number(to - from, 4)} s from ${clock(from, 0.1)}`), dim(lane.label));
  tip.style.left = `${GUTTER + Math.min(left + 14, chart.over.clientWidth - 260)}px`;
  tip.style.top = `${top + 60}px`;
}

function showTracks(place, legend) {
  const colors = spanColors(legend);
  const every = Math.ceil(12 / LANE);
  const labels = LANES.map(({ label }) => (label.length > 30 ? `…${label.slice(-29)}` : label));
  const tip = make("div", { id: "span-tip", class: "card", hidden: "" });
  timelineChart(place, [WHOLE, [0, 0]], [{ paths: () => null, points: { show: false } }], {
    height: LANES.length * LANE + 36, x: { side: 0 }, yScale: { range: [0, LANES.length], dir: -1 },
    y: { size: GUTTER, grid: { show: false }, ticks: { show: false }, splits: () => LANES.map((lane, i) => i + 0.5),
      values: () => labels.map((label, i) => (i % every ? "" : label)) },
    cursor: { y: false, points: { show: false } },
    paint: (chart) => paintLanes(chart, colors), tell: (chart) => tellSpan(chart, tip),
  });
  place.append(tip);
}

function showTimeline() {
  for (const chart of timelineCharts.splice(0)) chart.destroy();
  for (const id of ["in-flight", "in-flight-legend", "tracks", "span-legend"]) find(id).replaceChildren();
  if (IN_FLIGHT.time.length) showInFlight(find("in-flight"), find("in-flight-legend"));
  else find("in-flight").append(sentence("no groups in flight: the run has logged none yet"));
  if (LANES.length) showTracks(find("tracks"), find("span-legend"));
  else find("tracks").append(sentence("no timeline yet: the run has logged no events"));
}

// ---- pages
const PAGES = { overview: startOverview, rollouts: startRollouts, tokens: startTokens, timeline: showTimeline,
  config: () => { find("config-text").textContent = RUN.config || "no config was saved"; } };
const started = new Set();

function route() {
  const [page, ...rest] = location.hash.slice(1).split("/");
  const name = Object.hasOwn(PAGES, page) ? page : "overview";
  for (const tab of find("tabs").querySelectorAll("a")) {
    find(tab.dataset.page).hidden = tab.dataset.page !== name;
    tab.setAttribute("aria-current", tab.dataset.page === name ? "page" : "false");
  }
  document.title = `${RUN.name} · ${name}`;
  if (!started.has(name)) PAGES[name]();
  started.add(name);
  if (name === "tokens") showTokens(...rest);
}

find("name").textContent = find("tab-name").textContent = RUN.name;
addEventListener("hashchange", route);
route();
