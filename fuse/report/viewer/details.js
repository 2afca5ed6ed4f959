// The panel that tells of the selection: facts, links, reasons, and the rewrite that is looked at.

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
