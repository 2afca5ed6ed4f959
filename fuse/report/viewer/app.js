// The page: what is shown, and of each report (a sheet) what leads from nodes to lines, kernels and reasons.

const DATA = JSON.parse($("report").textContent);
const LAYERS = [["kind", "kind"], ["launches", "launches"], ["bytes", "memory traffic"], ["flops", "arithmetic"], ["time", "time, predicted"], ["memory", "held at the peak"], ["declined", "not fused: candidates"], ["measured", "time, measured"], ["pauses", "pause before it"]];
const KEYS = [["← →", "step through the rewrites"], ["b", "the graph before this rewrite"], ["/", "search"], ["↑ ↓ ↵", "in lists and results"], ["click", "select; what is linked is marked everywhere"],
  ["double click, o", "open or close a box"], ["a", "open every box, and back"], ["drag, wheel", "move, zoom"], ["+ − f", "zoom, the whole graph"], ["n p", "next, previous operator of the selection's order"], ["1 … 9", "colour by another layer"], ["v", "views"], ["Esc", "select nothing"]];

/** A report with what is looked up in it. */
class Sheet {
  constructor({ name, report }) {
    this.name = name;
    this.report = report;
    this.record = report.record;
    this.replay = new Replay(this.record);
    this.tokens = new Map(); // kept from step to step by Tree: see there
    this.paths = new Map();
    this.stretches = new Map();
    this.lines = new Map(this.record.lines.map((line) => [line.source, line]));
    this.kernelsOf = new Map();
    this.record.kernels.forEach((kernel, number) => {
      for (const id of [...kernel.callers, ...kernel.nodes]) this.kernelsOf.set(id, number);
    });
    this.declinedOf = new Map();
    this.record.declined.forEach((group, number) => group.candidates.forEach((candidate, place) => {
      for (const id of candidate.nodes) {
        if (!this.declinedOf.has(id)) this.declinedOf.set(id, []);
        this.declinedOf.get(id).push([number, place]);
      }
    }));
    this.trace = this.report.trace;
    const times = this.record.microseconds || { before: [], after: [] };
    this.times = { before: new Map(times.before), after: new Map(times.after) };
    this.pauses = new Map(this.record.pauses || []);
    this.layers = LAYERS.filter(([name]) => (name === "measured" ? times.before.length + times.after.length : name === "pauses" ? this.pauses.size : !this.trace || name === "kind" || name === "launches"));
    this.saved = [0];
    for (let step = 1; step <= this.replay.length; step += 1) this.saved.push(this.saved[step - 1] + this.replay.steps[step][0].launches_saved);
  }

  /** Launches after that many rewrites. */
  launches(step) { return this.report.after.launches + this.saved[this.replay.length] - this.saved[step]; }

  /** Microseconds that were measured: of eager's operators, and once all rewrites are made of what fuse launches. */
  took(id) { return (this.replay.at === this.replay.length ? this.times.after : this.times.before).get(id); }

  source(row) { return row.at === undefined ? "" : this.record.places[row.at].source; }
}

const app = {
  sheets: DATA.sheets.map((one) => new Sheet(one)),
  shown: [], // {sheet, picture, tree}
  selection: null,
  chosen: new Map(),
  layer: "kind",
  showViews: false,
  all: false, // every box open
  before: false,
  tab: "rewrites",
  side: 0, // of two reports, the one that was last selected in
  get sheet() { return this.shown[this.side].sheet; },
  get step() { return this.sheet.replay.at + (this.before ? 1 : 0); },
};
