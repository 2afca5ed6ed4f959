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

function differenceRows() {
  const wanted = $("filter").value.trim().toLowerCase(), rows = [];
  for (const { title, rows: some } of DATA.match.differences) {
    const shown = some.filter((one) => !wanted || one.text.toLowerCase().includes(wanted));
    if (!shown.length) continue;
    rows.push({ type: "pass", text: title, declined: 0, count: shown.length, saved: 0 });
    for (const one of shown) rows.push({ type: "difference", text: one.text, beside: one.beside, selection: one.select, side: one.side });
  }
  return rows.length ? rows : [{ type: "none", text: "the two do not differ" }];
}
