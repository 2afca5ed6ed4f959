// Words and small helpers. Text of the model enters the page by `textContent` only.

const $ = (id) => document.getElementById(id);

/** An element with a class, text, attributes and children. */
function el(tag, look = "", text = null, ...children) {
  const made = document.createElement(tag);
  if (look) made.className = look;
  if (text !== null) made.textContent = text;
  for (const child of children) if (child) made.append(child);
  return made;
}

function button(look, text, title, act) {
  const made = el("button", look, text);
  made.type = "button";
  if (title) made.title = title;
  made.addEventListener("click", act);
  return made;
}

const count = (n) => Math.round(n).toLocaleString("en");

/** 39849984 -> "39.8 M"; with a unit of bytes "39.8 MB". */
function scaled(n, unit = "") {
  const steps = ["", "k", "M", "G", "T"];
  let size = Math.abs(n), step = 0;
  while (size >= 1000 && step < steps.length - 1) { size /= 1000; step += 1; }
  const digits = step && size < 100 ? size.toPrecision(3) : String(Math.round(size));
  const suffix = steps[step] + unit;
  return (n < 0 ? "-" : "") + digits + (suffix ? " " + suffix : "");
}

/** Microseconds in three digits, with their unit: 12.3 µs, 1.23 ms. */
const micro = (n) => (n >= 999.5 ? `${Number((n / 1000).toPrecision(3)).toLocaleString("en")} ms` : `${n >= 100 ? count(n) : n ? n.toPrecision(3) : 0} µs`);

const signed = (n) => (n > 0 ? "+" : n < 0 ? "−" : "±") + count(Math.abs(n));
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : word.endsWith("ch") ? "es" : "s"}`;

const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

/** "aten.add.Tensor" -> "add", "aten.native_layer_norm.default" -> "layer_norm" */
function shortName(row) {
  if (row.op === "placeholder" || row.op === "output" || row.op === "call_module") return short(row.name, 30);
  const parts = row.target.split(".");
  const name = parts[0] === "aten" && parts.length > 1 ? parts[1] : parts.length > 2 ? parts[parts.length - 2] : row.target;
  return short(name.replace(/^_+/, "").replace(/^native_/, "").replace(/_legit(_no_training)?$/, ""), 30);
}

const SIZES = { f64: 8, f32: 4, bf16: 2, f16: 2, i64: 8, i32: 4, i16: 2, i8: 1, u8: 1, bool: 1, complex64: 8, complex128: 16 };

/** Bytes of a value such as "f32[4, 128], i64[4]". */
function bytesOf(value) {
  let total = 0;
  for (const [, dtype, shape] of (value || "").replace(/ strides \[[^\]]*\]/g, "").matchAll(/(\w+)\[([^\]]*)\]/g)) {
    total += (SIZES[dtype] || 4) * shape.split(",").filter((n) => n.trim()).reduce((all, n) => all * Number(n), 1);
  }
  return total;
}

/** What is asked for is done once, when the browser draws next. */
function soon(act) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; act(); });
  };
}
