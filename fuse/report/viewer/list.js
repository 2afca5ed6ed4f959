// A list of thousands of rows of one height, of which only those in sight are in the page.

class List {
  constructor(place, height, make, picked) {
    Object.assign(this, { place, height, make, picked, rows: [], current: -1 });
    this.inner = el("div", "rows");
    place.append(this.inner);
    this.draw = soon(() => this.paint());
    place.addEventListener("scroll", this.draw);
    new ResizeObserver(this.draw).observe(place);
    place.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.picked(this.rows[Number(row.dataset.place)]);
    });
  }

  set(rows) {
    this.rows = rows;
    this.inner.style.height = `${rows.length * this.height}px`;
    this.paint();
  }

  /** The row for which `test` holds is the current one, and in view. */
  choose(test) {
    this.current = this.rows.findIndex(test);
    if (this.current >= 0) {
      const top = this.current * this.height, { scrollTop, clientHeight } = this.place;
      if (top < scrollTop || top + this.height > scrollTop + clientHeight) this.place.scrollTop = top - clientHeight / 2;
    }
    this.paint();
  }

  paint() {
    const first = Math.max(0, Math.floor(this.place.scrollTop / this.height) - 4);
    const last = Math.min(this.rows.length, first + Math.ceil((this.place.clientHeight || 600) / this.height) + 8);
    const shown = [];
    for (let i = first; i < last; i += 1) {
      const row = this.make(this.rows[i]);
      row.classList.add("row");
      row.classList.toggle("current", i === this.current);
      if (i === this.current) row.setAttribute("aria-current", "true");
      row.dataset.place = i;
      row.style.top = `${i * this.height}px`;
      shown.push(row);
    }
    this.inner.replaceChildren(...shown);
  }
}
