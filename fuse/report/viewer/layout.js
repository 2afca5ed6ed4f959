// Places for what a tree shows: rows from inputs to outputs in each box, boxes as large as what is in them. Linear.

const GAP = 16, ROW_GAP = 26, PAD = 14, HEADER = 30, WIDEST_ROW = 18;

class Layout {
  constructor(tree, measure) {
    this.measure = measure;
    this.root = tree.root;
    this.inner = tree.edges();
    this.shapes = [];
    this.box(tree.root);
    this.flatten(tree.root, 0, 0);
    this.width = tree.root.w;
    this.height = tree.root.h;
  }

  size(item) {
    if (item.open) {
      if (!item.plain || !item.laid) this.box(item);
      if (item.plain) item.laid = item.laid || [item.w, item.h];
      if (item.plain) [item.w, item.h] = item.laid;
      return;
    }
    if (item.kind === "node" && item.sized && item === (item.row.memo && item.row.memo.item)) return;
    item.sized = true;
    const name = item.count > 1 ? `${item.label}  × ${item.count}` : item.label;
    const below = item.formula || item.detail || "";
    item.small = short(below, item.formula ? 60 : 30);
    const view = item.look === "view";
    item.w = Math.max(view ? 30 : 84, this.measure(name, view ? 11 : 13) + 26, this.measure(item.small, 11) + 22);
    item.h = view ? 22 : item.small ? 42 : 30;
    if (item.items || item.lazy) { item.w += 16; item.h = Math.max(item.h, 42); }
  }

  /** The edges between the items of a box. */
  edgesOf(box) { return (box.plain ? box.within : this.inner.get(box)) || []; }

  box(box) {
    const items = box.items, at = new Map();
    items.forEach((item, i) => { this.size(item); at.set(item, i); });
    const before = items.map(() => []), after = items.map(() => []);
    for (const { a, b, back } of this.edgesOf(box)) {
      if (back) continue;
      const from = at.get(a), to = at.get(b);
      if (from === undefined || to === undefined || from >= to) continue;
      before[to].push(from);
      after[from].push(to);
    }
    const level = items.map(() => 0);
    items.forEach((_, i) => { for (const from of before[i]) level[i] = Math.max(level[i], level[from] + 1); });
    for (let i = items.length - 1; i >= 0; i -= 1) { // what needs nothing stands just above its first reader
      if (!before[i].length && after[i].length) level[i] = Math.max(0, Math.min(...after[i].map((to) => level[to])) - 1);
    }
    const rows = [];
    items.forEach((_, i) => { (rows[level[i]] = rows[level[i]] || []).push(i); });
    this.rows(items, this.wrapped(rows.filter(Boolean), items), before, after);
    let right = 0, bottom = 0;
    for (const item of items) { right = Math.max(right, item.x + item.w); bottom = Math.max(bottom, item.y + item.h); }
    const title = box.kind === "root" ? 0 : this.measure(box.label + "   " + (box.formula || ""), 13) + 96;
    const inside = Math.max(right, title - 2 * PAD);
    const shift = (inside - right) / 2;
    for (const item of items) item.x += shift;
    const padded = box.kind === "root" ? 0 : 1;
    box.w = inside + 2 * PAD * padded;
    box.h = bottom + (HEADER + PAD) * padded;
    box.inset = padded;
  }

  /** Rows that are too long to read are broken. */
  wrapped(rows, items) {
    return rows.flatMap((row) => {
      if (row.length <= WIDEST_ROW || row.length > 60 * WIDEST_ROW) return [row];
      const short = [];
      for (let i = 0; i < row.length; i += WIDEST_ROW) short.push(row.slice(i, i + WIDEST_ROW));
      return short;
    });
  }

  rows(items, rows, before, after) {
    const middle = items.map(() => 0);
    let y = 0;
    for (const row of rows) {
      const wish = (i, near) => (near[i].length ? near[i].reduce((sum, j) => sum + middle[j], 0) / near[i].length : null);
      const wishes = new Map(row.map((i) => [i, wish(i, before)]));
      const known = row.filter((i) => wishes.get(i) !== null);
      const mean = known.length ? known.reduce((sum, i) => sum + wishes.get(i), 0) / known.length : 0;
      row.sort((i, j) => (wishes.get(i) ?? mean) - (wishes.get(j) ?? mean) || i - j);
      this.place(items, row, middle, (i) => wishes.get(i) ?? mean);
      for (const i of row) items[i].y = y;
      y += Math.max(...row.map((i) => items[i].h)) + ROW_GAP;
    }
    for (let k = rows.length - 2; k >= 0; k -= 1) { // and once upwards, so that what is above stands over its readers
      this.place(items, rows[k], middle, (i) => (after[i].length ? after[i].reduce((sum, j) => sum + middle[j], 0) / after[i].length : middle[i]));
    }
    let left = Infinity;
    items.forEach((item, i) => { item.x = middle[i] - item.w / 2; left = Math.min(left, item.x); });
    for (const item of items) item.x -= left;
  }

  /** Places in one row, in order and apart, as near as may be to the wishes. */
  place(items, row, middle, wish) {
    let edge = -Infinity, off = 0;
    const places = row.map((i) => {
      const x = Math.max(wish(i), edge + items[i].w / 2);
      edge = x + items[i].w / 2 + GAP;
      off += x - wish(i);
      return x;
    });
    row.forEach((i, k) => { middle[i] = places[k] - off / row.length; });
  }

  flatten(box, x, y) {
    for (const item of box.items) {
      item.left = x + item.x + PAD * box.inset;
      item.top = y + item.y + HEADER * box.inset;
      this.shapes.push(item);
      if (item.open) this.flatten(item, item.left, item.top);
    }
  }

  /** What may touch a rectangle: open boxes from the outside inwards, what is in them, and edges. */
  near(left, top, right, bottom) {
    const found = { boxes: [], nodes: [], edges: [] };
    const visit = (box) => {
      for (const item of box.items) {
        if (item.left > right || item.top > bottom || item.left + item.w < left || item.top + item.h < top) continue;
        if (item.open) { found.boxes.push(item); visit(item); } else found.nodes.push(item);
      }
      for (const edge of this.edgesOf(box)) {
        const { from, to } = edge, bow = edge.back ? 50 : 0;
        if (Math.min(from.top, to.top) > bottom || Math.max(from.top + from.h, to.top + to.h) < top) continue;
        if (Math.min(from.left, to.left) > right || Math.max(from.left + from.w, to.left + to.w) + bow < left) continue;
        found.edges.push(edge);
      }
    };
    visit(this.root);
    return found;
  }
}

function ends({ from, to, back }) {
  if (back) return [from.left + from.w, from.top + from.h / 2, to.left + to.w, to.top + to.h / 2];
  return [from.left + from.w / 2, from.top + from.h, to.left + to.w / 2, to.top];
}
