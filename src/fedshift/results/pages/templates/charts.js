// The pictures. Each is a function that draws what the state asks for; numbers come from Python as they are.

const charts = (data, state) => {
  const { make, fill, byId, look, plain, faded, colour, draw } = page;
  const { views, table } = data;
  const MOST_ROWS = 24; // in a picture
  const MOST_LINES = 5; // that are on at first where they would hide each other

  const measure = () => views.measures.find((one) => one.key === state.measure);
  const axisTitle = () => `${measure().title}, ${measure().unit}`;
  const cellsNow = () => table.cells[`${state.rule}/${state.measure}/${state.part}`];
  const valueOf = (row, column) => (cellsNow()[row][column] ? cellsNow()[row][column][0] : null);
  const textOf = (row, column) => (cellsNow()[row][column] ? cellsNow()[row][column][1] : "–");
  const view = () => `${state.rule}/${state.measure}`;
  const streamTitle = (column = state.stream) => views.columns[column].title;
  const styled = (row, more = {}) => {
    const { colour: ink, symbol } = look(views.rows[row].hue, views.rows[row].mark);
    return { color: ink, symbol, size: 9, line: { width: 1.5, color: ink }, ...more };
  };
  // Rows that have a value of this stream, the best first.
  const ranked = (column) => {
    const sign = measure().higher ? -1 : 1;
    return state.rows().filter((row) => valueOf(row, column) !== null).sort((a, b) => sign * (valueOf(a, column) - valueOf(b, column)));
  };
  const tall = (count) => Math.max(260, 70 + 27 * count);
  const upwards = (rows) => ({ automargin: true, categoryorder: "array", categoryarray: rows.map((row) => plain(views.rows[row].name)).reverse(), gridcolor: colour("grid") });

  const made = {};

  // ---- learning curves -------------------------------------------------------------------------------------------------
  if (data.curves) {
    page.options(byId("curve"), data.curves.map((curve, k) => [k, curve.title]));
    made.curves = () => {
      const curve = data.curves[Number(byId("curve").value)];
      const named = new Set(state.rows().map((row) => [views.rows[row].method, ...views.sweep.map((key, k) => views.rows[row].point[k] && `${key} = ${views.rows[row].point[k]}`)].filter(Boolean).join(", ")));
      const lines = curve.series.filter((line) => named.has(line.name)).slice(0, MOST_ROWS);
      const traces = lines.flatMap((line) => {
        const { colour: ink, symbol, dash } = look(line.hue);
        const name = plain(line.name); // as plotly is given it
        const band = line.low ? [{
          x: [...line.x, ...[...line.x].reverse()], y: [...line.high, ...[...line.low].reverse()], fill: "toself", fillcolor: faded(ink, 0.13),
          line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false, legendgroup: name,
        }] : [];
        return [...band, {
          x: line.x, y: line.y, title: line.name, legendgroup: name, mode: "lines+markers", line: { color: ink, width: 2, dash },
          marker: { color: ink, symbol, size: line.x.length > 40 ? 3 : 6 }, hovertemplate: `${name}<br>round %{x}: %{y:.4g} ${curve.unit}<extra></extra>`,
        }];
      });
      draw("curves-plot", traces, { xaxis: { title: { text: "round" }, rangemode: "tozero" }, yaxis: { title: { text: plain([curve.title, curve.unit].filter(Boolean).join(", ")) } }, height: 430 });
    };
    byId("curve").addEventListener("change", () => made.curves());
  }

  // ---- clients: a radar for few, a strip for many ----------------------------------------------------------------------
  if (data.clients) {
    const { names, values, worst, all, few } = data.clients;
    made.clients = () => {
      const k = state.stream;
      const kept = values[view()] ? view() : Object.keys(values)[0];
      const [own, found] = [names[k], values[kept][k]];
      const rows = ranked(k).filter((row) => found[row]).slice(0, MOST_ROWS);
      const count = all[k];
      const said = `${count} client${count === 1 ? "" : "s"} on ${streamTitle()}${kept === view() ? "" : `, ${kept.split("/")[1]} (too many clients to keep every measure in a page)`}`;
      const radar = own.length >= 3 && own.length <= few;
      fill(byId("clients-says"), radar ? `${said}. The outer ring is better where higher is better; press a name to add or remove it.` : `${said}. Every dot is a client; a row that reaches far to one side serves some of them badly.`);
      if (radar) {
        const traces = rows.map((row, place) => ({
          type: "scatterpolar", r: [...found[row], found[row][0]], theta: [...own, own[0]].map(plain), title: views.rows[row].name, mode: "lines+markers",
          visible: place < MOST_LINES ? true : "legendonly", line: { color: styled(row).color, width: 2, dash: look(views.rows[row].hue, views.rows[row].mark).dash }, marker: styled(row, { size: 7 }),
          hovertemplate: "%{theta}: %{r:.4g}<extra>%{fullData.name}</extra>",
        }));
        const grid = { gridcolor: colour("line"), linecolor: colour("line") };
        draw("clients-plot", traces, { height: Math.min(540, 60 + byId("clients-plot").clientWidth), margin: { l: 40, r: 40, t: 30, b: 30 }, polar: { bgcolor: "rgba(0,0,0,0)", radialaxis: { ...grid, angle: 90, tickangle: 90, nticks: 6, tickfont: { size: 11 } }, angularaxis: grid } });
      } else {
        const traces = rows.map((row) => ({
          x: found[row], y: own.map(() => plain(views.rows[row].name)), text: own.map(plain), mode: "markers", showlegend: false, marker: styled(row, { size: 8, opacity: 0.65 }),
          hovertemplate: "%{text}: %{x:.4g}<extra>%{y}</extra>",
        }));
        draw("clients-plot", traces, { height: tall(rows.length), xaxis: { title: { text: axisTitle() } }, yaxis: upwards(rows) });
      }
      const listed = worst[kept][k];
      fill(byId("worst"),
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "row"), ...["worst", "second worst", "third worst"].map((head) => make("th", { scope: "col" }, head)))),
        make("tbody", {}, ...state.rows().filter((row) => listed[row].length).map((row) => make("tr", {},
          make("th", { scope: "row" }, views.rows[row].name),
          ...[0, 1, 2].map((place) => make("td", {}, listed[row][place] ? `${listed[row][place][0]}: ${listed[row][place][2]}` : ""))))));
    };
  }

  // ---- classes ---------------------------------------------------------------------------------------------------------
  if (data.classes) {
    const { names, found, square } = data.classes;
    made.classes = () => {
      const shown = found[state.rule][state.stream];
      const rows = state.rows().filter((row) => shown[row]);
      page.options(byId("class-row"), rows.map((row) => [row, views.rows[row].name]));
      if (!byId("class-row").dataset.touched) byId("class-row").value = ranked(state.stream).find((row) => shown[row]) ?? "";
      const own = shown[Number(byId("class-row").value)];
      const none = !rows.length || !own;
      fill(byId("classes-says"), none ? `Nothing is known of classes on ${streamTitle()} at this round.` : `Samples of all clients and seeds on ${streamTitle()}. Each line of the picture is a true class, in percent.`);
      byId("classes-plot").hidden = none || !square;
      fill(byId("recall"));
      fill(byId("mistakes"));
      if (none) return;
      if (square) {
        draw("classes-plot", [{
          type: "heatmap", z: own.shares, x: names.map(plain), y: names.map(plain), customdata: own.counts, zmin: 0, zmax: 100, xgap: 1, ygap: 1,
          colorscale: [[0, colour("low")], [1, colour("high")]], showscale: false, ...(names.length <= 12 ? { texttemplate: "%{z:.0f}", textfont: { size: 11 } } : {}),
          hovertemplate: "%{y} taken for %{x}: %{customdata} (%{z} %)<extra></extra>",
        }], { height: Math.min(560, 130 + 34 * names.length), xaxis: { title: { text: "taken for" }, type: "category", showgrid: false }, yaxis: { title: { text: "true class" }, type: "category", autorange: "reversed", showgrid: false } });
      }
      const share = (value) => (value === null ? "–" : value.toFixed(1));
      fill(byId("recall"),
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "class"), ...["recall, %", "precision, %", "samples"].map((head) => make("th", { scope: "col", class: "n" }, head)))),
        make("tbody", {}, ...own.recall.map(([k, recall, precision, samples]) => make("tr", {}, make("th", { scope: "row" }, names[k]),
          make("td", { class: "n" }, share(recall)), make("td", { class: "n" }, share(precision)), make("td", { class: "n" }, String(samples))))));
      fill(byId("mistakes"), own.mistakes.map(([label, taken, count, percent]) => `${names[label]} taken for ${names[taken]}: ${count} (${share(percent)} %)`).join("; ") || "None.");
    };
    byId("class-row").addEventListener("change", () => { byId("class-row").dataset.touched = "yes"; made.classes(); });
  }

  // ---- calibration -----------------------------------------------------------------------------------------------------
  if (data.calibration) {
    made.calibration = () => {
      const bins = data.calibration.bins[state.stream];
      const rows = ranked(state.stream).filter((row) => bins[row]).slice(0, MOST_ROWS);
      const traces = rows.map((row, place) => ({
        x: bins[row].map((bin) => bin[0]), y: bins[row].map((bin) => bin[1]), customdata: bins[row].map((bin) => bin[2]), title: views.rows[row].name, mode: "lines+markers",
        visible: place < MOST_LINES ? true : "legendonly", line: { color: styled(row).color, width: 2, dash: look(views.rows[row].hue, views.rows[row].mark).dash }, marker: styled(row, { size: 7 }),
        hovertemplate: "%{x:.3g} % sure, %{y:.3g} % right, %{customdata} samples<extra>%{fullData.name}</extra>",
      }));
      const even = { x: [0, 100], y: [0, 100], mode: "lines", line: { dash: "dash", color: colour("soft"), width: 1.5 }, hoverinfo: "skip", showlegend: false };
      draw("calibration-plot", [even, ...traces], { height: 460, xaxis: { title: { text: "confidence, %" }, range: [0, 102] }, yaxis: { title: { text: "right, %" }, range: [0, 102] } });
    };
  }

  // ---- robustness ------------------------------------------------------------------------------------------------------
  if (data.robustness) {
    const { columns, severities, lost } = data.robustness;
    made.robustness = () => {
      const rows = state.rows().filter((row) => columns.some((k) => valueOf(row, k) !== null)).slice(0, MOST_ROWS);
      const spans = rows.map((row) => {
        const own = columns.map((k) => valueOf(row, k)).filter((value) => value !== null);
        return { x: own, y: own.map(() => plain(views.rows[row].name)), mode: "lines", line: { color: colour("line"), width: 5 }, hoverinfo: "skip", showlegend: false };
      });
      const dots = columns.map((k, place) => {
        const { colour: ink, symbol } = look(place);
        const own = rows.filter((row) => valueOf(row, k) !== null);
        return {
          x: own.map((row) => valueOf(row, k)), y: own.map((row) => plain(views.rows[row].name)), customdata: own.map((row) => textOf(row, k)), title: streamTitle(k), mode: "markers",
          marker: { color: ink, symbol, size: 10, line: { width: 1, color: colour("paper") } }, hovertemplate: `%{y}<br>${plain(streamTitle(k))}: %{customdata}<extra></extra>`,
        };
      });
      draw("robustness-plot", [...spans, ...dots], { height: tall(rows.length) + 50, xaxis: { title: { text: axisTitle() } }, yaxis: upwards(rows) });
      byId("severity-box").hidden = !severities.length;
      if (severities.length) {
        const traces = severities.flatMap((group, place) => rows.map((row) => {
          const { colour: ink, symbol, dash } = look(views.rows[row].hue, views.rows[row].mark);
          return {
            x: group.x, y: group.columns.map((k) => valueOf(row, k)), title: severities.length > 1 ? `${views.rows[row].name}, ${group.title}` : views.rows[row].name, mode: "lines+markers",
            visible: place ? "legendonly" : true, line: { color: ink, width: 2, dash }, marker: { color: ink, symbol, size: 8 }, hovertemplate: "severity %{x}: %{y:.4g}<extra>%{fullData.name}</extra>",
          };
        }));
        draw("severity-plot", traces, { height: 420, xaxis: { title: { text: "severity" }, dtick: 1 }, yaxis: { title: { text: axisTitle() } } });
      }
      const shifted = columns.map((_, place) => place).filter((place) => lost.some((row) => row[place]));
      fill(byId("lost"),
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "row"), ...shifted.map((place) => make("th", { scope: "col", class: "n" }, streamTitle(columns[place]))))),
        make("tbody", {}, ...state.rows().filter((row) => lost[row].some(Boolean)).map((row) => make("tr", {}, make("th", { scope: "row" }, views.rows[row].name),
          ...shifted.map((place) => make("td", { class: "n" }, lost[row][place] ? lost[row][place][0] + (lost[row][place][1] ? ", noise" : "") : "–"))))));
    };
  }

  // ---- what adapters tell ----------------------------------------------------------------------------------------------
  if (data.telemetry) {
    page.options(byId("told"), data.telemetry.map((told, k) => [k, `${views.rows[told.row].name}: ${told.name}`]));
    made.telemetry = () => {
      const told = data.telemetry[Number(byId("told").value)];
      const found = told.found[state.rule] || [];
      const traces = views.columns.flatMap((column, k) => {
        if (!found[k]) return [];
        const { shares } = found[k];
        const { colour: ink, dash } = look(k);
        const edges = [...shares, 0].map((_, bin) => bin / shares.length);
        return [{ x: edges, y: [...shares, shares.at(-1)], title: column.title, mode: "lines", line: { shape: "hv", color: ink, width: 2, dash }, fill: "tozeroy", fillcolor: faded(ink, 0.1), hovertemplate: `${plain(column.title)}: %{y} % of samples<extra></extra>` }];
      });
      draw("telemetry-plot", traces, { height: 340, xaxis: { title: { text: plain(told.name) }, range: [0, 1] }, yaxis: { title: { text: "samples, %" }, rangemode: "tozero" } });
      fill(byId("told-table"),
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "row"), make("th", { scope: "col" }, "what"), ...views.columns.map((column) => make("th", { scope: "col", class: "n" }, column.title)))),
        make("tbody", {}, ...data.telemetry.map((one) => make("tr", {}, make("th", { scope: "row" }, views.rows[one.row].name), make("td", {}, one.name),
          ...views.columns.map((_, k) => make("td", { class: "n" }, (one.found[state.rule] || [])[k] ? one.found[state.rule][k].text : "–"))))));
    };
    byId("told").addEventListener("change", () => made.telemetry());
  }

  // ---- features --------------------------------------------------------------------------------------------------------
  if (data.features && data.features.maps.length) {
    page.options(byId("map"), data.features.maps.map((map, k) => [k, map.name]));
    made.features = () => {
      const map = data.features.maps[Number(byId("map").value)];
      const traces = map.classes.map((name, label) => {
        const own = map.label.flatMap((value, k) => (value === label ? [k] : []));
        return {
          x: own.map((k) => map.x[k]), y: own.map((k) => map.y[k]), title: name, mode: "markers", text: own.map((k) => plain(`${map.clients[map.client[k]]}, taken for ${map.classes[map.prediction[k]]}`)),
          marker: { color: look(label).colour, symbol: own.map((k) => page.SYMBOLS[map.client[k] % page.SYMBOLS.length] + (label >= page.HUES ? "-open" : "")), size: 7, opacity: 0.75 },
          hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
        };
      });
      const bare = { showticklabels: false, showgrid: false };
      draw("features-plot", traces, { height: 520, xaxis: bare, yaxis: { ...bare, scaleanchor: "x" } });
    };
    byId("map").addEventListener("change", () => made.features());
  }

  // ---- costs -----------------------------------------------------------------------------------------------------------
  if (data.costs && data.costs.axes.length) {
    page.options(byId("axis"), data.costs.axes.map((axis, k) => [k, axis.title]));
    made.costs = () => {
      const axis = data.costs.axes[Number(byId("axis").value)];
      const rows = state.rows().filter((row) => axis.values[row] !== null && valueOf(row, state.stream) !== null).slice(0, 2 * MOST_ROWS);
      const traces = rows.map((row) => ({
        x: [axis.values[row]], y: [valueOf(row, state.stream)], customdata: [[axis.texts[row], textOf(row, state.stream)]], title: views.rows[row].name, mode: "markers",
        marker: styled(row, { size: 12 }), hovertemplate: "%{customdata[0]}; %{customdata[1]}<extra>%{fullData.name}</extra>",
      }));
      draw("costs-plot", traces, { height: 440, xaxis: { title: { text: plain(axis.title) } }, yaxis: { title: { text: `${axisTitle()}, on ${plain(streamTitle())}` } } });
    };
    byId("axis").addEventListener("change", () => made.costs());
  }

  return made;
};
