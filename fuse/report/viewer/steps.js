// From one rewrite to the next: the graph is replayed, and what changed is marked.

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
