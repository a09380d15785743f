// The main table: which cells are shown, in which order, and as which text they are copied. Every text comes from Python.

const scoreTable = (data, state) => {
  const { make, fill, byId } = page;
  const { views, table } = data;
  const several = views.tasks.length > 1;
  const sort = { column: null, direction: 1 };

  const cellsNow = () => table.cells[`${state.rule}/${state.measure}/${state.part}`];
  const measureNow = () => views.measures.find((measure) => measure.key === state.measure);

  // What a column is: its head, whether it is a number, what it is sorted by, and its text.
  const columns = () => {
    const cells = cellsNow();
    const named = [
      { head: "method", of: (row) => views.rows[row].method },
      { head: "adapter", of: (row) => views.rows[row].adapter },
      ...views.sweep.map((key, k) => ({ head: key, of: (row) => views.rows[row].point[k] })),
      ...(several ? [{ head: "task", of: (row) => views.tasks[views.rows[row].task] }] : []),
    ].map((column) => ({ ...column, text: column.of }));
    const scored = views.columns.map((column, k) => ({
      head: column.title, number: true, scored: true, k,
      of: (row) => (cells[row][k] ? cells[row][k][0] : null),
      text: (row) => (cells[row][k] ? cells[row][k][1] : "–"),
      higher: measureNow().higher,
    }));
    const costs = [["kB up", "up"], ["kB down", "down"], ["s a round", "seconds"]]
      .filter(([, key]) => table.costs.some((cost) => cost[key]))
      .map(([head, key]) => ({
        head, number: true, higher: false,
        of: (row) => (table.costs[row][key] ? table.costs[row][key][0] : null),
        text: (row) => (table.costs[row][key] ? table.costs[row][key][1] : "–"),
      }));
    return [...named, ...scored, ...costs];
  };

  const ordered = (all) => {
    const rows = state.rows();
    if (sort.column === null || !all[sort.column]) return rows;
    const { of, number } = all[sort.column];
    const compare = (a, b) => {
      const [x, y] = [of(a), of(b)];
      if (x === null || y === null) return (x === null) - (y === null); // what is not known comes last
      return sort.direction * (number ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true }));
    };
    return [...rows].sort(compare);
  };

  const choose = (k, column) => {
    const first = column.number && column.higher ? -1 : 1; // the best first
    if (sort.column !== k) Object.assign(sort, { column: k, direction: first });
    else if (sort.direction === first) sort.direction = -first;
    else sort.column = null; // as they were run
    draw();
    byId("scores").querySelectorAll("thead button")[k].focus();
  };

  const paperOf = (row, column) =>
    table.papers && column.scored && state.measure === "accuracy" && state.part === "client_mean" ? table.papers[row][column.k] : null;

  const TITLES = { best: "best by more than noise", second: "second best by more than noise", tied: "cannot be told from the best" };

  const cell = (row, column, first) => {
    if (!column.number) {
      const swatch = first ? make("span", { class: "swatch", "aria-hidden": "true", style: { background: page.look(views.rows[row].hue).colour } }) : null;
      return make(first ? "th" : "td", { scope: first ? "row" : null }, swatch, column.text(row));
    }
    const found = column.scored ? cellsNow()[row][column.k] : null;
    const [, , trouble = "", standing = ""] = found || [];
    const [number, spread] = column.text(row).split(" ±");
    const paper = paperOf(row, column);
    return make("td", { class: `n ${standing}`.trim(), title: TITLES[standing] },
      make("span", { class: "number" }, number),
      spread ? make("span", { class: "spread" }, ` ±${spread}`) : null,
      trouble ? make("span", { class: "mark" }, ` ${trouble}`) : null,
      paper === null || paper === undefined ? null : make("span", { class: "paper" }, ` (${paper.toFixed(2)})`));
  };

  const draw = () => {
    const all = columns();
    const heads = all.map((column, k) => {
      const direction = sort.column === k ? (sort.direction > 0 ? "ascending" : "descending") : "none";
      return make("th", { scope: "col", class: column.number ? "n" : "", "aria-sort": direction },
        make("button", { type: "button", on: { click: () => choose(k, column) } }, column.head));
    });
    const rows = ordered(all);
    fill(byId("scores"),
      make("thead", {}, make("tr", {}, ...heads)),
      make("tbody", {}, ...rows.map((row) => make("tr", { "data-row": row }, ...all.map((column, k) => cell(row, column, k === 0))))));
    const measure = measureNow();
    const rule = views.rules.find((one) => one.key === state.rule);
    const part = table.parts.find((one) => one.key === state.part);
    fill(byId("table-says"), `${measure.title} in ${measure.unit}, ${part.title}, at ${rule.text}. ${measure.higher ? "Higher" : "Lower"} is better.`);
  };

  // ---- copies -----------------------------------------------------------------------------------------------------------
  const grid = () => {
    const all = columns();
    return { heads: all.map((column) => column.head), all, rows: ordered(all) };
  };
  const withPaper = (row, column) => {
    const paper = paperOf(row, column);
    const [, , trouble = ""] = (column.scored && cellsNow()[row][column.k]) || [];
    return [column.text(row), trouble, paper === null || paper === undefined ? "" : `(${paper.toFixed(2)})`].filter(Boolean).join(" ");
  };
  const standingOf = (row, column) => ((column.scored && cellsNow()[row][column.k]) || [])[3] || "";

  const copies = {
    markdown: () => {
      const { heads, all, rows } = grid();
      const clean = (text) => String(text).replaceAll("|", "\\|");
      const written = (row, column) => (standingOf(row, column) === "best" ? `**${clean(withPaper(row, column))}**` : clean(withPaper(row, column)));
      return [`| ${heads.map(clean).join(" | ")} |`, `|${all.map((column) => (column.number ? "---:" : "---")).join("|")}|`,
        ...rows.map((row) => `| ${all.map((column) => written(row, column)).join(" | ")} |`)].join("\n");
    },
    latex: () => {
      const { heads, all, rows } = grid();
      const LATEX = { "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "–": "--" };
      const clean = (text) => String(text).replace(/[\\{}&%$#_~^±–]/g, (character) => LATEX[character]);
      const written = (row, column) => {
        const text = clean(withPaper(row, column));
        return { best: `\\textbf{${text}}`, second: `\\underline{${text}}` }[standingOf(row, column)] || text;
      };
      return [`\\begin{tabular}{${all.map((column) => (column.number ? "r" : "l")).join("")}}`, "\\hline",
        `${heads.map(clean).join(" & ")} \\\\`, "\\hline",
        ...rows.map((row) => `${all.map((column) => written(row, column)).join(" & ")} \\\\`), "\\hline", "\\end{tabular}"].join("\n");
    },
    csv: () => {
      const { heads, all, rows } = grid();
      const clean = (text) => (/[",\n\r]/.test(text) ? `"${String(text).replaceAll('"', '""')}"` : String(text));
      return [heads.map(clean).join(","), ...rows.map((row) => all.map((column) => clean(withPaper(row, column))).join(","))].join("\r\n");
    },
  };

  const copy = async (kind) => {
    const text = copies[kind]();
    byId("copy-text").value = text;
    try {
      await navigator.clipboard.writeText(text);
      fill(byId("copied"), "Copied.");
      byId("copy-box").hidden = true;
    } catch {
      fill(byId("copied"), "The browser does not let a page copy:");
      byId("copy-box").hidden = false;
      byId("copy-text").select();
    }
  };
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button.dataset.copy));

  return { draw };
};
