// Source and kernel at the right, the list at the left, and clicks into the picture.

// ---- source and kernels -----------------------------------------------------------------------------------------------

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

// ---- the list at the left ----------------------------------------------------------------------------------------------

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

// ---- the picture -------------------------------------------------------------------------------------------------------

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
