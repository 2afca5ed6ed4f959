// The graphs after any number of rewrites: rows by id, their order, and deltas applied and taken back.

class Replay {
  constructor(record) {
    this.record = record;
    this.rows = new Map();
    this.next = new Map();
    this.before = new Map();
    this.steps = [[]]; // deltas of step k: rewrite k and what follows without a number
    for (const delta of record.rewrites) {
      if (delta.number) this.steps.push([delta]);
      else this.steps[this.steps.length - 1].push(delta);
    }
    this.undo = [];
    this.at = 0;
    let last = new Map();
    for (const row of record.start) {
      const graph = row.graph || 0;
      this.add(row);
      this.place(row.id, last.has(graph) ? last.get(graph) : -1);
      last.set(graph, row.id);
    }
    for (const delta of this.steps[0]) this.apply(delta);
  }

  get length() { return this.steps.length - 1; }

  /** The rewrite that led here, or null. */
  get delta() { return this.at ? this.steps[this.at][0] : null; }

  add(row) { this.rows.set(row.id, { uses: [], args: "", value: "", kind: "", launches: 0, flops: 0, bytes: 0, graph: 0, called: null, memo: null, ...row }); } // memo: what a picture of it needs, until it changes

  place(id, after) {
    if (this.next.has(id)) this.remove(id);
    const left = after < 0 ? -1 - this.rows.get(id).graph : after;
    const right = this.next.has(left) ? this.next.get(left) : left;
    this.next.set(left, id); this.next.set(id, right);
    this.before.set(right, id); this.before.set(id, left);
  }

  remove(id) {
    const left = this.before.get(id), right = this.next.get(id);
    this.before.delete(id); this.next.delete(id);
    this.next.set(left, right); this.before.set(right, left);
  }

  /** Let a delta happen; what takes it back is returned. */
  apply(delta) {
    const back = { erased: [], changed: [], made: [], placed: [] };
    for (const id of delta.erased || []) {
      back.erased.push([this.rows.get(id), this.before.get(id)]);
      this.remove(id);
      this.rows.delete(id);
    }
    for (const row of delta.made || []) { this.add(row); back.made.push(row.id); }
    for (const { id, ...different } of delta.changed || []) {
      const row = this.rows.get(id), old = {};
      for (const key of Object.keys(different)) old[key] = row[key];
      back.changed.push([id, old]);
      Object.assign(row, different);
      row.memo = null;
    }
    for (const [id, after] of delta.placed || []) {
      back.placed.push([id, this.before.has(id) ? this.before.get(id) : null]);
      this.place(id, after);
    }
    return back;
  }

  revert(back) {
    for (const [id, left] of back.placed.reverse()) {
      if (left === null) this.remove(id);
      else this.place(id, left < 0 ? -1 : left);
    }
    for (const [id, old] of back.changed) Object.assign(this.rows.get(id), old, { memo: null });
    for (const id of back.made) this.rows.delete(id);
    for (const [row, left] of back.erased.reverse()) {
      this.rows.set(row.id, row);
      this.place(row.id, left < 0 ? -1 : left);
    }
  }

  go(step) {
    while (this.at < step) {
      this.at += 1;
      this.undo.push(this.steps[this.at].map((delta) => this.apply(delta)));
    }
    while (this.at > step) {
      for (const back of this.undo.pop().reverse()) this.revert(back);
      this.at -= 1;
    }
  }

  nodes(graph) {
    const found = [];
    for (let id = this.next.get(-1 - graph); id !== undefined && id >= 0; id = this.next.get(id)) found.push(id);
    return found;
  }

  /** The nodes of a graph, each behind what it needs, otherwise in their order. */
  sorted(graph) {
    const nodes = this.nodes(graph), done = new Set(), order = [];
    let inOrder = true;
    for (const id of nodes) {
      if (this.rows.get(id).uses.some((used) => !done.has(used))) { inOrder = false; break; }
      done.add(id);
    }
    if (inOrder) return nodes;
    done.clear();
    for (const start of nodes) {
      const stack = [start];
      while (stack.length) {
        const id = stack[stack.length - 1];
        if (done.has(id)) { stack.pop(); continue; }
        const waiting = this.rows.get(id).uses.filter((used) => !done.has(used) && this.rows.has(used));
        if (waiting.length) stack.push(...waiting.reverse());
        else { done.add(id); order.push(id); stack.pop(); }
      }
    }
    return order;
  }
}
