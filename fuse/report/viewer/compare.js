// Two reports side by side: operators of one line that are one operator in both are selected together.

const toOther = DATA.match ? [new Map(DATA.match.nodes), new Map(DATA.match.nodes.map(([a, b]) => [b, a]))] : null;
const lineToOther = DATA.match ? [new Map(DATA.match.lines), new Map(DATA.match.lines.map(([a, b]) => [b, a]))] : null;

/** What a selection made in one report is in the other; null where it is nothing there. */
function across(selection, side) {
  if (selection.type === "node") {
    const ids = (selection.ids || [selection.id]).map((id) => toOther[side].get(id)).filter((id) => id !== undefined);
    return ids.length ? { type: "node", id: ids[0], ids } : null;
  }
  if (selection.type === "line") return lineToOther[side].has(selection.source) ? { type: "line", source: lineToOther[side].get(selection.source) } : null;
  return null;
}

/** Operators that only one of the two has. */
function differences(view) {
  const side = app.shown.indexOf(view), known = toOther[side];
  for (const row of view.sheet.replay.rows.values()) {
    if (row.op === "placeholder" || row.op === "output" || known.has(row.id)) continue;
    const item = view.tree.drawn.get(row.id);
    if (item) item.news = side ? "made" : "erased";
  }
}

/** Titled groups of findings, each a selection: what differs, what a trace shows, what torch.compile did. */
function findingRows(groups) {
  const wanted = $("filter").value.trim().toLowerCase(), rows = [];
  for (const { title, rows: some } of groups) {
    const shown = some.filter((one) => !wanted || one.text.toLowerCase().includes(wanted));
    if (!shown.length) continue;
    rows.push({ type: "pass", text: title, declined: 0, count: shown.length, saved: 0 });
    for (const one of shown) rows.push({ type: "difference", text: one.text, beside: one.beside, selection: one.select && { ...one.select, note: `${title}: ${one.text}` }, side: one.side });
  }
  return rows.length ? rows : [{ type: "none", text: wanted ? "nothing found" : DATA.match ? "the two do not differ" : "nothing" }];
}

/** What torch.compile launches, where it broke the graph, and what it did not fuse. */
function compileFindings(sheet) {
  const { kernels, breaks, refusals, obstacle, launches } = sheet.report.against.compile;
  if (obstacle) return [{ title: "torch.compile failed", rows: [{ text: obstacle }] }];
  const line = (source) => (source && sheet.lines.has(source) ? { type: "line", source } : null);
  const alike = new Map();
  for (const kernel of kernels) {
    const key = `${kernel.name.replace(/_\d+$/, "")}  ${kernel.lines.join(", ")}`;
    if (!alike.has(key)) alike.set(key, { ...kernel, launches: 0 });
    alike.get(key).launches += kernel.launches;
  }
  return [
    { title: "the graph is broken at", rows: breaks.map((one) => ({ text: `${one.source}  ${one.reason}`, beside: "", select: line(one.source) })) },
    { title: "pairs not fused, because", rows: refusals.map((one) => ({ text: `${one.reason}  ${one.lines.slice(0, 2).join(", ")}`, beside: `${count(one.count)} ×`, select: line(one.lines[0]) })) },
    { title: `${count(launches)} launches`, rows: [...alike].map(([text, one]) => ({ text, beside: `${count(one.launches)} ×`, select: line(one.lines[0]) })) },
  ];
}
