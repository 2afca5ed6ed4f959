// One selection in all panels: what a node, a line, a kernel or a reason is linked with.

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
