// What is drawn of a graph: operators, and boxes around modules, repeated steps, loops and fused groups.
//
//   ordered nodes  ->  runs of one module are boxes  ->  what repeats is one box "x 64"  ->  boxes open and closed
//
// A box is a stretch of the program order, so that data never flows out of it and in again.

const MOST_DRAWN = 130; // boxes open by themselves up to so many things in the picture
const LONG_PERIOD = 8;

class Tree {
  /** `chosen` maps the key of a box to whether the user has opened (true) or closed (false) it. */
  constructor(sheet, chosen, showViews) {
    this.sheet = sheet;
    this.replay = sheet.replay;
    this.chosen = chosen;
    this.showViews = showViews;
    this.drawn = new Map(); // node -> the item that shows it
    this.through = new Map(); // hidden node -> nodes shown in its place
    this.users = new Map();
    this.seen = new Map();
    this.root = { key: "root", kind: "root", label: "", parent: null, open: true, depth: 0, ids: [] };
    this.root.items = this.itemsOf(0, null);
    this.link(this.root);
    this.openSome();
    this.settle(this.root);
  }

  row(id) { return this.replay.rows.get(id); }

  module(id) {
    const at = this.row(id).at;
    return at === undefined ? null : this.sheet.record.places[at].module;
  }

  hidden(row, called) {
    if (row.op === "placeholder") {
      if (!called) return row.graph === 0 && (this.sheet.record.inputs[row.name] || "argument") !== "argument";
      return !this.isStep(row, called);
    }
    if (row.op === "output") return Boolean(called);
    if (row.op === "get_attr" || row.target === "getitem") return true;
    return row.op === "call_function" && !row.launches && !this.showViews && (row.kind === "view" || !row.uses.length);
  }

  /** Whether an input of a loop's body is a state or read anew in each step. */
  isStep(row, called) {
    if (called.kind !== "loop") return false;
    const place = called.inputs.indexOf(row.id);
    return place < called.carries + called.reads.length;
  }

  /** The items of a graph; `called` is what the node says that runs it. */
  itemsOf(graph, called) {
    const order = this.replay.sorted(graph), leaves = [];
    if (called) called = { ...called, inputs: order.filter((id) => this.row(id).op === "placeholder") };
    let path = [];
    for (const id of order) {
      const row = this.row(id);
      const sources = [];
      for (const used of row.uses) {
        for (const shown of this.through.get(used) || []) if (!sources.includes(shown)) sources.push(shown);
      }
      if (this.hidden(row, called)) {
        this.through.set(id, row.op === "placeholder" ? [] : sources);
        continue;
      }
      if (row.kind === "view" && !sources.length && row.uses.length) { this.through.set(id, []); continue; } // of a weight
      this.through.set(id, [id]);
      const module = this.module(id);
      if (module !== null) path = module ? module.split(".") : [];
      const apart = row.op === "placeholder" || row.op === "output";
      leaves.push(this.leaf(row, apart ? [] : path, sources, called));
    }
    const items = this.folded(called ? leaves : this.grouped(leaves, 0));
    if (called && called.kind === "loop") this.carried(order, called);
    return items;
  }

  leaf(row, path, sources, called) {
    const item = { key: "n" + row.id, kind: "node", id: row.id, ids: [row.id], row, path, sources, count: 1, items: null };
    const memo = (row.memo = row.memo || { label: shortName(row), token: row.called ? 0 : this.tokenOf([row.target.replace(/_\d+$/, ""), row.value, row.at, row.op].join("|")) });
    item.label = memo.label;
    item.detail = row.value;
    item.look = row.op === "placeholder" ? "input" : row.op === "output" ? "output" : row.launches || row.called ? row.kind || "other" : "view";
    if (called && row.op === "placeholder") {
      const place = called.inputs.indexOf(row.id);
      item.label = place < called.carries ? `state: ${row.name}` : `each step: ${row.name}`;
    }
    if (row.called && row.called.graph >= 0) this.asBox(item, row);
    item.token = memo.token || this.tokenOf([row.target.replace(/_\d+$/, ""), row.value, row.at, row.op, item.inner || 0].join("|"));
    this.drawn.set(row.id, item);
    return item;
  }

  /** Make a box of a node that calls a graph; what is inside is read when it is opened. */
  asBox(item, row) {
    const { kind, graph, steps } = row.called;
    item.kind = item.look = kind === "ends" ? "loop" : kind === "matched" || kind === "module" ? "region" : kind;
    const inside = this.inside(graph);
    item.inner = inside.length;
    item.ids = [row.id, ...inside];
    const operators = this.operatorsIn(graph);
    if (kind === "loop") {
      item.steps = steps;
      const each = row.called.persistent ? 0 : this.launchesIn(graph);
      const all = row.launches + each * steps;
      item.label = `loop × ${count(steps)}`;
      item.formula = each ? `${row.launches ? count(row.launches) + " + " : ""}${count(each)} × ${count(steps)} = ${plural(all, "launch")}` : `${count(operators)} operators a step, ${plural(all, "launch")} in all`;
    } else {
      item.label = kind === "ends" ? "loop with its ends" : `fused ${count(operators)} → 1`;
    }
    item.lazy = () => this.itemsOf(graph, row.called);
  }

  /** All nodes in a graph and in those that it calls. */
  inside(graph) {
    const found = [];
    for (const id of this.replay.nodes(graph)) {
      found.push(id);
      const called = this.row(id).called;
      if (called && called.graph >= 0) found.push(...this.inside(called.graph));
    }
    return found;
  }

  operatorsIn(graph) {
    return this.inside(graph).filter((id) => this.row(id).op === "call_function" && this.row(id).launches).length;
  }

  launchesIn(graph) {
    let total = 0;
    for (const id of this.replay.nodes(graph)) total += launchesOf(this.replay, id);
    return total;
  }

  carried(order, called) {
    const output = order.map((id) => this.row(id)).find((row) => row.op === "output");
    for (let i = 0; output && i < called.carries; i += 1) {
      const from = (this.through.get(output.uses[i]) || [])[0], to = called.inputs[i];
      const item = this.drawn.get(to);
      if (item && from !== undefined) (item.back = item.back || []).push(from);
    }
  }

  /** A number for a text, the same at every step. */
  tokenOf(text) {
    const { tokens } = this.sheet;
    let token = tokens.get(text);
    if (!token) tokens.set(text, (token = tokens.size + 1));
    return token;
  }

  /** Boxes around runs of leaves of one module. */
  grouped(leaves, depth) {
    const items = [];
    for (let i = 0; i < leaves.length;) {
      const name = leaves[i].path[depth];
      let end = i + 1;
      while (name !== undefined && end < leaves.length && leaves[end].path[depth] === name) end += 1;
      if (name === undefined || end - i === 1) { items.push(leaves[i]); i += 1; continue; }
      items.push(this.box("module", name, leaves[i].path.slice(0, depth + 1).join("."), this.grouped(leaves.slice(i, end), depth + 1)));
      i = end;
    }
    return items;
  }

  box(kind, label, path, items) {
    if (kind === "module" && items.length === 1 && items[0].kind === "module") {
      items[0].label = `${label}.${items[0].label}`;
      return items[0];
    }
    const number = this.seen.get(kind + path) || 0;
    this.seen.set(kind + path, number + 1);
    const folded = kind === "module" ? this.folded(items) : items;
    const item = { key: `${kind[0]}:${path}#${number}`, kind, look: kind, label, count: 1, items: folded, ids: folded.flatMap((one) => one.ids) };
    item.token = this.tokenOf(`${kind}|${label.replace(/\d+/g, "")}|${folded.map((one) => one.token).join(",")}`);
    return item;
  }

  /** What repeats, shown once: steps of an unrolled loop, equal layers. */
  folded(items) {
    const parts = fold(items.map((item) => item.token), 0, items.length);
    const place = (all) => all.map((part) => {
      if (typeof part === "number") return items[part];
      const first = items.slice(part.start, part.start + part.period);
      for (let step = 1; step < part.count; step += 1) {
        for (let i = 0; i < part.period; i += 1) this.standsFor(first[i], items[part.start + step * part.period + i]);
      }
      if (part.period === 1 && first[0].kind === "node") { first[0].count = part.count; return first[0]; }
      const box = this.box("repeat", `× ${count(part.count)}`, first[0].key, place(part.body));
      box.count = part.count;
      return box;
    });
    return place(parts);
  }

  /** `item` shows what `other`, its equal, would. */
  standsFor(item, other) {
    for (const id of other.ids) item.ids.push(id);
    if (item.items && other.items) {
      item.items.forEach((one, i) => other.items[i] && this.standsFor(one, other.items[i]));
    } else {
      for (const [id, shown] of [...other.ids.map((id) => [id, this.drawn.get(id)])]) if (!shown || shown === other) this.drawn.set(id, item);
    }
    if (other.row) this.drawn.set(other.row.id, item);
  }

  link(box) {
    (box.items || []).forEach((item, place) => {
      item.place = place;
      item.parent = box;
      item.depth = box.depth + 1;
      this.link(item);
    });
  }

  canOpen(item) { return Boolean(item.items || item.lazy); }

  fill(item) {
    if (!item.items && item.lazy) {
      item.items = item.lazy();
      this.link(item);
    }
  }

  /** Open what the user opened, and the outer boxes as long as the picture stays small. */
  openSome() {
    let drawn = this.root.items.length;
    let level = this.root.items;
    while (level.length) {
      const deeper = [];
      for (const item of level) {
        if (!this.canOpen(item)) continue;
        const wish = this.chosen.get(item.key);
        const size = item.items ? item.items.length : item.inner;
        if (wish === false || (wish !== true && drawn + size > MOST_DRAWN)) { item.open = false; continue; }
        this.fill(item);
        item.open = true;
        drawn += item.items.length;
        deeper.push(...item.items);
      }
      level = deeper;
    }
  }

  /** Let closed boxes show what is in them, and every node know what it is shown by. */
  settle(box) {
    for (const item of box.items) {
      if (item.open) this.settle(item);
      if (item.kind === "node" && !item.row.called) continue;
      for (const id of item.ids) if (!item.open || !this.isShown(this.drawn.get(id))) this.drawn.set(id, item);
    }
  }

  number(box, from) {
    for (const item of box.items || []) {
      item.number = from;
      from = this.number(item, from + 1);
    }
    return from;
  }

  isShown(item) {
    for (let at = item; at; at = at.parent) {
      if (at === this.root) return true;
      if (!at.parent || !at.parent.open) return false;
    }
    return false;
  }

  /** The pairs of items of one box between which data flows; `back`: to the next step. */
  edges() {
    const found = new Map();
    this.number(this.root, 0);
    const note = (from, to, back) => {
      let a = this.drawn.get(from), b = this.drawn.get(to);
      if (!a || !b || a === b) return;
      while (a.depth > b.depth) a = a.parent;
      while (b.depth > a.depth) b = b.parent;
      while (a && b && a.parent !== b.parent) { a = a.parent; b = b.parent; }
      if (!a || !b || a === b) return;
      const key = a.number * 67108864 + b.number;
      if (!found.has(key)) found.set(key, { from: this.drawn.get(from), to: this.drawn.get(to), a, b, back: back || a.place > b.place });
    };
    const visit = (box) => {
      for (const item of box.items) {
        if (item.row) for (const source of item.sources) note(source, item.id, false);
        if (item.row && item.back) for (const source of item.back) note(source, item.id, true);
        if (item.open || (item.items && item.kind !== "node")) visit(item);
      }
    };
    visit(this.root);
    return [...found.values()];
  }
}

/** Launches of one node, with all steps of a loop that is launched step by step. */
function launchesOf(replay, id) {
  const row = replay.rows.get(id);
  let total = row.launches;
  if (row.called && row.called.kind === "loop" && !row.called.persistent && row.called.graph >= 0) {
    for (const inner of replay.nodes(row.called.graph)) total += row.called.steps * launchesOf(replay, inner);
  }
  return total;
}

/** Positions of tokens with each repetition as {start, period, count, body}, as fuse/report/repeats.py finds them. */
function fold(tokens, start, stop) {
  const following = new Map(), seen = new Map(), ends = new Map(), parts = [];
  for (let i = stop - 1; i >= start; i -= 1) {
    following.set(i, seen.has(tokens[i]) ? seen.get(tokens[i]) : stop);
    seen.set(tokens[i], i);
  }
  const endOf = (at, period) => {
    if (at + period <= (ends.get(period) || 0)) return ends.get(period);
    let end = at + period;
    while (end < stop && tokens[end] === tokens[end - period]) end += 1;
    ends.set(period, end);
    return end;
  };
  for (let at = start; at < stop;) {
    let best = null, second = at;
    for (let tried = 0; tried < 16; tried += 1) {
      second = following.get(second);
      if (second === undefined) break;
      const period = second - at;
      if (at + 2 * period > stop) break;
      const times = Math.floor((endOf(at, period) - at) / period);
      const least = period === 1 ? 4 : period >= LONG_PERIOD ? 2 : 3;
      if (times >= least && (!best || times * period > best.count * best.period)) best = { start: at, period, count: times };
    }
    if (best) {
      best.body = fold(tokens, best.start, best.start + best.period);
      parts.push(best);
      at = best.start + best.period * best.count;
    } else {
      parts.push(at);
      at += 1;
    }
  }
  return parts;
}
