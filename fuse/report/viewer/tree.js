// What is drawn of a graph: operators, and boxes around modules, repeated steps, loops and fused groups.
//
//   ordered nodes  ->  runs of one module are boxes  ->  what repeats is one box "x 64"  ->  boxes open and closed
//
// A box is a stretch of the program order, so that data never flows out of it and in again. What holds too much to look
// at is cut into stretches of operators. Items of operators, and boxes of nothing else with their places and edges, are kept from
// one step to the next as long as nothing in them changes: what is left to do at a step is little, also in large graphs.

const MOST_DRAWN = 130; // boxes open by themselves up to so many things in the picture
const LONG_PERIOD = 8;
const MOST_IN_BOX = 300, STRETCH = 64;

class Tree {
  /**
   * `chosen` maps the key of a box to whether the user has opened (true) or closed (false) it; `touched` are nodes whose
   * stretches are open, with `all` every box is.
   */
  constructor(sheet, chosen, showViews, touched = [], all = false) {
    this.sheet = sheet;
    this.replay = sheet.replay;
    this.chosen = chosen;
    this.showViews = showViews;
    this.drawn = new Table(); // node -> the item that shows it
    this.through = new Table(); // node -> nodes shown in its place, where it is hidden, or it alone
    this.users = new Map();
    this.seen = new Map();
    this.root = { key: "root", kind: "root", label: "", parent: null, open: true, depth: 0, ids: [] };
    this.root.items = this.itemsOf(0, null);
    this.link(this.root);
    this.wanted = new Set();
    for (const id of touched) {
      for (let item = this.drawn.get(id); item; item = item.parent) if (item.kind === "stretch") this.wanted.add(item);
    }
    this.openSome(all);
    this.settle(this.root);
  }

  row(id) { return this.replay.rows.get(id); }

  /** The names of the modules around a node, one array for each module; null where no line is known. */
  path(row) {
    if (row.at === undefined) return null;
    const { paths, record } = this.sheet, { module } = record.places[row.at];
    if (!paths.has(module)) paths.set(module, module ? module.split(".") : []);
    return paths.get(module);
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
    let path = NO_PATH;
    for (const id of order) {
      const row = this.row(id);
      const memo = (row.memo = row.memo || { label: shortName(row), token: 0, item: null, shown: null, sources: NONE });
      const sources = this.sourcesOf(row, memo);
      if (this.hidden(row, called)) {
        this.through.set(id, row.op === "placeholder" ? NONE : sources);
        continue;
      }
      if (row.kind === "view" && !sources.length && row.uses.length) { this.through.set(id, NONE); continue; } // of a weight
      path = this.path(row) || path;
      const apart = row.op === "placeholder" || row.op === "output";
      const item = this.leaf(row, apart ? NO_PATH : path, sources, called);
      this.through.set(id, item.alone);
      leaves.push(item);
    }
    const items = this.cut(this.folded(called ? leaves : this.grouped(leaves, 0)));
    if (called && called.kind === "loop") this.carried(order, called);
    return items;
  }

  /** The nodes that are shown for what a node uses: the same list as at the last step, if it is equal. */
  sourcesOf(row, memo) {
    const { uses } = row, { shown } = memo;
    if (shown && shown.every((one, i) => one === this.through.get(uses[i]))) return memo.sources;
    memo.shown = uses.map((used) => this.through.get(used));
    const sources = [...new Set(memo.shown.flatMap((one) => one || NONE))];
    if (!equal(sources, memo.sources)) memo.sources = sources.length ? sources : NONE;
    return memo.sources;
  }

  leaf(row, path, sources, called) {
    const { memo } = row, kept = memo.item;
    if (kept && !called && kept.path === path && kept.sources === sources) {
      kept.news = kept.back = null;
      this.drawn.set(row.id, kept);
      return kept;
    }
    const alone = [row.id];
    const item = { key: "n" + row.id, kind: "node", id: row.id, ids: alone, alone, row, path, sources, count: 1, items: null };
    if (!memo.token && !row.called) memo.token = this.tokenOf([row.target.replace(/_\d+$/, ""), row.value, row.at, row.op].join("|"));
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
    if (!called && !row.called) memo.item = item;
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
      return { ...items[0], label: `${label}.${items[0].label}` };
    }
    const number = this.seen.get(kind + path) || 0;
    this.seen.set(kind + path, number + 1);
    const folded = this.cut(kind === "module" ? this.folded(items) : items);
    const { stretches } = this.sheet, key = `${kind[0]}:${path}#${number}`, kept = stretches.get(key);
    if (kind === "module" && kept && equal(kept.items, folded)) { kept.news = null; return kept; }
    const item = { key, kind, look: kind, label, count: 1, items: folded, ids: folded.flatMap((one) => one.ids) };
    item.token = digest(this.tokenOf(`${kind}|${label.replace(/\d+/g, "")}`), folded);
    if (kind === "module") {
      item.plain = arePlain(folded);
      stretches.set(key, item);
    }
    return item;
  }

  /** Items, or stretches of them where they are too many. Stretches end at certain nodes, so that few change at a step. */
  cut(items) {
    if (items.length <= MOST_IN_BOX) return items;
    const stretches = [];
    let from = 0;
    for (let i = 1; i <= items.length; i += 1) {
      const long = i - from;
      if (i < items.length && long < 2 * STRETCH && (items[i].ids[0] % STRETCH || long < 8)) continue;
      stretches.push(this.stretch(items.slice(from, i)));
      from = i;
    }
    return this.cut(stretches);
  }

  stretch(items) {
    const { stretches } = this.sheet, key = "s:" + items[0].key, kept = stretches.get(key);
    if (kept && equal(kept.items, items)) { kept.news = null; return kept; }
    const ids = items.flatMap((one) => one.ids), plain = arePlain(items);
    const lines = [items[0], items[items.length - 1]].map((one) => { const row = this.row(one.ids[0]); return row.at === undefined ? "" : this.sheet.record.places[row.at].source; });
    const item = { key, kind: "stretch", look: "repeat", label: plural(ids.length, "operator"), formula: lines[0] === lines[1] ? lines[0] : lines.filter(Boolean).join(" … "), count: 1, items, ids, plain };
    item.token = digest(this.tokenOf("stretch"), items);
    stretches.set(key, item);
    return item;
  }

  /** What repeats, shown once: steps of an unrolled loop, equal layers. */
  folded(items) {
    const parts = fold(items.map((item) => item.token), 0, items.length);
    const place = (all, from = items) => all.map((part) => {
      if (typeof part === "number") return from[part];
      const first = items.slice(part.start, part.start + part.period).map((item) => this.copied(item));
      for (let step = 1; step < part.count; step += 1) {
        for (let i = 0; i < part.period; i += 1) this.standsFor(first[i], items[part.start + step * part.period + i]);
      }
      if (part.period === 1 && first[0].kind === "node") { first[0].count = part.count; return first[0]; }
      const here = [];
      first.forEach((item, i) => { here[part.start + i] = item; });
      const box = this.box("repeat", `× ${count(part.count)}`, first[0].key, place(part.body, here));
      box.count = part.count;
      return box;
    });
    return place(parts);
  }

  /** The same item once more, to stand for others, too. */
  copied(item) {
    const made = { ...item, ids: [...item.ids], items: item.items && item.items.map((one) => this.copied(one)), plain: false };
    if (item.row) this.drawn.set(item.row.id, made);
    return made;
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
  openSome(all) {
    let drawn = this.root.items.length;
    let level = this.root.items;
    while (level.length) {
      const deeper = [];
      for (const item of level) {
        if (!this.canOpen(item)) continue;
        const wish = this.chosen.get(item.key) ?? (all || this.wanted.has(item) || undefined);
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
      if (item.plain && item.open) continue;
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

  /** For each box the pairs of its items between which data flows; `back`: to the next step. */
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
        if (item.plain) {
          this.within(item);
          for (const [source, to] of item.across) note(source, to.id, false);
          continue;
        }
        if (item.row) for (const source of item.sources) note(source, item.id, false);
        if (item.row && item.back) for (const source of item.back) note(source, item.id, true);
        if (item.open || (item.items && item.kind !== "node")) visit(item);
      }
    };
    visit(this.root);
    const inner = new Map();
    for (const edge of found.values()) {
      const box = edge.a.parent;
      if (!inner.has(box)) inner.set(box, []);
      inner.get(box).push(edge);
    }
    return inner;
  }

  /** Edges inside a stretch of operators, and those that come from elsewhere, as long as it stays what it is. */
  within(box) {
    if (box.within) return;
    const here = new Map(box.items.map((item) => [item.id, item]));
    box.within = [];
    box.across = [];
    for (const item of box.items) for (const source of item.sources) {
      const from = here.get(source);
      if (from) box.within.push({ from, to: item, a: from, b: item, back: false });
      else box.across.push([source, item]);
    }
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

const NO_PATH = [], NONE = [];

/** A map from small numbers. */
class Table {
  constructor() { this.all = []; }

  get(number) { return this.all[number]; }

  set(number, value) { this.all[number] = value; }
}

/** Whether items are operators that stay the same items as long as they do not change. */
const arePlain = (items) => items.every((one) => one.kind === "node" && one === (one.row.memo && one.row.memo.item));

const equal = (a, b) => a.length === b.length && a.every((one, i) => one === b[i]);

/** A number for a list of items that is equal for equal tokens, and below those of `tokenOf`, which are positive. */
function digest(kind, items) {
  let a = kind, b = items.length;
  for (const { token } of items) {
    const low = token % 4294967296, high = Math.floor(token / 4294967296);
    a = Math.imul(a ^ low, 0x9e3779b1) ^ high;
    b = Math.imul(b + low, 0x85ebca6b) ^ (b >>> 13) ^ high;
  }
  return -((a >>> 0) * 2097152 + ((b >>> 0) & 2097151) + 1);
}

/** Positions of tokens with each repetition as {start, period, count, body}, as fuse/report/repeats.py finds them. */
function fold(tokens, start, stop) {
  const following = new Int32Array(stop - start), seen = new Map(), ends = new Map(), parts = [];
  for (let i = stop - 1; i >= start; i -= 1) {
    const next = seen.get(tokens[i]);
    following[i - start] = next === undefined ? stop : next;
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
      if (second >= stop) break;
      second = following[second - start];
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
