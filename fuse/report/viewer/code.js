// The user's source and kernels' source, a line an element, with what each line costs beside it.

const WORDS = new Set(("and as assert async await break class continue def del elif else except finally for from global if import in is lambda " +
  "not or pass raise return try while with yield None True False self auto bool char const double float int long sizeof static struct void " +
  "restrict extern unsigned template typename inline").split(" "));
const PARTS = /(#.*$|\/\/.*$)|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(\b\d[\w.]*\b)|([A-Za-z_]\w*)/g;

/** Text of one line as spans: comments, strings, numbers and words of the language; `inside` a string of many lines. */
function coloured(text, inside) {
  const line = el("span", "text");
  if (inside) { line.append(el("span", "string", text)); return line; }
  let from = 0;
  for (const found of text.matchAll(PARTS)) {
    const [whole, comment, string, number, word] = found;
    if (comment && comment[0] === "#" && /^\s*#\s*(include|pragma|define|if|endif)/.test(text)) continue;
    const look = comment ? "comment" : string ? "string" : number ? "number" : word && WORDS.has(word) ? "word" : "";
    if (!look) continue;
    line.append(text.slice(from, found.index), el("span", look, whole));
    from = found.index + whole.length;
  }
  line.append(text.slice(from));
  return line;
}

/** A listing: `about(number)` gives what stands beside a line, `picked(number)` is told of a click. */
class Listing {
  constructor(place, picked) {
    this.place = place;
    this.picked = picked;
    this.lines = [];
    this.shown = null;
    place.addEventListener("click", (event) => {
      const line = event.target.closest(".line");
      if (line && !String(getSelection())) this.picked(Number(line.dataset.number));
    });
  }

  show(key, text, about = () => null) {
    if (this.shown === key) return;
    this.shown = key;
    let inside = false;
    this.lines = text.replace(/\n$/, "").split("\n").map((one, i) => {
      const quotes = (one.match(/"""|'''/g) || []).length, string = inside || quotes > 0;
      if (quotes % 2) inside = !inside;
      const beside = about(i + 1);
      const line = el("div", "line" + (beside ? " known" : ""), null, el("span", "number", String(i + 1)), beside === undefined ? null : el("span", "cost", beside || ""), coloured(one, string));
      line.dataset.number = i + 1;
      return line;
    });
    this.place.replaceChildren(...this.lines);
    const known = this.lines.find((line) => /\d/.test(line.querySelector(".cost")?.textContent || ""));
    this.place.scrollTop = known ? Math.max(0, known.offsetTop - 60) : 0;
  }

  /** Mark lines by their numbers, and bring the first into view. */
  mark(numbers) {
    for (const line of this.place.querySelectorAll(".line.marked")) line.classList.remove("marked");
    let first = null;
    for (const number of numbers) {
      const line = this.lines[number - 1];
      if (!line) continue;
      line.classList.add("marked");
      first = first || line;
    }
    if (first) {
      const top = first.offsetTop - this.place.clientHeight / 3;
      if (first.offsetTop < this.place.scrollTop || first.offsetTop > this.place.scrollTop + this.place.clientHeight - 30) this.place.scrollTop = top;
    }
  }
}
