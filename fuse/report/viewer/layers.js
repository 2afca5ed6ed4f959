// A figure on each box of the picture: launches, bytes, time, memory held at the peak; and the legend.

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
