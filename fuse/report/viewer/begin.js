// Keys, buttons, and the first picture.

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

begin();
