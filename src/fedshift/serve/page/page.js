"use strict";
// Everything shown comes from this server; names are put in as text, never as markup.
const COLOURS = ["#1f6fb2", "#d1495b", "#2e7d4f", "#b26a00", "#7b5ea7", "#00838f", "#8d6e63", "#c2185b", "#607d8b", "#9e9d24"];
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
let token = "";
let client = "";

function made(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function drawn(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}), ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const reply = await fetch(path, { ...options, headers });
  const found = await reply.json();
  if (!reply.ok) throw Object.assign(new Error(found.error || reply.statusText), { status: reply.status });
  return found;
}

const own = (path) => `/${encodeURIComponent(client)}/${path}`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;

// ---- charts --------------------------------------------------------------------------------------------------------
function chart(place, bins, series, top, unit) {
  const box = $(place);
  box.replaceChildren();
  const some = bins.length && series.some((one) => one.values.some((value) => value !== null));
  if (!some) return box.append(made("p", { class: "quiet" }, "Nothing yet."));
  const [width, height, left, low] = [Math.max(box.clientWidth, 240), 150, 52, 20];
  const first = bins[0].start, last = Math.max(bins[bins.length - 1].start, first + 60);
  const x = (bin) => left + ((bin.start - first) / (last - first)) * (width - left - 6);
  const y = (value) => height - low - (value / top) * (height - low - 8);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
  for (const share of [0, 0.5, 1]) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: width, y1: y(share * top), y2: y(share * top) }));
    svg.append(drawn("text", { x: 0, y: y(share * top) + 4 }, `${+(share * top).toPrecision(3)}${unit}`));
  }
  const clock = (seconds) => new Date(1000 * seconds).toTimeString().slice(0, 5);
  svg.append(drawn("text", { x: left, y: height - 4 }, clock(first)));
  svg.append(drawn("text", { x: width - 34, y: height - 4 }, clock(last)));
  for (const one of series) {
    const points = bins.map((bin, i) => (one.values[i] === null ? null : [x(bin), y(one.values[i])])).filter(Boolean);
    if (one.under) {
      const back = bins.map((bin, i) => [x(bin), y(one.under[i])]).reverse();
      svg.append(drawn("polygon", { points: [...points, ...back].join(" "), fill: one.colour, opacity: 0.85 }));
    } else if (points.length === 1) {
      svg.append(drawn("circle", { cx: points[0][0], cy: points[0][1], r: 3, fill: one.colour }));
    } else {
      svg.append(drawn("polyline", { points: points.join(" "), fill: "none", stroke: one.colour, "stroke-width": 2 }));
    }
  }
  box.append(svg, legend(series));
}

function legend(series) {
  const list = made("div", { class: "legend" });
  for (const one of series) {
    const mark = drawn("svg", { viewBox: "0 0 10 10" });
    mark.append(drawn("rect", { width: 10, height: 10, rx: 2, fill: one.colour }));
    list.append(made("span", {}, mark, one.name));
  }
  return list;
}

function line(name, values, number) {
  return { name, values, colour: COLOURS[number % COLOURS.length] };
}

const largest = (series) => Math.max(1e-3, ...series.flatMap((one) => one.values.filter((value) => value !== null)));

function bar(share, kind) {
  const svg = drawn("svg", { class: "track", viewBox: "0 0 100 10", preserveAspectRatio: "none" });
  svg.append(drawn("rect", { class: "back", width: 100, height: 10, rx: 2 }));
  svg.append(drawn("rect", { class: kind, width: Math.min(100, 100 * share), height: 10, rx: 2 }));
  return svg;
}

function row(name, share, text, kind) {
  return made("div", { class: "row" }, made("span", { title: name }, name), bar(share, kind), made("span", {}, text));
}

// ---- what is shown -------------------------------------------------------------------------------------------------
function show(found) {
  $("client").textContent = found.client;
  $("about").textContent =
    `${found.method} with adapter ${found.adapter}, ${found.classes.length} classes` +
    (found["micro-batch"] ? `, micro-batches of ${found["micro-batch"]} within ${1000 * found.deadline} ms` : "") +
    (found["unknown-rate"] === null ? "" : `, unknown at a false-alarm rate of ${percent(found["unknown-rate"])}`);
  $("mode").textContent = found.mode === "adapting" && !found.fitted ? "collecting" : found.mode;
  $("mode").className = found.mode === "fallen back" ? "bad" : found.mode === "frozen" ? "warn" : "good";
  for (const name of ["seen", "learnt", "version"]) $(name).textContent = found[name].toLocaleString("en");
  const accuracy = found.accuracy;
  $("right").textContent = accuracy.served.labelled ? percent(accuracy.served.accuracy) : "-";
  $("right-words").textContent = accuracy.served.labelled
    ? `accuracy of ${accuracy.served.labelled} labelled; frozen ${percent(accuracy.frozen.accuracy)}`
    : "accuracy (no labels yet)";
  $("alarms").replaceChildren(...Object.entries(found.alarms).map(([name, level]) => {
    const on = found.on.includes(name);
    return row(name, level, on ? "on" : percent(level), on ? "bad" : level > 0.5 ? "warn" : "good");
  }));
  times(found);
  accuracies(found);
  versions(found.versions);
  $("log").textContent = found.log.slice().reverse().join("\n") || "Nothing yet.";
}

function times(found) {
  const bins = found.timeline;
  const spent = (bin) => Math.min(10, Math.max(1, found.now - bin.start)); // the last ones are not over yet
  const rates = (what) => bins.map((bin) => bin[what] / spent(bin));
  const requests = [line("requests", rates("requests"), 0), line("images", rates("images"), 1)];
  chart("requests", bins, requests, largest(requests), "");
  const ms = (value) => (value === null ? null : 1000 * value);
  const latency = [line("half of them within", bins.map((bin) => ms(bin.p50)), 0), line("99 % within", bins.map((bin) => ms(bin.p99)), 1)];
  chart("latency", bins, latency, largest(latency), " ms");
  const full = bins.filter((bin) => bin.images);
  const totals = found.classes.map((name, code) => [code, full.reduce((sum, bin) => sum + (bin.classes[code] || 0), 0)]);
  const top = totals.filter(([, count]) => count).sort((a, b) => b[1] - a[1]).slice(0, COLOURS.length).map(([code]) => code).sort((a, b) => a - b);
  let under = full.map(() => 0);
  const classes = top.map((code, number) => {
    const values = full.map((bin, i) => under[i] + (bin.classes[code] || 0) / bin.images);
    const one = { ...line(found.classes[code], values, number), under };
    under = values;
    return one;
  });
  chart("classes", full, classes, 1, "");
  const told = [
    ...found.telemetry.map((name, number) => line(name, full.map((bin) => bin.telemetry[name] ?? null), number)),
    line("differs from the frozen model", full.map((bin) => bin.differing), 7),
    line("unknown", full.map((bin) => bin.unknown), 8),
    line("confidence", full.map((bin) => bin.confidence), 9),
  ];
  chart("telemetry", full, told, 1, "");
}

function accuracies(found) {
  const by = found.accuracy.served["by-class"];
  if (!by) return $("accuracy").replaceChildren(made("p", { class: "quiet" }, "No labels yet: POST /feedback."));
  const head = made("tr", {}, ...["class", "served", "adapter", "frozen"].map((word) => made("th", {}, word)));
  const rows = Object.keys(by).map((name) =>
    made("tr", {}, made("td", {}, name), ...["served", "adapted", "frozen"].map((who) => made("td", {}, percent(found.accuracy[who]["by-class"][name])))));
  $("accuracy").replaceChildren(made("div", { class: "scroll" }, made("table", {}, head, ...rows)));
}

function versions(list) {
  const rows = list.slice().reverse().slice(0, 12).map((one) => {
    const back = made("button", {}, "Go back");
    back.onclick = () => change(`rollback?to=${one.version}`);
    const words = one.version ? `${one.why}, ${one.seen} ${one.seen === 1 ? "image" : "images"}, ${one.time.slice(0, 19).replace("T", " ")}` : one.why;
    return made("tr", {}, made("td", {}, String(one.version)), made("td", {}, words), made("td", {}, back));
  });
  $("versions").replaceChildren(made("div", { class: "scroll" }, made("table", {}, ...rows)));
}

// ---- what one can do -----------------------------------------------------------------------------------------------
async function change(what) {
  await guarded(async () => {
    await ask(own(what), { method: "POST" });
    await refresh();
  });
}

async function predict(files) {
  for (const file of files) {
    await guarded(async () => {
      const body = await file.arrayBuffer();
      const found = await ask(own("predict"), { method: "POST", body, headers: { "Content-Type": file.type || "application/octet-stream" } });
      const answer = found.answers[0];
      const picture = made("img", { alt: file.name });
      picture.src = file.type.startsWith("image/") ? URL.createObjectURL(file) : "data:,";
      const likely = Object.entries(answer.probabilities).sort((a, b) => b[1] - a[1]).slice(0, 4);
      const words = `${answer.did}; frozen model: ${answer.frozen}` + (answer.rarity === undefined ? "" : `; rarer than ${percent(1 - answer.rarity)} of known images`);
      $("answers").prepend(made("div", { class: "answer" }, picture, made("div", {},
        made("b", { class: answer.unknown ? "warn" : "" }, `${answer.label} (${percent(answer.confidence)})`),
        made("p", { class: "quiet" }, words), ...likely.map(([name, chance]) => row(name, chance, percent(chance), "plain")))));
    });
  }
  await guarded(refresh);
}

async function refresh() {
  if (!token && (await ask("/health")).token) {
    $("door").hidden = false;
    return;
  }
  if (!client) {
    const names = Object.keys(await ask("/clients"));
    client = names[0];
    $("clients").replaceChildren(...names.map((name) => made("option", {}, name)));
    document.querySelector(".choose").hidden = names.length < 2;
  }
  show(await ask(own("status")));
  $("door").hidden = true;
  $("main").hidden = false;
}

async function guarded(work) {
  try {
    await work();
    $("trouble").textContent = "";
  } catch (error) {
    if (error.status === 401) {
      $("door").hidden = false;
      $("trouble").textContent = token ? "That is not the token." : "";
    } else {
      $("trouble").textContent = error.message;
    }
  }
}

$("clients").onchange = () => { client = $("clients").value; $("answers").replaceChildren(); guarded(refresh); };
$("door").onsubmit = (event) => { event.preventDefault(); token = $("token").value; guarded(refresh); };
for (const button of document.querySelectorAll("[data-do]")) button.onclick = () => change(button.dataset.do);
const drop = $("drop");
drop.onclick = () => $("file").click();
drop.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); $("file").click(); } };
drop.ondragover = (event) => { event.preventDefault(); drop.classList.add("over"); };
drop.ondragleave = () => drop.classList.remove("over");
drop.ondrop = (event) => { event.preventDefault(); drop.classList.remove("over"); predict([...event.dataTransfer.files]); };
$("file").onchange = () => predict([...$("file").files]);
guarded(refresh);
setInterval(() => { if (!document.hidden && $("door").hidden) guarded(refresh); }, 3000);
