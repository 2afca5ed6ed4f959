// Search for operators, lines, kernels and reasons.

function found(text) {
  const wanted = text.trim().toLowerCase(), { sheet } = app, results = [];
  if (!wanted) return results;
  const most = 60;
  const add = (sort, label, beside, act) => results.push({ sort, label, beside, act });
  for (const line of sheet.record.lines) {
    if (results.length < 20 && `${line.source} ${line.text}`.toLowerCase().includes(wanted)) add("line", `${line.source}  ${line.text}`, `${count(line.before.launches)} → ${count(line.after.launches)}`, () => select({ type: "line", source: line.source }));
  }
  sheet.record.kernels.forEach((kernel, number) => {
    if (results.length < 40 && (kernel.name.toLowerCase().includes(wanted) || kernel.callers.some((id) => sheet.replay.rows.get(id)?.name.includes(wanted)))) add("kernel", kernel.name, plural(kernel.nodes.length, "operator"), () => select({ type: "kernel", number }));
  });
  sheet.record.declined.forEach((one, group) => {
    if (results.length < 50 && `${one.reason} ${one.pattern || ""} ${one.pass}`.toLowerCase().includes(wanted)) add("reason", one.reason, one.pattern || one.pass, () => { openTab("declined"); select({ type: "reason", group }); leftList(true); });
  });
  let more = 0;
  for (const row of sheet.replay.rows.values()) {
    if (!row.name.toLowerCase().includes(wanted) && !row.target.toLowerCase().includes(wanted)) continue;
    if (results.length < most) add("operator", `${row.name}  ${row.value}`, sheet.source(row), () => select({ type: "node", id: row.id }));
    else more += 1;
  }
  if (more) add("", `${count(more)} more operators`, "", null);
  return results;
}

function showResults() {
  const place = $("results"), results = found($("search").value);
  place.hidden = !$("search").value.trim();
  app.results = results.filter((one) => one.act);
  app.result = 0;
  place.replaceChildren(...results.map((one, i) => {
    const row = el("div", "result" + (i ? "" : " current"), null, el("span", "sort", one.sort), el("span", "", one.label), el("span", "beside", one.beside));
    row.setAttribute("role", "option");
    if (one.act) row.addEventListener("mousedown", (event) => { event.preventDefault(); takeResult(i); });
    return row;
  }), ...(results.length ? [] : [el("div", "empty", "Nothing found.")]));
}

function takeResult(i) {
  const one = app.results[i];
  $("results").hidden = true;
  $("search").blur();
  if (one) one.act();
}

function searchKeys(event) {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (by) {
    const rows = [...$("results").children];
    app.result = Math.min(Math.max(app.result + by, 0), app.results.length - 1);
    rows.forEach((row, i) => row.classList.toggle("current", i === app.result));
    rows[app.result]?.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  } else if (event.key === "Enter") takeResult(app.result);
  else if (event.key === "Escape") { event.target.value = ""; showResults(); event.target.blur(); }
  event.stopPropagation();
}
