// The state of the page is in its address, so that a link opens it again.

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
