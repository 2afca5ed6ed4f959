// The picture: a canvas, a camera, and as much detail as the zoom lets one read.

const FAR = 0.3, SQUARE = 512, MOST_SQUARES = 160; // below that zoom, squares of so many pixels
const READABLE = 0.72; // the zoom at which a page opens on a graph that is larger than the screen

class Picture {
  constructor(canvas, sheet, told) {
    this.canvas = canvas;
    this.sheet = sheet;
    this.told = told; // {picked(item), toggled(item), moved()}
    this.context = canvas.getContext("2d", { alpha: false });
    this.widths = new Map();
    this.camera = { x: 0, y: 0, zoom: 1 };
    this.frames = [];
    this.again = soon(() => this.paint());
    this.draw = () => { this.distant = null; this.again(); }; // something else is to be seen than before
    this.listen();
    new ResizeObserver(() => { this.resize(); this.draw(); }).observe(canvas);
    this.theme();
  }

  theme() {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue("--" + name).trim();
    const kinds = ["gemm", "convolution", "pointwise", "reduction", "movement", "random", "loop", "region", "repeat", "module", "other", "view", "input", "output"];
    this.looks = Object.fromEntries(kinds.map((kind) => [kind, { fill: value("fill-" + kind), border: value("line-" + kind) }]));
    this.ink = Object.fromEntries(["paper", "text", "quiet", "edge", "accent", "made", "changed", "erased", "heat"].map((name) => [name, value(name)]));
  }

  measure(text, size) {
    const key = size + text;
    if (!this.widths.has(key)) {
      this.context.font = this.font(size, size > 12);
      this.widths.set(key, this.context.measureText(text).width);
    }
    return this.widths.get(key);
  }

  font(size, strong = false) { return `${strong ? "600 " : ""}${size}px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif`; }

  resize() {
    const { clientWidth, clientHeight } = this.canvas, ratio = window.devicePixelRatio || 1;
    this.ratio = ratio;
    this.canvas.width = Math.max(1, Math.round(clientWidth * ratio));
    this.canvas.height = Math.max(1, Math.round(clientHeight * ratio));
    if (this.unfitted && clientWidth) this.fit(READABLE);
  }

  /** Show a tree; where something selected was on the screen, it stays where it is. */
  show(tree, anchor) {
    const old = anchor !== undefined && this.tree ? this.tree.drawn.get(anchor) : null;
    const at = old && old.left !== undefined ? [old.left, old.top] : null;
    this.tree = tree;
    this.layout = new Layout(tree, (text, size) => this.measure(text, size));
    const now = anchor !== undefined ? tree.drawn.get(anchor) : null;
    if (at && now) {
      this.camera.x += (now.left - at[0]) * this.camera.zoom;
      this.camera.y += (now.top - at[1]) * this.camera.zoom;
    }
    this.keepInside();
    this.draw();
  }

  get size() { return [this.canvas.clientWidth, this.canvas.clientHeight]; }

  /** The whole graph; with `least`, as much of its beginning as can be read. */
  fit(least = 0) {
    const [width, height] = this.size;
    this.unfitted = !width || !this.layout;
    if (this.unfitted) return;
    const zoom = Math.min(1, Math.max(least, (width - 48) / this.layout.width), Math.max(least, (height - 48) / this.layout.height));
    this.camera = { zoom: Math.max(zoom, 0.01), x: 0, y: 0 };
    this.camera.x = (this.layout.width * this.camera.zoom - width) / 2;
    const tall = this.layout.height * this.camera.zoom;
    this.camera.y = tall < height - 48 ? (tall - height) / 2 : -24;
    this.again();
    this.told.moved();
  }

  keepInside() {
    const [width, height] = this.size, { zoom } = this.camera;
    if (!this.layout || !width) return;
    this.camera.x = Math.min(Math.max(this.camera.x, 60 - width), this.layout.width * zoom - 60);
    this.camera.y = Math.min(Math.max(this.camera.y, 60 - height), this.layout.height * zoom - 60);
  }

  zoomBy(factor, x = this.size[0] / 2, y = this.size[1] / 2) {
    const { camera } = this, zoom = Math.min(Math.max(camera.zoom * factor, 0.01), 3);
    camera.x = (camera.x + x) * zoom / camera.zoom - x;
    camera.y = (camera.y + y) * zoom / camera.zoom - y;
    camera.zoom = zoom;
    this.keepInside();
    this.again();
    this.told.moved();
  }

  panBy(x, y) {
    this.camera.x += x;
    this.camera.y += y;
    this.keepInside();
    this.again();
    this.told.moved();
  }

  /** Bring an item into view; nothing moves where it is in view already. */
  reveal(item) {
    const [width, height] = this.size, { camera } = this;
    if (!item || item.left === undefined || !width) return;
    if (camera.zoom < 0.35) camera.zoom = 0.8;
    const left = item.left * camera.zoom - camera.x, top = item.top * camera.zoom - camera.y;
    const right = left + item.w * camera.zoom, bottom = top + item.h * camera.zoom;
    if (left < 10 || right > width - 10) camera.x = (item.left + item.w / 2) * camera.zoom - width / 2;
    if (top < 10 || bottom > height - 10) camera.y = item.top * camera.zoom - Math.max(60, (height - item.h * camera.zoom) / 2);
    this.keepInside();
    this.again();
    this.told.moved();
  }

  at(x, y) {
    const { camera } = this, px = (x + camera.x) / camera.zoom, py = (y + camera.y) / camera.zoom;
    let found = null;
    const { boxes, nodes } = this.layout.near(px, py, px, py);
    for (const thing of [...boxes, ...nodes]) if (!found || thing.depth > found.depth) found = thing;
    return found;
  }

  listen() {
    const { canvas } = this;
    let from = null, dragged = false;
    canvas.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY]; dragged = false; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (!from) {
        const item = this.layout && this.at(event.offsetX, event.offsetY);
        canvas.style.cursor = item ? "pointer" : "grab";
        return;
      }
      const dx = event.clientX - from[0], dy = event.clientY - from[1];
      if (!dragged && Math.abs(dx) + Math.abs(dy) < 4) return;
      dragged = true;
      canvas.style.cursor = "grabbing";
      from = [event.clientX, event.clientY];
      this.panBy(-dx, -dy);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (from && !dragged && this.layout) {
        const item = this.at(event.offsetX, event.offsetY);
        if (item && this.onToggle(item, event)) this.told.toggled(item);
        else this.told.picked(item);
      }
      from = null;
    });
    canvas.addEventListener("dblclick", (event) => {
      const item = this.layout && this.at(event.offsetX, event.offsetY);
      if (item && this.tree.canOpen(item)) this.told.toggled(item);
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const far = event.deltaMode === 1 ? 16 : 1;
      if (event.shiftKey) this.panBy(event.deltaY * far + event.deltaX * far, 0);
      else this.zoomBy(Math.exp(-(event.deltaY * far) / (event.ctrlKey ? 120 : 500)), event.offsetX, event.offsetY);
    }, { passive: false });
  }

  /** Whether an event is on the sign at the left of a box's title, that opens and closes it. */
  onToggle(item, event) {
    if (!this.tree.canOpen(item)) return false;
    const { camera } = this, x = (event.offsetX + camera.x) / camera.zoom - item.left, y = (event.offsetY + camera.y) / camera.zoom - item.top;
    return x < 26 && y < HEADER;
  }

  // ---- painting ----

  /** Draw a frame; from afar within `patience` milliseconds, and what is then missing in the next ones. */
  paint(patience = 12) {
    if (!this.layout) return;
    const started = performance.now();
    const { context, camera, ratio = 1 } = this, [width, height] = this.size;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = this.ink.paper;
    context.fillRect(0, 0, width, height);
    if (camera.zoom < FAR) this.fromAfar(started + patience);
    else {
      context.setTransform(ratio * camera.zoom, 0, 0, ratio * camera.zoom, -camera.x * ratio, -camera.y * ratio);
      const view = [camera.x - 20, camera.y - 20, camera.x + width + 20, camera.y + height + 20].map((n) => n / camera.zoom);
      this.things(this.layout.near(...view), false);
    }
    this.frames.push(performance.now() - started);
    if (this.frames.length > 600) this.frames.shift();
  }

  /** From afar: squares that are painted once and moved while the picture is panned. */
  fromAfar(until) {
    const { context, canvas, camera, ratio, layout } = this, scale = camera.zoom * ratio;
    const left = Math.round(camera.x * ratio), top = Math.round(camera.y * ratio);
    if (!this.distant || this.distant.scale !== scale) this.distant = { scale, squares: new Map(), older: this.distant ? this.distant.older || this.distant : null };
    const { squares, older } = this.distant, missing = [];
    const first = [left, top].map((n) => Math.max(0, Math.floor(n / SQUARE)));
    const right = Math.min(left + canvas.width, layout.width * scale + 20), bottom = Math.min(top + canvas.height, layout.height * scale + 20);
    for (let i = first[0]; i * SQUARE < right; i += 1) for (let j = first[1]; j * SQUARE < bottom; j += 1) {
      const key = `${i},${j}`;
      if (!squares.has(key)) {
        if (performance.now() > until) { missing.push(key); continue; }
        if (squares.size >= MOST_SQUARES) squares.delete(squares.keys().next().value);
        squares.set(key, this.square(i, j, scale));
      }
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    if (missing.length && older) { // as it was at the last zoom, larger or smaller, until it is there
      const grown = scale / older.scale, size = SQUARE * grown;
      for (const [key, square] of older.squares) {
        const [i, j] = key.split(",").map(Number);
        context.drawImage(square, i * size - left, j * size - top, size, size);
      }
    }
    for (let i = first[0]; i * SQUARE < right; i += 1) for (let j = first[1]; j * SQUARE < bottom; j += 1) {
      const square = squares.get(`${i},${j}`);
      if (square) context.drawImage(square, i * SQUARE - left, j * SQUARE - top);
    }
    if (missing.length) this.again();
    else this.distant.older = null;
  }

  square(i, j, scale) {
    const { context } = this, canvas = document.createElement("canvas"), size = SQUARE / scale, margin = 40;
    canvas.width = canvas.height = SQUARE;
    this.context = canvas.getContext("2d", { alpha: false });
    this.context.fillStyle = this.ink.paper;
    this.context.fillRect(0, 0, SQUARE, SQUARE);
    this.context.setTransform(scale, 0, 0, scale, -i * SQUARE, -j * SQUARE);
    this.things(this.layout.near(i * size - margin, j * size - margin, (i + 1) * size + margin, (j + 1) * size + margin), true);
    this.context = context;
    return canvas;
  }

  things({ boxes, nodes, edges }, far) {
    for (const box of boxes) this.box(box, far);
    this.edges(edges, far);
    if (far) this.specks(nodes);
    else for (const node of nodes) this.node(node);
  }

  box(item, far) {
    const { context } = this, look = this.looks[item.look] || this.looks.other;
    context.beginPath();
    context.roundRect(item.left, item.top, item.w, item.h, 10);
    context.fillStyle = look.fill;
    context.fill();
    context.strokeStyle = look.border;
    context.lineWidth = item.kind === "region" || item.kind === "loop" ? 2 : 1;
    context.setLineDash(item.kind === "repeat" ? [5, 4] : []);
    context.stroke();
    context.setLineDash([]);
    this.marks(item, 10);
    if (far && item.w * this.camera.zoom < 90) return;
    this.sign(item.left + 8, item.top + 9, true, look.border);
    context.fillStyle = this.ink.text;
    context.font = this.font(13, true);
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(item.label, item.left + 26, item.top + 16);
    if (item.formula) {
      context.fillStyle = this.ink.quiet;
      context.font = this.font(11);
      context.fillText(item.formula, item.left + 34 + this.measure(item.label, 13), item.top + 16);
    }
    this.badge(item);
  }

  /** A minus in a box that is open, a plus in one that can be opened. */
  sign(x, y, open, colour) {
    const { context } = this;
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 1.5, 11, 11);
    context.beginPath();
    context.moveTo(x + 3, y + 7);
    context.lineTo(x + 9, y + 7);
    if (!open) { context.moveTo(x + 6, y + 4); context.lineTo(x + 6, y + 10); }
    context.stroke();
  }

  fillOf(item, look) {
    if (item.heat === undefined || item.heat === null) return look.fill;
    return item.heat > 0 ? `color-mix(in srgb, ${this.ink.heat} ${Math.round(6 + 54 * item.heat)}%, ${this.ink.paper})` : this.ink.paper;
  }

  node(item) {
    const { context } = this, look = this.looks[item.look] || this.looks.other;
    const { left, top, w, h } = item, box = item.items || item.lazy;
    if (item.count > 1 || box) { // a stack
      context.strokeStyle = look.border;
      context.lineWidth = 1;
      context.strokeRect(left + 4, top + 4, w, h);
    }
    context.beginPath();
    context.roundRect(left, top, w, h, item.look === "view" || item.look === "input" || item.look === "output" ? h / 2 : 6);
    context.fillStyle = this.fillOf(item, look);
    context.fill();
    context.strokeStyle = look.border;
    context.lineWidth = box ? 1.6 : 1;
    context.setLineDash(item.kind === "repeat" ? [5, 4] : []);
    context.stroke();
    context.setLineDash([]);
    this.marks(item, 6);
    const view = item.look === "view";
    context.fillStyle = view ? this.ink.quiet : this.ink.text;
    context.font = this.font(view ? 11 : 13, !view);
    context.textAlign = "center";
    context.textBaseline = "middle";
    const name = item.count > 1 && item.kind === "node" ? `${item.label}  × ${item.count}` : item.label;
    const middle = left + w / 2 + (box ? 8 : 0);
    context.fillText(name, middle, top + (item.small && !view ? 15 : h / 2));
    if (item.small && !view) {
      context.font = this.font(11);
      context.fillStyle = this.ink.quiet;
      context.fillText(item.small, middle, top + 30);
    }
    if (box) this.sign(left + 8, top + h / 2 - 7, false, look.border);
    this.badge(item);
  }

  /** What a layer says of an item, on its upper right corner. */
  badge(item) {
    if (!item.badge) return;
    const { context } = this, width = this.measure(item.badge, 10) + 12;
    const x = item.left + item.w - (item.open ? width + 10 : Math.min(width - 8, width / 2 + 6)), y = item.top + (item.open ? 8 : -10);
    context.beginPath();
    context.roundRect(x, y, width, 16, 8);
    context.fillStyle = this.ink.text;
    context.fill();
    context.fillStyle = this.ink.paper;
    context.font = this.font(10);
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(item.badge, x + width / 2, y + 8.5);
  }

  marks(item, radius) {
    const { context } = this;
    const ring = (colour, width, off) => {
      context.beginPath();
      context.roundRect(item.left - off, item.top - off, item.w + 2 * off, item.h + 2 * off, radius + off);
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.stroke();
    };
    if (item.news) ring(this.ink[item.news], 3, 3);
    if (item.marked) ring(this.ink.accent, 3, item.news ? 7 : 3);
  }

  specks(nodes) {
    const { context } = this, small = this.camera.zoom < 0.08;
    const by = new Map();
    for (const node of nodes) {
      const fill = node.heat === undefined || node.heat === null ? (this.looks[node.look] || this.looks.other).border : this.fillOf(node, this.looks.other);
      if (!by.has(fill)) by.set(fill, []);
      by.get(fill).push(node);
    }
    for (const [fill, some] of by) {
      context.fillStyle = fill;
      for (const node of some) context.fillRect(node.left, node.top, node.w, node.h);
    }
    for (const node of nodes) if (node.marked || node.news) {
      context.fillStyle = node.marked ? this.ink.accent : this.ink[node.news];
      const grow = small ? 30 : 6;
      context.fillRect(node.left - grow, node.top - grow, node.w + 2 * grow, node.h + 2 * grow);
    }
  }

  edges(edges, far) {
    const { context } = this;
    const strong = [];
    context.lineWidth = far ? 1 / this.camera.zoom : 1.1;
    context.strokeStyle = this.ink.edge;
    context.globalAlpha = far ? 0.35 : 0.8;
    context.beginPath();
    for (const edge of edges) {
      if (edge.from.marked || edge.to.marked) strong.push(edge);
      else if (!edge.back) this.curve(edge, far);
    }
    context.stroke();
    context.globalAlpha = 1;
    context.setLineDash([4, 3]);
    context.beginPath();
    if (!far) for (const edge of edges) if (edge.back) this.curve(edge, far);
    context.stroke();
    context.setLineDash([]);
    if (!far) {
      context.fillStyle = this.ink.edge;
      for (const edge of edges) if (!edge.back) this.tip(edge);
    }
    if (!strong.length) return;
    context.strokeStyle = context.fillStyle = this.ink.accent;
    context.lineWidth = far ? 2 / this.camera.zoom : 1.8;
    context.beginPath();
    for (const edge of strong) this.curve(edge, far);
    context.stroke();
    if (!far) for (const edge of strong) if (!edge.back) this.tip(edge);
  }

  curve(edge, straight) {
    const { context } = this, { back } = edge, [x1, y1, x2, y2] = ends(edge);
    context.moveTo(x1, y1);
    if (straight && !back) context.lineTo(x2, y2);
    else if (back) context.bezierCurveTo(Math.max(x1, x2) + 46, y1, Math.max(x1, x2) + 46, y2, x2, y2);
    else {
      const bend = Math.min(Math.max((y2 - y1) / 2, 8), 60);
      context.bezierCurveTo(x1, y1 + bend, x2, y2 - bend, x2, y2);
    }
  }

  tip(edge) {
    const { context } = this, [, , x, y] = ends(edge);
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x - 3.2, y - 6);
    context.lineTo(x + 3.2, y - 6);
    context.fill();
  }
}
