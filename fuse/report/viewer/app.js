// The page: what is shown, what is selected, and how lists, picture, source and kernels follow.

const DATA = JSON.parse($("report").textContent);
const LAYERS = [["kind", "kind"], ["launches", "launches"], ["bytes", "memory traffic"], ["flops", "arithmetic"], ["time", "time, predicted"], ["memory", "held at the peak"], ["declined", "not fused: candidates"], ["measured", "time, measured"], ["pauses", "pause before it"]];
const KEYS = [["← →", "step through the rewrites"], ["b", "the graph before this rewrite"], ["/", "search"], ["↑ ↓ ↵", "in lists and results"], ["click", "select; what is linked is marked everywhere"],
  ["double click, o", "open or close a box"], ["a", "open every box, and back"], ["drag, wheel", "move, zoom"], ["+ − f", "zoom, the whole graph"], ["n p", "next, previous operator of the selection's order"], ["1 … 9", "colour by another layer"], ["v", "views"], ["Esc", "select nothing"]];

/** A report with what is looked up in it. */
class Sheet {
  constructor({ name, report }) {
    this.name = name;
    this.report = report;
    this.record = report.record;
    this.replay = new Replay(this.record);
    this.tokens = new Map(); // kept from step to step by Tree: see there
    this.paths = new Map();
    this.stretches = new Map();
    this.lines = new Map(this.record.lines.map((line) => [line.source, line]));
    this.kernelsOf = new Map();
    this.record.kernels.forEach((kernel, number) => {
      for (const id of [...kernel.callers, ...kernel.nodes]) this.kernelsOf.set(id, number);
    });
    this.declinedOf = new Map();
    this.record.declined.forEach((group, number) => group.candidates.forEach((candidate, place) => {
      for (const id of candidate.nodes) {
        if (!this.declinedOf.has(id)) this.declinedOf.set(id, []);
        this.declinedOf.get(id).push([number, place]);
      }
    }));
    this.trace = this.report.trace;
    const times = this.record.microseconds || { before: [], after: [] };
    this.times = { before: new Map(times.before), after: new Map(times.after) };
    this.pauses = new Map(this.record.pauses || []);
    this.layers = LAYERS.filter(([name]) => (name === "measured" ? times.before.length + times.after.length : name === "pauses" ? this.pauses.size : !this.trace || name === "kind" || name === "launches"));
    this.saved = [0];
    for (let step = 1; step <= this.replay.length; step += 1) this.saved.push(this.saved[step - 1] + this.replay.steps[step][0].launches_saved);
  }

  /** Launches after that many rewrites. */
  launches(step) { return this.report.after.launches + this.saved[this.replay.length] - this.saved[step]; }

  /** Microseconds that were measured: of eager's operators, and once all rewrites are made of what fuse launches. */
  took(id) { return (this.replay.at === this.replay.length ? this.times.after : this.times.before).get(id); }

  source(row) { return row.at === undefined ? "" : this.record.places[row.at].source; }
}

const app = {
  sheets: DATA.sheets.map((one) => new Sheet(one)),
  shown: [], // {sheet, picture, tree}
  selection: null,
  chosen: new Map(),
  layer: "kind",
  showViews: false,
  all: false, // every box open
  before: false,
  tab: "rewrites",
  side: 0, // of two reports, the one that was last selected in
  get sheet() { return this.shown[this.side].sheet; },
  get step() { return this.sheet.replay.at + (this.before ? 1 : 0); },
};

// ---- steps ---------------------------------------------------------------------------------------------------------

function go(step, reveal = true) {
  const { sheet } = app, last = sheet.replay.length;
  step = Math.min(Math.max(step, 0), last);
  if (!step) app.before = false;
  for (const view of app.shown) view.sheet.replay.go(DATA.match ? view.sheet.replay.length : step - (app.before ? 1 : 0));
  rebuild();
  if (reveal && !DATA.match) {
    const item = app.shown[0].picture.layout.shapes.find((one) => one.news);
    if (item) app.shown[0].picture.reveal(item);
  }
  follow();
}

function rebuild() {
  for (const view of app.shown) {
    const anchor = app.selection && app.selection.type === "node" ? app.selection.id : undefined;
    view.tree = new Tree(view.sheet, app.chosen, app.showViews, DATA.match ? [] : touched(view.sheet), app.all);
    view.picture.show(view.tree, anchor);
    news(view);
    heat(view);
  }
  mark();
}

/** The nodes of the rewrite at hand, if they are few. */
function touched({ replay }) {
  const deltas = app.step ? replay.steps[app.step] : [];
  const ids = deltas.flatMap((delta) => [...(delta.made || []), ...(delta.changed || [])].map((one) => one.id).concat(delta.erased || []));
  return ids.length <= 100 ? ids : [];
}

/** What the rewrite at hand made, changed and (in the graph before it) erased. */
function news(view) {
  if (DATA.match) { differences(view); return; }
  const { replay } = view.sheet, step = app.step;
  if (!step) return;
  const made = new Set(replay.steps[step].flatMap((delta) => delta.made || []).map((row) => row.id));
  const tell = (ids, sort) => {
    for (const id of ids) {
      const item = view.tree.drawn.get(id);
      const inside = sort === "made" && item && item.parent.row && made.has(item.parent.row.id);
      if (item && !inside && (!item.news || sort === "made")) item.news = sort;
    }
  };
  for (const delta of replay.steps[step]) {
    tell((delta.changed || []).map((one) => one.id), "changed");
    if (app.before) tell(delta.erased || [], "erased");
    else tell(made, "made");
  }
}

// ---- layers --------------------------------------------------------------------------------------------------------

/** How often the nodes of each graph are launched in one call: none of those that one kernel computes. */
function weights(replay) {
  const found = new Map([[0, 1]]), waiting = [0];
  while (waiting.length) {
    const graph = waiting.pop();
    for (const id of replay.nodes(graph)) {
      const { called } = replay.rows.get(id);
      if (!called || called.graph < 0) continue;
      found.set(called.graph, called.kind === "loop" && !called.persistent ? found.get(graph) * called.steps : 0);
      waiting.push(called.graph);
    }
  }
  return found;
}

/** Bytes of what each node holds when most is held at once. */
function heldAtPeak(replay) {
  const order = replay.sorted(0), owner = new Map(), last = new Map(), size = new Map(), born = new Map();
  order.forEach((id, at) => {
    const row = replay.rows.get(id);
    for (const used of row.uses) last.set(owner.get(used), row.op === "output" ? order.length : at);
    const looks = row.target === "getitem" || (row.kind === "view" && row.uses.length && !row.launches);
    owner.set(id, looks ? owner.get(row.uses[0]) : id);
    if (looks || row.op === "output") return;
    size.set(id, bytesOf(row.value));
    born.set(id, at);
    if (row.op === "placeholder") last.set(id, order.length);
  });
  const change = new Array(order.length + 2).fill(0);
  for (const [id, bytes] of size) { change[born.get(id)] += bytes; change[(last.get(id) ?? born.get(id)) + 1] -= bytes; }
  let live = 0, most = -1, peak = 0;
  change.forEach((more, at) => { live += more; if (live > most) { most = live; peak = at; } });
  return new Map([...size].filter(([id]) => born.get(id) <= peak && (last.get(id) ?? born.get(id)) >= peak));
}

function measureOf(view) {
  const { replay, declinedOf } = view.sheet, { layer } = app;
  const weight = weights(replay), of = (row) => weight.get(row.graph) ?? 0;
  if (layer === "launches" || layer === "bytes" || layer === "flops") return (row) => row[layer] * (layer === "flops" && !of(row) ? 0 : of(row));
  if (layer === "time") {
    const { launch_seconds: launch, bytes_per_second: traffic, flops_per_second: rate } = DATA.profile;
    return (row) => (row.launches ? of(row) * 1e6 * (row.launches * launch + Math.max(row.flops / rate, row.bytes / traffic)) : 0);
  }
  if (layer === "memory") { const held = heldAtPeak(replay); return (row) => held.get(row.id) || 0; }
  if (layer === "measured") return (row) => view.sheet.took(row.id) || 0;
  if (layer === "pauses") return (row) => view.sheet.pauses.get(row.id) || 0;
  if (layer === "declined") return (row) => (declinedOf.get(row.id) || []).length;
  return null;
}

function heat(view) {
  const measure = measureOf(view), { rows } = view.sheet.replay;
  const words = { launches: count, bytes: (n) => scaled(n, "B"), flops: (n) => scaled(n), time: micro, measured: micro, pauses: micro, memory: (n) => scaled(n, "B"), declined: count }[app.layer];
  let most = 0;
  for (const item of view.picture.layout.shapes) {
    item.heat = item.badge = null;
    if (!measure) continue;
    item.amount = 0;
    for (const id of new Set(item.ids)) { const row = rows.get(id); if (row) item.amount += measure(row); }
    if (!item.open) most = Math.max(most, item.amount);
  }
  if (measure) for (const item of view.picture.layout.shapes) {
    item.heat = most ? Math.sqrt(item.amount / most) : 0;
    if (item.open) item.heat = null;
    item.badge = item.amount ? words(item.amount) : "";
  }
  legend(view.picture, words);
  view.picture.draw();
}

const MEANINGS = { gemm: "product", convolution: "convolution", pointwise: "elementwise", reduction: "reduction", movement: "copies and slices", random: "random numbers", region: "one fused kernel", loop: "loop", repeat: "repeats, drawn once", other: "other" };

/** What the colours of a picture mean: the kinds that are there, or how much the darkest is. */
function legend(picture, words) {
  const shapes = app.shown.flatMap((view) => (view.picture.layout ? view.picture.layout.shapes : [])), swatch = (fill, border, text) => {
    const sign = el("i");
    [sign.style.background, sign.style.borderColor] = [fill, border];
    return el("span", "", null, sign, text);
  };
  if (words) {
    const most = shapes.reduce((top, item) => (item.open ? top : Math.max(top, item.amount || 0)), 0);
    const { heat: hot, paper } = picture.ink;
    $("colours").replaceChildren(...[0, 0.25, 1].map((part) => swatch(part ? `color-mix(in srgb, ${hot} ${Math.round(6 + 54 * Math.sqrt(part))}%, ${paper})` : paper, hot, part ? words(most * part) : "0")));
    return;
  }
  const there = new Set(shapes.map((item) => item.look));
  const parts = Object.keys(MEANINGS).filter((look) => there.has(look)).map((look) => swatch(picture.looks[look].fill, picture.looks[look].border, MEANINGS[look]));
  const news = DATA.match ? [["erased", "only here"], ["made", "only there"]] : [];
  $("colours").replaceChildren(...parts, ...news.map(([name, text]) => swatch("transparent", picture.ink[name], text)));
}

// ---- selection -----------------------------------------------------------------------------------------------------

/** Everything that a selection stands for in a sheet: nodes, lines, kernels. */
function linked(sheet, selection) {
  const nodes = new Set(), lines = new Set(), kernels = new Set();
  const { replay, record } = sheet;
  if (!selection) return { nodes, lines, kernels };
  const ofNode = (id) => {
    const row = replay.rows.get(id);
    if (row && sheet.source(row)) lines.add(sheet.source(row));
    if (sheet.kernelsOf.has(id)) kernels.add(sheet.kernelsOf.get(id));
  };
  if (selection.type === "node") {
    for (const id of selection.ids || [selection.id]) { nodes.add(id); ofNode(id); }
  } else if (selection.type === "line") {
    lines.add(selection.source);
    for (const row of replay.rows.values()) if (sheet.source(row) === selection.source) nodes.add(row.id);
    for (const number of sheet.lines.get(selection.source)?.kernels || []) kernels.add(number);
  } else if (selection.type === "kernel") {
    const kernel = record.kernels[selection.number];
    kernels.add(selection.number);
    for (const id of [...kernel.callers, ...kernel.nodes]) nodes.add(id);
    for (const line of kernel.lines) lines.add(line);
  } else if (selection.type === "reason") {
    const { candidates } = record.declined[selection.group];
    for (const one of selection.place === undefined ? candidates : [candidates[selection.place]]) {
      for (const id of one.nodes) { nodes.add(id); ofNode(id); }
    }
  }
  return { nodes, lines, kernels };
}

function mark() {
  app.shown.forEach((view, number) => {
    for (const item of view.picture.layout.shapes) item.marked = false;
    const selection = number === app.side ? app.selection : app.other;
    for (const id of linked(view.sheet, selection).nodes) {
      const item = view.tree.drawn.get(id);
      if (item) item.marked = true;
    }
    view.picture.draw();
  });
}

/** Select something; `from` is the view it was selected in. */
function select(selection, { reveal = true, view = app.shown[app.side] } = {}) {
  if (selection && selection.type === "reason" && !DATA.match) {
    const candidate = app.sheet.record.declined[selection.group].candidates[selection.place ?? 0];
    if (candidate.nodes.some((id) => !app.sheet.replay.rows.has(id))) { app.before = false; app.selection = selection; go(candidate.after, false); }
  }
  app.selection = app.other = selection;
  if (DATA.match && selection) {
    app.side = app.shown.indexOf(view);
    app.other = across(selection, app.side);
  }
  mark();
  if (reveal && selection) {
    app.shown.forEach((one) => {
      const items = one.picture.layout.shapes.filter((item) => item.marked);
      if (items.length) one.picture.reveal(items.reduce((a, b) => (b.depth > a.depth ? b : a)));
    });
  }
  follow();
}

// ---- what follows --------------------------------------------------------------------------------------------------

function follow() {
  const { sheet, step } = app, last = sheet.replay.length;
  $("slider").max = last;
  $("slider").value = step;
  $("back").disabled = !step;
  $("forth").disabled = step >= last;
  $("before").disabled = !step;
  $("before").setAttribute("aria-pressed", String(app.before));
  $("where").textContent = step ? `rewrite ${count(step)} of ${count(last)}  ·  --fuel ${step}` : `as captured  ·  ${plural(last, "rewrite")} to come  ·  --fuel 0`;
  tellNews();
  showDetails();
  showSource();
  showKernel();
  leftList();
  remember();
}

function tellNews() {
  const place = $("news"), { sheet, step } = app;
  if (DATA.match) { place.replaceChildren(el("span", "", DATA.summary)); return; }
  if (sheet.trace) { place.replaceChildren(el("span", "", `Every launch in the order of time, ${sheet.trace.slice(1, 3).map((pair) => `${pair[1]} ${pair[0]}`).join(", ")}. What repeats is drawn once.`)); return; }
  if (!step) { place.replaceChildren(el("span", "", `The graph that was captured: ${plural(sheet.launches(0), "launch")}. Step with → or choose a rewrite.`)); return; }
  const delta = sheet.replay.steps[step][0], ids = (key) => (delta[key] || []).length;
  const parts = [el("b", "", delta.pass + (delta.pattern ? ` · ${delta.pattern}` : ""))];
  for (const key of ["made", "changed", "erased"]) if (ids(key)) parts.push(el("span", "dot " + key, `${count(ids(key))} ${key}`));
  parts.push(el("span", "", `${plural(sheet.launches(step), "launch")} now (${signed(-delta.launches_saved)})`));
  if (delta.source) parts.push(lineLink(delta.source));
  place.replaceChildren(...parts);
}

function lineLink(source) {
  return button("link", source, "Show the line", () => select({ type: "line", source }));
}

function nodeLink(id) {
  const row = app.sheet.replay.rows.get(id);
  return row ? button("link", row.name, `${row.target} ${row.value}`, () => select({ type: "node", id })) : el("span", "quiet", `#${id}`);
}

function facts(pairs) {
  const list = el("dl");
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === "") continue;
    list.append(el("dt", "", name), typeof value === "object" ? el("dd", "", null, value) : el("dd", "", value));
  }
  return list;
}

function listed(things, most = 14) {
  const all = el("span");
  things.slice(0, most).forEach((one, i) => all.append(i ? ", " : "", one));
  if (things.length > most) all.append(el("span", "quiet", ` and ${count(things.length - most)} more`));
  return all;
}

function showDetails() {
  const place = $("details"), { selection, sheet } = app;
  const kinds = { node: nodeDetails, line: lineDetails, kernel: kernelDetails, reason: reasonDetails };
  place.replaceChildren(...(selection && kinds[selection.type] ? kinds[selection.type](selection, sheet) : overview(sheet)));
  if (selection && selection.note) place.append(el("h3", "", "From the list"), el("p", "", selection.note));
}

function overview(sheet) {
  if (sheet.trace) return [el("h2", "", "Observed"), facts(sheet.trace)];
  const { before, after, loops } = sheet.report;
  const pair = (a, b, unit) => `${unit === undefined ? count(a) : scaled(a, unit)} → ${unit === undefined ? count(b) : scaled(b, unit)}`;
  const made = [el("h2", "", "Before → after"), facts([["launches", pair(before.launches, after.launches)], ["small operators", pair(before.small_ops, after.small_ops)], ["memory traffic", pair(before.bytes, after.bytes, "B")],
    ["peak memory", pair(before.peak_bytes, after.peak_bytes, "B")], ["arithmetic", pair(before.flops, after.flops, "")]])];
  for (const one of sheet.report.fallbacks || []) made.push(el("h3", "", "Runs eager as it is"), el("p", "", one.reason));
  const held = Object.entries(sheet.report.held || {});
  const unseen = sheet.report.measured && sheet.report.measured.libraries;
  if (held.length) made.push(el("h3", "", "Held at the peak, after"), facts([...held.map(([what, bytes]) => [what, scaled(bytes, "B")]), ["eager's libraries, before", unseen ? `${scaled(unseen, "B")} more, observed` : null]]));
  if (loops.length) {
    made.push(el("h3", "", "Loops"));
    for (const loop of loops) {
      made.push(el("p", "", null, lineLink(loop.source), el("span", "quiet", `  ${count(loop.trip_count)} steps, ${count(loop.launches_per_step_before)} launches a step → ${count(loop.launches_per_step_after)}`)));
      for (const reason of loop.reasons) made.push(el("p", "quiet", reason));
    }
  }
  const { measured, against } = sheet.report;
  if (measured) made.push(el("h3", "", `Measured, medians of ${plural(measured.calls, "call")}, ${plural(measured.threads, "thread")}`), facts([["in launches", `${micro(measured.before.busy)} → ${micro(measured.after.busy)}`], ["first to last", `${micro(measured.before.span)} → ${micro(measured.after.span)}`], ["eager", measured.before.obstacle], ["fuse", measured.after.obstacle]]));
  if (against) {
    const { launches, graphs, obstacle } = against.compile;
    made.push(el("h3", "", "torch.compile"), el("p", "", null, button("link", obstacle ? "failed" : `${plural(launches, "launch")} in ${plural(graphs, "graph")}`, "What it did not fuse, and why", () => openTab("compile"))));
  }
  const declined = sheet.record.declined.length;
  if (declined) made.push(el("p", "", null, button("link", `${plural(declined, "reason")} why something was not fused`, "", () => openTab("declined"))));
  return made;
}

function nodeDetails({ id, ids }, sheet) {
  const row = sheet.replay.rows.get(id);
  if (!row) return [el("p", "quiet", "This operator is not in the graph at this step.")];
  const item = app.shown[app.side].tree.drawn.get(id);
  const place = row.at === undefined ? null : sheet.record.places[row.at];
  const made = [el("h2", "", row.called && item && item.label ? `${row.name} · ${item.label}` : row.name)];
  const users = sheet.trace ? [] : [...sheet.replay.rows.values()].filter((one) => one.uses.includes(id)).map((one) => one.id);
  let used = 0;
  const args = el("span");
  row.args.split("%").forEach((text, i) => { if (i) args.append(nodeLink(row.uses[used++])); args.append(text); });
  const kernel = sheet.kernelsOf.get(id);
  made.push(facts([["kind", sheet.trace ? row.kind : null], ["operator", row.op === "call_function" ? row.target : row.op === "placeholder" ? sheet.record.inputs[row.name] || "input" : ""], ["value", row.value], [sheet.trace ? "after" : "arguments", row.uses.length || row.args ? (row.op === "output" || row.args.length > 400 ? listed(row.uses.map(nodeLink)) : args) : null],
    ["read by", users.length ? listed(users.map(nodeLink)) : null], ["line", place ? lineLink(place.source) : null], ["module", place ? place.module : null],
    ["kernel", kernel !== undefined ? button("link", sheet.record.kernels[kernel].name, "Show the kernel", () => select({ type: "kernel", number: kernel })) : null],
    ["launches", row.launches ? (weights(sheet.replay).get(row.graph) ? count(row.launches) : "none of its own: inside a kernel") : null], ["traffic", row.bytes ? scaled(row.bytes, "B") : null], ["arithmetic", row.flops ? scaled(row.flops) : null],
    ["took", sheet.took(id) !== undefined ? `${micro(sheet.took(id))}, measured` : null], ["pause before it", sheet.pauses.has(id) ? micro(sheet.pauses.get(id)) : null],
    ["shown for", ids && ids.length > 1 ? plural(ids.length, "equal operator") : null]]));
  if (item && app.shown[app.side].tree.canOpen(item)) made.push(el("p", "", null, button("", item.open ? "close" : "open", "(o)", () => toggle(item))));
  const refusals = sheet.declinedOf.get(id) || [];
  if (refusals.length) {
    made.push(el("h3", "", "Tried, and declined"));
    for (const [group, number] of refusals.slice(0, 12)) {
      const { pass, pattern, reason } = sheet.record.declined[group];
      made.push(el("p", "", null, button("link", reason, "Show the candidate", () => select({ type: "reason", group, place: number })), el("span", "quiet", `  ${pattern || pass}`)));
    }
  }
  const touched = sheet.record.rewrites.filter((one) => one.number && ((one.made || []).some((other) => other.id === id) || (one.changed || []).some((other) => other.id === id)));
  if (touched.length) made.push(el("h3", "", "Rewrites"), listed(touched.map((one) => button("link", `#${one.number} ${one.pass}`, "Go there", () => { app.before = false; go(one.number); })), 8));
  return made;
}

function lineDetails({ source }, sheet) {
  const line = sheet.lines.get(source);
  if (!line) return [el("h2", "", source), el("p", "quiet", "No operator comes from this line.")];
  const pair = (key, unit) => `${unit ? scaled(line.before[key], unit) : count(line.before[key])} → ${unit ? scaled(line.after[key], unit) : count(line.after[key])}`;
  const now = [...linked(sheet, app.selection).nodes].filter((id) => sheet.replay.rows.get(id)?.op !== "placeholder");
  const took = (side) => (side.microseconds === undefined ? "not known" : micro(side.microseconds));
  const timed = line.before.microseconds !== undefined || line.after.microseconds !== undefined;
  if (sheet.trace) return [el("h2", "", source), facts([["launches", count(line.before.launches)], ["took", took(line.before)], ["operators", listed(now.map(nodeLink))]])];
  const compiled = sheet.report.against && sheet.report.against.compile;
  return [el("h2", "", source), facts([["launches", pair("launches")], ["measured", timed ? `${took(line.before)} → ${took(line.after)}` : null], ["torch.compile", compiled && !compiled.obstacle ? plural(compiled.lines[source] || 0, "launch") : null],
    ["traffic", pair("bytes", "B")], ["arithmetic", `${scaled(line.before.flops)} → ${scaled(line.after.flops)}`],
    ["kernels", line.kernels.length ? listed(line.kernels.map((number) => button("link", sheet.record.kernels[number].name, "", () => select({ type: "kernel", number })))) : null],
    ["operators now", now.length ? listed(now.map(nodeLink)) : "none"]]), ...reasonsOf(now, sheet), command(`fuse explain ${sheet.report.target} ${source}`)];
}

function reasonsOf(ids, sheet) {
  const groups = new Map();
  for (const id of ids) for (const [group, place] of sheet.declinedOf.get(id) || []) if (!groups.has(group)) groups.set(group, place);
  if (!groups.size) return [];
  return [el("h3", "", "Tried, and declined"), ...[...groups].slice(0, 10).map(([group, place]) => {
    const { pass, pattern, reason } = sheet.record.declined[group];
    return el("p", "", null, button("link", reason, "Show the candidate", () => select({ type: "reason", group, place })), el("span", "quiet", `  ${pattern || pass}`));
  })];
}

function kernelDetails({ number }, sheet) {
  const kernel = sheet.record.kernels[number];
  return [el("h2", "", kernel.name), facts([["called by", listed(kernel.callers.map(nodeLink))], ["lines", listed(kernel.lines.map(lineLink))], ["operators", count(kernel.nodes.length)], ["launches", count(kernel.launches)],
    ["took", kernel.microseconds !== undefined ? `${micro(kernel.microseconds)} in all, measured` : null], ["traffic", scaled(kernel.bytes, "B")], ["arithmetic", scaled(kernel.flops)], ["not generated", kernel.reason || null]])];
}

function command(text) {
  const code = el("code", "", text);
  return el("div", "command", null, code, button("", "copy", "Copy the command", () => navigator.clipboard && navigator.clipboard.writeText(text)));
}

function reasonDetails({ group, place }, sheet) {
  const { pass, pattern, reason, candidates } = sheet.record.declined[group];
  const one = candidates[place ?? 0];
  const made = [el("h2", "", reason), facts([["declined by", pattern ? `${pass}, pattern ${pattern}` : pass], ["candidate", place === undefined ? plural(candidates.length, "candidate") : `${count(place + 1)} of ${count(candidates.length)}`],
    ["line", one.source ? lineLink(one.source) : null], ["operators", listed(one.nodes.map(nodeLink))],
    ["when", button("link", `after ${plural(one.after, "rewrite")}`, "Go there", () => { app.before = false; go(one.after, false); })]])];
  made.push(el("h3", "", "Ask the command"), command(pattern ? `fuse explain ${sheet.report.target} ${pattern}` : `fuse explain ${sheet.report.target} ${one.source || candidates.map((c) => c.source).find(Boolean) || ""}`));
  return made;
}

// ---- source and kernels --------------------------------------------------------------------------------------------

const shownCode = {};

function showSource() {
  const { sheet } = app, { lines } = linked(sheet, app.selection);
  const marked = [...lines].map((source) => sheet.lines.get(source) || sheet.record.places.find((one) => one.source === source)).filter(Boolean);
  const files = Object.keys(sheet.record.files);
  const picker = $("file");
  if (picker.dataset.sheet !== sheet.name) {
    picker.dataset.sheet = sheet.name;
    picker.replaceChildren(...files.map((path) => { const one = el("option", "", path.split("/").pop()); one.value = path; one.title = path; return one; }));
    if (files.length) app.file = files[0];
  }
  const wanted = marked.find((line) => files.includes(line.file));
  if (wanted && !marked.some((line) => line.file === app.file)) app.file = wanted.file;
  if (!files.includes(app.file)) { app.file = files[0]; }
  if (!app.file) { shownCode.source.place.replaceChildren(el("p", "empty", "No source file could be read.")); return; }
  picker.value = app.file;
  const name = app.file.split("/").pop();
  const key = { bytes: "bytes", flops: "flops", measured: "microseconds" }[app.layer] || "launches";
  const told = { launches: count, bytes: (n) => scaled(n, "B"), flops: scaled, microseconds: micro }[key];
  $("source").classList.toggle("wide", key !== "launches");
  $("legend").textContent = `${{ launches: "launches", bytes: "traffic", flops: "arithmetic", microseconds: "measured" }[key]}${sheet.trace ? "" : " before → after"}`;
  shownCode.source.show(sheet.name + app.file + key, sheet.record.files[app.file], (number) => {
    const line = sheet.lines.get(`${name}:${number}`);
    if (!line) return "";
    const [a, b] = [line.before[key], line.after[key]];
    if (!(a || 0) && !(b || 0)) return "·";
    return sheet.trace ? told(a) : `${told(a || 0)} → ${told(b || 0)}`;
  });
  shownCode.source.mark([...lines].filter((source) => source.startsWith(name + ":")).map((source) => Number(source.slice(name.length + 1))));
}

function showKernel() {
  const { sheet } = app, { kernels, lines } = linked(sheet, app.selection), all = sheet.record.kernels;
  $("kernelpane").hidden = !all.length;
  if (!all.length) return;
  const picker = $("kernel");
  if (picker.dataset.sheet !== sheet.name) {
    picker.dataset.sheet = sheet.name;
    picker.replaceChildren(...all.map((kernel, number) => { const one = el("option", "", kernel.callers.length > 1 ? `${kernel.name} and ${kernel.callers.length - 1} more` : kernel.name); one.value = number; return one; }));
    app.kernel = 0;
  }
  if (kernels.size && !kernels.has(app.kernel)) app.kernel = [...kernels][0];
  picker.value = app.kernel;
  const { code, reason } = all[app.kernel];
  shownCode.kernel.show(`${sheet.name}:${app.kernel}`, code || `// runs operator by operator, because ${reason}`, () => undefined);
  const numbers = kernels.has(app.kernel) && app.selection.type !== "kernel" ? shownCode.kernel.lines.flatMap((line, i) => ([...lines].some((source) => line.textContent.includes(source + " ")) ? [i + 1] : [])) : [];
  shownCode.kernel.mark(numbers);
}

// ---- the list at the left ------------------------------------------------------------------------------------------

let list = null;

function openTab(tab) {
  app.tab = tab;
  leftList(true);
}

function leftList(anew = false) {
  const { sheet } = app, findings = DATA.match ? DATA.match.differences : sheet.report.findings;
  $("tab-compile").hidden = Boolean(findings) || !sheet.report.against;
  $("tab-declined").hidden = Boolean(sheet.trace);
  if ($("tab-" + app.tab).hidden) app.tab = "rewrites";
  for (const tab of ["rewrites", "declined", "compile"]) $("tab-" + tab).setAttribute("aria-selected", String(app.tab === tab));
  $("idle").parentElement.hidden = app.tab !== "rewrites" || Boolean(findings);
  const key = [app.tab, app.sheet.name, $("filter").value, $("idle").checked].join("|");
  if (anew || list.key !== key) { list.key = key; list.set(app.tab === "compile" ? findingRows(compileFindings(sheet)) : app.tab === "declined" ? declinedRows() : findings ? findingRows(findings) : rewriteRows()); }
  const { selection } = app;
  if (app.tab === "compile" || (app.tab === "rewrites" && findings)) list.choose((row) => selection && row.selection && row.selection === selection.row);
  else if (app.tab === "rewrites") list.choose((row) => row.number === app.step && row.type === "rewrite");
  else list.choose((row) => selection && selection.type === "reason" && row.type === (selection.place === undefined ? "reason" : "candidate") && row.group === selection.group && row.place === selection.place);
}

function rewriteRows() {
  const { record } = app.sheet, wanted = $("filter").value.trim().toLowerCase(), rows = [];
  const names = new Map(record.start.map((row) => [row.id, row.name]));
  const by = new Map(app.sheet.report.passes.map((name) => [name, []]));
  for (const one of record.rewrites) {
    for (const row of one.made || []) names.set(row.id, row.name);
    if (!one.number) continue;
    const what = (one.nodes || []).slice(0, 4).map((id) => names.get(id)).filter(Boolean).join(", ") + ((one.nodes || []).length > 4 ? ", …" : "");
    const text = one.pattern ? `${one.pattern}  ${what}` : what;
    if (wanted && !`${one.pass} ${text} ${one.source} #${one.number}`.toLowerCase().includes(wanted)) continue;
    if (!by.has(one.pass)) by.set(one.pass, []);
    by.get(one.pass).push({ type: "rewrite", number: one.number, text, source: one.source, saved: one.launches_saved });
  }
  const declined = new Map();
  for (const one of record.declined) declined.set(one.pass, (declined.get(one.pass) || 0) + one.candidates.length);
  rows.push({ type: "rewrite", number: 0, text: "as captured", saved: 0 });
  for (const [name, some] of by) {
    const idle = !some.length;
    if (idle && (!$("idle").checked || (wanted && !name.includes(wanted)))) continue;
    rows.push({ type: "pass", text: name, count: some.length, saved: some.reduce((sum, one) => sum + one.saved, 0), declined: declined.get(name) || 0, first: some[0] });
    rows.push(...some);
  }
  return rows;
}

function declinedRows() {
  const { record } = app.sheet, wanted = $("filter").value.trim().toLowerCase(), rows = [];
  const by = new Map();
  record.declined.forEach((one, group) => {
    if (wanted && !`${one.pass} ${one.pattern || ""} ${one.reason} ${one.candidates.map((c) => c.source).join(" ")}`.toLowerCase().includes(wanted)) return;
    if (!by.has(one.pass)) by.set(one.pass, []);
    by.get(one.pass).push({ type: "reason", group, text: (one.pattern ? `${one.pattern}: ` : "") + one.reason, count: one.candidates.length });
  });
  for (const [name, some] of by) {
    rows.push({ type: "pass", text: name, declined: some.reduce((sum, one) => sum + one.count, 0) });
    for (const one of some) {
      rows.push(one);
      const open = app.selection && app.selection.type === "reason" && app.selection.group === one.group;
      if (open) record.declined[one.group].candidates.slice(0, 400).forEach((candidate, place) => rows.push({ type: "candidate", group: one.group, place, text: candidate.source || "no line", beside: plural(candidate.nodes.length, "operator") }));
    }
  }
  return rows.length ? rows : [{ type: "none", text: wanted ? "nothing found" : "nothing was declined" }];
}

/** A line without its file, where there is only one. */
function shortLine(source) {
  return source && Object.keys(app.sheet.record.files).length === 1 ? source.slice(source.lastIndexOf(":")) : source || "";
}

function makeRow(row) {
  if (row.type === "pass") {
    const saved = row.count ? el("span", row.saved > 0 ? "saved good" : row.saved < 0 ? "saved bad" : "saved", row.saved ? signed(-row.saved) : "") : null;
    return el("div", "head", null, el("span", "grow", row.text), row.count ? el("span", "beside", `${count(row.count)} ×`) : null, saved, row.count === undefined || !row.count ? el("span", "beside", row.declined ? `${count(row.declined)} declined` : "nothing") : null);
  }
  if (row.type === "rewrite") {
    const made = el("div", "", null, el("span", "fuel", row.number ? `${row.number}` : ""), el("span", "grow", row.text), el("span", "beside", shortLine(row.source)), el("span", row.saved > 0 ? "saved good" : row.saved < 0 ? "saved bad" : "saved", row.saved ? signed(-row.saved) : ""));
    made.title = `${row.text}  ${row.source || ""}`;
    return made;
  }
  const made = el("div", row.type === "candidate" ? "inner" : "", null, el("span", "grow", row.text), el("span", "beside", row.count ? `${count(row.count)} ×` : row.beside || ""));
  made.title = row.text;
  return made;
}

function pickRow(row) {
  if (row.type === "rewrite") { app.before = false; go(row.number); }
  else if (row.type === "pass" && row.first) { app.before = false; go(row.first.number); }
  else if (row.type === "reason" || row.type === "candidate") { select({ type: "reason", group: row.group, place: row.place }); leftList(true); }
  else if (row.selection) select({ ...row.selection, row: row.selection }, { view: app.shown[row.side || 0] });
}

// ---- the picture ---------------------------------------------------------------------------------------------------

function toggle(item) {
  app.chosen.set(item.key, !item.open);
  rebuild();
  remember();
}

function pick(item, view) {
  if (!item || item === view.tree.root) { select(null); return; }
  if (item.row) select({ type: "node", id: item.id, ids: item.row.called ? [item.id] : item.count > 1 ? item.ids : undefined }, { reveal: false, view });
  else { const first = item.ids.find((id) => view.sheet.replay.rows.has(id)); select({ type: "node", id: first, ids: item.ids }, { reveal: false, view }); app.box = item; }
}

/** The next or previous drawn operator, for the keyboard. */
function walk(by) {
  const view = app.shown[0], shapes = view.picture.layout.shapes.filter((item) => item.row);
  const at = shapes.findIndex((item) => item.marked);
  const item = shapes[Math.min(Math.max(at < 0 ? 0 : at + by, 0), shapes.length - 1)];
  if (item) { pick(item, view); view.picture.reveal(item); }
}

// ---- search --------------------------------------------------------------------------------------------------------

function found(text) {
  const wanted = text.trim().toLowerCase(), { sheet } = app, results = [];
  if (!wanted) return results;
  const most = 60;
  const add = (sort, label, beside, act) => results.push({ sort, label, beside, act });
  for (const line of sheet.record.lines) {
    if (results.length < 20 && `${line.source} ${line.text}`.toLowerCase().includes(wanted)) add("line", `${line.source}  ${line.text}`, `${count(line.before.launches)} → ${count(line.after.launches)}`, () => select({ type: "line", source: line.source }));
  }
  sheet.record.kernels.forEach((kernel, number) => {
    if (results.length < 40 && (kernel.name.toLowerCase().includes(wanted) || kernel.callers.some((id) => sheet.replay.rows.get(id)?.name.includes(wanted)))) add("kernel", kernel.name, plural(kernel.nodes.length, "operator"), () => select({ type: "kernel", number }));
  });
  sheet.record.declined.forEach((one, group) => {
    if (results.length < 50 && `${one.reason} ${one.pattern || ""} ${one.pass}`.toLowerCase().includes(wanted)) add("reason", one.reason, one.pattern || one.pass, () => { openTab("declined"); select({ type: "reason", group }); leftList(true); });
  });
  let more = 0;
  for (const row of sheet.replay.rows.values()) {
    if (!row.name.toLowerCase().includes(wanted) && !row.target.toLowerCase().includes(wanted)) continue;
    if (results.length < most) add("operator", `${row.name}  ${row.value}`, sheet.source(row), () => select({ type: "node", id: row.id }));
    else more += 1;
  }
  if (more) add("", `${count(more)} more operators`, "", null);
  return results;
}

function showResults() {
  const place = $("results"), results = found($("search").value);
  place.hidden = !$("search").value.trim();
  app.results = results.filter((one) => one.act);
  app.result = 0;
  place.replaceChildren(...results.map((one, i) => {
    const row = el("div", "result" + (i ? "" : " current"), null, el("span", "sort", one.sort), el("span", "", one.label), el("span", "beside", one.beside));
    row.setAttribute("role", "option");
    if (one.act) row.addEventListener("mousedown", (event) => { event.preventDefault(); takeResult(i); });
    return row;
  }), ...(results.length ? [] : [el("div", "empty", "Nothing found.")]));
}

function takeResult(i) {
  const one = app.results[i];
  $("results").hidden = true;
  $("search").blur();
  if (one) one.act();
}

function searchKeys(event) {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (by) {
    const rows = [...$("results").children];
    app.result = Math.min(Math.max(app.result + by, 0), app.results.length - 1);
    rows.forEach((row, i) => row.classList.toggle("current", i === app.result));
    rows[app.result]?.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  } else if (event.key === "Enter") takeResult(app.result);
  else if (event.key === "Escape") { event.target.value = ""; showResults(); event.target.blur(); }
  event.stopPropagation();
}

// ---- the address ---------------------------------------------------------------------------------------------------

const remember = soon(() => {
  const said = new URLSearchParams();
  const { selection } = app;
  if (!DATA.match && app.step !== app.sheet.replay.length) said.set("step", app.step);
  if (app.sheets.indexOf(app.sheet) && !DATA.match) said.set("sheet", app.sheets.indexOf(app.sheet));
  if (selection) said.set("select", { node: () => `node.${selection.id}`, line: () => `line.${selection.source}`, kernel: () => `kernel.${selection.number}`, reason: () => `reason.${selection.group}${selection.place === undefined ? "" : "." + selection.place}` }[selection.type]());
  if (app.layer !== "kind") said.set("layer", app.layer);
  if (app.showViews) said.set("views", "1");
  if (app.all) said.set("all", "1");
  if (app.before) said.set("before", "1");
  if (app.tab !== "rewrites") said.set("tab", app.tab);
  for (const [key, open] of app.chosen) said.append(open ? "open" : "close", key);
  const { x, y, zoom } = app.shown[0].picture.camera;
  if (app.moved) said.set("view", [x, y].map(Math.round).concat(zoom.toFixed(3)).join(","));
  const text = said.toString();
  app.written = text ? "#" + text : "";
  if (location.hash !== app.written) history.replaceState(null, "", app.written || location.pathname + location.search);
});

function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  app.chosen = new Map([...said.getAll("open").map((key) => [key, true]), ...said.getAll("close").map((key) => [key, false])]);
  app.layer = app.sheets[0].layers.some(([name]) => name === said.get("layer")) ? said.get("layer") : "kind";
  app.showViews = said.has("views");
  app.all = said.has("all");
  app.tab = ["declined", "compile"].includes(said.get("tab")) ? said.get("tab") : "rewrites";
  $("layer").value = app.layer;
  $("views").checked = app.showViews;
  if (!DATA.match) app.shown[0].sheet = app.sheets[Number(said.get("sheet"))] || app.sheets[0];
  const step = said.has("step") ? Number(said.get("step")) : app.sheet.replay.length;
  app.before = said.has("before") && step > 0;
  const [type, ...rest] = (said.get("select") || "").split(".");
  const { record, replay } = app.sheet, number = Number(rest[0]);
  app.selection = { node: () => (record.start.length && Number.isInteger(number) ? { type, id: number } : null), line: () => ({ type, source: rest.join(".") }), kernel: () => (record.kernels[number] ? { type, number } : null),
    reason: () => (record.declined[number] && (rest[1] === undefined || record.declined[number].candidates[rest[1]]) ? { type, group: number, place: rest[1] === undefined ? undefined : Number(rest[1]) } : null) }[type]?.() || null;
  app.other = app.selection;
  go(Number.isFinite(step) ? step : replay.length, false);
  const [x, y, zoom] = (said.get("view") || "").split(",").map(Number);
  const { picture } = app.shown[0];
  if (zoom > 0) { picture.camera = { x, y, zoom }; app.moved = true; picture.draw(); } else for (const view of app.shown) view.picture.fit(READABLE);
}

// ---- begin ---------------------------------------------------------------------------------------------------------

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  for (const view of app.shown) { view.picture.theme(); if (view.tree) heat(view); }
}

function setLayer(name) {
  app.layer = name;
  $("layer").value = name;
  for (const view of app.shown) heat(view);
  showSource();
  remember();
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, input[type=search], dialog[open]")) return;
  const { picture, tree } = app.shown[0], step = app.step;
  const inList = event.target === $("list");
  const stepBy = (by) => { app.before = false; go(step + by); };
  const acts = {
    ArrowLeft: () => stepBy(-1), ArrowRight: () => stepBy(1), "/": () => { $("search").focus(); $("search").select(); }, f: () => { app.moved = false; for (const view of app.shown) view.picture.fit(); },
    "+": () => picture.zoomBy(1.25), "=": () => picture.zoomBy(1.25), "-": () => picture.zoomBy(0.8), b: () => flip(), a: () => openAll(), v: () => $("views").click(), n: () => walk(1), p: () => walk(-1), "?": () => $("help").click(), Escape: () => select(null),
    o: () => { const item = app.box && app.box.marked ? app.box : app.selection && tree.drawn.get(app.selection.id); if (item && tree.canOpen(item)) toggle(item); },
    ...(inList ? { ArrowDown: () => moveInList(1), ArrowUp: () => moveInList(-1), Enter: () => list.rows[list.current] && pickRow(list.rows[list.current]) } : {}),
  };
  const layer = app.sheet.layers[Number(event.key) - 1];
  const act = layer ? () => setLayer(layer[0]) : acts[event.key];
  if (!act || (event.target.type === "range" && event.key.startsWith("Arrow"))) return;
  event.preventDefault();
  act();
}

function moveInList(by) {
  let at = list.current;
  do at += by; while (list.rows[at] && list.rows[at].type === "pass");
  if (list.rows[at]) pickRow(list.rows[at]);
}

function openAll() {
  app.all = !app.all;
  app.chosen.clear();
  rebuild();
  remember();
}

function flip() {
  const { step } = app;
  if (!step || DATA.match) return;
  app.before = !app.before;
  go(step, false);
}

function begin() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.classList.toggle("dark", dark.matches);
  for (const sheet of DATA.match ? app.sheets : app.sheets.slice(0, 1)) {
    const canvas = el("canvas"), frame = el("div", "picture", null, canvas, DATA.match ? el("div", "name", sheet.name) : null);
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "The graph; n and p walk through its operators");
    $("pictures").append(frame);
    const view = { sheet };
    view.picture = new Picture(canvas, sheet, { picked: (item) => pick(item, view), toggled: toggle, moved: () => { app.moved = true; remember(); } });
    app.shown.push(view);
    view.picture.resize();
  }
  $("title").textContent = DATA.title;
  document.title = DATA.title;
  const { before, after, device } = app.sheets[0].report;
  const trace = app.sheets[0].trace;
  $("summary").append(...(DATA.match ? [DATA.summary] : trace ? [el("b", "", count(before.launches)), ` launches on ${device}, observed`] : [el("b", "", count(before.launches)), " → ", el("b", "", count(after.launches)), " launches   ·   ", el("b", "", scaled(before.bytes, "B")), " → ", el("b", "", scaled(after.bytes, "B")), ` memory traffic   ·   ${device}, predicted`]));
  if (DATA.match || trace) {
    $("tab-rewrites").textContent = DATA.match ? "Differences" : "Launches";
    for (const id of ["back", "slider", "forth", "before", "where"]) $(id).hidden = true;
  }
  if (DATA.sheet) $("sheets").firstChild.textContent = `${DATA.sheet} `;
  $("sheets").hidden = Boolean(DATA.match) || app.sheets.length < 2;
  const options = (place, pairs) => place.replaceChildren(...pairs.map(([value, text]) => { const one = el("option", "", text); one.value = value; return one; }));
  options($("sheet"), app.sheets.map((sheet, number) => [number, sheet.name]));
  options($("layer"), app.sheet.layers);
  shownCode.source = new Listing($("source"), (number) => { const source = `${app.file.split("/").pop()}:${number}`; if (app.sheet.lines.has(source)) select({ type: "line", source }); });
  shownCode.kernel = new Listing($("code"), (number) => {
    const source = [...app.sheet.lines.keys()].find((one) => shownCode.kernel.lines[number - 1].textContent.includes(one + " "));
    if (source) select({ type: "line", source });
  });
  list = new List($("list"), 26, makeRow, pickRow);
  const on = (id, kind, act) => $(id).addEventListener(kind, act);
  on("back", "click", () => { const { step } = app; app.before = false; go(step - 1); });
  on("forth", "click", () => { const { step } = app; app.before = false; go(step + 1); });
  on("slider", "input", soon(() => { app.before = false; go(Number($("slider").value)); }));
  on("before", "click", flip);
  on("in", "click", () => app.shown[0].picture.zoomBy(1.25));
  on("out", "click", () => app.shown[0].picture.zoomBy(0.8));
  on("fit", "click", () => { app.moved = false; for (const view of app.shown) view.picture.fit(); remember(); });
  on("sheet", "change", () => { app.shown[0].sheet = app.sheets[Number($("sheet").value)]; app.selection = null; app.file = null; go(app.sheet.replay.length, false); app.shown[0].picture.fit(READABLE); });
  on("layer", "change", () => setLayer($("layer").value));
  on("views", "change", () => { app.showViews = $("views").checked; rebuild(); remember(); });
  on("search", "input", showResults);
  on("search", "focus", showResults);
  on("search", "blur", () => { $("results").hidden = true; });
  on("search", "keydown", searchKeys);
  on("filter", "input", () => leftList());
  on("idle", "change", () => leftList());
  on("tab-rewrites", "click", () => openTab("rewrites"));
  on("tab-declined", "click", () => openTab("declined"));
  on("tab-compile", "click", () => openTab("compile"));
  on("file", "change", () => { app.file = $("file").value; app.selection = null; select(null); });
  on("kernel", "change", () => { app.kernel = Number($("kernel").value); select({ type: "kernel", number: app.kernel }); });
  on("theme", "click", () => setTheme(!document.documentElement.classList.contains("dark")));
  on("help", "click", () => $("keys").showModal());
  $("keys").append(el("h2", "", "Keys"), Object.assign(el("dl"), {}));
  for (const [key, does] of KEYS) $("keys").lastChild.append(el("dt", "", key), el("dd", "", does));
  on("keys", "click", () => $("keys").close());
  dark.addEventListener("change", (event) => setTheme(event.matches));
  addEventListener("keydown", keys);
  addEventListener("hashchange", () => { if (location.hash !== app.written) recall(); });
  addEventListener("beforeprint", () => { for (const view of app.shown) { view.picture.fit(); view.picture.paint(Infinity); } });
  recall();
  window.fuseViewer = app;
  document.documentElement.dataset.ready = "1";
}
