// Places for what a tree shows: rows from inputs to outputs in each box, boxes as large as what is in them. Linear.

const GAP = 16, ROW_GAP = 26, PAD = 14, HEADER = 30, WIDEST_ROW = 18;

class Layout {
  constructor(tree, measure) {
    this.measure = measure;
    this.edges = tree.edges();
    this.inner = new Map(); // box -> edges between its items
    for (const edge of this.edges) {
      if (edge.back) continue;
      const box = edge.a.parent;
      if (!this.inner.has(box)) this.inner.set(box, []);
      this.inner.get(box).push(edge);
    }
    this.shapes = [];
    this.box(tree.root);
    this.flatten(tree.root, 0, 0);
    this.width = tree.root.w;
    this.height = tree.root.h;
  }

  size(item) {
    if (item.open) { this.box(item); return; }
    const name = item.count > 1 ? `${item.label}  × ${item.count}` : item.label;
    const below = item.formula || item.detail || "";
    item.small = short(below, item.formula ? 60 : 30);
    const view = item.look === "view";
    item.w = Math.max(view ? 30 : 84, this.measure(name, view ? 11 : 13) + 26, this.measure(item.small, 11) + 22);
    item.h = view ? 22 : item.small ? 42 : 30;
    if (item.items || item.lazy) { item.w += 16; item.h = Math.max(item.h, 42); }
  }

  box(box) {
    const items = box.items, at = new Map();
    items.forEach((item, i) => { this.size(item); at.set(item, i); });
    const before = items.map(() => []), after = items.map(() => []);
    for (const { a, b } of this.inner.get(box) || []) {
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
    const title = box.kind === "root" ? 0 : this.measure(box.label + "   " + (box.formula || ""), 13) + 64;
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
}

/** What lies where: shapes and edges by cells of a grid, so that a frame looks only at what can be seen. */
class Grid {
  constructor(shapes, edges, cell = 400) {
    this.cell = cell;
    this.cells = new Map();
    this.large = [];
    shapes.forEach((shape) => this.put(shape, shape.left, shape.top, shape.left + shape.w, shape.top + shape.h));
    for (const edge of edges) {
      const [x1, y1, x2, y2] = edge.line = ends(edge);
      this.put(edge, Math.min(x1, x2), Math.min(y1, y2), Math.max(x1, x2), Math.max(y1, y2));
    }
  }

  put(thing, left, top, right, bottom) {
    const [a, b, c, d] = [left, top, right, bottom].map((n) => Math.floor(n / this.cell));
    thing.area = (c - a + 1) * (d - b + 1);
    thing.bounds = [left, top, right, bottom];
    if (thing.area > 200) { this.large.push(thing); return; }
    for (let i = a; i <= c; i += 1) {
      for (let j = b; j <= d; j += 1) {
        const key = i * 1e6 + j;
        const cell = this.cells.get(key);
        if (cell) cell.push(thing); else this.cells.set(key, [thing]);
      }
    }
  }

  /** What may touch a rectangle, each thing once. */
  near(left, top, right, bottom) {
    const [a, b, c, d] = [left, top, right, bottom].map((n) => Math.floor(n / this.cell));
    const found = new Set();
    if ((c - a + 1) * (d - b + 1) > this.cells.size) {
      for (const cell of this.cells.values()) for (const thing of cell) found.add(thing);
    } else {
      for (let i = a; i <= c; i += 1) for (let j = b; j <= d; j += 1) for (const thing of this.cells.get(i * 1e6 + j) || []) found.add(thing);
    }
    for (const thing of this.large) {
      const [l, t, r, m] = thing.bounds;
      if (l <= right && r >= left && t <= bottom && m >= top) found.add(thing);
    }
    return found;
  }
}

function ends({ from, to, back }) {
  if (back) return [from.left + from.w, from.top + from.h / 2, to.left + to.w, to.top + to.h / 2];
  return [from.left + from.w / 2, from.top + from.h, to.left + to.w / 2, to.top];
}
