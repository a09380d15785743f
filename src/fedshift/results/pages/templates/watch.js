// The live page: asks for the state, shows it, and asks again; a server that is gone is waited for.

(() => {
  const { byId, make, fill, look, draw } = page;
  const PAUSE = 2000;
  let state = null;

  const table = () => {
    const heads = ["run", "state", "rounds", "", "pace", "left", "loss"];
    fill(byId("runs"),
      make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col", class: ["rounds", "loss"].includes(head) ? "n" : "" }, head)))),
      make("tbody", {}, ...state.runs.map((run) => make("tr", {},
        make("th", { scope: "row", title: run.folder }, run.name),
        make("td", {}, make("span", { class: `state ${run.state}` }, run.state)),
        make("td", { class: "n" }, `${run.done} / ${run.rounds}`),
        make("td", {}, make("progress", { value: String(run.done), max: String(run.rounds || 1), "aria-label": `${run.name}: ${run.done} of ${run.rounds} rounds` })),
        make("td", {}, run.pace), make("td", {}, run.eta), make("td", { class: "n" }, run.value)))));
  };

  const methodOf = (run) => run.name.replace(/ seed -?\d+$/, "");

  const curves = () => {
    const titles = [...new Set(state.runs.flatMap((run) => run.curves.map((curve) => curve.title)))];
    page.options(byId("curve"), titles.map((title) => [title, title]));
    const chosen = byId("curve").value;
    const methods = [...new Set(state.runs.map(methodOf))];
    const seen = {};
    const traces = state.runs.flatMap((run) => {
      const curve = run.curves.find((one) => one.title === chosen);
      if (!curve) return [];
      const method = methodOf(run);
      seen[method] = (seen[method] ?? -1) + 1;
      const { colour: ink, symbol, dash } = look(methods.indexOf(method), seen[method]);
      return [{ x: curve.x, y: curve.y, title: run.name, mode: "lines+markers", line: { color: ink, width: 2, dash }, marker: { color: ink, symbol, size: 5 }, hovertemplate: `round %{x}: %{y:.4g} ${curve.unit}<extra>%{fullData.name}</extra>` }];
    });
    draw("curves-plot", traces, { height: 380, xaxis: { title: { text: "round" }, rangemode: "tozero" }, yaxis: { title: { text: page.plain(chosen) } } });
  };

  const losses = () => {
    const told = state.runs.filter((run) => run.losses.length);
    byId("losses-box").hidden = !told.length;
    if (!told.length) return;
    const before = byId("run").value;
    page.options(byId("run"), told.map((run) => [run.folder, run.name]));
    if (!before) byId("run").value = (told.find((run) => run.state === "training") || told[0]).folder;
    const run = told.find((one) => one.folder === byId("run").value);
    const names = run.losses.map(([name]) => page.plain(name));
    draw("losses-plot", [{ type: "bar", x: names, y: run.losses.map(([, value]) => value), marker: { color: look(0).colour }, hovertemplate: "%{x}: %{y:.4g}<extra></extra>" }], { height: 320, xaxis: { type: "category" }, yaxis: { title: { text: "loss, nats" }, rangemode: "tozero" } });
  };

  const show = () => {
    if (!state) return;
    fill(byId("counts"), state.counts || "no runs yet");
    fill(byId("eta"), state.eta);
    fill(byId("total-text"), `${state.done} of ${state.rounds} rounds`);
    byId("total").value = state.done;
    byId("total").max = state.rounds || 1;
    table();
    byId("failures-box").hidden = !state.failures.length;
    fill(byId("failures"), ...state.failures.map((text) => make("li", {}, text)));
    curves();
    losses();
    document.documentElement.dataset.ready = "yes";
  };

  const ask = async () => {
    try {
      const answer = await fetch("/state", { cache: "no-store", signal: AbortSignal.timeout(10 * PAUSE) });
      if (!answer.ok) throw new Error(String(answer.status));
      state = await answer.json();
      fill(byId("when"), `as of ${state.now}`);
      document.documentElement.dataset.connected = "yes";
      show();
    } catch {
      fill(byId("when"), "not connected: is fedshift watch still running? Trying again.");
      document.documentElement.dataset.connected = "no";
    }
    setTimeout(ask, PAUSE);
  };

  byId("curve").addEventListener("change", show);
  byId("run").addEventListener("change", show);
  page.theme(byId("theme"), show);
  ask();
})();
